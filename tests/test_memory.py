"""The memory report: predictions without memory, and what live engines really hold."""

from __future__ import annotations

import sys
from dataclasses import astuple, replace
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
from accel.engines.base.memory import (
    Footprint,
    MemoryUse,
    ParameterSize,
    count,
    even_shards,
    human,
    owners,
    take,
    whole,
    zero,
)
from accel.engines.deepspeed import DeepSpeedEngine
from accel.errors import AccelError, OptimizerError
from accel.memory import MemoryReport, label
from examples.big import gpt_70b
from tests.backends import BACKENDS, engine_of, need
from tests.distributed import refusals, run

MIB = 2**20


# -- the state that an optimizer will have ----------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1)),
    "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "centered": lambda ps: torch.optim.RMSprop(ps, centered=True, momentum=0.5),
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
}


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    return sum(v.nbytes for v in optimizer.state.get(parameter, {}).values() if isinstance(v, torch.Tensor))


def test_an_optimizer_of_another_model_is_refused() -> None:
    net, other = nn.Linear(2, 3), nn.Linear(4, 5)
    with pytest.raises(accel.OptimizerError, match=r"holds 2 tensors that are not parameters of the model .*\(5, 4\)"):
        take(net, [torch.optim.SGD(other.parameters(), lr=0.1)])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_known_before_its_first_step(name: str) -> None:
    net = nn.ParameterList([torch.ones(12, 5), torch.ones(7, dtype=torch.bfloat16)])
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    before = take(net, [optimizer])
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    real = [state_of(optimizer, p) for p in net.parameters()]
    assert [p.state_bytes for p in before.parameters] == real
    assert [p.state_bytes for p in take(net, [optimizer]).parameters] == real
    assert (sum(real) > 0) == (name != "sgd")


def test_prediction_touches_neither_optimizer_nor_parameters() -> None:
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


def test_frozen_parameters_cost_nothing() -> None:
    net = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    net[0].requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters())
    half = 4 * (100 * 100 + 100)
    for backend in ("single", "ddp"):
        use = accel.memory_report(net, optimizer, ranks=[1]).predicted(backend, 1)
        assert (use.parameters, use.gradients, use.optimizer_state) == (2 * half, half, 2 * half + 2 * 4)
    net.requires_grad_(False)
    use = accel.memory_report(net, optimizer, ranks=[1]).predicted("single", 1)
    assert (use.total, use.gradients, use.optimizer_state) == (2 * half, 0, 0)
    assert whole(take(net), 1)[0].total == 2 * half


def test_two_optimizers_and_a_tied_weight() -> None:
    net = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    net[1].weight = net[0].weight
    first, second = torch.optim.Adagrad([net[0].weight]), torch.optim.SGD([net[1].bias], lr=0.1)
    use = accel.memory_report(net, {"a": first, "b": [second]}, ranks=[1]).predicted("single", 1)
    assert (use.parameters, use.optimizer_state) == (4 * 450, 4 * 400 + 4)


# -- the rules by which engines predict -------------------------------------------------------------------------------


def layers(widths: list[int], frozen: int = 0) -> Footprint:
    """Vectors of fp32, the first of them frozen, under an optimizer that keeps two more of each."""
    parameters = tuple(
        ParameterSize(
            name=f"layers.{i}.weight",
            shape=(width,),
            itemsize=4,
            trainable=i >= frozen,
            state_bytes=8 * width if i >= frozen else 0,
        )
        for i, width in enumerate(widths)
    )
    return Footprint(parameters=parameters, buffers=12, optimizers=(tuple(range(len(widths))),))


EVEN = layers([64] * 16)
N = 4 * 64 * 16


