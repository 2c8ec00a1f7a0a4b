"""A pipeline trains as one process does, however its batches are cut."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests.distributed import outcomes, run
from tests.engines.pipeline.training import apart, batch, net, one_step
from tests.models import adamw, sgd

# -- one process is the reference -------------------------------------------------------------------------------------


def train_with_options() -> list[float]:
    world = accel.world_size()
    options: list[dict[str, Any]] = [
        {"chunks": chunks, "checkpoint": checkpoint}
        for chunks, checkpoint in itertools.product((1, 3, 9), ("always", "except_last", "never"))
    ]
    options += [
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
        assert len(worst) == 10
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
    model, optimizer, _ = accel.setup(raw, adamw(raw), backend=accel.Pipeline(chunks=3))
    reference = adamw(plain)
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


# -- autograd ---------------------------------------------------------------------------------------------------------


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


class Scaled(nn.Module):
    """Of a dict with a tensor without dimensions, which goes to all micro-batches."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["x"] * batch["scale"]


def batch_with_a_number() -> None:
    scales = [torch.tensor(3.0, requires_grad=True) for _ in range(2)]
    raw = nn.Sequential(Scaled(), *net())
    plain = copy.deepcopy(raw)
    model = accel.setup(raw, backend=accel.Pipeline(chunks=3)).model
    for m, scale in zip((model, plain), scales, strict=True):
        m({"x": batch(0)[0], "scale": scale}).square().mean().backward()
    torch.testing.assert_close(scales[0].grad, scales[1].grad)


def test_a_number_in_the_batch_gets_its_gradient_from_all_micro_batches() -> None:
    run(2, batch_with_a_number)


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
    x, want = (batch(0)[0].requires_grad_() for _ in range(2))
    found = torch.autograd.grad(model(x).square().mean(), x)
    torch.testing.assert_close(found, torch.autograd.grad(plain(want).square().mean(), want))
    assert all(p.grad is None for p in raw.parameters())
    loss = model(batch(0)[0]).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = model(batch(0)[0]).sum()  # whose own graph says nothing
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_without_accumulation_and_what_has_none() -> None:
    for outcome in outcomes(2, explicit_gradients, breaks=True):
        assert not outcome.error, outcome.trace


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
