"""A default device that a program sets, "cuda" say, is for its own tensors: "meta" shows where accel's would follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import accel
from tests.backends import BACKENDS, engine_of, need
from tests.distributed import run
from tests.models import mlp, sgd


def train(backend: Any, path: Path, device: str | None) -> list[torch.Tensor]:
    raw = mlp(8, 8, 8, 8, 4)
    samples = torch.randn(32, 8, generator=torch.Generator().manual_seed(3))
    torch.set_default_device(device)
    try:
        loader = DataLoader(TensorDataset(samples), batch_size=4, shuffle=True)
        model, optimizer, loader = accel.setup(raw, sgd(raw), loader, backend=backend)
        for (x,) in loader:
            optimizer.zero_grad()
            accel.backward(model(x).square().mean())
            accel.clip_grad_norm_(model, 1.0)
            optimizer.step()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        accel.save({"model": model, "optimizer": optimizer, "loader": loader}, path)
        model.load_state_dict(accel.full_state_dict(model))
        optimizer.load_state_dict(accel.full_state_dict(optimizer))
        accel.load(path, {"model": model, "optimizer": optimizer, "loader": loader})
        optimizer.zero_grad()
        model(x).square().mean().backward()
        accel.teardown()
    finally:
        torch.set_default_device(None)
    return [p.detach() for p in raw.parameters()]


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_default_device_changes_nothing(backend: Any, tmp_path: Path) -> None:
    need(backend, 2)
    if not engine_of(backend).synchronizes:
        pytest.skip("each rank would train a separate model")
    plain, other = (run(2, train, backend, tmp_path / str(device), device) for device in (None, "meta"))
    for here, there in zip(plain, other, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(here, there, strict=True))
