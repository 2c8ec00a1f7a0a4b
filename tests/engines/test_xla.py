"""The XLA engine: refused without a device; trained on torch_xla's own, where that is installed (PJRT_DEVICE=CPU)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.process import devices
from tests.distributed import refusals, run

ON_XLA = devices.available()[0] in ("tpu", "xla")
needs_xla = pytest.mark.skipif(not ON_XLA, reason="no XLA device: torch-tpu and a TPU, or torch_xla and PJRT_DEVICE")


def on_the_cpu() -> None:
    accel.setup(nn.Linear(1, 1), backend="xla", devices="cpu")


@pytest.mark.parametrize("world", [1] if ON_XLA else [1, 2])
def test_without_a_device_setup_raises(world: int) -> None:
    for message in refusals(world, on_the_cpu, error="BackendError"):
        assert "backend 'xla' needs a TPU, but this process uses cpu" in message
        assert "'torch-tpu==0.2.0'" in message
        assert "'torch_xla==2.9.0'" in message


def train() -> tuple[str, str, float]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)
                (F.mse_loss(model(x.to(device)), y.to(device)) / 2).backward()
            accel.clip_grad_norm_(model, 0.1) if device.type != "cpu" else nn.utils.clip_grad_norm_(
                model.parameters(), 0.1
            )
            optimizer.step()

    expected, plain = build()
    loop(expected, plain, torch.device("cpu"))
    raw, raw_optimizer = build()
    parameters = list(raw.parameters())
    model, optimizer, _ = accel.setup(raw, raw_optimizer)
    name = repr(model).partition("(")[0]
    loop(model, optimizer, accel.device())
    accel.teardown(model)
    assert all(p is q for p, q in zip(parameters, raw.parameters(), strict=True))
    # Not the buffers: torch_xla's own BatchNorm keeps the biased variance.
    pairs = zip(raw.parameters(), expected.parameters(), strict=True)
    return name, raw[0].weight.device.type, max(float((a.cpu() - b).detach().abs().max()) for a, b in pairs)


@needs_xla
def test_the_whole_loop_on_the_device() -> None:
    ((name, device, distance),) = run(1, train, timeout=240)
    assert (name, device) == ("ModelHandle[xla]", devices.available()[0])
    assert distance < 1e-5
