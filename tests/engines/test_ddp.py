"""What is special to ``ddp``: equality with the raw class, its options, and every way in which a reduction can go wrong."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accel
from tests.distributed import outcomes, refusals, run


def net(bn: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle: nn.Module = nn.BatchNorm1d(16) if bn else nn.LayerNorm(16)
    return nn.Sequential(nn.Linear(4, 16), middle, nn.Tanh(), nn.Linear(16, 2))


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def equal_on_all_ranks(module: nn.Module) -> bool:
    flat = torch.cat([t.detach().double().reshape(-1) for t in module.state_dict().values()])
    everywhere = accel.all_gather(flat[None])
    return all(torch.equal(row, everywhere[0]) for row in everywhere)


# -- raw DDP, bit by bit ------------------------------------------------------------------------------------------------


def train_beside_raw_ddp(bn: bool, accumulation: int, option: dict[str, Any]) -> bool:
    rank = accel.rank()
    ours, theirs = net(bn), net(bn)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, theirs)]
    ddp = DistributedDataParallel(theirs, **option)
    model, handle, _ = accel.setup(ours, optimizers[0], backend=accel.DDP(**option))
    for step in range(6):
        for m, o, no_sync in ((model, handle, accel.no_sync(model)), (ddp, optimizers[1], ddp.no_sync())):
            o.zero_grad()
            for micro in range(accumulation):
                with no_sync if micro < accumulation - 1 else contextlib.nullcontext():
                    F.softplus(m(data(10 * step + micro, rank))).mean().backward()
            o.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    same = all(torch.equal(p, q) for p, q in pairs)
    # Raw DDP leaves each rank's own statistics until its next forward; ours are rank 0's already.
    same_buffers = all(torch.equal(p, q) for p, q in zip(ours.buffers(), theirs.buffers(), strict=True))
    return same and equal_on_all_ranks(ours) and (same_buffers or rank > 0)


@pytest.mark.parametrize("bn", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("option", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.0001}], ids=str)
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_bit_equal_to_raw_ddp(bn: bool, accumulation: int, option: dict[str, Any]) -> None:
    assert run(2, train_beside_raw_ddp, bn, accumulation, option) == [True, True]


def compressed(hook: str) -> list[float]:
    raw, plain = net(), net()
    model, handle, _ = accel.setup(
        raw, torch.optim.SGD(raw.parameters(), lr=0.05), backend=accel.DDP(comm_hook=hook, powersgd_rank=2)
    )
    reference, plain_handle, _ = accel.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    for step in range(12):
        for m, o in ((model, handle), (reference, plain_handle)):
            o.zero_grad()
            x = data(step, accel.rank())
            F.mse_loss(m(x), x[:, :2]).backward()
            if step == 11:
                F.mse_loss(accel.unwrap(m)(x), x[:, :2]).backward()
            o.step()
    assert equal_on_all_ranks(raw)
    pairs = list(zip(raw.parameters(), plain.parameters(), strict=True))
    return [float(max((p - q).abs().max() for p, q in pairs)), float(max((p - q).abs().max() for p, q in pairs[:2]))]


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2e-3), ("bf16", 1e-2), ("powersgd", 0.2)])
def test_comm_hooks_compress_and_keep_the_ranks_equal(hook: str, tolerance: float) -> None:
    for worst, _ in run(2, compressed, hook):
        assert 0.0 < worst < tolerance


def refused_options() -> None:
    for options in (
        {"comm_hook": "x"},
        {"bucket_cap_mb": 0},
        {"powersgd_rank": 0},
        {"bucket_cap_mb": "25"},
        {"static_graph": 1},
    ):
        with pytest.raises(accel.BackendError, match=next(iter(options))):
            accel.DDP(**options)
    with pytest.raises(accel.BackendError, match="accelerator"):
        accel.setup(net(bn=True), backend=accel.DDP(sync_batchnorm=True))
    model = accel.setup(net(), backend=accel.DDP(static_graph=True)).model
    with pytest.raises(accel.BackendError, match="static_graph"), accel.no_sync(model):
        pass


def test_options_are_checked() -> None:
    run(2, refused_options)


# -- unused, missing, frozen --------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        features = self.body(x)
        both = self.left(features) + self.right(features)
        return {"left": self.left(features), "right": self.right(features), "both": both}[side]


def missing(sides: list[str]) -> str:
    raw = TwoHeads()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    before = copy.deepcopy(raw.state_dict())
    model(data(0, 0), sides[accel.rank()]).mean().backward()
    try:
        optimizer.step()
    except accel.AccelError as error:
        assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
        return f"{type(error).__name__}: {error}"
    return "stepped"


def missing_soon() -> str:
    accel.init(timeout=5)
    return missing(["left", "both"])


def test_missing_gradients_are_named_before_anything_moves() -> None:
    for message in run(2, missing, ["left", "left"]):
        assert message.startswith("BackendError")
        assert "right.weight" in message
        assert "find_unused_parameters" in message


def test_rank_dependent_missing_gradients_end_every_rank() -> None:
    first, second = outcomes(2, missing_soon, breaks=True)
    assert first.value.startswith("RankMismatchError")
    assert "AccelError" in second.error or "RuntimeError" in second.error


def unused_allowed() -> None:
    raw = TwoHeads()
    reference = copy.deepcopy(raw)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, _ = accel.setup(
        raw, torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9), backend=accel.DDP(find_unused_parameters=True)
    )
    world, rank = accel.world_size(), accel.rank()
    for step in range(8):
        sides = [("left", "right", "both")[(step + r * (step % 2)) % 3] for r in range(world)]
        plain.zero_grad()
        (sum(reference(data(step, r), sides[r]).square().mean() for r in range(world)) / world).backward()
        plain.step()
        optimizer.zero_grad()
        model(data(step, rank), sides[rank]).square().mean().backward()
        optimizer.step()
    for p, q in zip(raw.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_find_unused_parameters_with_other_branches_on_other_ranks() -> None:
    run(2, unused_allowed)


def frozen_between() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters(), lr=0.1))
    before = copy.deepcopy(raw.state_dict())
    loss = model(data(0, accel.rank())).mean()
    raw[0].weight.requires_grad_(False)
    loss.backward()
    with pytest.raises(accel.BackendError, match=r"0\.weight.*before the forward"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())


def test_freezing_between_forward_and_backward_is_refused() -> None:
    run(2, frozen_between)


def freeze_on_one_rank() -> str:
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    if accel.rank() == 0:
        raw[0].weight.requires_grad_(False)
    before = copy.deepcopy(raw.state_dict())
    try:
        model(data(0, 0)).mean().backward()
        optimizer.step()
    finally:
        assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
    return "stepped"


def test_a_mask_that_differs_ends_every_rank_and_none_steps() -> None:
    first, second = outcomes(2, short_timeouts, "freeze_on_one_rank", breaks=True)
    assert "RankMismatchError" in first.error
    assert second.error
    assert "AssertionError" not in second.error
    assert max(first.seconds, second.seconds) < 50  # the group's own timeout is 60 s


def freeze_differently() -> None:
    raw = net()
    model = accel.setup(raw).model
    raw[accel.rank() * 3].weight.requires_grad_(False)  # type: ignore[union-attr]
    model(data(0, 0))


def test_masks_that_change_differently_are_named() -> None:
    for message in refusals(2, freeze_differently, error="RankMismatchError", breaks=True):
        assert "0.weight" in message
        assert "[1]" in message


def pending_at_refresh() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    with accel.no_sync(model):
        model(data(0, accel.rank())).mean().backward()
        raw[0].weight.requires_grad_(False)
        with pytest.raises(accel.BackendError, match="pending"):
            model(data(1, accel.rank()))
    raw[0].weight.requires_grad_(True)
    optimizer.step()
    assert equal_on_all_ranks(raw)
    raw[0].weight.requires_grad_(False)
    optimizer.zero_grad()
    model(data(1, accel.rank())).mean().backward()
    optimizer.step()
    assert equal_on_all_ranks(raw)


def test_refresh_with_pending_gradients_raises_and_loses_nothing() -> None:
    run(2, pending_at_refresh)


def manual_refresh() -> None:
    raw, other = net(), net()
    options = accel.DDP(auto_refresh=False)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=options)
    reference, ref_optimizer, _ = accel.setup(other, torch.optim.SGD(other.parameters(), lr=0.1))
    for step in range(6):
        for m, o, r in ((model, optimizer, raw), (reference, ref_optimizer, other)):
            r[0].requires_grad_(step % 3 == 0)
            accel.refresh_trainable(m)
            o.zero_grad()
            m(data(step, accel.rank())).square().mean().backward()
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), other.parameters(), strict=True))
    # Forgotten calls: an unfrozen parameter is reduced all the same, a frozen one is missed by name.
    raw[0].requires_grad_(True)
    optimizer.zero_grad()
    model(data(9, accel.rank())).square().mean().backward()
    optimizer.step()
    assert equal_on_all_ranks(raw)
    raw[3].requires_grad_(False)
    optimizer.zero_grad()
    model(data(9, accel.rank())).square().mean().backward()
    with pytest.raises(accel.BackendError, match=r"3\.weight .*refresh_trainable"):
        optimizer.step()


def test_manual_refresh() -> None:
    run(2, manual_refresh)


def all_frozen() -> None:
    raw = net().requires_grad_(False)
    model = accel.setup(raw).model
    model(data(0, accel.rank()))
    raw.requires_grad_(True)
    optimizer = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1)).optimizers
    model(data(0, accel.rank())).square().mean().backward()
    optimizer.step()
    assert equal_on_all_ranks(raw)
    raw.requires_grad_(False)
    x = data(0, accel.rank()).requires_grad_(True)
    model(x).mean().backward()
    assert x.grad is not None


def test_all_parameters_frozen_and_back() -> None:
    run(2, all_frozen)


def hundred_flips() -> int:
    import psutil

    raw = nn.Sequential(*[nn.Linear(128, 128) for _ in range(12)])
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.01))
    sizes = []
    for step in range(100):
        raw[step % 12].requires_grad_(step % 2 == 0)  # type: ignore[union-attr]
        optimizer.zero_grad()
        model(torch.randn(2, 128)).square().mean().backward()
        optimizer.step()
        sizes.append(psutil.Process().memory_info().rss)
    assert equal_on_all_ranks(raw)
    return sizes[-1] - sizes[20]


def test_a_hundred_flips_leave_memory_flat() -> None:
    assert max(run(2, hundred_flips)) < 4 << 20


# -- no_sync, buffers, exceptions ---------------------------------------------------------------------------------------


def nested_no_sync() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))

    def synced() -> bool:
        optimizer.zero_grad()
        model(data(0, accel.rank())).square().mean().backward()
        gradient = raw[0].weight.grad
        assert gradient is not None
        everywhere = accel.all_gather(gradient.reshape(1, -1))
        return all(torch.equal(row, everywhere[0]) for row in everywhere)

    assert synced()
    with accel.no_sync(model):
        assert not synced()
        with accel.no_sync(model):
            assert not synced()
        assert not synced()
        with pytest.raises(ZeroDivisionError), accel.no_sync(model):
            _ = 1 / 0
        assert not synced()
    assert synced()


def test_no_sync_nests_and_restores() -> None:
    run(2, nested_no_sync)


def buffers_follow_rank_0() -> None:
    raw = net(bn=True)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        loss = model(data(step, accel.rank())).mean() + model(data(step + 50, accel.rank())).mean()
        loss.backward()
        optimizer.step()
        assert equal_on_all_ranks(raw)
    model.eval()
    if accel.rank() == 0:
        with torch.no_grad():
            model(data(0, 0))
        # In train mode too: a GAN's samples, say.
        model.train()
        with torch.no_grad():
            model(data(1, 0))
    dist.barrier()
    model.train()
    optimizer.zero_grad()
    model(data(4, accel.rank())).mean().backward()
    optimizer.step()
    assert equal_on_all_ranks(raw)


def test_buffers_are_rank_0s_and_evaluation_on_one_rank_does_not_hang() -> None:
    run(2, buffers_follow_rank_0)


class Averages(nn.Module):
    """Keeps statistics in a buffer that each forward replaces, and in a BatchNorm that only a method uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = net(), nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.count += int(accel.rank()) + 1
        return self.loss(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x)).square().mean()


