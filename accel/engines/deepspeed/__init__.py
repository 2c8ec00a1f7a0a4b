"""``deepspeed``: ZeRO stages 1 to 3. DeepSpeed shards, gathers and reduces. The user's optimizer steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError, PrecisionError
from ...gradients.totals import average_gradients_
from ...precision import Accumulator
from ...process import Process
from ...process.devices import available
from ..base.engine import Context, Engine, lost_weights
from ..base.gradients import (
    Gradients,
    refuse_inside_backward,
    refuse_overlaps,
    refuse_quantized,
    refuse_scripts,
    refuse_sparse,
)
from ..base.memory import MemoryUse, TensorSize
from ..base.options import SequenceOptions
from ..base.placement import Placement, Placements
from .config import Configuration, check_stage, refuse_optimizer, refuse_parameters
from .flat import Flat
from .library import probe, release_groups
from .partitions import Partitions, PlacedFragments
from .stage3 import Stage3
from .state import DeepSpeedHoldings
from .weights import put_zero_grad, remove_zero_grad

logger = logging.getLogger("accel")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed(SequenceOptions):
    """Options of ``deepspeed``.

    Args:
        stage: 1 shards the optimizer's state, 2 the gradients as well, 3 the weights as well. None
            takes the stage of the configuration, or 2.
        offload_optimizer: keep the weights that the optimizer updates, their gradients and its
            state in CPU memory.
        offload_parameters: keep the shards of the weights in CPU memory (stage 3).
        config: a DeepSpeed configuration, or the path of a JSON file. A key that contradicts a raw
            loop raises an error.
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


def _explain(_: list[Any]) -> str:
    return "different parameters, or in a different order"


