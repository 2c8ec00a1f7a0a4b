"""The memory report, its predictions and the storages that engines really allocate; and other texts about a model."""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import accel
from accel.__main__ import main
from accel.engines import resolve
from accel.engines.base.memory import MemoryUse, TensorSize
from accel.memory import human, tensor_sizes
from examples.big import gpt_70b
from tests.backends import BACKENDS, engine_of, need
from tests.distributed import run
from tests.measured import measured
from tests.models import logged
from tests.programs import ROOT

OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=torch.tensor(0.1)),
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "adagrad": torch.optim.Adagrad,
}


def test_optimizer_state_before_the_first_step() -> None:
    for build in OPTIMIZERS.values():
        net = nn.ParameterList([torch.ones(12, 5), torch.ones(7, dtype=torch.bfloat16)])
        optimizer = build(list(net.parameters()))
        steps: list[object] = []
        optimizer.register_step_pre_hook(lambda *args, steps=steps: steps.append(args))
        state = repr(optimizer.state_dict())
        before = [p.state_bytes for p in tensor_sizes(net, [optimizer])]
        assert (repr(optimizer.state_dict()), steps) == (state, [])
        assert all(p.grad is None and bool((p == 1).all()) for p in net.parameters())
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        states = [optimizer.state.get(p, {}).values() for p in net.parameters()]
        expected = [sum(v.nbytes for v in state if isinstance(v, torch.Tensor)) for state in states]
        assert before == expected
        assert [p.state_bytes for p in tensor_sizes(net, [optimizer])] == expected


def test_frozen_parameters_and_tied_weights() -> None:
    net = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    net[0].requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters())
    half = 4 * (100 * 100 + 100)
    use = accel.memory_report(net, optimizer, ranks=[1]).predicted("ddp", 1)
    assert (use.parameters, use.gradients, use.optimizer_state) == (2 * half, half, 2 * half + 2 * 4)
    assert accel.memory_report(net.requires_grad_(False), ranks=[1]).predicted("single", 1).total == 2 * half
    tied = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    tied[1].weight = tied[0].weight
    first, second = torch.optim.Adagrad([tied[0].weight]), torch.optim.SGD([tied[1].bias], lr=0.1)
    use = accel.memory_report(tied, [first, second], ranks=[1]).predicted("single", 1)
    assert (use.parameters, use.optimizer_state) == (4 * 450, 4 * 400 + 4)


BUFFER = TensorSize(name="layers.buffer", shape=(3,), itemsize=4, is_buffer=True)
VECTOR = TensorSize(name="", shape=(64,), itemsize=4, optimizer=0, trainable=True, state_bytes=8 * 64)
EVEN = [BUFFER, *(replace(VECTOR, name=f"layers.{i}.weight") for i in range(16))]
N = 4 * 64 * 16
HALF = {"bf16": {"enabled": True}}


def keeping(limit: int) -> dict[str, Any]:
    """Keep parameters of at most this size in full."""
    return {"zero_optimization": {"stage3_param_persistence_threshold": limit}}


def predict(options: Any, tensors: list[TensorSize], world: int, module: nn.Module | None = None) -> MemoryUse:
    use = engine_of(options).predict(module or nn.Module(), tensors, options, world)
    assert use is not None
    return use


@pytest.mark.parametrize(
    ("options", "world", "units"),
    [
        (accel.DDP(gradient_as_bucket_view=True), 8, (1, 1, 2)),
        (accel.Sharded(), 4, (1, 1 / 4, 1 / 2)),
        (accel.FSDP(), 1, (1, 1, 2)),
        (accel.FSDP(), 64, (1 / 64, 1 / 64, 1 / 32)),
        (accel.FSDP(replicas=2), 8, (1 / 4, 1 / 4, 1 / 2)),
        (accel.DeepSpeed(), 4, (1, 1 / 4, 1 / 2)),
        (accel.DeepSpeed(stage=1, config=HALF), 4, (1 / 2, 1 / 4, 3 / 4)),
        (accel.DeepSpeed(stage=3, config=keeping(63)), 4, (1 / 4, 1 / 4, 1 / 2)),
        (accel.DeepSpeed(stage=3, config=keeping(64)), 4, (5 / 4, 1 / 4, 1 / 2)),
    ],
    ids=str,
)
def test_predictions_in_units_of_the_parameters(options: Any, world: int, units: tuple[float, ...]) -> None:
    """Parameters, gradients and AdamW's state; the buffers are on every rank."""
    use = predict(options, EVEN, world)
    assert (use.parameters / N, use.gradients / N, use.optimizer_state / N) == units
    assert use.buffers == 12
    assert use.total == N * sum(units) + 12 + use.buckets


