"""What is special to ``pipeline``: stages on ranks, micro-batches, activation checkpointing, and what it refuses."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.engines.pipeline.stages import balanced
from accel.registry import registry
from tests.distributed import outcomes, refusals, run


def net(middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.ReLU(inplace=True),
        middle or nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.Linear(16, 3),
    )


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def batch(step: int, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def one_step(model: Any, optimizer: Any, step: int) -> torch.Tensor:
    x, y = batch(step)
    optimizer.zero_grad()
    out: torch.Tensor = model(x)
    F.mse_loss(out, y).backward()
    optimizer.step()
    return out.detach()


def apart(module: nn.Module, other: nn.Module) -> float:
    """The largest difference of two modules' states."""
    pairs = zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.is_floating_point())


# -- one process is the reference ---------------------------------------------------------------------------------------


def train_with_options() -> list[float]:
    world = accel.world_size()
    options: list[dict[str, Any]] = [
        {"chunks": chunks, "checkpoint": checkpoint}
        for chunks, checkpoint in itertools.product((1, 3, 9), ("always", "except_last", "never"))
    ]
    options += [
        {"balance": "time", "chunks": 2},
        {"balance": {1: [2, 4], 2: [5, 1], 4: [1, 1, 1, 3]}[world], "chunks": 2},
    ]
    worst = []
    for option in options:
        raw, plain = net(), net()
        for module in (raw, plain):
            module[4] = module[1]  # one activation in two stages
        # Rank 0's weights are everyone's.
        if accel.rank() > 0:
            for p in raw.parameters():
                p.data.add_(1.0)
        model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(**option))
        reference = sgd(plain)
        difference = 0.0
        for step in range(3):
            outputs = one_step(model, optimizer, step), one_step(plain, reference, step)
            difference = max(difference, float((outputs[0] - outputs[1]).abs().max()))
        with torch.no_grad():
            difference = max(difference, float((model(batch(9)[0]) - plain(batch(9)[0])).abs().max()))
        with torch.inference_mode():
            difference = max(difference, float((model(batch(9)[0]) - plain(batch(9)[0])).abs().max()))
        accel.teardown(model)
        worst.append(max(difference, apart(raw, plain)))
    return worst


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_schedule_is_the_plain_loop(world: int) -> None:
    for worst in run(world, train_with_options, timeout=180):
        assert len(worst) == 11
        assert max(worst) < 1e-5


