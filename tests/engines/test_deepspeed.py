"""DeepSpeed's ZeRO stages on real ranks: exact in every loop, one engine for each model, nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import accel
from accel.engines.deepspeed import DeepSpeed
from accel.registry import registry
from tests.distributed import outcomes, refusals, run
from tests.test_process import free_port

STAGES = (1, 2, 3)
# Without it, models as small as these stay whole at stage 3.
CONFIG = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def zero(stage: int, **options: Any) -> Any:
    return DeepSpeed(stage=stage, config=CONFIG, **options)


class Net(nn.Module):
    """Two branches, odd sizes, a buffer."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh())
        self.left = nn.Linear(7, 3)
        self.right = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, left: bool = True, right: bool = True) -> dict[str, torch.Tensor]:
        h = self.body(x)
        parts = [branch(h) for branch, used in ((self.left, left), (self.right, right)) if used]
        return {"out": sum(parts) * self.scale}

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale

    def size(self) -> torch.Tensor:
        return self.right.weight.square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def data(step: int, rank: int | None = None) -> torch.Tensor:
    """A batch of every rank, or of one."""
    x = torch.randn(accel.world_size(), 4, 5, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[rank]


def loss_of(out: Any) -> torch.Tensor:
    return out["out"].square().mean() if isinstance(out, dict) else out.square().mean()


def mean_loss(model: nn.Module, forward: Callable[[nn.Module, torch.Tensor], Any], step: int) -> torch.Tensor:
    """What one process on the whole batch would have: the mean over the ranks' batches."""
    return torch.stack([loss_of(forward(model, x)) for x in data(step)]).mean()


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in accel.full_state_dict(model).items()}


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k].float() - b[k].float()).abs().max()) for k in a if isinstance(a[k], torch.Tensor))


def states(optimizer: Any) -> dict[str, torch.Tensor]:
    """A plain optimizer's state, flat."""
    found = optimizer.state_dict()["state"]
    return {f"{i}/{k}": torch.as_tensor(v) for i, s in found.items() for k, v in s.items()}


class Pair:
    """The same model trained by accel, and by plain torch on the whole batch."""

    def __init__(self, backend: Any, make: Callable[[nn.Module], Any] = adamw, **options: Any) -> None:
        self.plain, raw = Net(), Net()
        self.plain_optimizer, self.raw_optimizer, self.raw = make(self.plain), make(raw), raw
        self.model, self.optimizer, _ = accel.setup(raw, self.raw_optimizer, backend=backend, **options)

    def check(self, tolerance: float = 1e-5) -> None:
        found = distance(whole(self.model), self.plain.state_dict())
        assert found <= tolerance, found
        mine, theirs = accel.full_state_dict(self.optimizer), self.plain_optimizer.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for index, entries in theirs["state"].items():
            assert distance(mine["state"][index], entries) <= tolerance

    def train(self, steps: range = range(3), forward: Callable[..., Any] = lambda m, x: m(x)) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.plain_optimizer.zero_grad()
            loss_of(forward(self.model, data(step, accel.rank()))).backward()
            mean_loss(self.plain, forward, step).backward()
            self.optimizer.step()
            self.plain_optimizer.step()


# -- loops ------------------------------------------------------------------------------------------------------------


def several_backwards(stage: int) -> None:
    """Two forwards then two backwards, a graph used twice, the raw module, a method."""
    for make in (adamw, momentum):
        pair = Pair(zero(stage), make)
        rank = accel.rank()
        for step in range(3):
            for model, optimizer, batches in (
                (pair.model, pair.optimizer, [data(step, rank)]),
                (pair.plain, pair.plain_optimizer, list(data(step))),
            ):
                optimizer.zero_grad()
                for x in batches:
                    a, b = model(x)["out"].square().mean(), model(-x, right=False)["out"].square().mean()
                    (b / len(batches)).backward()
                    (a / len(batches)).backward(retain_graph=stage != 3)
                    if stage != 3:
                        (a / len(batches)).backward()
                    raw = accel.unwrap(model) if model is pair.model else model
                    (loss_of(raw(x)) / len(batches)).backward()
                    (model.embed(x).abs().mean() / len(batches)).backward()
                optimizer.step()
        pair.check()


def zero_grad_anywhere(stage: int) -> None:
    """After the forward, of the model, without set_to_none, never; and a backward after a clip."""
    pair = Pair(zero(stage), momentum)
    rank = accel.rank()
    for step in range(8):
        for model, optimizer, clip, batches in (
            (pair.model, pair.optimizer, accel.clip_grad_norm_, [data(step, rank)]),
            (pair.plain, pair.plain_optimizer, lambda m, c: nn.utils.clip_grad_norm_(m.parameters(), c), data(step)),
        ):
            losses = [loss_of(model(x)) / len(batches) for x in batches]
            if step in (0, 5):
                optimizer.zero_grad()
            elif step in (1, 4):
                (accel.unwrap(model) if step == 4 else model).zero_grad()
            elif step == 6:
                model.left.zero_grad()
            elif step == 2:
                optimizer.zero_grad(set_to_none=False)
            for loss in losses:
                loss.backward()
            if step in (3, 5):
                norm = clip(model, 0.05)
                assert norm > 0.05
                for x in batches:
                    (loss_of(model(2 * x)) / len(batches)).backward()
            optimizer.step()
    pair.check()


class Counting(torch.optim.SGD):
    """Its ``zero_grad`` has no arguments, fills with zeros, and does more."""

    calls = 0

    def zero_grad(self) -> None:  # type: ignore[override]
        self.calls += 1
        super().zero_grad(set_to_none=False)