@final
class ZeROGradients(Gradients):
    """Gradients of this rank's fragments, which the user's own optimizer uses until ``zero_grad``.

    Stages 1 and 2 shard nothing before the model has an optimizer. Until then, every backward
    averages ``p.grad``.
    """

    reduced = True
    engine: DeepSpeedEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        #: The optimizer that steps, or is about to.
        self.stepping: Optimizer | None = None
        self.placed = PlacedFragments()
        #: Parameters with final gradients, and those whose gradients a step has used, since zero_grad.
        self._final: set[int] = set()
        self._used: set[int] = set()
        self._warned = False
        #: A step may have changed fragments that the other ranks don't have yet.
        self._unpublished = False

    def holders(self) -> Sequence[Accumulator]:
        """The fragments too: at stages 2 and 3 their gradients come while backward runs."""
        zero = self.engine.zero
        fragments = [] if zero is None else zero.fragments.values()
        return [*self.engine.parameters, *fragments]

    def pending(self) -> bool:
        zero = self.engine.zero
        return zero is not None and bool(zero.arrivals or zero.assigned())

    def hidden(self) -> bool:
        return self.engine.zero is not None

    # -- forward and backward ---------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self, zero: Partitions) -> Iterator[None]:
        """Take over what the program wrote, and clear what an exception left, before a forward.

        An exception in the forward is noted for the next one.
        """
        if zero.interruption.notice():
            self._reset(zero)
        if self._unpublished:
            self.engine.compare("the weights of a step that an exception ended")
            self.publish(zero)
        if self.engine.stage == 3:
            self.engine.take_edits()
        self._replace_assigned(zero)
        try:
            yield
        except BaseException:
            # In a backward, activation checkpointing ends its forward early by an exception.
            if torch._C._current_graph_task_id() == -1:
                zero.interruption.stale = zero.eager  # stage 1 has nothing in its buckets
            raise

    def accumulate(self, accumulating: bool) -> None:
        """Do nothing: every backward reduces, because a sum of means is the mean of the sums."""

    def _reset(self, zero: Partitions) -> None:
        self.engine.compare("a new start after an exception")
        zero.reset()

    def _replace_assigned(self, zero: Partitions) -> list[int]:
        """Let gradients that the program has set take the places of those from backward passes."""
        assigned: list[int] = zero.assigned()
        zero.replace(assigned)
        self._used.difference_update(assigned)
        return assigned

    # -- final gradients --------------------------------------------------------------------------

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Reduce what hooks have not reduced, and compare what they have over the ranks. Collective."""
        zero = self.engine.zero
        if zero is None:
            self._average()
        else:
            if optimizer is not None and zero.eager:
                refuse_inside_backward()
            zero.interruption.notice()
            zero.interruption.refuse()
            if zero.interruption.cut:
                self._reset(zero)
                zero.interruption.refuse()
            if self.pending():
                self._reduce(zero)
        if self.stepping is not None:
            self._show(self.stepping)

    def _reduce(self, zero: Partitions) -> None:
        assigned = zero.assigned()
        arrivals = tuple(zero.arrivals) if zero.eager else ()
        which = hash((arrivals, tuple(assigned)))
        held = self.engine.compare("the gradients of a step", which, _explain, zero.held())
        with zero.interruption.reducing():
            self._replace_assigned(zero)
            zero.flush(held)
            # for p in model.parameters(): p.grad = None
            if not self._warned and not self._used.isdisjoint(zero.arrivals):
                self._warned = True
                logger.warning(
                    "New gradients were added to those of an earlier step. Setting p.grad = None drops "
                    "nothing with backend='deepspeed'. Call optimizer.zero_grad() or model.zero_grad()."
                )
            self._final.update(zero.arrivals, assigned)
            zero.arrivals.clear()
        self.buffers.synchronize()  # a method, or the raw module, may have changed them

    def _average(self) -> None:
        """Average ``p.grad`` until DeepSpeed shards the model, which then has an optimizer."""
        engine = self.engine
        if engine.distributed and any(p.grad is not None for p in engine.parameters):
            what = f"the reduction of gradients ({engine.label})"
            if average_gradients_(what, engine.parameters, engine.names, self.process):
                self.buffers.synchronize()

    @property
    def in_parts(self) -> bool:
        return self.engine.zero is not None

    def parts(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
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
        self._used.difference_update(indices)
        if set_to_none:
            self._final.difference_update(indices)
            dropped = set(indices)
            zero.arrivals[:] = [i for i in zero.arrivals if i not in dropped]

    # -- steps ------------------------------------------------------------------------------------

    def check(self, optimizer: Optimizer) -> None:
        super().check(optimizer)
        engine = self.engine
        if engine.distributed:
            refuse_optimizer(optimizer, engine.configuration)

    def before_step(self, optimizer: Optimizer) -> None:
        if self.stepping is not None:  # an exception ended its step
            self.break_step()
        self.engine.take_edits()
        self.stepping = optimizer
        if (zero := self.engine.zero) is not None:
            self.announce_step(optimizer)
            # Before the closure, because some optimizers write before they call it.
            self.placed.place(optimizer, zero)

    def _show(self, optimizer: Optimizer) -> None:
        """Clip as the configuration says, and give the fragments' weights their gradients."""
        if (max_norm := self.engine.configuration.clipping) > 0:
            if vars(optimizer).get("grad_scale") is not None:
                raise PrecisionError(
                    "gradient_clipping of a DeepSpeed config can't clip gradients that a GradScaler has "
                    "scaled. Call scaler.unscale_(optimizer) before scaler.step(optimizer)."
                )
            if self.in_parts:
                self.clip_parts(max_norm, 2.0)
            else:
                nn.utils.clip_grad_norm_(self.engine.parameters, max_norm)
        if (zero := self.engine.zero) is not None:
            self.placed.place(optimizer, zero)
            self._unpublished = True
            for fragment in zero.fragments.values():
                weights, grad = fragment.weights, fragment.grad
                weights.grad = None if grad is None else grad.to(weights.dtype)

    def break_step(self) -> None:
        self.stepping = None
        self.placed.remove()
        if self.engine.zero is not None:
            for fragment in self.engine.zero.fragments.values():
                fragment.weights.grad = None

    def after_step(self, optimizer: Optimizer) -> None:
        self.break_step()
        if (zero := self.engine.zero) is not None:
            self._used = set(self._final)
            # Autograd tells by the version that a graph was made with other values.
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            stepped = [p for p in parameters if zero.numbers[id(p)] in self._final]
            torch.autograd.graph.increment_version(stepped)
            self.publish(zero)

    def publish(self, zero: Partitions) -> None:
        """Give every rank the weights of a step. Collective."""
        zero.spread()
        self._unpublished = False


