"""Compression of gradients on the wire, by torch's own communication hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .footprint import ParameterSize


def comm_hook(name: str | None, group: dist.ProcessGroup | None, rank: int) -> tuple[Any, Any]:
    """The state and the hook of a compression; None is the plain mean. ``rank`` is that of PowerSGD's approximation."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # a tenth of accel's import

    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(group, rank, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    return group, default_hooks.allreduce_hook if name is None else hooks[name]


def kept(state: Any) -> list[torch.Tensor]:
    """The tensors that a compression keeps from step to step: PowerSGD's errors and its low-rank factors."""
    tables = ("error_dict", "p_memory_dict", "q_memory_dict")
    return [tensor for table in tables for tensor in getattr(state, table, {}).values()]


def predict_kept(name: str | None, rank: int, parameters: Iterable[ParameterSize]) -> int:
    """Bytes of ``kept`` for these trainable parameters."""
    if name != "powersgd":
        return 0
    total = 0
    for parameter in parameters:
        total += parameter.nbytes
        rows = parameter.shape[0] if len(parameter.shape) > 1 else 1
        columns = parameter.numel // max(rows, 1)
        factors = (rows + columns) * min(rows, columns, rank)
        # torch compresses a matrix where that halves it at least.
        if rows > 1 and 2 * factors < parameter.numel:
            total += factors * parameter.itemsize
    return total
