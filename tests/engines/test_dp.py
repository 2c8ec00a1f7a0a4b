"""dp: what replicas compute in, each in a thread of its own. Parity is in test_contract.py."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from accel.engines.dp import Replicas
from accel.precision import Precision


class Dtype(nn.Module):
    """The dtype in which a product is computed; whether autocast is on; whether there is a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
        out = self.linear(x)
        return out.dtype, torch.is_autocast_enabled("cpu"), out.requires_grad


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    """With two devices, as far as torch's threads see: only its streams and device guards need an accelerator."""
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(accelerator, "device_index", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(accelerator, "current_stream", lambda index: contextlib.nullcontext())
    parallel = Replicas(Dtype(), [torch.device("cpu", 0), torch.device("cpu", 1)])
    parallel.device_ids, parallel.src_device_obj = [0, 1], torch.device("cpu")
    return parallel


def computed(parallel: Replicas) -> set[tuple[torch.dtype, bool, bool]]:
    x = torch.ones(1, 2)
    return set(parallel.parallel_apply([parallel.module] * 2, [(x,), (x,)], [{}, {}]))


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("32-true", (torch.float32, False, True)),
        ("bf16-mixed", (torch.bfloat16, True, True)),
        ("16-mixed", (torch.float16, True, True)),
    ],
)
def test_replicas_compute_in_its_precision(replicas: Replicas, precision: str, expected: Any) -> None:
    """On the CPU torch's threads take bfloat16 by themselves, on CUDA float16."""
    assert Precision(precision, torch.device("cpu")).call(computed, (replicas,), {}) == {expected}


def test_replicas_compute_in_users_autocast(replicas: Replicas) -> None:
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        assert computed(replicas) == {(torch.float16, True, False)}
        with torch.autocast("cpu", enabled=False):
            assert computed(replicas) == {(torch.float32, False, False)}
