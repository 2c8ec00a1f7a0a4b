"""A model sharded by DeepSpeed: a fragment of each parameter.

DeepSpeed manages memory and buckets, and gathers. This file tracks for each
parameter if it has a gradient, so a step skips frozen and unused parameters.
"""

from __future__ import annotations

import functools
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...gradients.hooks import at_end_of_backward, remove_hooks, runs_backward
from ...gradients.totals import held_by_any, held_here
from ...process.control import Waiting, announce, require_equal
from ...process.packing import row_of
from ..base.absent import as_plain, plainly
from ..base.interruption import Interruption
from ..base.raw_objects import Function, Snapshot
from .library import accelerator, end, initialize

if TYPE_CHECKING:
    from . import DeepSpeedEngine

logger = logging.getLogger("accel")

BUCKET: Final = "the reduction of a bucket"


@final
@dataclass(slots=True, eq=False)
class Fragment:
    """A range of a parameter, with the mean gradient ``weights.grad``."""

    start: int  # its first element
    home: Tensor  # the range in the model's own memory
    #: The tensor that the optimizer updates: ``home``, or a copy in fp32 or in CPU memory.
    weights: Tensor

    def range_of(self, full: Tensor) -> Tensor:
        """Return the range of a tensor of the parameter's shape."""
        return full.reshape(-1).narrow(0, self.start, self.home.numel())

    @torch.no_grad()
    def accumulate(self, gradient: Tensor) -> None:
        """Add a reduced gradient. ``wait_for_copies`` waits for its copy."""
        weights, grad = self.weights, self.weights.grad
        if grad is None:
            weights.grad = gradient.to(weights, copy=True, non_blocking=True)
        else:
            grad.add_(gradient.to(weights))  # which waits for the first copy


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors. Copies from CPU memory may still run."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _other_order(_: object) -> str:
    return "different parameters, or in a different order"


def _arrived(partitions: weakref.ref[Partitions], index: int, _: Tensor) -> None:
    owner = partitions()
    if owner is not None:
        owner.arrived(index)


