"""Whole state of a divided model, in and out: in pieces of bounded size, and by each of torch's ways to load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines.base import gather as gathering
from tests.backends import need
from tests.checkpoint.helpers import differences
from tests.distributed import run
from tests.measured import restart_peak, status

DIVIDED: list[Any] = ["fsdp", accel.DeepSpeed(stage=3), "pipeline"]
ROWS = 900


def build(backend: Any) -> tuple[nn.Module, Any, Any]:
    """Weights of 1.4 MB, most of them in one, stepped once."""
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(400, ROWS), nn.Tanh(), nn.Linear(ROWS, 3))
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.1)
    model, optimizer, _ = accel.setup(raw, optimizer, backend=backend)
    model(torch.ones(4, 400)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return raw, model, optimizer


def reference() -> tuple[Any, Any]:
    raw, model, optimizer = build("single")
    states = {n: t.clone() for n, t in raw.state_dict().items()}, optimizer.state_dict()
    accel.teardown(model)
    return states


@contextmanager
def noted(sizes: list[int]) -> Iterator[None]:
    """The bytes of each exchange between the ranks."""
    real = gathering.broadcast_

    def broadcast(tensors: Iterable[torch.Tensor], *args: Any) -> None:
        given = list(tensors)
        sizes.append(sum(t.nbytes for t in given))
        real(given, *args)

    gathering.broadcast_ = broadcast
    try:
        yield
    finally:
        gathering.broadcast_ = real


def in_pieces(backend: Any) -> Sequence[Any]:
    gathering._BATCH_BYTES = 1 << 16  # type: ignore[misc]
    _, model, optimizer = build(backend)
    sizes: list[int] = []
    with noted(sizes):
        states = accel.full_state_dict(model), accel.full_state_dict(optimizer)
        assert max(sizes) <= 1 << 16 < ROWS * 400 * 4 / 4
        weights = {n: t.clone() for n, t in states[0].items()}, states[1]
        for one in (model, optimizer):
            got = accel.full_state_dict(one, rank0_only=True)
            assert bool(got) == accel.is_main()
        accel.teardown(model)
        assert max(sizes) <= 1 << 16
    return weights


@pytest.mark.parametrize("backend", DIVIDED, ids=str)
def test_full_state_is_gathered_in_batches(backend: Any) -> None:
    need(backend, 2)
    expected = run(1, reference)[0]
    for states in run(2, in_pieces, backend):
        assert not differences(states, expected, tolerance=1e-5)


def peak_of(backend: Any) -> tuple[int, int]:
    """How much more memory a rank has had while rank 0 took the whole state of 160 MB; and its size there."""
    gathering._BATCH_BYTES = 1 << 22  # type: ignore[misc]
    raw = nn.Sequential(nn.Linear(4000, 5000), nn.Linear(5000, 4000))
    model, _, _ = accel.setup(raw, backend=backend)
    accel.full_state_dict(model, rank0_only=True)
    before = restart_peak()
    full = accel.full_state_dict(model, rank0_only=True)
    return status("VmHWM") - before, sum(t.nbytes for t in full.values())


@pytest.mark.parametrize("backend", DIVIDED, ids=str)
def test_other_ranks_need_little_memory(backend: Any) -> None:
    need(backend, 2)
    (_, whole), (peak, none) = run(2, peak_of, backend)
    assert none == 0 < whole
    assert peak < whole / 4
