"""What is special to ``sharded``: who owns what, what that saves, gradients in odd places, state that is split."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import accel
from accel.engines.sharded import exchange
from accel.registry import registry
from tests.distributed import live_tensors, outcomes, refusals, run


def net(width: int = 12, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(4, width), *layers, nn.Linear(width, 2))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def everywhere(step: int) -> torch.Tensor:
    return torch.cat([data(step, rank) for rank in range(accel.world_size())])


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x[:, :2].sin())


def largest(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((float((p - q).detach().abs().max()) for p, q in pairs if p.numel()), default=0.0)


def state_distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Between two optimizers' state dicts, which have the same entries."""
    assert a["state"].keys() == b["state"].keys()
    worst = 0.0
    for key, entries in a["state"].items():
        assert entries.keys() == b["state"][key].keys()
        for k, value in entries.items():
            difference = (torch.as_tensor(value) - torch.as_tensor(b["state"][key][k])).abs()
            worst = max(worst, float(difference.sum()))
    return worst


def equal_on_all_ranks(module: nn.Module) -> bool:
    flat = torch.cat([t.detach().to(torch.complex128).reshape(-1) for t in module.state_dict().values()])
    rows = accel.all_gather(torch.view_as_real(flat)[None])
    return all(torch.equal(row, rows[0]) for row in rows)


def sharded(raw: nn.Module, optimizers: Any = None, **options: Any) -> Any:
    handles = accel.setup(raw, optimizers, backend=accel.Sharded(**options))
    return handles.model, handles.optimizers


# -- what it saves ------------------------------------------------------------------------------------------------------


def nbytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors)


def bytes_after_a_step() -> float:
    raw = net(64, 40)
    optimizer = adamw(raw.parameters())
    model, handle = sharded(raw, optimizer)
    for step in range(2):
        handle.zero_grad()
        loss_of(model, data(step, accel.rank())).backward()
        handle.step()
    parameters = nbytes(raw.parameters())
    gradients = nbytes(p.grad for p in raw.parameters() if p.grad is not None)
    state = nbytes(v for entries in optimizer.state.values() for v in entries.values() if v.dim() > 0)
    return (parameters + gradients + state) / parameters


@pytest.mark.parametrize(("world", "expected"), [(2, 2.5), (4, 1.75)])
def test_bytes_per_rank_are_those_of_theory(world: int, expected: float) -> None:
    for found in run(world, bytes_after_a_step):
        assert found == pytest.approx(expected, rel=0.02)


