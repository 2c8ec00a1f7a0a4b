"""Offload to NVMe: what an optimizer steps, its state, and the parts of weights lie in files, and are tensors like any other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines.deepspeed import DeepSpeed
from accel.registry import registry
from tests.distributed import run
from tests.engines.deepspeed.training import whole
from tests.models import distance

OPTIMIZERS = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1, amsgrad=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
}


def model_of(seed: int) -> nn.Module:
    """On two ranks a part of the first weight is large enough for a file."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1024, 544), nn.Tanh(), nn.Linear(544, 3))


def offloaded(stage: int, device: str, folder: Path) -> Any:
    there = {"device": device, "nvme_path": str(folder)}
    zero = {"offload_optimizer": there, "stage3_param_persistence_threshold": 600}
    return DeepSpeed(stage=stage, config={"zero_optimization": zero | ({"offload_param": there} if stage == 3 else {})})


def trained(model: Any, optimizer: Any, steps: range) -> dict[str, torch.Tensor]:
    """Two backwards for a step, clipped; then all weights and state."""
    for step in steps:
        for x in torch.randn(2, 4, 1024, generator=torch.Generator().manual_seed(2 * step + accel.rank())):
            model(x).square().mean().backward()
        accel.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    state = accel.full_state_dict(optimizer)["state"]
    return whole(model) | {f"{i}/{key}": value.clone() for i in state for key, value in state[i].items()}


def in_files(tensors: Any, folder: Path) -> bool:
    """Whether all large ones are, and there are some."""
    large = [t for t in tensors if t.numel() > 2**18]
    return bool(large) and all(str(t.untyped_storage().filename).startswith(f"{folder}/accel-offload-") for t in large)


def tensors_of(optimizer: Any) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def lies_there(model: Any, optimizer: Any, stage: int, folder: Path) -> bool:
    fragments = list(registry.of_handle(model).zero.fragments.values())
    assert not os.listdir(folder)  # without names they go with the tensors, whatever happens
    homes = [f.home for f in fragments if stage == 3]
    return in_files([*homes, *(f.weights for f in fragments)], folder) and in_files(tensors_of(optimizer), folder)


def as_in_memory(folder: Path) -> None:
    saved = str(folder.parent / "saved")
    for stage, name in ((1, "AdamW"), (3, "SGD")):
        found: dict[str, list[dict[str, torch.Tensor]]] = {"cpu": [], "nvme": []}
        for device, results in found.items():
            raw = model_of(3)
            for steps in (range(2), range(2, 3)):
                made, seen = OPTIMIZERS[name](raw), []
                look = made.register_step_post_hook(
                    lambda o, *_, seen=seen: seen.append(in_files(tensors_of(o), folder))
                )
                model, optimizer, _ = accel.setup(raw, made, backend=offloaded(stage, device, folder))
                made._optimizer_step_post_hooks.move_to_end(look.id, last=False)  # before accel ends the step
                if steps.start:
                    accel.load(saved, {"model": model, "optimizer": optimizer})
                    assert device == "cpu" or lies_there(model, made, stage, folder)
                results.append(trained(model, optimizer, steps))
                assert device == "cpu" or lies_there(model, made, stage, folder)
                assert seen[0] is (device == "nvme" and (name == "AdamW" or steps.start > 0))  # as soon as it is made
                accel.save({"model": model, "optimizer": optimizer}, saved)
                accel.teardown()
                assert distance(raw.state_dict(), {n: results[-1][n] for n in raw.state_dict()}) == 0
                assert all(t.untyped_storage().filename is None for t in raw.state_dict().values())
                raw = model_of(4)
        for cpu, nvme in zip(found["cpu"], found["nvme"], strict=True):
            assert distance(nvme, cpu) == 0, (stage, name)


def test_a_loop_is_the_one_in_memory_and_its_state_lies_in_files(tmp_path: Path) -> None:
    run(2, as_in_memory, tmp_path / "nvme")


def full_disk(folder: Path) -> None:
    allocate, sizes = os.posix_fallocate, []

    def fallocate(file: int, start: int, size: int) -> None:
        sizes.append(size)
        allocate(file, start, size if len(sizes) < 2 else 2**60)  # more than any disk has

    os.posix_fallocate = fallocate
    try:
        raw = model_of(3)
        model, optimizer, _ = accel.setup(raw, OPTIMIZERS["AdamW"](raw), backend=offloaded(1, "nvme", folder))
        with pytest.raises(accel.BackendError, match="offload of [0-9]+ bytes to 'nvme_path'"):
            trained(model, optimizer, range(1))
    finally:
        os.posix_fallocate = allocate


def test_a_disk_that_is_full_is_an_error(tmp_path: Path) -> None:
    run(2, full_disk, tmp_path)
