"""Weights that move outside of ``optimizer.step()``: by hand in the loop, or by other methods of an optimizer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.sgd import sgd

import accel
from tests.backends import need
from tests.distributed import refusals, run
from tests.engines.test_averaging import known
from tests.models import mlp

WHOLE = ["ddp", "sharded", "deferred"]
STEPS = 3


def net() -> nn.Sequential:
    return mlp(4, 6, 6, 3)


class Pair:
    """A model on all ranks, and one process's on the whole batch, trained by the same loop."""

    def __init__(self, backend: Any, optimizer: Callable[[nn.Module], Any] | None = None) -> None:
        self.raw, self.reference = net(), net()
        self.raw_optimizer = optimizer(self.raw) if optimizer else None
        self.model, handle, _ = accel.setup(self.raw, self.raw_optimizer, backend=backend)
        self.optimizers = [handle, optimizer(self.reference) if optimizer else None]
        self.replica, self.replicas = accel.data_parallel_place(self.model)
        self.step = 0

    def both(self) -> Iterator[tuple[Any, Any, torch.Tensor]]:
        """Model, optimizer and part of the next batch."""
        self.step += 1
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.step))
        yield self.reference, self.optimizers[1], x
        yield self.model, self.optimizers[0], x.chunk(self.replicas)[self.replica]

    def check(self) -> None:
        full, x = accel.full_state_dict(self.model), torch.ones(2, 4)
        for name, value in self.reference.state_dict().items():
            torch.testing.assert_close(full[name], value, rtol=0, atol=1e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023
        with torch.no_grad():
            torch.testing.assert_close(self.model(x), self.reference(x), rtol=0, atol=1e-5)


def loss_of(model: nn.Module, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return F.mse_loss(model(x * scale), x[:, :3].sin())


@contextlib.contextmanager
def backend_of(backend: Any) -> Iterator[Any]:
    with known() if backend == "deferred" else contextlib.nullcontext():
        yield backend
        accel.teardown()


# -- updates by hand ----------------------------------------------------------------------------------------------------


def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:  # in a pipeline each rank has its stage
            p.data.add_(-0.3 * p.grad)
            p.grad = None


def in_place(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            with torch.no_grad():
                p -= 0.3 * p.grad
            p.grad.zero_()


def replaced(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.data = p.data - 0.3 * p.grad
    model.zero_grad()


def functional(model: nn.Module) -> None:
    parameters = [p for p in model.parameters() if p.grad is not None]
    momentum = [torch.zeros_like(p) for p in parameters]
    with torch.no_grad():
        sgd(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            momentum,
            weight_decay=0.01,
            momentum=0.9,
            lr=0.3,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
    model.zero_grad(set_to_none=False)


def plain(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model, x).backward()


def accumulated(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model, x).backward()
    loss_of(model, x, 2.0).backward()


def without_reduction(model: nn.Module, x: torch.Tensor) -> None:
    with accel.no_sync(model) if type(model) is not nn.Sequential else contextlib.nullcontext():
        loss_of(model, x).backward()
    loss_of(model, x, 2.0).backward()


def only_without_reduction(model: nn.Module, x: torch.Tensor) -> None:
    with accel.no_sync(model) if type(model) is not nn.Sequential else contextlib.nullcontext():
        loss_of(model, x).backward()


def crossed(model: nn.Module, x: torch.Tensor) -> None:
    first, second = loss_of(model, x), loss_of(model, x, 2.0)
    first.backward()
    second.backward()


def twice(model: nn.Module, x: torch.Tensor) -> None:
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def clipped(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model, x).backward()
    if type(model) is nn.Sequential:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        accel.clip_grad_norm_(model, 0.1)


def clipped_by_torch(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def train_by_hand(backend: Any, backwards: list[Any], updates: list[Any]) -> None:
    for backward, update in [*((b, by_data) for b in backwards), *((plain, u) for u in updates)]:
        with backend_of(backend):
            pair = Pair(backend)
            for _ in range(STEPS):
                for model, _, x in pair.both():
                    backward(model, x)
                    update(model)
            pair.check()


@pytest.mark.parametrize("backend", [*WHOLE, *(accel.DeepSpeed(stage=s) for s in (1, 2)), "fsdp", "pipeline"], ids=str)
def test_updates_by_hand(backend: Any) -> None:
    backwards = [plain, accumulated, without_reduction, clipped, clipped_by_torch]
    if backend not in ("pipeline", "fsdp"):
        backwards += [crossed, twice]
    need("sharded" if backend == "deferred" else backend, 2)
    updates = [by_data, in_place, functional]
    if backend != "fsdp":  # FSDP2 computes with the shards that it knows, whatever p.data is set to
        updates.append(replaced)
    run(2, train_by_hand, backend, backwards, updates)


def frozen_then_trained() -> None:
    """A model set up for evaluation, which gets gradients, then is frozen, then has an optimizer."""
    pair = Pair(accel.DeepSpeed(stage=3))
    x = torch.ones(2, 4, requires_grad=True)
    loss_of(pair.model, x).backward()
    pair.model.zero_grad()
    pair.model.requires_grad_(False)
    loss_of(pair.model, x).backward()
    assert x.grad is not None
    pair.model.requires_grad_(True)
    optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.3)
    pair.optimizers = [
        accel.setup(pair.model, optimizer).optimizers,
        torch.optim.SGD(pair.reference.parameters(), lr=0.3),
    ]
    for _ in range(STEPS):
        for model, optimizer, x in pair.both():
            optimizer.zero_grad()
            plain(model, x)
            optimizer.step()
    pair.check()


def test_a_model_without_an_optimizer_may_be_frozen_or_get_one() -> None:
    run(2, frozen_then_trained)


def some_by_hand(backend: Any) -> None:
    """An optimizer steps most parameters; the last layer is updated by hand, and clipped to a box."""
    with backend_of(backend):
        pair = Pair(backend, lambda m: torch.optim.AdamW(m[:4].parameters(), lr=0.05))
        for step in range(STEPS + 1):
            for model, optimizer, x in pair.both():
                optimizer.zero_grad()
                backward = {1: without_reduction, 3: only_without_reduction}.get(step, plain)
                backward(model, x)
                if step == 2:
                    clipped_by_torch(model, x) if model is pair.reference else clipped(model, x)
                optimizer.step()
                by_data(model[4])
                for p in model.parameters():
                    p.data.clamp_(-0.4, 0.4)
        pair.check()


@pytest.mark.parametrize("backend", [*WHOLE, "fsdp"], ids=str)
def test_some_parameters_are_updated_by_hand(backend: Any) -> None:
    run(2, some_by_hand, backend)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        h = self.trunk(x)
        return self.left(h) if left else self.right(h)


def other_branches(backend: Any) -> None:
    with backend_of(backend):
        raw, reference = Branches(), Branches()
        model = accel.setup(raw, backend=backend).model
        for step in range(STEPS):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            (sum(reference(part, bool(r)).square().mean() for r, part in enumerate(x.chunk(2))) / 2).backward()
            model(x.chunk(2)[accel.rank()], bool(accel.rank())).square().mean().backward()
            by_data(reference)
            by_data(model)
        for p, q in zip(raw.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", [*WHOLE[1:], accel.DDP(find_unused_parameters=True)], ids=str)
def test_each_rank_uses_other_parameters(backend: Any) -> None:
    run(2, other_branches, backend)


def unused_by_hand() -> None:
    raw = Branches()
    model = accel.setup(raw, backend="ddp").model
    for _ in range(2):
        model(torch.full((2, 4), float(accel.rank())), True).sum().backward()
        by_data(model)


def test_gradients_that_a_reducer_did_not_finish_are_not_lost_after_an_update_by_hand() -> None:
    for text in refusals(2, unused_by_hand, error="BackendError"):
        assert "right.weight" in text


# -- weights that the loop writes beside the optimizer ------------------------------------------------------------------

OFFLOAD = accel.DeepSpeed(stage=1, offload_optimizer=True)


def write(model: nn.Module, how: str) -> None:
    for p in model.parameters():
        if how == "data":
            p.data.clamp_(-0.2, 0.2)
        elif how == "in place":
            with torch.no_grad():
                p.mul_(0.9)
        else:
            p.data = p.data * 0.9


def written(backend: Any, how: str) -> None:
    with backend_of(backend):
        pair = Pair(backend, lambda m: torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9))
        for _ in range(STEPS):
            for model, optimizer, x in pair.both():
                optimizer.zero_grad()
                plain(model, x)
                optimizer.step()
                write(model, how)
        pair.check()
        accel.teardown(pair.model)
        for p, q in zip(pair.raw.parameters(), pair.reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["fsdp", accel.DeepSpeed(stage=1), accel.DeepSpeed(stage=2), OFFLOAD], ids=str)
def test_weights_written_between_steps(backend: Any) -> None:
    for how in ("data", "in place", *(() if backend == "fsdp" else ("replaced",))):
        run(2, written, backend, how)


def averaged_for_evaluation(backend: Any) -> None:
    """The usual moving average of weights, which puts its own tensors in the parameters' places and takes them out again."""
    with backend_of(backend):
        pair = Pair(backend, lambda m: torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9))
        shadows: dict[int, Any] = {
            id(m): {n: p.data.clone() for n, p in m.named_parameters()} for m in (pair.model, pair.reference)
        }
        for _ in range(STEPS):
            for model, optimizer, x in pair.both():
                optimizer.zero_grad()
                plain(model, x)
                optimizer.step()
                for name, p in model.named_parameters():
                    shadows[id(model)][name].lerp_(p.data, 0.5)
            backup = {}
            for model in (pair.model, pair.reference):
                for name, p in model.named_parameters():
                    backup[id(model), name], p.data = p.data, shadows[id(model)][name]
            with torch.no_grad():
                torch.testing.assert_close(pair.model(x), pair.reference(x), rtol=0, atol=1e-5)
            for model in (pair.model, pair.reference):
                for name, p in model.named_parameters():
                    p.data = backup[id(model), name]
        pair.check()


@pytest.mark.parametrize("backend", ["ddp", "sharded", accel.DeepSpeed(stage=1), OFFLOAD], ids=str)
def test_a_moving_average_of_weights(backend: Any) -> None:
    run(2, averaged_for_evaluation, backend)


def refused_shape() -> None:
    pair = Pair(accel.DeepSpeed(stage=1), lambda m: torch.optim.SGD(m.parameters(), lr=0.3))
    plain(pair.model, torch.ones(2, 4))
    pair.raw[2].weight.data = pair.raw[2].weight.data.double()
    with pytest.raises(accel.BackendError, match="2.weight"):
        pair.optimizers[0].step()


def test_weights_of_another_dtype_are_refused_at_the_step() -> None:
    run(2, refused_shape)


# -- methods of optimizers ----------------------------------------------------------------------------------------------

KEPT = ["ddp", "sharded", "deferred", "fsdp"]


class Averaged(torch.optim.Optimizer):
    """SGD on ``z``, gradients at a mixture of ``z`` and its average ``x``, as schedule-free optimizers do (arXiv 2405.15682)."""

    def __init__(self, parameters: Any, lr: float = 0.3, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "training": True})

    def _move(self, training: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["training"] is not training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))
                group["training"] = training

    @torch.no_grad()
    def eval(self) -> None:
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self) -> None:
        self._move(True, lambda beta: 1 - beta)

    def restart(self) -> None:
        """Goes on from the average."""
        self.eval()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["z"].copy_(p.detach())
        self.train()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def averages(backend: Any, directory: str) -> None:
    with backend_of(backend):
        pair = Pair(backend, lambda m: Averaged(m.parameters()))
        for epoch in range(2):
            for _ in range(STEPS):
                for model, optimizer, x in pair.both():
                    optimizer.zero_grad()
                    plain(model, x)
                    optimizer.step()
            for optimizer in (
                (pair.optimizers[0], pair.raw_optimizer)[epoch],
                pair.optimizers[1],
            ):  # the handle, then the raw one
                optimizer.eval()
            pair.check()
            if epoch == 0:
                accel.save({"model": pair.model}, directory)
                fresh = net()
                accel.load(directory, {"model": fresh})
                for p, q in zip(fresh.parameters(), pair.reference.parameters(), strict=True):
                    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
            for optimizer in pair.optimizers:
                optimizer.train() if epoch == 0 else optimizer.restart()
            pair.check()


@pytest.mark.parametrize("backend", KEPT, ids=str)
def test_an_optimizer_that_moves_weights_for_evaluation(backend: Any, tmp_path: Any) -> None:
    run(2, averages, backend, str(tmp_path / "saved"))


class Sharpness(torch.optim.Optimizer):
    """Ascends by the norm of all gradients, then descends from where it was (Foret et al., arXiv 2010.01412)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.3, "rho": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.3)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def ascend(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * (0.1 / norm))
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.ascend()
        with torch.enable_grad():
            closure()
        self.descend()


def sharpness(backend: Any) -> None:
    with backend_of(backend):
        pair = Pair(backend, lambda m: Sharpness(m.parameters()))
        for step in range(STEPS):
            for model, optimizer, x in pair.both():
                plain(model, x)
                if step == 1:
                    optimizer.step(functools.partial(plain, model, x))
                    continue
                optimizer.ascend()
                plain(model, x)
                optimizer.descend()
        pair.check()


def test_an_optimizer_that_climbs_first() -> None:
    run(2, sharpness, "ddp")


# -- hooks for an optimizer's steps ---------------------------------------------------------------------------------------


def limit(optimizer: Any, *_: Any) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        p.grad.clamp_(-0.01, 0.01)


class Average:
    """Of weights, after each step; one process's and all ranks'."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.values = model, dict[str, torch.Tensor]()

    def __call__(self, *_: Any) -> None:
        for name, p in self._model.named_parameters():
            self.values[name] = self.values.get(name, 0) + p.detach().clone()  # type: ignore[assignment]


def hooked(backend: Any, before: bool) -> None:
    averages: list[Average] = []

    def register(optimizer: Any, model: nn.Module) -> None:
        averages.append(Average(model))
        optimizer.register_step_pre_hook(limit)
        optimizer.register_step_post_hook(averages[-1])

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if before:
            register(optimizer, model)
        return optimizer

    pair = Pair(backend, optimizer_of)
    if not before:
        register(pair.optimizers[0], pair.raw)
        register(pair.optimizers[1], pair.reference)
    for _ in range(STEPS):
        for model, optimizer, x in pair.both():
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    pair.check()
    mine, expected = (average.values for average in averages)
    for name, value in mine.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(whole, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("backend", ["ddp", "sharded", "fsdp", *(accel.DeepSpeed(stage=s) for s in (1, 2))], ids=str)
def test_hooks_see_what_one_process_shows_them_whenever_they_were_registered(backend: Any, before: bool) -> None:
    need(backend, 2)
    run(2, hooked, backend, before)