def zero_grad_of_its_own(stage: int) -> None:
    config = {"zero_allow_untested_optimizer": True}
    backend = accel.DeepSpeed(stage=stage, config=config)
    pair = Pair(backend, lambda m: Counting(m.parameters(), lr=0.05, momentum=0.9))
    for step in range(4):
        # The unused branch has zeros for gradients, and moves on by its momentum.
        pair.train(range(step, step + 1), lambda m, x, right=step % 2 == 0: m(x, right=right))
    assert pair.raw_optimizer.calls == pair.plain_optimizer.calls == 4  # type: ignore[attr-defined]
    pair.raw_optimizer.zero_grad()
    with pytest.raises(TypeError):
        pair.optimizer.zero_grad(False)
    pair.check()


def unused(stage: int) -> None:
    """A branch that no rank uses is left alone, its decay and its step count too."""
    pair = Pair(zero(stage))
    for step in range(4):
        pair.train(range(step, step + 1), lambda m, x, right=step % 2 == 1: m(x, right=right))
    pair.check()


def closures(stage: int) -> None:
    pair = Pair(zero(stage))
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            pair.optimizer.zero_grad()
            loss = loss_of(pair.model(data(step, accel.rank())))
            loss.backward()
            return loss

        def plain(step: int = step) -> torch.Tensor:
            pair.plain_optimizer.zero_grad()
            loss = mean_loss(pair.plain, lambda m, x: m(x), step)
            loss.backward()
            return loss

        torch.testing.assert_close(pair.optimizer.step(closure), pair.plain_optimizer.step(plain).detach())
    pair.check()


def weights_of_another_module(stage: int) -> None:
    """A method reads what a submodule owns, while it may be gathered ahead for that submodule."""
    pair = Pair(zero(stage))
    pair.train(forward=lambda m, x: {"out": m(x)["out"] + m.size()})
    with torch.no_grad():
        pair.model(data(0))
        torch.testing.assert_close(pair.model.size(), pair.plain.size())
    pair.check()


def raw_objects(stage: int) -> None:
    """The loop may hold the raw optimizer, and a scheduler on either."""
    pair = Pair(zero(stage))
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (pair.raw_optimizer, pair.plain_optimizer)]
    for step in range(5):
        pair.raw_optimizer.zero_grad()
        pair.plain_optimizer.zero_grad()
        loss_of(pair.model(data(step, accel.rank()))).backward()
        mean_loss(pair.plain, lambda m, x: m(x), step).backward()
        pair.raw_optimizer.step()
        pair.plain_optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert pair.raw_optimizer.param_groups[0]["params"][0] is next(pair.raw.parameters())
    pair.check()


def no_sync(stage: int) -> None:
    pair = Pair(zero(stage))
    for step in range(3):
        pair.optimizer.zero_grad()
        pair.plain_optimizer.zero_grad()
        with accel.no_sync(pair.model):
            loss_of(pair.model(data(step, accel.rank()))).backward()
            with accel.no_sync(pair.model):
                loss_of(pair.model(data(step + 10, accel.rank()), left=False)).backward()
        if step:
            loss_of(pair.model(data(step + 20, accel.rank()))).backward()
        for s, left in ((step, True), (step + 10, False), *([(step + 20, True)] if step else [])):
            mean_loss(pair.plain, lambda m, x, left=left: m(x, left=left), s).backward()
        pair.optimizer.step()
        pair.plain_optimizer.step()
    pair.check()


def assigned_between(stage: int) -> None:
    """A gradient that is assigned takes the place of what backward left, and a later backward adds to it."""
    pair = Pair(zero(stage), momentum)
    for step in range(6):
        for model, optimizer, batches, value in (
            (pair.model, pair.optimizer, [data(step, accel.rank())], 2.0 * accel.rank()),
            (pair.plain, pair.plain_optimizer, list(data(step)), 1.0),
        ):
            if step % 3 != 2:
                optimizer.zero_grad()
            for x in batches:
                (loss_of(model(x)) / len(batches)).backward()
            for p in model.parameters():
                p.grad = torch.full(p.shape, value)
            for x in batches if step >= 3 else []:
                (loss_of(model(-x)) / len(batches)).backward()
            optimizer.step()
    pair.check()


LOOPS = [
    *(
        several_backwards,
        zero_grad_anywhere,
        zero_grad_of_its_own,
        unused,
        closures,
        weights_of_another_module,
        raw_objects,
        no_sync,
    ),
    assigned_between,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_every_loop_is_exact(stage: int, loop: Callable[[int], None]) -> None:
    run(2, loop, stage)


# -- one engine for each model ----------------------------------------------------------------------------------------


def evaluate_and_train(stage: int) -> None:
    raw, plain = Net(), Net()
    model, _, _ = accel.setup(raw, backend=zero(stage))
    x = data(99, 0)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x)["out"], plain(x)["out"])
    for _ in range(2):  # then training, with evaluation inside and after
        optimizer = adamw(raw)
        again, handle, _ = accel.setup(raw, optimizer, backend=zero(stage))
        assert again is model
        plain_optimizer = adamw(plain)
        for step in range(3):
            model.train()
            handle.zero_grad()
            plain_optimizer.zero_grad()
            first = loss_of(model(data(step, accel.rank())))
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(x)["out"], plain(x)["out"])
            first.backward()
            mean_loss(plain, lambda m, x: m(x), step).backward()
            with torch.no_grad():
                model(x)
            handle.step()
            plain_optimizer.step()
            with torch.no_grad():
                torch.testing.assert_close(model(x)["out"], plain(x)["out"])
        assert distance(whole(model), plain.state_dict()) <= 1e-5


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_evaluate_then_train_and_back_on_one_engine(stage: int) -> None:
    run(2, evaluate_and_train, stage)