@pytest.mark.parametrize(
    ("rule", "world", "units"),
    [
        (whole, 8, (1, 1, 2)),
        (owners, 1, (1, 1, 2)),
        (owners, 2, (1, 1 / 2, 1)),
        (owners, 4, (1, 1 / 4, 1 / 2)),
        (owners, 8, (1, 1 / 8, 1 / 4)),
        (even_shards, 1, (1, 1, 2)),
        (even_shards, 2, (1 / 2, 1 / 2, 1)),
        (even_shards, 4, (1 / 4, 1 / 4, 1 / 2)),
        (even_shards, 64, (1 / 64, 1 / 64, 1 / 32)),
        (lambda f, w: zero(f, w, 1), 4, (1, 1 / 4, 1 / 2)),
        (lambda f, w: zero(f, w, 2), 4, (1, 1 / 4, 1 / 2)),
        (lambda f, w: zero(f, w, 3), 4, (1 / 4, 1 / 4, 1 / 2)),
        (lambda f, w: zero(f, w, 3), 1, (1, 1, 2)),
        (lambda f, w: zero(f, w, 1, masters=True), 4, (1 / 2, 1 / 8, 3 / 4)),
        (lambda f, w: zero(f, w, 3, masters=True), 4, (1 / 8, 1 / 8, 3 / 4)),
    ],
)
def test_rules_in_units_of_the_parameters(rule: Any, world: int, units: tuple[float, ...]) -> None:
    """Parameters, gradients and AdamW's state; the buffers are on every rank."""
    uses = rule(EVEN, world)
    assert len(uses) == world
    for use in uses:
        assert (use.parameters / N, use.gradients / N, use.optimizer_state / N) == units
        assert (use.buffers, use.buckets) == (12, 0)
        assert use.total == N * sum(units) + 12


def test_what_a_step_needs_for_a_while() -> None:
    names = [f"layers.{i}.part.weight" for i in range(16)] + ["head.weight"]
    sizes = tuple(ParameterSize(name=name, shape=(64,), itemsize=4) for name in names)
    net = Footprint(parameters=sizes, optimizers=(tuple(range(17)),))
    rules = [whole, owners, even_shards, *((lambda f, w, s=s: zero(f, w, s)) for s in (1, 2, 3))]
    assert {rule(net, 1)[0].transient for rule in rules} == {0}
    # In units of a layer; the first rank owns 5 of 17.
    assert [rule(net, 4)[0].transient / 256 for rule in rules] == [0, 12 + 5, 2 + 3, 17, 1, 2]


def test_a_configuration_of_deepspeed_is_read_as_the_library_reads_it() -> None:
    for key in ("stage3_param_persistence_threshold", "param_persistence_threshold"):
        for limit, part in ((63, 1 / 4), (64.0, 5 / 4)):
            options = accel.DeepSpeed(stage=3, config={"zero_optimization": {key: limit}})
            assert DeepSpeedEngine.predict(EVEN, options, 4)[0].parameters == N * part


