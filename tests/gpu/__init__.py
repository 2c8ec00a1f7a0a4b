"""What only CUDA devices can show. Each test says how many it needs, and is skipped with that number where there are fewer."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests.models import rows

TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-2, "16-mixed": 5e-3}


def gpus(needed: int) -> pytest.MarkDecorator:
    """Return the mark of tests that need so many devices."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < needed, reason=f"needs {needed} CUDA devices, found {found}")


@contextlib.contextmanager
def no_reads() -> Iterator[None]:
    """Inside, torch raises where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Collect the lines inside that wait for the device."""
    places: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
            places += [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)]


def batch(step: int, rank: int = 0, size: int = 16, width: int = 8) -> torch.Tensor:
    return rows(100 * step + rank, size, width).to(accel.device())


class Pair:
    """The same model under accel, and plain on the batches of all ranks (``together``: they read one batch)."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        backend: Any,
        together: bool = False,
        **options: Any,
    ) -> None:
        accel.init()
        self.raw, self.plain = build(), build().to(accel.device())
        self.raw_optimizer, self.plain_optimizer = optimizer(self.raw), optimizer(self.plain)
        self.width = next(self.plain.parameters()).shape[1]
        self.model, self.optimizer, _ = accel.setup(self.raw, self.raw_optimizer, backend=backend, **options)
        self.ranks = range(1 if together else accel.world_size())
        self.rank = 0 if together else accel.rank()

    def batches(self, number: int, size: int = 16) -> list[torch.Tensor]:
        return [batch(number, rank, size, self.width) for rank in self.ranks]

    def plain_backward(self, batches: list[torch.Tensor]) -> None:
        torch.stack([self.plain(x).square().mean() for x in batches]).mean().backward()

    def step(self, number: int, size: int = 16, clip: float = 1e9) -> list[str]:
        """Train both. Return the lines at which accel's step waits for the device."""
        batches = self.batches(number, size)
        self.plain_optimizer.zero_grad()
        self.plain_backward(batches)
        nn.utils.clip_grad_norm_(self.plain.parameters(), clip)
        self.plain_optimizer.step()
        with waits() as places:
            self.optimizer.zero_grad()
            out = self.model(batches[self.rank])
            assert out.dtype is torch.float32
            accel.backward(out.square().mean())
            if clip < 1e9:
                accel.clip_grad_norm_(self.model, clip)
            self.optimizer.step()
        return places

    def distance(self) -> float:
        full = accel.full_state_dict(self.model)
        return max(float((full[n].to(v.device) - v).abs().max()) for n, v in self.plain.state_dict().items())