def two_optimizers(stage: int) -> None:
    """One of each class; then a third, and a group that is added."""
    raw, plain = Net(), Net()
    made = []
    for net in (raw, plain):
        made.append([
            torch.optim.SGD(net.body.parameters(), lr=0.05, momentum=0.9),
            torch.optim.AdamW(net.left.parameters(), lr=0.01, weight_decay=0.1),
        ])  # fmt: skip
    model, handles, _ = accel.setup(raw, made[0], backend=zero(stage))
    for step in range(6):
        if step == 2:
            handles[1].add_param_group({"params": list(raw.right.parameters()), "lr": 0.02})
            made[1][1].add_param_group({"params": list(plain.right.parameters()), "lr": 0.02})
        if step == 4:
            for net, optimizers in zip((raw, plain), made, strict=True):
                optimizers.append(torch.optim.RMSprop([net.scale], lr=0.01))
            handles.append(accel.setup(raw, made[0][2])[1])
        for net, optimizers in ((model, handles), (plain, made[1])):
            for optimizer in optimizers:
                optimizer.zero_grad()
            rank = accel.rank()
            (loss_of(net(data(step, rank))) if net is model else mean_loss(plain, lambda m, x: m(x), step)).backward()
            for optimizer in optimizers[: 1 + step % 3]:
                optimizer.step()
    assert distance(whole(model), plain.state_dict()) <= 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_several_optimizers_and_added_groups(stage: int) -> None:
    run(2, two_optimizers, stage)


def gan(first: Any, second: Any) -> None:
    raw, plain = [Net(1), Net(2)], [Net(1), Net(2)]
    head = nn.Linear(3, 5)
    models, optimizers = [], []
    for net, backend in zip(raw, (first, second), strict=True):
        model, optimizer, _ = accel.setup(net, adamw(net), backend=backend)
        models.append(model)
        optimizers.append(optimizer)
    plain_optimizers = [adamw(net) for net in plain]

    def step(g: Any, d: Any, og: Any, od: Any, batches: Any) -> None:
        od.zero_grad()
        for x in batches:
            fake = F.linear(g(x)["out"], head.weight.detach())
            ((d(fake.detach())["out"].mean() - loss_of(d(x))) / len(batches)).backward()
        od.step()
        og.zero_grad()
        for x in batches:
            (loss_of(d(F.linear(g(x)["out"], head.weight.detach()))) / len(batches)).backward()
        og.step()

    with torch.no_grad():
        dist.broadcast(head.weight, 0)
    for number in range(4):
        step(*models, *optimizers, [data(number, accel.rank())])
        step(*plain, *plain_optimizers, list(data(number)))
    for model, net in zip(models, plain, strict=True):
        assert distance(whole(model), net.state_dict()) <= 1e-5


@pytest.mark.parametrize("pair", [(1, 1), (2, 2), (3, 3), ("ddp", 3), (1, 3), (3, 2)], ids=str)
def test_two_models_that_train_each_other(pair: Any) -> None:
    run(2, gan, *(p if isinstance(p, str) else zero(p) for p in pair))


def rlhf() -> None:
    """Actor and critic train on one joint loss; reference and reward are frozen. All four under ZeRO-3."""
    raw, plain = [Net(i) for i in range(4)], [Net(i) for i in range(4)]
    for net in (*raw[2:], *plain[2:]):
        net.requires_grad_(False)
    optimizers = [adamw(net) for net in raw[:2]]
    handles = [accel.setup(n, o, backend=zero(3)) for n, o in zip(raw[:2], optimizers, strict=True)]
    models = [h.model for h in handles] + [accel.setup(n, backend=zero(3)).model for n in raw[2:]]
    plain_optimizers = [adamw(net) for net in plain[:2]]

    def loss(nets: Any, x: torch.Tensor) -> torch.Tensor:
        actor, critic, reference, reward = (n(x)["out"] for n in nets)
        return (actor - reference.detach()).square().mean() + (critic - reward).abs().mean() + (actor * critic).mean()

    before = whole(models[2])
    for step in range(4):
        for h in handles:
            h.optimizers.zero_grad()
        for o in plain_optimizers:
            o.zero_grad()
        loss(models, data(step, accel.rank())).backward()
        torch.stack([loss(plain, x) for x in data(step)]).mean().backward()
        for h in handles:
            h.optimizers.step()
        for o in plain_optimizers:
            o.step()
    for model, net in zip(models, plain, strict=True):
        assert distance(whole(model), net.state_dict()) <= 1e-5
    assert distance(before, whole(models[2])) == 0


def test_actor_critic_reference_and_reward() -> None:
    run(2, rlhf)


# -- trainability, teardown, switching --------------------------------------------------------------------------------


def freeze_and_unfreeze(stage: int) -> None:
    """Frozen at setup, unfrozen later, and back; what is frozen stays put, its state is kept."""
    pair = Pair(zero(stage))
    for number in range(6):
        for net in (pair.raw, pair.plain):
            for name, p in net.named_parameters():
                p.requires_grad_(name.startswith(("left", "scale")) if number in (0, 3) else number != 4 or "2" in name)
        frozen = {n for n, p in pair.plain.named_parameters() if not p.requires_grad}
        before = whole(pair.model)
        pair.train(range(2 * number, 2 * number + 2))
        after = whole(pair.model)
        for name in before:
            assert torch.equal(before[name], after[name]) == (name in frozen), name
        pair.check()


