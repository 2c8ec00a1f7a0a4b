"""Every way in which a reduction of ``ddp`` can go wrong: parameters unused, missing, frozen, exchanged, left waiting."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward as bound_early
from torch.utils.checkpoint import checkpoint

import accel
from tests.distributed import outcomes, refusals, run
from tests.engines.test_ddp import data, net
from tests.models import distance, equal_on_all_ranks

# -- unused, missing, frozen ------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        features = self.body(x)
        both = self.left(features) + self.right(features)
        return {"left": self.left(features), "right": self.right(features), "both": both}[side]

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return self(x, "both").square().mean()


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


def ignored(names: list[str]) -> bool:
    raw, reference = net(), net()
    raw._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="ddp")
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        for rank in range(accel.world_size()):
            (reference(data(step, rank)).square().mean() / accel.world_size()).backward()
        model(data(step, accel.rank())).square().mean().backward()
        optimizer.step()
        plain.step()
    return equal_on_all_ranks(raw) and distance(raw, reference) < 1e-6


def test_what_torchs_reducer_is_told_to_ignore_is_averaged() -> None:
    first, *rest = dict(net().named_parameters())
    for names in ([first], rest, [first, *rest]):
        assert run(2, ignored, names) == [True, True]


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
    assert "AccelError" in second.error
    for text in (first.value, second.message):
        assert "2 parameters got no gradient in the last backward" in text
        assert "right.weight, right.bias" in text
        assert "backend=accel.DDP(find_unused_parameters=True)" in text


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


def some_inputs() -> None:
    raw = TwoHeads()
    backend = accel.DDP(find_unused_parameters=True)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
    model(data(0, accel.rank()), "both").square().mean().backward(inputs=list(raw.left.parameters()))
    with pytest.raises(accel.BackendError, match=r"right\.weight.* leave inputs= out of backward\(\)"):
        optimizer.step()


def test_a_backward_to_some_parameters_is_refused_with_what_helps() -> None:
    run(2, some_inputs)


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


def frozen_before_a_method() -> list[float]:
    found = []
    backends: list[Any] = ["ddp", *(accel.DeepSpeed(stage=stage) for stage in range(4))]
    for backend in backends:
        raw, reference = TwoHeads(), TwoHeads()
        model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(4):
            for module in (raw, reference):
                module.left.requires_grad_(step % 2 == 0)
            for rank in range(accel.world_size()):
                loss = reference.total(data(step, rank)) + reference(data(step, rank), "both").square().mean()
                (loss / accel.world_size()).backward()
            model.total(data(step, accel.rank())).backward()
            model(data(step, accel.rank()), "both").square().mean().backward()
            for one in (plain, optimizer):
                one.step()
                one.zero_grad()
        whole = accel.full_state_dict(model)
        found.append(max(float((whole[k] - v).abs().max()) for k, v in reference.state_dict().items()))
        accel.teardown(model)
    return found


def test_a_method_may_train_before_the_forward_that_finds_the_change() -> None:
    assert max(*run(2, frozen_before_a_method)[0]) < 1e-6


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


# -- uneven inputs ----------------------------------------------------------------------------------------------------


def short_timeouts(name: str) -> Any:
    accel.init(timeout=5)
    return globals()[name]()


# -- what changes under the engine ------------------------------------------------------------------------------------


def other_dtype() -> None:
    raw, reference = net(), net().double()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    model.double()
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        model(data(step, accel.rank()).double()).square().mean().backward()
        for rank in range(accel.world_size()):
            (reference(data(step, rank).double()).square().mean() / accel.world_size()).backward()
        optimizer.step()
        plain.step()
    assert distance(raw, reference) < 1e-12


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


# -- a backward that leaves the reducer waiting -----------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.tanh(self.trunk(x))
        return self.left(features), self.right(features)


@dataclass
class Outputs:
    left: torch.Tensor
    right: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.left, self.right))


class HeadsAndSpare(Heads):
    """Of a dataclass's tensors the reducer knows from the forward on which parameters they use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return Outputs(*super().forward(x))


def heads(option: dict[str, Any]) -> float:
    """One backward for each head: the largest difference from one process; buckets of one parameter or of all."""
    return max(heads_of(kind, option) for kind in (Heads, HeadsAndSpare)[: 1 + ("find_unused_parameters" in option)])


def heads_of(kind: type[Heads], option: dict[str, Any]) -> float:
    torch.manual_seed(0)
    reference, ours = kind(), kind()
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
            bound_early(second.square().mean())
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            o.step()
    assert equal_on_all_ranks(ours)
    accel.teardown(model)
    return distance(reference, ours)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "option", [{}, {"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
)
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


def calls_in_backward(num_layers: int) -> int:
    """Calls of Python functions in the backward of a usual step."""
    raw = nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_layers)])
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    events = list[str]()
    for step in range(2):
        loss = model(data(step, accel.rank())).mean()
        events.clear()
        sys.setprofile(lambda frame, event, _: events.append(event))
        loss.backward()
        sys.setprofile(None)
        optimizer.step()
    accel.teardown(model)
    return events.count("call")


def calls_for_more_parameters() -> None:
    assert calls_in_backward(2) == calls_in_backward(20) > 0


def test_no_python_runs_for_each_gradient() -> None:
    run(2, calls_for_more_parameters)


def step_inside_a_backward() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="ddp")
    raw[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = copy.deepcopy(raw.state_dict())
    with pytest.raises(accel.BackendError, match="inside a backward"):
        model(data(0, accel.rank())).mean().backward()
    assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())


def thawed_for_another_graph() -> None:
    """The one backward that is reduced also brings a gradient that the reducer does not know of."""
    raw = net()
    raw[0].requires_grad_(False)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="ddp")
    x = data(0, accel.rank())
    loss = model(x).square().mean()
    raw[0].requires_grad_(True)
    (loss + raw(x).square().mean()).backward()
    optimizer.step()
    assert equal_on_all_ranks(raw)


@pytest.mark.parametrize("case", [step_inside_a_backward, thawed_for_another_graph])
def test_unusual_backwards(case: Any) -> None:
    run(2, case)


# -- met twice ---------------------------------------------------------------------------------------------------------


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def met_twice() -> float:
    raw, reference = Again(), Again()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="ddp")
    with pytest.raises(accel.BackendError, match="met a parameter a second time.*accel.no_sync"):
        model(data(0, accel.rank()).requires_grad_()).square().mean().backward()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        with accel.no_sync(model):
            model(data(step, accel.rank()).requires_grad_()).square().mean().backward()
        for rank in range(accel.world_size()):
            (reference(data(step, rank).requires_grad_()).square().mean() / accel.world_size()).backward()
        optimizer.step()
        plain.step()
    return distance(raw, reference)


def test_a_layer_in_two_reentrant_checkpoints_is_told_and_right_where_the_step_averages() -> None:
    assert max(run(2, met_twice)) < 1e-6
