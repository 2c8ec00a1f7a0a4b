"""Bytes that each rank holds, by a look at all tensors of its process."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import accel
from tests.backends import engine_of, need
from tests.distributed import run, wait_for
from tests.models import adamw

WIDTH, BLOCKS = 64, 8
WHOLE = 4 * BLOCKS * WIDTH * WIDTH
SMALL = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 512}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(BLOCKS)))


def tensors() -> list[torch.Tensor]:
    """Return the tensors of this process that hold numbers of 32 bits."""
    found = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor) and type(item) is not DTensor)
    return [tensor for tensor in found if tensor.device.type == "cpu" and tensor.dtype is torch.float32]


def resident(others: set[int]) -> int:
    """Return the bytes of the large tensors that aren't ``others``."""
    gc.collect()
    sizes: dict[int, int] = {}
    for item in tensors():
        if id(item) in others:
            continue
        with torch._C.DisableTorchFunctionSubclass():  # a divided weight refuses it
            held = [item, item.grad if item.is_leaf else None, getattr(item, "ds_tensor", None)]
        for each in held:
            if each is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    local = each.to_local() if type(each) is DTensor else each
                    storage = local.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(size for size in sizes.values() if size >= WHOLE / BLOCKS / 4)


def held(backend: Any, num_frozen: int, theory: float) -> float:
    """Return the bytes of weights, gradients and optimizer state after two steps, in units of the weights."""
    earlier = tensors()  # of programs that this process ran before; kept, so that no address is reused
    others = set(map(id, earlier))
    raw = net()
    raw[:num_frozen].requires_grad_(False)
    model, optimizer, _ = accel.setup(raw, adamw(raw), backend=backend)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
    found = [0.0]

    def settled() -> bool:
        found[0] = resident(others) / WHOLE
        return found[0] < theory + 0.1

    with contextlib.suppress(AssertionError):  # a thread of gloo may be about to let go of what it has sent
        wait_for(settled, 10)
    del earlier
    return found[0]


def zero(stage: int) -> Any:
    return accel.DeepSpeed(stage=stage, config={"zero_optimization": SMALL})


#: What AdamW needs, in units of the weights, if all of them train.
THEORY: list[tuple[Any, Any]] = [
    (accel.Sharded(), lambda world: 1 + 3 / world),
    (accel.FSDP(), lambda world: 4 / world),
    (zero(1), lambda world: 1 + 3 / world),
    (zero(2), lambda world: 1 + 3 / world),
    (zero(3), lambda world: 4 / world),
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("backend", "theory"), THEORY, ids=range(len(THEORY)))
def test_bytes_on_each_rank(backend: Any, theory: Any, world: int) -> None:
    need(engine_of(backend).name, world)
    for found in run(world, held, backend, 0, theory(world)):
        assert found == pytest.approx(theory(world), abs=0.1)


def test_frozen_weights_cost_their_shard() -> None:
    for found in run(2, held, accel.FSDP(), 6, 0.875):
        assert found == pytest.approx(0.875, abs=0.1)


def deferred_peak() -> int:
    """Return the most bytes that were whole at once while a model got its first values."""
    peak = 0
    original = nn.Linear.reset_parameters
    with accel.deferred_init():
        raw = net()

    def watch(module: nn.Linear) -> None:
        nonlocal peak
        original(module)
        whole = [p for p in raw.parameters() if type(p) is nn.Parameter and not p.is_meta]
        peak = max(peak, sum(p.nbytes for p in whole))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "reset_parameters", watch)
        accel.setup(raw, backend="fsdp")
    return peak


def test_deferred_models_are_never_full() -> None:
    for peak in run(2, deferred_peak):
        assert 0 < peak <= WHOLE / BLOCKS
