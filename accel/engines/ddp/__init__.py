"""``ddp``: ``torch.nn.parallel.DistributedDataParallel``, a process for each device, made right where its reducer is not."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...errors import BackendError
from ...gradients.log import at_end_of_backward
from ...gradients.totals import average_gradients_
from ...precision import convert_batchnorms, restore_batchnorms
from ...process import Process
from ...process.control import agree, raise_lost
from ..base.engine import Context, Engine, SequenceOptions
from ..base.gradients import Gradients, refuse_inside_backward
from ..base.memory import MemoryUse, TensorSize, add_uses
from .reduction import Reduction

_KNOWN = inspect.signature(DistributedDataParallel).parameters
# torch 2.13 renamed the switch; the engine broadcasts buffers by itself, once a step.
_NO_BUFFERS: Any = {"forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False}
_PASSED = ("find_unused_parameters", "gradient_as_bucket_view", "batched_grad_copy", "bucket_cap_mb")


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(SequenceOptions):
    """Options of ``ddp``; names and meanings are those of ``DistributedDataParallel`` where it has them.

    Args:
        find_unused_parameters: allow parameters that get no gradient in a step.
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

    def check_values(self) -> None:
        name, size = type(self).__name__, self.bucket_cap_mb
        if size is not None and (type(size) not in (int, float) or not size > 0):
            raise BackendError(f"{name}(bucket_cap_mb={self.bucket_cap_mb!r}): expected a positive number of MiB")
        if self.powersgd_rank != 1 and self.comm_hook != "powersgd":
            raise BackendError(
                f"{name}(powersgd_rank={self.powersgd_rank}) is without effect: comm_hook='powersgd' uses it"
            )


@final
class DDPGradients(Gradients):
    """Final by the reducer's hooks while backward runs, and by ``settle`` whatever these missed."""

    reduced = True
    engine: DDPEngine

    ddp: DistributedDataParallel | None = None
    #: Inside ``join``; in how many forwards this rank took part there.
    joining = False
    num_joined = 0
    #: A backward ended well, and the reducer still waits for gradients.
    _incomplete = False

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """See in whole backwards what came."""
        super().follow(() if self.engine.distributed else parameters)
        unused = self.engine.options.find_unused_parameters
        self.listener = self.reduction = Reduction(parameters, self.log, unused, self._end_without)

    def build(self, core: nn.Module) -> None:
        """A new reducer of the parameters that are trainable now, around what a forward calls."""
        self.let_go()
        self._incomplete = False
        trainable = [i for i, p in enumerate(self.engine.parameters) if p.requires_grad]
        if not trainable:
            self.reduction.reset(None, ())
            return
        options = self.engine.options
        given: Any = {name: getattr(options, name) for name in _PASSED if name in _KNOWN}
        self.ddp = DistributedDataParallel(
            core, process_group=self.process.group, init_sync=False, **_NO_BUFFERS, **given
        )
        self.reduction.reset(self.ddp.reducer, trainable)
        if options.comm_hook is not None:
            _register_compression(self.ddp, options.comm_hook, self.process.group, options.powersgd_rank)

    @property
    def spares(self) -> bool:
        return self.engine.distributed

    def pending(self) -> bool:
        """Whether local gradients exist; those too that neither a backward nor an earlier ``settle`` explains."""
        if not self.engine.distributed:
            return False
        reduction = self.reduction
        reduction.look()
        explained = reduction.settled or self.log.entries
        assigned = not explained and any(p.grad is not None for p in self.engine.parameters)
        return assigned or reduction.local or reduction.unfinished

    def _end_without(self, missing: Sequence[int]) -> None:
        """End a reduction before another backward comes by the same parameters, as with a trunk's two heads and losses.

        One whose gradients were dropped, as after an exception, is dropped too.
        """
        if not missing or all(p.grad is None for p in self.engine.parameters):
            self.recover()
            return
        if self.joining:
            raise BackendError(
                f"a second backward begins before every parameter of this {self.engine.kind} got its gradient "
                "from the first one, which cannot be reduced with accel.join: add the losses up and call backward() once"
            )
        self.engine.compare("a second backward of one forward", missing)
        self.reduction.end_without(missing)

    def forget_uses(self) -> None:
        """Let the reducer forget parameters whose gradients came without it and were dropped since.

        With find_unused_parameters it raises if the next backward doesn't reach them, as after two backwards of one forward.
        """
        if self.ddp is not None and all(p.grad is None for p in self.engine.parameters):
            self.reduction.passed = False
            self.ddp.reducer._reset_state()

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """A look at the log, where the reducer saw all; else average once more, on all ranks. Then rank 0's buffers."""
        if not self.engine.distributed:
            super().settle()
            return
        reduction = self.reduction
        if reduction.running:
            reduction.look()
        came = bool(self.log.entries)
        if not came or reduction.armed or reduction.local or reduction.awaited:
            if reduction.armed:
                refuse_inside_backward()
            if optimizer is not None and self.log.repeats(optimizer):
                reduction.settled = False
            self._refuse_broken()
            if self.pending():
                self._average()
        reduction.finish(optimizer)
        if (self.buffers.stale or (came and self.buffers.wanted)) and not self.joining:
            self.buffers.synchronize()

    def end_backward(self, indices: Sequence[int]) -> None:
        """What came past the reducer; all of it, since no step may come that would average the rest."""
        self._incomplete = False
        if not self.joining:
            at_end_of_backward(self._average_missed)  # the reducer ends first

    def _average_missed(self) -> None:
        self.reduction.look()
        self._incomplete = self.reduction.unfinished
        if not self._incomplete and self.reduction.local:
            self._average()
            self.reduction.finish()

    def _refuse_broken(self) -> None:
        if self.reduction.unfinished or self.reduction.awaited:
            self._raise_missing()

    def _average(self) -> None:
        if self.joining:
            raise BackendError(
                "gradients were accumulated without the reducer (accel.no_sync, a second backward, or a call of the raw "
                "module) inside accel.join, where the ranks cannot reduce them together"
            )
        engine = self.engine
        what = f"a reduction of gradients accumulated without the reducer ({engine.label})"
        average_gradients_(what, engine.parameters, engine.names, self.process)

    def _raise_missing(self) -> None:
        engine, missing = self.engine, self.reduction.missing()
        late = " (frozen since: accel.refresh_trainable was not called)"
        texts = [engine.names[i] + ("" if engine.parameters[i].requires_grad else late) for i in missing]
        if texts:
            allowed = f"pass backend=accel.{type(engine.options).__name__}(find_unused_parameters=True)"
            if engine.options.find_unused_parameters:  # the reducer found them in the graph
                allowed = "leave inputs= out of backward(), which kept their gradients from being made"
            message = (
                f"{len(texts)} parameters got no gradient in the last backward, so that its reduction never ended: "
                f"{', '.join(texts[:5])}{', ...' if len(texts) > 5 else ''}; use them in the loss, freeze them "
                f"(requires_grad_(False)), or {allowed}"
            )
        else:
            message = (
                "an exception ended the last backward, so that the reduction of its gradients did not end: call zero_grad() and "
                "run forward and backward again"
            )
        # In the name, which ranks that wait for it in their backward are told too.
        engine.compare(f"a step after an unfinished reduction: {message}")
        raise BackendError(message)

    def recover(self) -> None:
        """Start afresh after a backward that ended half-way, once its gradients are dropped. Collective."""
        # After a backward that came to its end, a loop may have used its gradients.
        if self._incomplete or any(p.grad is not None and bool(p.grad.any()) for p in self.engine.parameters):
            self._refuse_broken()
        self.engine.compare("a new start after an unfinished backward")
        for parameter in self.engine.parameters:  # a reduction may still be under way in the memory of these zeros
            parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter)
        self.reduction.finish()
        self.engine.rebuild()

    def let_go(self) -> None:
        """Free the reducer and its buckets, which ``p.grad`` may lie in."""
        self.ddp = None
        self.reduction.release()