def frozen_at_setup(stage: int) -> None:
    raw, plain = Net(), Net()
    for net in (raw, plain):
        net.body.requires_grad_(False)
    optimizers = adamw(raw), adamw(plain)
    model, handle, _ = accel.setup(raw, optimizers[0], backend=zero(stage))
    for step in range(6):
        if step == 3:
            model.body.requires_grad_(True)
            plain.body.requires_grad_(True)
        handle.zero_grad()
        optimizers[1].zero_grad()
        loss_of(model(data(step, accel.rank()))).backward()
        mean_loss(plain, lambda m, x: m(x), step).backward()
        handle.step()
        optimizers[1].step()
    assert distance(whole(model), plain.state_dict()) <= 1e-5


def frozen_before_the_backward(stage: int) -> None:
    pair = Pair(zero(stage))
    for net, share in ((pair.raw, data(0, accel.rank())), (pair.plain, data(0))):
        loss = loss_of((pair.model if net is pair.raw else net)(share))
        net.left.requires_grad_(False)
        loss.backward()
    pair.optimizer.step()
    pair.plain_optimizer.step()
    pair.check()


@pytest.mark.parametrize("stage", STAGES)
def test_trainability_may_change_at_any_time(stage: int) -> None:
    run(2, freeze_and_unfreeze, stage)
    run(2, frozen_before_the_backward, stage)
    run(2, frozen_at_setup, stage)


def switching() -> None:
    """Through every stage and other backends, optimizer state and pending gradients included."""
    raw, plain = Net(), Net()
    optimizers = adamw(raw), adamw(plain)
    before = {name: set(vars(m)) for name, m in raw.named_modules()}
    parameters = list(raw.parameters())
    for number, backend in enumerate([zero(3), "ddp", zero(1), zero(2), DeepSpeed(stage=0), zero(3), zero(2), "ddp"]):
        model, handle, _ = accel.setup(raw, optimizers[0], backend=backend)
        for step in range(2):
            # The first step of each engine uses gradients that the last one left.
            if step:
                handle.zero_grad()
                optimizers[1].zero_grad()
            loss_of(model(data(2 * number + step, accel.rank()))).backward()
            mean_loss(plain, lambda m, x: m(x), 2 * number + step).backward()
            handle.step()
            optimizers[1].step()
        assert accel.teardown(model) is raw
        assert all(p is q and p.grad is not None for p, q in zip(raw.parameters(), parameters, strict=True))
        assert {name: set(vars(m)) for name, m in raw.named_modules()} == before
        assert not any(vars(p) for p in parameters)
        assert type(raw._parameters) is dict
        for module in raw.modules():
            tables = [v for k, v in vars(module).items() if k.endswith("_hooks")]
            assert tables
            assert not any(tables)
        assert "step" not in vars(optimizers[0])
        assert "zero_grad" not in vars(optimizers[0])
        assert distance(raw.state_dict(), plain.state_dict()) <= 1e-5
        assert distance(states(optimizers[0]), states(optimizers[1])) <= 1e-5
        for p, q in zip(raw.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=0)


def test_switch_to_and_from_every_stage_in_training() -> None:
    run(2, switching)


def collected(stage: int) -> None:
    """The last reference to model and optimizer frees the engine and the weights."""
    pair = Pair(zero(stage))
    pair.train()
    alive = [weakref.ref(pair.raw), weakref.ref(registry.of_handle(pair.model)), weakref.ref(pair.raw.left.weight)]
    del pair
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_dies_with_its_model(stage: int) -> None:
    run(2, collected, stage)


# -- bytes ------------------------------------------------------------------------------------------------------------


def held(stage: int) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state on this rank, in units of one element, after a step."""
    torch.manual_seed(0)
    width = 64
    raw = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 512}}
    model, optimizer, _ = accel.setup(raw, adamw(raw), backend=DeepSpeed(stage=stage, config=config))
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step()
    gc.collect()
    total = 8 * width * width
    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu" and item.dtype is torch.float32:
            with torch._C.DisableTorchFunctionSubclass():  # a divided weight refuses it
                storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            for more in (item.grad if item.is_leaf else None, getattr(item, "ds_tensor", None)):
                if more is not None:
                    sizes[more.untyped_storage().data_ptr()] = more.untyped_storage().nbytes()
    large = sum(size for size in sizes.values() if size >= 4 * width * width // 4)
    assert len(list(raw.parameters())) == 8
    return {"held": large, "unit": 4 * total}


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_on_each_rank(world: int) -> None:
    """ZeRO's own figures for AdamW, in units of the weights: 1 or 1/n for each of weights and gradients, 2/n for state."""
    theory = {1: 1 + 1 / world + 2 / world, 2: 1 + 1 / world + 2 / world, 3: 4 / world}
    for stage in STAGES:
        for found in run(world, held, stage):
            assert found["held"] / found["unit"] == pytest.approx(theory[stage], abs=0.1), stage


# -- state ------------------------------------------------------------------------------------------------------------


