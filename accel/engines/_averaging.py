"""Gradients averaged by accel, for backends without a reducer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _current_graph_task_id
from torch.optim import Optimizer

from ..gradients.totals import average_gradients_
from .base.engine import Engine
from .base.gradients import Gradients, refuse_inside_backward
from .base.options import LayerOptions
from .base.raw_objects import Args, Function, Kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions(LayerOptions):
    """Options of ``horovod`` and ``xla``."""

    broadcast_buffers: bool = True
    auto_refresh: bool = True


class AveragedGradients(Gradients):
    """Gradients averaged in a step, in clipping and in ``teardown``.

    Until then they are local, so a loop may accumulate them in any way. A
    missing gradient counts as zero. Averaging again is harmless, because
    equal gradients stay equal.
    """

    reduced = deferred = True
    engine: Any

    #: True if gradients are known to be equal on all ranks.
    final = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        #: The ``id`` of each optimizer that has stepped since the last backward.
        self.stepped: set[int] = set()

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        self.final = False
        self.stepped.clear()
        super().backward_ends(completed, outermost)

    def pending(self) -> bool:
        waiting = self.engine.distributed and not self.final
        return waiting and any(p.grad is not None for p in self.engine.parameters)

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Average all gradients, unless they are ``final``. Collective."""
        if not self.engine.distributed:
            return
        is_first = False
        if optimizer is not None:
            # `runs_backward` is inlined, because this runs in every step.
            if _current_graph_task_id() != -1:
                refuse_inside_backward()
            key, stepped = id(optimizer), self.stepped
            if key in stepped:
                # No backward ran since its last step, so the loop may have assigned gradients.
                self.final = False
            is_first = not stepped
            stepped.add(key)
        averaged = not self.final and self.average()
        # `averaged` is equal on all ranks. A rank alone can't know if others have gradients.
        if self.buffers.wanted and (averaged if self.deferred else is_first):
            self.buffers.synchronize()

    def average(self) -> bool:
        """Average gradients. Return True if any rank has one. Collective."""
        engine = self.engine
        what = f"the reduction of gradients ({engine.label})"
        parameters, names = engine.parameters, engine.names
        averaged = average_gradients_(what, parameters, names, self.process, engine.add)
        self.final = True
        return averaged


class AveragingEngine(Engine):
    """Runs the module as it is, and averages gradients before a step."""

    options: Any
    gradients_type = AveragedGradients
    gradients: AveragedGradients
    #: Sums a tensor over ranks in place. None: the process group does it. Collective.
    add: Any = None

    def run(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        if self.gradients.stepped and torch.is_grad_enabled():
            # The loop may assign gradients from torch.autograd.grad, which runs no hooks.
            self.gradients.final = False
        return function(*args, **kwargs)
