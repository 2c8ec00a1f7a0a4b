"""Section ``pipeline``: memory of the stages, balanced or not."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import accel

from .ranks import attempt, restart_peak, status
from .section import Data, Panel, Section, Verdict, judged, table

WIDTH, PAIRS, ROWS, STEPS = 1024, 8, 1024, 3
MIB = 2**20
#: The largest difference of a weight from the plain loop's.
CLOSE = 1e-5
FIGURES = ("state", "activations", "peak")


def give_back() -> None:
    """Let glibc give each freed tensor back to the kernel (M_MMAP_THRESHOLD), so that resident bytes are those in use."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)


def _build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(PAIRS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
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
    batches = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(STEPS)]
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


CASES: list[tuple[int, dict[str, Any] | None]] = [
    (1, None),
    (1, {"chunks": 8, "checkpoint": "except_last"}),
    (1, {"chunks": 8, "checkpoint": "always", "balance": [4, 4, 4, 4]}),
    (2, {"checkpoint": "never"}),
    (2, {"chunks": 8, "checkpoint": "never"}),
    (2, {"chunks": 8, "checkpoint": "except_last"}),
    (2, {"chunks": 8, "checkpoint": "always"}),
    (2, {"chunks": 8, "checkpoint": "except_last", "balance": [4, 12]}),
    (4, {"chunks": 8, "checkpoint": "except_last"}),
    (4, {"chunks": 8, "checkpoint": "except_last", "balance": [2, 2, 2, 10]}),
]


def _measure(quick: bool) -> Data:
    data: Data = {"rows": [], "failed": {}}
    for world, options in CASES[:1] + CASES[-3:-2] if quick else CASES:
        name = "plain loop" if options is None else ", ".join(f"{k}={v!r}" for k, v in options.items())
        stages = attempt(data, f"{name} on {world}", world, _stage, options)
        if stages:
            data["rows"].append({"world": world, "options": name, "stages": stages})
    return data


def _tell(data: Data) -> list[str]:
    rows = []
    for row in data["rows"]:
        cells = [" / ".join(f"{stage[name]:.0f}" for stage in row["stages"]) for name in FIGURES]
        rows.append([f"`{row['options']}`", str(row["world"]), *cells, f"{_distance(row):.0e}"])
    return [table(["options", "processes", *FIGURES, "distance"], rows)]


def _distance(row: Data) -> float:
    return max(stage["distance"] for stage in row["stages"])


def _judge(data: Data) -> Iterator[Verdict]:
    for row in data["rows"]:
        target = f"weights as the plain loop's: {row['options']}, {row['world']}"
        yield judged(target, _distance(row), CLOSE, "{:.0e}")


def _draw(data: Data) -> list[Panel]:
    groups = [f"{row['world']}: {row['options']}" for row in data["rows"]]
    bars = {name: [max(stage[name] for stage in row["stages"]) for row in data["rows"]] for name in FIGURES}
    return [Panel("The fullest process of a pipeline", "MiB", groups, bars)]


SECTION = Section("pipeline", "Memory of a pipeline", _measure, _tell, _judge, _draw)
