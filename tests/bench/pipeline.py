"""The tables of docs/pipeline.md: ``python -m tests.bench.pipeline``."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from typing import Any

import torch
from torch import nn

import accel
from tests.distributed import close_all, outcomes

WIDTH, PAIRS, ROWS, STEPS = 1024, 8, 1024, 3
MIB = 2**20


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


def main() -> None:
    """Prints the table's rows."""
    for world, options in CASES:
        results = outcomes(world, measure, options, timeout=300, breaks=True)
        assert not any(r.error for r in results), results
        cells = [" / ".join(f"{r.value[0][i]:.0f}" for r in results) for i in range(3)]
        name = "plain loop" if options is None else ", ".join(f"{k}={v!r}" for k, v in options.items())
        print(f"| {world} | `{name}` | {' | '.join(cells)} | {max(r.value[1] for r in results):.0e} |", flush=True)
    close_all()


if __name__ == "__main__":
    main()
