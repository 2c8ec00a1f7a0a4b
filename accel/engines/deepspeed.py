"""``deepspeed``: ZeRO stages 0 to 3. DeepSpeed divides, gathers and reduces; the user's own optimizer steps the parts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import BackendError, OptimizerError
from ..flat import average_gradients_, broadcast_
from ..footprint import Footprint, MemoryUse
from ..process import Process
from . import _deepspeed_config as configuration
from . import _deepspeed_steps as steps
from ._copies import refuse_copies
from ._deepspeed_flat import Flat
from ._deepspeed_guards import call_zero_grad
from ._deepspeed_library import release_groups
from ._deepspeed_partitions import Partitions
from ._deepspeed_sharded import Sharded
from ._gradients import refuse_sparse
from .base import Context, Options

logger = logging.getLogger("accel")

#: Optimizers that treat each element by itself, so that a part of a parameter is stepped as in the whole.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
)
#: Said of parameters.
_UNSEEN: Final = (
    "got gradients, but no optimizer steps them, and at stage 3 a loop cannot update them by hand: p.grad is None, and the "
    "weights are divided over the ranks"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed(Options):
    """Options of ``deepspeed``.

    Args:
        stage: 0 divides nothing, 1 the optimizer's state, 2 the gradients as well, 3 the weights as well
            (None: the configuration's, else 2).
        offload_optimizer: the weights that the optimizer steps, their gradients and its state are in CPU memory.
        offload_parameters: the parts of the weights are in CPU memory (stage 3).
        config: a DeepSpeed configuration, or the path of one as JSON. What contradicts a raw loop is refused by its key.
        auto_refresh: look for a change of ``requires_grad`` before each forward.
    """

    stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    config: Mapping[str, Any] | str | Path | None = None
    auto_refresh: bool = True

    def check_values(self) -> None:
        """Refuse an unknown stage."""
        if self.stage not in (None, 0, 1, 2, 3):
            raise BackendError(f"DeepSpeed(stage={self.stage!r}): expected 0, 1, 2 or 3")


@final
class DeepSpeedEngine(steps.Stepping):
    """ZeRO by fragments: the gradients of this rank's parts are kept until ``zero_grad``, and the user's optimizer steps them."""

    name = "deepspeed"
    options_type = DeepSpeed
    requires = {"deepspeed": "deepspeed"}
    reduces = partial_gradients = True
    hears_steps = True
    variants = tuple(DeepSpeed(stage=stage) for stage in (0, 1, 3))
    options: DeepSpeed

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        self._config = configuration.read(self.options.config)
        self.max_norm = configuration.clipping(self._config)
        self.stage = configuration.stage_of(self._config, self.options.stage)
        self.undoes_writes = bool(self.stage)
        self._failed = False
        self._stale_buffers = False
        #: At stage 3, parameters in no optimizer that got gradients in the last backward.
        self._unseen: list[int] = []

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        """Refuse a configuration that contradicts the options or the loop."""
        config = configuration.read(options.config)
        stage = configuration.stage_of(config, options.stage)
        configuration.check(config, stage)
        configuration.check_divided(config, stage, options, process.place.world_size)
        if process.place.world_size > 1:
            refuse_sparse(module, cls.name)

    @classmethod
    def predict(cls, footprint: Footprint, options: Any, world_size: int) -> tuple[MemoryUse, ...]:
        """What the stage divides, divided."""
        config = configuration.read(options.config)
        return configuration.predicted(footprint, config, configuration.stage_of(config, options.stage), world_size)

    def wrap(self) -> None:
        """Refuse what needs the precision; DeepSpeed itself divides in ``start``."""
        configuration.check(self._config, self.stage, self.precision.name)
        if not self.distributed or not self.stage:
            return
        configuration.refuse_parameters(self.parameters, self.names)
        if self.stage == 3 and self.entry is not self.module:
            raise BackendError("a torch.compile wrapper with DeepSpeed stage 3: its weights come and go; use stage 2")
        self.guards.module(self.module)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Rank 0's weights; then DeepSpeed divides them, if it has not yet; then the optimizers' state follows."""
        super().start(optimizers)
        if not self.distributed or not self.stage:
            return
        if (
            self.zero is None
            and (self.stage == 3 or optimizers)
            and any(p.is_floating_point() for p in self.parameters)
        ):
            self._divide()
            self.find_unoptimized()
        for optimizer in optimizers if self.zero is not None else ():
            self.take_over(optimizer, {i: optimizer.state.pop(self.parameters[i], {}) for i in self.indices(optimizer)})
            refuse_copies(optimizer)

    def _divide(self) -> None:
        masters = configuration.masters(self._config)
        offload = configuration.offloaded(self._config, "offload_optimizer", self.options.offload_optimizer)
        weights_on = torch.device("cpu") if offload else None
        arguments = (self.module, self.parameters, masters, weights_on, self.process, self.title)
        zero = Sharded(*arguments) if self.stage == 3 else Flat(self.stage, *arguments)
        numel = sum(p.numel() for p in self.parameters)
        dtype = next(p.dtype for p in self.parameters if p.is_floating_point())
        offload_parameters = configuration.offloaded(self._config, "offload_param", self.options.offload_parameters)
        self.zero = zero
        config = configuration.complete(
            self._config, self.stage, offload_parameters=offload_parameters, dtype=dtype, numel=numel
        )
        zero.start(config, self.process.device)

    # -- forward and gradients ------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Forward; at stage 3 each module gathers its weights."""
        grad = torch.is_grad_enabled()
        self._stale_buffers = self._stale_buffers or (
            grad and self.distributed and any(True for _ in self.module.buffers())
        )
        if self.zero is None:
            return self.entry(*args, **kwargs)
        with self._noticing(), self.zero.forward():
            return self.entry(*args, **kwargs)

    def compute(self, bound: MethodType, *args: Any, **kwargs: Any) -> Any:
        """As a forward, so that the root module's own weights are gathered too."""
        if self.zero is None:
            return bound(*args, **kwargs)
        with self._noticing():
            return self.zero.call(bound, args, kwargs)

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        self._recover()
        assert self.zero is not None
        if self.stage == 3:
            self._refuse_unseen()
            self.take_edits()
        self.renew(self.zero)
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def _recover(self) -> None:
        """Start afresh after a forward or backward that ended half-way."""
        assert self.zero is not None
        if self.zero.broken:
            raise BackendError(
                "an exception ended a backward, so that its gradients are incomplete: call zero_grad() and go on"
            )
        if self._failed and torch._C._current_graph_task_id() == -1:
            self.compare("a new start after an exception", True)
            self.zero.reset()
            self._failed = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients in ``p.grad`` in the backwards inside."""
        with super().no_sync():
            if self.zero is None:
                yield
                return
            before, self.zero.local = self.zero.local, True
            try:
                yield
            finally:
                self.zero.local = before

    def settle(self) -> None:
        """Reduce what no hook has reduced; what the hooks did is compared over the ranks."""
        if not self.distributed:
            super().settle()
            return
        if self.zero is not None and self.zero.broken:
            self._recover()
        if self.unsettled():
            if self.zero is None:
                self.compare("a reduction of gradients", True)
                average_gradients_(self.parameters, self.process.group)
            else:
                assigned = self.assigned()
                entries = tuple(self.log.entries) if self.zero.eager else ()
                came = hash((entries, tuple(assigned), tuple(sorted(self._renewed))))
                self.compare("the gradients of a step", came, lambda _: "other parameters, or in another order")
                self.zero.replace(assigned)
                self.dropped(assigned, whole=False)
                self.zero.flush(self.process.group)
                self.keep(assigned)
                if self.held_back:
                    self.settle_unoptimized(self.unoptimized)
                    self.held_back = False
            self.note_final()
            if self._stale_buffers:
                broadcast_([b.data for b in self.module.buffers()], self.process.group)
                self._stale_buffers = False
        if self.stepping is not None:
            self.show(self.stepping)

    def settle_unoptimized(self, indices: Sequence[int]) -> None:
        """Average them where they are whole; at stage 3 nothing can be updated by hand."""
        if self.stage == 3 and self.zero is not None:
            self._note_unseen(indices)
        elif self.zero is None and not self.steppers:
            self.settle()
        else:
            self.compare("a reduction of gradients in no optimizer", True)
            average_gradients_([self.parameters[i] for i in indices], self.process.group)

    def _note_unseen(self, indices: Sequence[int]) -> None:
        came = {i if i >= 0 else ~i for i in self.log.entries if i is not None}
        unseen = [i for i in indices if i in came]
        if unseen and not self._unseen:
            logger.warning(
                "%s %s: freeze what is not to be trained (backend %r reduces these gradients too), or use stage 2",
                ", ".join(self.names[i] for i in unseen[:5]),
                _UNSEEN,
                self.name,
            )
        self._unseen = unseen

    def _refuse_unseen(self) -> None:
        if self.steppers or not self._unseen or not torch.is_grad_enabled():
            return
        if unseen := [self.names[i] for i in self._unseen if self.parameters[i].requires_grad]:
            raise BackendError(
                f"{', '.join(unseen[:5])} {_UNSEEN}: train by an optimizer that is given to accel.setup, freeze the model "
                "(requires_grad_(False)), compute without gradients (torch.no_grad()), or use stage 2"
            )

    def zero_grad(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Drop gradients here and in ``p.grad``."""
        if self.zero is None:
            return type(optimizer).zero_grad(optimizer, *args, **kwargs)
        indices = self.indices(optimizer)
        out, dropped = call_zero_grad(optimizer, [self.parameters[i] for i in indices], args, kwargs)
        self._drop(self.zero, indices, dropped)
        return out

    def drop_gradients(self, parameters: Iterable[nn.Parameter], set_to_none: bool) -> bool:
        """``zero_grad`` of a module with these parameters; False where that is not for fragments."""
        numbers = [self.zero.numbers.get(id(p)) for p in parameters] if self.zero is not None else []
        indices = [i for i in numbers if i is not None]
        if self.zero is None or len(indices) < len(numbers):
            return False
        self._drop(self.zero, indices, set_to_none)
        return True

    def _drop(self, zero: Partitions, indices: Sequence[int], set_to_none: bool) -> None:
        if zero.broken:
            zero.backwards.clear()
            self._failed = True
        zero.drop(indices, set_to_none)
        self.dropped(indices, whole=set_to_none)
        if set_to_none:
            self.log.drop(set(indices))

    # -- step -----------------------------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """Refuse what cannot step parts of parameters."""
        self.check_optimizer(optimizer)
        super().attach(optimizer)
        self.guards.optimizer(optimizer)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that would see a part of a parameter as another parameter."""
        super().check_optimizer(optimizer)
        allowed = self._config.get("zero_allow_untested_optimizer") is True
        if self.stage and self.distributed and type(optimizer) not in _ELEMENTWISE and not allowed:
            raise OptimizerError(
                f"{type(optimizer).__name__} with DeepSpeed stage {self.stage}: each rank steps its part of each parameter as a "
                "flat tensor, which is known to be exact for torch's elementwise optimizers (SGD, Adam, AdamW, ...); use "
                "stage 0, or, if this one is elementwise too, config={'zero_allow_untested_optimizer': True}"
            )

    def detach(self, optimizer: Optimizer) -> None:
        """Without the guards it is the user's own again."""
        self.hide()
        self.guards.remove(optimizer)
        super().detach(optimizer)

    # -- state and end --------------------------------------------------------------------------------------------

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        """Whole weights, gradients and optimizer state in the user's own objects."""
        self.guards.close()
        zero, self.zero = self.zero, None
        if zero is None:
            return
        if not hasattr(zero, "zero"):
            return  # its start failed
        if not self._ended:
            self.give_back(zero, optimizers)
            return
        self.leave(zero, optimizers)
        if self.stage == 3:
            raise self.lost()

    def abandon(self, reason: str) -> None:
        """Let go of the groups that DeepSpeed holds for this model too."""
        super().abandon(reason)
        if self.zero is not None and hasattr(self.zero, "library"):
            release_groups([self.zero.library, *self.parameters])