class Partitions(ABC):
    """The parameters of an engine's model, which DeepSpeed shards."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.module, self.process = engine.module, engine.process
        self.label, self.names = engine.label, engine.names
        self.parameters: list[Any] = engine.parameters
        self.shapes = [p.shape for p in self.parameters]
        self.numbers = {id(p): i for i, p in enumerate(self.parameters)}
        #: The floating-point parameters, by index. Only these can get gradients.
        self.floating = {i: p for i, p in enumerate(self.parameters) if p.is_floating_point()}
        self.fragments: dict[int, Fragment] = {}
        self.masters = engine.configuration.masters
        self._offloads = engine.configuration.offload_optimizer
        #: True if the optimizer updates copies of the homes, in fp32 or in CPU memory.
        self.copies = self.masters or self._offloads
        #: True if gradients are reduced during backward, not in ``flush`` as at stage 1.
        self.eager = engine.stage > 1
        self._hooks: list[RemovableHandle] = []
        #: Parameters that got gradients since the last ``flush``, in order of arrival.
        self.arrivals: list[int] = []
        #: Parameters with gradients that a step has used since ``zero_grad``.
        self.used: set[int] = set()
        self._warned = False
        #: Autograd's numbers for the running backwards, which may be nested.
        self.running: set[int] = set()
        #: True if DeepSpeed still has the state of a forward or backward that raised.
        self.stale = False
        self.interruption = Interruption()
        self.snapshot = Snapshot(self.module, ("ds_", "applied_pre_backward_ref_cnt"))

    def start(self, config: dict[str, Any]) -> None:
        """Let DeepSpeed shard the model. Collective."""
        # LoRA's frozen base may have a different dtype than its adapters, so it gets its own group.
        groups: dict[bool, list[Any]] = {True: [], False: []}
        for p in self.floating.values():
            groups[p.requires_grad].append(p)
        trainable = [p.requires_grad for p in self.parameters]
        try:
            for p, shape in zip(self.parameters, self.shapes, strict=True):
                # DeepSpeed can't communicate weights with other memory formats, such as
                # channels_last, or without dimensions, such as CLIP's logit_scale.
                in_order = p.is_contiguous() and shape
                if not in_order or p.stride(-1) != 1:
                    row = row_of(p.data.contiguous())
                    p.data = row.view(shape or (1,))
                p.requires_grad_(p.is_floating_point())
            device = self.process.device
            self.library = initialize(self.module, list(groups.values()), config, device)
            self.zero = self.library.optimizer
            self.arrange()
            for index, p in self.floating.items():
                # A weak reference, because the garbage collector doesn't see autograd's hooks.
                hook = functools.partial(_arrived, weakref.ref(self), index)
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))
        finally:
            with as_plain():
                for index, p in enumerate(self.parameters):
                    p.requires_grad_(trainable[index])
                    if not self.shapes[index] and p.numel():
                        p.data = p.data.view(())

    @abstractmethod
    def arrange(self) -> None:
        """Find this rank's fragments in DeepSpeed's memory."""

    def own(self, index: int, start: int, home: Tensor) -> None:
        """Add the fragment of a parameter. ``home`` is its memory."""
        floats = self.masters and home.is_floating_point()
        dtype = torch.float32 if floats else home.dtype
        device = torch.device("cpu") if self._offloads else home.device
        weights = home.detach().to(device, dtype, copy=self.copies)
        if weights.device != home.device:
            weights = weights.pin_memory()
        self.fragments[index] = Fragment(start, home, weights)

    def fragment_of(self, parameter: Tensor) -> Fragment | None:
        """Return this rank's fragment of a parameter."""
        return self.fragments.get(self.numbers[id(parameter)])

    def announced(self, act: Function, what: str | Callable[..., str]) -> Function:
        """Return a DeepSpeed collective that announces itself first."""
        process, label = self.process, self.label

        def call(*args: Any, **kwargs: Any) -> Any:
            text = what if isinstance(what, str) else what(*args, **kwargs)
            text = f"{text} ({label})"
            announce(process, text)
            with Waiting(process, text):
                return act(*args, **kwargs)

        return call

    @plainly
    def arrived(self, index: int) -> None:
        """Handle a new gradient that autograd put in ``p.grad``."""
        # None if the loop froze the parameter after the forward.
        if self.parameters[index].grad is None:
            return
        self.arrivals.append(index)
        if self.eager:
            self.enter_backward()
            self.take(index)

    def enter_backward(self) -> None:
        """Register the running backward. Its end reduces the rest."""
        # Reentrant checkpoints run nested backwards, so there may be several.
        task = torch._C._current_graph_task_id()
        if task not in self.running:
            self.interruption.refuse()
            self.running.add(task)

            def end_backward() -> None:
                self.finish()
                self.running.discard(task)

            at_end_of_backward(end_backward)

    @abstractmethod
    def take(self, index: int) -> None:
        """Put ``p.grad`` into a bucket. Reduce it when full. Collective."""

    @abstractmethod
    def finish(self) -> None:
        """Reduce buckets into gradients of fragments. Collective."""

    @plainly
    def assigned(self) -> list[int]:
        """Return the parameters with a ``p.grad`` set by the program."""
        from_backward = set() if self.eager else set(self.arrivals)
        grads = enumerate([p.grad for p in self.parameters])
        return [i for i, grad in grads if grad is not None and i not in from_backward]

    def flush(self) -> None:
        """Reduce ``p.grad`` of stage 1 or the program. Collective."""
        what = f"the gradients of a step ({self.label})"
        assigned = self.assigned()
        arrivals = self.arrivals if self.eager else []
        held = plainly(held_here)(self.floating.values())
        # Numbers only: hash(None) is an address, which differs between processes.
        order = hash((*arrivals, -1, *assigned))
        masks = require_equal(what, order, _other_order, held)
        for index in assigned:
            if index in self.fragments:
                self.fragments[index].weights.grad = None
        # The loop may drop gradients by p.grad = None, which doesn't reach the fragments.
        if not self._warned and not self.used.isdisjoint(self.arrivals):
            self._warned = True
            logger.warning(
                "backend='deepspeed' adds new gradients to old ones, because "
                "p.grad = None doesn't drop them. Call optimizer.zero_grad() or "
                "model.zero_grad()."
            )
        indices = list(self.floating)
        given = held_by_any(what, masks, list(map(self.names.__getitem__, indices)))
        for number in given:
            self.take(indices[number])
        if given:
            self.finish()
        self.arrivals.clear()

    def drop(self, indices: Sequence[int], set_to_none: bool) -> None:
        """Drop gradients after ``zero_grad``. Local."""
        self.recover()
        self.interruption.incomplete = False
        self.used.difference_update(indices)
        for index in self.fragments.keys() & indices:
            weights = self.fragments[index].weights
            if set_to_none:
                weights.grad = None
            elif weights.grad is not None:
                weights.grad.zero_()
        if set_to_none:
            dropped = set(indices)
            self.arrivals[:] = [i for i in self.arrivals if i not in dropped]

    def wait_for_copies(self) -> None:
        """Wait for copies from and to CPU memory."""
        if self._offloads:
            accelerator().synchronize()

    def recover(self) -> None:
        """Clear DeepSpeed's state after an exception. Local."""
        if runs_backward():  # checkpoints run forwards in a backward
            return
        if self.running:  # an exception skipped their ends
            self.running.clear()
            self.stale = self.interruption.incomplete = True
        if not self.stale:
            return
        if self.interruption.incomplete:
            for p in self.parameters:
                p.grad = None
        self.reset()
        self.stale = False

    @abstractmethod
    def reset(self) -> None:
        """Clear DeepSpeed's state of an interrupted pass. Local."""

    @torch.no_grad()
    def take_edits(self) -> None:
        """Copy the program's writes to weights into fragments. Local."""
        self.take_homes()
        if not self.copies:
            return
        for fragment in self.fragments.values():
            weights = fragment.weights
            home = fragment.home.to(weights.device)
            # Keep the copy of an unchanged weight, because it may be more precise.
            unchanged = weights.to(home.dtype) == home
            weights.copy_(torch.where(unchanged, weights, home.to(weights.dtype)))

    @abstractmethod
    def take_homes(self) -> None:
        """Write the program's weights to the fragments' homes. Local."""

    @torch.no_grad()
    def publish(self) -> None:
        """Give every rank the updated weights. Collective."""
        if self.copies:
            fragments = self.fragments.values()
            copy_all([f.home for f in fragments], [f.weights for f in fragments])
            self.wait_for_copies()
        self.gather()

    @abstractmethod
    def gather(self) -> None:
        """Give every rank the values of all homes. Collective."""

    @torch.no_grad()
    def end(self, full: Sequence[Tensor]) -> None:
        """Give parameters their own memory back, with these values."""
        remove_hooks(self._hooks)
        end(self.library)
        self.snapshot.restore()
        for p, values in zip(self.parameters, full, strict=True):
            p.data = values
        self.fragments.clear()
