"""Engines that leave gradients alone until they are needed, and then average all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ..gradients.totals import average_gradients_
from .base.engine import Engine, LayerOptions
from .base.gradients import Gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions(LayerOptions):
    """Options of every such engine.

    Args:
        broadcast_buffers: all ranks take rank 0's buffers once a step.
        auto_refresh: look for a change of ``requires_grad`` before each forward.
    """

    broadcast_buffers: bool = True
    auto_refresh: bool = True


class AveragedGradients(Gradients):
    """Gradients are each rank's own until the step, clipping or ``teardown``, which average them in flat pieces.

    So every way to accumulate them is right, and a rank that has no gradient where another has one counts as zero.
    """

    reduced = logged = deferred = True

    #: All existing gradients are known to be equal on all ranks.
    settled = False
    _num_steps = 0

    def pending(self) -> bool:
        engine = self.engine
        if not engine.distributed or (self.settled and not self.log.entries):
            return False
        return any(p.grad is not None for p in engine.parameters)

    def before_step(self, optimizer: Optimizer) -> None:
        """Count the steps, by which the ranks know each other."""
        self._num_steps += 1

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Average all gradients, on every rank: one without any must take part for the others."""
        if not self.engine.distributed:
            super().settle()
            return
        assigned = optimizer is not None and self.log.repeats(optimizer)
        final = self.settled and not self.log.entries and not assigned
        averaged = not final and self._average(range(len(self.engine.parameters)))
        self.log.fold(stepping=optimizer)
        self.settled = True
        if averaged:
            self.buffers.synchronize()

    def end_backward(self, indices: Sequence[int]) -> None:
        """Average them; those that an optimizer steps wait for the step."""
        if self.engine.steppers:
            self._average(indices)
        else:
            self.settle()

    def _average(self, indices: Sequence[int]) -> bool:
        """Average what any rank has of these parameters; whether there was anything."""
        engine = self.engine
        parameters, names = [engine.parameters[i] for i in indices], [engine.names[i] for i in indices]
        # The others may come late: their last forward may have taken any time.
        what = f"the reduction of {len(parameters)} gradients ({engine.label}, step {self._num_steps})"
        return average_gradients_(what, parameters, names, self.process, getattr(engine, "add", None))


class AveragingEngine(Engine):
    """The module runs as it is."""

    options: Any
    gradients_type = AveragedGradients
    gradients: AveragedGradients
    #: Sums over the ranks, in place, where a backend has another way than the process group. Collective.
    add: Any = None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is self.entry and torch.is_grad_enabled():
            self.gradients.settled = False
        return function(*args, **kwargs)
