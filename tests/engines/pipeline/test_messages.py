"""What stages send each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines.pipeline.passes import Channel
from tests.distributed import live_tensors, run
from tests.engines.pipeline.training import apart, batch, net, one_step
from tests.models import sgd

# -- messages ---------------------------------------------------------------------------------------------------------


class Detached(nn.Module):
    """Gives its input no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.detach())


#: A pipeline's stages, and those that are frozen.
STAGES = {"all trainable": (), "first frozen": (0,), "last frozen": (-1,), "detached": ()}


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

    def send(channel: Any, to: int, place: tuple[int, int], *values: Any) -> None:
        seen.append(("send", place))
        original[0](channel, to, place, *values)

    def receive(channel: Any, source: int, place: tuple[int, int]) -> Any:
        seen.append(("receive", place))
        return original[1](channel, source, place)

    original = Channel.send, Channel.receive
    reference = sgd(plain)
    first, second = (m(batch(0)[0]) for m in (model, plain))
    losses = [first.square().mean() + model(batch(1)[0]).abs().mean()]
    losses += [second.square().mean() + plain(batch(1)[0]).abs().mean()]
    Channel.send, Channel.receive = send, receive  # type: ignore[method-assign]
    try:
        losses[0].backward()
    finally:
        Channel.send, Channel.receive = original  # type: ignore[method-assign]
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


class Changing(nn.Module):
    """Gives another structure, shape or dtype by what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        h = self.layer(x["x"])
        if x["kind"] == "wide":
            return {"h": torch.cat([h, h], dim=1), "kind": "wide"}
        if x["kind"] == "half":
            return {"h": h.bfloat16(), "kind": "half", "parts": [h.detach(), None]}
        return {"h": h, "kind": "a text longer than the first piece of a message " * 30}


class Back(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: dict[str, Any]) -> torch.Tensor:
        h = x["h"].float()
        extra = x["parts"][0].mean() if "parts" in x else 1.0 if len(x["kind"]) < 9 else 2.0
        return self.layer(h[:, :6] + h[:, -6:]) * extra


def changing_forms() -> float:
    def build() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(Changing(), Back())

    raw, plain = build(), build()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=1))
    reference = sgd(plain)
    for step, (kind, rows) in enumerate(
        [("plain", 7), ("wide", 7), ("half", 7), ("plain", 2), ("half", 0), ("wide", 1)]
    ):
        for m, o in ((model, optimizer), (plain, reference)):
            o.zero_grad()
            out: torch.Tensor = m({"x": batch(step, 7)[0][:rows], "kind": kind})
            out.square().sum().nan_to_num().backward()
            o.step()
    accel.teardown(model)
    return apart(raw, plain)


def test_every_message_may_have_another_form() -> None:
    assert max(run(2, changing_forms)) < 1e-5


# -- memory -----------------------------------------------------------------------------------------------------------


def kept_after(what: str) -> tuple[int, int]:
    """The live tensors before and after more of the same."""
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=4))
    for step in range(2):
        one_step(model, optimizer, step)
        optimizer.zero_grad()

    def evaluate() -> None:
        with torch.no_grad():
            model(batch(0)[0])

    evaluate()
    before = live_tensors()
    if what == "forwards":
        evaluate()
        evaluate()
    else:
        one_step(model, optimizer, 2)
        optimizer.zero_grad()
    return before, live_tensors()


@pytest.mark.parametrize("what", ["forwards", "a backward"])
def test_what_was_sent_is_let_go_of(what: str) -> None:
    for before, after in run(2, kept_after, what):
        assert after == before
