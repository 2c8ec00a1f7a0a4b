"""Engines that leave gradients alone until they are needed, and then average all of them together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import BackendError
from ..process.control import agree
from ..process.packing import average_, broadcast_
from .engine import Context, Engine, Options
from .memory import Footprint, MemoryUse, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredOptions(Options):
    """Options of every such engine.

    Args:
        broadcast_buffers: all ranks take rank 0's buffers once a step.
        auto_refresh: look for a change of ``requires_grad`` before each forward.
    """

    broadcast_buffers: bool = True
    auto_refresh: bool = True


class DeferredEngine(Engine, ABC):
    """Gradients are each rank's own until the step, clipping or ``teardown``, which average them in flat pieces.

    So every way to accumulate them is right, and a rank that has no gradient where another has one counts as zero.
    """

    reduces = True
    defers = True
    options: Any

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        #: All existing gradients are known to be equal on all ranks.
        self._settled = False
        self._stepped: set[int] = set()
        self._stepping: int | None = None
        self._num_steps = 0

    @abstractmethod
    def add(self, flat: torch.Tensor) -> None:
        """Sum over the ranks, in place. Collective."""

    @classmethod
    def predict(cls, footprint: Footprint, options: Any, world_size: int) -> tuple[MemoryUse, ...]:
        """Everything on every rank."""
        return whole(footprint, world_size)

    def wrap(self) -> None:
        """Nothing to build."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if torch.is_grad_enabled():
            self._settled = False
        return self.entry(*args, **kwargs)

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        """Nothing to undo."""

    def unsettled(self) -> bool:
        """Whether gradients exist that may be this rank's own."""
        if not self.distributed or (self._settled and not self.log.entries):
            return False
        return any(p.grad is not None for p in self.parameters)

    def before_step(self, optimizer: Optimizer) -> None:
        """Count the steps, by which the ranks know each other; notice gradients that were assigned by hand."""
        self._num_steps += 1
        if id(optimizer) in self._stepped and not self.log.entries:
            self._settled = False
        self._stepped.add(id(optimizer))
        self._stepping = id(optimizer)

    def settle(self) -> None:
        """Average all gradients, on every rank: one without any must take part for the others."""
        if not self.distributed:
            super().settle()
            return
        stepping, self._stepping = self._stepping, None
        if self._settled and not self.log.entries:
            return
        came = self._average(range(len(self.parameters)))
        if self.log.entries:
            self._stepped.intersection_update({stepping})
        self.log.fold(pending=False)
        self._settled = True
        if came and self.options.broadcast_buffers:
            # Found anew each time: a forward may put another tensor in a buffer's place.
            broadcast_([b.data for b in self.module.buffers()], self.process.group)

    def settle_unoptimized(self, indices: Sequence[int]) -> None:
        """Average them; those that an optimizer steps wait for the step."""
        if self.steppers:
            self._average(indices)
        else:
            self.settle()

    def _average(self, indices: Sequence[int]) -> bool:
        """Average what any rank has of these parameters; whether there was anything."""
        parameters = [self.parameters[i] for i in indices]
        mine = "".join("0" if p.grad is None else "2" if p.grad.is_sparse else "1" for p in parameters)
        # The others may come late: their last forward may have taken any time.
        what = f"the reduction of {len(mine)} gradients ({self.label}, step {self._num_steps})"
        everyone = [format(code, "x").zfill(len(mine)) for code in agree(what, int(mine, 16))]
        needed = [max(codes) for codes in zip(*everyone, strict=True)]
        if "2" in needed:
            sparse = [self.names[i] for i, code in zip(indices, needed, strict=True) if code == "2"]
            raise BackendError(
                f"backend {self.name!r} cannot reduce the sparse gradients of {', '.join(sparse[:5])}: "
                "use nn.Embedding(sparse=False), or another backend"
            )
        gradients = []
        for parameter, code in zip(parameters, needed, strict=True):
            if code == "1":
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        average_(gradients, self.process.place.world_size, self.add)
        return bool(gradients)
