"""Checkpoints and state dicts with tensors on a CUDA device: what is saved and filled, where it lies, and what that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.checkpoint.background import background
from tests.distributed import run
from tests.gpu import batch, gpus
from tests.models import distance

pytestmark = gpus(1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4))


def steps(model: Any, optimizer: Any, numbers: range) -> list[torch.Tensor]:
    for number in numbers:
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


KINDS: list[Any] = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"capturable": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {"foreach": True}),
]


@pytest.mark.parametrize("road", ["load", "load_state_dict"])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_a_run_goes_on(kind: Any, options: dict[str, Any], road: str, tmp_path: Path) -> None:
    """A CPU has no kernels that read the step counter on a device, nor refuse it on the host."""

    def start() -> tuple[Any, Any]:
        raw = net().eval()
        return accel.setup(raw, kind(raw.parameters(), lr=0.01, **options))[:2]

    model, optimizer = start()
    steps(model, optimizer, range(3))
    accel.save({"model": model, "optimizer": optimizer}, tmp_path)
    states = model.state_dict(), optimizer.state_dict()
    torch.save(states, tmp_path / "states.pt")
    expected = steps(model, optimizer, range(3, 6))
    accel.teardown(model)
    model, optimizer = start()
    if road == "load":
        accel.load(tmp_path, {"model": model, "optimizer": optimizer})
    else:
        on_cpu = torch.load(tmp_path / "states.pt", map_location="cpu")
        model.load_state_dict(on_cpu[0])
        optimizer.load_state_dict(on_cpu[1])
    assert not distance(steps(model, optimizer, range(3, 6)), expected)
    on_device = bool(options.get("fused") or options.get("capturable"))
    assert all(s["step"].is_cuda for s in optimizer.state.values()) or not on_device


def state(value: float) -> dict[str, torch.Tensor]:
    """Larger than any buffer on the way; in another order, of other dtypes, and small."""
    return {
        "large": torch.arange(30_000_000.0, device="cuda").add_(value),
        "turned": torch.arange(6_000_000.0, device="cuda").add_(value).view(2000, 3000).t(),
        "images": torch.full((64, 32, 9, 9), value, device="cuda").contiguous(memory_format=torch.channels_last),
        "half": torch.arange(5_000_001.0, device="cuda").remainder_(251).add_(value).bfloat16(),
        "host": torch.full((1000, 1000), value),
        **{f"small{i}": torch.full((i,), value + i, device="cuda") for i in range(200)},
    }


@pytest.mark.parametrize("wait", [True, False])
def test_saved_values_come_back(wait: bool, tmp_path: Path) -> None:
    """Also where all is written over at once; on a CPU no copy is still under way then."""
    saved = state(1.0)
    for _ in range(2):  # the second time in the memory of the first
        expected = {name: t.clone() for name, t in saved.items()}
        pending = accel.save(saved, tmp_path, wait=wait)
        if pending is not None:
            assert all(block.is_pinned() for block in background._blocks)
            for tensor in saved.values():
                tensor.zero_()
            pending.result(60)
        found = state(0.0)
        accel.load(tmp_path, found)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # without a word to the stream that the copies were on
            assert all(torch.equal(found[name], t) for name, t in expected.items())
        saved = {name: t.add_(1) for name, t in found.items()}


def test_a_load_needs_little_memory(tmp_path: Path) -> None:
    """A CPU has no memory of a device."""
    accel.save(state(1.0), tmp_path)
    found = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in state(0.0).items()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    accel.load(tmp_path, found, convert=True)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    assert all(torch.equal(found[name], t.double()) for name, t in state(1.0).items())


def whole_optimizer() -> tuple[set[str], int, int]:
    raw = nn.Linear(4000, 4000)
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters(), fused=True), backend="sharded")
    model(torch.ones(1, 4000, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    full = accel.full_state_dict(optimizer)
    peak = torch.cuda.max_memory_allocated() - before
    optimizer.load_state_dict(full)
    model(torch.ones(1, 4000, device="cuda")).sum().backward()
    optimizer.step()
    places = {v.device.type for s in full["state"].values() for v in s.values() if isinstance(v, torch.Tensor)}
    return places, peak, sum(s["exp_avg"].nbytes for s in full["state"].values())


def test_full_state_is_on_the_cpu() -> None:
    """On a CPU it always does."""
    for places, peak, size in run(2, whole_optimizer, timeout=120):
        assert places == {"cpu"}
        assert size == (4000 * 4000 + 4000) * 4
        assert peak < size / 4
