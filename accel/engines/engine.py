"""The engine contract: what every backend must be able to do, and the bookkeeping that all share."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import AccelError, BackendError, OptimizerError, PrecisionError
from ..gradients.drift import DriftGuard
from ..gradients.log import BackwardEnd, GradientLog
from ..gradients.mask import TrainableMask, explain
from ..gradients.methods import Methods
from ..gradients.step import Stepper, check_parameters
from ..handles import ModelHandle, OptimizerHandle, Slot, end
from ..precision import Accumulator, Dtypes, LossScale, Precision, all_finite, here, restore_dtypes
from ..process import Process
from ..process.control import agree, announce, is_lost, lost, require_equal
from .holdings import Holdings
from .memory import Footprint, MemoryUse

# -- What an engine is built with --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of the backends' options.

    Args:
        drift_check: compare every so many steps what must be equal on all ranks (None: chosen by what it costs, 0: never).
    """

    drift_check: int | None = None

    @final
    def __post_init__(self) -> None:
        """Refuse anything but True and False where one of them is expected, and what ``check_values`` refuses.

        Raises:
            BackendError: names the option.
        """
        every = self.drift_check
        if every is not None and (type(every) is not int or every < 0):
            raise BackendError(f"{type(self).__name__}(drift_check={every!r}): expected a number of steps, 0 or None")
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if option.type in (bool, "bool") and type(value) is not bool:
                raise BackendError(f"{type(self).__name__}({option.name}={value!r}): expected True or False")
        self.check_values()

    def check_values(self) -> None:
        """Refuse other values that these options cannot have.

        Raises:
            BackendError: names the option.
        """


@dataclass(frozen=True, slots=True)
class Context:
    """What an engine is built with beside its module."""

    process: Process
    precision: Precision
    loss_scale: LossScale
    options: Any
    #: The engine's number, the same on all ranks, and no other engine's.
    serial: int


# -- The verbs of an engine about gradients: whether they are final, and making them so --------------------------------


class GradientVerbs:
    """As written here they serve engines that keep whole gradients in ``p.grad``."""

    module: nn.Module
    label: str
    parameters: list[nn.Parameter]
    log: GradientLog
    #: Gradients stay this rank's own until a step or clipping: a rebuild loses none, and their overflow is not seen before.
    defers: ClassVar[bool] = False
    #: Each rank has a part of the gradients, so that nothing is said of all of them without the others.
    partial_gradients: ClassVar[bool] = False

    def accumulators(self) -> Sequence[Accumulator]:
        """Everything in whose ``grad`` a backward may leave gradients of this model."""
        return self.parameters

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor in whose place a parameter of ``known`` stands in a graph."""
        return parameter

    def before_backward(self) -> None:
        """Hear that a backward is about to begin, of whatever graph."""
        return

    def has_gradients(self, *, zeros: bool) -> bool:
        """Whether there are any, judged alike on all ranks that saw the same backwards; ``zeros`` counts those of zeros."""
        mine = any(a.grad is not None and (zeros or bool(here(a.grad).any())) for a in self.accumulators())
        return any(agree(f"the gradients ({self.label})", mine)) if self.partial_gradients else mine

    def unsettled(self) -> bool:
        """Whether ``settle`` has something to do. Local."""
        return False

    def hides_gradients(self) -> bool:
        """Whether there are gradients that ``p.grad`` does not show, now or once they are final. Local."""
        return False

    def settle(self) -> None:
        """Make every gradient final. A collective where there is something to reduce."""
        if self.log.entries:
            self.log.fold(pending=False)

    def settle_unoptimized(self, indices: Sequence[int]) -> None:
        """At the end of a backward: make final what no step will, the gradients of parameters in no optimizer. Collective.

        Only for engines that override it; in the others these are final by themselves.
        """
        return

    def settle_for(self, optimizer: Optimizer) -> None:
        """``settle`` for a step; an engine may leave to each rank the gradients that it steps. Collective."""
        self.settle()

    def settle_clipped(self, gradients: Sequence[torch.Tensor]) -> bool:
        """``settle`` where torch clips these gradients of the model; True where it cannot, as it does not see them all."""
        before = sum(p.grad is not None for p in self.parameters)
        self.settle()
        return sum(p.grad is not None for p in self.parameters) > before

    def finite(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer``'s final gradients hold neither inf nor nan, judged alike on all ranks."""
        mine = all_finite(optimizer)
        return all(agree(f"the gradients' finiteness ({self.label})", mine)) if self.partial_gradients else mine

    @final
    def refuse_plain_gradients(self, *, zeros: bool) -> None:
        """Refuse gradients of an unscaled loss where accel scales it; ``zeros`` refuses zero gradients too.

        Raises:
            PrecisionError: says what to call instead.
        """
        if self.log.plain and self.has_gradients(zeros=zeros):
            raise PrecisionError(
                f"gradients of this '16-mixed' {type(self.module).__name__} came from a plain loss.backward(), so that the "
                "loss was not scaled: call accel.backward(loss), or use torch.amp.GradScaler as in raw PyTorch"
            )