def state_verbs(stage: int) -> None:
    """A full state goes in and out; shards tile every tensor once; slots take what shards gave."""
    pair = Pair(zero(stage), precision="32-true")
    pair.train()
    model_state, optimizer_state = whole(pair.model), accel.full_state_dict(pair.optimizer)
    other = Net(9)
    model, optimizer, _ = accel.setup(other, adamw(other), backend=zero(stage))
    assert model.load_state_dict(model_state).missing_keys == []
    optimizer.load_state_dict(optimizer_state)
    pair.model, pair.optimizer, pair.raw = model, optimizer, other
    pair.check()
    pair.train(range(5, 8))
    pair.check()

    engine, raw = registry.of_handle(model), accel.registry.raw(optimizer)
    full = {**whole(model)}
    for index, entries in accel.full_state_dict(optimizer)["state"].items():
        full.update({f"{engine.names[index]}/{k}": v for k, v in entries.items() if v.dim() or k != "step"})
    seen = {name: torch.zeros(value.numel()) for name, value in full.items()}
    shards = [*engine.holdings.shards(None), *engine.holdings.shards(raw)]
    for shard in shards:
        assert shard.shape == tuple(full[shard.name].shape)
        part = full[shard.name].reshape(-1).narrow(0, shard.start, shard.tensor.numel())
        assert torch.equal(part, shard.tensor.reshape(-1))
        seen[shard.name].narrow(0, shard.start, shard.tensor.numel()).add_(1)
    for name, count in seen.items():
        dist.all_reduce(count)
        assert (count == 1).all(), name
    manifest = {name: (tuple(value.shape), value.dtype) for name, value in full.items()}
    values = accel.process.control.agree("values", engine.holdings.values(raw))
    merged = {"groups": values[0]["groups"], "state": {k: v for one in values for k, v in one["state"].items()}}
    third = Net(11)
    model, optimizer, _ = accel.setup(third, adamw(third), backend=zero(stage))
    engine, raw = registry.of_handle(model), accel.registry.raw(optimizer)
    for slot in [*engine.holdings.slots(None, manifest), *engine.holdings.slots(raw, manifest)]:
        slot.tensor.copy_(full[slot.name].reshape(-1).narrow(0, slot.start, slot.tensor.numel()).view_as(slot.tensor))
    engine.holdings.fill(raw, merged)
    engine.holdings.filled()
    pair.model, pair.optimizer, pair.raw = model, optimizer, third
    pair.train(range(8, 10))
    pair.check()


@pytest.mark.parametrize("stage", STAGES)
def test_state_goes_in_and_out(stage: int) -> None:
    run(2, state_verbs, stage)


# -- refusals ---------------------------------------------------------------------------------------------------------


def clip_pending(pair: Pair) -> None:
    loss_of(pair.model(data(1, 0))).backward()
    torch.nn.utils.clip_grad_norm_(list(pair.raw.parameters()), 1.0)


SEES_A_PART: list[Callable[[Pair], Any]] = [
    lambda pair: torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0),
    clip_pending,
    lambda pair: torch.nn.utils.clip_grad_value_(pair.raw.parameters(), 1.0),
    lambda pair: adamw(pair.raw).step(),
    lambda pair: pair.raw_optimizer.state_dict(),
    lambda pair: pair.optimizer.state_dict(),
    lambda pair: pair.raw_optimizer.load_state_dict(pair.plain_optimizer.state_dict()),
    lambda pair: pair.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
]
AT_STAGE_3: list[Callable[[Pair], Any]] = [
    lambda pair: pair.model.state_dict(),
    lambda pair: pair.raw.left.state_dict(),
    lambda pair: copy.deepcopy(pair.model),
]


def refuse_all(stage: int) -> None:
    for refused in SEES_A_PART + (AT_STAGE_3 if stage == 3 else []):
        pair = Pair(zero(stage))
        pair.train(range(1))
        with pytest.raises(accel.AccelError):
            refused(pair)
        pair.train(range(2, 4))
        pair.check()
        accel.teardown()


def edited_in_place() -> None:
    pair = Pair(DeepSpeed(stage=3))  # small weights stay whole
    pair.train()
    before = whole(pair.model)
    with torch.no_grad():
        pair.raw.left.bias.zero_()
    for use in (lambda: pair.model(data(0)), pair.optimizer.step, lambda: accel.full_state_dict(pair.model)):
        with pytest.raises(accel.BackendError, match="left.bias changed in place, which is lost"):
            use()
    pair.model.load_state_dict(before)
    pair.train()
    pair.check()


def test_an_edit_of_divided_weights_is_refused() -> None:
    run(2, edited_in_place)


def assigned_by_hand(stage: int) -> None:
    net = nn.Linear(4, 2)
    model, optimizer, _ = accel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), backend=zero(stage))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()  # what is assigned later takes its place
        if stage:
            accel.clip_grad_norm_(model, 1.0)
        else:
            optimizer.step()
        before = {k: v.clone() for k, v in accel.full_state_dict(model).items()}
        for p in net.parameters():
            p.grad = torch.full_like(p, 2.0 * accel.rank())
        optimizer.step()
        for name, value in accel.full_state_dict(model).items():
            torch.testing.assert_close(value, before[name] - 0.1)
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_assigned_by_hand(stage: int) -> None:
    run(2, assigned_by_hand, stage)


def never_dropped(stage: int) -> list[str]:
    net = nn.Linear(4, 2)
    model, optimizer, _ = accel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), backend=zero(stage))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel").addHandler(handler)
    try:
        for drop in (True, False, False):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if drop:
                model.zero_grad()
                assert not told
            for p in net.parameters():
                p.grad = None
    finally:
        logging.getLogger("accel").removeHandler(handler)
    return told


def test_gradients_that_nothing_dropped_are_told_of() -> None:
    for told in run(2, never_dropped, 2):
        assert len(told) == 1
        assert "call zero_grad()" in told[0]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.blocks[chosen](x)


