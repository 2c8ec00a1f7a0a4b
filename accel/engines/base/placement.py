"""How an engine's tensors lie on the ranks."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Placement(enum.Enum):
    """How the tensors of one kind (weights, gradients, optimizer state) lie on the ranks."""

    #: Every rank holds all tensors, and before each step they are equal on all ranks.
    REPLICATED = enum.auto()
    #: A rank holds all of a parameter's tensor, or nothing of it.
    BY_PARAMETER = enum.auto()
    #: A rank holds a range or a box of each tensor.
    BY_ELEMENT = enum.auto()

    @property
    def sharded(self) -> bool:
        """True if a rank may lack something."""
        return self is not Placement.REPLICATED


@dataclass(frozen=True, slots=True)
class Placements:
    """The placements of an engine, as its backend declares them.

    Attributes:
        weights: of parameters outside of a forward.
        gradients: of final gradients, which a step or clipping uses.
        optimizer_state: of the state of optimizers that the engine can split.
    """

    weights: Placement = Placement.REPLICATED
    gradients: Placement = Placement.REPLICATED
    optimizer_state: Placement = Placement.REPLICATED

    @property
    def partial(self) -> bool:
        """True if a rank may lack some weights, gradients or optimizer state."""
        placements = (self.weights, self.gradients, self.optimizer_state)
        return any(placement.sharded for placement in placements)


REPLICATED = Placements()
