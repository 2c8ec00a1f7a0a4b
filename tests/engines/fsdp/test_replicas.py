"""fsdp with ``replicas``: copies of the model, each divided over its own ranks (HSDP). All at 4 ranks, 2 copies of 2."""

from __future__ import annotations

import re

import pytest
import torch

import accel
from tests.distributed import refusals, run
from tests.engines.matrix import cells_of, check_cells, in_pairs
from tests.engines.test_contract import check_state
from tests.models import adamw, mlp

TWO = accel.FSDP(replicas=2)


def test_parity() -> None:
    """N steps give the weights and optimizer state of one process on the whole batch."""
    for rank, failures in enumerate(run(4, check_cells, in_pairs(cells_of(TWO)), timeout=240)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures)


def test_whole_state() -> None:
    run(4, check_state, TWO, timeout=240)


def drift(wrong: int) -> None:
    raw = mlp(8, 8, 4)
    model, optimizer, _ = accel.setup(raw, adamw(raw), backend=accel.FSDP(replicas=2, drift_check=2))
    for step in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step == 2 and accel.rank() == wrong:
            raw[0].weight._local_tensor.data[0, 0] += 1  # type: ignore[index]


@pytest.mark.parametrize(("wrong", "ranks"), [(3, (1, 3)), (0, (0, 2))])
def test_copies_that_drift_apart(wrong: int, ranks: tuple[int, int]) -> None:
    named = rf"0\.weight \(shard {wrong % 2}\) is \w+ on rank {ranks[0]}; \w+ on rank {ranks[1]}"
    for message in refusals(4, drift, wrong, error="RankMismatchError", breaks=True):
        assert re.search(named, message), message
