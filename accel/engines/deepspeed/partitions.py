"""How DeepSpeed shards a model: for each parameter, the fragment that this rank owns.

DeepSpeed keeps the memory and the buckets, and gathers. This file keeps which gradients exist and
what an optimizer updates, by parameter. So a frozen or unused parameter is left alone exactly as in
one process.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...errors import BackendError
from ...gradients.hooks import at_end_of_backward, remove_hooks
from ...gradients.totals import held_by_any, held_here
from ...process.control import Waiting, announce
from ..base.absent import plainly
from ..base.interruption import Interruption
from ..base.raw_objects import Snapshot
from .library import accelerator, end, initialise

if TYPE_CHECKING:
    from . import DeepSpeedEngine


@final
@dataclass(slots=True, eq=False)
class Fragment:
    """The range of one parameter that this rank owns.

    ``grad`` is its mean gradient, or None as in ``p.grad``. The gradient of a single reduction keeps
    the dtype of that reduction, which loses nothing. A sum has the dtype of ``weights``.
    """

    start: int  # its first element
    home: torch.Tensor  # the range in the model's own memory
    #: What an optimizer updates: ``home``, or a copy of higher precision or on another device.
    weights: torch.Tensor
    grad: torch.Tensor | None = None
    #: ``weights`` is pinned CPU memory, to which a device copies while the CPU goes on.
    pinned: bool = False

    @torch.no_grad()
    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add a reduced gradient. If ``pinned``, the first one arrives by ``wait_for_copies``."""
        if self.grad is None:
            self.grad = gradient.to(self.weights.device, copy=True, non_blocking=self.pinned)
        else:
            gradient = gradient.to(self.weights.device)  # which waits for the first one
            self.widen()
            self.grad.add_(gradient)

    def widen(self) -> None:
        """Convert the gradient to the dtype of ``weights``, in which it is summed and clipped."""
        if self.grad is not None:
            self.grad = self.grad.to(self.weights.dtype)


