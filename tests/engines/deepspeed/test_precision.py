"""DeepSpeed's options, and its precisions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines.deepspeed import DeepSpeed
from tests.distributed import run
from tests.engines.deepspeed.training import DIVIDED, STAGES, Net, Pair, data, loss_of, momentum, whole, zero
from tests.models import distance

FEW_AT_ONCE = {**DIVIDED, "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 20}
GATHERED_OTHERWISE = {"allgather_partitions": False, "allgather_bucket_size": 20, "overlap_comm": True}
#: Stage, ``zero_optimization``, and options of accel.
OPTIONS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {"offload_optimizer": True}),
    (2, {"contiguous_gradients": False, "round_robin_gradients": True}, {}),
    (2, {"reduce_scatter": False, "reduce_bucket_size": 40}, {"offload_optimizer": True}),
    (2, GATHERED_OTHERWISE, {}),
    (3, {"stage3_param_persistence_threshold": 30}, {"offload_parameters": True}),
    (3, {"sub_group_size": 40, "reduce_bucket_size": 40}, {"offload_optimizer": True}),
    (3, {**FEW_AT_ONCE, "stage3_allgather_sequential": True}, {}),
    (3, {**DIVIDED, "stage3_module_granularity_threshold": 100, "reduce_scatter": False}, {}),
]


def train_with_options() -> None:
    for stage, section, options in OPTIONS:
        # As Accelerate writes it.
        usual = {"gradient_accumulation_steps": "auto", "train_batch_size": "auto", "gradient_clipping": 0.05}
        pair = Pair(DeepSpeed(stage=stage, config={**usual, "zero_optimization": section}, **options))
        for step in range(3):
            pair.zero_grad()
            pair.backward(step)
            nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            pair.step()
        pair.check()
        accel.teardown()


def test_configuration_and_offload() -> None:
    run(2, train_with_options)


def gathered_near() -> None:
    """Backward gathers from a second copy, divided over two ranks, which is of the step before unless it is dropped."""
    pair = Pair(DeepSpeed(stage=3, config={"zero_optimization": {**DIVIDED, "zero_hpz_partition_size": 2}}))
    pair.train()
    pair.train(range(3, 5), forward=lambda m, x: m(x, right=False))
    weights: list[Any] = list(pair.raw.parameters())
    assert not any(weight.ds_secondary_tensor is not None for weight in weights)
    loss_of(pair.model(data(0, accel.rank()))).backward()
    again = [weight for weight in weights if weight.ds_secondary_tensor is not None]
    assert again
    assert all(weight.ds_secondary_tensor.numel() == 2 * weight.ds_tensor.numel() for weight in again)
    pair.model.load_state_dict(Net(9).state_dict())
    pair.plain.load_state_dict(Net(9).state_dict())
    pair.train(range(5, 7))
    pair.check()


def test_weights_from_a_near_copy() -> None:
    run(4, gathered_near)


def half(stage: int) -> None:
    """16 bits as in plain torch."""
    kinds = ("16-true", torch.float16, 5e-3), ("bf16-true", torch.bfloat16, 0.02)
    for precision, dtype, tolerance in kinds:
        pair = Pair(zero(stage), momentum, lambda dtype=dtype: Net().to(dtype), precision=precision)
        pair.train(forward=lambda m, x, dtype=dtype: {"out": m(x.to(dtype))["out"].float()})
        full = whole(pair.model)
        assert distance(full, pair.plain.state_dict()) <= tolerance
        assert {value.dtype for value in full.values()} == {dtype}
        accel.teardown(pair.model)
        assert next(pair.raw.parameters()).dtype is dtype


def master_weights(stage: int) -> None:
    """With DeepSpeed's 'bf16' the optimizer steps fp32 copies: steps of 0.01 survive."""
    config = {"bf16": {"enabled": True}, "zero_optimization": DIVIDED}
    pair = Pair(DeepSpeed(stage=stage, config=config), precision="bf16-true")
    pair.train(range(2))
    for step in range(2, 4):  # gradients of two backwards, the first of which is clipped
        pair.zero_grad()
        pair.backward(step)
        accel.clip_grad_norm_(pair.model, 0.05)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
        pair.backward(step + 10)
        pair.step()
    accel.teardown(pair.model)
    assert distance(pair.raw.state_dict(), pair.plain.state_dict()) <= 0.02


@pytest.mark.parametrize("program", [half, master_weights])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_of_16_bits(stage: int, program: Any) -> None:
    run(2, program, stage)


def adapted(stage: int, dtype: torch.dtype) -> None:
    """A frozen base in half precision, and trainable weights in fp32 beside it, as LoRA has them."""

    def build() -> nn.Module:
        net = Net()
        net.right.to(dtype).requires_grad_(False)
        net.right.register_forward_pre_hook(lambda m, args: args[0].to(dtype))
        net.right.register_forward_hook(lambda m, args, out: out.float())
        return net

    pair = Pair(zero(stage), lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad]), build)
    for step in range(3):
        pair.zero_grad()
        pair.backward(step)
        accel.clip_grad_norm_(pair.model, 0.5)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5)
        pair.step()
    pair.check()
    accel.teardown()
    assert [p.dtype for p in pair.raw.parameters()] == [p.dtype for p in pair.plain.parameters()]


@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.bfloat16), (2, torch.float16)])
def test_frozen_base_in_half_precision(stage: int, dtype: torch.dtype) -> None:
    run(2, adapted, stage, dtype)
