"""Batches on their way to an accelerator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, final

import torch

from ..trees import move


@final
class Transfer:
    """Moves batches to a device; from pinned memory beside what the device computes, and without waiting for either.

    A copy waits for nothing that was launched before it, and what is launched after it waits for the copy: while a step
    computes, its host comes to the next batch, which is there when the step ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """The same containers with their tensors on the device."""
        return move(batch, self._move)

    def _move(self, leaf: Any) -> Any:
        if not _pinned(leaf):
            return leaf.to(self._device)
        # Only of a tensor is it known what memory the copy has.
        if self._stream is None or type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_nested:
            return leaf.to(self._device, non_blocking=True)
        with torch.cuda.stream(self._stream):
            moved = leaf.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        moved.record_stream(computing)  # its memory is not given to another copy before the steps that use it end
        return moved


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all epochs: the memory of batches is the stream's, and another stream would take its own."""
    return torch.cuda.Stream(device)


def _pinned(leaf: Any) -> bool:
    """Whether a copy of it need not wait, as far as it tells: a tokenizer's batch only by what it has."""
    if hasattr(leaf, "is_pinned"):
        return bool(leaf.is_pinned())
    values = leaf.values() if isinstance(leaf, Mapping) else ()
    pinned = any(isinstance(value, torch.Tensor) and value.is_pinned() for value in values)
    return pinned and "non_blocking" in inspect.signature(type(leaf).to).parameters
