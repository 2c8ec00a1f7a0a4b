"""Optimizers that can step shards, and others."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import accel
from accel.engines.deepspeed.library import library
from tests.distributed import run
from tests.engines.deepspeed.training import STAGES, Pair, zero


class CompiledOp:
    """DeepSpeed's op in Python: compiling the real one takes minutes."""

    def create_adam(self, *_: Any) -> None:
        pass

    def destroy_adam(self, number: int) -> None:
        pass

    def adam_update(self, number: int, step: int, *values: Any) -> None:
        lr, beta1, beta2, eps, decay, _, *tensors = values
        weights, grad, mean, square = tensors
        assert all(tensor.device.type == "cpu" for tensor in tensors)
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


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {}),
]


def trained(stage: int) -> None:
    for kind, options in OPTIMIZERS:
        pair = Pair(zero(stage), lambda m, kind=kind, options=options: kind(m.parameters(), lr=0.01, **options))
        pair.train()
        pair.train(range(3, 6), forward=lambda m, x: m(x, right=False))
        pair.check()


@pytest.mark.parametrize("stage", STAGES)
def test_elementwise_optimizers_train(stage: int) -> None:
    run(2, trained, stage)
