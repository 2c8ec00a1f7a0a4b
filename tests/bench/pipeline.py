"""Section ``pipeline``: memory of the stages, balanced or not."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import accel

from .ranks import run
from .section import Data, Panel, Section, Verdict, answer, brief, failures, table

WIDTH, PAIRS, ROWS, STEPS = 1024, 8, 1024, 3
MIB = 2**20
#: The largest difference of a weight from the plain loop's.
CLOSE = 1e-5
ABOUT = f"""{PAIRS} pairs of `Linear({WIDTH}, {WIDTH})` and `GELU`, AdamW, fp32, {ROWS} rows, on CPU; MiB of each process, by \
what its allocator has given out. *State* is weights and optimizer state between steps; *activations* what the forward adds; \
*peak* the most during a step, gradients included. *Distance* is the largest difference of a weight from the plain \
loop's after {STEPS} steps."""


class _Heap(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def in_use() -> int:
    """Bytes that this process has allocated and not freed."""
    function = ctypes.CDLL("libc.so.6").mallinfo2
    function.restype = _Heap
    heap = function()
    return int(heap.uordblks + heap.hblkhd)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(PAIRS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


class _Peak(threading.Thread):
    """Looks at the heap again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.going = 0, True

    def run(self) -> None:
        while self.going:
            self.bytes = max(self.bytes, in_use())
            time.sleep(0.001)


def measure(options: dict[str, Any] | None) -> tuple[list[float], float]:
    """MiB of state, of activations after the forward and at the peak of a step; and the distance to the plain loop."""
    _distance(build(), 1)  # what the first step of a process allocates for good
    gc.collect()
    start = in_use()
    raw = build()
    backend = accel.Single() if options is None else accel.Pipeline(**options)
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters(), lr=1e-3), backend=backend)
    for step in range(STEPS):
        x = batch(step)
        peak = _Peak()
        optimizer.zero_grad()
        before = in_use()
        if step == STEPS - 1:
            peak.start()
        out = model(x)
        after = in_use()
        out.square().mean().backward()
        del out
        optimizer.step()
        peak.going = False
    optimizer.zero_grad()
    sizes = [in_use() - start - x.nbytes, after - before, peak.bytes - start]
    accel.teardown(model)
    return [size / MIB for size in sizes], _distance(raw, STEPS)


@torch.no_grad()
def _distance(trained: nn.Module, steps: int) -> float:
    """To the plain loop."""
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.enable_grad():
            plain(batch(step)).square().mean().backward()
        optimizer.step()
    return max(float((p - q).abs().max()) for p, q in zip(trained.parameters(), plain.parameters(), strict=True))


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


def _name(options: dict[str, Any] | None) -> str:
    return "plain loop" if options is None else ", ".join(f"{k}={v!r}" for k, v in options.items())


def _measure(quick: bool) -> Data:
    found: Data = {"rows": [], "failed": {}}
    for world, options in CASES[:1] + CASES[-3:-2] if quick else CASES:
        try:
            results = run(world, measure, options)
        except RuntimeError as error:
            found["failed"][f"{_name(options)} on {world}"] = brief(error)
            continue
        sizes = [[result[0][i] for result in results] for i in range(3)]
        found["rows"].append(
            {"world": world, "options": _name(options), "sizes": sizes, "distance": max(r[1] for r in results)}
        )
    return found


def _tell(data: Data) -> list[str]:
    rows = []
    for row in data["rows"]:
        cells = [" / ".join(f"{size:.0f}" for size in sizes) for sizes in row["sizes"]]
        rows.append([f"`{row['options']}`", str(row["world"]), *cells, f"{row['distance']:.0e}"])
    return [
        ABOUT,
        table(["options", "processes", "state", "activations", "peak", "distance"], rows),
        *failures(data["failed"]),
    ]


def _judge(data: Data) -> Iterator[Verdict]:
    for row in data["rows"]:
        what = f"weights as the plain loop's: {row['options']}, {row['world']}"
        yield Verdict(what, f"{CLOSE:.0e}", f"{row['distance']:.0e}", answer(row["distance"], CLOSE))
    for name, error in data["failed"].items():
        yield Verdict(f"weights as the plain loop's: {name}", f"{CLOSE:.0e}", "none", f"**not measured**: {error}")


def _draw(data: Data) -> list[Panel]:
    groups = [f"{row['world']}: {row['options']}" for row in data["rows"]]
    most = [[max(sizes) for sizes in row["sizes"]] for row in data["rows"]]
    bars = {name: [m[i] for m in most] for i, name in enumerate(("state", "activations", "peak"))}
    return [Panel("The fullest process of a pipeline", "MiB", groups, bars)]


SECTION = Section("pipeline", "Memory of a pipeline", _measure, _tell, _judge, _draw)
