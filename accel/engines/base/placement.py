"""How an engine distributes tensors over ranks."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Placement(enum.Enum):
    """How ranks hold weights, gradients or optimizer state."""

    #: Every rank holds all tensors, and before each step they are equal on all ranks.
    REPLICATED = enum.auto()
    #: A rank holds the full tensor of a parameter, or nothing.
    BY_PARAMETER = enum.auto()
    #: A rank holds a range or a box of elements of each tensor.
    BY_ELEMENT = enum.auto()

    @property
    def sharded(self) -> bool:
        """True if a rank may lack elements."""
        return self is not Placement.REPLICATED


@dataclass(frozen=True, slots=True)
class Placements:
    """The placements of an engine, as its backend declares them."""

    #: Weights outside of a forward.
    weights: Placement = Placement.REPLICATED
    #: Final gradients, for a step or clipping.
    gradients: Placement = Placement.REPLICATED
    optimizer_state: Placement = Placement.REPLICATED

    @property
    def partial(self) -> bool:
        """True if a rank may lack some of these tensors."""
        return self != REPLICATED


REPLICATED = Placements()
