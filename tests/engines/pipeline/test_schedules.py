"""A pipeline trains as one process does, however its batches are cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from tests.distributed import run
from tests.engines.pipeline.training import apart, batch, net, one_step
from tests.models import adamw, distance, sgd

#: Chunks, and which of them compute again in backward.
OPTIONS = [(1, "always"), (3, "always"), (3, "except_last"), (9, "except_last"), (9, "never")]
BALANCES = {1: [2, 4], 2: [5, 1], 4: [1, 1, 1, 3]}


def train_with_options() -> None:
    options: list[dict[str, Any]] = [{"chunks": chunks, "checkpoint": checkpoint} for chunks, checkpoint in OPTIONS]
    options.append({"balance": BALANCES[accel.world_size()], "chunks": 2})
    for option in options:
        raw, plain = net(), net()
        for module in (raw, plain):
            module[4] = module[1]  # one activation in two stages
        if accel.rank() > 0:  # rank 0's weights are everyone's
            for p in raw.parameters():
                p.data.add_(1.0)
        model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(**option))
        reference = sgd(plain)
        for step in range(3):
            assert distance(one_step(model, optimizer, step), one_step(plain, reference, step)) < 1e-5, option
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert distance(model(batch(9)[0]), plain(batch(9)[0])) < 1e-5, option
        accel.teardown(model)
        assert apart(raw, plain) < 1e-5, option


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_schedule_is_the_plain_loop(world: int) -> None:
    run(world, train_with_options, timeout=180)


class Branches(nn.Module):
    """Gives another structure, shape or dtype by its input, with a part that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        h = self.used(x["x"]) * x["number"]
        parts = [self.unused(x["x"]), x["x"].argmax(1), None]
        if x["kind"] == "wide":
            return {"h": torch.cat([h, h], dim=1), "parts": parts, "kind": "wide"}
        if x["kind"] == "double":
            return {"h": h.double(), "parts": parts, "scale": 0.5, "kind": "double"}
        return {"h": h, "parts": parts, "kind": "a long text " * 200}


class Merge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        h = x["h"].float()
        return self.layer(h[:, :6] + h[:, -6:]) * x.get("scale", 2.0), x["parts"][1]


def nested() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Branches(), Merge())


def train_nested(chunks: int) -> None:
    raw, plain = nested(), nested()
    model, optimizer, _ = accel.setup(raw, adamw(raw), backend=accel.Pipeline(chunks=chunks))
    reference = adamw(plain)
    for step, (kind, rows) in enumerate(
        [("plain", 7), ("wide", 7), ("double", 7), ("plain", 2), ("double", 1), ("wide", 3)]
    ):
        for m, o in ((model, optimizer), (plain, reference)):
            o.zero_grad()
            # Each micro-batch gets a tensor without dimensions.
            out, index = m({"x": batch(step)[0][:rows], "kind": kind, "number": torch.tensor(0.5)})
            assert not index.requires_grad
            assert index.dtype is torch.int64
            out.square().mean().backward()
            o.step()
    accel.teardown(model)
    assert apart(raw, plain) < 1e-5
    # No gradient is not a gradient of zero: AdamW would decay the weights.
    assert torch.equal(raw[0].unused.weight, nested()[0].unused.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("chunks", [1, 3])
def test_each_message_may_have_another_form(chunks: int) -> None:
    run(2, train_nested, chunks)


def dropout() -> None:
    """The same masks in the second computation as in the first."""
    results = []
    for checkpoint in ("always", "never"):
        raw = net(nn.Dropout(0.5))
        model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2, checkpoint=checkpoint))
        torch.manual_seed(5)
        for step in range(3):
            one_step(model, optimizer, step)
        results.append(accel.teardown(model))
    assert apart(results[0], results[1]) < 1e-6  # type: ignore[arg-type]


def test_a_second_computation_changes_nothing() -> None:
    run(2, dropout)


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
