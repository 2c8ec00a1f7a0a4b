"""Sections ``memory`` and ``pipeline``: bytes of a rank after a step, beside theory, and of the stages of a pipeline."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import accel
from examples.big import gpt_70b
from tests.measured import measured, restart_peak, status

from .report import Data, Panel, Section, Verdict, judged, table
from .timing import attempt
from .workloads import adamw

WORLDS, LARGE = (2, 4), (8, 16, 64)
WIDTH, LAYERS = 256, 16
#: Bytes of the parameters in fp32.
N = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
#: In percent: a rank's bytes may differ from theory by so much, and fairscale's sharding saves so much.
CLOSE, PUBLISHED = 2.0, 63.0
PARTS = ("parameters", "gradients", "optimizer_state", "buckets", "total")


@dataclass(frozen=True)
class Case:
    """A backend, and the parts of N that a rank keeps whole and that it divides."""

    name: str
    backend: Any
    whole: float
    divided: float

    def theory(self, world: int) -> float:
        return self.whole + self.divided / world


def _zero(stage: int, whole: float, divided: float) -> Case:
    config: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # By DeepSpeed's threshold small weights stay whole. Its bucket is as large as such a small model.
        config |= {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH * WIDTH + WIDTH}
    return Case(f"ZeRO {stage}", accel.DeepSpeed(config={"zero_optimization": config}), whole, divided)


_ALL = (
    Case("ddp", accel.DDP(gradient_as_bucket_view=True), 4, 0),
    Case("sharded", accel.Sharded(), 1, 3),
    Case("fsdp", accel.FSDP(), 0, 4),
    _zero(1, 1, 3),
    _zero(2, 1, 3),
    _zero(3, 0, 4),
)
CASES = {case.name: case for case in _ALL}


def _live() -> dict[str, dict[str, int]]:
    """Return the bytes of this rank by backend and part."""
    found = {}
    for name, case in CASES.items():
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        model, optimizer, _ = accel.setup(net, adamw(net), backend=case.backend, devices="cpu")
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
        use = measured(model)
        found[name] = {**asdict(use), "total": use.total}
        accel.teardown(model)
    return found


def _measure(quick: bool) -> Data:
    data: Data = {"live": [], "failed": {}}
    for world in WORLDS[:1] if quick else WORLDS:
        ranks = attempt(data, f"memory at {world} ranks", world, _live)
        for name in CASES if ranks else ():
            fullest = max((rank[name] for rank in ranks), key=lambda use: use["total"])
            data["live"].append({"case": name, "world": world, **fullest})
    with torch.device("meta"):
        large = gpt_70b()
    report = accel.memory_report(large, torch.optim.AdamW(large.parameters()), ranks=LARGE)
    shares = [report.predicted("sharded", w).total / report.predicted("ddp", w).total for w in LARGE]
    data["less"] = [100 * (1 - share) for share in shares]
    return data


def _in_theory(case: Case, use: dict[str, int]) -> float:
    """Return the part of a rank's bytes that theory speaks of, in multiples of N."""
    return (use["total"] - (use["buckets"] if case.name.startswith("ZeRO 3") else 0)) / N


def _tell(data: Data) -> list[str]:
    rows = []
    for row in data["live"]:
        figures = [*(row[part] / N for part in PARTS), CASES[row["case"]].theory(row["world"])]
        rows.append([row["case"], str(row["world"]), *(f"{figure:.3f}" for figure in figures)])
    less = ", ".join(f"{percent:.0f} % at {world}" for percent, world in zip(data["less"], LARGE, strict=True))
    return [
        table(["", "ranks", *PARTS, "theory"], rows),
        f"Predicted for a GPT of 70 billion parameters, `sharded` less than `ddp`: {less} ranks. Published for fairscale's "
        f"sharding: up to {PUBLISHED:.0f} % less memory per GPU.",
    ]


def _judge(data: Data) -> Iterator[Verdict]:
    for row in data["live"]:
        case, where = CASES[row["case"]], f"{row['case']} at {row['world']} ranks"
        off = 100 * abs(_in_theory(case, row) / case.theory(row["world"]) - 1)
        yield judged(f"{where} against theory", off, CLOSE, "{:.2f} %")
    target = "memory of `sharded`, of that of `ddp`, 8 to 64 ranks, as published for fairscale"
    yield judged(target, 100 - min(data["less"]), 100 - PUBLISHED, "{:.0f} %")


def _draw(data: Data) -> list[Panel]:
    totals = {(row["case"], row["world"]): row["total"] / N for row in data["live"]}
    bars = {f"{world} ranks": [totals.get((name, world)) for name in CASES] for world in WORLDS}
    bars |= {f"{world} ranks, theory": [case.theory(world) for case in CASES.values()] for world in WORLDS}
    return [Panel("Bytes of a rank after a step", "multiple of the parameters' bytes", list(CASES), bars)]


