"""``deepspeed``: ZeRO stages 0 to 3. DeepSpeed divides, gathers and reduces; the user's own optimizer steps the parts."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError
from ...gradients.flat import average_gradients_, broadcast_
from ...precision import Accumulator
from ...process import Process
from ...process.control import Waiting
from ..engine import Context, Engine, Options, refuse_sparse
from ..memory import Footprint, MemoryUse
from . import config as configuration
from .library import release_groups
from .overrides import Overrides, call_zero_grad
from .partitions import Flat, Partitions
from .stage3 import Stage3
from .state import DeepSpeedHoldings
from .weights import plainly

# -- The user's own optimizer steps this rank's fragments, as if they were its parameters ------------------------------

logger = logging.getLogger("accel")


class Stepping(Engine, ABC):
    """Between ``before_step`` and ``after_step`` the fragments are in the parameters' places in the groups."""

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        self.zero: Partitions | None = None
        self.overrides = Overrides(self)
        self.held: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        self.stepping: Optimizer | None = None
        #: Every step clips to it; 0.0 for none.
        self.max_norm = 0.0
        #: Parameters with final gradients in fragments, and those of them that were stepped with and not dropped since.
        self._kept: set[int | None] = set()
        self._spent: set[int | None] = set()
        self._told = False
        #: Parameters whose assigned gradients took the place of others before the next forward.
        self._renewed: set[int] = set()
        # Where nothing is divided: whether what p.grad holds is known to be final, and who stepped with it.
        self._final = False
        self._stepped: set[int] = set()

    def find_unoptimized(self) -> None:
        """Their gradients stay whole, where the weights do."""
        super().find_unoptimized()
        if self.zero is not None and not isinstance(self.zero, Stage3):
            self.zero.whole_gradients = set(self.unoptimized)

    def take_edits(self) -> None:
        """Take over weights that the loop has written or replaced; refuse it where the next step would undo that.

        Raises:
            BackendError: names them.
        """
        if self.zero is not None and (edited := self.zero.take_edits()):
            raise BackendError(
                f"{', '.join(self.names[i] for i in edited[:5])} changed in place, which is lost: the optimizer steps other "
                "copies, divided over the ranks, of the shape and dtype that they had; set weights by load_state_dict(full) of "
                "the model's handle, on every rank"
            )

    def indices(self, optimizer: Optimizer) -> list[int]:
        """The numbers of the optimizer's parameters."""
        numbers = {id(p): i for i, p in enumerate(self.parameters)}
        held = {id(group): parameters for group, parameters in self.held}
        return [numbers[id(p)] for g in optimizer.param_groups for p in held.get(id(g), g["params"])]

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the norm over all ranks' parts."""
        if self.zero is not None:
            self.announce("accel.clip_grad_norm_")
        self.settle()
        with Waiting(self.process, "accel.clip_grad_norm_"):
            return self._clip(max_norm, norm_type)

    def _clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        if self.zero is None:
            return nn.utils.clip_grad_norm_(self.parameters, max_norm, norm_type)
        norm = self.zero.norm(float(norm_type), self.process.group, self.process.device)
        self.zero.scale((float(max_norm) / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def accumulators(self) -> Sequence[Accumulator]:
        """The fragments too: at stages 2 and 3 gradients come there while backward runs."""
        return self.parameters if self.zero is None else [*self.parameters, *self.zero.fragments.values()]

    def step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step; an exception leaves the groups as they were."""
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            self.hide()

    def before_step(self, optimizer: Optimizer) -> None:
        """From now on, what is final is shown to this optimizer."""
        self.hide()
        self.take_edits()
        if self.zero is not None:
            self.announce_step(optimizer)
        self.stepping = optimizer
        if self.zero is not None:  # at once: some optimizers write before their closure
            self._place(optimizer, self.zero)
        if self.log.entries:
            self._stepped.clear()
        elif id(optimizer) in self._stepped:  # without a backward in between: with gradients of unknown origin
            self._final = False
        self._stepped.add(id(optimizer))

    def unsettled(self) -> bool:
        """Whether gradients came since the last ``settle``."""
        return self.distributed and (bool(self.log.entries) or bool(self.assigned()))

    def hides_gradients(self) -> bool:
        """Whether fragments have any."""
        return self.zero is not None and (bool(self._kept) or self.unsettled())

    @plainly
    def assigned(self) -> list[int]:
        """The parameters whose ``p.grad`` no backward explains: it was assigned by hand. Local."""
        zero = self.zero
        if zero is None and self._final:
            return []
        found = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        came = set(self.log.entries) if found else set()
        if zero is not None:  # a backward's own is in a fragment, or waits
            found = [i for i in found if i not in zero.whole_gradients]
            return [i for i in found if self.parameters[i].grad is not zero.waiting.get(i) and ~i not in came]
        return [i for i in found if i not in came and ~i not in came]

    def renew(self, zero: Partitions) -> None:
        """Drop what assigned gradients take the place of, before a backward adds to them. Local."""
        if assigned := self.assigned():
            zero.replace(assigned)
            self.dropped(assigned, whole=False)
            self._renewed.update(assigned)

    def note_final(self) -> None:
        """Note that every gradient is final now."""
        if self.stepping is None:
            self._stepped.clear()
        self.log.fold(pending=False)
        self._renewed.clear()
        self._final = True

    def keep(self, assigned: Iterable[int]) -> None:
        """Note that the gradients since the last ``settle`` are in fragments now, and those that were assigned."""
        whole = set() if self.zero is None else self.zero.whole_gradients
        came = {entry for entry in self.log.entries if entry not in whole}
        self._kept.update(came, assigned)
        if not self._told and self._spent.intersection(came):
            self._told = True
            logger.warning(
                "gradients were added to those of an earlier step, which nothing has dropped since: where that is not meant, "
                "call zero_grad() of the optimizer or the model, since p.grad = None drops nothing under this backend"
            )

    def dropped(self, indices: Iterable[int], *, whole: bool) -> None:
        """Note that gradients were dropped; ``whole`` where none is left, not even zeros."""
        self._spent.difference_update(indices)
        if whole:
            self._kept.difference_update(indices)

    def show(self, optimizer: Optimizer) -> None:
        """Clip as the configuration says, then put the fragments in the parameters' places in the groups."""
        if self.max_norm > 0:
            self._clip(self.max_norm, 2.0)
        if self.zero is None:
            return
        self._place(optimizer, self.zero)
        for fragment in self.zero.fragments.values():
            fragment.weights.grad = None if fragment.grad is None else fragment.grad.to(fragment.weights.dtype)

    def _place(self, optimizer: Optimizer, zero: Partitions) -> None:
        for group in optimizer.param_groups if not self.held else ():
            self.held.append((group, group["params"]))
            fragments = [zero.fragments.get(zero.numbers[id(p)]) for p in group["params"]]
            group["params"] = [f.weights for f in fragments if f is not None]

    def steps_part(self, optimizer: Optimizer) -> bool:
        """Where there are fragments."""
        return self.zero is not None

    @contextlib.contextmanager
    def outside_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Fragments are in the groups; then every rank sees the weights."""
        if self.zero is None or self.held:  # or inside a step
            yield
            return
        self.take_edits()
        try:
            self._place(optimizer, self.zero)
            yield
        finally:
            self.hide()
        self.zero.spread()

    def hide(self) -> None:
        """Put the parameters back."""
        self.stepping = None
        for group, parameters in self.held:
            group["params"] = parameters
        if self.held and self.zero is not None:
            for fragment in self.zero.fragments.values():
                fragment.weights.grad = None
        self.held.clear()

    def before_closure(self, optimizer: Optimizer) -> None:
        """Every rank sees what the fragments are now."""
        if self.zero is not None:
            self.zero.spread()

    def after_step(self, optimizer: Optimizer) -> None:
        """Every rank sees the new weights."""
        self.hide()
        if self.zero is not None:
            self._spent = set(self._kept)
            self.zero.spread()


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
class DeepSpeedEngine(Stepping):
    """ZeRO by fragments: the gradients of this rank's parts are kept until ``zero_grad``, and the user's optimizer steps them."""

    name = "deepspeed"
    options_type = DeepSpeed
    holdings_type = DeepSpeedHoldings
    holdings: DeepSpeedHoldings
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
        self.overrides.put(self.module)

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
            state = {self.names[i]: optimizer.state.pop(self.parameters[i], {}) for i in self.indices(optimizer)}
            self.holdings.take(optimizer, state)
            self.holdings.guard.watch(optimizer)

    def _divide(self) -> None:
        masters = configuration.masters(self._config)
        offload = configuration.offloaded(self._config, "offload_optimizer", self.options.offload_optimizer)
        weights_on = torch.device("cpu") if offload else None
        arguments = (self.module, self.parameters, masters, weights_on, self.process, self.title)
        zero = Stage3(*arguments) if self.stage == 3 else Flat(self.stage, *arguments)
        numel = sum(p.numel() for p in self.parameters)
        dtype = next(p.dtype for p in self.parameters if p.is_floating_point())
        offload_parameters = configuration.offloaded(self._config, "offload_param", self.options.offload_parameters)
        self.zero = zero
        config = configuration.complete(
            self._config, self.stage, offload_parameters=offload_parameters, dtype=dtype, numel=numel
        )
        zero.start(config, self.process.device)
        if self.holdings.partial(None):
            self.holdings.guard.watch_modules(self.module, lambda m: any(True for _ in m.parameters()))

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
        self.overrides.put(optimizer)

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
        self.overrides.remove(optimizer)
        self.holdings.guard.release(optimizer)
        super().detach(optimizer)

    # -- state and end --------------------------------------------------------------------------------------------

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        """Whole weights, gradients and optimizer state in the user's own objects."""
        self.holdings.guard.release_modules()
        self.overrides.remove(self.module)
        zero = self.zero
        if zero is None or not hasattr(zero, "zero"):  # its start failed
            self.zero = None
            return
        if not self._ended:
            self.holdings.restore(zero, optimizers)
            self.zero = None
            return
        self.zero = None
        self.holdings.leave(zero, optimizers)
        if self.stage == 3:
            raise self.lost()

    def abandon(self, reason: str) -> None:
        """Let go of the groups that DeepSpeed holds for this model too."""
        super().abandon(reason)
        if self.zero is not None and hasattr(self.zero, "library"):
            release_groups([self.zero.library, *self.parameters])
