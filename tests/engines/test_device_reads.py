"""How often a usual step of each engine waits for the device, and how many messages its ranks exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accel
from accel.process import current
from tests.backends import need
from tests.device_reads import DeviceReads
from tests.distributed import run
from tests.models import mlp, sgd

#: The counted steps come after the ranks know the order of messages, and between two drift checks (at 1, 17, ...).
_WARM, _COUNTED = 4, 3


def step(model: Any, optimizer: Any, clip: bool, micro_batches: int) -> None:
    optimizer.zero_grad()
    for _ in range(micro_batches):
        accel.backward(model(torch.randn(4, 8)).square().mean())
    if clip:
        accel.clip_grad_norm_(model, 1.0)
    optimizer.step()


def count(backend: Any, precision: str, clip: bool, micro_batches: int) -> tuple[dict[str, int], float]:
    """Reads in one step by their place, and exchanges of messages in one step."""
    raw = mlp(8, 16, 16, 4)
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=backend, precision=precision)
    for _ in range(_WARM):
        step(model, optimizer, clip, micro_batches)
    rounds = current().rounds
    with DeviceReads() as reads:
        for _ in range(_COUNTED):
            step(model, optimizer, clip, micro_batches)
    return {place: number // _COUNTED for place, number in reads.places.items()}, (current().rounds - rounds) / _COUNTED


#: What a usual step reads, and how many messages its ranks exchange; for each backward with "pipeline".
USUAL = [
    ("ddp", 0, 0),
    ("sharded", 0, 1),
    ("fsdp", 0, 0),
    (accel.DeepSpeed(stage=1), 0, 1),
    (accel.DeepSpeed(stage=2), 0, 1),
    (accel.DeepSpeed(stage=3), 0, 1),
    # The first forwards and backwards read sums of the batch and of the output's gradient.
    ("pipeline", 0, 1),
]
#: What clipping adds: reads and messages.
CLIPPING = {"sharded": (0, 1)}


@pytest.mark.parametrize(("clip", "micro_batches"), [(False, 1), (True, 1), (False, 2)])
@pytest.mark.parametrize(("backend", "reads", "messages"), USUAL, ids=lambda value: str(value)[:30])
def test_a_step_reads_no_more(backend: Any, reads: int, messages: int, clip: bool, micro_batches: int) -> None:
    need(backend, 2)
    more = CLIPPING.get(str(backend), (0, 0)) if clip else (0, 0)
    times = micro_batches if backend == "pipeline" else 1
    for places, exchanged in run(2, count, backend, "32-true", clip, micro_batches):
        assert sum(places.values()) == reads * times + more[0], places
        assert exchanged == messages * times + more[1]


@pytest.mark.parametrize("backend", [backend for backend, *_ in USUAL], ids=lambda value: str(value)[:30])
def test_fp16_reads_the_device_once(backend: Any) -> None:
    need(backend, 2)
    usual = run(2, count, backend, "32-true", True, 1)
    for (places, _), (before, _) in zip(run(2, count, backend, "16-mixed", True, 1), usual, strict=True):
        assert sum(places.values()) == sum(before.values()) + 1, places
