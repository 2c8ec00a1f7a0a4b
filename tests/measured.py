"""Bytes of the tensors that exist on this rank, and of its process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.engines.base.memory import MemoryUse
from accel.registry import registry


def status(key: str) -> int:
    """Return bytes of this process, as the kernel counts them: ``VmRSS``, ``VmHWM`` or ``RssAnon``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def restart_peak() -> int:
    """Let ``VmHWM`` count from now on, and return the resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def measured(model: nn.Module) -> MemoryUse:
    """Return the bytes of distinct storages. The buckets of DDP, which are in C++, aren't seen."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for field, tensor in _tensors(registry.find_engine(model)):
        with torch._C.DisableTorchFunctionSubclass():  # ZeRO 3 refuses reads of sharded weights
            value: Any = tensor.detach()
            local = value.to_local() if hasattr(value, "to_local") else value
            storage = local.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[field] = sizes.get(field, 0) + storage.nbytes()
    return MemoryUse(**sizes)


def _tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    zero = getattr(engine, "zero", None)
    fragments = [] if zero is None else list(zero.fragments.values())
    buckets = getattr(zero.zero, "ipg_buckets", {}) if zero is not None and engine.stage == 3 else {}
    yield from (("parameters", fragment.home) for fragment in fragments if fragment.home is not None)
    yield from (("parameters", parameter) for parameter in engine.parameters)
    yield from (("buffers", buffer) for buffer in engine.module.buffers())
    holders = [*engine.parameters, *(fragment.weights for fragment in fragments)]
    yield from (("gradients", holder.grad) for holder in holders if holder.grad is not None)
    for optimizer in engine.optimizers:
        for state in optimizer.state.values():
            values = [value for value in state.values() if isinstance(value, torch.Tensor)]
            yield from (("optimizer_state", value) for value in values)
    yield from (("optimizer_state", fragment.weights) for fragment in fragments)
    yield from (("buckets", b.buffer) for b in buckets.values() if b.buffer is not None)
