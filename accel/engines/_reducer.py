"""What the engines around a reducer ask it, and say about it."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import BackendError
from ..gradients.flat import average_gradients_, broadcast_, broadcast_state
from ..gradients.log import Reduction, at_end_of_backward
from ..precision import Replaced, convert_batchnorms, restore_batchnorms
from ..process import Process
from ..process.control import agree
from .engine import Context, Engine, Options
from .holdings import Holdings
from .memory import Footprint, MemoryUse, ParameterSize, whole

# -- Compression of gradients on the wire, by torch's own communication hooks ------------------------------------------


def comm_hook(name: str | None, group: dist.ProcessGroup | None, rank: int) -> tuple[Any, Any]:
    """The state and the hook of a compression; None is the plain mean. ``rank`` is that of PowerSGD's approximation."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # a tenth of accel's import

    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(group, rank, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    return group, default_hooks.allreduce_hook if name is None else hooks[name]


def kept(state: Any) -> list[torch.Tensor]:
    """The tensors that a compression keeps from step to step: PowerSGD's errors and its low-rank factors."""
    tables = ("error_dict", "p_memory_dict", "q_memory_dict")
    return [tensor for table in tables for tensor in getattr(state, table, {}).values()]


def predict_kept(name: str | None, rank: int, parameters: Iterable[ParameterSize]) -> int:
    """Bytes of ``kept`` for these trainable parameters."""
    if name != "powersgd":
        return 0
    total = 0
    for parameter in parameters:
        total += parameter.nbytes
        rows = parameter.shape[0] if len(parameter.shape) > 1 else 1
        columns = parameter.numel // max(rows, 1)
        factors = (rows + columns) * min(rows, columns, rank)
        # torch compresses a matrix where that halves it at least.
        if rows > 1 and 2 * factors < parameter.numel:
            total += factors * parameter.itemsize
    return total


def register(
    ddp: DistributedDataParallel,
    name: str | None,
    group: dist.ProcessGroup | None,
    rank: int,
    entries: list[int | None],
) -> Any:
    """Let a compression reduce the buckets, which adds None to ``entries`` at the last of them; returns its state."""
    state, hook = comm_hook(name, group, rank)

    # It holds no engine: the reducer keeps it, where no garbage collector looks.
    def noting(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        if bucket.is_last():
            entries.append(None)
        return future

    noting.__annotations__.clear()  # of which torch accepts only its own
    ddp.register_comm_hook(None, noting)
    return state


def complete(ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter], missing: Iterable[int]) -> None:
    """Let the reducer end a reduction for which these parameters got no gradient yet, and leave them without. Collective."""
    numbers = {id(p): n for n, p in enumerate(p for p in ddp.module.parameters() if p.requires_grad)}
    reducer: Any = ddp.reducer
    absent = [parameters[i] for i in missing]
    empty = [p for p in absent if p.grad is None]

    def take(_: torch.Tensor) -> None:
        for parameter in empty:
            parameter.grad = torch.zeros_like(parameter)
        for parameter in absent:
            try:
                reducer._autograd_hook(numbers[id(parameter)])
            except RuntimeError as error:
                # With find_unused_parameters it may know already that no gradient will come.
                if "ready only once" not in str(error):
                    raise

    # The reducer waits for its buckets in a callback of autograd's, which only a backward has.
    start = torch.zeros((), requires_grad=True)
    end = start.clone()
    end.register_hook(take)
    torch.autograd.grad(end, start)
    for parameter in empty:
        parameter.grad = None


def bucket_bytes(ddp: DistributedDataParallel) -> int:
    """Bytes of the reducer's buckets, which only the reducer sees."""
    data = ddp._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return sum(map(int, sizes.split(",")))


def explain_missing(
    names: Sequence[str], parameters: Sequence[nn.Parameter], missing: Iterable[int], options: object
) -> str:
    """Why a reduction never ended, and what to do."""
    texts = [
        names[i]
        if parameters[i].requires_grad
        else f"{names[i]} (frozen since: accel.refresh_trainable was not called)"
        for i in missing
    ]
    if texts:
        return (
            f"{len(texts)} parameters got no gradient in the last backward, so that its reduction never ended: "
            f"{', '.join(texts[:5])}{', ...' if len(texts) > 5 else ''}; use them in the loss, freeze them "
            f"(requires_grad_(False)), or pass backend=accel.{type(options).__name__}(find_unused_parameters=True)"
        )
    return (
        "every parameter got a gradient, but the reduction did not end: an exception ended the backward (then call "
        "zero_grad() and go on), or static_graph=True was given for a graph that changes or that "
        "torch.autograd.grad goes through"
    )


# -- the engine --------------------------------------------------------------------------------------------------------
# Engines around ``torch.nn.parallel.DistributedDataParallel``, made right where its reducer alone is not.

CommHook = Literal["fp16", "bf16", "powersgd"]
_KNOWN = inspect.signature(DistributedDataParallel).parameters
# torch 2.13 renamed the switch; the engine broadcasts buffers by itself, once a step.
_NO_BUFFERS: Any = {"forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducingOptions(Options):
    """What the reducer and the engine around it can be told; ``accel.DDP`` explains it."""

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    batched_grad_copy: bool = True
    bucket_cap_mb: float | None = None
    broadcast_buffers: bool = True
    sync_batchnorm: bool = False
    comm_hook: CommHook | None = None
    powersgd_rank: int = 1
    auto_refresh: bool = True

    def check_values(self) -> None:
        """Refuse an unknown hook, and sizes that are none."""
        name = type(self).__name__
        if self.comm_hook not in (None, "fp16", "bf16", "powersgd"):
            raise BackendError(f"{name}(comm_hook={self.comm_hook!r}): expected 'fp16', 'bf16', 'powersgd' or None")
        size = self.bucket_cap_mb
        if size is not None and (type(size) not in (int, float) or not size > 0):
            raise BackendError(f"{name}(bucket_cap_mb={self.bucket_cap_mb!r}): expected a positive number of MiB")
        if type(self.powersgd_rank) is not int or self.powersgd_rank < 1:
            raise BackendError(f"{name}(powersgd_rank={self.powersgd_rank!r}): expected at least 1")


@final
class ReducingHoldings(Holdings):
    """Everything on every rank, and the reducer's buckets."""

    def storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a compression keeps, beside the rest."""
        yield from super().storages()
        yield from (("buckets", tensor) for tensor in kept(self.engine._hook_state))

    def hidden_buckets(self) -> int:
        """The reducer's buckets, as far as no gradient is a view of them."""
        engine = self.engine
        if engine._ddp is None:
            return 0
        seen = sum(p.nbytes for p in engine.parameters if p.requires_grad and p.grad is not None)
        return max(bucket_bytes(engine._ddp) - (seen if engine.options.gradient_as_bucket_view else 0), 0)


class ReducingEngine(Engine, ABC):
    """Reduces in the reducer's hooks while backward runs, and in ``settle`` whatever these hooks missed."""

    holdings_type = ReducingHoldings
    reduces = True
    options: ReducingOptions

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        self._ddp: DistributedDataParallel | None = None
        #: What a forward calls where there is no reducer, and what the reducer is built around.
        self._core = entry
        self._sync = True
        self._num_joined = 0
        self._stale_buffers = False
        self._joining = False
        self._batchnorms: Replaced = []
        self._has_buffers = False
        #: A backward ended well, and the reducer still waits for gradients.
        self._incomplete = False
        self._hook_state: Any = None
        # Where the parameters of a step are not known beforehand, the last bucket's reduction is noted in the log.
        options = self.options
        noted = options.find_unused_parameters or options.static_graph or options.comm_hook is not None
        self._reduction = Reduction(self.log, noted)

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        """Refuse a synchronised BatchNorm where torch has none."""
        if options.sync_batchnorm and process.device.type == "cpu":
            raise BackendError(
                f"{type(options).__name__}(sync_batchnorm=True) needs an accelerator: torch's SyncBatchNorm does not run on CPU"
            )

    @classmethod
    def predict(cls, footprint: Footprint, options: Any, world_size: int) -> tuple[MemoryUse, ...]:
        """Everything on every rank; the gradients once more in buckets, unless they are views of them."""
        buckets = 0
        if world_size > 1:
            buckets = predict_kept(options.comm_hook, options.powersgd_rank, footprint.trainable)
            buckets += 0 if options.gradient_as_bucket_view else sum(p.nbytes for p in footprint.trainable)
        return whole(footprint, world_size, buckets)

    def wrap(self) -> None:
        """Build the reducer, unless there is one process."""
        if not self.distributed:
            return
        if self.options.sync_batchnorm:
            self._batchnorms = convert_batchnorms(self.module, self.process.group)
        self._has_buffers = self.options.broadcast_buffers and any(True for _ in self.module.buffers())
        self._build()

    def _build(self) -> None:
        self._ddp = self._hook_state = None
        self._incomplete = False
        trainable = [i for i, p in enumerate(self.parameters) if p.requires_grad]
        self._reduction.reset(trainable)
        if not trainable:
            return
        options = self.options
        batched: Any = {"batched_grad_copy": options.batched_grad_copy} if "batched_grad_copy" in _KNOWN else {}
        self._ddp = DistributedDataParallel(
            self._core,
            process_group=self.process.group,
            init_sync=False,
            **_NO_BUFFERS,
            **batched,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            bucket_cap_mb=options.bucket_cap_mb,
        )
        if self._reduction.noted:
            self._hook_state = register(
                self._ddp, options.comm_hook, self.process.group, options.powersgd_rank, self.log.entries
            )

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        """Let go of the reducer and of its buckets."""
        for parameter in self.parameters:
            if self._ddp is not None and self.options.gradient_as_bucket_view and parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self._ddp = self._hook_state = None
        restore_batchnorms(self._batchnorms)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Forward through the reducer, which is armed for the next backward."""
        if not self.distributed:
            return self._core(*args, **kwargs)
        grad = torch.is_grad_enabled()
        reduction = self._reduction
        # Not while a graph may hold the buffers: between a forward and its backward.
        if grad and self._stale_buffers and self._sync and not self._joining and not reduction.graph_open:
            self._synchronize_buffers()
        if reduction.started() and not self._reduced():
            self._recover()
        if self._ddp is None:
            out = self._core(*args, **kwargs)
        else:
            if self._ddp.require_backward_grad_sync is not self._sync:  # nn.Module is slow to assign to
                self._ddp.require_backward_grad_sync = self._sync
            self._num_joined += 1
            out = self._ddp(*args, **kwargs)
            if grad and self._sync:
                reduction.arm()
        reduction.opened(grad)
        # Forwards without a graph may be one rank's alone: their changes wait for the next step.
        self._stale_buffers = self._stale_buffers or (grad and self._has_buffers)
        return out

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the reducer unarmed in the forwards inside."""
        if self.options.static_graph and self.distributed:
            raise BackendError("accel.no_sync cannot be used with static_graph=True: the graph would change")
        before, self._sync = self._sync, False
        try:
            with super().no_sync():
                yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """``DistributedDataParallel.join``: ranks that ran out of inputs mirror the others' reductions."""
        if self._ddp is None:
            yield
            return
        self._joining, self._num_joined = True, 0
        self.drift.pause()
        try:
            with self._ddp.join():
                yield
        finally:
            self._joining = False
        counts = agree(f"the end of accel.join ({self.label})", self._num_joined)
        source = counts.index(max(counts))
        self.holdings.synchronize(source)
        for stepper in self.steppers.values():
            broadcast_state(stepper.optimizer, source, self.process.group, self.label)
        self.drift.restart()

    def unsettled(self) -> bool:
        """Whether local gradients exist."""
        return self.distributed and (self._reduction.local() or self._assigned())

    def _assigned(self) -> bool:
        """Whether gradients exist that neither a backward nor an earlier ``settle`` explains: assigned by hand."""
        known = self._reduction.settled or self.log.entries
        return not known and any(p.grad is not None for p in self.parameters)

    def _reduced(self) -> bool:
        """Whether the armed backward came to its end: every gradient, and the reducer's own last act."""
        return self._finalized() and self._reduction.complete()

    def _finalized(self) -> bool:
        try:
            if self._ddp is not None:
                self._ddp.reducer._check_reducer_finalized()
            return True
        except RuntimeError:
            return False

    def before_backward(self) -> None:
        """End a reduction before another backward comes by the same parameters, as with a trunk's two heads and losses."""
        reduction = self._reduction
        if not reduction.started() or reduction.complete() or self._ddp is None:
            return
        if self.options.static_graph or self._joining:
            setting = "accel.join" if self._joining else "static_graph=True"
            raise BackendError(
                f"a second backward begins before every parameter of this {type(self.module).__name__} got its gradient from "
                f"the first one, which cannot be reduced with {setting}: add the losses up and call backward() once"
            )
        missing = reduction.missing()
        self.compare("a second backward of one forward", missing)
        self._refuse_changed()
        complete(self._ddp, self.parameters, missing)
        reduction.completed()

    def before_step(self, optimizer: Optimizer) -> None:
        """Notice gradients that were assigned by hand since this optimizer's last step."""
        self._reduction.stepping(id(optimizer))

    def settle(self) -> None:
        """Average once more where gradients came without the reducer; on all ranks, or none."""
        if not self.distributed:
            super().settle()
            return
        came = bool(self.log.entries)
        if not (self._reduction.exact() and self._finalized()):
            if self._reduction.unfinished():
                self._refuse_changed()
                if not self._reduced():
                    self._raise_missing()
            if self.unsettled():
                self._average()
        self._reduction.finish()
        if (self._stale_buffers or (came and self._has_buffers)) and not self._joining:
            self._synchronize_buffers()

    def settle_unoptimized(self, indices: Sequence[int]) -> None:
        """What came past the reducer; all of it, since no step may come that would average the rest."""
        self._incomplete = False
        if not self._reduction.exact() and not self._joining:
            at_end_of_backward(self._average_missed)  # the reducer ends first

    def _average_missed(self) -> None:
        self._incomplete = self._reduction.started() and not self._reduced()
        if not self._incomplete and self._reduction.local():
            self._average()
            self._reduction.finish()

    def _refuse_changed(self) -> None:
        if changed := self._reduction.changed():
            raise BackendError(
                f"{', '.join(self.names[i] for i in changed[:5])} was frozen or got another dtype between a forward and its "
                "backward, where the reducer waits for its gradient: change requires_grad before the forward, and a dtype "
                "only after accel.teardown"
            )

    def _average(self) -> None:
        if self._joining:
            raise BackendError(
                "gradients were accumulated without the reducer (accel.no_sync, a second backward, or a call of the raw "
                "module) inside accel.join, where the ranks cannot reduce them together"
            )
        self.compare("a reduction of gradients accumulated without the reducer", True)
        average_gradients_(self.parameters, self.process.group)

    def _raise_missing(self) -> None:
        message = explain_missing(self.names, self.parameters, self._reduction.missing(), self.options)
        self.compare("a step after an unfinished reduction", message)
        raise BackendError(message)

    def _recover(self) -> None:
        """Start afresh after a backward that ended half-way, once its gradients are dropped."""
        # After a backward that came to its end, a loop may have used its gradients.
        if self._incomplete or any(p.grad is not None and bool(p.grad.any()) for p in self.parameters):
            self._raise_missing()
        self.compare("a new start after an unfinished backward", True)
        self.log.fold(pending=False)
        self._build()

    def abandon(self, reason: str) -> None:
        """Free the reducer too: peers that wait in it wake only when nothing here holds the group any more."""
        super().abandon(reason)
        self._ddp = self._hook_state = None

    def rebuild(self) -> None:
        """A new reducer for the parameters that are trainable now."""
        self._build()

    def _synchronize_buffers(self) -> None:
        # Found anew each time: a forward may put another tensor in a buffer's place.
        broadcast_([b.data for b in self.module.buffers()], self.process.group)
        self._stale_buffers = False
