"""What accel says about itself: accel.summary, accel.effective_batch_size, the lines of setup; and accel.any_rank."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import accel
from accel.memory import human
from tests.distributed import run


def loader(batch_size: int | None = 8, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(64, 2)), batch_size, **arguments)


def summarise() -> str:
    model = nn.Sequential(nn.Linear(100, 1000), nn.BatchNorm1d(1000))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, _ = accel.setup(model, optimizer)
    model(torch.ones(4, 100).to(accel.device())).sum().backward()
    optimizer.step()
    return accel.summary(model)


@pytest.mark.parametrize("world", [1, 2])
def test_summary(world: int) -> None:
    for rank, text in enumerate(run(world, summarise)):
        first, *lines = text.split("\n")
        assert first == "Sequential"
        rows = dict(line.strip().split(": ", 1) for line in lines)
        assert rows["backend"].startswith("ddp on 2 ranks (" if world == 2 else "single on 1 ranks (")
        assert rows["backend"].endswith(", 32-true")
        assert rows["options"].startswith("DDP(" if world == 2 else "Single(")
        # 100 * 1000 weights, 1000 of the bias, twice 1000 of the norm.
        assert rows["parameters"] == "103,000 (102,000 trainable)"
        assert rows["optimizers"] == "AdamW"
        # 2 * 1000 + 1 buffers, of which one is int64, and two moments of trainable parameters.
        weights, state = human((103_000 + 2000) * 4 + 8), human(2 * 102_000 * 4)
        assert rows[f"on rank {rank}"] == f"weights and buffers {weights}, optimizer state {state}"


def sizes() -> tuple[int, ...]:
    batches = BatchSampler(SequentialSampler(range(64)), 5, drop_last=False)
    own = DataLoader(TensorDataset(torch.zeros(64, 2)), batch_sampler=batches)
    raw = loader()
    handle = accel.setup(nn.Linear(2, 2), None, raw)[2]
    seen = accel.all_reduce(torch.tensor([len(next(iter(handle))[0])]), "sum").item()
    return int(seen), *(accel.effective_batch_size(one) for one in (handle, raw, own))


@pytest.mark.parametrize("world", [1, 2])
def test_effective_batch_size(world: int) -> None:
    for found in run(world, sizes):
        assert found == (8 * world, 8 * world, 8 * world, 5 * world)
    with pytest.raises(accel.LoaderError, match="has no batch_size"):
        accel.effective_batch_size(loader(None))


def lines_of_setup() -> list[str]:
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("accel")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model, data = nn.Linear(2, 2), loader()
        for _ in range(2):
            accel.setup(model, None, [data, loader(None)])
        accel.setup(model, torch.optim.SGD(model.parameters(), 0.1), data)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return lines


def test_setup_logs_once_on_rank_0() -> None:
    first, second = run(2, lines_of_setup)
    kind = accel.device().type
    assert first == [f"Linear: backend ddp, 32-true, 2 x {kind}", "effective batch size: 8 x 2 ranks = 16"]
    assert second == []


def stop_when(rank: int, last: int) -> tuple[int, bool]:
    steps = 0
    while not accel.any_rank(np.bool_(accel.rank() == rank and steps == last)):
        steps += 1
    return steps, accel.any_rank(torch.tensor(False))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_rank_stops_all(world: int) -> None:
    assert run(world, stop_when, world - 1, 3) == [(3, False)] * world