def refuse_sparse(module: nn.Module, backend: str) -> None:
    """Refuse embeddings with sparse gradients, for an engine that cuts gradients into parts.

    Raises:
        BackendError: names them.
    """
    names = [n for n, m in module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    if names:
        raise BackendError(
            f"backend {backend!r} cannot divide the sparse gradients of {', '.join(names[:5])}: use sparse=False there, or "
            "a backend with whole gradients"
        )


logger = logging.getLogger("accel")


class Engine(GradientVerbs, ABC):
    """One model's engine. Subclasses are final; docs/design.md says what each verb must mean.

    Args:
        module: the user's raw module.
        entry: what a forward calls: the raw module or its ``torch.compile`` wrapper.
        context: process, precision, loss scale and options.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[Options]]
    #: Where its state lies.
    holdings_type: ClassVar[type[Holdings]] = Holdings
    #: Packages beside torch: the module to import, and what to install.
    requires: ClassVar[dict[str, str]] = {}
    #: What else to say to a user who lacks them.
    hint: ClassVar[str] = ""
    #: Keeps one model equal on all ranks; without it an optimizer at world size > 1 would train one model a rank.
    synchronizes: ClassVar[bool] = True
    #: Needs ``rebuild`` when ``requires_grad`` changes, and the log of gradients.
    reduces: ClassVar[bool] = False
    #: Over several ranks a gradient lies on one of them only, so that a norm of all of them adds up over the ranks.
    spreads: ClassVar[bool] = False
    #: ``after_step`` has something to do.
    hears_steps: ClassVar[bool] = False
    #: Options with which the engine works in another way than with the default ones; the contract's tests run them too.
    variants: ClassVar[tuple[Options, ...]] = ()
    #: Tells by the log which gradients are reduced; else by other means.
    logs: ClassVar[bool] = True
    #: Must prepare the steps of optimizers too that were never given to ``setup``.
    hears_strangers: ClassVar[bool] = False
    #: Gives values to parameters on the meta device by itself, in ``start``.
    materializes: ClassVar[bool] = False
    #: A step overwrites or spreads what one rank alone wrote to a weight, so that values tell nothing of it later.
    undoes_writes: bool = False
    #: The objects in ``parameters`` are each rank's part of a weight, and every rank does the same with them.
    divides_weights: ClassVar[bool] = False

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        self.module = module
        self.entry = entry
        self.process, self.options = context.process, context.options
        self.precision, self.loss_scale = context.precision, context.loss_scale
        self.serial = context.serial
        #: Its name in whatever the ranks tell each other: models of one class must not be taken for each other.
        self.label = f"{type(module).__name__} #{self.serial}"
        self.handle = ModelHandle(self)
        self.steppers: dict[int, Stepper] = {}
        self.methods: dict[int, Methods] = {}
        self.optimizer_handles: dict[int, OptimizerHandle] = {}
        self.dtypes: Dtypes = []
        self.distributed = context.process.place.world_size > 1
        self.log = GradientLog(())
        self.backward_end = BackwardEnd((), self._end_backward)
        #: The numbers of the parameters that are in no optimizer: a loop may update them by hand.
        self.unoptimized: list[int] = []
        #: Inside ``no_sync``; whether a backward there left gradients that ``settle_unoptimized`` would have made final.
        self.accumulating = self.held_back = False
        self.read_parameters()
        self.holdings = self.holdings_type(self)
        self._watching = self.reduces and self.distributed and getattr(self.options, "auto_refresh", True)
        self._restructured = self._started = self._calling = False
        self._ended = ""
        compared = self.distributed and self.synchronizes
        self.drift = DriftGuard(self, self.options.drift_check if compared else 0)
        #: For messages of what the ranks do together.
        self.title = f"{self.label}, backend {self.name!r}"
        context.process.dependents.add(self)

    def read_parameters(self) -> None:
        """Take the module's parameters as they are: at first, and where ``start`` put others in their place."""
        named = dict(self.module.named_parameters())
        self.names = list(named)
        self.parameters = list(named.values())
        #: Identities of all parameter objects that are this engine's.
        self.known: Container[int] = {id(p) for p in self.parameters}
        self.mask = TrainableMask(self.parameters)
        self.watched = self.precision.scaled or (self.distributed and (self.reduces or self.spreads))
        logged = self.precision.scaled or (self.distributed and self.reduces and self.logs)
        self.log.close()
        self.log = GradientLog(self.parameters if logged else ())

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        """Refuse what cannot work before anything changes. Local and pure."""
        return

    @classmethod
    @abstractmethod
    def predict(cls, footprint: Footprint, options: Any, world_size: int) -> tuple[MemoryUse, ...]:
        """What each rank will hold, by rank; nothing where the backend does not take such a module. Pure.

        It needs neither the backend's package nor a process group.
        """

    @abstractmethod
    def wrap(self) -> None:
        """Build the backend's object around the module. Local."""

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """What all ranks do together once each has wrapped and attached. Collective; again where optimizers are added."""
        if not self._started:
            self.holdings.synchronize()
            self._started = True
        self.find_unoptimized()

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass through the backend."""

    @abstractmethod
    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        """Undo ``wrap`` and ``start``: module and optimizers as their author made them, with their trained values.

        Where ``_ended`` says why the other ranks take no part, by itself: what lies there is nan, then ``lost`` is raised.
        """

    @classmethod
    def replica(cls, process: Process) -> tuple[int, int]:
        """This rank's place among the replicas of the model, and their number: ranks of one replica read one batch."""
        return process.place.rank, process.place.world_size

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip the reduction of gradients in the backward passes of the forwards inside."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    def find_unoptimized(self) -> None:
        """See which parameters are in no optimizer's groups. Local."""
        optimizers = [stepper.optimizer for stepper in self.steppers.values()]
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self.unoptimized = [i for i, p in enumerate(self.parameters) if id(p) not in held]
        self.backward_end.close()
        if self.distributed and type(self).settle_unoptimized is not GradientVerbs.settle_unoptimized:
            self.backward_end = BackwardEnd([self.parameters[i] for i in self.unoptimized], self._end_backward)

    @final
    def _end_backward(self) -> None:
        if self.accumulating:
            self.held_back = True
        elif not self._ended:
            self.settle_unoptimized(self.unoptimized)
            self.held_back = False

    def join(self) -> contextlib.AbstractContextManager[None]:
        """Let ranks run out of inputs at different times."""
        if self.distributed:
            raise BackendError(f"backend {self.name!r} does not support uneven inputs (accel.join)")
        return contextlib.nullcontext()

    def rebuild(self) -> None:
        """Make the changed trainable mask take effect; the ranks have agreed on it."""
        return

    def abandon(self, reason: str) -> None:
        """Let go of everything that uses a process group, because the groups are ended; local."""
        self._ended = reason
        self._restructured = True
        self.drift.stop()

    @final
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What calling the handle does."""
        if self._restructured:
            self._verify()
        if self._watching and torch.is_grad_enabled() and self.mask.changed():
            self.refresh()
        try:
            if self.precision.plain:
                return self.run(*args, **kwargs)
            return self.precision.call(self.run, args, kwargs)
        except RuntimeError as error:
            self._explain("a forward", error)
            raise

    @final
    def _explain(self, what: str, error: RuntimeError) -> None:
        """Raise accel's error where the connection to another rank was lost."""
        if is_lost(error):
            raise lost(f"{what} ({self.title})", error) from error

    @final
    def announce(self, what: str, details: Hashable = None) -> None:
        """Say that a collective is next that has no comparison of its own. Collective where it was not to be expected."""
        announce(self.process, f"{what} ({self.title})", details)

    @final
    def announce_step(self, optimizer: Optimizer) -> None:
        """Say that a step is next, which comes after equally many backwards on all ranks."""
        steppers = list(self.steppers)
        self.announce("optimizer.step()", steppers.index(id(optimizer)) if id(optimizer) in steppers else None)
        self.process.order.restart()

    @final
    def method(self, bound: MethodType, *args: Any, **kwargs: Any) -> Any:
        """A method of the user's, in the engine's precision; ``settle`` reduces the gradients that it makes."""
        if self._restructured:
            self._verify()
        try:
            return self.precision.call(self.compute, (bound, *args), kwargs)
        except RuntimeError as error:
            self._explain(f"the method {bound.__name__}", error)
            raise

    def compute(self, bound: MethodType, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's that may use parameters."""
        return bound(*args, **kwargs)

    @final
    def restructured(self) -> None:
        """Note that a parameter or submodule was registered somewhere in the module."""
        self._restructured = True

    def canonical(self, parameter: nn.Parameter) -> nn.Parameter:
        """The one of ``parameters`` that a parameter of the module stands for."""
        return parameter

    def _verify(self) -> None:
        if self._ended:
            raise AccelError(f"the process groups were ended, this engine cannot go on: {self._ended}")
        found = {n: id(self.canonical(p)) for n, p in self.module.named_parameters()}
        known = {n: id(p) for n, p in zip(self.names, self.parameters, strict=True)}
        changed = sorted(n for n in found.keys() | known.keys() if found.get(n) != known.get(n))
        if changed:
            raise BackendError(
                f"parameters of this {type(self.module).__name__} were added or replaced after accel.setup: "
                f"{', '.join(changed[:5])}; call raw = accel.teardown(model) and set it up again"
            )
        self._restructured = False

    @final
    def refresh(self) -> None:
        """Apply a change of ``requires_grad``, or refuse it (``accel.refresh_trainable``). Collective."""
        mask = self.mask.now()
        if self.reduces and self.distributed and mask != self.mask.known:
            self.compare("a change of requires_grad", mask, lambda masks: explain(masks, self.names))
            if self.unsettled() and not self.defers:
                raise BackendError(
                    "requires_grad changed while gradients are pending that were accumulated without reduction (accel."
                    "no_sync): end the accumulation with optimizer.step() before freezing or unfreezing"
                )
            self.rebuild()
        self.mask.known = mask

    @final
    def compare(self, what: str, value: Any, explain: Callable[[list[Any]], str] = str) -> None:
        """Make sure that all ranks do ``what`` to this model with the same ``value``; else every rank raises."""
        require_equal(f"{what} ({self.label})", value, explain)

    def attach(self, optimizer: Optimizer) -> None:
        """Add an optimizer of this model's parameters; ``start`` follows. Local."""
        stepper = self.steppers[id(optimizer)] = Stepper(self, optimizer)
        if self.distributed:
            self.methods[id(optimizer)] = Methods(self, optimizer, stepper)
        handle = self.optimizer_handles[id(optimizer)] = OptimizerHandle(self, optimizer)
        Slot.put(optimizer, weakref.ref(handle))
        self.drift.follow(optimizer)

    def detach(self, optimizer: Optimizer) -> None:
        """Give the optimizer back to its user."""
        self.drift.leave(optimizer)
        self.steppers.pop(id(optimizer)).close()
        if methods := self.methods.pop(id(optimizer), None):
            methods.close()
        Slot.clear(optimizer)
        end(self.optimizer_handles.pop(id(optimizer)))
        self.find_unoptimized()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse parameters that this engine would not keep equal on all ranks."""
        if self.distributed:
            check_parameters(optimizer, self.known, self.module, type(optimizer).__name__)

    def step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step ``optimizer``; its own ``step`` does the same, through its hooks."""
        return optimizer.step(*args, **kwargs)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The raw optimizers, in the order in which they were added."""
        return [stepper.optimizer for stepper in self.steppers.values()]

    @final
    def skips(self, optimizer: Optimizer) -> tuple[bool, int]:
        """Whether the last step of ``optimizer`` was skipped for an overflow, and how many were."""
        stepper = self.steppers[id(optimizer)]
        return bool(stepper.skipped), int(stepper.skips)

    def zero_grad(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Drop the optimizer's gradients, by its own ``zero_grad`` with its own arguments."""
        return optimizer.zero_grad(*args, **kwargs)

    def add_param_group(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Add a group to ``optimizer``, which is left as it was when the group is refused."""
        optimizer.add_param_group(group)
        try:
            self.check_optimizer(optimizer)
        except OptimizerError:
            optimizer.param_groups.pop()
            raise
        self.find_unoptimized()

    @final
    def prepare_step(self, optimizer: Optimizer, *, by_grad_scaler: bool = False, in_closure: bool = False) -> None:
        """Make the gradients final before ``optimizer`` steps, or before a closure in its step returns, or refuse it."""
        if self._restructured:
            self._verify()
        if self.precision.scaled and not by_grad_scaler:
            self.refuse_plain_gradients(zeros=True)
        try:
            if not in_closure:
                self.before_step(optimizer)
            self.settle_for(optimizer)
        except RuntimeError as error:
            self._explain("the reduction of gradients before a step", error)
            raise
        if self.drift.judged:  # not before all ranks have come as far as this
            self.drift.begin()
        if self.precision.scaled:
            self.log.accept()

    def before_step(self, optimizer: Optimizer) -> None:
        """Hear that ``optimizer`` is about to step. Local."""
        return

    def before_closure(self, optimizer: Optimizer) -> None:
        """Hear that the closure in a step of ``optimizer`` is about to run, with weights that the step may have moved."""
        return

    def after_step(self, optimizer: Optimizer) -> None:
        """Hear that ``optimizer`` has stepped, where ``hears_steps``."""
        return

    def steps_part(self, optimizer: Optimizer) -> bool:
        """Whether each rank steps other parameters, or other parts of them."""
        return False

    def outside_step(self, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
        """Inside, ``optimizer`` writes weights as in a step; afterwards every rank sees them. Collective where ``steps_part``."""
        return contextlib.nullcontext()

    @final
    def call_method(self, optimizer: Optimizer, call: Callable[[], Any], gradients: bool) -> Any:
        """Call a method of the optimizer's own class that writes weights or state. Collective where there is something to do."""
        if self._calling:  # one calls another
            return call()
        if gradients:
            self.prepare_step(optimizer, in_closure=True)
        elif self._restructured:
            self._verify()
        self._calling = True
        try:
            with self.outside_step(optimizer):
                return call()
        finally:
            self._calling = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the global norm of the model's gradients; returns the norm before."""
        self.settle()
        return nn.utils.clip_grad_norm_(self.parameters, max_norm, norm_type)

    @final
    def meet(self, what: str) -> None:
        """Make sure that all ranks do ``what`` to this very model, where the engine needs them. Collective there, like it.

        Raises:
            RankMismatchError: another rank does something else, or to another model; on every rank.
        """
        if self.distributed and self.partial_gradients and not self._ended:
            agree(f"{what} ({self.label})", None)

    @final
    def teardown(self, alone: str = "") -> None:
        """End the engine: the raw module and optimizers are the user's own again.

        Args:
            alone: why the other ranks take no part; empty where they do. Then it is local, and ``p.grad`` that is not
                final is dropped.

        Raises:
            AccelError: weights lay on ranks that take no part, and are lost; the engine has ended all the same.
        """
        self._ended = self._ended or alone
        with contextlib.ExitStack() as last:
            last.callback(end, self.handle)
            last.callback(self.process.dependents.discard, self)
            self._finish_gradients()
            optimizers = [stepper.optimizer for stepper in self.steppers.values()]
            last.callback(restore_dtypes, self.dtypes, optimizers)
            for optimizer in optimizers:
                self.detach(optimizer)
            self.log.close()
            self.backward_end.close()
            self.drift.stop()
            self.unwrap(optimizers)

    def _finish_gradients(self) -> None:
        problem = ""
        try:
            if self.unsettled():
                problem = self._ended
                if not problem:
                    self.settle()
        except AccelError as error:
            problem = str(error)
        if problem:
            if any(p.grad is not None for p in self.parameters):
                logger.warning("teardown drops gradients of %s that cannot be made final: %s", self.label, problem)
            for parameter in self.parameters:
                parameter.grad = None

    @final
    def lost(self) -> AccelError:
        """The error of weights that lay on ranks which take no part in the engine's end."""
        return AccelError(
            f"the weights of {self.label} are lost (nan now): parts of them lay on other ranks, and {self._ended}; load a "
            "checkpoint"
        )
