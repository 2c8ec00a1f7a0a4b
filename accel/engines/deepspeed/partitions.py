"""How DeepSpeed divides a model over the ranks, seen as one fragment of each parameter.

The library keeps the memory, the buckets and the gathering. Which gradients exist, and what an optimizer steps, is kept
here, by parameter: so a frozen or unused parameter is left alone exactly as in one process.
"""

from __future__ import annotations

import functools
import re
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import BackendError
from ...gradients.log import at_end_of_backward, remove_hooks
from ...gradients.totals import held_by_any, held_here
from ...process.control import Waiting, announce
from ..base.absent import plainly
from ..base.gradients import Interruption
from ..base.raw_objects import Snapshot
from .library import accelerator, end, initialise, library

if TYPE_CHECKING:
    from . import DeepSpeedEngine


@final
@dataclass(slots=True, eq=False)
class Fragment:
    """The part of one parameter that this rank owns.

    ``grad`` is its mean gradient, or None as in ``p.grad``. One that came from a single reduction is of the dtype that it came
    in, which loses nothing; a sum is of the dtype of ``weights``.
    """

    start: int  # its first element
    home: torch.Tensor  # the part in the model's own memory
    #: What an optimizer steps: ``home`` itself, or a copy of higher precision or on another device.
    weights: torch.Tensor
    grad: torch.Tensor | None = None
    pinned: bool = False  # ``weights`` is host memory that a device reads and writes while the host goes on

    @torch.no_grad()
    def accumulate(self, part: torch.Tensor) -> None:
        """Add a reduced gradient. The first one is here at once, or where it is ``pinned``, after ``wait_for_copies``."""
        if self.grad is None:
            self.grad = part.to(self.weights.device, copy=True, non_blocking=self.pinned)
        else:
            part = part.to(self.weights.device)  # which waits for the first one
            self.widen()
            self.grad.add_(part)

    def widen(self) -> None:
        """Keep the gradient in the dtype of ``weights``, so that it can be computed with."""
        if self.grad is not None:
            self.grad = self.grad.to(self.weights.dtype)


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
    """The parameters of an engine's model, divided by DeepSpeed. ``start`` and whatever is marked so are collectives."""

    #: Weights are divided too.
    divides_weights: ClassVar[bool] = False

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.module, self.process, self.label = engine.module, engine.process, engine.label
        self.names, self.parameters = engine.names, engine.parameters
        #: Gradients are reduced while backward runs; else when ``flush`` is called.
        self.eager = engine.stage > 1
        self.shapes = [p.shape for p in self.parameters]
        self.fragments: dict[int, Fragment] = {}
        self.divided = {i: p for i, p in enumerate(self.parameters) if p.is_floating_point()}
        self.numbers = {id(p): i for i, p in enumerate(self.parameters)}
        #: The numbers of those of which ranks have fragments.
        self.by_name = {n: i for i, n in enumerate(self.names) if self.divides_weights or i in self.divided}
        #: Each fragment has fp32 weights of its own; where these are, if not where the model's are.
        self.masters = engine.configuration.masters
        self._weights_on = torch.device("cpu") if engine.configuration.offload_optimizer else None
        #: Weights that are stepped are other memory than the homes; memory of the host that devices use directly.
        self.apart = self.masters or self._weights_on is not None
        self._pinned = engine.configuration.pins and engine.process.device.type != "cpu"
        self._hooks: list[RemovableHandle] = []
        #: Whose gradients are taken at the end of the backward: hooks of the program may change them first.
        self._hooked: list[int] = []
        #: What came in this backward since it began, or since one inside of it ended.
        self._came: set[int] = set()
        self.interruption = Interruption()
        #: What backwards left in ``p.grad``.
        self.waiting: dict[int, torch.Tensor] = {}
        self.snapshot = Snapshot(self.module, ("ds_", "applied_pre_backward_ref_cnt"))

    def start(self, config: dict[str, Any], device: torch.device) -> None:
        trainable = [p.requires_grad for p in self.parameters]
        try:
            for parameter in self.divided.values():
                parameter.requires_grad_(True)
            # It cannot broadcast what has no dimensions.
            scalars = [p for p in self.parameters if p.dim() == 0]
            for parameter in scalars:
                parameter.data = parameter.data.view(1)
            # What is frozen now lies apart, so that it need not be gathered after a step.
            parts = [[p for i, p in self.divided.items() if trainable[i] is t] for t in (True, False)]
            self.library = initialise(self.module, [part for part in parts if part], config, device)
            self.zero = self.library.optimizer
            for parameter in scalars:
                if parameter.data.numel():
                    parameter.data = parameter.data.view(())
            self.snapshot.changed()
            self.arrange()
            for owner in (self.zero, *self.divided.values()):
                for name in filter(_ACCESS.match, dir(type(owner)) if owner is self.zero else list(vars(owner))):
                    setattr(owner, name, _refuse_access)
            for index, parameter in self.divided.items():
                # Weakly: autograd keeps the hook where no garbage collector looks.
                hook = functools.partial(_arrived, weakref.ref(self), index)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        finally:
            for index, parameter in self.divided.items():
                parameter.requires_grad_(trainable[index])

    def own(self, index: int, start: int, home: torch.Tensor) -> None:
        """Note that ``home`` is this rank's part of a parameter."""
        dtype = torch.float32 if self.masters and home.is_floating_point() else home.dtype
        weights = home.detach().to(self._weights_on or home.device, dtype, copy=self.apart)
        pinned = self._pinned and weights.device != home.device
        weights = weights.pin_memory() if pinned else weights
        self.fragments[index] = Fragment(start, home, weights, pinned=pinned)

    @plainly
    def arrived(self, index: int) -> None:
        """Autograd has accumulated a gradient in ``p.grad``."""
        grad = self.parameters[index].grad
        if grad is None:  # frozen since the forward
            return
        if not self.eager:
            self.waiting[index] = grad
        else:
            self.waiting.pop(index, None)
            self.enter_backward()
            self._refuse_second(index)
            hooks: Any = self.parameters[index]._post_accumulate_grad_hooks  # by a number that counts up
            if next(reversed(hooks)) > self._hooks[-1].id:
                self._hooked.append(index)
            else:
                self.take(index)

    def enter_backward(self) -> None:
        """Note the backward that runs, whose end reduces what is left. Reentrant checkpoints run others inside of it."""
        task = torch._C._current_graph_task_id()
        if task not in self.interruption.running:
            self.interruption.running.add(task)
            self.interruption.refuse()
            at_end_of_backward(lambda: self._end_of_backward(task))

    def _refuse_second(self, index: int) -> None:
        """Of one that is in a bucket, autograd may have added to the bucket's memory already."""
        if index in self._came:
            raise BackendError(
                f"{self.label}: {self.names[index]!r} got two gradients in one backward, because its layer runs in a "
                "checkpoint(..., use_reentrant=True) and outside of it. Use use_reentrant=False."
            )
        self._came.add(index)

    def _end_of_backward(self, task: int) -> None:
        hooked, self._hooked = self._hooked, []
        for index in hooked:
            self.take(index)
        self.finish()
        self._came.clear()
        self.interruption.running.discard(task)

    def announced(self, reduce: Callable[..., None], came: Callable[..., Any]) -> Callable[..., None]:
        """The library's ``reduce`` of a bucket, announced before; ``came`` lists what is in it."""
        process, what = self.process, f"the reduction of a bucket of gradients ({self.label})"
        waiting = Waiting(process, what)

        def call(*args: Any, **kwargs: Any) -> None:
            if listed := came(*args, **kwargs):
                announce(process, what, listed)
            with waiting:
                reduce(*args, **kwargs)

        return call

    @plainly
    def held(self) -> bytes:
        """What backward left in ``p.grad``, in a few bytes, of many parameters too."""
        return zlib.compress(held_here(self.divided.values()), level=1)

    def flush(self, held: Iterable[bytes]) -> None:
        """Reduce it, from what all ranks have told of it; a rank that has none counts as zero. Collective."""
        indices = list(self.divided)
        what = f"the gradients of a step ({self.label})"
        told = held_by_any(what, map(zlib.decompress, held), [self.names[i] for i in indices])
        waiting = [indices[n] for n in told]
        for index in waiting:
            self.take(index)
        self.waiting.clear()
        if waiting:
            self.finish()

    @abstractmethod
    def take(self, index: int) -> None:
        """Put ``p.grad``, zeros where there is none, into a bucket, which is reduced when it is full. Collective."""

    @abstractmethod
    def finish(self) -> None:
        """Reduce the buckets and put every gradient where it belongs. Collective."""

    def wait_for_copies(self) -> None:
        """Wait for those from and to ``pinned`` memory, on any stream, before the host reads or writes there."""
        if self._pinned:
            accelerator().synchronize()

    def drop(self, indices: Sequence[int], set_to_none: bool) -> None:
        """``zero_grad`` of some parameters."""
        if not set_to_none:  # of a backward that was interrupted, some may be on their way
            self.wait_for_copies()
        for index in indices:
            self.waiting.pop(index, None)
            parameter, fragment = self.parameters[index], self.fragments.get(index)
            for holder in (parameter, fragment, fragment and fragment.weights):  # the last one in a step
                if holder is not None and set_to_none:
                    holder.grad = None
                elif holder is not None and holder.grad is not None:
                    holder.grad.detach().zero_()  # in place: stage 3 may have divided the weight since

    def replace(self, indices: Sequence[int]) -> None:
        """Drop the final gradients of parameters whose ``p.grad`` was assigned since."""
        assigned = [self.parameters[i].grad for i in indices]
        self.drop(indices, set_to_none=True)
        for index, grad in zip(indices, assigned, strict=True):
            self.parameters[index].grad = grad

    def gradients(self, indices: Container[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's part of the final gradients of these, ready to be computed with; nothing is replicated."""
        fragments = [fragment for i, fragment in self.fragments.items() if i in indices]
        for fragment in fragments:
            fragment.widen()
        return [f.grad for f in fragments if f.grad is not None], []

    def reset(self) -> None:
        """Clear what a backward or forward left half-way. Collective."""
        self.interruption.stale = self.interruption.cut = False
        self.waiting.clear()
        self._hooked.clear()
        self._came.clear()
        for parameter in self.parameters:
            if (grad := parameter.grad) is not None and bool(grad.any()):  # zeros are dropped gradients too
                self.interruption.incomplete = True
            parameter.grad = None

    @abstractmethod
    def take_edits(self) -> list[int]:
        """Let the optimizer step what the loop has written into the weights; which parameters' values are lost. Local."""

    @torch.no_grad()
    def spread(self) -> None:
        """Let every rank see the stepped weights. Collective."""
        if self.apart and self.fragments:
            fragments = self.fragments.values()
            torch._foreach_copy_([f.home for f in fragments], [f.weights for f in fragments], non_blocking=self._pinned)
            self.wait_for_copies()
        self.gather()

    @abstractmethod
    def gather(self) -> None:
        """Spread what is in the homes. Collective."""

    @abstractmethod
    def arrange(self) -> None:
        """Find this rank's fragments in what the library built."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], forward: bool) -> Any:
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


@final
class Flat(Partitions):
    """Stages 1 and 2: every rank holds all weights, in flat memory, and owns an equal part of it."""

    def arrange(self) -> None:
        """A fragment for each parameter that reaches into this rank's part."""
        zero = self.zero
        self._groups: dict[int, int] = {}
        #: Each parameter's place in the flat memory.
        self._places: dict[int, torch.Tensor] = {}
        for g, parameters in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[g])
            first = size * dist.get_rank(zero.real_dp_process_group[g])
            flat = zero.bit16_groups_flat[g]
            for parameter in parameters:
                index = self.numbers[id(parameter)]
                offset = parameter.data.storage_offset() - flat.storage_offset()
                self._groups[index] = g
                self._places[index] = parameter.data
                start, end = max(offset, first), min(offset + parameter.numel(), first + size)
                if start < end:
                    self.own(index, start - offset, flat.narrow(0, start, end - start))
            # The library's copy of the weights, and views of it: the fragments have their own, where they need one.
            zero.single_partition_of_fp32_groups[g].data = torch.empty(0, device="cpu")
            for parameter in parameters:
                parameter._hp_mapping = None
        zero.copy_grads_in_partition = self._collect
        buckets = zero.ipg_buckets
        zero.reduce_ipg_grads = self.announced(
            zero.reduce_ipg_grads,
            lambda comm_dtype=None: tuple(
                (str(dtype), *(number for *_, number in bucket.params))
                for dtype, bucket in buckets.items()
                if bucket.params and comm_dtype in (None, dtype)
            ),
        )

    @torch.no_grad()
    def take_edits(self) -> list[int]:
        """The module has whole weights, to write or to replace as in one process."""
        lost = []
        for index, place in self._places.items():
            parameter = self.parameters[index]
            if parameter.data_ptr() == place.data_ptr():
                continue
            if parameter.shape == place.shape and parameter.dtype is place.dtype:  # another tensor was put there
                place.copy_(parameter.data)
                parameter.data = place
            else:
                lost.append(index)
        for fragment in self.fragments.values() if self.apart else ():
            written = fragment.home.to(fragment.weights.device, non_blocking=fragment.pinned)
            self.wait_for_copies()
            same = fragment.weights.to(written.dtype) == written  # there the copy keeps its own digits
            fragment.weights.copy_(torch.where(same, fragment.weights, written.to(fragment.weights.dtype)))
        return lost

    @property
    def _stream(self) -> Any:
        """On which the library reduces beside what else runs; None where it does not."""
        return self.zero.reduction_stream if self.zero.overlap_comm else None

    def _wait_for_reductions(self) -> None:
        """Let the device, not the host, wait for them before it goes on, or takes the buckets' memory for something else."""
        if (stream := self._stream) is not None:
            accelerator().current_stream().wait_stream(stream)
            for bucket in self.zero.ipg_buckets.values():
                for buffer in bucket.buffer:
                    buffer.record_stream(stream)

    def take(self, index: int) -> None:
        parameter = self.parameters[index]
        if parameter.numel():
            zero = self.zero
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._stream is not None and parameter.numel() > zero.reduce_bucket_size:
                # It is read where it lies, and dropped before that: its memory would be another tensor's by then.
                parameter.grad.record_stream(self._stream)
            zero.setup_buckets()
            zero.reduce_independent_p_g_buckets_and_remove_grads(parameter, self._groups[index])

    def _collect(self, parameter: nn.Parameter, _: int | None = None) -> None:
        """The library has reduced a gradient of which this rank may own a part."""
        fragment = self.fragments.get(self.numbers[id(parameter)])
        if fragment is not None and parameter.grad is not None:
            fragment.accumulate(parameter.grad.reshape(-1).narrow(0, fragment.start, fragment.home.numel()))
        parameter.grad = None

    def finish(self) -> None:
        zero = self.zero
        # A backward inside of this one may have freed the buckets' memory.
        if any(bucket.params for bucket in zero.ipg_buckets.values()):
            zero.reduce_ipg_grads()
        self._wait_for_reductions()
        zero._clear_previous_reduced_grads()
        for parameter in self.divided.values():
            number = zero.get_param_id(parameter)
            if zero.params_already_reduced[number]:
                zero.params_already_reduced[number] = False
                self._collect(parameter)
        zero._release_ipg_buffers()
        self.wait_for_copies()

    def reset(self) -> None:
        super().reset()
        self._wait_for_reductions()
        zero = self.zero
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
        zero._release_ipg_buffers()

    def gather(self) -> None:
        zero = self.zero
        library("deepspeed.runtime.utils").all_gather_dp_groups(
            groups_flat=zero.bit16_groups_flat,
            partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
            dp_process_group=zero.real_dp_process_group,
            start_alignment_factor=zero.nccl_start_alignment_factor,
            allgather_bucket_size=zero.allgather_bucket_size,
        )

    def end(self, full: Sequence[torch.Tensor]) -> None:
        """Let go of the flat memory as well, which lives with the library's objects until a garbage collection."""
        super().end(full)
        self._places.clear()
        self.zero.bit16_groups_flat.clear()
        self.zero.parallel_partitioned_bit16_groups.clear()
