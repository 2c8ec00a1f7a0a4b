"""The engines of torch's own parts on CUDA devices: what the host waits for, and whether that is enough to be right."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.process import packing
from tests.distributed import run
from tests.gpu import gpus

pytestmark = gpus(1)

WIDTH = 512


def net(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(layers))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 3))


def batch(step: int, rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 3, generator=generator)
    return x.to(accel.device()), y.to(accel.device())


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """What torch says of calls inside that wait for the device."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield said
        finally:
            torch.cuda.set_sync_debug_mode("default")
            said += [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)]


class Pair:
    """The same model under accel, and plain on the batches of all ranks (``together``: they read one batch)."""

    def __init__(self, backend: Any, together: bool = False, **options: Any) -> None:
        accel.init()
        self.raw, self.plain = net(), net().to(accel.device())
        self.model, self.optimizer, _ = accel.setup(self.raw, sgd(self.raw), backend=backend, **options)
        self.reference = sgd(self.plain)
        self.ranks = range(1 if together else accel.world_size())
        self.rank = 0 if together else accel.rank()

    def step(self, number: int, rows: int = 16) -> list[str]:
        """One step of both; what accel's waited for."""
        batches = [batch(number, rank, rows) for rank in self.ranks]
        self.reference.zero_grad()
        torch.stack([F.mse_loss(self.plain(x), y) for x, y in batches]).mean().backward()
        self.reference.step()
        x, y = batches[self.rank]
        with waits() as said:
            self.optimizer.zero_grad()
            accel.backward(F.mse_loss(self.model(x), y))
            self.optimizer.step()
        return said

    def distance(self) -> float:
        full = accel.full_state_dict(self.model)
        return max(float((full[n].to(v.device) - v).abs().max()) for n, v in self.plain.state_dict().items())


def pipelined(options: dict[str, Any], gloo: bool) -> None:
    if gloo:
        accel.init(process_group="gloo")
    pair = Pair(accel.Pipeline(**options), together=True)
    for step, rows in enumerate([16, 16, 16, 5, 16, 1]):  # the last batch of an epoch is smaller
        said = pair.step(step, rows)
        assert gloo or not said, said
        with torch.no_grad():
            x, _ = batch(step, 0, rows)
            assert float((pair.model(x) - pair.plain(x)).abs().max()) < 1e-4
    assert pair.distance() < 1e-4


OPTIONS = [{"chunks": 1}, {"chunks": 4, "checkpoint": "always"}, {"chunks": 4, "checkpoint": "never"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=gpus(2)), pytest.param(4, marks=gpus(4))])
def test_a_pipeline_over_nccl(ranks: int, options: dict[str, Any]) -> None:
    """On a CPU heads and contents travel alike, and nothing is computed behind the host."""
    accel.launch(pipelined, options, False, num_processes=ranks)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_pipeline_on_one_gpu(options: dict[str, Any]) -> None:
    """Contents go through the hosts' memory, and sums through pinned memory: on a CPU they are there already."""
    run(2, pipelined, options, True, timeout=120)


def differ(where: str) -> None:
    pair = Pair(accel.Pipeline(chunks=2), together=True)
    pair.step(0)
    x, y = batch(1, 0, 16)
    pair.optimizer.zero_grad()
    mine = accel.rank() == 1
    with pytest.raises(accel.RankMismatchError, match="other values"):
        F.mse_loss(pair.model(x + mine * (where == "batch")), y + mine * (where == "loss")).backward()
    assert all(p.grad is None for p in pair.raw.parameters())
    pair.step(2)
    assert pair.distance() < 1e-4


@gpus(2)
@pytest.mark.parametrize("where", ["batch", "loss"])
def test_a_pipeline_finds_differences(where: str) -> None:
    """The sums are read from pinned memory behind an event, which a CPU does not have."""
    accel.launch(differ, where, num_processes=2)


def accumulated() -> None:
    pair = Pair("fsdp")
    for step in range(3):
        pair.step(step)
    batches = {n: [batch(n, rank, 16) for rank in pair.ranks] for n in (10, 11)}
    for pairs in batches.values():
        torch.stack([F.mse_loss(pair.plain(x), y) for x, y in pairs]).mean().backward()
    pair.reference.step()
    with waits() as said:
        with accel.no_sync(pair.model):
            x, y = batches[10][pair.rank]
            F.mse_loss(pair.model(x), y).backward()
        x, y = batches[11][pair.rank]
        F.mse_loss(pair.model(x), y).backward()
        pair.optimizer.step()
    assert not said
    pair.optimizer.zero_grad()
    pair.reference.zero_grad()
    assert not pair.step(12)
    assert pair.distance() < 1e-4


@gpus(2)
def test_fsdp_accumulates_without_reading_the_device() -> None:
    accel.launch(accumulated, num_processes=2)


def owned() -> None:
    packing._PIECE_BYTES = 1 << 20  # several of them, whole and ragged ones
    pair = Pair("sharded")
    said = [pair.step(step) for step in range(6)]
    assert not any(said[2:]), said
    assert pair.distance() < 1e-4


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=gpus(2)), pytest.param(4, marks=gpus(4))])
def test_sharded_broadcasts_its_weights(ranks: int) -> None:
    """It is in place, on nccl's stream; on a CPU there are broadcasts instead, or a copy of gloo's."""
    accel.launch(owned, num_processes=ranks)


def test_fp16_waits_once_a_step() -> None:
    """torch itself says what waits for a CUDA device; on a CPU reads are counted in Python."""
    pair = Pair("single", precision="16-mixed")
    for step in range(3):
        assert len(pair.step(step)) == 1