def evaluated_with_other_blocks() -> None:
    model, _, _ = accel.setup(Branches(), backend=zero(3))
    with torch.no_grad():
        model(torch.ones(1, 4), accel.rank())


def test_ranks_that_gather_other_blocks_of_equal_size() -> None:
    refusals(2, evaluated_with_other_blocks, error="RankMismatchError", breaks=True)


@pytest.mark.parametrize("stage", STAGES)
def test_what_would_see_a_part_raises_and_changes_nothing(stage: int) -> None:
    run(2, refuse_all, stage)


CONTRADICTIONS: list[tuple[Any, dict[str, Any], str]] = [
    ({"optimizer": {"type": "Adam"}}, {}, "'optimizer'"),
    ({"scheduler": {"type": "WarmupLR"}}, {}, "'scheduler'"),
    ({"fp16": {"enabled": True}}, {}, "'fp16'"),
    ({"gradient_accumulation_steps": 4}, {}, "gradient_accumulation_steps"),
    ({"zero_optimization": {"stage": 1}}, {"stage": 2}, "zero_optimization.stage"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, {}, "async_io"),
    ({"bf16": {"enabled": True}}, {}, "precision='bf16-true'"),
    ({"curriculum_learning": {"enabled": True}}, {}, "'curriculum_learning'"),
    ("/nowhere.json", {}, "cannot be read"),
    ({}, {"stage": 2, "offload_parameters": True}, "needs stage 3"),
    ({}, {"stage": 0, "offload_optimizer": True}, "needs stage 1, 2 or 3"),
]


def contradictions() -> None:
    for config, options, text in CONTRADICTIONS:
        raw = Net()
        optimizer = adamw(raw)
        with pytest.raises(accel.AccelError, match=text):
            accel.setup(raw, optimizer, backend=DeepSpeed(config=config, **options))
        assert "zero_grad" not in vars(optimizer)
        assert "zero_grad" not in vars(raw)


def test_a_contradiction_is_refused_by_its_key() -> None:
    run(2, contradictions)


WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"stage": 3, "offload_parameters": True}, "32-true"),
    ({"stage": 1, "offload_optimizer": True}, "32-true"),
    ({"config": {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}}, "32-true"),
    ({"stage": 2, "config": {"bf16": {"enabled": True}}}, "bf16-true"),
]


def alone() -> None:
    for options, precision in WITHOUT_EFFECT:
        raw = Net()
        with pytest.raises(accel.BackendError, match="on one process"):
            accel.setup(raw, adamw(raw), backend=DeepSpeed(**options), precision=precision)


def test_what_one_process_cannot_do_is_refused_there() -> None:
    run(1, alone)


def sparse() -> None:
    raw = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    for backend in (*map(zero, (0, *STAGES)), "fsdp"):
        with pytest.raises(accel.BackendError, match="sparse gradients of 0: use sparse=False"):
            accel.setup(raw, optimizer, backend=backend)


def test_sparse_gradients_are_refused_before_anything_is_divided() -> None:
    run(2, sparse)


def other_optimizers(stage: int) -> None:
    for name in ("LBFGS", "Adafactor"):
        raw = Net()
        with pytest.raises(accel.OptimizerError, match=name):
            accel.setup(raw, getattr(torch.optim, name)(raw.parameters()), backend=zero(stage))
    for name in ("Adagrad", "RMSprop"):
        pair = Pair(zero(stage), lambda m, name=name: getattr(torch.optim, name)(m.parameters(), lr=0.01))
        pair.train()
        pair.check()


def indivisible() -> None:
    for values in (torch.ones(2, dtype=torch.complex64), torch.ones(0)):
        raw = nn.Linear(2, 1)
        raw.extra = nn.Parameter(values)
        for stage in STAGES:
            with pytest.raises(accel.BackendError, match="cannot divide extra"):
                accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=zero(stage))


def test_weights_that_cannot_be_divided_are_refused() -> None:
    run(2, indivisible)


@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_that_fit_and_that_do_not(stage: int) -> None:
    run(2, other_optimizers, stage)


# -- options and precision --------------------------------------------------------------------------------------------


def options_that_change_nothing() -> None:
    for stage, extra, options in (
        (1, {"gradient_clipping": 0.05}, {"offload_optimizer": True}),
        (2, {"zero_optimization": {"contiguous_gradients": False, "round_robin_gradients": True}}, {}),
        (2, {"zero_optimization": {"reduce_scatter": False, "reduce_bucket_size": 40}}, {"offload_optimizer": True}),
        (3, {"zero_optimization": {"stage3_param_persistence_threshold": 30}}, {"offload_parameters": True}),
        (3, {"zero_optimization": {"sub_group_size": 40, "reduce_bucket_size": 40}}, {"offload_optimizer": True}),
        (0, {"gradient_clipping": 0.05, "train_batch_size": "auto"}, {}),
    ):
        pair = Pair(DeepSpeed(stage=stage, config={"gradient_accumulation_steps": "auto", **extra}, **options))
        for step in range(3):
            pair.optimizer.zero_grad()
            pair.plain_optimizer.zero_grad()
            loss_of(pair.model(data(step, accel.rank()))).backward()
            mean_loss(pair.plain, lambda m, x: m(x), step).backward()
            if "gradient_clipping" in extra:
                nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            pair.optimizer.step()
            pair.plain_optimizer.step()
        pair.check()
        accel.teardown()


def test_configuration_and_offload() -> None:
    run(2, options_that_change_nothing)


