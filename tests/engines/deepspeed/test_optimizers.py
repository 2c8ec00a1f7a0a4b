"""DeepSpeed's own optimizers, given to ``accel.setup`` by the user."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import accel
from accel.engines.deepspeed.library import library
from tests.distributed import run
from tests.engines.deepspeed.training import Pair, zero


class CompiledOp:
    """DeepSpeed's op in Python: compiling the real one takes minutes."""

    def create_adam(self, *_: Any) -> None:
        pass

    def destroy_adam(self, number: int) -> None:
        pass

    def adam_update(
        self,
        number: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        bias_correction: bool,
        weights: torch.Tensor,
        grad: torch.Tensor,
        mean: torch.Tensor,
        square: torch.Tensor,
    ) -> None:
        assert all(tensor.device.type == "cpu" for tensor in (weights, grad, mean, square))
        mean.lerp_(grad, 1 - beta1)
        square.lerp_(grad.square(), 1 - beta2)
        weights.mul_(1 - lr * decay)
        weights.sub_(lr * (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + eps))


def cpu_adam(model: nn.Module) -> torch.optim.Optimizer:
    kind: Any = library("deepspeed.ops.adam").DeepSpeedCPUAdam
    made: torch.optim.Optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1)
    return made


def trained_by_cpu_adam(stage: int) -> None:
    """Unused parameters are left alone, and the state is the one of a single process."""
    builder = library("deepspeed.ops.adam.cpu_adam").CPUAdamBuilder
    with (
        mock.patch.object(builder, "load", return_value=CompiledOp()),
        mock.patch.object(library("cpuinfo"), "get_cpu_info", dict),
    ):
        for offload in (False, True):
            pair = Pair(zero(stage, offload_optimizer=offload), cpu_adam)
            pair.train()
            pair.train(range(3, 6), forward=lambda m, x: m(x, right=False))
            pair.check()
            accel.teardown()


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_cpu_adam_trains(stage: int) -> None:
    run(2, trained_by_cpu_adam, stage)


def fused_adam() -> None:
    raw = nn.Linear(4, 2)
    kind = type("FusedAdam", (torch.optim.Optimizer,), {"__module__": "deepspeed.ops.adam.fused_adam"})
    with pytest.raises(accel.OptimizerError, match=r"FusedAdam can't step flat shards.*AdamW\(fused=True\)"):
        accel.setup(raw, kind(raw.parameters(), {}), backend=zero(2))
    assert "zero_grad" not in vars(raw)


def test_deepspeeds_fused_adam_is_refused() -> None:
    run(2, fused_adam)


def trained_by_fused_adamw(stage: int) -> None:
    pair = Pair(zero(stage), lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1, fused=True))
    pair.train()
    pair.train(range(3, 6), forward=lambda m, x: m(x, right=False))
    pair.check()


@pytest.mark.parametrize("stage", [1, 3])
def test_torchs_fused_adamw_trains(stage: int) -> None:
    run(2, trained_by_fused_adamw, stage)
