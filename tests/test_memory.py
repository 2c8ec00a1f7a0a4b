"""The memory report: predictions, and the storages that engines really allocate."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import accel
from accel.__main__ import main
from accel.engines import resolve
from accel.engines.base.memory import MemoryUse, TensorSize
from accel.errors import AccelError, OptimizerError
from accel.memory import MemoryReport, human, tensor_sizes
from examples.big import gpt_70b
from tests.backends import BACKENDS, engine_of, need
from tests.distributed import run
from tests.measured import measured

MIB = 2**20


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1)),
    "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "centered": lambda ps: torch.optim.RMSprop(ps, centered=True, momentum=0.5),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
}


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    return sum(v.nbytes for v in optimizer.state.get(parameter, {}).values() if isinstance(v, torch.Tensor))


def test_optimizer_state_before_the_first_step() -> None:
    for build in OPTIMIZERS.values():
        net = nn.ParameterList([torch.ones(12, 5), torch.ones(7, dtype=torch.bfloat16)])
        optimizer = build(list(net.parameters()))
        before = [p.state_bytes for p in tensor_sizes(net, [optimizer])]
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        states = [optimizer.state.get(p, {}).values() for p in net.parameters()]
        expected = [sum(v.nbytes for v in state if isinstance(v, torch.Tensor)) for state in states]
        assert before == expected
        assert [p.state_bytes for p in tensor_sizes(net, [optimizer])] == expected


def test_prediction_changes_nothing() -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    steps: list[object] = []
    optimizer.register_step_pre_hook(lambda *args: steps.append(args))
    hook = register_optimizer_step_pre_hook(lambda *args: steps.append(args))
    before = [p.detach().clone() for p in net.parameters()]
    try:
        accel.memory_report(net, optimizer)
    finally:
        hook.remove()
    assert not optimizer.state
    assert not steps
    assert not getattr(optimizer, "_opt_called", False)
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    optimizer.step()
    scheduler.step()


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


def layers(widths: list[int], frozen: int = 0) -> list[TensorSize]:
    """Return vectors of fp32, the first ones frozen, with two vectors of state each, and a buffer."""
    size = TensorSize(name="", shape=(), itemsize=4)
    tensors = [replace(size, name="layers.buffer", shape=(3,), is_buffer=True)]
    for i, width in enumerate(widths):
        size = replace(size, name=f"layers.{i}.weight", shape=(width,), optimizer=0, trainable=i >= frozen)
        tensors.append(replace(size, state_bytes=8 * width if size.trainable else 0))
    return tensors


EVEN = layers([64] * 16)
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
        (accel.Sharded(), 1, (1, 1, 2)),
        (accel.Sharded(), 4, (1, 1 / 4, 1 / 2)),
        (accel.FSDP(), 1, (1, 1, 2)),
        (accel.FSDP(), 4, (1 / 4, 1 / 4, 1 / 2)),
        (accel.FSDP(), 64, (1 / 64, 1 / 64, 1 / 32)),
        (accel.FSDP(replicas=2), 8, (1 / 4, 1 / 4, 1 / 2)),
        (accel.DeepSpeed(stage=1), 4, (1, 1 / 4, 1 / 2)),
        (accel.DeepSpeed(), 4, (1, 1 / 4, 1 / 2)),
        (accel.DeepSpeed(stage=3), 1, (1, 1, 2)),
        (accel.DeepSpeed(stage=3), 4, (5 / 4, 1 / 4, 1 / 2)),
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


def test_sharded_deals_parameters_by_size() -> None:
    assert predict(accel.Sharded(), layers([10, 100, 20, 30, 40, 1]), 2).gradients == 4 * 101
    # Frozen parameters come last.
    assert predict(accel.Sharded(), layers([100, 99, 7, 9, 7], frozen=2), 2).gradients == 4 * 14
    _, *two = layers([50, 30, 20, 5])
    two[1:3] = replace(two[1], optimizer=1), replace(two[2], optimizer=None)  # nobody steps the third
    assert predict(accel.Sharded(), two, 2).gradients == 4 * (50 + 20)


def test_uneven_shards_of_fsdp_are_padded() -> None:
    matrix = TensorSize(name="w", shape=(5, 3), itemsize=4, trainable=True, state_bytes=5 * 3 * 4)
    scalar = TensorSize(name="s", shape=(), itemsize=4, state_bytes=4)
    use = predict(accel.FSDP(), [matrix, scalar], 4)
    assert (use.parameters, use.gradients, use.optimizer_state) == (2 * 12 + 4, 2 * 12, 2 * 12 + 4)


class Net(nn.Sequential):
    """Weights above and below the size that ZeRO-3 shards, some of them frozen."""

    def __init__(self) -> None:
        layers = [nn.Linear(400, 400) for _ in range(6)]
        layers[0].requires_grad_(False)
        super().__init__(*layers, nn.Linear(400, 90), nn.BatchNorm1d(90))


def measure(options: Any, optimizer: str) -> tuple[MemoryUse, MemoryUse]:
    """Return the predicted bytes, and those of this rank before the second step."""
    net = Net()
    model, optimizer, _ = accel.setup(net, OPTIMIZERS[optimizer](net.parameters()), backend=options)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 400, device=accel.device())).square().mean().backward()
        accel.clip_grad_norm_(model, float("inf"))
        if step == 0:
            optimizer.step()
    raw = Net()
    fresh = OPTIMIZERS["momentum"](raw.parameters())
    # A model that is set up predicts what the raw one does.
    again = accel.memory_report(model, OPTIMIZERS["momentum"](accel.unwrap(model).parameters()))
    assert again.uses == accel.memory_report(raw, fresh).uses
    raw = Net()
    tensors = tensor_sizes(raw, [OPTIMIZERS["adamw"](raw.parameters())])
    return predict(options, tensors, accel.world_size(), raw), measured(model)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if engine_of(b).synchronizes], ids=str)
def test_predicted_is_measured(backend: Any) -> None:
    need(backend, 2, Net)
    ranks = run(2, measure, resolve(backend)[1], "adamw")
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
    report = accel.memory_report(model, torch.optim.AdamW(model.parameters()))
    assert process.memory_info().rss - before < 150 * MIB
    number = sum(p.numel() for p in model.parameters())
    assert 70e9 < number < 71e9
    assert report.predicted("ddp", 64).total == pytest.approx(20 * number, rel=1e-6)
    assert f"GPT, {number:,} parameters, AdamW" in str(report)


def test_the_page_shows_the_table() -> None:
    with torch.device("meta"):
        model = gpt_70b()
    table = str(accel.memory_report(model, torch.optim.AdamW(model.parameters()), ranks=[8]))
    page = (Path(__file__).parent.parent / "docs" / "memory.md").read_text(encoding="utf-8")
    assert table in page, f"copy this into docs/memory.md, with the picture that the page's command makes:\n{table}"


def tiny(**changes: Any) -> MemoryReport:
    net = nn.Linear(1000, 1000)
    return accel.memory_report(net, torch.optim.AdamW(net.parameters()), **changes)


def test_the_table() -> None:
    report = tiny(ranks=(1, 8))
    assert {ranks for ranks, backend in report.uses if backend == "single"} == {1}
    assert {ranks for ranks, backend in report.uses if backend == "ddp"} == {1, 8}
    lines = str(report).splitlines()
    assert lines[1].split() == [
        "ranks",
        "backend",
        "parameters",
        "gradients",
        "optimizer",
        "buffers",
        "buckets",
        "total",
    ]
    row = next(line.split() for line in lines if line.split()[:2] == ["8", "ddp"])
    assert " ".join(row) == "8 ddp 3.8 MiB 3.8 MiB 7.6 MiB 0.0 B 3.8 MiB 19.1 MiB"
    expected = MemoryUse(parameters=4_004_000, gradients=4_004_000, optimizer_state=8_008_008, buckets=4_004_000)
    assert report.predicted("ddp", 8) == expected


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0.0 B"), (1024, "1.0 KiB"), (15.3 * MIB, "15.3 MiB"), (2**42, "4,096.0 GiB")]
)
def test_units(nbytes: float, text: str) -> None:
    assert human(nbytes) == text


def test_the_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny().save_plot(tmp_path / "memory.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AccelError, match="pip install matplotlib"):
        tiny().save_plot(tmp_path / "other.png")


def test_optimizers_of_other_models() -> None:
    net, other = nn.Linear(2, 2), nn.Linear(3, 3)
    with pytest.raises(OptimizerError, match="holds tensors that are not parameters of Linear"):
        accel.memory_report(net, torch.optim.SGD(other.parameters(), lr=0.1))
    lbfgs = torch.optim.LBFGS(net.parameters())
    with pytest.raises(TypeError, match="closure"):
        accel.memory_report(net, lbfgs)
    assert lbfgs.param_groups[0]["params"] == list(net.parameters())


MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    made = "a string"
    def __init__(self):
        super().__init__()
        self.huge = nn.Linear(10**6, 10**6)

    @staticmethod
    def small():
        return nn.Linear(1000, 1000)

def values(): return nn.Linear(torch.ones(1).int().item(), 2)
def nothing(): return None
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "accel_test_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_the_command(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "accel_test_models:Net"]) == 0
    out = capsys.readouterr().out
    assert "Net, 1,000,001,000,000 parameters, AdamW" in out
    assert out.endswith("picture: memory.png\n")
    assert (models / "memory.png").stat().st_size > 5000
    few = ["memory", "accel_test_models:Net.small", "--ranks", "3", "--no-plot", "--optimizer"]
    assert main([*few, "rmsprop"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if " ddp " in line)
    assert " ".join(row.split()) == "3 ddp 3.8 MiB 3.8 MiB 3.8 MiB 0.0 B 3.8 MiB 15.3 MiB"
    assert main([*few, "none"]) == 0
    assert "no optimizer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["accel_test_models"], "Expected module:factory"),
        (["no_such_module:f"], "No module named 'no_such_module'"),
        (["accel_test_models:nope"], "has no attribute 'nope'"),
        (["accel_test_models:nothing"], "returned a NoneType. Expected a torch.nn.Module"),
        (["accel_test_models:values"], "raised RuntimeError on the meta device"),
        (["accel_test_models:Net.small", "--optimizer", "adm"], "--optimizer adm: torch.optim has no such class"),
    ],
)
def test_mistakes_at_the_command_line(
    models: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["memory", *arguments, "--no-plot"]) == 1
    assert message in capsys.readouterr().err
