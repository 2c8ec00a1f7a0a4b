"""DeepSpeed's options, and its precisions."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines.deepspeed import DeepSpeed
from accel.registry import registry
from tests.distributed import run
from tests.engines.deepspeed.training import (
    CONFIG,
    STAGES,
    Net,
    Pair,
    adamw,
    data,
    loss_of,
    mean_loss,
    momentum,
    whole,
    zero,
)
from tests.measured import measured
from tests.models import distance

GATHERED_OTHERWISE = {
    "use_multi_rank_bucket_allreduce": False,
    "allgather_partitions": False,
    "allgather_bucket_size": 20,
    "overlap_comm": True,
}
DIVIDED = CONFIG["zero_optimization"]
FEW_AT_ONCE = {
    **DIVIDED,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 20,
    "stage3_max_reuse_distance": 0,
    "enable_sanity_checks": True,
}


def options_that_change_nothing() -> None:
    for stage, extra, options in (
        (1, {"gradient_clipping": 0.05}, {"offload_optimizer": True}),
        (2, {"zero_optimization": {"contiguous_gradients": False, "round_robin_gradients": True}}, {}),
        (2, {"zero_optimization": {"reduce_scatter": False, "reduce_bucket_size": 40}}, {"offload_optimizer": True}),
        (3, {"zero_optimization": {"stage3_param_persistence_threshold": 30}}, {"offload_parameters": True}),
        (3, {"zero_optimization": {"sub_group_size": 40, "reduce_bucket_size": 40}}, {"offload_optimizer": True}),
        (2, {"gradient_clipping": 0.05, "train_batch_size": "auto"}, {}),
        (2, {"zero_optimization": GATHERED_OTHERWISE}, {}),
        (3, {"zero_optimization": {**FEW_AT_ONCE, "stage3_allgather_sequential": True}}, {}),
        (
            3,
            {"zero_optimization": {**DIVIDED, "stage3_use_all_reduce_for_fetch_params": True, "overlap_comm": False}},
            {},
        ),
        (
            3,
            {"zero_optimization": {**DIVIDED, "stage3_module_granularity_threshold": 100, "reduce_scatter": False}},
            {},
        ),
    ):
        usual = {"gradient_accumulation_steps": "auto", "zero_force_ds_cpu_optimizer": False}  # as Accelerate writes it
        pair = Pair(DeepSpeed(stage=stage, config={**usual, **extra}, **options))
        for step in range(3):
            pair.optimizer.zero_grad()
            pair.plain_optimizer.zero_grad()
            loss_of(pair.model(data(step, accel.rank()))).backward()
            mean_loss(pair.plain, lambda m, x: m(x), step).backward()
            if "gradient_clipping" in extra:
                nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            pair.optimizer.step()
            pair.plain_optimizer.step()
        pair.check()
        accel.teardown()


def test_configuration_and_offload() -> None:
    run(2, options_that_change_nothing)


def half(stage: int) -> None:
    """bf16-true is plain torch's bfloat16; with DeepSpeed's 'bf16' the optimizer steps fp32 copies."""
    reference = Net().bfloat16()
    optimizer = adamw(reference)
    raw = Net()
    model, handle, _ = accel.setup(raw, adamw(raw), backend=zero(stage), precision="bf16-true")
    for step in range(3):
        optimizer.zero_grad()
        handle.zero_grad()
        for x in data(step):
            (loss_of({"out": reference(x.bfloat16())["out"].float()}) / accel.world_size()).backward()
        loss_of(model(data(step, accel.rank()))).backward()
        optimizer.step()
        handle.step()
    assert distance(whole(model), reference.state_dict()) <= 0.02
    assert next(iter(whole(model).values())).dtype is torch.bfloat16
    accel.teardown(model)
    assert next(raw.parameters()).dtype is torch.bfloat16

    exact = Net()
    pair = Pair(DeepSpeed(stage=stage, config={**CONFIG, "bf16": {"enabled": True}}), precision="bf16-true")
    pair.train()
    accel.teardown(pair.model)
    # Steps of 0.01 survive in fp32.
    assert distance(pair.raw.state_dict(), pair.plain.state_dict()) <= 0.02
    frozen = Net()
    frozen.body.requires_grad_(False)
    model, _, _ = accel.setup(
        frozen, adamw(frozen), precision="bf16-true", backend=DeepSpeed(stage=stage, config={"bf16": {"enabled": True}})
    )
    accel.teardown(model)
    assert distance(frozen.state_dict(), exact.state_dict()) <= 0.01


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_true(stage: int) -> None:
    run(2, half, stage)


def kept_gradients(stage: int) -> None:
    """The gradients of one backward wait in bfloat16; a sum of several is fp32's."""
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage3_param_persistence_threshold": 0}}
    torch.manual_seed(3)
    raw = nn.Linear(64, 64, bias=False)
    raw.weight.data = raw.weight.data.bfloat16().float()
    expected = raw.weight.detach().clone()
    model, optimizer, _ = accel.setup(
        raw,
        torch.optim.SGD(raw.parameters(), lr=0.5),
        precision="bf16-true",
        backend=DeepSpeed(stage=stage, config=config),
    )
    for values, itemsize in (((1.0,), 2), ((1.0, 2.0**-9), 4), ((1.0,), 2)):
        optimizer.zero_grad()
        for value in values:
            model(torch.full((1, 64), value)).sum().backward()
            if len(values) > 1:  # stage 1 leaves the sum to p.grad until something asks for the mean
                accel.clip_grad_norm_(model, 1e9)
        optimizer.step()
        assert measured(model).gradients == 64 * 64 * itemsize // accel.world_size()
        expected -= 0.5 * sum(values)
    accel.teardown(model)
    assert torch.equal(raw.weight, expected.bfloat16())


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_gradients_wait_in_bfloat16_and_add_up_in_fp32(stage: int) -> None:
    run(2, kept_gradients, stage)