@final
class PlacedFragments:
    """This rank's fragments in the groups of the optimizer that steps."""

    def __init__(self) -> None:
        self._groups: list[tuple[dict[str, Any], list[nn.Parameter], list[torch.Tensor]]] = []

    def place(self, optimizer: Optimizer, partitions: Partitions) -> None:
        """Put fragments in the places of the parameters, until ``remove``."""
        for group in optimizer.param_groups if not self._groups else ():
            parameters = group["params"]
            fragments = [partitions.fragments.get(partitions.numbers[id(p)]) for p in parameters]
            group["params"] = [fragment.weights for fragment in fragments if fragment is not None]
            self._groups.append((group, parameters, group["params"]))

    def remove(self) -> None:
        for group, parameters, _ in self._groups:
            group["params"] = parameters
        self._groups.clear()

    def parameters(self, group: dict[str, Any]) -> list[nn.Parameter]:
        """Return the parameters of a group, in a step too."""
        placed = [parameters for known, parameters, _ in self._groups if known is group]
        return placed[0] if placed else group["params"]

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, the groups have their parameters in a step too. A closure calls ``zero_grad``."""
        for group, parameters, _ in self._groups:
            group["params"] = parameters
        try:
            yield
        finally:
            for group, _, fragments in self._groups:
                group["params"] = fragments


#: Methods that ``deepspeed.utils.safe_set_*`` calls. They would write to memory that nobody uses.
_ACCESS: Final = re.compile("[gs]et_(full|local|fp32)_")


def _refuse_access(*_: Any, **__: Any) -> NoReturn:
    raise BackendError(
        "deepspeed.utils.safe_get_* and safe_set_* would use memory that no optimizer steps here. Use "
        "accel.full_state_dict(), load_state_dict() of the handles, and accel.clip_grad_norm_()."
    )


def _arrived(partitions: weakref.ref[Partitions], index: int, _: torch.Tensor) -> None:
    if (owner := partitions()) is not None:
        owner.arrived(index)


class Partitions(ABC):
    """The parameters of an engine's model, which DeepSpeed shards."""

    #: Weights are sharded too.
    divides_weights: ClassVar[bool] = False

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.module, self.process, self.label = engine.module, engine.process, engine.label
        self.names, self.parameters = engine.names, engine.parameters
        #: Gradients are reduced while backward runs, and else in ``flush``.
        self.eager = engine.stage > 1
        self.shapes = [p.shape for p in self.parameters]
        self.fragments: dict[int, Fragment] = {}
        self.divided = {i: p for i, p in enumerate(self.parameters) if p.is_floating_point()}
        self.numbers = {id(p): i for i, p in enumerate(self.parameters)}
        #: The numbers of the parameters of which ranks have fragments.
        sharded = range(len(self.names)) if self.divides_weights else self.divided
        self.by_name = {self.names[i]: i for i in sharded}
        self.masters = engine.configuration.masters
        offloads = engine.configuration.offload_optimizer
        self._weights_on = torch.device("cpu") if offloads else None
        #: The optimizer updates copies of the homes: fp32 master weights, or weights in CPU memory.
        self.apart = self.masters or offloads
        self._pinned = engine.configuration.pins and engine.process.device.type != "cpu"
        self._hooks: list[RemovableHandle] = []
        #: Parameters with gradients, in the order of arrival, since the last ``flush``.
        self.arrivals: list[int] = []
        #: Parameters with gradients since this backward began, or since one inside of it ended.
        self._came: set[int] = set()
        self.interruption = Interruption()
        #: Stage 1: what backward passes left in ``p.grad``.
        self.waiting: dict[int, torch.Tensor] = {}
        self.snapshot = Snapshot(self.module, ("ds_", "applied_pre_backward_ref_cnt"))

    # -- building ---------------------------------------------------------------------------------

    def start(self, config: dict[str, Any], device: torch.device) -> None:
        """Let DeepSpeed shard the model, and find this rank's fragments. Collective."""
        trainable = [p.requires_grad for p in self.parameters]
        try:
            for parameter in self.divided.values():
                parameter.requires_grad_(True)
            # DeepSpeed can't broadcast a tensor without dimensions.
            scalars = [p for p in self.parameters if p.dim() == 0]
            for parameter in scalars:
                parameter.data = parameter.data.view(1)
            # Frozen parameters get a group of their own, which need not be gathered after a step.
            active = [p for i, p in self.divided.items() if trainable[i]]
            frozen = [p for i, p in self.divided.items() if not trainable[i]]
            groups = [group for group in (active, frozen) if group]
            self.library = initialise(self.module, groups, config, device)
            self.zero = self.library.optimizer
            for parameter in scalars:
                if parameter.data.numel():
                    parameter.data = parameter.data.view(())
            self.snapshot.changed()
            self.arrange()
            for owner in (self.zero, *self.divided.values()):
                for name in filter(_ACCESS.match, {*vars(owner), *vars(type(owner))}):
                    setattr(owner, name, _refuse_access)
            for index, parameter in self.divided.items():
                # Weakly, because the garbage collector doesn't see what autograd's hooks hold.
                hook = functools.partial(_arrived, weakref.ref(self), index)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        finally:
            for index, parameter in self.divided.items():
                parameter.requires_grad_(trainable[index])

    @abstractmethod
    def arrange(self) -> None:
        """Find this rank's fragments in what DeepSpeed built."""

    def own(self, index: int, start: int, home: torch.Tensor) -> None:
        """Note that this rank owns ``home`` of a parameter."""
        dtype = torch.float32 if self.masters and home.is_floating_point() else home.dtype
        weights = home.detach().to(self._weights_on or home.device, dtype, copy=self.apart)
        pinned = self._pinned and weights.device != home.device
        weights = weights.pin_memory() if pinned else weights
        self.fragments[index] = Fragment(start, home, weights, pinned=pinned)

    def announced(
        self, reduce: Callable[..., None], came: Callable[..., Any]
    ) -> Callable[..., None]:
        """Return DeepSpeed's ``reduce`` of a bucket, announced before. ``came`` lists its contents."""
        process, what = self.process, f"the reduction of a bucket of gradients ({self.label})"
        waiting = Waiting(process, what)

        def call(*args: Any, **kwargs: Any) -> None:
            if listed := came(*args, **kwargs):
                announce(process, what, listed)
            with waiting:
                reduce(*args, **kwargs)

        return call

    # -- gradients --------------------------------------------------------------------------------

    @plainly
    def arrived(self, index: int) -> None:
        """Autograd has accumulated a gradient in ``p.grad``."""
        grad = self.parameters[index].grad
        if grad is None:  # frozen since the forward
            return
        self.arrivals.append(index)
        if not self.eager:
            self.waiting[index] = grad
            return
        self.waiting.pop(index, None)
        self.enter_backward()
        if index in self._came:  # autograd may have added to the bucket's memory already
            raise BackendError(
                f"{self.label}: {self.names[index]!r} got two gradients in one backward, because its layer runs in a "
                "checkpoint(..., use_reentrant=True) and outside of it. Use use_reentrant=False."
            )
        self._came.add(index)
        self.take(index)

    def enter_backward(self) -> None:
        """Note the backward that runs, whose end reduces the rest.

        Reentrant checkpoints run other backward passes inside of it.
        """
        task = torch._C._current_graph_task_id()
        if task not in self.interruption.running:
            self.interruption.running.add(task)
            # After a failed backward, a forward of the handle has to reset DeepSpeed first.
            self.interruption.incomplete |= self.interruption.cut
            self.interruption.refuse()
            at_end_of_backward(lambda: self._end_of_backward(task))

    def _end_of_backward(self, task: int) -> None:
        self.finish()
        self._came.clear()
        self.interruption.running.discard(task)

    @abstractmethod
    def take(self, index: int) -> None:
        """Put ``p.grad``, or zeros, into a bucket, which is reduced when it is full. Collective."""

    @abstractmethod
    def finish(self) -> None:
        """Reduce the buckets and give every fragment its gradient. Collective."""

    @plainly
    def assigned(self) -> list[int]:
        """Return the parameters whose ``p.grad`` is not from a backward: the program has set it."""
        grads = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        return [i for i, grad in grads.items() if grad is not self.waiting.get(i)]

    @plainly
    def held(self) -> bytes:
        """Return which parameters have a ``p.grad``, in a few bytes."""
        return zlib.compress(held_here(self.divided.values()), level=1)

    def flush(self, held: Iterable[bytes]) -> None:
        """Reduce every ``p.grad`` that a rank has, where ``held`` are the masks of all ranks. Collective.

        A rank without it counts as zeros.
        """
        indices = list(self.divided)
        what = f"the gradients of a step ({self.label})"
        told = held_by_any(what, map(zlib.decompress, held), [self.names[i] for i in indices])
        waiting = [indices[n] for n in told]
        for index in waiting:
            self.take(index)
        self.waiting.clear()
        if waiting:
            self.finish()

    def gradients(self, indices: Container[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's shards of the final gradients of these parameters; none is replicated."""
        fragments = [fragment for i, fragment in self.fragments.items() if i in indices]
        for fragment in fragments:
            fragment.widen()
        return [f.grad for f in fragments if f.grad is not None], []

    def drop(self, indices: Sequence[int], set_to_none: bool) -> None:
        """Drop the gradients of some parameters, as ``zero_grad`` does."""
        if not set_to_none:  # an interrupted backward may still copy some
            self.wait_for_copies()
        for index in indices:
            self.waiting.pop(index, None)
            parameter, fragment = self.parameters[index], self.fragments.get(index)
            # In a step, ``weights`` has the gradient too.
            for holder in (parameter, fragment, fragment and fragment.weights):
                if holder is not None and set_to_none:
                    holder.grad = None
                elif holder is not None and holder.grad is not None:
                    # In place, because stage 3 may have released the weight since.
                    holder.grad.detach().zero_()

    def replace(self, indices: Sequence[int]) -> None:
        """Drop the final gradients of parameters whose ``p.grad`` the program has set."""
        assigned = [self.parameters[i].grad for i in indices]
        self.drop(indices, set_to_none=True)
        for index, grad in zip(indices, assigned, strict=True):
            self.parameters[index].grad = grad

    def wait_for_copies(self) -> None:
        """Wait for copies from and to ``pinned`` memory, before the CPU reads or writes there."""
        if self._pinned:
            accelerator().synchronize()

    def reset(self) -> None:
        """Clear what a backward or forward left unfinished. Collective."""
        self.interruption.stale = self.interruption.cut = False
        self.waiting.clear()
        self._came.clear()
        for parameter in self.parameters:
            grad = parameter.grad
            if grad is not None and bool(grad.any()):  # zeros are dropped gradients too
                self.interruption.incomplete = True
            parameter.grad = None

    # -- weights ----------------------------------------------------------------------------------

    @abstractmethod
    def take_edits(self) -> list[int]:
        """Take over what the program wrote to weights. Return the parameters where that is lost."""

    @torch.no_grad()
    def spread(self) -> None:
        """Give every rank the weights of a step. Collective."""
        if self.apart and self.fragments:
            homes = [fragment.home for fragment in self.fragments.values()]
            weights = [fragment.weights for fragment in self.fragments.values()]
            torch._foreach_copy_(homes, weights, non_blocking=self._pinned)
            self.wait_for_copies()
        self.gather()

    @abstractmethod
    def gather(self) -> None:
        """Give every rank what is in the homes. Collective."""

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: bool,
    ) -> Any:
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
