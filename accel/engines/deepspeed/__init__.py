"""``deepspeed``: DeepSpeed's ZeRO stages, with a step by the user's optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import BackendError
from ...gradients.totals import average_gradients_
from ...process import Process
from ...process.devices import available
from ...shard import parameters_of
from ..base.engine import Context, Engine, lost_weights
from ..base.gradients import Gradients, refuse_inside_backward
from ..base.memory import MemoryUse, TensorSize
from ..base.options import SequenceOptions
from ..base.parts import PartsInGroups
from ..base.placement import Placement, Placements
from ..base.raw_objects import Args, Function, Kwargs, Override
from ..base.refusals import refuse_overlaps, refuse_quantized, refuse_sparse
from .config import Configuration, check_parameters
from .flat import Flat
from .library import probe
from .partitions import Partitions
from .stage3 import Stage3
from .state import DeepSpeedHoldings, watch_zero_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed(SequenceOptions):
    """Options of ``deepspeed``.

    Args:
        stage: 1 shards the optimizer's state, 2 the gradients as well, 3 the
            weights as well. None: the stage of the configuration, or 2.
        offload_optimizer: keep the weights that the optimizer updates, their
            gradients and its state in CPU memory.
        offload_parameters: keep the shards of the weights in CPU memory (stage 3).
        config: a DeepSpeed configuration, or the path of a JSON file. A key that
            conflicts with a plain PyTorch loop raises an error.
    """

    stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    config: Mapping[str, Any] | str | Path | None = None

    leading = "stage"
    choices = {"stage": (1, 2, 3, None)}


DeepSpeed.variants = (DeepSpeed(stage=1), DeepSpeed(stage=3))


@final
class ZeROGradients(Gradients):
    """Gradients of fragments, and ``p.grad`` until the model is sharded."""

    reduced = True
    engine: DeepSpeedEngine

    def holders(self) -> Sequence[Any]:
        """Return fragments too. Stages 2 and 3 reduce during backward."""
        parameters = self.engine.parameters
        return [*parameters, *self.engine.weights_of(parameters)]

    def pending(self) -> bool:
        zero = self.engine.zero
        return zero is not None and bool(zero.arrivals or zero.assigned())

    def hidden(self) -> bool:
        return self.engine.zero is not None

    @property
    def in_parts(self) -> bool:
        return self.engine.zero is not None

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Reduce pending gradients, and show them to ``optimizer``."""
        zero = self.engine.zero
        if zero is None:
            self._average()
        else:
            if optimizer is not None and zero.eager:
                refuse_inside_backward()
            zero.recover()
            zero.interruption.refuse()
            if self.pending():
                zero.flush()
                # A method of the model, or the raw module, may have changed buffers.
                self.buffers.synchronize()
        if optimizer is None:
            return
        self._clip()
        if zero is not None:
            # Now, because the user's pre-step hooks must see and edit the fragments' gradients.
            self.engine.steps[id(optimizer)].put_in(optimizer)

    def _average(self) -> None:
        """Average ``p.grad`` of a model without an optimizer."""
        engine, parameters = self.engine, self.engine.parameters
        if engine.distributed and any(p.grad is not None for p in parameters):
            what = f"the reduction of gradients ({engine.label})"
            if average_gradients_(what, parameters, engine.names, self.process):
                self.buffers.synchronize()

    def _clip(self) -> None:
        """Clip to ``gradient_clipping``, as DeepSpeed's step does."""
        max_norm = self.engine.configuration.clipping
        if max_norm > 0 and self.in_parts:
            self.clip_parts(max_norm, 2.0)
        elif max_norm > 0:
            nn.utils.clip_grad_norm_(self.engine.parameters, max_norm)

    def parts(self, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        weights = self.engine.weights_of(parameters)
        return [w.grad for w in weights if w.grad is not None], []

    def check(self, optimizer: Optimizer) -> None:
        super().check(optimizer)
        if self.engine.distributed:
            self.engine.configuration.check_optimizer(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        if self.engine.zero is not None:
            self.engine.zero.take_edits()
            self.announce_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        zero = self.engine.zero
        if zero is not None:
            self.engine.steps[id(optimizer)].take_out()
            for index, fragment in zero.fragments.items():
                if fragment.weights.grad is not None:
                    zero.used.add(index)
            zero.publish()


@final
class DeepSpeedEngine(Engine):
    """Shards a model with DeepSpeed, at stage 3 or for an optimizer."""

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
        #: Puts fragments into an optimizer's groups during a step, by the optimizer's ``id``.
        self.steps: dict[int, PartsInGroups] = {}
        self._zero_grads: dict[int, Override] = {}

    @classmethod
    def probe(cls) -> str:
        probe(torch.device(available()[0]))
        return ""

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        world_size = process.place.world_size
        Configuration(options).check(world_size)
        if world_size > 1:
            for refuse in (refuse_sparse, refuse_quantized, refuse_overlaps):
                refuse(module, cls.name)

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse:
        return Configuration(options).predict(tensors, world_size)

    def wrap(self) -> None:
        """Check parameters and precision. ``start`` shards the model."""
        self.configuration.check_precision(self.precision.name)
        if not self.distributed:
            return
        check_parameters(self.named, self.stage)
        for module in (self.entry, *self.module.modules()):
            if self.stage == 3 and hasattr(module, "_orig_mod"):
                raise BackendError(
                    "DeepSpeed stage 3 can't gather weights inside a torch.compile wrapper. "
                    "Use model.compile(), or stage=2."
                )
        # A loop may call zero_grad() of a submodule, such as model.critic of a GAN.
        for module in self.module.modules():
            self.undo.callback(watch_zero_grad(self, module).remove)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Shard rank 0's weights. Collective."""
        super().start(optimizers)
        shards = self.distributed and (self.stage == 3 or bool(optimizers))
        shards &= any(map(torch.is_floating_point, self.parameters))
        if shards and self.zero is None:
            self.zero = Stage3(self) if self.stage == 3 else Flat(self)
            self.zero.start(self.configuration.complete(self.parameters))
        if self.zero is None:
            return
        for optimizer in optimizers:
            raw, indices = optimizer.state, self.indices(optimizer)
            state = {self.names[i]: raw.pop(self.parameters[i], {}) for i in indices}
            self.holdings.take(optimizer, state)

    def run(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call a forward or method. Stage 3 gathers by module."""
        if self.zero is not None:
            self.zero.recover()
        if isinstance(self.zero, Stage3):
            return self.zero.call(function, args, kwargs)
        return function(*args, **kwargs)

    def attach(self, optimizer: Optimizer) -> None:
        self.gradients.check(optimizer)
        super().attach(optimizer)
        if self.distributed:
            self._zero_grads[id(optimizer)] = watch_zero_grad(self, optimizer)
            self.steps[id(optimizer)] = PartsInGroups(optimizer, self.weights_of)

    def detach(self, optimizer: Optimizer) -> None:
        if self.distributed:
            self.steps.pop(id(optimizer)).close()
            self._zero_grads.pop(id(optimizer)).remove()
        super().detach(optimizer)

    def weights_of(self, parameters: Sequence[Tensor]) -> list[Any]:
        """Return the weights of fragments, which an optimizer updates."""
        if self.zero is None:
            return list(parameters)
        fragments = filter(None, map(self.zero.fragment_of, parameters))
        return [fragment.weights for fragment in fragments]

    def indices(self, raw: nn.Module | Optimizer) -> list[int]:
        """Return the indices of a module's or optimizer's parameters."""
        numbers = {} if self.zero is None else self.zero.numbers
        parameters = raw.parameters() if isinstance(raw, nn.Module) else parameters_of(raw)
        return [numbers[id(p)] for p in parameters if id(p) in numbers]

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        # If DeepSpeed's start failed, there are no shards to gather.
        zero = self.zero if hasattr(self.zero, "zero") else None
        if zero is not None and not self.ended:
            self.holdings.restore(zero, optimizers)
        self.zero = None
        if zero is not None and self.ended:
            self.holdings.leave(zero, optimizers)
            if self.stage == 3:
                raise lost_weights(self)
