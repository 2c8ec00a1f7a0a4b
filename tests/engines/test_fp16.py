"""``16-mixed`` over divided gradients or weights: near to fp32, and an overflow on one rank skips all ranks' step."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import accel
from accel.registry import registry
from tests.backends import need
from tests.distributed import run
from tests.models import distance, mlp, rows, sgd

BACKENDS: list[Any] = ["sharded", "fsdp", "pipeline", *(accel.DeepSpeed(stage=stage) for stage in (1, 2, 3))]


def net() -> nn.Sequential:
    return mlp(6, 16, 16, 3, seed=3)


def fp16(backend: Any) -> None:
    """Micro-batches, ``no_sync`` and clipping: gradients are true ones wherever they are."""
    raw, plain = net(), net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=backend, precision="16-mixed")
    reference = sgd(plain)
    registry.loss_scale.restore(1024.0, 0)  # the first one would overflow in this model, as torch's does
    place, places = accel.data_parallel_place(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        reference.zero_grad()
        for micro in range(2):
            x = rows(10 * step + micro, 8, 6)
            with accel.no_sync(model) if step % 2 and not micro else contextlib.nullcontext():
                accel.backward(model(x.chunk(places)[place]).square().mean())
            plain(x).square().mean().backward()
        if step > 1:
            norm = accel.clip_grad_norm_(model, 0.05)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            assert abs(float(norm / expected) - 1) < 5e-3
        optimizer.step()
        reference.step()
    assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (False, 0)
    assert distance(accel.full_state_dict(model), plain.state_dict()) < 2e-3


def overflow_here(raw: nn.Module) -> None:
    """Let one element overflow that this rank alone holds."""
    gradient = [p.grad for p in raw.parameters() if p.grad is not None][-1]
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    local.view(-1)[-1:] = float("inf")


def overflow(backend: Any) -> None:
    raw = net()
    raw_optimizer = sgd(raw)
    model, optimizer, _ = accel.setup(raw, raw_optimizer, backend=backend, precision="16-mixed")
    registry.loss_scale.restore(1024.0, 0)

    def train(stepped: Any, overflows: bool = False) -> None:
        optimizer.zero_grad()
        in_a_shard = backend in ("fsdp", "pipeline")
        here = overflows and accel.rank() == accel.world_size() - 1
        accel.backward(model(rows(0, 4, 6)).square().mean() * (1e35 if here and not in_a_shard else 1.0))
        if here and in_a_shard:
            overflow_here(raw)
        stepped.step()

    def state() -> Any:
        return copy.deepcopy([accel.full_state_dict(one) for one in (model, optimizer)])

    train(optimizer)
    before, scale = state(), registry.loss_scale.value
    for skips, stepped in enumerate((optimizer, raw_optimizer), 1):
        train(stepped, overflows=True)
        assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (True, skips)
        assert distance(state(), before) == 0
    assert registry.loss_scale.value == scale / 4
    train(optimizer)
    assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (False, 2)
    assert distance(accel.full_state_dict(model), before[0]) > 0
    if backend != "fsdp":  # which takes a scaler of the program, as ddp does
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(rows(0, 4, 6)).square().mean()).backward()
        with pytest.raises(accel.PrecisionError, match="GradScaler"):
            scaler.step(optimizer)


@pytest.mark.parametrize("program", [fp16, overflow])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda value: str(value)[-40:])
def test_16_mixed(backend: Any, program: Any) -> None:
    need(backend, 2)
    run(2, program, backend)