def test_owners_get_whole_parameters_by_size() -> None:
    uses = owners(layers([10, 100, 20, 30, 40, 1]), 2)
    assert [u.gradients // 4 for u in uses] == [101, 100]
    assert [u.optimizer_state // 8 for u in uses] == [101, 100]
    uses = owners(layers([100, 99, 7, 9, 7], frozen=2), 2)  # the frozen ones are dealt out last
    assert [u.gradients // 4 for u in uses] == [9, 14]
    assert max(u.transient for u in uses) == 4 * (23 - 9 + 14)
    two = layers([50, 30, 20, 5])
    two = replace(two, optimizers=((0, 3), (1, 0)))
    assert [u.gradients // 4 for u in owners(two, 2)] == [50 + 20, 5 + 30 + 20]  # nobody steps the third


def test_uneven_shards_are_padded_and_their_state_is_not() -> None:
    matrix = ParameterSize(name="w", shape=(5, 3), itemsize=4, state_bytes=5 * 3 * 4)
    scalar = ParameterSize(name="s", shape=(), itemsize=4, state_bytes=4)
    uses = even_shards(Footprint(parameters=(matrix, scalar), optimizers=((0, 1),)), 4)
    assert [u.parameters for u in uses] == [2 * 12 + 4] * 4
    assert [u.optimizer_state for u in uses] == [28, 24, 12, 0]


def test_blocks_are_what_repeats() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))

    net = nn.Sequential(nn.Embedding(9, 4), nn.ModuleList([block(), block()]), nn.Linear(4, 9))
    found = {name: len(ps) for name, ps in take(net).blocks.items()}
    assert found == {"": 3, "1.0": 6, "1.1": 6}
    assert set(EVEN.blocks) == {""}  # single layers
    two = nn.ModuleDict({"a": nn.ModuleList(nn.ModuleList([block(), block()]) for _ in range(2)), "b": block()})
    found = {name: len(ps) for name, ps in take(two).blocks.items()}
    assert found == {"a.0.0": 6, "a.0.1": 6, "a.1.0": 6, "a.1.1": 6, "": 6}
    net[1][0].append(nn.Linear(4, 4))  # type: ignore[index, union-attr, operator]  # the first of T5's blocks has more, too
    assert {name: len(ps) for name, ps in take(net).blocks.items()} == {"": 3, "1.0": 8, "1.1": 6}


# -- predicted and measured -------------------------------------------------------------------------------------------


class Net(nn.Sequential):
    def __init__(self, width: int = 96) -> None:
        layers = [nn.Linear(width, width) for _ in range(7)]
        layers[0].requires_grad_(False)
        super().__init__(*layers, nn.BatchNorm1d(width))


def measure(options: Any, optimizer: str) -> tuple[MemoryUse, MemoryUse]:
    """Predicted and measured bytes of this rank, when the second step is about to be made."""
    net = Net()
    model, optimizer, _ = accel.setup(net, OPTIMIZERS[optimizer](net.parameters()), backend=options)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 96, device=accel.device())).square().mean().backward()
        accel.clip_grad_norm_(model, float("inf"))
        if step == 0:
            optimizer.step()
    report = accel.memory_report(model, measured=True)
    assert [row.kind for row in report.rows[-2:]] == ["predicted here", "measured here"]
    assert {row.ranks for row in report.rows[-2:]} == {accel.world_size()}
    assert report.rows[-1].backend == label(options)
    # A live engine's model predicts what the raw one does.
    raw = Net()
    fresh = accel.memory_report(raw, OPTIMIZERS["momentum"](raw.parameters()))
    again = accel.memory_report(model, OPTIMIZERS["momentum"](accel.unwrap(model).parameters()))
    assert again.rows == fresh.rows
    return report.rows[-2].use, report.rows[-1].use


VARIANTS = [
    (backend, world) for backend in BACKENDS for world in ((1, 2, 4) if engine_of(backend).synchronizes else (1,))
]


@pytest.mark.parametrize(("backend", "world"), VARIANTS, ids=str)
def test_predicted_is_measured(backend: Any, world: int) -> None:
    need(backend, world, Net)
    options = resolve(backend)[1]
    for optimizer in ("adamw", "momentum"):
        for predicted, measured in run(world, measure, options, optimizer):
            assert measured.gradients > 0
            assert measured.optimizer_state > 0
            for expected, found in zip(astuple(predicted)[:-1], astuple(measured)[:-1], strict=True):
                assert found == pytest.approx(expected, rel=0.02, abs=200)
            assert measured.total == pytest.approx(predicted.total, rel=0.02)


def ddp_uses(options: Any) -> dict[str, tuple[MemoryUse, MemoryUse]]:
    net = Net()
    model, optimizer, _ = accel.setup(net, torch.optim.AdamW(net.parameters()), backend=options)
    uses = {}

    def note(when: str) -> None:
        predicted, measured = accel.memory_report(model, measured=True).rows[-2:]
        uses[when] = (predicted.use, measured.use)

    note("start")
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 96)).square().mean().backward()
        optimizer.step()
    note("stepped")
    optimizer.zero_grad()
    note("zeroed")
    return uses