def clipped_between(stage: int) -> float:
    """What was clipped stays so when another backward adds to it, in fp32 copies too."""
    torch.manual_seed(3)
    raw = nn.Linear(64, 64, bias=False)
    before = raw.weight.detach().bfloat16().float()
    model, optimizer, _ = accel.setup(
        raw,
        torch.optim.SGD(raw.parameters(), lr=0.5),
        precision="bf16-true",
        backend=DeepSpeed(stage=stage, config={**CONFIG, "bf16": {"enabled": True}}),
    )
    for max_norm in (1.0, 1e9):  # a gradient of ones has the norm 64
        model(torch.ones(1, 64)).sum().backward()
        accel.clip_grad_norm_(model, max_norm)
    optimizer.step()
    accel.teardown(model)
    return float((before - raw.weight).mean())


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_after_clipping_adds_to_what_was_clipped(stage: int) -> None:
    for change in run(2, clipped_between, stage):
        assert change == pytest.approx(0.5 * (1 + 1 / 64), rel=1e-3)


def fp16(stage: int, accumulation: int, synced: bool, clip: bool, set_to_none: bool) -> None:
    """16-mixed against plain torch in fp32: the gradients are true ones wherever they are."""
    pair = Pair(zero(stage), momentum, precision="16-mixed")
    registry.loss_scale.restore(1024.0, 0)  # the first one would overflow in this model, as torch's does
    for step in range(3):
        pair.optimizer.zero_grad(set_to_none=set_to_none)
        pair.plain_optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(accumulation):
            last = micro == accumulation - 1
            with contextlib.nullcontext() if synced or last else accel.no_sync(pair.model):
                accel.backward(loss_of(pair.model(data(9 * step + micro, accel.rank()))))
            mean_loss(pair.plain, lambda m, x: m(x), 9 * step + micro).backward()
        if clip:
            norm = accel.clip_grad_norm_(pair.model, 0.05)
            expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            assert abs(float(norm / expected) - 1) < 5e-3
        pair.optimizer.step()
        pair.plain_optimizer.step()
    assert (pair.optimizer.step_was_skipped, pair.optimizer.skipped_steps) == (False, 0)
    assert distance(whole(pair.model), Net().state_dict()) > 1e-3
    pair.check(2e-3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("accumulation", "synced", "clip", "set_to_none"),
    [(1, True, False, True), (3, True, True, True), (2, False, False, False), (2, True, False, False)],
)
def test_fp16(stage: int, accumulation: int, synced: bool, clip: bool, set_to_none: bool) -> None:
    run(2, fp16, stage, accumulation, synced, clip, set_to_none)