def half(stage: int) -> None:
    """bf16-true is plain torch's bfloat16; with DeepSpeed's 'bf16' the optimizer steps fp32 copies."""
    reference = Net().bfloat16()
    optimizer = adamw(reference)
    raw = Net()
    model, handle, _ = accel.setup(raw, adamw(raw), backend=zero(stage), precision="bf16-true")
    for step in range(3):
        optimizer.zero_grad()
        handle.zero_grad()
        for x in data(step):
            (loss_of({"out": reference(x.bfloat16())["out"].float()}) / accel.world_size()).backward()
        loss_of(model(data(step, accel.rank()))).backward()
        optimizer.step()
        handle.step()
    assert distance(whole(model), reference.state_dict()) <= 0.02
    assert next(iter(whole(model).values())).dtype is torch.bfloat16
    accel.teardown(model)
    assert next(raw.parameters()).dtype is torch.float32

    exact = Net()
    pair = Pair(DeepSpeed(stage=stage, config={**CONFIG, "bf16": {"enabled": True}}), precision="bf16-true")
    pair.train()
    accel.teardown(pair.model)
    # Steps of 0.01 survive in fp32.
    assert distance(pair.raw.state_dict(), pair.plain.state_dict()) <= 0.02
    frozen = Net()
    frozen.body.requires_grad_(False)
    model, _, _ = accel.setup(
        frozen, adamw(frozen), precision="bf16-true", backend=DeepSpeed(stage=stage, config={"bf16": {"enabled": True}})
    )
    accel.teardown(model)
    assert distance(frozen.state_dict(), exact.state_dict()) <= 0.01


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_true(stage: int) -> None:
    run(2, half, stage)


def kept_gradients(stage: int) -> None:
    """The gradients of one backward wait in bfloat16; a sum of several is fp32's."""
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage3_param_persistence_threshold": 0}}
    torch.manual_seed(3)
    raw = nn.Linear(64, 64, bias=False)
    raw.weight.data = raw.weight.data.bfloat16().float()
    expected = raw.weight.detach().clone()
    model, optimizer, _ = accel.setup(
        raw,
        torch.optim.SGD(raw.parameters(), lr=0.5),
        precision="bf16-true",
        backend=DeepSpeed(stage=stage, config=config),
    )
    for values, itemsize in (((1.0,), 2), ((1.0, 2.0**-9), 4), ((1.0,), 2)):
        optimizer.zero_grad()
        for value in values:
            model(torch.full((1, 64), value)).sum().backward()
            if len(values) > 1:  # stage 1 leaves the sum to p.grad until something asks for the mean
                accel.clip_grad_norm_(model, 1e9)
        optimizer.step()
        measured = accel.memory_report(model, measured=True).rows[-1].use
        assert measured.gradients == 64 * 64 * itemsize // accel.world_size()
        expected -= 0.5 * sum(values)
    accel.teardown(model)
    assert torch.equal(raw.weight, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_gradients_wait_in_bfloat16_and_add_up_in_fp32(stage: int) -> None:
    run(2, kept_gradients, stage)


def fp16(stage: int, accumulation: int, synced: bool, clip: bool, set_to_none: bool) -> None:
    """16-mixed against plain torch in fp32: the gradients are true ones wherever they are."""
    pair = Pair(zero(stage), momentum, precision="16-mixed")
    registry.loss_scale.restore(1024.0, 0)  # the first one would overflow in this model, as torch's does
    for step in range(3):
        pair.optimizer.zero_grad(set_to_none=set_to_none)
        pair.plain_optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(accumulation):
            last = micro == accumulation - 1
            with contextlib.nullcontext() if synced or last else accel.no_sync(pair.model):
                accel.backward(loss_of(pair.model(data(9 * step + micro, accel.rank()))))
            mean_loss(pair.plain, lambda m, x: m(x), 9 * step + micro).backward()
        if clip:
            norm = accel.clip_grad_norm_(pair.model, 0.05)
            expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            assert abs(float(norm / expected) - 1) < 5e-3
        pair.optimizer.step()
        pair.plain_optimizer.step()
    assert (pair.optimizer.step_was_skipped, pair.optimizer.skipped_steps) == (False, 0)
    assert distance(whole(pair.model), Net().state_dict()) > 1e-3
    pair.check(2e-3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("accumulation", "synced", "clip", "set_to_none"),
    [(1, True, False, True), (3, True, True, True), (2, False, False, False), (2, True, False, False)],
)
def test_fp16(stage: int, accumulation: int, synced: bool, clip: bool, set_to_none: bool) -> None:
    run(2, fp16, stage, accumulation, synced, clip, set_to_none)


def fp16_refusals(stage: int) -> None:
    """An overflow on one rank skips the step on all; a plain backward and a scaler of the user's are refused."""
    pair = Pair(zero(stage), precision="16-mixed")
    registry.loss_scale.restore(1024.0, 0)
    model, optimizer = pair.model, pair.optimizer

    def train(factor: float, stepped: Any) -> None:
        optimizer.zero_grad()
        accel.backward(loss_of(model(data(0, accel.rank()))) * factor)
        stepped.step()

    train(1.0, optimizer)
    before = copy.deepcopy((whole(model), accel.full_state_dict(optimizer)))
    for skips, stepped in enumerate((optimizer, pair.raw_optimizer), 1):
        train(1e35 if accel.rank() == 0 else 1.0, stepped)
        assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (True, skips)
        assert distance(whole(model), before[0]) == 0
        assert repr(accel.full_state_dict(optimizer)) == repr(before[1])
    accel.backward(loss_of(model(data(0, accel.rank()))))
    for stepped in (optimizer, pair.raw_optimizer):
        optimizer.zero_grad()
        loss_of(model(data(0, accel.rank()))).backward()
        with pytest.raises(accel.PrecisionError, match=r"accel\.backward"):
            stepped.step()
    with pytest.raises(accel.PrecisionError, match=r"plain loss\.backward"):
        accel.backward(loss_of(model(data(0, accel.rank()))))
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model(data(0, accel.rank())))).backward()
    accel.clip_grad_norm_(model, 1.0)
    with pytest.raises(accel.PrecisionError, match="GradScaler"):
        scaler.step(optimizer)
    assert distance(whole(model), before[0]) == 0
    train(1.0, optimizer)
    assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (False, 2)
    assert distance(whole(model), before[0]) > 0


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_overflow_and_refusals(stage: int) -> None:
    run(2, fp16_refusals, stage)


