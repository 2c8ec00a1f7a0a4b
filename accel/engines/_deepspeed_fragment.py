"""One process's part of one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

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
        grad: the mean gradient of this part, or None as in ``p.grad``.
    """

    index: int
    start: int
    home: torch.Tensor
    weights: torch.Tensor
    grad: torch.Tensor | None = None

    @torch.no_grad()
    def accumulate(self, part: torch.Tensor) -> None:
        """Add a reduced gradient."""
        part = part.to(device=self.weights.device, dtype=self.weights.dtype)
        if self.grad is None:
            self.grad = part.clone()
        else:
            self.grad.add_(part)