class Branches(nn.Module):
    """Gives a dict with a part that nobody uses, and a plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"a": self.used(x), "b": [self.unused(x), x.argmax(1)], "scale": 2.0}


class Merge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, parts: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(parts["a"]) * parts["scale"], parts["b"][1]


def nested() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Branches(), Merge())


def train_nested() -> None:
    raw, plain = nested(), nested()
    model, optimizer, _ = accel.setup(raw, adam(raw), backend=accel.Pipeline(chunks=3))
    reference = adam(plain)
    for step in range(3):
        for m, o in ((model, optimizer), (plain, reference)):
            o.zero_grad()
            out, index = m(batch(step)[0])
            assert not index.requires_grad
            assert index.dtype is torch.int64
            out.square().mean().backward()
            o.step()
    accel.teardown(model)
    assert apart(raw, plain) < 1e-5
    # No gradient is not a gradient of zero: AdamW would decay the weights.
    assert torch.equal(raw[0].unused.weight, nested()[0].unused.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("world", [1, 2])
def test_nested_values_pass_between_stages(world: int) -> None:
    run(world, train_nested)


def batchnorm_and_dropout() -> None:
    for checkpoint in ("always", "never"):
        raw, plain = net(nn.BatchNorm1d(16)), net(nn.BatchNorm1d(16))
        model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(checkpoint=checkpoint))
        reference = sgd(plain)
        for step in range(3):
            one_step(model, optimizer, step)
            one_step(plain, reference, step)
        accel.teardown(model)
        assert apart(raw, plain) < 1e-5
        assert int(raw[2].num_batches_tracked) == 3  # type: ignore[arg-type]
    # The same masks in the second computation as in the first.
    results = []
    for checkpoint in ("always", "never"):
        raw = net(nn.Dropout(0.5))
        model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2, checkpoint=checkpoint))
        torch.manual_seed(5)
        for step in range(3):
            one_step(model, optimizer, step)
        results.append(accel.teardown(model))
    assert apart(results[0], results[1]) < 1e-6  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_computation_changes_nothing(world: int) -> None:
    run(world, batchnorm_and_dropout)


# -- autograd -----------------------------------------------------------------------------------------------------------


def step_pattern(pattern: Callable[[Any], None], freeze: int = 0) -> float:
    """The difference to the plain loop after two steps whose gradients come by ``pattern``."""
    raw, plain = net(), net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2))
    pairs = ((model, optimizer), (plain, sgd(plain)))
    for m, o in pairs * 2:
        for p in list(m.parameters())[:freeze]:
            p.requires_grad_(False)
        o.zero_grad(set_to_none=False)
        pattern(m)
        o.step()
    accel.teardown(model)
    return apart(raw, plain)


def two_forwards(m: Any) -> None:
    first, second = m(batch(0)[0]), m(batch(1)[0])
    first.square().mean().backward()
    second.abs().mean().backward()


def joint(m: Any) -> None:
    out = m(batch(0)[0])
    (out.square().mean() + m(batch(1, rows=3)[0]).abs().mean() + out.sin().mean()).backward()


def retained(m: Any) -> None:
    loss = m(batch(0)[0]).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def through_the_input(m: Any) -> None:
    x = batch(0)[0].requires_grad_(True)
    out = m(x)
    assert out.requires_grad
    out.square().mean().backward()
    want = batch(0)[0].requires_grad_(True)
    plain = net()
    plain.load_state_dict(accel.full_state_dict(m) if not isinstance(m, nn.Sequential) else m.state_dict())
    plain(want).square().mean().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, want.grad)


def with_hooks(m: Any) -> None:
    hook = next(iter(m.parameters())).register_hook(lambda g: g.clamp(-0.01, 0.01) * 2)
    m(batch(0)[0]).square().mean().backward()
    hook.remove()


def part_of_the_rows(m: Any) -> None:
    m(batch(0)[0])[2:3].square().sum().backward()


def patterns() -> None:
    for pattern in (two_forwards, joint, retained, through_the_input, with_hooks, part_of_the_rows):
        assert step_pattern(pattern) < 1e-5, pattern.__name__
    assert step_pattern(joint, freeze=4) < 1e-5  # the first stage is frozen as a whole
    assert step_pattern(through_the_input, freeze=8) < 1e-5  # only the batch gets a gradient


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_come_in_any_way(world: int) -> None:
    run(world, patterns)


def explicit_gradients() -> None:
    raw, plain = net(), net()
    model = accel.setup(raw, backend=accel.Pipeline(chunks=2, checkpoint="always")).model
    parts = registry.of_handle(model)._parts  # type: ignore[attr-defined]
    own = [i for i, (n, _) in enumerate(raw.named_parameters()) if parts.owns(n)]
    of = [list(m.parameters()) for m in (raw, plain)]
    found = torch.autograd.grad(model(batch(0)[0]).square().mean(), [of[0][i] for i in own])
    want = torch.autograd.grad(plain(batch(0)[0]).square().mean(), [of[1][i] for i in own])
    torch.testing.assert_close(found, want)
    assert all(p.grad is None for p in raw.parameters())
    loss = model(batch(0)[0]).square().mean()
    loss.backward()
    with pytest.raises((RuntimeError, accel.BackendError), match=r"retain_graph|second time"):
        loss.backward()
    loss = model(batch(0)[0]).square().mean()
    with torch.no_grad():
        for i in own:
            of[0][i].mul_(2)
    with pytest.raises(accel.AccelError, match="between a forward and its backward"):
        loss.backward()


def test_gradients_without_accumulation_and_what_has_none() -> None:
    run(2, explicit_gradients)


def clipping() -> None:
    for norm_type in (2.0, float("inf"), 1.0):
        results = []
        for clip in (accel.clip_grad_norm_, nn.utils.clip_grad_norm_):
            raw, plain = net(), net()
            model, optimizer, _ = accel.setup(raw, sgd(raw), backend="pipeline")
            reference = sgd(plain)
            for m in (model, plain):
                m(batch(0)[0]).square().sum().backward()
            want = nn.utils.clip_grad_norm_(list(plain.parameters()), 0.1, norm_type)
            found = clip(model if clip is accel.clip_grad_norm_ else model.parameters(), 0.1, norm_type)  # type: ignore[operator]
            torch.testing.assert_close(found, want)
            # Another model's gradients beside it, and none at all.
            torch.testing.assert_close(
                nn.utils.clip_grad_norm_(list(plain.parameters()), 9.0, norm_type), torch.as_tensor(0.1)
            )
            assert float(nn.utils.clip_grad_norm_(list(net().parameters()), 0.1, norm_type)) == 0.0
            with pytest.raises(accel.BackendError, match="accel.clip_grad_norm_"):
                nn.utils.get_total_norm([p.grad for p in raw.parameters() if p.grad is not None])
            optimizer.step()
            reference.step()
            accel.teardown(model)
            results.append(apart(raw, plain))
        assert max(results) < 1e-5
    assert nn.utils.clip_grad._get_total_norm.__module__ == "torch.nn.utils.clip_grad"


def test_clipping_by_the_norm_of_all_stages() -> None:
    run(2, clipping)


# -- what lies where ----------------------------------------------------------------------------------------------------


def bytes_of(module: nn.Module) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in module.parameters()}
    return sum(storages.values())


def refused_parts(models: Sequence[Any], optimizers: Sequence[Any]) -> None:
    for holders, error in ((models, accel.BackendError), (optimizers, accel.OptimizerError)):
        for holder in holders:
            with pytest.raises(error, match="full_state_dict"):
                holder.state_dict()
    elsewhere = models[1][-1] if accel.rank() == 0 else models[1][0]
    for refused in (*models, elsewhere):
        with pytest.raises(accel.AccelError, match="holds only its own part|cannot be pickled"):
            pickle.dumps(refused)
        with pytest.raises(accel.BackendError, match="holds only its own part"):
            copy.deepcopy(refused)


def where_things_lie() -> int:
    raw, plain = net(), net()
    whole = bytes_of(raw)
    own_optimizer = adam(raw)
    model, optimizer, _ = accel.setup(raw, own_optimizer, backend="pipeline")
    reference = adam(plain)
    for step in range(2):
        one_step(model, optimizer, step)
        one_step(plain, reference, step)
    part = bytes_of(raw)
    assert part < 0.8 * whole
    assert 0 < len(own_optimizer.state) < len(list(raw.parameters()))
    assert [tuple(p.shape) for p in raw.parameters()] == [tuple(p.shape) for p in plain.parameters()]
    refused_parts((model, raw), (optimizer, own_optimizer))
    with pytest.raises(accel.BackendError, match="lies on rank"):
        raw(batch(0)[0])
    full, state = accel.full_state_dict(model), accel.full_state_dict(optimizer)
    assert list(full) == list(plain.state_dict())
    assert full._metadata == plain.state_dict()._metadata  # type: ignore[attr-defined]
    torch.testing.assert_close(full, plain.state_dict())
    torch.testing.assert_close(state["state"], reference.state_dict()["state"])
    assert state["param_groups"] == reference.state_dict()["param_groups"]
    # Another model takes it, and goes on as the first one would.
    other = net(nn.LayerNorm(16))
    for p in other.parameters():
        p.data.zero_()
    second, second_optimizer, _ = accel.setup(other, adam(other), backend=accel.Pipeline(balance="time"))
    one_step(second, second_optimizer, 5)
    second.load_state_dict(full)
    second_optimizer.load_state_dict(state)
    assert bytes_of(other) < whole
    with pytest.raises(RuntimeError, match="size mismatch"):
        second.load_state_dict({**full, "0.weight": torch.zeros(1, 1), "5.bias": torch.zeros(9)})
    second.load_state_dict(full)
    one_step(second, second_optimizer, 2)
    one_step(plain, reference, 2)
    assert apart(accel.teardown(second), plain) < 1e-5  # type: ignore[arg-type]
    accel.teardown(model)
    assert bytes_of(raw) == whole
    assert len(own_optimizer.state) == len(list(raw.parameters()))
    raw(batch(0)[0])
    raw.state_dict()
    return part


def test_each_rank_holds_its_stage_and_full_states_come_together() -> None:
    parts = run(2, where_things_lie)
    assert sum(parts) < 1.1 * bytes_of(net())


def shards_and_slots() -> dict[str, list[tuple[int, int]]]:
    raw = net(nn.BatchNorm1d(16))
    own = adam(raw)
    model, optimizer, _ = accel.setup(raw, own, backend="pipeline")
    one_step(model, optimizer, 0)
    engine = registry.of_handle(model)
    listed = {
        s.name: [(s.start, s.tensor.numel())] for s in (*engine.holdings.shards(None), *engine.holdings.shards(own))
    }
    values = engine.holdings.values(own)
    manifest = {s.name: (s.shape, s.tensor.dtype) for s in engine.holdings.shards(own)}
    others = accel.process.control.agree("the test", (manifest, values["state"]))  # type: ignore[attr-defined]
    manifest = {name: kind for theirs, _ in others for name, kind in theirs.items()}
    values["state"] = {name: state for _, theirs in others for name, state in theirs.items()}
    before = {s.name: s.tensor.clone() for s in engine.holdings.shards(own)}
    own.state.clear()
    slots = engine.holdings.slots(own, manifest)
    assert {s.name for s in slots} == set(before)
    for slot in slots:
        slot.tensor.copy_(before[slot.name])
    engine.holdings.fill(own, values)
    engine.holdings.filled()
    assert all(engine._parts.owns(engine.holdings.parameter_names[id(p)]) for p in own.state)  # type: ignore[attr-defined]
    one_step(model, optimizer, 1)
    accel.teardown(model)
    plain = net(nn.BatchNorm1d(16))
    reference = adam(plain)
    for step in range(2):
        one_step(plain, reference, step)
    assert apart(raw, plain) < 1e-5
    return listed


def test_shards_of_all_ranks_are_the_whole_state_once() -> None:
    ranks = run(2, shards_and_slots)
    assert not set(ranks[0]) & set(ranks[1])
    plain = net(nn.BatchNorm1d(16))
    optimizer = adam(plain)
    one_step(plain, optimizer, 0)
    names = {**dict(plain.named_parameters())}
    wanted = set(plain.state_dict()) | {f"{n}/{k}" for n in names for k in ("exp_avg", "exp_avg_sq")}
    assert set(ranks[0]) | set(ranks[1]) == wanted


def switch_backends() -> float:
    raw, plain = net(), net()
    own, reference = adam(raw), adam(plain)
    for step, backend in enumerate(["pipeline", "ddp", accel.Pipeline(balance=[1, 5], chunks=3), "ddp"]):
        model, optimizer, _ = accel.setup(raw, own, backend=backend)
        for i in range(2):
            one_step(model, optimizer, 2 * step + i)
            one_step(plain, reference, 2 * step + i)
        # A gradient that waits for its step goes along.
        optimizer.zero_grad()
        model(batch(50)[0]).square().mean().backward()
        accel.teardown(model)
        assert all(p.grad is not None for p in raw.parameters())
    one_step(raw, own, 99)
    one_step(plain, reference, 99)
    return apart(raw, plain)


def test_backends_can_be_switched() -> None:
    assert max(run(2, switch_backends)) < 1e-5


# -- data ---------------------------------------------------------------------------------------------------------------


def loaders() -> list[list[float]]:
    data = TensorDataset(torch.arange(22.0).repeat(6, 1).T.contiguous(), torch.arange(22))
    raw = net()
    model, optimizer, loader = accel.setup(
        raw, sgd(raw), DataLoader(data, batch_size=5, shuffle=True), backend="pipeline"
    )
    seen, gathered = [], []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x / 22), y % 3).backward()
        optimizer.step()
        seen.append(y.tolist())
        gathered += accel.gather_for_metrics({"y": y}, loader)["y"].tolist()
        assert accel.gather_for_metrics(y).tolist() == y.tolist()
        assert accel.gather_for_metrics(y.sum()).tolist() == [y.sum().item()]
    assert len(loader) == 5
    assert gathered == [n for part in seen for n in part]
    assert sorted(gathered) == list(range(22))
    return seen


def test_every_rank_gets_the_whole_batch_and_metrics_count_it_once() -> None:
    first, second = run(2, loaders)
    assert first == second


# -- refusals -----------------------------------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def tied() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].weight = module[0].weight  # type: ignore[union-attr]
    return module


def refused_setups() -> None:
    def refuse(
        match: str, make: Callable[[], nn.Module], error: type[Exception] = accel.BackendError, **given: Any
    ) -> None:
        options = {k: v for k, v in given.items() if k != "precision"}
        raw = make()
        before = {k: v.clone() for k, v in raw.state_dict().items()}
        with pytest.raises(error, match=match):
            accel.setup(raw, sgd(raw), backend=accel.Pipeline(**options), precision=given.get("precision", "auto"))
        torch.testing.assert_close(dict(raw.state_dict()), before)

    refuse("forward of its own", Own)
    refuse("at least as many children", lambda: nn.Sequential(Own()))
    refuse("is for 3 stages", net, balance=[2, 2, 2])
    refuse("is for 4 children", net, balance=[2, 2])
    refuse("0.weight and 2.weight are one tensor", tied)
    refuse("one tensor", tied, balance="time")
    refuse("SyncBatchNorm", lambda: net(nn.SyncBatchNorm(16)))
    refuse("compile the children", lambda: torch.compile(net()))  # type: ignore[return-value]
    for options in ({"balance": []}, {"balance": "fair"}, {"chunks": 0}, {"checkpoint": "some"}, {"balance": 3}):
        with pytest.raises(accel.BackendError, match=next(iter(options))):
            accel.Pipeline(**options)
    raw = net()
    with pytest.raises(accel.OptimizerError, match="LBFGS"):
        accel.setup(raw, torch.optim.LBFGS(raw.parameters()), backend="pipeline")
    raw(batch(0)[0])


def test_what_cannot_be_a_pipeline_is_refused_before_anything_changes() -> None:
    run(2, refused_setups)


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)


def refused_forwards() -> None:
    def refuse(match: str, module: nn.Sequential, x: Any, prepare: Callable[[], object] = bool, **options: Any) -> None:
        model = accel.setup(module, backend=accel.Pipeline(**options)).model
        prepare()
        with pytest.raises(accel.AccelError, match=match):
            model(x)
        accel.teardown(model)

    x = batch(0)[0]
    module = net(nn.BatchNorm1d(16))
    refuse("2 would normalise each micro-batch", module, x, chunks=2)
    refuse("one row for each sample", nn.Sequential(nn.Linear(6, 6), Total()), x, chunks=2)
    refuse("cuts the batch along dim 0", net(), [x, x[:3]], chunks=2)
    refuse("is a set", net(), {"x": {1}})
    refuse("sparse_coo tensor", net(), x.to_sparse())
    hooked = net()
    hook = hooked.register_forward_hook(lambda *_: None)
    refuse("hooks on it never run", hooked, x)
    hook.remove()
    grown = net()
    refuse("added, removed or replaced", grown, x, lambda: grown.append(nn.ReLU()))
    model, optimizer, _ = accel.setup(net(), None, None, backend="pipeline")
    with pytest.raises(TypeError):
        model(x, x)
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend="pipeline")
    (model(x).mean() + sum(p.nan_to_num().sum() for p in raw.parameters())).backward()
    with pytest.raises(accel.BackendError, match="not its parameters"):
        optimizer.step()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).mean()).backward()
    with pytest.raises(accel.PrecisionError, match="GradScaler"):
        scaler.step(optimizer)


def test_what_a_pipeline_cannot_do_is_said_at_the_forward() -> None:
    run(2, refused_forwards)


def differ(how: str) -> None:
    raw, plain = net(), net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2))
    mine = accel.rank() == 1
    x, y = batch(0)
    optimizer.zero_grad()
    actions: dict[str, Callable[[], Any]] = {
        "other values": lambda: model(x.flip(0) if mine else x),
        "form of the batch": lambda: model(x[1:] if mine else x),
        "the same loss": lambda: F.mse_loss(model(x), y + mine).backward(),
    }
    raw[5].bias.requires_grad_(mine or how != "requires_grad")  # type: ignore[union-attr]
    model.train(mine or how != "eval")
    with (
        torch.set_grad_enabled(mine or how != "gradients are on"),
        pytest.raises(accel.RankMismatchError, match=how),
    ):
        actions.get(how, lambda: model(x))()
    assert all(p.grad is None for p in raw.parameters())
    raw.requires_grad_(True)
    model.train()
    one_step(model, optimizer, 0)
    accel.teardown(model)
    one_step(plain, sgd(plain), 0)
    assert apart(raw, plain) < 1e-5


def all_differences() -> None:
    for how in ("gradients are on", "requires_grad", "eval", "other values", "form of the batch", "the same loss"):
        differ(how)


def test_ranks_that_differ_all_raise_and_may_go_on() -> None:
    run(2, all_differences)


def one_rank_alone() -> None:
    accel.init(timeout=timedelta(seconds=4))
    model = accel.setup(net(), backend="pipeline").model
    if accel.is_main():
        model(batch(0)[0])
    else:
        accel.barrier()


def test_a_forward_on_one_rank_raises() -> None:
    messages = refusals(2, one_rank_alone, error="RankMismatchError", breaks=True)
    assert all("different points" in message for message in messages)


class Faulty(nn.Module):
    """Fails where it is told to, on its rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise ValueError("no forward today")
        out: torch.Tensor = self.layer(x)
        if self.where == "backward":
            out.register_hook(self._fail)
        return out

    @staticmethod
    def _fail(grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("no backward today")


def failures() -> None:
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(6, 6), Faulty(), nn.Linear(6, 6), nn.Linear(6, 3))
    plain = copy.deepcopy(raw)
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=3, balance=[1] * 4))
    for where in ("forward", "backward"):
        raw[1].where = where  # type: ignore[union-attr]
        own = accel.rank() == 1
        with pytest.raises(ValueError if own else accel.AccelError, match=f"no {where} today") as caught:
            one_step(model, optimizer, 0)
        assert own or "failed on rank 1" in str(caught.value)
        assert all(p.grad is None for p in raw.parameters())
    raw[1].where = ""  # type: ignore[union-attr]
    one_step(model, optimizer, 0)
    accel.teardown(model)
    one_step(plain, sgd(plain), 0)
    assert apart(raw, plain) < 1e-5


