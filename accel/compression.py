"""Compression of gradients on the wire, by torch's own communication hooks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def comm_hook(name: str | None, group: dist.ProcessGroup | None, rank: int) -> tuple[Any, Any]:
    """The state and the hook of a compression; None is the plain mean. ``rank`` is that of PowerSGD's approximation."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # a tenth of accel's import

    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(group, rank, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    return group, default_hooks.allreduce_hook if name is None else hooks[name]