def traffic() -> list[int]:
    """Bytes sent in a step with everything trainable, then with all but the last layer frozen, and those of that layer."""
    raw = net()
    optimizer = adamw(raw.parameters())
    model, handle = sharded(raw, optimizer)
    sent = 0

    def counting(original: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += args[place].nbytes
            return original(*args, **kwargs)

        return call

    found = []
    originals = dist.all_to_all_single, dist.broadcast
    dist.all_to_all_single, dist.broadcast = counting(originals[0], 1), counting(originals[1], 0)
    try:
        for frozen in (False, True):
            for layer in raw[:-1]:
                layer.requires_grad_(not frozen)
            handle.zero_grad()
            sent = 0
            loss_of(model, data(0, accel.rank())).backward()
            handle.step()
            found.append(sent)
    finally:
        dist.all_to_all_single, dist.broadcast = originals
    assert all(p.grad is None for layer in raw[:-1] for p in layer.parameters())
    return [*found, nbytes(raw.parameters()), nbytes(raw[-1].parameters())]


def test_frozen_parameters_are_not_sent() -> None:
    everything, last, whole_bytes, last_bytes = map(sum, zip(*run(2, traffic), strict=True))
    # Of both ranks together: each gradient goes to its owner, if it is elsewhere; each broadcast has a call on both.
    assert everything == 1.5 * whole_bytes
    assert last == 1.5 * last_bytes


def frozen_from_the_start() -> tuple[int, int]:
    raw = net()
    raw[:-1].requires_grad_(False)
    optimizer = adamw(raw.parameters())
    model, handle = sharded(raw, optimizer)
    loss_of(model, data(0, accel.rank())).backward()
    handle.step()
    mine = len(optimizer.state)
    assert all(any(p is q for q in raw[-1].parameters()) for p in optimizer.state)
    # Two tensors are trainable: one for each rank, however many frozen ones there are.
    return mine, len(optimizer.param_groups[0]["params"])


def test_frozen_parameters_have_no_state_and_do_not_upset_the_balance() -> None:
    assert run(2, frozen_from_the_start) == [(1, 10), (1, 10)]


def flips() -> tuple[float, int, int]:
    raw, reference = net(), net()
    optimizer, plain = adamw(raw.parameters()), adamw(reference.parameters())
    model, handle = sharded(raw, optimizer)
    sizes = []
    for step in range(200):
        if step % 2:
            for m in (raw, reference):
                for k, layer in enumerate(m):
                    layer.requires_grad_((step // 2 + k) % 3 != 0)
        for o, m, x in ((handle, model, data(step, accel.rank())), (plain, reference, everywhere(step))):
            o.zero_grad(set_to_none=step % 5 != 0)
            loss_of(m, x).backward()
            o.step()
        if step in (40, 190):
            sizes.append(live_tensors())
            sizes.append(len(raw[0].weight._backward_hooks or ()))
    assert sizes[:2] == sizes[2:]
    accel.teardown(model)
    return largest(raw, reference), state_distance(optimizer.state_dict(), plain.state_dict()), len(optimizer.state)


def test_a_hundred_flips() -> None:
    for weights, state, entries in run(2, flips):
        assert weights <= 1e-5
        assert state <= 1e-5
        assert entries == 10


# -- gradients in odd places --------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Parameters of several dtypes and layouts, used by some ranks only, by none, or without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(4))
        self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.turning = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.image = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        h = self.body(x) * self.wide.float() * self.turning.abs()
        h = h + 0.1 * self.image.flatten(1).mean() + 0.1 * (self.turned**2).mean() + self.empty.sum()
        return self.heads[head](h)


def branch_loss(model: Any, step: int, rank: int) -> torch.Tensor:
    x = data(step, rank)
    return F.mse_loss(model(x, (rank + step) % 3), x[:, :2])


def two_optimizers(raw: Branches) -> list[torch.optim.Optimizer]:
    body = [p for n, p in raw.named_parameters() if not n.startswith("heads") and n != "unused"]
    return [adamw(body), torch.optim.SGD(raw.heads.parameters(), lr=0.05, momentum=0.9)]


def branches(clip: bool, piece: int) -> list[float]:
    """Each rank goes another way; in some steps one of them has no gradient at all, or one optimizer waits."""
    rank, world = accel.rank(), accel.world_size()
    before, exchange._CPU_PIECE_BYTES = exchange._CPU_PIECE_BYTES, piece
    try:
        raw, reference = Branches(), Branches()
        optimizers, plain = two_optimizers(raw), two_optimizers(reference)
        model, handles = sharded(raw, optimizers)
        for step in range(9):
            if step != 4:
                for o in (*handles, *plain):
                    o.zero_grad(set_to_none=step % 2 == 0)
            idle = [0] if step == 5 else []
            if rank not in idle:
                branch_loss(model, step, rank).backward()
            for other in set(range(world)).difference(idle):
                (branch_loss(reference, step, other) / world).backward()
            if clip:
                norm = accel.clip_grad_norm_(model, 0.5)
                expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
                assert float(norm) == pytest.approx(float(expected), rel=1e-5)
            for k in range(2):
                if (step, k) != (3, 1):
                    handles[k].step()
                    plain[k].step()
        assert equal_on_all_ranks(raw)
        accel.teardown(model)
    finally:
        exchange._CPU_PIECE_BYTES = before
    states = [state_distance(o.state_dict(), p.state_dict()) for o, p in zip(optimizers, plain, strict=True)]
    return [largest(raw, reference), *states]


@pytest.mark.parametrize(("world", "clip", "piece"), [(2, False, 4 << 20), (2, True, 64), (4, True, 4 << 20)])
def test_rank_dependent_branches_dtypes_layouts_and_optimizers(world: int, clip: bool, piece: int) -> None:
    for found in run(world, branches, clip, piece):
        assert max(found) <= 1e-5


def norms(kind: float) -> list[float]:
    raw, reference = net(), net()
    model, _ = sharded(raw, adamw(raw.parameters()))
    loss_of(model, data(0, accel.rank())).backward()
    loss_of(reference, everywhere(0)).backward()
    pairs = [(accel.clip_grad_norm_(model, 1e9, kind), nn.utils.clip_grad_norm_(reference.parameters(), 1e9, kind))]
    pairs.append((accel.clip_grad_norm_(model, 1e9, kind), pairs[0][1]))
    return [float((a - b).abs() / b) for a, b in pairs]


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.5, float("inf")])
def test_norms(kind: float) -> None:
    for found in run(2, norms, kind):
        assert max(found) <= 1e-5


def buffers() -> bool:
    raw = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    expected = copy.deepcopy(raw[1]).train()
    model, handle = sharded(raw, adamw(raw.parameters()))
    for step in range(3):
        with torch.no_grad():
            expected(raw[0](data(step, 0)))
        (loss_of(raw, data(step, accel.rank())) if step == 1 else loss_of(model, data(step, accel.rank()))).backward()
        handle.step()
        assert equal_on_all_ranks(raw)
    return torch.allclose(raw[1].running_mean, expected.running_mean, atol=1e-6)


def test_buffers_are_those_of_rank_0_after_each_step() -> None:
    assert run(2, buffers) == [True, True]


class Global(torch.optim.Optimizer):
    """Scales each gradient by the norm of all of them: no rank can do its part alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            p.sub_(0.1 * p.grad / norm)


def foreign_optimizer(split: bool) -> tuple[float, int]:
    raw, reference = net(), net()
    optimizer, plain = Global(raw.parameters()), Global(reference.parameters())
    model, handle = sharded(raw, optimizer, split_any_optimizer=split)
    for step in range(3):
        for o, m, x in ((handle, model, data(step, accel.rank())), (plain, reference, everywhere(step))):
            o.zero_grad()
            loss_of(m, x).backward()
            o.step()
    assert equal_on_all_ranks(raw)
    return largest(raw, reference), len(optimizer.state)


def test_a_foreign_optimizer_steps_whole_unless_told_otherwise() -> None:
    for distance, entries in run(2, foreign_optimizer, False):
        assert distance <= 1e-5
        assert entries == 10
    found = run(2, foreign_optimizer, True)
    assert sum(entries for _, entries in found) == 10
    assert all(distance > 1e-3 for distance, _ in found)


def one_gradient_for_all(size: int) -> list[float]:
    # With the large one on one rank, the small ones come to another rank one after the other.
    sizes = [3 * size, *[size] * (4 * accel.world_size() - 1)]
    raw = nn.ParameterList([torch.zeros(n) for n in sizes])
    model, handle = sharded(raw, torch.optim.SGD(raw.parameters(), lr=1.0))
    gradient = torch.full((size,), accel.rank() + 1.0)
    for parameter in raw.parameters():
        parameter.grad = gradient if len(parameter) == size else torch.full_like(parameter, accel.rank() + 1.0)
    handle.step()
    return [float(p.mean()) for p in model.parameters()]


@pytest.mark.parametrize("size", [3, 700_000])  # in one exchange, and in several
def test_a_gradient_under_several_parameters_is_averaged_once(size: int) -> None:
    for world, mean in ((2, 1.5), (4, 2.5)):
        for values in run(world, one_gradient_for_all, size):
            assert values == [-mean] * (4 * world)


# -- refusals -----------------------------------------------------------------------------------------------------------


def refuse(case: str) -> None:
    raw: Any = nn.Sequential(nn.Embedding(4, 2, sparse=True)) if case == "sparse" else net()
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    model, handle = sharded(raw, optimizer)
    x = torch.tensor([1]) if case == "sparse" else data(0, accel.rank())
    before = copy.deepcopy(raw.state_dict())
    try:
        if case == "state of the handle":
            handle.state_dict()
        if case == "state of the raw optimizer":
            optimizer.state_dict()
        if case == "copy":
            copy.deepcopy(optimizer)
        if case == "pickle":
            pickle.dumps(optimizer)
        model(x).mean().backward()
        if case == "scaler":
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.zeros(()))
            scaler.step(handle)
        if case == "raw clip after accel's":
            accel.clip_grad_norm_(model, 1.0)
            nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        if case == "norm":
            accel.clip_grad_norm_(model, 1.0, 0.0)
        if case == "join":
            with accel.join(model):
                pass
        handle.step()
    finally:
        assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
        raw.zero_grad()


REFUSALS = {
    "state of the handle": (accel.OptimizerError, "accel.full_state_dict"),
    "state of the raw optimizer": (accel.OptimizerError, "accel.save"),
    "copy": (accel.OptimizerError, "a copy or pickle would miss the rest"),
    "pickle": (accel.OptimizerError, "a copy or pickle would miss the rest"),
    "scaler": (accel.PrecisionError, "accel.backward"),
    "sparse": (accel.BackendError, "sparse gradient of 0.weight"),
    "raw clip after accel's": (accel.BackendError, "accel.clip_grad_norm_"),
    "norm": (accel.AccelError, "norm_type"),
    "join": (accel.BackendError, "uneven inputs"),
}


def refuse_all() -> int:
    for case, (error, message) in REFUSALS.items():
        with pytest.raises(error, match=message):
            refuse(case)
        accel.teardown()
    return len(REFUSALS)


def test_refusals_come_on_every_rank_before_anything_moves() -> None:
    assert run(2, refuse_all) == [len(REFUSALS)] * 2


def late_groups() -> None:
    raw = net()
    model, handle = sharded(raw, adamw(raw[0].parameters()))
    if accel.rank() == 0:
        handle.add_param_group({"params": list(raw[1:].parameters())})
    loss_of(model, data(0, accel.rank())).backward()
    handle.step()


def test_a_group_added_on_one_rank_is_noticed() -> None:
    for text in refusals(2, late_groups, error="RankMismatchError"):
        assert "10 parameters" in text
        assert "8 parameters in no optimizer" in text


def clip_the_other_optimizers_part() -> float:
    """Final gradients of one optimizer's parameters do not keep torch from clipping another's."""
    raw, reference = net(), net()
    for m, x in ((raw, data(0, accel.rank())), (reference, everywhere(0))):
        optimizers = [adamw(m[0].parameters()), adamw(m[1:].parameters())]
        model, handles = sharded(m, optimizers) if m is raw else (m, optimizers)
        loss_of(model, x).backward()
        handles[0].step()
        nn.utils.clip_grad_norm_(m[1:].parameters(), 0.01)
        handles[1].step()
    return largest(raw, reference)


def test_torch_clips_what_was_not_stepped() -> None:
    assert max(run(2, clip_the_other_optimizers_part)) <= 1e-5


def overflow() -> tuple[float, list[float], int]:
    raw = net()
    optimizer = adamw(raw.parameters())
    handles = accel.setup(raw, optimizer, backend="sharded", precision="16-mixed")
    scales = [registry.loss_scale.value]
    before = copy.deepcopy(raw)
    accel.backward(loss_of(handles.model, data(0, accel.rank())))
    if accel.rank() == 1:
        raw[0].weight.grad[0, 0] = float("inf")
    handles.optimizers.step()
    moved = largest(raw, before)
    scales.append(registry.loss_scale.value)
    states = len(optimizer.state)
    handles.optimizers.zero_grad()
    accel.backward(loss_of(handles.model, data(1, accel.rank())))
    handles.optimizers.step()
    assert largest(raw, before) > 0
    assert equal_on_all_ranks(raw)
    return moved, scales, states


def test_an_overflow_anywhere_skips_the_step_everywhere() -> None:
    assert run(2, overflow) == [(0.0, [65536.0, 32768.0], 0)] * 2


class Fails(torch.optim.SGD):
    """Raises after its parameters were changed, on one rank, once."""

    fail = True

    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        if self.fail and accel.rank() == 1:
            self.fail = False
            raise RuntimeError("on purpose")
        return out


def half_a_step() -> bool:
    raw = net()
    model, handle = sharded(raw, Fails(raw.parameters(), lr=0.1), split_any_optimizer=True)
    for step in range(3):
        handle.zero_grad()
        loss_of(model, data(step, accel.rank())).backward()
        fails = step == 0 and accel.rank() == 1
        with pytest.raises(RuntimeError, match="on purpose") if fails else contextlib.nullcontext():
            handle.step()
    return equal_on_all_ranks(raw)


def test_a_step_that_raises_half_way_leaves_the_ranks_equal() -> None:
    assert run(2, half_a_step) == [True, True]


# -- state --------------------------------------------------------------------------------------------------------------

SETUPS: list[Any] = ["sharded", "ddp", accel.Sharded(broadcast_buffers=False), "sharded"]


def handovers() -> list[float]:
    """From a plain optimizer through several engines and back, in mid-training, with gradients kept once."""
    raw, reference = net(), net()
    optimizer, plain = adamw(raw.parameters()), adamw(reference.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.7) for o in (optimizer, plain)]
    for turn, backend in enumerate([None, *SETUPS, None]):
        model: Any = raw
        handle: Any = optimizer
        if backend is not None:
            model, handle, _ = accel.setup(raw, optimizer, backend=backend)
        for step in range(3 * turn, 3 * turn + 3):
            x = everywhere(step) if backend is None else data(step, accel.rank())
            for o, m, batch in ((handle, model, x), (plain, reference, everywhere(step))):
                if step % 3 != 0:  # the gradients of a turn's last step are added to, across the change of engine
                    o.zero_grad()
                loss_of(m, batch).backward()
                o.step()
            for scheduler in schedulers:
                scheduler.step()
        if backend is not None:
            accel.teardown(model)
    return [largest(raw, reference), state_distance(optimizer.state_dict(), plain.state_dict())]


@pytest.mark.parametrize("world", [2, 4])
def test_handovers_in_mid_training(world: int) -> None:
    for found in run(world, handovers):
        assert max(found) <= 1e-5


def full_states(use_raw: bool) -> list[float]:
    raw, reference = net(), net()
    optimizer, plain = adamw(raw[0].parameters()), adamw(reference[0].parameters())
    model, handle = sharded(raw, optimizer)
    for o, m in ((handle, raw), (plain, reference)):
        o.add_param_group({"params": list(m[1:].parameters()), "lr": 0.05})

    def steps(first: int) -> None:
        for step in range(first, first + 3):
            for o, m, x in ((handle, model, data(step, accel.rank())), (plain, reference, everywhere(step))):
                o.zero_grad()
                loss_of(m, x).backward()
                o.step()

    steps(0)
    mine = len(optimizer.state)
    full = accel.full_state_dict(handle)
    assert len(optimizer.state) == mine < 10
    found = [state_distance(full, plain.state_dict())]
    full, weights = copy.deepcopy(full), copy.deepcopy(accel.full_state_dict(model))
    steps(3)
    (optimizer if use_raw else handle).load_state_dict(copy.deepcopy(full))
    model.load_state_dict(weights)
    assert len(optimizer.state) == mine
    again, other = net(), net()
    again.load_state_dict(weights)
    other_optimizer = adamw(again[0].parameters())
    other_optimizer.add_param_group({"params": list(again[1:].parameters())})
    other_optimizer.load_state_dict(copy.deepcopy(full))
    # A new model takes the state before its first step, when no gradient has given owners yet.
    fresh, fresh_optimizer = sharded(other, adamw(other[0].parameters()))
    fresh_optimizer.add_param_group({"params": list(other[1:].parameters())})
    fresh_optimizer.load_state_dict(full)
    fresh.load_state_dict(weights)
    for step in range(6, 9):
        for o, m, x in (
            (handle, model, data(step, accel.rank())),
            (fresh_optimizer, fresh, data(step, accel.rank())),
            (other_optimizer, again, everywhere(step)),
        ):
            o.zero_grad()
            loss_of(m, x).backward()
            o.step()
    return [*found, largest(raw, again), largest(other, again)]


@pytest.mark.parametrize("use_raw", [False, True])
def test_full_states_go_out_and_in(use_raw: bool) -> None:
    for found in run(2, full_states, use_raw):
        assert max(found) <= 1e-5


def shards_and_slots() -> list[Any]:
    """The shards of all ranks together are one process's; filled into another engine they continue its training."""
    raw, other, reference = net(), net(), net()
    engines = []
    for m in (raw, other):
        optimizer = adamw(m.parameters())
        model, handle = sharded(m, optimizer)
        engines.append((registry.of_handle(model), model, optimizer, handle))
    engine, model, optimizer, handle = engines[0]
    plain = adamw(reference.parameters())
    for o, m, x in ((handle, model, data(0, accel.rank())), (plain, reference, everywhere(0))):
        loss_of(m, x).backward()
        o.step()
    mine = engine.holdings.shards(optimizer)
    manifest = {
        f"{n}/{k}": (tuple(p.shape), p.dtype) for n, p in raw.named_parameters() for k in ("exp_avg", "exp_avg_sq")
    }
    target, other_model, other_optimizer, other_handle = engines[1]
    slots = target.holdings.slots(other_optimizer, manifest)
    assert [s.name for s in slots] == [s.name for s in sorted(mine, key=lambda s: list(manifest).index(s.name))]
    by_name = {s.name: s for s in mine}
    for slot in slots:
        slot.tensor.copy_(by_name[slot.name].tensor)
    full = copy.deepcopy(plain.state_dict())
    names = [n for n, _ in raw.named_parameters()]
    values = engine.holdings.values(optimizer)
    merged = {names[i]: {"step": entries["step"]} for i, entries in full["state"].items()}
    target.holdings.fill(other_optimizer, {**values, "state": merged})
    assert len(other_optimizer.state) == len(optimizer.state) == len(values["state"])
    other_model.load_state_dict(raw.state_dict())
    for step in range(1, 3):
        for o, m, x in (
            (handle, model, data(step, accel.rank())),
            (other_handle, other_model, data(step, accel.rank())),
            (plain, reference, everywhere(step)),
        ):
            o.zero_grad()
            loss_of(m, x).backward()
            o.step()
    return [largest(raw, other), largest(raw, reference), [s.name for s in mine]]


def test_shards_are_each_ranks_own() -> None:
    found = run(2, shards_and_slots)
    assert max(*found[0][:2], *found[1][:2]) <= 1e-5
    assert not set(found[0][2]) & set(found[1][2])
    assert len(found[0][2]) + len(found[1][2]) == 20


def after_the_end() -> str:
    accel.init(timeout=5)
    raw = net()
    optimizer = adamw(raw.parameters())
    model, handle = sharded(raw, optimizer)
    loss_of(model, data(0, accel.rank())).backward()
    handle.step()
    raw[accel.rank()].requires_grad_(False)
    with pytest.raises(accel.RankMismatchError, match="requires_grad"):
        model(data(1, accel.rank()))
    accel.teardown(model)
    loss_of(raw, data(2, accel.rank())).backward()
    try:
        optimizer.step()
    except accel.OptimizerError as error:
        return str(error)
    return "stepped"


def test_a_part_of_the_state_is_never_taken_for_the_whole() -> None:
    for outcome in outcomes(2, after_the_end, breaks=True):
        assert "only this rank's part" in outcome.value, outcome


def freed() -> bool:
    raw = net()
    optimizer = adamw(raw.parameters())
    model, handle = sharded(raw, optimizer)
    loss_of(model, data(0, accel.rank())).backward()
    handle.step()
    copied = copy.deepcopy(raw)
    assert not any(p._backward_hooks for p in copied.parameters())
    engine = weakref.ref(registry.of_handle(model))
    weight = weakref.ref(raw[0].weight)
    del raw, optimizer, model, handle
    gc.collect()
    return engine() is None and weight() is None


def test_nothing_keeps_a_model_that_is_not_used_any_more() -> None:
    assert run(2, freed) == [True, True]


def alone() -> bool:
    raw, reference = net(), net()
    optimizer, plain = adamw(raw.parameters()), adamw(reference.parameters())
    model, handle = sharded(raw, optimizer)
    for step in range(3):
        for o, m in ((handle, model), (plain, reference)):
            o.zero_grad()
            loss_of(m, data(step, 0)).backward()
            o.step()
    assert not any(p._backward_hooks for p in raw.parameters())
    assert state_distance(handle.state_dict(), plain.state_dict()) == 0.0
    return largest(raw, reference) == 0.0


def test_one_process_is_passed_through() -> None:
    assert run(1, alone) == [True]
