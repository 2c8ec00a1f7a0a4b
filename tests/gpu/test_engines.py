"""The engines of torch's own parts on CUDA devices: what the host waits for, and whether that is enough to be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.process import packing
from tests.distributed import run
from tests.gpu import Pair, batch, gpus, waits

pytestmark = gpus(1)

WIDTH = 512


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(8))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 3))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)


def pipelined(options: dict[str, Any], gloo: bool) -> None:
    if gloo:
        accel.init(process_group="gloo")
    pair = Pair(net, sgd, accel.Pipeline(**options), together=True)
    for step, size in enumerate([16, 16, 16, 5, 16, 1]):  # the last batch of an epoch is smaller
        places = pair.step(step, size)
        assert gloo or not places, places
        with torch.no_grad():
            x = batch(step, 0, size, WIDTH)
            assert float((pair.model(x) - pair.plain(x)).abs().max()) < 1e-4
    assert pair.distance() < 1e-4


OPTIONS = [{"chunks": 1}, {"chunks": 4, "checkpoint": "always"}, {"chunks": 4, "checkpoint": "never"}]
RANKS = [pytest.param(2, marks=gpus(2)), pytest.param(4, marks=gpus(4))]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_pipeline_over_nccl(ranks: int, options: dict[str, Any]) -> None:
    """On a CPU heads and contents travel alike, and nothing is computed behind the host."""
    accel.launch(pipelined, options, False, num_processes=ranks)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_pipeline_on_one_gpu(options: dict[str, Any]) -> None:
    """Contents go through the hosts' memory, and sums through pinned memory: on a CPU they are there already."""
    run(2, pipelined, options, True, timeout=120)


def differ(where: str) -> None:
    pair = Pair(net, sgd, accel.Pipeline(chunks=2), together=True)
    pair.step(0)
    pair.optimizer.zero_grad()
    other = accel.rank() == 1
    x = batch(1, 0, 16, WIDTH) + other * (where == "batch")
    with pytest.raises(accel.RankMismatchError, match="different values"):
        (pair.model(x) - other * (where == "loss")).square().mean().backward()
    assert all(p.grad is None for p in pair.raw.parameters())
    pair.step(2)
    assert pair.distance() < 1e-4


@gpus(2)
@pytest.mark.parametrize("where", ["batch", "loss"])
def test_a_pipeline_finds_differences(where: str) -> None:
    """The sums are read from pinned memory behind an event, which a CPU does not have."""
    accel.launch(differ, where, num_processes=2)


def accumulated() -> None:
    pair = Pair(net, sgd, "fsdp")
    for step in range(3):
        pair.step(step)
    first, second = pair.batches(10), pair.batches(11)
    pair.plain_backward(first)
    pair.plain_backward(second)
    pair.plain_optimizer.step()
    with waits() as places:
        with accel.no_sync(pair.model):
            pair.model(first[pair.rank]).square().mean().backward()
        pair.model(second[pair.rank]).square().mean().backward()
        pair.optimizer.step()
    assert not places
    assert not pair.step(12)
    assert pair.distance() < 1e-4


@gpus(2)
def test_fsdp_accumulates_without_reading_the_device() -> None:
    accel.launch(accumulated, num_processes=2)


def owned() -> None:
    packing._PIECE_BYTES = 1 << 20  # several of them, whole and ragged ones
    pair = Pair(net, sgd, "sharded")
    places = [pair.step(step) for step in range(6)]
    assert not any(places[2:]), places
    assert pair.distance() < 1e-4


@pytest.mark.parametrize("ranks", RANKS)
def test_sharded_broadcasts_its_weights(ranks: int) -> None:
    """It is in place, on nccl's stream; on a CPU there are broadcasts instead, or a copy of gloo's."""
    accel.launch(owned, num_processes=ranks)


def test_fp16_waits_once_a_step() -> None:
    """torch itself says what waits for a CUDA device; on a CPU reads are counted in Python."""
    pair = Pair(net, sgd, "single", precision="16-mixed")
    for step in range(3):
        assert len(pair.step(step)) == 1
