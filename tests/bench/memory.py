"""Section ``memory``: bytes that live on a rank after a step, beside what theory says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import accel
from accel.engines import resolve
from accel.engines.base.memory import MemoryUse
from accel.memory import tensor_sizes
from examples.big import gpt_70b
from tests.measured import measured

from .ranks import run
from .section import Data, Panel, Section, Verdict, answer, brief, failures, table

WORLDS, LARGE = (2, 4), (8, 16, 64)
WIDTH, LAYERS = 256, 16
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)
#: A rank's bytes may differ from theory by this part.
CLOSE = 0.02
PUBLISHED = 63.0
ABOUT = f"""A chain of {LAYERS} `Linear({WIDTH}, {WIDTH})` with AdamW, after a step and before `zero_grad`: bytes of the \
distinct storages on the fullest rank (`ddp` with `gradient_as_bucket_view=True`: torch shows no other buckets), in \
multiples of N, the bytes of the parameters in fp32. *Theory* divides what the backend divides and nothing else: for \
ZeRO that of arXiv 1910.02054, with fp32 copies of bfloat16 weights and AdamW's state in fp32. *Predicted* is what \
`accel.memory_report` says beforehand. The bucket of ZeRO 3 has a size of its own, here that of one layer, and is left out \
of the comparison with theory."""


@dataclass(frozen=True)
class Case:
    """A backend, what of N a rank keeps whole and what it divides, and whether a bucket of its own size comes to that."""

    name: str
    backend: Any
    whole: float
    divided: float
    precision: str = "32-true"
    bucket: bool = False

    def theory(self, world: int) -> float:
        return self.whole + self.divided / world


