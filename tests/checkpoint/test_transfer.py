"""Asynchronous copies, as from and to CUDA devices, for which tensors of one dtype stand here.

A copy is made when somebody waits for it, or at once: values are wrong if memory is used again or read too early.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.checkpoint import background as saving
from accel.checkpoint import reader, shards
from accel.process import transfer

REMOTE = torch.float64


class Late:
    """An accelerator whose copies wait until an event that was recorded after them is waited for; or else never."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self.begun: list[Callable[[], Any]] = []
        self.copy_ = torch.Tensor.copy_
        self.ahead = 0

    def copy(self, to: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking and REMOTE in (to.dtype, values.dtype):
            self.begun.append(lambda: self.copy_(to, values) if self.late else to)
            self.ahead = max(self.ahead, len(self.begun))
            return to if self.late else self.copy_(to, values)
        return self.copy_(to, values)

    def events(self, devices: Any) -> list[Any]:
        return [SimpleNamespace(synchronize=partial(self.finish, list(self.begun)))] if set(devices) else []

    def finish(self, copies: list[Callable[[], Any]]) -> None:
        for copy in copies:
            if copy in self.begun:
                self.begun.remove(copy)
                copy()

    def host_memory(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)


@pytest.fixture(params=[True, False], ids=["late", "at once"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Late:
    late = Late(request.param)
    copy = lambda to, values, non_blocking=False: late.copy(to, values, non_blocking)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    changed = {
        "PIECE": 4 << 20,  # smaller, as the tensors are
        "_BLOCK": 16 << 20,
        "is_remote": lambda tensor: tensor.dtype is REMOTE,
        "begun": late.events,
        "host_memory": late.host_memory,
    }
    for module, name in itertools.product((transfer, reader, saving, shards), changed):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, changed[name])
    monkeypatch.setattr(saving.background, "_blocks", [])
    return late


def state(value: float) -> dict[str, Any]:
    """More than either buffer, over the ends of pieces, blocks and chunks; in other orders, on the host, and empty."""
    generator = torch.Generator().manual_seed(int(value))
    net = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 3)).double()
    for parameter in net.parameters():
        parameter.data.normal_(generator=generator)
    return {
        "large": torch.rand(2_250_003, dtype=REMOTE, generator=generator) + value,
        "turned": (torch.rand(1250, 1500, dtype=REMOTE, generator=generator) + value).t(),
        "host": torch.rand(750_000, generator=generator) + value,
        "small": [torch.full((i,), value + i, dtype=REMOTE) for i in range(50)],
        "net": net,
        "frozen": nn.Linear(700, 700).double().requires_grad_(False),
    }


def flat(state: dict[str, Any]) -> list[torch.Tensor]:
    modules = [*state["net"].state_dict().values(), *state["frozen"].state_dict().values()]
    return [t.clone() for t in (state["large"], state["turned"], state["host"], *state["small"], *modules)]


@pytest.mark.parametrize("wait", [True, False])
def test_copies_have_the_right_values(
    wait: bool, device: Late, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):  # the memory of the first is used again
        saved, found, again = state(number), state(0), state(0)
        expected = flat(saved)
        pending = accel.save(saved, tmp_path / str(number), wait=wait)
        if pending is not None:
            for tensor in (saved["large"], saved["turned"], saved["host"], *saved["small"], *saved["net"].parameters()):
                tensor.data.zero_()
            pending.result(60)
        assert not device.begun
        # A background save moves memory of the CPU, which stands for the device here.
        assert device.ahead > 1 or not wait
        device.ahead = 0
        accel.load(tmp_path / str(number), found)
        assert device.ahead
        assert not device.begun
        with monkeypatch.context() as plain:
            plain.setattr(transfer, "is_remote", lambda tensor: False)
            plain.setattr(reader, "is_remote", lambda tensor: False)
            plain.setattr(torch.Tensor, "copy_", device.copy_)
            accel.load(tmp_path / str(number), again)
        for loaded in (found, again):
            assert all(torch.equal(a, b) for a, b in zip(flat(loaded), expected, strict=True))
        device.ahead = 0