def test_ddp_is_four_times_its_parameters_and_its_buckets_are_counted() -> None:
    trainable = 6 * (96 * 96 + 96) + 2 * 96
    for uses in run(2, ddp_uses, accel.DDP()):
        start, stepped, zeroed = (uses[when][1] for when in ("start", "stepped", "zeroed"))
        assert (start.gradients, start.optimizer_state, start.buckets) == (0, 0, 4 * trainable)
        assert (stepped.gradients, stepped.buckets) == (4 * trainable, 4 * trainable)
        assert stepped.optimizer_state == pytest.approx(8 * trainable, rel=1e-3)
        assert (zeroed.gradients, zeroed.buckets) == (0, 4 * trainable)
    for uses in run(2, ddp_uses, accel.DDP(gradient_as_bucket_view=True)):
        predicted, measured = uses["stepped"]
        assert predicted == measured
        assert (measured.gradients, measured.buckets) == (4 * trainable, 0)
        # The buckets stay when the gradients, which are views of them, are dropped.
        zeroed = uses["zeroed"][1]
        assert (zeroed.gradients, zeroed.buckets) == (0, 4 * trainable)


def measure_without_engine() -> None:
    accel.memory_report(nn.Linear(2, 2), measured=True)


def shared_storage() -> MemoryUse:
    flat = torch.zeros(100)
    net = nn.ParameterList([nn.Parameter(flat[:40].view(5, 8)), nn.Parameter(flat[40:])])
    model = accel.setup(net).model
    return accel.memory_report(model, measured=True).rows[-1].use


def test_measuring_needs_an_engine_and_counts_a_storage_once() -> None:
    assert "has no live engine" in refusals(1, measure_without_engine, error="AccelError")[0]
    assert run(1, shared_storage)[0].parameters == 400


# -- a model that does not fit ----------------------------------------------------------------------------------------


def test_seventy_billion_parameters_need_no_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    with torch.device("meta"):
        model = gpt_70b()
    report = accel.memory_report(model, torch.optim.AdamW(model.parameters()))
    assert process.memory_info().rss - before < 150 * MIB
    number = sum(p.numel() for p in model.parameters())
    assert 70e9 < number < 71e9
    assert report.predicted("ddp", 64).total == pytest.approx(20 * number, rel=1e-6)
    assert "GPT, 70.6 B parameters, AdamW" in str(report)


def test_the_page_shows_what_the_command_prints() -> None:
    with torch.device("meta"):
        model = gpt_70b()
    table = str(accel.memory_report(model, torch.optim.AdamW(model.parameters()), ranks=(1, 8, 16, 64)))
    page = (Path(__file__).parent.parent / "docs" / "memory.md").read_text(encoding="utf-8")
    assert table in page, f"copy this into docs/memory.md, with the picture that the page's command makes:\n{table}"


# -- the report -------------------------------------------------------------------------------------------------------


def tiny(**changes: Any) -> MemoryReport:
    net = nn.Linear(1000, 1000)
    return accel.memory_report(net, torch.optim.AdamW(net.parameters()), **changes)


