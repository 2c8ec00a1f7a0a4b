"""The texts and numbers about a model: accel.summary, accel.effective_batch_size, the lines of setup, accel.any_rank."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import accel
from accel.memory import human
from tests.distributed import run
from tests.models import logged

DATA = TensorDataset(torch.zeros(64, 2))


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
        assert rows["backend"].startswith(f"{'ddp' if world == 2 else 'single'}, world size {world} (")
        assert rows["backend"].endswith(", 32-true")
        assert rows["options"].startswith("DDP(" if world == 2 else "Single(")
        # 100 * 1000 weights, 1000 of the bias, twice 1000 of the norm.
        assert rows["parameters"] == "103,000 (102,000 trainable)"
        assert rows["optimizers"] == "AdamW"
        # 2 * 1000 + 1 buffers, of which one is int64, and two moments of trainable parameters.
        weights, state = human((103_000 + 2000) * 4 + 8), human(2 * 102_000 * 4)
        assert rows[f"on rank {rank}"] == f"weights and buffers {weights}, optimizer state {state}"


def lines_of_setup() -> tuple[list[str], list[int], int]:
    """Return the log of three setups, batch sizes, and the number of steps before rank 1 stops all."""
    model, data, batches = nn.Linear(2, 2), DataLoader(DATA, 8), BatchSampler(SequentialSampler(range(64)), 5, False)
    with logged(logging.INFO) as lines:
        for _ in range(2):
            accel.setup(model, None, [data, DataLoader(DATA, None)])
        loader = accel.setup(model, torch.optim.SGD(model.parameters(), 0.1), data).dataloaders
    own = DataLoader(DATA, batch_sampler=batches)
    seen = accel.all_reduce(torch.tensor([len(next(iter(loader))[0])]), "sum").item()
    steps = 0
    while not accel.any_rank(np.bool_(accel.rank() == 1 and steps == 3)):
        steps += 1
    assert not accel.any_rank(torch.tensor(False))
    return lines, [int(seen), *map(accel.effective_batch_size, (loader, data, own))], steps


def test_setup_logs_once_on_rank_0() -> None:
    first, second = run(2, lines_of_setup)
    kind = accel.device().type
    log = [f"Linear: backend ddp, 32-true, 2 x {kind}", "effective batch size: 8 x 2 ranks = 16"]
    assert first == (log, [16, 16, 16, 10], 3)
    assert second == ([], [16, 16, 16, 10], 3)
    with pytest.raises(accel.LoaderError, match="has no batch_size"):
        accel.effective_batch_size(DataLoader(DATA, None))