class DDPEngine(Engine):
    """A forward arms the reducer for the next backward."""

    name = "ddp"
    options_type = DDP
    options: DDP
    gradients_type = DDPGradients
    gradients: DDPGradients

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        #: What a forward calls where there is no reducer, and what the reducer is built around.
        self._core = entry

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        """Refuse a synchronised BatchNorm where torch has none."""
        if options.sync_batchnorm and process.device.type == "cpu":
            raise BackendError(
                f"{type(options).__name__}(sync_batchnorm=True) needs an accelerator: torch's SyncBatchNorm does not run on CPU"
            )
        synchronized = [name for name, child in module.named_modules() if isinstance(child, nn.SyncBatchNorm)]
        if synchronized and process.device.type == "cpu" and process.place.world_size > 1:
            raise BackendError(f"{synchronized[0]} is a SyncBatchNorm, which torch does not run on CPU: use BatchNorm")

    @classmethod
    def predict(cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int) -> MemoryUse:
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
        """A new reducer for the parameters that are trainable now."""
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
        """Free the reducer too: peers that wait in it wake only when nothing here holds the group any more."""
        super().abandon(reason)
        self.gradients.let_go()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward through the reducer, which is armed for the next backward."""
        if function is not self.entry:
            return function(*args, **kwargs)
        if not self.distributed:
            return self._core(*args, **kwargs)
        grad, gradients = torch.is_grad_enabled(), self.gradients
        sync, reduction, buffers = not gradients.accumulating, gradients.reduction, gradients.buffers
        # `settle` has done it, but after a backward without a step. Not while a graph may hold the buffers, before its backward.
        if buffers.stale and grad and sync and not gradients.joining and not reduction.graph_open:
            buffers.synchronize()
        if reduction.unfinished:
            gradients.recover()
        ddp = None if torch.compiler.is_exporting() else gradients.ddp  # the class lets nobody trace its own forward
        if ddp is None:
            out = self._core(*args, **kwargs)
        else:
            if ddp.require_backward_grad_sync is not sync:  # nn.Module is slow to assign to
                ddp.require_backward_grad_sync = sync
            gradients.num_joined += 1
            if reduction.passed and sync and self.options.find_unused_parameters:
                gradients.forget_uses()
            out = ddp(*args, **kwargs)
        reduction.forward(grad, grad and sync and ddp is not None)
        if grad:  # forwards without a graph may be one rank's alone: their changes wait for the next step
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