SECTION = Section("memory", "Memory of a rank", _measure, _tell, _judge, _draw)

# -- the stages of a pipeline ------------------------------------------------------------------------------------------

STAGE_WIDTH, PAIRS, ROWS, STEPS = 1024, 8, 1024, 3
MIB = 2**20
#: The largest difference of a weight from the plain loop's.
NEAR = 1e-5
FIGURES = ("state", "activations", "peak")


def give_back() -> None:
    """Let glibc give each freed tensor back to the kernel (M_MMAP_THRESHOLD), so that resident bytes are those in use."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)


def _build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(PAIRS) for layer in (nn.Linear(STAGE_WIDTH, STAGE_WIDTH), nn.GELU())))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _train(model: Any, optimizer: Any, batches: list[torch.Tensor]) -> dict[str, float]:
    """Return the resident bytes in the last step: before and after the forward, and the most."""
    sizes = {}
    for x in batches:
        optimizer.zero_grad()
        sizes["state"] = restart_peak()
        out = model(x)
        sizes["activations"] = status("VmRSS") - sizes["state"]
        out.square().mean().backward()
        del out
        optimizer.step()
        sizes["peak"] = status("VmHWM")
    return sizes


def _stage(options: dict[str, Any] | None) -> dict[str, float]:
    """Return MiB of this process, and the distance to the plain loop."""
    give_back()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(ROWS, STAGE_WIDTH, generator=generator) for _ in range(STEPS)]
    plain, optimizer = _build()
    _train(plain, optimizer, batches)
    weights = [p.detach() for p in plain.parameters()]
    del plain, optimizer
    start = status("VmRSS")
    raw, optimizer = _build()
    backend = accel.Single() if options is None else accel.Pipeline(**options)
    model, optimizer, _ = accel.setup(raw, optimizer, backend=backend)
    sizes = _train(model, optimizer, batches)
    sizes["state"] -= start
    sizes["peak"] -= start
    accel.teardown(model)
    distance = max(float((p - q).abs().max()) for p, q in zip(raw.parameters(), weights, strict=True))
    return {name: size / MIB for name, size in sizes.items()} | {"distance": distance}


STAGES: list[tuple[int, dict[str, Any] | None]] = [
    (1, None),
    (1, {"chunks": 8, "checkpoint": "except_last"}),
    (1, {"chunks": 8, "checkpoint": "always", "balance": [4, 4, 4, 4]}),
    (2, {"chunks": 8, "checkpoint": "never"}),
    (2, {"chunks": 8, "checkpoint": "except_last"}),
    (2, {"chunks": 8, "checkpoint": "always"}),
    (2, {"chunks": 8, "checkpoint": "except_last", "balance": [4, 12]}),
    (4, {"chunks": 8, "checkpoint": "except_last"}),
    (4, {"chunks": 8, "checkpoint": "except_last", "balance": [2, 2, 2, 10]}),
]


def _measure_stages(quick: bool) -> Data:
    data: Data = {"rows": [], "failed": {}}
    for world, options in STAGES[:1] + STAGES[-3:-2] if quick else STAGES:
        name = "plain loop" if options is None else ", ".join(f"{k}={v!r}" for k, v in options.items())
        stages = attempt(data, f"{name} on {world}", world, _stage, options)
        if stages:
            data["rows"].append({"world": world, "options": name, "stages": stages})
    return data


def _tell_stages(data: Data) -> list[str]:
    rows = []
    for row in data["rows"]:
        cells = [" / ".join(f"{stage[name]:.0f}" for stage in row["stages"]) for name in FIGURES]
        rows.append([f"`{row['options']}`", str(row["world"]), *cells, f"{_distance(row):.0e}"])
    return [table(["options", "processes", *FIGURES, "distance"], rows)]


def _distance(row: Data) -> float:
    return max(stage["distance"] for stage in row["stages"])


def _judge_stages(data: Data) -> Iterator[Verdict]:
    for row in data["rows"]:
        target = f"weights as the plain loop's: {row['options']}, {row['world']}"
        yield judged(target, _distance(row), NEAR, "{:.0e}")


def _draw_stages(data: Data) -> list[Panel]:
    groups = [f"{row['world']}: {row['options']}" for row in data["rows"]]
    bars = {name: [max(stage[name] for stage in row["stages"]) for row in data["rows"]] for name in FIGURES}
    return [Panel("The fullest process of a pipeline", "MiB", groups, bars)]


PIPELINE = Section("pipeline", "Memory of a pipeline", _measure_stages, _tell_stages, _judge_stages, _draw_stages)