def fp16_refusals(stage: int) -> None:
    """An overflow on one rank skips the step on all; a plain backward and a scaler of the user's are refused."""
    pair = Pair(zero(stage), precision="16-mixed")
    registry.loss_scale.restore(1024.0, 0)
    model, optimizer = pair.model, pair.optimizer

    def train(factor: float, stepped: Any) -> None:
        optimizer.zero_grad()
        accel.backward(loss_of(model(data(0, accel.rank()))) * factor)
        stepped.step()

    train(1.0, optimizer)
    before = copy.deepcopy((whole(model), accel.full_state_dict(optimizer)))
    for skips, stepped in enumerate((optimizer, pair.raw_optimizer), 1):
        train(1e35 if accel.rank() == 0 else 1.0, stepped)
        assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (True, skips)
        assert distance(whole(model), before[0]) == 0
        assert repr(accel.full_state_dict(optimizer)) == repr(before[1])
    accel.backward(loss_of(model(data(0, accel.rank()))))
    for stepped in (optimizer, pair.raw_optimizer):
        optimizer.zero_grad()
        loss_of(model(data(0, accel.rank()))).backward()
        with pytest.raises(accel.PrecisionError, match=r"accel\.backward"):
            stepped.step()
    with pytest.raises(accel.PrecisionError, match=r"plain loss\.backward"):
        accel.backward(loss_of(model(data(0, accel.rank()))))
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model(data(0, accel.rank())))).backward()
    accel.clip_grad_norm_(model, 1.0)
    with pytest.raises(accel.PrecisionError, match="GradScaler"):
        scaler.step(optimizer)
    assert distance(whole(model), before[0]) == 0
    train(1.0, optimizer)
    assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (False, 2)
    assert distance(whole(model), before[0]) > 0


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_overflow_and_refusals(stage: int) -> None:
    run(2, fp16_refusals, stage)


# -- ZeRO++ -----------------------------------------------------------------------------------------------------------


def gathered_near() -> None:
    """Backward gathers from a second copy, divided over two ranks, which is of the step before unless it is dropped."""
    for _ in range(2):
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
        pair.raw.body.requires_grad_(False)
        pair.plain.body.requires_grad_(False)
        pair.train(range(5, 7))
        pair.raw.body.requires_grad_(True)
        pair.plain.body.requires_grad_(True)
        pair.train(range(7, 9))
        pair.check()
        accel.teardown()


def test_weights_gathered_from_a_near_copy_are_those_of_the_last_step() -> None:
    run(4, gathered_near)


def float16(stage: int) -> float:
    raw, plain = Net(), Net().half()
    backend = zero(stage)
    model, optimizer, _ = accel.setup(raw, momentum(raw), backend=backend, precision="16-true")
    reference = momentum(plain)
    for step in range(3):
        optimizer.zero_grad()
        model(data(step, accel.rank()))["out"].square().mean().backward()
        optimizer.step()
        reference.zero_grad()
        plain(data(step).flatten(0, 1).half())["out"].square().mean().backward()
        reference.step()
    full = accel.full_state_dict(model)
    assert {value.dtype for value in full.values()} == {torch.float16}
    return max(float((full[name] - value).abs().max()) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("stage", STAGES)
def test_float16_weights(stage: int) -> None:
    assert max(run(2, float16, stage)) < 5e-3


def in_float64(backend: Any) -> float:
    """How far two steps are from those of one process, one with clipping."""
    torch.manual_seed(0)
    net, plain = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double() for _ in range(2))
    plain.load_state_dict(net.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer, _ = accel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), backend=backend)
    for clips in (False, True):
        for module, stepped in ((model, optimizer), (plain, reference)):
            stepped.zero_grad()
            module(torch.arange(8.0, dtype=torch.float64).view(2, 4)).square().mean().backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            stepped.step()
    whole = model.state_dict()
    return max(float((whole[name] - value).abs().max()) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("backend", ["fsdp", "sharded"])
def test_float64_weights_keep_their_precision(backend: Any) -> None:
    assert max(run(2, in_float64, backend)) < 1e-14


class Adapted(nn.Module):
    """A frozen base in half precision, and trainable weights in fp32 beside it, as LoRA has them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8, dtype=dtype).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x.to(self.base.weight.dtype)).float() + self.up(self.down(x))
        return out


def adapted(stage: int, dtype: torch.dtype) -> None:
    raw, plain = Adapted(dtype), Adapted(dtype)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (raw, plain)]
    model, optimizer, _ = accel.setup(raw, optimizers[0], backend=zero(stage))
    for step in range(3):
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        mine = rows[2 * accel.rank() :][:2]
        for m, o, x in ((model, optimizer, mine), (plain, optimizers[1], rows)):
            o.zero_grad()
            m(x).square().mean().backward()
            (accel.clip_grad_norm_ if m is model else clip)(m, 0.5)
            o.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(accel.full_state_dict(model)[name], value, rtol=0, atol=1e-6)
    accel.teardown()
    assert [p.dtype for p in raw.parameters()] == [p.dtype for p in plain.parameters()]


def clip(model: nn.Module, norm: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), norm)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_frozen_base_in_half_precision(stage: int, dtype: torch.dtype) -> None:
    run(2, adapted, stage, dtype)
