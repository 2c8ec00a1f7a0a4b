"""Bytes that each rank holds under ZeRO."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

import accel
from accel.engines.deepspeed import DeepSpeed
from tests.distributed import run, wait_for
from tests.engines.deepspeed.training import STAGES, adamw


def tensors() -> list[torch.Tensor]:
    """The tensors of this process that hold numbers of 32 bits."""
    found = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
    return [tensor for tensor in found if tensor.device.type == "cpu" and tensor.dtype is torch.float32]


def held(stage: int, theory: float) -> float:
    """Bytes of weights, gradients and optimizer state on this rank, in units of the weights, after a step."""
    torch.manual_seed(0)
    earlier = tensors()  # of programs that this process ran before; kept, so that no address is reused
    others = set(map(id, earlier))
    width = 64
    raw = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 512}}
    model, optimizer, _ = accel.setup(raw, adamw(raw), backend=DeepSpeed(stage=stage, config=config))
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step()

    def large() -> int:
        gc.collect()
        sizes: dict[int, int] = {}
        for item in tensors():
            if id(item) in others:
                continue
            with torch._C.DisableTorchFunctionSubclass():  # a divided weight refuses it
                storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            for more in (item.grad if item.is_leaf else None, getattr(item, "ds_tensor", None)):
                if more is not None:
                    sizes[more.untyped_storage().data_ptr()] = more.untyped_storage().nbytes()
        return sum(size for size in sizes.values() if size >= 4 * width * width // 4)

    found = [0.0]

    def settled() -> bool:
        found[0] = large() / (4 * 8 * width * width)
        return found[0] < theory + 0.1

    with contextlib.suppress(AssertionError):  # a thread of gloo may be about to let go of what it has sent
        wait_for(settled, 10)
    del earlier
    assert len(list(raw.parameters())) == 8
    return found[0]


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_on_each_rank(world: int) -> None:
    """ZeRO's own figures for AdamW, in units of the weights: 1 or 1/n for each of weights and gradients, 2/n for state."""
    theory = {1: 1 + 1 / world + 2 / world, 2: 1 + 1 / world + 2 / world, 3: 4 / world}
    for stage in STAGES:
        for found in run(world, held, stage, theory[stage]):
            assert found == pytest.approx(theory[stage], abs=0.1), stage
