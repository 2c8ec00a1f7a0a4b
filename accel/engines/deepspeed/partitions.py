"""How DeepSpeed shards a model: for each parameter, the fragment that this rank owns.

DeepSpeed keeps the memory and the buckets, and gathers. This file keeps which gradients exist and
what an optimizer updates, by parameter. So a frozen or unused parameter is left alone exactly as in
one process.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.hooks import RemovableHandle

from ...errors import BackendError
from ...gradients.hooks import at_end_of_backward, remove_hooks
from ...gradients.totals import held_by_any, held_here
from ...process.control import Waiting, announce
from ..base.absent import plainly
from ..base.raw_objects import Snapshot
from .library import accelerator, end, initialize

if TYPE_CHECKING:
    from . import DeepSpeedEngine


@final
@dataclass(slots=True, eq=False)
class Fragment:
    """The range of one parameter that this rank owns.

    ``grad`` is its mean gradient, or None as in ``p.grad``. The gradient of a single reduction
    keeps the dtype of that reduction, which loses nothing. A sum has the dtype of ``weights``.
    """

    start: int  # its first element
    home: torch.Tensor  # the range in the model's own memory
    #: What an optimizer updates: ``home``, or a copy of higher precision or on another device.
    weights: torch.Tensor
    grad: torch.Tensor | None = None

    @torch.no_grad()
    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add a reduced gradient. Copies to CPU memory end with ``wait_for_copies``."""
        if self.grad is None:
            self.grad = gradient.to(self.weights.device, copy=True, non_blocking=True)
        else:
            gradient = gradient.to(self.weights.device)  # which waits for the first one
            self.widen()
            self.grad.add_(gradient)

    def widen(self) -> None:
        """Convert the gradient to the dtype of ``weights``, in which it is summed and clipped."""
        if self.grad is not None:
            self.grad = self.grad.to(self.weights.dtype)


def _arrived(partitions: weakref.ref[Partitions], index: int, _: torch.Tensor) -> None:
    if (owner := partitions()) is not None:
        owner.arrived(index)


