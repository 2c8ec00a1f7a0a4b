"""``ddp``: torch's ``DistributedDataParallel``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import BackendError
from ..gradients.watch import GRAD, Look, look, written
from ..precision import convert_batchnorms, restore_batchnorms
from ..process import Process
from ..process.control import agree, raise_lost
from ._averaging import AveragedGradients, AveragingEngine
from .base.engine import Context, Engine
from .base.memory import MemoryUse, TensorSize, add_uses
from .base.options import SequenceOptions
from .base.raw_objects import Args, Function, Kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(SequenceOptions):
    """Options of ``ddp``. Names shared with ``DistributedDataParallel`` mean the same.

    Args:
        find_unused_parameters: allow ranks to use different parameters.
        gradient_as_bucket_view: make gradients views of the reducer's
            buckets, which saves a copy of them. The next backward then
            overwrites a ``p.grad`` that you keep.
        batched_grad_copy: batch copies to buckets. Needs torch 2.13.
        bucket_cap_mb: size of a bucket in MiB. None: torch's default.
        broadcast_buffers: broadcast rank 0's buffers once per step.
        sync_batchnorm: compute BatchNorm over the batches of all ranks.
            Needs an accelerator.
        comm_hook: compress gradients on the wire with "fp16", "bf16" or
            "powersgd" (Vogels et al., arXiv 1905.13727).
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
        size: Any = self.bucket_cap_mb
        valid = size is None or (type(size) in (int, float) and size > 0)
        self.expect("bucket_cap_mb", valid, "a positive number of MiB")
        used = self.powersgd_rank == 1 or self.comm_hook == "powersgd"
        self.expect("powersgd_rank", used, "1, or comm_hook='powersgd'")


DDP.approximate = (DDP(comm_hook="powersgd"),)