# -- errors, exit, and the library alone ------------------------------------------------------------------------------


class Boom(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


def exceptions(stage: int) -> None:
    """In forward, in backward, in step: the engine goes on after zero_grad."""
    pair = Pair(zero(stage))
    pair.train()
    x = data(50, accel.rank())

    def fail(*_: Any) -> None:
        raise ValueError("boom")

    hook = pair.raw.left.register_forward_hook(fail)
    with pytest.raises(ValueError, match="boom"):
        pair.model(x)
    hook.remove()
    pair.train()
    hook = pair.raw.body[1].register_forward_hook(lambda m, a, out: Boom.apply(out))
    loss = loss_of(pair.model(x))
    hook.remove()
    with pytest.raises(ValueError, match="boom"):
        loss.backward()
    if stage > 1:  # stage 1 has reduced nothing yet, so nothing is incomplete
        with pytest.raises(accel.BackendError, match="zero_grad"):
            pair.optimizer.step()
    pair.train()
    hook = pair.raw_optimizer.register_step_pre_hook(fail)
    pair.optimizer.zero_grad()
    loss_of(pair.model(x)).backward()
    with pytest.raises(ValueError, match="boom"):
        pair.optimizer.step()
    hook.remove()
    assert pair.raw_optimizer.param_groups[0]["params"][0] is next(pair.raw.parameters())
    pair.train()
    pair.check()


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_leaves_a_usable_engine(stage: int) -> None:
    run(2, exceptions, stage)


def other_branches(stage: int) -> None:
    pair = Pair(zero(stage))
    left = accel.rank() == 0
    loss_of(pair.model(data(0, accel.rank()), left=left, right=not left)).backward()
    pair.optimizer.step()
    mean = torch.stack([loss_of(pair.plain(x, left=i == 0, right=i != 0)) for i, x in enumerate(data(0))]).mean()
    mean.backward()
    pair.plain_optimizer.step()
    pair.check()


def test_processes_that_use_other_parameters() -> None:
    """Exact at stage 1; an error on every rank where gradients are reduced as they come."""
    run(2, other_branches, 1)
    refusals(2, other_branches, 2, error="RankMismatchError", breaks=True)


def validate_then_fit(prepare: Callable[..., Any]) -> None:
    """A trainer's life: a validation before training sets the model up, the training sets it up again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    plain = copy.deepcopy(net)
    optimizers = momentum(net), momentum(plain)
    model, _ = prepare(net, None)
    with torch.no_grad():
        model(data(0, 0))
    model, optimizer = prepare(net, optimizers[0])
    for step in range(3):
        optimizer.zero_grad()
        optimizers[1].zero_grad()
        model(data(step, accel.rank())).square().mean().backward()
        mean_loss(plain, lambda m, x: m(x), step).backward()
        optimizer.step()
        optimizers[1].step()
        with torch.no_grad():
            torch.testing.assert_close(model(data(9, 0)), plain(data(9, 0)))


def by_library() -> None:
    import deepspeed

    accel.init()

    def prepare(net: nn.Module, optimizer: Any) -> Any:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        engine, made, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        return engine, engine if optimizer is not None else made

    validate_then_fit(prepare)


def by_accel() -> None:
    def prepare(net: nn.Module, optimizer: Any) -> Any:
        handles = accel.setup(net, optimizer, backend=zero(3))
        return handles.model, handles.optimizers

    validate_then_fit(prepare)


def test_a_second_engine_on_one_model_by_the_library_alone_and_by_accel() -> None:
    """The library's own fault, kept here to see when it is mended: two engines on one module fail, or train wrongly."""
    run(2, by_accel)
    failures = [r.error for r in outcomes(2, by_library, breaks=True)]
    assert all(failures), "DeepSpeed has mended two engines on one module"


SCRIPT = """
import sys, torch, accel
from torch import nn
assert not any(name.startswith("deepspeed") for name in sys.modules)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(net.parameters())
model, optimizer, _ = accel.setup(net, optimizer, backend=accel.DeepSpeed(stage=3))
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    if step == int(sys.argv[1]) and accel.rank() == 0:
        raise KeyError("in the middle")
    optimizer.step()
print("done")
"""


def start(step: int) -> list[tuple[int, str, str]]:
    """Status, output and errors of two processes that end without a clean-up; one fails in ``step``."""
    port = free_port()
    processes = []
    for rank in range(2):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        environment = {k: str(v) for k, v in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items()}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(step)],
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=150) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_a_script_ends_quietly_and_a_failing_one_on_every_rank() -> None:
    assert start(-1) == [(0, "done\n", "")] * 2
    first, second = start(1)
    assert first[0] != 0
    assert "KeyError: 'in the middle'" in first[2]
    assert second[0] != 0
    assert "rank 0 ended with KeyError" in second[2]
