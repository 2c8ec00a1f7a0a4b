"""Engines that leave gradients alone until they are needed, and then average all of them together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ..gradients.totals import average_gradients_
from .base.engine import Engine
from .base.gradients import Gradients
from .base.options import LayerOptions


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
    """Averages gradients in flat pieces at the step, in clipping and in ``teardown``.

    So every way to accumulate them is right. A rank without a gradient that a different rank has
    counts as zero.
    """

    reduced = deferred = True
    engine: AveragingEngine

    #: True if gradients are known to be equal on all ranks.
    final = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        #: The optimizers that have stepped since a backward.
        self.stepped: set[int] = set()
        self._num_steps = 0

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        self.final = False
        self.stepped.clear()
        super().backward_ends(completed, outermost)

    def pending(self) -> bool:
        if not self.engine.distributed or self.final:
            return False
        return any(p.grad is not None for p in self.engine.parameters)

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Average all gradients on every rank: a rank without any must take part for the others."""
        engine = self.engine
        if not engine.distributed:
            return
        if optimizer is not None:
            self._num_steps += 1
            # Before a second step without a backward, a loop may have assigned gradients.
            self.final = self.final and id(optimizer) not in self.stepped
            self.stepped.add(id(optimizer))
        if self.final:
            return
        what = f"the reduction of gradients ({engine.label}, step {self._num_steps})"
        averaged = average_gradients_(
            what, engine.parameters, engine.names, self.process, engine.add
        )
        self.final = True
        if averaged:
            self.buffers.synchronize()


class AveragingEngine(Engine):
    """Runs the module as it is."""

    options: Any
    gradients_type = AveragedGradients
    gradients: AveragedGradients
    #: Sums a tensor over the ranks in place, if not by the process group. Collective.
    add: Any = None

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.gradients.stepped and torch.is_grad_enabled():
            self.gradients.final = False  # a loop may assign gradients from torch.autograd.grad
        return function(*args, **kwargs)