def replaced_buffers() -> None:
    raw = Averages()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for step in range(4):
        optimizer.zero_grad()
        (model(data(step, accel.rank())) if step % 2 else model.loss(data(step, accel.rank()))).backward()
        optimizer.step()
        assert equal_on_all_ranks(raw)
    assert raw.mean.abs().sum() > 0


def test_replaced_buffers_and_methods_keep_the_ranks_equal() -> None:
    run(2, replaced_buffers)


class Fails(torch.autograd.Function):
    """Its backward is the last of all, when every parameter has its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mood = net(), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mood == "forward":
            raise ValueError("forward")
        y = self.inner(x)
        if self.mood == "backward":
            y.register_hook(lambda g: 1 / 0)
        if self.mood == "late":
            self.inner[0].weight.register_hook(self.late)
        if self.mood == "last":
            return self.inner(Fails.apply(x.requires_grad_(True)))
        return y

    def late(self, gradient: torch.Tensor) -> None:
        if self.mood == "late":
            raise ZeroDivisionError


def exceptions() -> None:
    raw, other = Moody(), Moody()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    reference, ref_optimizer, _ = accel.setup(other, torch.optim.SGD(other.parameters(), lr=0.1))
    for step, mood in enumerate(["", "forward", "backward", "late", "last", "", "late", "last", ""]):
        raw.mood = mood
        optimizer.zero_grad()
        if mood:
            with pytest.raises((ValueError, ZeroDivisionError)):
                model(data(step, accel.rank())).square().mean().backward()
            continue
        for m, o in ((model, optimizer), (reference, ref_optimizer)):
            o.zero_grad()
            m(data(step, accel.rank())).square().mean().backward()
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), other.parameters(), strict=True))
    assert equal_on_all_ranks(raw)
    for mood, message in (("late", "no gradient"), ("last", "did not end")):
        raw.mood = mood
        optimizer.zero_grad()
        with pytest.raises(ZeroDivisionError):
            model(data(0, accel.rank())).mean().backward()
        raw.mood = ""
        before = copy.deepcopy(raw.state_dict())
        with pytest.raises(accel.BackendError, match=message):
            optimizer.step()
        assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
    assert accel.teardown(model) is raw
    accel.setup(raw, object.__getattribute__(optimizer, "_accel_raw"))


def test_an_exception_leaves_the_engine_usable() -> None:
    run(2, exceptions)


# -- uneven inputs --------------------------------------------------------------------------------------------------------


def uneven(bn: bool) -> None:
    raw = net(bn)
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters(), lr=0.01))
    for epoch in range(2):
        with accel.join(model):
            for step in range(3 + accel.rank() * 2):
                optimizer.zero_grad()
                model(data(step + 100 * epoch, accel.rank())).square().mean().backward()
                optimizer.step()
        assert equal_on_all_ranks(raw)
        state = torch.cat([s["exp_avg"].reshape(-1) for s in optimizer.state.values()])
        everywhere = accel.all_gather(state[None])
        assert torch.equal(everywhere[0], everywhere[1])
    optimizer.zero_grad()
    model(data(0, accel.rank())).square().mean().backward()
    optimizer.step()
    assert equal_on_all_ranks(raw)


@pytest.mark.parametrize("bn", [False, True])
def test_join_ends_with_equal_weights_and_optimizer_state(bn: bool) -> None:
    run(2, uneven, bn)


def short_timeouts(name: str) -> Any:
    accel.init(timeout=5)
    return globals()[name]()


# -- what changes under the engine ----------------------------------------------------------------------------------------


def other_dtype() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    model.double()
    model(data(0, accel.rank()).double()).mean().backward()
    with pytest.raises(accel.BackendError, match="dtype"):
        optimizer.step()


def gradients_from_before() -> None:
    raw = net()
    raw(data(0, accel.rank())).square().mean().backward()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    optimizer.step()
    assert equal_on_all_ranks(raw)
    parameters = list(raw.parameters())
    for step in range(3):
        loss = raw(data(step, accel.rank())).square().mean()
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g
        optimizer.step()
        assert equal_on_all_ranks(raw)


def gradients_after_a_step() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        model(data(0, accel.rank())).square().mean().backward()
        optimizer.step()
        before = [p.detach().clone() for p in raw.parameters()]
        for p in raw.parameters():
            p.grad = torch.full_like(p, 2.0 * accel.rank())
        optimizer.step()
        for p, old in zip(raw.parameters(), before, strict=True):
            torch.testing.assert_close(p.detach(), old - 0.1)


def closure_on_one_rank() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(data(0, accel.rank())).square().mean()
        loss.backward()
        return loss if accel.rank() else None

    with pytest.raises(accel.RankMismatchError, match="1 of 2"):
        optimizer.step(closure)


def scaler_with_local_gradients() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    with accel.no_sync(model):
        loss = model(data(0, accel.rank())).square().mean() * (float("inf") if accel.rank() == 0 else 1.0)
        scaler.scale(loss).backward()
    before = copy.deepcopy(raw.state_dict())
    with pytest.raises(accel.PrecisionError, match="not reduced"):
        scaler.step(optimizer)
    assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())


@pytest.mark.parametrize(
    "case",
    [other_dtype, gradients_from_before, gradients_after_a_step, closure_on_one_rank, scaler_with_local_gradients],
)
def test_what_changes_under_the_engine(case: Any) -> None:
    run(2, case)


# -- a backward that leaves the reducer waiting ------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.tanh(self.trunk(x))
        return self.left(features), self.right(features)


def heads(option: dict[str, Any]) -> float:
    """One backward for each head: the largest difference from one process; buckets of one parameter or of all."""
    torch.manual_seed(0)
    reference, ours = Heads(), Heads()
    ours.load_state_dict(reference.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (reference, ours)]
    model, handle, _ = accel.setup(ours, optimizers[1], backend=accel.DDP(**option))
    for step in range(5):
        everything = torch.cat([data(step, rank) for rank in range(accel.world_size())])
        for m, o, x in ((reference, optimizers[0], everything), (model, handle, data(step, accel.rank()))):
            o.zero_grad()
            left, right = m(x)
            first, second = (left, right) if step % 2 else (right, left)
            first.square().mean().backward(retain_graph=True)
            second.square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            o.step()
    assert equal_on_all_ranks(ours)
    return max(
        float((p - q).detach().abs().max()) for p, q in zip(reference.parameters(), ours.parameters(), strict=True)
    )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("option", [{}, {"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": False}])
def test_a_backward_for_each_head(option: dict[str, Any], world: int) -> None:
    assert max(run(world, heads, option)) < 1e-5


def test_a_compressed_backward_for_each_head() -> None:
    assert max(run(2, heads, {"comm_hook": "bf16"})) < 0.05


def a_head_without_its_backward() -> None:
    torch.manual_seed(0)
    raw = Heads()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="ddp")
    model(data(0, accel.rank()))[0].sum().backward(retain_graph=True)
    torch.ones((), requires_grad=True).backward()  # another graph's
    optimizer.step()


def test_a_head_that_gets_no_gradient_is_named() -> None:
    for message in refusals(2, a_head_without_its_backward, error="BackendError"):
        assert "right.weight, right.bias" in message


def two_backwards_of_a_static_graph() -> None:
    heads({"static_graph": True})


def test_two_backwards_of_a_static_graph_are_refused() -> None:
    for message in refusals(2, two_backwards_of_a_static_graph, error="BackendError"):
        assert "add the losses up" in message
