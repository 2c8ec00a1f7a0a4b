"""One process's part of one parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch


@final
@dataclass(slots=True, eq=False)
class Fragment:
    """The part of one parameter that this rank owns.

    Args:
        index: of the parameter.
        start: its first element.
        home: the part in the model's own memory.
        weights: what an optimizer steps: ``home`` itself, or a copy of higher precision or on another device.
        grad: the mean gradient of this part, or None as in ``p.grad``. One that came from a single reduction is of the
            dtype that it came in, which loses nothing; a sum is of the dtype of ``weights``.
    """

    index: int
    start: int
    home: torch.Tensor
    weights: torch.Tensor
    grad: torch.Tensor | None = None

    @torch.no_grad()
    def accumulate(self, part: torch.Tensor) -> None:
        """Add a reduced gradient."""
        if self.grad is None:
            self.grad = part.to(self.weights.device, copy=True)
        else:
            self.widen()
            self.grad.add_(part.to(self.weights.device))

    def widen(self) -> None:
        """Keep the gradient in the dtype of ``weights``, so that it can be computed with."""
        if self.grad is not None:
            self.grad = self.grad.to(self.weights.dtype)


def arrival_hook(partitions: weakref.ref[Any], index: int) -> Callable[[torch.Tensor], None]:
    """Tells ``partitions`` that a parameter's gradient has arrived."""

    # Weakly: autograd keeps the hook where no garbage collector looks.
    def arrived(_: torch.Tensor) -> None:
        if (owner := partitions()) is not None:
            owner.arrived(index)

    return arrived
