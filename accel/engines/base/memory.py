"""Sizes of a model's tensors, and their bytes on each rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on a rank after a step, while the gradients still exist.

    ``optimizer_state`` includes fp32 master weights. ``buckets`` are kept
    for communication.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    buffers: int = 0
    buckets: int = 0

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSize:
    """The full size of a parameter or buffer and its optimizer state."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    is_buffer: bool = False
    trainable: bool = False
    optimizer: int | None = None
    state_bytes: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def use(self, weights: float = 1, gradients: float = 1, state: float = 1) -> MemoryUse:
        """Return the bytes on a rank that holds these fractions."""
        nbytes = self.numel * self.itemsize
        if self.is_buffer:
            return MemoryUse(buffers=nbytes)
        grads = round(nbytes * gradients) if self.trainable else 0
        held, state_bytes = round(nbytes * weights), round(self.state_bytes * state)
        return MemoryUse(parameters=held, gradients=grads, optimizer_state=state_bytes)


def add_uses(uses: Iterable[MemoryUse]) -> MemoryUse:
    """Return the sum of the uses, field by field."""
    sums = map(sum, zip(*map(astuple, uses), strict=True))
    return MemoryUse(**dict(zip(MemoryUse.__slots__, sums, strict=False)))
