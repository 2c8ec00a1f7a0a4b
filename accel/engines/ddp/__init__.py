"""``ddp``: ``torch.nn.parallel.DistributedDataParallel``, a process for each device, made right where its reducer is not."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...errors import BackendError
from ...gradients.log import at_end_of_backward
from ...gradients.totals import average_gradients_
from ...precision import Replaced, convert_batchnorms, restore_batchnorms
from ...process import Process
from ...process.control import agree, raise_lost
from ..base.engine import Context, Engine, SequenceOptions
from ..base.gradients import Gradients, refuse_inside_backward
from ..base.holdings import Holdings
from ..base.memory import Footprint, MemoryUse, ParameterSize, whole
from .kept import KeptGradients
from .reduction import Reduction

_KNOWN = inspect.signature(DistributedDataParallel).parameters
# torch 2.13 renamed the switch; the engine broadcasts buffers by itself, once a step.
_NO_BUFFERS: Any = {"forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False}
_PASSED = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "batched_grad_copy", "bucket_cap_mb")


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(SequenceOptions):
    """Options of ``ddp``; names and meanings are those of ``DistributedDataParallel`` where it has them.

    Args:
        find_unused_parameters: allow parameters that get no gradient in a step.
        static_graph: the graph and the used parameters are the same in every step; excludes ``no_sync``.
        gradient_as_bucket_view: gradients live in the reducer's buckets, which saves a copy of them; a ``p.grad`` that the loop
            still has when the next backward begins is copied then, and of what only shares its memory a warning tells.
        batched_grad_copy: gradients enter a bucket together, not one by one (torch 2.13; without effect before it).
        bucket_cap_mb: size of a bucket in MiB (None: torch's default of 25, its first bucket being 1).
        broadcast_buffers: all ranks take rank 0's buffers once a step.
        sync_batchnorm: BatchNorm over the batches of all ranks (accelerators only).
        comm_hook: compress gradients on the wire: "fp16", "bf16" or "powersgd" (Vogels et al., arXiv 1905.13727).
        powersgd_rank: rank of PowerSGD's approximation.
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
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
    hook_state: Any = None
    #: Forwards tell the reducer themselves what its DistributedDataParallel would, which has made its buckets.
    direct = False
    #: Inside ``join``; in how many forwards this rank took part there.
    joining = False
    num_joined = 0
    #: A backward ended well, and the reducer still waits for gradients.
    _incomplete = False

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """See in whole backwards what came."""
        super().follow(() if self.engine.distributed else parameters)
        # Where the parameters of a step are not known beforehand, the last bucket's reduction is noted.
        options = self.engine.options
        noted = options.find_unused_parameters or options.static_graph or options.comm_hook is not None
        kept = KeptGradients(self.engine.label) if options.gradient_as_bucket_view else None
        self.listener = self.reduction = Reduction(
            parameters, self.log, noted, self._end_without, self._leave_out, kept
        )

    def build(self, core: nn.Module) -> None:
        """A new reducer of the parameters that are trainable now, around what a forward calls."""
        self.let_go()
        self._incomplete = self.direct = False
        every = [i for i, p in enumerate(self.engine.parameters) if p.requires_grad]
        # What torch leaves to the program is averaged like everything that comes without the reducer.
        names = getattr(core, "_ddp_params_and_buffers_to_ignore", ())
        ignored = {id(p) for name, p in core.named_parameters() if name in names} if names else ()
        trainable = [i for i in every if id(self.engine.parameters[i]) not in ignored]
        if not trainable:
            self.reduction.reset(None, ())
            return
        options = self.engine.options
        given: Any = {name: getattr(options, name) for name in _PASSED if name in _KNOWN}
        self.ddp = DistributedDataParallel(
            core, process_group=self.process.group, init_sync=False, **_NO_BUFFERS, **given
        )
        self.reduction.reset(self.ddp.reducer, trainable, len(trainable) == len(every))
        if self.reduction.noted:
            hook, rank = options.comm_hook, options.powersgd_rank
            self.hook_state = _compress(self.ddp, hook, self.process.group, rank, self.reduction.marks)

    @property
    def spares(self) -> bool:
        """``no_sync`` is refused with a static graph."""
        return self.engine.distributed and not self.engine.options.static_graph

    def accumulate(self, accumulating: bool) -> None:
        """Leave the reducer unarmed in the forwards inside."""
        if accumulating and self.engine.options.static_graph and self.engine.distributed:
            raise BackendError("accel.no_sync cannot be used with static_graph=True: the graph would change")
        super().accumulate(accumulating)

    def pending(self) -> bool:
        """Whether local gradients exist; those too that neither a backward nor an earlier ``settle`` explains."""
        if not self.engine.distributed:
            return False
        reduction = self.reduction
        reduction.look()
        explained = reduction.settled or self.log.entries
        assigned = not explained and any(p.grad is not None for p in self.engine.parameters)
        return assigned or reduction.local or reduction.unfinished or bool(reduction.changed)

    def _end_without(self, missing: Sequence[int]) -> None:
        """End a reduction before another backward comes by the same parameters, as with a trunk's two heads and losses.

        One whose gradients were dropped, as after an exception, is dropped too.
        """
        if not missing or all(p.grad is None for p in self.engine.parameters):
            self.recover()
            return
        if self.engine.options.static_graph or self.joining:
            setting = "accel.join" if self.joining else "static_graph=True"
            raise BackendError(
                f"a second backward begins before every parameter of this {self.engine.kind} got its gradient "
                f"from the first one, which cannot be reduced with {setting}: add the losses up and call backward() once"
            )
        self.engine.compare("a second backward of one forward", missing)
        self._refuse_changed()
        self.reduction.end_without(missing)

    def forget_uses(self) -> None:
        """Of gradients that are gone: torch would refuse the next backward where it does not bring these again."""
        if self.ddp is not None and all(p.grad is None for p in self.engine.parameters):
            self.reduction.passed = False
            self.ddp.reducer._reset_state()

    def _leave_out(self) -> None:
        """Let a backward with ``create_graph=True`` pass the reducer, which cannot copy its gradients: they stay local."""
        if self.engine.options.static_graph:
            raise BackendError(
                "backward(create_graph=True) cannot be used with static_graph=True: the graph would change"
            )
        assert self.ddp is not None
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
        if not came or reduction.armed or reduction.local or reduction.changed or reduction.awaited:
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
        self._refuse_changed()
        if self.reduction.unfinished or self.reduction.awaited:
            self._raise_missing()

    def _refuse_changed(self) -> None:
        if changed := self.reduction.changed:
            raise BackendError(
                f"{', '.join(self.engine.names[i] for i in changed[:5])} was frozen or got another dtype between a forward and "
                "its backward, where the reducer waits for its gradient: change requires_grad before the forward, and a dtype "
                "only after accel.teardown"
            )

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
                "every parameter got a gradient, but the reduction did not end: an exception ended the backward (then call "
                "zero_grad() and go on), or static_graph=True was given for a graph that changes or that "
                "torch.autograd.grad goes through"
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
        self.ddp = self.hook_state = None
        self.reduction.release()


@final
class DDPHoldings(Holdings):
    """Everything on every rank, and the reducer's buckets."""

    def kind(self, module: nn.Module) -> type[Any]:
        """Of a SyncBatchNorm that took another's place, that one's."""
        there = {id(parent._modules[name]): type(child) for parent, name, child in self.engine._batchnorms}
        return there.get(id(module)) or super().kind(module)

    def added(self, owner: nn.Module | nn.Parameter) -> set[str]:
        """The group of such a SyncBatchNorm."""
        synchronized = isinstance(owner, nn.SyncBatchNorm) and self.kind(owner) is not type(owner)
        return super().added(owner) | ({"process_group"} if synchronized else set())

    def storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a compression keeps, beside the rest."""
        yield from super().storages()
        yield from (("buckets", tensor) for tensor in _kept(self.engine.gradients.hook_state))

    def hidden_buckets(self) -> int:
        """The reducer's buckets, as far as no gradient is a view of them."""
        engine, ddp = self.engine, self.engine.gradients.ddp
        if ddp is None:
            return 0
        data = ddp._get_ddp_logging_data()
        sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        seen = sum(p.nbytes for p in engine.parameters if p.requires_grad and p.grad is not None)
        return max(sum(map(int, sizes.split(","))) - (seen if engine.options.gradient_as_bucket_view else 0), 0)


class DDPEngine(Engine):
    """A forward arms the reducer for the next backward."""

    name = "ddp"
    options_type = DDP
    options: DDP
    gradients_type = DDPGradients
    holdings_type = DDPHoldings
    gradients: DDPGradients

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        #: What a forward calls where there is no reducer, and what the reducer is built around.
        self._core = entry
        self._batchnorms: Replaced = []

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
    def predict(cls, footprint: Footprint, options: Any, world_size: int) -> tuple[MemoryUse, ...]:
        """Everything on every rank; the gradients once more in buckets, unless they are views of them."""
        buckets = 0
        if world_size > 1:
            buckets = _predict_kept(options.comm_hook, options.powersgd_rank, footprint.trainable)
            buckets += 0 if options.gradient_as_bucket_view else sum(p.nbytes for p in footprint.trainable)
        return whole(footprint, world_size, buckets)

    def wrap(self) -> None:
        """Build the reducer, unless there is one process."""
        if not self.distributed:
            return
        if self.options.sync_batchnorm:
            self._batchnorms = convert_batchnorms(self.module, self.process.group)
        self.rebuild()

    def rebuild(self) -> None:
        """A new reducer for the parameters that are trainable now."""
        if self.distributed:
            self.gradients.build(self._core)

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        """Let go of the reducer and of its buckets."""
        restore_batchnorms(self._batchnorms)
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
        if reduction.unfinished or reduction.changed:
            gradients.recover()
        ddp = gradients.ddp
        armed = grad and sync and ddp is not None
        if ddp is None:
            out = self._core(*args, **kwargs)
        elif gradients.direct or torch.compiler.is_exporting():  # the class lets nobody trace its own forward
            out = self._direct(ddp, armed, args, kwargs)
        else:
            out = self._through(ddp, grad, args, kwargs)
        reduction.forward(grad, armed)
        if grad:  # forwards without a graph may be one rank's alone: their changes wait for the next step
            buffers.stale = buffers.wanted
        return out

    def _through(self, ddp: DistributedDataParallel, grad: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of ``ddp`` itself, until it has made its buckets for good."""
        gradients, reduction = self.gradients, self.gradients.reduction
        sync = not gradients.accumulating
        if ddp.require_backward_grad_sync is not sync:  # nn.Module is slow to assign to
            ddp.require_backward_grad_sync = sync
        gradients.num_joined += 1
        if reduction.passed and sync and self.options.find_unused_parameters:
            gradients.forget_uses()
        anew = grad and not (reduction.noted or ddp._has_rebuilt_buckets)  # now it makes its buckets
        if anew:
            reduction.new_buckets()
        out = ddp(*args, **kwargs)
        if anew:
            reduction.made_buckets()
        # It makes its buckets once, in the second one; after a join each goes on telling the other ranks that there is one.
        usual = not (reduction.noted or ddp._use_python_reducer or ddp._join_config.enable)
        gradients.direct = usual and ddp._has_rebuilt_buckets
        return out

    def _direct(self, ddp: DistributedDataParallel, armed: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a forward of ``ddp`` comes to; its own calls around that take as long as two layers of a small model."""
        reducer: Any = ddp.reducer
        if armed:
            ddp.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
            reducer.prepare_for_forward()
        # By its buckets torch.compile cuts graphs, so that reductions begin early.
        kind: Any = DistributedDataParallel
        outer, kind._active_ddp_module = kind._active_ddp_module, ddp
        try:
            out = self._core(*args, **kwargs)
        finally:
            kind._active_ddp_module = outer
        if armed:
            reducer.prepare_for_backward([])
        return out

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """``DistributedDataParallel.join``: ranks that ran out of inputs mirror the others' reductions."""
        gradients = self.gradients
        if gradients.ddp is None:
            yield
            return
        gradients.joining, gradients.num_joined, gradients.direct = True, 0, False
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


# -- Compression of gradients on the wire, by torch's own communication hooks ------------------------------------------


def _compress(
    ddp: DistributedDataParallel, name: str | None, group: dist.ProcessGroup | None, rank: int, marks: list[None]
) -> Any:
    """Let a compression reduce the buckets, which adds None to ``marks`` at the last of them; returns its state.

    None is the plain mean; ``rank`` is that of PowerSGD's approximation.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # a tenth of accel's import

    state: Any = group
    hook: Any = powerSGD_hook.powerSGD_hook
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, rank, start_powerSGD_iter=2)
    else:
        hook = getattr(default_hooks, "allreduce_hook" if name is None else f"{name}_compress_hook")

    # It holds no engine: the reducer keeps it, where no garbage collector looks.
    def noting(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        if bucket.is_last():
            marks.append(None)
        return future

    noting.__annotations__.clear()  # of which torch accepts only its own
    ddp.register_comm_hook(None, noting)
    return state


def _kept(state: Any) -> list[torch.Tensor]:
    """The tensors that a compression keeps from step to step: PowerSGD's errors and its low-rank factors."""
    tables = ("error_dict", "p_memory_dict", "q_memory_dict")
    return [tensor for table in tables for tensor in getattr(state, table, {}).values()]


def _predict_kept(name: str | None, rank: int, parameters: Iterable[ParameterSize]) -> int:
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
