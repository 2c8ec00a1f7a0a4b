"""``deepspeed``: ZeRO stages 1 to 3. DeepSpeed divides, gathers and reduces; the user's own optimizer steps the parts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError, PrecisionError
from ...gradients.log import GradientLog
from ...gradients.totals import average_gradients_
from ...precision import Accumulator
from ...process import Process
from ...process.environments import available
from ..base.absent import plainly
from ..base.engine import Context, Engine, SequenceOptions, lost_weights
from ..base.gradients import (
    Gradients,
    refuse_inside_backward,
    refuse_overlaps,
    refuse_quantized,
    refuse_scripts,
    refuse_sparse,
)
from ..base.memory import MemoryUse, TensorSize
from .config import Configuration, check_stage, refuse_optimizer, refuse_parameters
from .library import probe, release_groups
from .partitions import Flat, Partitions
from .stage3 import Stage3
from .state import DeepSpeedHoldings
from .weights import put_methods, remove_methods

logger = logging.getLogger("accel")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed(SequenceOptions):
    """Options of ``deepspeed``.

    Args:
        stage: 1 shards the optimizer's state, 2 the gradients as well, 3 the weights as well (None: the
            configuration's, else 2).
        offload_optimizer: the weights that the optimizer steps, their gradients and its state are in CPU memory.
        offload_parameters: the parts of the weights are in CPU memory (stage 3).
        config: a DeepSpeed configuration, or the path of one as JSON. What contradicts a raw loop is refused by its key.
    """

    stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    config: Mapping[str, Any] | str | Path | None = None

    leading = "stage"

    def check_values(self) -> None:
        if self.stage is not None:
            check_stage(self.stage)


DeepSpeed.variants = tuple(DeepSpeed(stage=stage) for stage in (1, 3))


@final
class ZeROGradients(Gradients):
    """Gradients of this rank's fragments are kept until ``zero_grad``; the user's own optimizer steps the fragments.

    Between ``before_step`` and ``after_step`` these are in the parameters' places in its groups. Stages 1 and 2 divide
    nothing before the model has an optimizer: until then every backward averages ``p.grad``.
    """

    partial = reduced = True
    engine: DeepSpeedEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        #: Steps, or is about to.
        self.stepping: Optimizer | None = None
        #: Groups that have fragments now, with the parameters in whose places these are.
        self.held: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        #: Indices of parameters with reduced gradients, and of those that an optimizer has stepped with since zero_grad.
        self._reduced: set[int | None] = set()
        self._stepped: set[int | None] = set()
        self._warned = False
        #: Whether an optimizer has stepped, or may have, what the other ranks do not see yet.
        self._unspread = False
        self.log = GradientLog(())

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        self.log.close()
        self.log = GradientLog(parameters if self.engine.distributed else ())

    def close(self) -> None:
        self.log.close()

    def holders(self) -> Sequence[Accumulator]:
        """The fragments too: at stages 2 and 3 gradients come there while backward runs."""
        zero = self.engine.zero
        return self.engine.parameters if zero is None else [*self.engine.parameters, *zero.fragments.values()]

    def pending(self) -> bool:
        zero = self.engine.zero
        return zero is not None and (bool(self.log.entries) or bool(self._assigned(zero)))

    def hidden(self) -> bool:
        return self.engine.zero is not None

    @plainly
    def _assigned(self, zero: Partitions) -> list[int]:
        """The parameters whose ``p.grad`` no backward explains, whose own is in a fragment or waits: assigned by hand. Local."""
        parameters = self.engine.parameters
        found = [i for i, p in enumerate(parameters) if p.grad is not None]
        came = set(self.log.entries) if found else set()
        return [i for i in found if parameters[i].grad is not zero.waiting.get(i) and ~i not in came]

    @contextlib.contextmanager
    def forward(self, zero: Partitions) -> Iterator[None]:
        """Around whatever uses weights: what was assigned or written since takes effect, and an exception is noticed."""
        if zero.interruption.notice():
            self._start_anew(zero)
        if self._unspread:
            self.engine.compare("the weights of a step that an exception ended")
            self.publish(zero)
        if self.engine.stage == 3:
            self.engine.take_edits()
        if assigned := self._assigned(zero):
            zero.replace(assigned)
            self._stepped.difference_update(assigned)
        try:
            yield
        except BaseException:
            # Inside a backward it is activation checkpointing that ends early, or the backward itself that ends by it.
            if torch._C._current_graph_task_id() == -1:
                zero.interruption.stale = zero.eager  # else nothing is in its buckets
            raise

    def _start_anew(self, zero: Partitions) -> None:
        self.engine.compare("a new start after an exception")
        zero.reset()

    def begin(self, run: object) -> None:
        """A backward whose forward may have been called around the engine, since an exception ended another one."""
        if (zero := self.engine.zero) is None or zero.divides_weights:  # there such a forward has begun already
            return
        zero.interruption.notice()
        if zero.interruption.cut and zero.eager:
            self._start_anew(zero)

    def backward_begins(self) -> None:
        super().backward_begins()
        self.begin(None)

    def publish(self, zero: Partitions) -> None:
        """Let every rank see the stepped weights. Collective."""
        zero.spread()
        self._unspread = False

    def accumulate(self, accumulating: bool) -> None:
        """``no_sync`` changes nothing: every backward reduces, and a sum of means is the mean of the sums."""

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Reduce what no hook has reduced; what the hooks did is compared over the ranks."""
        if (zero := self.engine.zero) is None:
            self._average()
        else:
            if optimizer is not None and zero.eager:
                refuse_inside_backward()
            zero.interruption.notice()
            zero.interruption.refuse()
            if zero.interruption.cut:
                self._start_anew(zero)
                zero.interruption.refuse()
            if self.pending():
                self._reduce(zero)
            self.log.fold(stepping=optimizer)
        if self.stepping is not None:
            self._show(self.stepping)

    def _reduce(self, zero: Partitions) -> None:
        assigned = self._assigned(zero)
        entries = tuple(self.log.entries) if zero.eager else ()
        came = hash((entries, tuple(assigned)))
        differ = lambda _: "other parameters, or in another order"  # noqa: E731
        held = self.engine.compare("the gradients of a step", came, differ, zero.held())
        with zero.interruption.reducing():
            zero.replace(assigned)
            self._stepped.difference_update(assigned)
            zero.flush(held)
            self._warn_if_kept()
            self._reduced.update(self.log.entries, assigned)
        self.buffers.synchronize()  # also where only a method, or the raw module, has changed them

    def _warn_if_kept(self) -> None:
        # for p in model.parameters(): p.grad = None
        if not self._warned and not self._stepped.isdisjoint(self.log.entries):
            self._warned = True
            logger.warning(
                "New gradients were added to those of an earlier step. Setting p.grad = None drops nothing with "
                "backend='deepspeed'. Call optimizer.zero_grad() or model.zero_grad()."
            )

    def _average(self) -> None:
        """Average ``p.grad`` until DeepSpeed divides the model, which then has an optimizer."""
        engine = self.engine
        if engine.distributed and any(p.grad is not None for p in engine.parameters):
            what = f"the reduction of gradients ({engine.label})"
            if average_gradients_(what, engine.parameters, engine.names, self.process):
                self.buffers.synchronize()

    @property
    def in_parts(self) -> bool:
        return self.engine.zero is not None

    def parts(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        zero = self.engine.zero
        assert zero is not None  # `in_parts`
        return zero.gradients({zero.numbers[id(p)] for p in parameters})

    def drop(self, indices: Sequence[int], set_to_none: bool) -> None:
        """Drop the gradients of these parameters, after ``zero_grad`` of the raw object. Local."""
        if (zero := self.engine.zero) is None or not indices:
            return
        zero.interruption.notice()
        zero.interruption.incomplete = False
        zero.drop(indices, set_to_none)
        self._stepped.difference_update(indices)
        if set_to_none:
            self._reduced.difference_update(indices)
            self.log.drop(set(indices))

    def check(self, optimizer: Optimizer) -> None:
        super().check(optimizer)
        engine = self.engine
        settings = engine.configuration
        if engine.distributed:
            refuse_optimizer(optimizer, settings, self.process.device)
        offloads = engine.distributed and (settings.offload_optimizer or settings.offload_parameters)
        if offloads and any(group.get("capturable") for group in optimizer.param_groups):
            raise OptimizerError(
                f"{type(optimizer).__name__}(capturable=True) with DeepSpeed's offload: it would step weights in CPU memory, "
                "where torch has no such step: use capturable=False"
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """From now on, what is final is shown to this optimizer."""
        self.break_step()
        self.engine.take_edits()
        self.stepping = optimizer
        zero = self.engine.zero
        if zero is not None:
            self.announce_step(optimizer)
            self._place(optimizer, zero)  # at once: some optimizers write before their closure

    def _show(self, optimizer: Optimizer) -> None:
        """Clip as the configuration says, then put the fragments in the parameters' places in the groups."""
        if (max_norm := self.engine.configuration.clipping) > 0:
            if vars(optimizer).get("grad_scale") is not None:
                raise PrecisionError(
                    "gradient_clipping of a DeepSpeed configuration, and a GradScaler's gradients are scaled still: call "
                    "scaler.unscale_(optimizer) before scaler.step(optimizer)"
                )
            if self.in_parts:
                self.clip_parts(max_norm, 2.0)
            else:
                nn.utils.clip_grad_norm_(self.engine.parameters, max_norm)
        zero = self.engine.zero
        if zero is None:
            return
        self._place(optimizer, zero)
        self._unspread = True
        for fragment in zero.fragments.values():
            fragment.weights.grad = None if fragment.grad is None else fragment.grad.to(fragment.weights.dtype)

    def _place(self, optimizer: Optimizer, zero: Partitions) -> None:
        for group in optimizer.param_groups if not self.held else ():
            self.held.append((group, group["params"]))
            fragments = [zero.fragments.get(zero.numbers[id(p)]) for p in group["params"]]
            group["params"] = [f.weights for f in fragments if f is not None]

    @contextlib.contextmanager
    def parameters_in_groups(self) -> Iterator[None]:
        """Inside a step too, for what asks the groups whose gradients there are: a rank may have no fragment in them."""
        placed = [(group, parameters, group["params"]) for group, parameters in self.held]
        for group, parameters, _ in placed:
            group["params"] = parameters
        try:
            yield
        finally:
            for group, _, fragments in placed:
                group["params"] = fragments

    def steps_part(self, optimizer: Optimizer) -> bool:
        return self.engine.zero is not None

    def break_step(self) -> None:
        self.stepping = None
        for group, parameters in self.held:
            group["params"] = parameters
        if self.held and self.engine.zero is not None:
            for fragment in self.engine.zero.fragments.values():
                fragment.weights.grad = None
        self.held.clear()

    def after_step(self, optimizer: Optimizer) -> None:
        self.break_step()
        if (zero := self.engine.zero) is not None:
            self._stepped = set(self._reduced)
            # Autograd tells by it that a graph was made with other values.
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            torch.autograd.graph.increment_version([p for p in parameters if zero.numbers[id(p)] in self._reduced])
            self.publish(zero)


@final
class DeepSpeedEngine(Engine):
    """DeepSpeed divides the model, gathers its weights and reduces its gradients."""

    name = "deepspeed"
    options_type = DeepSpeed
    requires = {"deepspeed": "deepspeed>=0.19.8"}
    gradients_type = ZeROGradients
    gradients: ZeROGradients
    holdings_type = DeepSpeedHoldings
    holdings: DeepSpeedHoldings
    options: DeepSpeed

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        self.configuration = Configuration(self.options)
        self.stage = self.configuration.stage
        self.zero: Partitions | None = None

    @classmethod
    def probe(cls) -> str:
        probe(torch.device(available()[0]))
        return ""

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        configuration = Configuration(options)
        configuration.check(process.place.world_size)
        if process.place.world_size > 1:
            refuse_sparse(module, cls.name)
            refuse_quantized(module, cls.name)
            refuse_scripts(module, cls.name)
            refuse_overlaps(module, cls.name)

    @classmethod
    def predict(cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int) -> MemoryUse:
        return Configuration(options).predict(tensors, world_size)

    def wrap(self) -> None:
        """Refuse what needs the precision; DeepSpeed itself divides in ``start``."""
        self.configuration.check_precision(self.precision.name)
        if not self.distributed:
            return
        refuse_parameters({n: p for n, p in self.named.items() if self.stage == 3 or p.requires_grad})
        if self.stage == 3 and any("_orig_mod" in m._modules for m in (self.entry, *self.module.modules())):
            raise BackendError("a torch.compile wrapper with DeepSpeed stage 3: its weights come and go; use stage 2")
        put_methods(self.module, self)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Rank 0's weights; then DeepSpeed divides them, if it has not yet; then the optimizers' state follows."""
        super().start(optimizers)
        if not self.distributed:
            return
        divides = self.zero is None and (self.stage == 3 or optimizers)
        if divides and any(p.is_floating_point() for p in self.parameters):
            self._divide()
        for optimizer in optimizers if self.zero is not None else ():
            state = {self.names[i]: optimizer.state.pop(self.parameters[i], {}) for i in self.indices(optimizer)}
            self.holdings.take(optimizer, state)

    def _divide(self) -> None:
        if inference := [name for name, p in self.named.items() if p.is_inference()]:
            raise BackendError(
                f"torch.inference_mode() was on while {', '.join(inference[:5])} was made, which can have no gradients, as "
                "DeepSpeed needs: make the model outside of it"
            )
        self.zero = zero = Stage3(self) if self.stage == 3 else Flat(self)
        numel = sum(p.numel() for p in self.parameters)
        floating = [p for p in self.parameters if p.is_floating_point()]
        dtype = next((p for p in floating if p.requires_grad), floating[0]).dtype  # that of all which it divides
        device = self.process.device
        zero.start(self.configuration.complete(dtype, numel, self.process.backends.get(device.type)), device)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it; at stage 3 each module gathers its weights, for methods the root too."""
        if self.zero is None:
            return function(*args, **kwargs)
        with self.gradients.forward(self.zero):
            return self.zero.call(function, args, kwargs, function is self.entry)

    def attach(self, optimizer: Optimizer) -> None:
        self.gradients.check(optimizer)
        super().attach(optimizer)
        if self.distributed:
            put_methods(optimizer, self)

    def detach(self, optimizer: Optimizer) -> None:
        self.gradients.break_step()
        remove_methods(optimizer)
        super().detach(optimizer)

    def take_edits(self) -> None:
        """Take over weights that the loop has written or replaced; refuse (BackendError) what the next step would undo."""
        if self.zero is not None and (edited := self.zero.take_edits()):
            raise BackendError(
                f"{', '.join(self.names[i] for i in edited[:5])} changed in place, which is lost: the optimizer steps other "
                "copies, divided over the ranks, of the shape and dtype that they had; set weights by load_state_dict(full) of "
                "the model's handle, on every rank"
            )

    def indices(self, optimizer: Optimizer) -> list[int]:
        numbers = {id(p): i for i, p in enumerate(self.parameters)}
        held = {id(group): parameters for group, parameters in self.gradients.held}
        return [numbers[id(p)] for g in optimizer.param_groups for p in held.get(id(g), g["params"])]

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        remove_methods(self.module)
        zero = self.zero if hasattr(self.zero, "zero") else None  # its start may have failed
        if zero is not None and not self.ended:
            self.holdings.restore(zero, optimizers)
        self.zero = None
        if zero is not None and self.ended:
            self.holdings.leave(zero, optimizers)
            if self.stage == 3:
                raise lost_weights(self)

    def abandon(self, reason: str) -> None:
        super().abandon(reason)
        if self.zero is not None and hasattr(self.zero, "library"):
            release_groups([self.zero.library, *self.parameters])
