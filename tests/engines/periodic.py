"""A small backend for the tests of the contract: each rank trains alone, and weights are averaged every few steps.

docs/internals.md shows it as the example of a backend.
"""

# --8<-- [start:backend]
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from accel.engines.base.engine import Engine
from accel.engines.base.gradients import Gradients
from accel.engines.base.holdings import Holdings
from accel.engines.base.options import Options
from accel.engines.base.placement import Placement, Placements
from accel.errors import OptimizerError
from accel.process.packing import average_


@dataclass(frozen=True, slots=True, kw_only=True)
class Periodic(Options):
    """Options of ``periodic``.

    Args:
        every: the number of steps between two averages of the weights.
    """

    every: int = 2


class PeriodicGradients(Gradients):
    """Gradients stay on their rank."""

    reduced = True  # the ranks must train the same parameters
    before_any_step = True  # also for optimizers that setup never saw
    engine: PeriodicEngine

    def before_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self.engine.steppers:
            name = type(optimizer).__name__
            raise OptimizerError(f"{name} was not given to accel.setup. Call accel.setup(model, optimizer).")

    def after_step(self, optimizer: Optimizer) -> None:
        self.engine.num_steps += 1
        if self.engine.num_steps % self.engine.options.every == 0:
            self.engine.average()


class PeriodicHoldings(Holdings):
    """Between two averages, weights and optimizer state are this rank's own."""

    engine: PeriodicEngine

    def partial(self, optimizer: Optimizer | None) -> bool:
        return self.engine.distributed

    def prepare(self, *, writing: bool) -> None:
        if not writing:
            self.engine.average()


class PeriodicEngine(Engine):
    """Runs the module as it is."""

    name = "periodic"
    options_type = Periodic
    options: Periodic
    gradients_type = PeriodicGradients
    holdings_type = PeriodicHoldings
    # A full state is gathered. Gathering takes each element from the first rank that has it.
    placements = Placements(weights=Placement.BY_ELEMENT, optimizer_state=Placement.BY_ELEMENT)
    num_steps = 0

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def average(self) -> None:
        """Average the weights. Collective."""
        group = self.process.group
        weights: list[torch.Tensor] = [p.data for p in self.parameters]
        average_(weights, self.process.place.world_size, lambda flat: dist.all_reduce(flat, group=group))

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        if self.distributed and not self.ended:
            self.average()


# --8<-- [end:backend]
# -- mistakes that the contract tests must find ------------------------------------------------------------------------


@final
class NoLastAverage(PeriodicEngine):
    """``teardown`` in the middle of an interval leaves each rank its own weights."""

    def average(self) -> None:
        if self.optimizers:  # `teardown` has detached them before `unwrap`
            super().average()


@final
class NoPlacements(PeriodicEngine):
    """Raw objects show this rank's state as if it were everyone's."""

    placements = Placements()


class TrustingGradients(PeriodicGradients):
    def before_step(self, optimizer: Optimizer) -> None:
        """Let an optimizer that ``setup`` never saw train a model per rank."""


@final
class NoRefusal(PeriodicEngine):
    """An optimizer that ``setup`` never saw trains one model per rank."""

    gradients_type = TrustingGradients


MISTAKES: dict[type[PeriodicEngine], str] = {
    NoLastAverage: "the model after teardown",
    NoPlacements: r"state_dict\(\)",
    NoRefusal: "an optimizer that setup never saw",
}