class Net(nn.Sequential):
    """Weights above and below the size that ZeRO-3 shards, some of them frozen."""

    def __init__(self) -> None:
        layers = [nn.Linear(400, 400) for _ in range(6)]
        layers[0].requires_grad_(False)
        super().__init__(*layers, nn.Linear(400, 90), nn.BatchNorm1d(90))


def measure(options: Any) -> tuple[MemoryUse, MemoryUse]:
    """Return the predicted bytes, and those of this rank before the second step."""
    net = Net()
    model, optimizer, _ = accel.setup(net, OPTIMIZERS["adamw"](net.parameters()), backend=options)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 400, device=accel.device())).square().mean().backward()
        accel.clip_grad_norm_(model, float("inf"))
        if step == 0:
            optimizer.step()
    raw = Net()
    tensors = tensor_sizes(raw, [OPTIMIZERS["adamw"](raw.parameters())])
    return predict(options, tensors, accel.world_size(), raw), measured(model)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if engine_of(b).synchronizes], ids=str)
def test_predicted_is_measured(backend: Any) -> None:
    need(backend, 2, Net)
    ranks = run(2, measure, resolve(backend)[1])
    predicted, found = max(ranks, key=lambda rank: rank[1].total)
    for part, size in asdict(found).items():
        if part != "buckets" or size:  # the reducer's buckets are not seen
            assert size == pytest.approx(getattr(predicted, part), rel=0.02, abs=200), part
    assert found.gradients > 0
    assert found.optimizer_state > 0


def test_seventy_billion_parameters_without_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    with torch.device("meta"):
        model = gpt_70b()
    report = accel.memory_report(model, torch.optim.AdamW(model.parameters()), ranks=[8])
    assert process.memory_info().rss - before < 150 * 2**20
    number = sum(p.numel() for p in model.parameters())
    assert 70e9 < number < 71e9
    assert report.predicted("ddp", 8).total == pytest.approx(20 * number, rel=1e-6)
    page = (ROOT / "docs/parallelism.md").read_text(encoding="utf-8")
    assert str(report) in page, f"copy this into docs/parallelism.md, with the new picture:\n{report}"


MODELS = """
import torch
from torch import nn
def huge(): return nn.Linear(10**6, 10**6)
def small(): return nn.Linear(1000, 1000)
def values(): return nn.Linear(torch.ones(1).int().item(), 2)
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "accel_test_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["memory", "accel_test_models:huge"]) == 0
    out = capsys.readouterr().out
    assert "Linear, 1,000,001,000,000 parameters, AdamW" in out
    assert out.endswith("picture: memory.png\n")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    small = ["memory", "accel_test_models:small", "--ranks", "3", "--no-plot", "--optimizer", "rmsprop"]
    assert main(small) == 0
    rows = capsys.readouterr().out.splitlines()
    row = next(line for line in rows if " ddp " in line)
    assert " ".join(row.split()) == "3 ddp 3.8 MiB 3.8 MiB 3.8 MiB 0.0 B 3.8 MiB 15.3 MiB"
    assert main(["memory", "accel_test_models:values", "--no-plot"]) == 1
    assert "raised RuntimeError on the meta device" in capsys.readouterr().err


# -- the summary, and the lines of setup --------------------------------------------------------------------------------

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