def _build_ddp(core: nn.Module, options: DDP, process: Process) -> DistributedDataParallel:
    """Return a reducer of the trainable parameters. Collective."""
    known = inspect.signature(DistributedDataParallel).parameters
    given: dict[str, Any] = {"process_group": process.group, "init_sync": False}
    given["bucket_cap_mb"] = options.bucket_cap_mb
    given["gradient_as_bucket_view"] = options.gradient_as_bucket_view
    # accel handles find_unused_parameters. torch raises if a penalty uses an unused parameter.
    if "batched_grad_copy" in known:
        given["batched_grad_copy"] = options.batched_grad_copy
    # accel broadcasts buffers once per step instead. torch 2.13 renamed the option.
    renamed = "forward_sync_buffers" in known
    given["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
    ddp = DistributedDataParallel(core, **given)
    if options.comm_hook is not None:
        _compress(ddp, options, process)
    return ddp


def _compress(ddp: DistributedDataParallel, options: DDP, process: Process) -> None:
    # Imported here, because this import takes a tenth of the time of `import accel`.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    state: Any = process.group
    if options.comm_hook == "powersgd":
        rank = options.powersgd_rank
        state = powerSGD_hook.PowerSGDState(process.group, rank, start_powerSGD_iter=2)
        reduce: Any = powerSGD_hook.powerSGD_hook
    else:
        reduce = getattr(default_hooks, f"{options.comm_hook}_compress_hook")
    # A lambda, because torch recognizes bf16_compress_hook by its name and allows it on NCCL only.
    ddp.register_comm_hook(state, lambda state, bucket: reduce(state, bucket))


# -- gradients ------------------------------------------------------------------------------------

_NO_GRADIENTS: Final = {None}
_NOTHING: Final[Look] = ([], [])


@final
class DDPGradients(AveragedGradients):
    """Gradients averaged by torch's reducer during a backward.

    A forward *arms* the reducer for the next backward. The reducer misses gradients
    from a second backward, a method or a raw submodule. accel averages them when that
    backward ends, and gradients from ``no_sync`` later.
    """

    deferred = False
    spares = True
    engine: DDPEngine

    ddp: DistributedDataParallel | None = None
    #: True if the reducer will reduce the next backward that reaches its parameters.
    armed = False
    #: True if a backward raised, so that gradients and buckets may be incomplete.
    interrupted = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        #: The indices of the reducer's parameters, in its order.
        self._trained: list[int] = []
        #: Parameters that the reducer doesn't know.
        self._others: list[nn.Parameter] = []
        #: The gradients before the current backward.
        self._look = _NOTHING

    def build(self, core: nn.Module) -> None:
        """Build a reducer of trainable parameters. Collective."""
        self.let_go()
        self._trained, self._others = [], []
        for index, p in enumerate(self.engine.parameters):
            if p.requires_grad:
                self._trained.append(index)
            else:
                self._others.append(p)
        if self._trained:
            self.ddp = _build_ddp(core, self.engine.options, self.process)
            self.ddp.require_backward_grad_sync = not self.accumulating

    def let_go(self) -> None:
        """Free the reducer and its buckets."""
        self.ddp = None
        self.armed = False

    def accumulate(self, accumulating: bool) -> None:
        super().accumulate(accumulating)
        if self.ddp is not None:
            self.ddp.require_backward_grad_sync = not accumulating

    # -- backwards --------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        if self.interrupted:
            self.recover()
        if self.engine.options.gradient_as_bucket_view:
            self._separate_versions()
        # `look` is inlined, because this runs in every backward.
        with DisableTorchFunctionSubclass():
            gradients = list(map(GRAD, self.engine.parameters))
            versions = list(map(getattr, gradients, repeat("_version"), repeat(0)))
        self._look = gradients, versions

    def _separate_versions(self) -> None:
        """Give gradients their own versions, which views would share."""
        for p in self.engine.parameters:
            if p.grad is not None:
                p.grad = p.grad.data

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        """Average gradients the reducer missed. Collective if ``completed``."""
        if not outermost or self._look is _NOTHING:
            return
        waits = False
        if self.armed:
            try:
                self.ddp.reducer._check_reducer_finalized()  # type: ignore[union-attr]
            except RuntimeError:
                waits = True
            agrees = self.engine.options.find_unused_parameters
            if completed and not waits and not agrees and self._reached_reducer():
                # The usual backward: the reducer has averaged all gradients.
                self.armed = False
                self.final = self.plain = True
                self.stepped.clear()
                # Otherwise it would keep gradients alive after the loop has dropped them.
                self._look = _NOTHING
                if not self.engine.optimizers:
                    self._count_backward()
                return
        self._judge(completed, waits)

    def _reached_reducer(self) -> bool:
        """True if the backward reached the reducer's parameters only."""
        if self._others and not set(map(GRAD, self._others)) <= _NO_GRADIENTS:
            return False
        first, (gradients, versions) = self._trained[0], self._look
        grad = self.engine.parameters[first].grad
        return grad is not gradients[first] or getattr(grad, "_version", 0) != versions[first]

    def _judge(self, completed: bool, waits: bool) -> None:
        """Average new gradients, unless the reducer did. Collective."""
        engine = self.engine
        indices = set(written(self._look, look(engine.parameters)))
        self._look = _NOTHING
        if not indices and not waits:
            # This was the backward of a different model.
            return
        self.plain = True
        self.final = False
        self.stepped.clear()
        self.interrupted = engine.distributed
        if not completed or not engine.distributed:
            return
        if waits or (self.armed and not indices.isdisjoint(self._trained)):
            self._finish_reduction(indices, waits)
            self.armed = False
            self.final = indices.issubset(self._trained)
        self.interrupted = False
        if not self.accumulating:
            if not self.final:
                self.average()
            if not engine.optimizers:
                self._count_backward()

    def _count_backward(self) -> None:
        """Count a step of a model without optimizers. Collective."""
        self.engine.drift.count()
        self.buffers.synchronize()

    def _finish_reduction(self, indices: set[int], waits: bool) -> None:
        """Finish a reduction if only ``indices`` got gradients. Collective.

        A model with two heads may run a backward for each head.
        """
        engine = self.engine
        missing = sorted(set(self._trained) - indices)
        unused, agrees = set(missing), engine.options.find_unused_parameters
        if waits and not agrees:
            names = ", ".join(map(engine.names.__getitem__, missing[:5]))
            options = f"accel.{type(engine.options).__name__}(find_unused_parameters=True)"
            engine.compare(
                f"{len(missing)} parameters got no gradient in the last backward: {names}. "
                f"If ranks use different parameters, pass backend={options}",
                missing,
            )
        empty = self._mark_ready(missing) if waits else {}
        if agrees:
            unused.intersection_update(*agree(f"used parameters ({engine.label})", missing))
        for index in unused & empty.keys():
            # No rank used it. With a gradient of zeros, AdamW would still decay the weight.
            empty[index].grad = None

    def _mark_ready(self, missing: list[int]) -> dict[int, nn.Parameter]:
        """Mark parameters ready in the reducer. Return those that had no gradient."""
        assert self.ddp is not None
        engine, reducer = self.engine, self.ddp.reducer
        empty: dict[int, nn.Parameter] = {}

        def mark_ready(_: Tensor) -> None:
            for index in missing:
                p = engine.parameters[index]
                if p.grad is None:
                    empty[index] = p
                    p.grad = torch.zeros_like(p)
                reducer._autograd_hook(self._trained.index(index))  # type: ignore[attr-defined]

        # Run a small backward, because the reducer waits for its buckets in a backward's callback.
        start = torch.zeros((), requires_grad=True, device="cpu")
        end = start.clone()
        end.register_hook(mark_ready)
        torch.autograd.grad(end, start)
        return empty

    def recover(self) -> None:
        """Build a new reducer if gradients were dropped. Collective."""
        for p in self.engine.parameters:
            if p.grad is not None and p.grad.any():
                self._refuse_incomplete()
        self.engine.compare("a new start after an interrupted backward")
        for p in self.engine.parameters:
            # Even zeros, because they may be views of a bucket that is still being reduced.
            p.grad = None
        self.interrupted = False
        self.engine.rebuild()

    def _refuse_incomplete(self) -> None:
        raise BackendError(
            f"An exception interrupted backward() of {self.engine.label}, so gradients "
            "are incomplete. Call optimizer.zero_grad(), then run forward and backward again."
        )

    def average(self) -> bool:
        if self.interrupted:
            self._refuse_incomplete()
        return super().average()


# -- the engine -----------------------------------------------------------------------------------


class DDPEngine(AveragingEngine):
    """Runs forwards through a reducer. Freezing parameters rebuilds it."""

    name = "ddp"
    options_type = DDP
    options: DDP
    gradients_type = DDPGradients
    gradients: DDPGradients

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        #: The module inside the reducer. Forwards call it directly if there is no reducer.
        self._core = entry

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        if options.sync_batchnorm and process.device.type == "cpu":
            name = type(options).__name__
            raise BackendError(f"{name}(sync_batchnorm=True) needs an accelerator. Use GroupNorm.")

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse:
        """Count gradients twice, unless they are views of buckets."""
        use = add_uses(map(TensorSize.use, tensors))
        copied = world_size > 1 and not options.gradient_as_bucket_view
        return replace(use, buckets=use.gradients) if copied else use

    def wrap(self) -> None:
        if self.distributed and self.options.sync_batchnorm:
            self.replaced_modules = convert_batchnorms(self.module, self.process.group)
        self.rebuild()

    def rebuild(self) -> None:
        if self.distributed:
            self.gradients.build(self._core)

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        restore_batchnorms(self.replaced_modules)
        if self.gradients.ddp is not None and self.options.gradient_as_bucket_view:
            for p in self.parameters:
                p.grad = None if p.grad is None else p.grad.clone()
        self.gradients.let_go()

    def abandon(self, reason: str) -> None:
        """Free the reducer, so that ranks waiting in it wake up."""
        super().abandon(reason)
        self.gradients.let_go()

    def run(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        gradients, trains = self.gradients, torch.is_grad_enabled()
        if trains:
            if gradients.interrupted:
                gradients.recover()
            if gradients.stepped:
                # The loop may assign gradients from torch.autograd.grad, which runs no hooks.
                gradients.final = False
        if function is not self.entry:
            return function(*args, **kwargs)
        ddp = gradients.ddp
        if ddp is None:
            return self._core(*args, **kwargs)
        out = ddp(*args, **kwargs)
        if trains and not gradients.accumulating:
            gradients.armed = True
        return out

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks without inputs join the others' reductions."""
        gradients = self.gradients
        if self.options.find_unused_parameters:
            raise BackendError("accel.join needs find_unused_parameters=False. Change the option.")
        if gradients.ddp is None:
            yield
            return
        # A rank without inputs joins torch's collectives only, so accel broadcasts no buffers.
        wanted, gradients.buffers.wanted = gradients.buffers.wanted, False
        self.drift.pause()
        try:
            with gradients.ddp.join():
                yield
        except RuntimeError as error:
            raise_lost("accel.join", error)
            raise
        finally:
            gradients.buffers.wanted = wanted
        steps = agree(f"the end of accel.join ({self.label})", self.drift.steps)
        source = steps.index(max(steps))
        self.holdings.synchronize(source)
        for optimizer in self.optimizers:
            if self.process.place.rank != source:
                for p in self.parameters:
                    optimizer.state.pop(p, None)
            self.holdings.give_back("the end of accel.join", optimizer, self.named)
        self.drift.restart()
