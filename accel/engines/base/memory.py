"""Sizes of a model's tensors, and how many of their bytes one rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on one rank after an optimizer step, while the gradients still exist.

    Args:
        parameters: all parameters, frozen ones included.
        gradients: gradients of the trainable parameters.
        optimizer_state: the optimizers' state, with fp32 master weights if there are any.
        buffers: the module's buffers, such as BatchNorm's statistics.
        buckets: communication buffers that the backend keeps between steps.
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
    """The full size of a parameter or buffer, of its gradient, and of its optimizer state.

    Args:
        optimizer: the index of the first optimizer that holds the parameter, if one does.
    """

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
        """Return the bytes on a rank that holds these fractions. Buffers are never sharded."""
        nbytes = self.numel * self.itemsize
        if self.is_buffer:
            return MemoryUse(buffers=nbytes)
        return MemoryUse(
            parameters=round(nbytes * weights),
            gradients=round(nbytes * gradients) if self.trainable else 0,
            optimizer_state=round(self.state_bytes * state),
        )


def add_uses(uses: Iterable[MemoryUse]) -> MemoryUse:
    """Return the sum of the uses, field by field."""
    columns = zip(*map(astuple, uses), strict=True)
    return MemoryUse(**dict(zip(MemoryUse.__slots__, map(sum, columns), strict=False)))
