"""What stages send each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines.pipeline.passes import PipelineGradients as Channel
from tests.distributed import live_tensors, outcomes, run
from tests.engines.pipeline.training import apart, batch, net, one_step
from tests.faults import Fault
from tests.models import sgd


class Detached(nn.Module):
    """Gives its input no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.detach())


#: A pipeline's stages, and those that are frozen.
STAGES = {"all trainable": (), "first frozen": (0,), "detached": ()}


def messages_in_backward(stages: str, checkpoint: str) -> list[tuple[str, tuple[int, int]]]:
    """Train on the sum of two losses. Return what this rank sends and receives in backward, in order."""
    torch.manual_seed(0)
    raw = nn.Sequential(*(nn.Linear(6, 6) for _ in range(accel.world_size())))
    if stages == "detached":
        raw[1] = Detached()
    for frozen in STAGES[stages]:
        raw[frozen].requires_grad_(False)
    plain = copy.deepcopy(raw)
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=3, checkpoint=checkpoint))
    seen: list[tuple[str, tuple[int, int]]] = []

    def note(verb: str) -> Any:
        original = getattr(Channel, verb)

        def call(channel: Any, rank: int, place: tuple[int, int], *values: Any) -> Any:
            seen.append((verb, place))
            return original(channel, rank, place, *values)

        return call

    reference = sgd(plain)
    with pytest.MonkeyPatch.context() as patch:
        for verb in ("send", "receive"):
            patch.setattr(Channel, verb, note(verb))
        losses = [m(batch(0)[0]).square().mean() + m(batch(1)[0]).abs().mean() for m in (model, plain)]
        seen.clear()
        losses[0].backward()
    losses[1].backward()
    optimizer.step()
    reference.step()
    accel.teardown(model)
    assert apart(raw, plain) < 1e-5
    return seen


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stages", STAGES)
def test_messages_of_neighbors_have_one_order(stages: str, world: int) -> None:
    """A deadlock needs two ranks that send in different orders."""
    places = [(forward, number) for forward in (2, 1) for number in (2, 1, 0)]
    for checkpoint in ("never", "always"):
        for rank, seen in enumerate(run(world, messages_in_backward, stages, checkpoint)):
            expected = []
            for place in places:
                expected += [("receive", place)] if rank < world - 1 else []
                expected += [("send", place)] if rank > 0 else []
            assert seen == expected


def live_after_more() -> list[int]:
    """Return the live tensors after steps and forwards. The engine ends with its model."""
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=4))
    counts = []
    for step in range(4):
        one_step(model, optimizer, step)
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch(0)[0])
        counts.append(live_tensors())
    return counts[1:]


def test_sent_tensors_are_let_go_of() -> None:
    for counts in run(2, live_after_more):
        assert len(set(counts)) == 1


def two_forwards() -> None:
    raw = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 3))
    model = accel.setup(raw, backend=accel.Pipeline(balance=[1, 1, 1, 1])).model
    model(batch(0)[0])
    model(batch(1)[0])


def test_a_rank_ends_the_others() -> None:
    end = Fault("exit 3", at="torch.nn:Identity.forward", rank=2, turn=2)
    results = outcomes(4, two_forwards, breaks=True, fails=[end])
    assert results[2].error == ("Died",)
    for rank in (0, 1, 3):
        assert "AccelError" in results[rank].error, results[rank].trace
        assert results[rank].seconds < 50  # the group's own timeout is 60 s
