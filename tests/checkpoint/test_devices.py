"""Random generators of several devices in one process, as of ``dp`` and ``ddp2``; generators of the CPU stand for theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.process import rng


class Devices:
    """What ``torch.cuda`` has of this, over as many devices as a test wants."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(7) for _ in range(4)]
        self.current = 0

    def is_available(self) -> bool:
        return False

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.generators[device.index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.generators[device.index].set_state(state)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def manual_seed(self, number: int) -> None:
        self.generators[self.current].manual_seed(number)

    def draw(self) -> list[float]:
        return [torch.rand((), generator=generator).item() for generator in self.generators]


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two devices of a process; the function gives it another number."""
    module = Devices()

    def use(count: int) -> Devices:
        monkeypatch.setattr(rng, "own_devices", lambda: tuple(torch.device("cuda", i) for i in range(count)))
        return module

    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    use(2)
    return use


def saved(several: Any, count: int, directory: Path) -> list[float]:
    """Save when each device is at another place; what each draws next."""
    module = several(count)
    for number, generator in enumerate(module.generators):
        torch.rand(3 * number + 1, generator=generator)
    accel.save({"rng": accel.rng_state()}, directory)
    drawn: list[float] = module.draw()
    assert len(set(drawn)) == 4
    return drawn


def test_every_device_goes_on_where_it_was(several: Any, tmp_path: Path) -> None:
    drawn = saved(several, 3, tmp_path)
    accel.load(tmp_path, {"rng": accel.rng_state()})
    assert several(3).draw()[:3] == drawn[:3]