def test_an_error_in_one_stage_is_every_ranks_and_the_engine_goes_on() -> None:
    run(4, failures)


def lose_the_groups() -> None:
    model = accel.setup(net(), backend="pipeline").model
    accel.process.end_groups("the test")  # type: ignore[attr-defined]
    with pytest.raises(accel.AccelError, match="load a checkpoint"):
        accel.teardown(model)


def test_weights_that_are_lost_are_said_to_be() -> None:
    assert not any(o.error for o in outcomes(2, lose_the_groups, breaks=True))


# -- balance and memory -------------------------------------------------------------------------------------------------


def test_balance_makes_the_heaviest_stage_light() -> None:
    assert balanced([1, 1, 1, 1], 2) == [2, 2]
    assert balanced([9, 1, 1, 1], 2) == [1, 3]
    assert balanced([0, 5, 0, 5, 0, 5], 3) == [2, 2, 2]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        weights = torch.randint(0, 9, (7,), generator=generator).tolist()
        for count in (1, 2, 3, 7):
            found = balanced(weights, count)
            ends = [sum(found[:i]) for i in range(count + 1)]
            heaviest = max(sum(weights[a:b]) for a, b in itertools.pairwise(ends))
            ways = itertools.combinations(range(1, 7), count - 1)
            best = min(max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *way, 7))) for way in ways)
            assert len(found) == count
            assert min(found) > 0
            assert heaviest == best