@final
class DeepSpeedEngine(Engine):
    """A model that DeepSpeed shards once it has an optimizer, and at stage 3 at once."""

    name = "deepspeed"
    options_type = DeepSpeed
    requires = {"deepspeed": "deepspeed>=0.19.8"}
    placements = Placements(gradients=Placement.BY_ELEMENT, optimizer_state=Placement.BY_ELEMENT)
    gradients_type = ZeROGradients
    gradients: ZeROGradients
    holdings_type = DeepSpeedHoldings
    holdings: DeepSpeedHoldings
    options: DeepSpeed

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        self.configuration = Configuration(context.options)
        self.stage = self.configuration.stage
        if self.stage == 3:
            self.placements = replace(self.placements, weights=Placement.BY_ELEMENT)
        super().__init__(module, entry, context)
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
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse:
        return Configuration(options).predict(tensors, world_size)

    def wrap(self) -> None:
        """Check parameters and precision. DeepSpeed shards the model in ``start``."""
        self.configuration.check_precision(self.precision.name)
        if not self.distributed:
            return
        refuse_parameters(
            {n: p for n, p in self.named.items() if self.stage == 3 or p.requires_grad}
        )
        if self.stage == 3 and any(
            "_orig_mod" in m._modules for m in (self.entry, *self.module.modules())
        ):
            raise BackendError(
                "DeepSpeed stage 3 can't gather weights inside a torch.compile wrapper. Use stage=2."
            )
        put_zero_grad(self.module, self)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Take rank 0's weights, and let DeepSpeed shard them and the optimizers' state. Collective."""
        super().start(optimizers)
        if not self.distributed:
            return
        shards = self.zero is None and (self.stage == 3 or optimizers)
        if shards and any(p.is_floating_point() for p in self.parameters):
            self._shard()
        for optimizer in optimizers if self.zero is not None else ():
            indices = self.indices(optimizer)
            state = {self.names[i]: optimizer.state.pop(self.parameters[i], {}) for i in indices}
            self.holdings.take(optimizer, state)

    def _shard(self) -> None:
        self.zero = zero = Stage3(self) if self.stage == 3 else Flat(self)
        numel = sum(p.numel() for p in self.parameters)
        floating = [p for p in self.parameters if p.is_floating_point()]
        # All weights that DeepSpeed shards have this dtype.
        dtype = next((p for p in floating if p.requires_grad), floating[0]).dtype
        device = self.process.device
        transport = self.process.backends.get(device.type)
        zero.start(self.configuration.complete(dtype, numel, transport), device)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a forward or method. At stage 3 each module gathers its weights."""
        if self.zero is None:
            return function(*args, **kwargs)
        with self.gradients.forward(self.zero):
            return self.zero.call(function, args, kwargs, function is self.entry)

    def attach(self, optimizer: Optimizer) -> None:
        self.gradients.check(optimizer)
        super().attach(optimizer)
        if self.distributed:
            put_zero_grad(optimizer, self)

    def detach(self, optimizer: Optimizer) -> None:
        self.gradients.break_step()
        remove_zero_grad(optimizer)
        super().detach(optimizer)

    def take_edits(self) -> None:
        """Take over weights that the program wrote, or raise BackendError if they would be lost."""
        if self.zero is not None and (edited := self.zero.take_edits()):
            raise BackendError(
                f"{', '.join(self.names[i] for i in edited[:5])} changed in place, which is lost, because the optimizer "
                "updates shards of the old values. Call model.load_state_dict(full) on every rank."
            )

    def indices(self, optimizer: Optimizer) -> list[int]:
        numbers = {id(p): i for i, p in enumerate(self.parameters)}
        return [
            numbers[id(p)]
            for g in optimizer.param_groups
            for p in self.gradients.placed.parameters(g)
        ]

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        remove_zero_grad(self.module)
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