class Partitions(ABC):
    """The parameters of an engine's model, which DeepSpeed shards."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.module, self.process, self.label = engine.module, engine.process, engine.label
        self.names, self.parameters = engine.names, engine.parameters
        self.shapes = [p.shape for p in self.parameters]
        self.numbers = {id(p): i for i, p in enumerate(self.parameters)}
        #: The parameters that get gradients.
        self.floating = {i: p for i, p in enumerate(self.parameters) if p.is_floating_point()}
        self.fragments: dict[int, Fragment] = {}
        #: The numbers of the parameters of which ranks have fragments, by name.
        indices = range(len(self.names)) if engine.stage == 3 else self.floating
        self.sharded = {self.names[i]: i for i in indices}
        self.masters = engine.configuration.masters
        self._offloads = engine.configuration.offload_optimizer
        #: The optimizer updates copies of the homes: fp32 master weights, or weights in CPU memory.
        self.copies = self.masters or self._offloads
        #: Stages 2 and 3: gradients are reduced while backward runs, and else in ``flush``.
        self.eager = engine.stage > 1
        self._hooks: list[RemovableHandle] = []
        #: Parameters with gradients, in the order of arrival, since the last ``flush``.
        self.arrivals: list[int] = []
        #: Parameters whose gradients a step has used since ``zero_grad``.
        self.used: set[int] = set()
        #: Autograd's numbers of the backwards that run, inside of each other.
        self.running: set[int] = set()
        #: DeepSpeed still has the state of a forward, backward or reduction that raised.
        self.stale = False
        #: An exception ended a backward or a reduction, and its gradients were not dropped.
        self.incomplete = False
        #: A step may have changed fragments that the other ranks don't have yet.
        self.unpublished = False
        self.snapshot = Snapshot(self.module, ("ds_", "applied_pre_backward_ref_cnt"))

    # -- building ---------------------------------------------------------------------------------

    def start(self, config: dict[str, Any], device: torch.device) -> None:
        """Let DeepSpeed shard the model, and find this rank's fragments. Collective."""
        trainable = [p.requires_grad for p in self.parameters]
        try:
            for parameter in self.floating.values():
                parameter.requires_grad_(True)
            # DeepSpeed can't broadcast a tensor without dimensions, such as CLIP's logit_scale.
            scalars = [p for p in self.parameters if p.dim() == 0]
            for parameter in scalars:
                parameter.data = parameter.data.view(1)
            # A frozen base may have another dtype than the adapters of LoRA.
            active = [p for i, p in self.floating.items() if trainable[i]]
            frozen = [p for i, p in self.floating.items() if not trainable[i]]
            groups = [group for group in (active, frozen) if group]
            try:
                self.library = initialize(self.module, groups, config, device)
            finally:
                for parameter in scalars:
                    if parameter.data.numel():
                        parameter.data = parameter.data.view(())
            self.zero = self.library.optimizer
            self.snapshot.changed()
            self.arrange()
            for index, parameter in self.floating.items():
                # Weakly, because the garbage collector doesn't see what autograd's hooks hold.
                hook = functools.partial(_arrived, weakref.ref(self), index)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        finally:
            for index, parameter in self.floating.items():
                parameter.requires_grad_(trainable[index])

    @abstractmethod
    def arrange(self) -> None:
        """Find this rank's fragments in what DeepSpeed built."""

    def own(self, index: int, start: int, home: torch.Tensor) -> None:
        """Note that this rank owns ``home`` of a parameter."""
        dtype = torch.float32 if self.masters and home.is_floating_point() else home.dtype
        device = torch.device("cpu") if self._offloads else home.device
        weights = home.detach().to(device, dtype, copy=self.copies)
        if weights.device != home.device:
            weights = weights.pin_memory()
        self.fragments[index] = Fragment(start, home, weights)

    def announced(
        self, act: Callable[..., Any], what: str | Callable[..., str], announces: bool = True
    ) -> Callable[..., Any]:
        """Return a collective function of DeepSpeed's, which first says what it does."""
        process, label = self.process, self.label

        def call(*args: Any, **kwargs: Any) -> Any:
            text = what if isinstance(what, str) else what(*args, **kwargs)
            text = f"{text} ({label})"
            if announces:
                announce(process, text)
            with Waiting(process, text):
                return act(*args, **kwargs)

        return call

    # -- gradients --------------------------------------------------------------------------------

    @plainly
    def arrived(self, index: int) -> None:
        """Autograd has accumulated a gradient in ``p.grad``."""
        if self.parameters[index].grad is None:  # frozen since the forward
            return
        self.arrivals.append(index)
        if self.eager:
            self.enter_backward()
            self.take(index)

    def enter_backward(self) -> None:
        """Note the backward that runs. Its end reduces the rest.

        Reentrant checkpoints run other backward passes inside of it.
        """
        task = torch._C._current_graph_task_id()
        if task not in self.running:
            self.refuse_incomplete()
            self.running.add(task)
            at_end_of_backward(lambda: self._end_backward(task))

    def _end_backward(self, task: int) -> None:
        self.finish()
        self.running.discard(task)

    @abstractmethod
    def take(self, index: int) -> None:
        """Put ``p.grad`` into a bucket, which is reduced when it is full. Collective."""

    @abstractmethod
    def finish(self) -> None:
        """Reduce the buckets and give every fragment its gradient. Collective."""

    @plainly
    def assigned(self) -> list[int]:
        """Return the parameters whose ``p.grad`` the program has set."""
        from_backward = set() if self.eager else set(self.arrivals)
        grads = [p.grad for p in self.parameters]
        return [i for i, grad in enumerate(grads) if grad is not None and i not in from_backward]

    def replace_assigned(self) -> None:
        """Let gradients that the program has set replace those from backward passes."""
        for index in self.assigned():
            self.used.discard(index)
            if (fragment := self.fragments.get(index)) is not None:
                fragment.grad = None

    @plainly
    def mask(self) -> bytes:
        """Return which parameters have a ``p.grad``, in a few bytes."""
        return zlib.compress(held_here(self.floating.values()), level=1)

    def flush(self, masks: Iterable[bytes]) -> None:
        """Reduce each ``p.grad`` that a rank has, by the masks of all ranks. Collective."""
        self.stale = self.incomplete = True  # until the reduction has ended
        indices = list(self.floating)
        what = f"the gradients of a step ({self.label})"
        given = held_by_any(what, map(zlib.decompress, masks), [self.names[i] for i in indices])
        for number in given:
            self.take(indices[number])
        if given:
            self.finish()
        self.arrivals.clear()
        self.stale = self.incomplete = False

    def drop(self, indices: Sequence[int], set_to_none: bool) -> None:
        """Drop the gradients of these parameters, after ``zero_grad`` of the raw object. Local."""
        self.recover()
        self.incomplete = False
        self.used.difference_update(indices)
        for index in indices:
            fragment = self.fragments.get(index)
            if fragment is not None and set_to_none:
                fragment.grad = None
            elif fragment is not None and fragment.grad is not None:
                fragment.grad.zero_()
        if set_to_none:
            dropped = set(indices)
            self.arrivals[:] = [i for i in self.arrivals if i not in dropped]

    def wait_for_copies(self) -> None:
        """Wait for copies from and to CPU memory, before the CPU reads or writes there."""
        if self._offloads:
            accelerator().synchronize()

    # -- exceptions -------------------------------------------------------------------------------

    def recover(self) -> None:
        """Clear what an exception in a forward or backward has left in DeepSpeed. Local."""
        if torch._C._current_graph_task_id() != -1:  # checkpoints run forwards in a backward
            return
        if self.running:  # their ends did not come
            self.running.clear()
            self.stale = self.incomplete = True
        if self.stale:
            for parameter in self.parameters if self.incomplete else ():
                parameter.grad = None
            self.reset()
            self.stale = False

    @abstractmethod
    def reset(self) -> None:
        """Clear DeepSpeed's state of a forward or backward that did not end. Local."""

    def refuse_incomplete(self) -> None:
        """Raise BackendError if gradients are incomplete."""
        if self.incomplete:
            raise BackendError(
                f"The gradients of {self.label} are incomplete, because a backward or its "
                "reduction raised. Call zero_grad() on every rank."
            )

    # -- weights ----------------------------------------------------------------------------------

    @torch.no_grad()
    def take_edits(self) -> None:
        """Take over values that the program has written to the model's weights. Local."""
        if self.unpublished:  # the model's weights are those from before the step
            return
        self.take_homes()
        for fragment in self.fragments.values() if self.copies else ():
            weights, home = fragment.weights, fragment.home.to(fragment.weights.device)
            unchanged = weights.to(home.dtype) == home  # the copy may have more digits
            weights.copy_(torch.where(unchanged, weights, home.to(weights.dtype)))

    @abstractmethod
    def take_homes(self) -> None:
        """Write the values that the program has given a weight to its fragment's home. Local."""

    @torch.no_grad()
    def publish(self) -> None:
        """Give every rank the weights of a step. Collective."""
        if self.copies and self.fragments:
            homes = [fragment.home for fragment in self.fragments.values()]
            weights = [fragment.weights for fragment in self.fragments.values()]
            torch._foreach_copy_(homes, weights, non_blocking=True)
            self.wait_for_copies()
        self.gather()
        self.unpublished = False

    @abstractmethod
    def gather(self) -> None:
        """Give every rank what is in the homes. Collective."""

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the root module, which is a forward, or a method of it."""
        return function(*args, **kwargs)

    @torch.no_grad()
    def end(self, full: Sequence[torch.Tensor]) -> None:
        """Give the module its own parameters back, with these values."""
        remove_hooks(self._hooks)
        end(self.library)
        self.snapshot.restore()
        for parameter, values in zip(self.parameters, full, strict=True):
            parameter.data = values
        self.fragments.clear()