def _zero(stage: int, whole: float, divided: float, *, half: bool = False) -> Case:
    """In fp32; or bfloat16 weights (N / 2) with gradients, copies and AdamW's state in fp32 (4 N)."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # Small weights would stay whole by DeepSpeed's threshold, and the bucket be as large as such a small model.
        zero |= {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH * WIDTH + WIDTH}
    config: dict[str, Any] = {"zero_optimization": zero}
    if not half:
        return Case(f"ZeRO {stage}", accel.DeepSpeed(config=config), whole, divided, bucket=stage == 3)
    backend = accel.DeepSpeed(config=config | {"bf16": {"enabled": True}})
    return Case(f"ZeRO {stage}, bf16", backend, whole, divided, "bf16-true", stage == 3)


CASES = (
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


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4)


def _live(case: Case) -> dict[str, dict[str, int]]:
    """Predicted and measured bytes of this rank."""
    net, raw = build()
    dtype = torch.bfloat16 if case.precision == "bf16-true" else torch.float32
    model, optimizer, _ = accel.setup(net.to(dtype), raw, backend=case.backend, precision=case.precision, devices="cpu")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    found = measured(model)
    accel.teardown(model)
    engine, options = resolve(case.backend)
    predicted = engine.predict(net, tensor_sizes(net, [raw]), options, accel.world_size())
    assert predicted is not None
    return {"predicted": _told(predicted), "measured": _told(found)}


def _all_live(numbers: tuple[int, ...]) -> list[dict[str, dict[str, int]]]:
    return [_live(CASES[number]) for number in numbers]


def _told(use: MemoryUse) -> dict[str, int]:
    return {**asdict(use), "total": use.total}


def _at(world: int, numbers: tuple[int, ...], found: Data) -> None:
    """Some cases in the same processes; where one fails, each in its own, so that the others have their figures."""
    try:
        ranks = run(world, _all_live, numbers)
    except RuntimeError as error:
        if len(numbers) == 1:
            found["failed"][f"{CASES[numbers[0]].name} at {world} ranks"] = brief(error)
        else:
            for number in numbers:
                _at(world, (number,), found)
        return
    for number, uses in zip(numbers, zip(*ranks, strict=True), strict=True):
        fullest = max(uses, key=lambda use: use["measured"]["total"])
        found["live"].append({"case": CASES[number].name, "world": world, **fullest})


def _measure(quick: bool) -> Data:
    found: Data = {"live": [], "failed": {}}
    for world in WORLDS[:1] if quick else WORLDS:
        _at(world, tuple(range(len(CASES))), found)
    with torch.device("meta"):
        large = gpt_70b()
    report = accel.memory_report(large, torch.optim.AdamW(large.parameters()), ranks=LARGE)
    found["less"] = [100 * (1 - report.predicted("sharded", w).total / report.predicted("ddp", w).total) for w in LARGE]
    return found


def _units(nbytes: int) -> str:
    return f"{nbytes / (4 * NUMEL):.3f}"


def _pairs(data: Data) -> Iterator[tuple[Case, int, dict[str, Any]]]:
    cases = {case.name: case for case in CASES}
    for row in data["live"]:
        yield cases[row["case"]], row["world"], row


def _held(case: Case, use: dict[str, int]) -> float:
    """What theory speaks of, in multiples of N."""
    return (use["total"] - (use["buckets"] if case.bucket else 0)) / (4 * NUMEL)


def _tell(data: Data) -> list[str]:
    rows = []
    for case, world, row in _pairs(data):
        found, theory = row["measured"], case.theory(world)
        parts = [_units(found[part]) for part in ("parameters", "gradients", "optimizer_state", "buckets", "total")]
        off = _held(case, found) / theory - 1
        rows.append(
            [case.name, str(world), *parts, _units(row["predicted"]["total"]), f"{theory:.3f}", f"{100 * off:+.2f} %"]
        )
    head = [
        "",
        "ranks",
        "parameters",
        "gradients",
        "optimizer",
        "buckets",
        "total",
        "predicted",
        "theory",
        "off theory",
    ]
    less = ", ".join(f"{percent:.0f} % at {world}" for percent, world in zip(data["less"], LARGE, strict=True))
    return [
        ABOUT,
        table(head, rows),
        *failures(data["failed"]),
        f"Predicted for a GPT of 70 billion parameters, `sharded` less than `ddp`: {less} ranks. Published for fairscale's "
        f"sharding: up to {PUBLISHED:.0f} % less memory per GPU.",
    ]


def _judge(data: Data) -> Iterator[Verdict]:
    for case, world, row in _pairs(data):
        held, theory = _held(case, row["measured"]), case.theory(world)
        limit = f"{theory:.3f} N ± {100 * CLOSE:.0f} %"
        verdict = answer(abs(held / theory - 1), CLOSE)
        yield Verdict(f"{case.name} at {world} ranks as theory says", limit, f"{held:.3f} N", verdict)
        drift = abs(row["measured"]["total"] / row["predicted"]["total"] - 1)
        if drift > CLOSE:
            yield Verdict(
                f"{case.name} at {world} ranks as predicted", "2 %", f"{100 * drift:.1f} %", answer(drift, CLOSE)
            )
    for name, error in data["failed"].items():
        yield Verdict(f"{name} as theory says", "2 %", "none", f"**not measured**: {error}")
    least = min(data["less"])
    verdict = answer(-least, -PUBLISHED)
    yield Verdict("`sharded` saves more than published, 8 to 64 ranks", f"{PUBLISHED:.0f} %", f"{least:.0f} %", verdict)


def _draw(data: Data) -> list[Panel]:
    found = {(row["case"], row["world"]): row["measured"]["total"] / (4 * NUMEL) for row in data["live"]}
    bars = {f"{world} ranks": [found.get((case.name, world)) for case in CASES] for world in WORLDS}
    bars |= {f"{world} ranks, theory": [case.theory(world) for case in CASES] for world in WORLDS}
    return [Panel("Bytes of a rank after a step", "multiple of the parameters' bytes", [c.name for c in CASES], bars)]


SECTION = Section("memory", "Memory of a rank", _measure, _tell, _judge, _draw)