class Slow(nn.Module):
    """Takes long; counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        self.calls += 1
        time.sleep(0.2)  # more than a busy machine adds to the others
        return x


def balance_by_time() -> tuple[int, float]:
    torch.manual_seed(0)
    raw = nn.Sequential(Slow(), nn.Linear(6, 300), nn.Linear(300, 6), nn.Linear(6, 3))
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(balance="time"))
    one_step(model, optimizer, 0)
    engine = registry.of_handle(model)
    number = len(engine._stages[0].names)  # type: ignore[attr-defined]
    accel.teardown(model)
    return number, float(raw[0].calls)  # type: ignore[arg-type]


def test_balance_by_time_measures_without_a_trace() -> None:
    assert run(2, balance_by_time) == [(1, 1.0), (3, 1.0)]


def kept_bytes(**options: Any) -> int:
    """What one forward keeps for its backward, beside the parameters."""
    torch.manual_seed(0)
    raw = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    model = accel.setup(raw, backend=accel.Pipeline(**options)).model
    storages: dict[int, torch.Tensor] = {}
    own = {p.data_ptr() for p in raw.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            storages[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    out.sum().backward()
    assert all(p.grad is None or bool(p.grad.any()) for p in raw.parameters())
    return sum(tensor.nbytes for tensor in storages.values())


def memory() -> tuple[int, int, int]:
    return (
        kept_bytes(chunks=4, checkpoint="never"),
        kept_bytes(chunks=4, checkpoint="except_last"),
        kept_bytes(chunks=4, checkpoint="always"),
    )


@pytest.mark.parametrize("world", [1, 2])
def test_checkpointing_keeps_less(world: int) -> None:
    for never, except_last, always in run(world, memory):
        assert never >= 6 // world * 64 * 64 * 4
        assert except_last <= 0.5 * never
        assert always <= 64 * 64 * 4  # the batch itself


# -- precision, several models, the end ---------------------------------------------------------------------------------


def half_precision(precision: str, chunks: int) -> float:
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    raw, plain = net(), net()
    model, optimizer, _ = accel.setup(
        raw, sgd(raw), backend=accel.Pipeline(chunks=chunks, checkpoint="always"), precision=precision
    )
    plain.to(dtype)
    reference = sgd(plain)
    for step in range(4 if chunks == 1 else 1):
        x, y = batch(step)
        for m, o in ((model, optimizer), (plain, reference)):
            o.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=m is plain and precision == "bf16-mixed"):
                out = m(x.to(dtype))
            F.mse_loss(out.float(), y).backward()
            o.step()
        assert model(x).dtype is torch.float32
    accel.teardown(model)
    assert {p.dtype for p in raw.parameters()} == {torch.float32}
    return apart(raw, plain)


def all_half_precisions() -> None:
    for precision in ("bf16-mixed", "bf16-true"):
        assert half_precision(precision, 1) < 1e-6
        assert half_precision(precision, 3) < 2e-3


@pytest.mark.parametrize("world", [1, 2])
def test_half_precision(world: int) -> None:
    run(world, all_half_precisions)


def fp16() -> float:
    """The loss is scaled on every stage alike, and an overflow in one stage skips the step in all."""
    raw, plain = net(), net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2), precision="16-mixed")
    reference = sgd(plain)
    for step in range(4):
        x, y = batch(step)
        before = accel.full_state_dict(model)
        for m, o, backward in ((model, optimizer, accel.backward), (plain, reference, torch.Tensor.backward)):
            o.zero_grad()
            backward(F.mse_loss(m(x), y))
        accel.clip_grad_norm_(model, 0.1)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        if step == 2:
            # Of the last stage alone, as it lies on one rank.
            bias = raw[-1].bias
            if bias.grad is not None:
                bias.grad.fill_(float("inf"))
            optimizer.step()
            torch.testing.assert_close(accel.full_state_dict(model), before, rtol=0, atol=0)
        else:
            optimizer.step()
            reference.step()
        assert optimizer.skipped_steps == (step >= 2)
    optimizer.zero_grad()
    F.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
    with pytest.raises(accel.PrecisionError, match=r"accel\.backward"):
        optimizer.step()
    accel.teardown(model)
    return apart(raw, plain)


@pytest.mark.parametrize("world", [1, 2])
def test_fp16(world: int) -> None:
    assert max(run(world, fp16)) < 2e-3


def two_models() -> float:
    """A pipeline after a pipeline: the gradient of the second one's batch is the first one's."""
    torch.manual_seed(1)
    head = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    plain, plain_head = net(), copy.deepcopy(head)
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2))
    last, last_optimizer, _ = accel.setup(head, sgd(head), backend=accel.Pipeline(chunks=3, checkpoint="always"))
    both = ((model, last, optimizer, last_optimizer), (plain, plain_head, sgd(plain), sgd(plain_head)))
    for step in range(3):
        for first, second, *optimizers in both:
            x, y = batch(step)
            F.mse_loss(second(first(x)), y).backward()  # type: ignore[operator]
            for o in optimizers:
                o.step()
                o.zero_grad()
    accel.teardown()
    return max(apart(raw, plain), apart(head, plain_head))


def test_a_pipeline_may_follow_a_pipeline() -> None:
    assert max(run(2, two_models)) < 1e-5


def with_closure() -> float:
    raw, plain = net(), net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend="pipeline")
    for m, o in ((model, optimizer), (plain, sgd(plain))):

        def closure(m: Any = m, o: Any = o) -> torch.Tensor:
            o.zero_grad()
            loss = m(batch(0)[0]).square().mean()
            loss.backward()
            return loss

        first = o.step(closure)
    with torch.no_grad():
        assert float(first) == pytest.approx(float(net()(batch(0)[0]).square().mean()), abs=1e-6)
    accel.teardown(model)
    return apart(raw, plain)


def test_a_closure_gives_the_loss_of_the_whole_batch() -> None:
    assert max(run(2, with_closure)) < 1e-5


class Deadly(nn.Module):
    """Ends its process in the second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            os._exit(3)
        return x


def die() -> None:
    raw = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Deadly(), nn.Linear(6, 3))
    model = accel.setup(raw, backend=accel.Pipeline(balance=[1, 1, 1, 1])).model
    model(batch(0)[0])
    model(batch(1)[0])


def test_the_end_of_a_rank_ends_the_others_with_an_error() -> None:
    results = outcomes(4, die, breaks=True)
    assert results[2].error == ("Died",)
    for rank in (0, 1, 3):
        assert "AccelError" in results[rank].error, results[rank].trace
        assert results[rank].seconds < 50  # the group's own timeout is 60 s


def collected() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2))
    one_step(model, optimizer, 0)
    engine, parameters = weakref.ref(registry.of_handle(model)), [weakref.ref(p) for p in raw.parameters()]
    del raw, model, optimizer
    gc.collect()
    assert engine() is None
    assert not any(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_dies_with_its_model(world: int) -> None:
    run(world, collected)