def test_the_table() -> None:
    report = tiny(ranks=(1, 8))
    assert {row.ranks for row in report.rows if row.backend == "single"} == {1}
    assert {row.ranks for row in report.rows if row.backend == "ddp"} == {1, 8}
    lines = str(report).splitlines()
    assert lines[1].split()[:7] == ["ranks", "backend", "parameters", "gradients", "optimizer", "buckets", "total"]
    row = next(line.split() for line in lines if line.split()[:2] == ["8", "ddp"])
    assert row == ["8", "ddp", "3.82", "MiB", "3.82", "MiB", "7.64", "MiB", "3.82", "MiB", "19.1", "MiB"]
    expected = MemoryUse(parameters=4_004_000, gradients=4_004_000, optimizer_state=8_008_008, buckets=4_004_000)
    assert report.predicted("ddp", 8) == expected
    with pytest.raises(AccelError, match="no line 'ddp' at 3 ranks; it has .*ddp at 8"):
        report.predicted("ddp", 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (human(0), "0 B"),
        (human(1023), "1023 B"),
        (human(1024), "1.00 KiB"),
        (human(15.3 * MIB), "15.3 MiB"),
        (human(1023.9 * MIB), "1.00 GiB"),
        (human(263 * 2**30), "263 GiB"),
        (human(5000 * 2**40), "5000 TiB"),
        (count(999), "999"),
        (count(70_553_706_496), "70.6 B"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tiny()
    path = report.save_plot(tmp_path / "new" / "memory.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    accel.memory_report(nn.Identity()).save_plot(tmp_path / "empty.png")
    with pytest.raises(AccelError, match=r"memory\.nothing cannot be written"):
        report.save_plot(tmp_path / "memory.nothing")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AccelError, match="pip install matplotlib"):
        report.save_plot(tmp_path / "other.png")


@pytest.mark.parametrize("ranks", [(), (0,), (2, -1), (2.0,), (True,)])
def test_bad_ranks(ranks: Any) -> None:
    with pytest.raises(AccelError, match="expected numbers of processes above 0"):
        tiny(ranks=ranks)


class Strange(torch.optim.SGD):
    """Needs values."""

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("no data here")


def test_optimizers_that_cannot_be_told() -> None:
    net, other = nn.Linear(2, 2), nn.Linear(3, 3)
    with pytest.raises(OptimizerError, match=r"holds 2 tensors that are not .* \(the first of shape \(3, 3\)\)"):
        accel.memory_report(net, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match=r"optimizer\[0\] is a Linear"):
        accel.memory_report(net, [other])
    with pytest.raises(OptimizerError, match="memory of LBFGS cannot be told"):
        accel.memory_report(net, torch.optim.LBFGS(net.parameters()))
    with pytest.raises(OptimizerError, match="RuntimeError: no data here"):
        accel.memory_report(net, Strange(net.parameters(), lr=0.1))
    with pytest.raises(AccelError, match=r"expected a torch\.nn\.Module"):
        accel.memory_report([net])  # type: ignore[arg-type]


# -- the command ------------------------------------------------------------------------------------------------------

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
    assert "Net, 1.00 T parameters, AdamW" in out
    assert out.endswith("picture: memory.png\n")
    assert (models / "memory.png").stat().st_size > 5000
    few = ["memory", "accel_test_models:Net.small", "--ranks", "3", "--no-plot", "--optimizer"]
    assert main([*few, "SGD(momentum=0.9)"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if " ddp " in line)
    assert " ".join(row.split()) == "3 ddp 3.82 MiB 3.82 MiB 3.82 MiB 3.82 MiB 15.3 MiB"
    assert main([*few, "none"]) == 0
    assert "no optimizer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["accel_test_models"], "expected module:factory"),
        (["no_such_module:f"], "no_such_module cannot be imported from"),
        (["accel_test_models:nope"], "accel_test_models has no 'nope'"),
        (["accel_test_models:Net.made"], "is a str; expected a callable"),
        (["accel_test_models:nothing"], "gave a NoneType; expected a torch.nn.Module"),
        (["accel_test_models:values"], "raised RuntimeError on the meta device, where tensors have no values"),
        (["accel_test_models:Net.small", "--ranks", "1,x"], "--ranks 1,x: expected numbers above 0"),
        (["accel_test_models:Net.small", "--optimizer", "adm"], "torch.optim has no 'adm'; it has adadelta"),
        (["accel_test_models:Net.small", "--optimizer", "sgd(f())"], "expected a name, or a name with plain keyword"),
        (["accel_test_models:Net.small", "--optimizer", "sgd(x=1)"], "sgd(x=1): no argument 'x'; it has lr, momentum"),
    ],
)
def test_the_command_says_what_is_wrong(
    models: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["memory", *arguments, "--no-plot"]) == 1
    assert message in capsys.readouterr().err
