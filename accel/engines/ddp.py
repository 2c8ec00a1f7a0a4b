"""``ddp``: ``torch.nn.parallel.DistributedDataParallel``, made exact where its reducer is not."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import BackendError
from ..gradients.totals import average_gradients_
from ..gradients.watch import GRAD, Look, look, written
from ..precision import convert_batchnorms, restore_batchnorms
from ..process import Process
from ..process.control import agree, raise_lost
from .base.engine import Context, Engine
from .base.gradients import Gradients, refuse_inside_backward
from .base.memory import MemoryUse, TensorSize, add_uses
from .base.options import SequenceOptions

_KNOWN = inspect.signature(DistributedDataParallel).parameters
# torch 2.13 renamed the switch. The engine broadcasts buffers by itself, once a step.
_NO_BUFFERS: Any = {
    "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False
}
_PASSED = (
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "batched_grad_copy",
    "bucket_cap_mb",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(SequenceOptions):
    """Options of ``ddp``. Names and meanings are those of ``DistributedDataParallel`` if it has them.

    Args:
        find_unused_parameters: allow ranks to use different parameters in a step.
        gradient_as_bucket_view: make gradients views of the reducer's buckets, which saves one copy of them. The next backward
            then overwrites a ``p.grad`` that you keep, and ``p.grad.detach_()`` raises.
        batched_grad_copy: gradients enter a bucket together, not one by one (torch 2.13; without effect before it).
        bucket_cap_mb: size of a bucket in MiB (None: torch's default of 25, its first bucket being 1).
        broadcast_buffers: all ranks take rank 0's buffers once a step.
        sync_batchnorm: BatchNorm over the batches of all ranks (accelerators only).
        comm_hook: compress gradients on the wire: "fp16", "bf16" or "powersgd" (Vogels et al., arXiv 1905.13727).
        powersgd_rank: rank of PowerSGD's approximation.
    """

    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    batched_grad_copy: bool = True
    bucket_cap_mb: float | None = None
    broadcast_buffers: bool = True
    sync_batchnorm: bool = False
    comm_hook: Literal["fp16", "bf16", "powersgd"] | None = None
    powersgd_rank: int = 1

    choices = {"comm_hook": ("fp16", "bf16", "powersgd", None)}

    def check_values(self) -> None:
        name, size = type(self).__name__, self.bucket_cap_mb
        if size is not None and (type(size) not in (int, float) or not size > 0):
            raise BackendError(f"{name}(bucket_cap_mb={size!r}): expected a positive number of MiB")
        if self.powersgd_rank != 1 and self.comm_hook != "powersgd":
            raise BackendError(
                f"{name}(powersgd_rank={self.powersgd_rank}) needs comm_hook='powersgd'."
            )


DDP.approximate = (DDP(comm_hook="powersgd"),)


# -- gradients --------------------------------------------------------------------------------------------------------

_NO_GRADIENTS: Final = {None}
_NOTHING: Final = Look([], [])
#: The reducer says which parameters it waits for, by their numbers among its own.
_MISSING: Final = re.compile(r"indices which did not receive grad for rank \d+: ([\d ]+)")


@final
class DDPGradients(Gradients):
    """Averages whatever a backward brings past torch's reducer, at the end of that backward.

    A forward *arms* the reducer. The next backward that reaches the reducer's parameters is reduced
    while it runs. All other gradients are local at first: those of a second backward of one forward,
    of a method, of a raw submodule, or of ``no_sync``. Averaging all gradients makes them final,
    because those that are equal on all ranks stay as they are.
    """

    reduced = True
    engine: DDPEngine

    ddp: DistributedDataParallel | None = None
    #: The next backward that reaches the reducer's parameters will be reduced.
    armed = False
    #: Some gradients are this rank's own.
    _local = False
    #: A backward explains the gradients. Without one, the loop may have assigned them.
    explained = False
    #: A backward raised and may have left gradients or buckets incomplete.
    interrupted = False
    #: A backward inside of the one that runs was reduced.
    _reduced_inside = False
    #: The reducer counts parameters as used that only local gradients came for.
    marked = False
    #: A forward's graph still waits for its backward.
    graph_open = False
    #: Inside ``join``, and the number of forwards there.
    joining = False
    num_joined = 0

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        #: The optimizers that have stepped since a backward.
        self.stepped: set[int] = set()
        #: The gradients before the backward that runs.
        self._look = _NOTHING

    def build(self, core: nn.Module) -> None:
        """Build a reducer of the parameters that are trainable now, around ``core``. Collective."""
        self.let_go()
        parameters = self.engine.parameters
        self._trained = [i for i, p in enumerate(parameters) if p.requires_grad]
        #: Parameters that the reducer does not know.
        self._others = [p for p in parameters if not p.requires_grad]
        if not self._trained:
            return
        options = self.engine.options
        given: Any = {name: getattr(options, name) for name in _PASSED if name in _KNOWN}
        group = self.process.group
        self.ddp = DistributedDataParallel(
            core, process_group=group, init_sync=False, **_NO_BUFFERS, **given
        )
        self.ddp.require_backward_grad_sync = not self.accumulating
        self.first = parameters[self._trained[0]]
        self.dtype = self.first.dtype
        if options.comm_hook is not None:
            _register_compression(self.ddp, options.comm_hook, group, options.powersgd_rank)

    def let_go(self) -> None:
        """Free the reducer and its buckets."""
        self.ddp = None
        self.armed = False

    @property
    def spares(self) -> bool:
        return self.engine.distributed

    def accumulate(self, accumulating: bool) -> None:
        super().accumulate(accumulating)
        if self.ddp is not None:
            self.ddp.require_backward_grad_sync = not accumulating

    # -- forwards -------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Build a new reducer after a backward that raised, once its gradients are dropped. Collective."""
        parameters = self.engine.parameters
        if any(p.grad is not None and bool(p.grad.any()) for p in parameters):
            self._refuse_interrupted()
        self.engine.compare("a new start after an unfinished backward")
        for parameter in parameters:
            # Buckets that are still being reduced may lie in the memory of these zeros.
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter)
        self.interrupted = self._local = False
        self.engine.rebuild()

    def _refuse_interrupted(self) -> None:
        raise BackendError(
            f"An exception ended a backward of {self.engine.label}, so its gradients are incomplete. "
            "Call optimizer.zero_grad(), then run forward and backward again."
        )

    def forget_marks(self) -> None:
        """Let the reducer forget which parameters were used, once their gradients are dropped. Local.

        With find_unused_parameters it would count them as used in the next backward too.
        """
        if self.ddp is not None and all(p.grad is None for p in self.engine.parameters):
            self.marked = False
            self.ddp.reducer._reset_state()

    # -- backwards ------------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        if self.interrupted:
            self.recover()
        # `look` inline, because each backward comes here.
        with torch._C.DisableTorchFunctionSubclass():
            gradients = list(map(GRAD, self.engine.parameters))
            self._look = Look(
                gradients, list(map(getattr, gradients, repeat("_version"), repeat(0)))
            )

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        waits = ""
        if self.armed:
            assert self.ddp is not None
            try:
                self.ddp.reducer._check_reducer_finalized()
            except RuntimeError as error:
                waits = str(error)  # for parameters that got no gradient
            first, grad = self._trained[0], self.first.grad
            came = grad is not None and (
                grad is not self._look.gradients[first]
                or grad._version != self._look.versions[first]
            )
            only_trained = set(map(GRAD, self._others)) <= _NO_GRADIENTS
            inside = waits or self._reduced_inside or not outermost
            if came and completed and only_trained and not inside:
                # The usual backward: the reducer has reduced all of it.
                self.armed = self._local = self.graph_open = False
                self.explained = self.plain = True
                self.stepped.clear()
                self._look = _NOTHING  # it would keep gradients alive that the loop drops
                if not self.engine.optimizers:
                    self.engine.drift.count_backward()
                return
        self._judge(waits, completed, outermost)

    def _judge(self, waits: str, completed: bool, outermost: bool) -> None:
        """Find out what a backward brought, and average what the reducer missed. Collective."""
        if waits and completed and not outermost:
            return  # the outer backward brings the rest of the reduction
        now = look(self.engine.parameters)
        came = set(written(self._look, now))
        concerned = bool(came or waits or self._reduced_inside)
        if outermost:
            self._look, self._reduced_inside = _NOTHING, False
        if not concerned:
            return  # a backward of a different model
        self.explained = self.plain = True
        self.stepped.clear()
        self.graph_open = False
        self.interrupted = self.engine.distributed
        if not completed or not self.engine.distributed:
            return
        reduced = self.armed and not waits and not came.isdisjoint(self._trained)
        if waits and outermost:
            # `came` can't tell, because views of one bucket share a version.
            numbers = _MISSING.search(waits)
            self._end_without(
                [self._trained[int(n)] for n in numbers[1].split()] if numbers else []
            )
            reduced = True
        if reduced:
            self.armed = False
            others = any(p.grad is not None for p in self._others)
            self._local = others and (self._local or not came.issubset(self._trained))
        elif came:
            self._local = self.marked = True
        if outermost:
            self._end_outermost()
        elif reduced:  # the outer backward may bring more
            self._reduced_inside = True
            self._look = now
        self.interrupted = False

    def _end_outermost(self) -> None:
        if self.accumulating:
            return
        if self._local:
            self._average()
        if not self.engine.optimizers:
            self.engine.drift.count_backward()

    def _average(self) -> None:
        """Average all gradients. Collective."""
        engine = self.engine
        if self.joining:
            raise BackendError(
                "accel.join can't reduce gradients that came past the reducer, by accel.no_sync, a second backward "
                "or the raw module. Call backward() once for each forward."
            )
        what = f"a reduction of gradients accumulated without the reducer ({engine.label})"
        average_gradients_(what, engine.parameters, engine.names, self.process)
        self._local, self.explained = False, True

    def _end_without(self, missing: Sequence[int]) -> None:
        """Let the reducer end a backward that left parameters without a gradient. Collective."""
        engine = self.engine
        names = ", ".join(engine.names[i] for i in missing[:5])
        allowed = f"backend=accel.{type(engine.options).__name__}(find_unused_parameters=True)"
        if self.joining:
            raise BackendError(f"{names} got no gradient inside accel.join. Pass {allowed}.")
        engine.compare(
            f"{len(missing)} parameters got no gradient in the last backward: {names}. If ranks use different "
            f"parameters, pass {allowed}",
            missing,
        )
        reducer: Any = self.ddp and self.ddp.reducer
        parameters = engine.parameters
        before = {i: parameters[i].grad for i in missing}

        def bring_zeros(_: torch.Tensor) -> None:
            for index, gradient in before.items():
                parameters[index].grad = (
                    torch.zeros_like(parameters[index]) if gradient is None else gradient
                )
                try:
                    reducer._autograd_hook(self._trained.index(index))
                except RuntimeError:
                    # With find_unused_parameters the reducer may know already that it gets none.
                    if not engine.options.find_unused_parameters:
                        raise

        # The reducer waits for its buckets in a callback, which only a backward has.
        start = torch.zeros((), requires_grad=True, device="cpu")
        end = start.clone()
        end.register_hook(bring_zeros)
        torch.autograd.grad(end, start)
        for index, gradient in before.items():
            if gradient is None:
                parameters[index].grad = None

    # -- steps ----------------------------------------------------------------------------------------------------

    def pending(self) -> bool:
        """True if gradients are local, or may have been assigned by the loop."""
        if not self.engine.distributed or (
            self.explained and not self._local and not self.interrupted
        ):
            return False
        return any(p.grad is not None for p in self.engine.parameters)

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Average what no backward has: gradients of ``no_sync``, and those that a loop assigned."""
        if not self.engine.distributed:
            return
        if self.interrupted:
            self._refuse_interrupted()
        if optimizer is not None and torch._C._current_graph_task_id() != -1:
            refuse_inside_backward()
        unknown = self._local or not self.explained or id(optimizer) in self.stepped
        if unknown and any(p.grad is not None for p in self.engine.parameters):
            self._average()
        if optimizer is None:
            return
        first = not self.stepped
        self.stepped.add(id(optimizer))
        buffers = self.buffers
        if buffers.wanted and (buffers.stale or first) and not self.joining:
            buffers.synchronize()


# -- the engine -------------------------------------------------------------------------------------------------------


class DDPEngine(Engine):
    """Runs forwards through a DistributedDataParallel that is rebuilt if parameters are frozen."""

    name = "ddp"
    options_type = DDP
    options: DDP
    gradients_type = DDPGradients
    gradients: DDPGradients

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        #: The module inside the reducer, which forwards call if there is no reducer.
        self._core = entry

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        """Raise BackendError for SyncBatchNorm on CPU, where torch has none."""
        if process.device.type != "cpu":
            return
        if options.sync_batchnorm:
            raise BackendError(
                f"{type(options).__name__}(sync_batchnorm=True) needs an accelerator."
            )
        for name, child in module.named_modules():
            if isinstance(child, nn.SyncBatchNorm) and process.place.world_size > 1:
                raise BackendError(
                    f"{name} is a SyncBatchNorm, which torch does not run on CPU. Use BatchNorm."
                )

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse:
        """Count the gradients twice, unless they are views of the reducer's buckets."""
        use = add_uses(tensor.use() for tensor in tensors)
        copied = world_size > 1 and not options.gradient_as_bucket_view
        return replace(use, buckets=use.gradients) if copied else use

    def wrap(self) -> None:
        """Build the reducer, unless there is one process."""
        if not self.distributed:
            return
        if self.options.sync_batchnorm:
            self.replaced_modules = convert_batchnorms(self.module, self.process.group)
        self.rebuild()

    def rebuild(self) -> None:
        """Build a new reducer for the parameters that are trainable now."""
        if self.distributed:
            self.gradients.build(self._core)

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        """Let go of the reducer and of its buckets."""
        restore_batchnorms(self.replaced_modules)
        if self.gradients.ddp is not None and self.options.gradient_as_bucket_view:
            for parameter in self.parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        self.gradients.let_go()

    def abandon(self, reason: str) -> None:
        """Free the reducer too, because peers that wait in it wake only once nothing holds the group."""
        super().abandon(reason)
        self.gradients.let_go()

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``function``. A forward goes through the reducer."""
        if function is not self.entry:
            return function(*args, **kwargs)
        if not self.distributed:
            return self._core(*args, **kwargs)
        gradients, trains = self.gradients, torch.is_grad_enabled()
        synchronizes, buffers = not gradients.accumulating, gradients.buffers
        if gradients.interrupted:
            gradients.recover()
        if (
            buffers.stale
            and trains
            and synchronizes
            and not (gradients.graph_open or gradients.joining)
        ):
            buffers.synchronize()  # a backward came without a step
        ddp = (
            None if torch.compiler.is_exporting() else gradients.ddp
        )  # DDP.forward can't be traced
        if ddp is None:
            out = self._core(*args, **kwargs)
        else:
            gradients.num_joined += 1
            if gradients.marked and synchronizes and self.options.find_unused_parameters:
                gradients.forget_marks()
            out = ddp(*args, **kwargs)
        if trains:
            if ddp is not None and synchronizes:
                gradients.armed = gradients.first.dtype is gradients.dtype
            gradients.graph_open = True
            # After a step the loop may assign gradients of torch.autograd.grad.
            gradients.explained = gradients.explained and not gradients.stepped
            buffers.stale = buffers.wanted
        return out

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """``DistributedDataParallel.join``: ranks that ran out of inputs mirror the others' reductions."""
        gradients = self.gradients
        if gradients.ddp is None:
            yield
            return
        gradients.joining, gradients.num_joined = True, 0
        self.drift.pause()
        try:
            with gradients.ddp.join():
                yield
        except RuntimeError as error:
            raise_lost("accel.join", error)
            raise
        finally:
            gradients.joining = False
        counts = agree(f"the end of accel.join ({self.label})", gradients.num_joined)
        source = counts.index(max(counts))
        self.holdings.synchronize(source)
        for optimizer in self.optimizers:
            if self.process.place.rank != source:
                for parameter in self.parameters:
                    optimizer.state.pop(parameter, None)
            self.holdings.give_back("the end of accel.join", optimizer, self.named)
        self.drift.restart()


def _register_compression(
    ddp: DistributedDataParallel, name: str, group: dist.ProcessGroup | None, powersgd_rank: int
) -> None:
    """Let torch's communication hook of this name reduce the buckets."""
    # Importing them takes a tenth of the time of `import accel`.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    state: Any = group
    reduce: Any = powerSGD_hook.powerSGD_hook
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, powersgd_rank, start_powerSGD_iter=2)
    else:
        reduce = getattr(default_hooks, f"{name}_compress_hook")
    # Under its own name torch accepts the hook for bf16 on NCCL only.
    ddp.register_comm_hook(state, lambda state, bucket: reduce(state, bucket))
