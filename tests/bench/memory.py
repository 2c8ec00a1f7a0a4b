"""Section ``memory``: bytes of a rank after a step, beside theory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import accel
from examples.big import gpt_70b
from tests.measured import measured

from .ranks import attempt
from .section import Data, Panel, Section, Verdict, judged, table
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
    precision: str = "32-true"

    def theory(self, world: int) -> float:
        return self.whole + self.divided / world


def _zero(stage: int, whole: float, divided: float, *, half: bool = False) -> Case:
    """In fp32, or bfloat16 weights (N / 2) with gradients, copies and AdamW's state in fp32 (4 N)."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # By DeepSpeed's threshold small weights stay whole. Its bucket is as large as such a small model.
        zero |= {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH * WIDTH + WIDTH}
    config: dict[str, Any] = {"zero_optimization": zero}
    if not half:
        return Case(f"ZeRO {stage}", accel.DeepSpeed(config=config), whole, divided)
    backend = accel.DeepSpeed(config=config | {"bf16": {"enabled": True}})
    return Case(f"ZeRO {stage}, bf16", backend, whole, divided, "bf16-true")


_ALL = (
    Case("ddp", accel.DDP(gradient_as_bucket_view=True), 4, 0),
    Case("sharded", accel.Sharded(), 1, 3),
    Case("fsdp", accel.FSDP(), 0, 4),
    _zero(1, 1, 3),
    _zero(2, 1, 3),
    _zero(3, 0, 4),
    _zero(1, 0.5, 4, half=True),
    _zero(2, 0.5, 4, half=True),
    _zero(3, 0, 4.5, half=True),
)
CASES = {case.name: case for case in _ALL}


def _live() -> dict[str, dict[str, int]]:
    """Return the bytes of this rank by backend and part."""
    found = {}
    for name, case in CASES.items():
        dtype = torch.bfloat16 if case.precision == "bf16-true" else torch.float32
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)
        raw = adamw(net)
        model, optimizer, _ = accel.setup(net, raw, backend=case.backend, precision=case.precision, devices="cpu")
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH, dtype=dtype)).float().square().mean().backward()
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
