"""The engine contract: what every backend must be able to do, and the bookkeeping that all share."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import AccelError, BackendError, OptimizerError, refuse_unknown
from ...gradients.log import TrainableMask, explain
from ...handles import HiddenAttribute, ModelHandle, OptimizerHandle, end
from ...precision import Dtypes, LossScale, Precision, Replaced, restore_dtypes
from ...process import Process
from ...process.control import raise_lost, require_equal
from .drift import DriftGuard, watch_loads
from .gradients import Gradients
from .holdings import Holdings
from .memory import MemoryUse, TensorSize, add_uses
from .sequence import SequenceParallel, sequence_size
from .step import Stepper, refuse_changes, take_added_groups

logger = logging.getLogger("accel")

# -- What an engine is built with --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of the backends' options.

    Args:
        drift_check: compare what must be equal on all ranks at steps 1, 10, 100 and then every so many (None: 1,000, 0: never).
    """

    drift_check: int | None = None

    #: Options with which the engine works in another way than with the default ones; the contract's tests run them too.
    variants: ClassVar[tuple[Options, ...]] = ()
    #: Options of several ranks that a prediction of memory shows beside these.
    shown: ClassVar[tuple[Options, ...]] = ()
    #: The option that a value without a name is for, as in ``ACCEL_BACKEND=deepspeed:3``; none where this is empty.
    leading: ClassVar[str] = ""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Refuse (BackendError) other options than there are."""
        refuse_unknown(cls, args, options, BackendError)
        return object.__new__(cls)

    @final
    def __post_init__(self) -> None:
        """Refuse (BackendError) what is no value of an option by its type, and what ``check_values`` refuses."""
        for option in dataclasses.fields(self):
            value, kind = getattr(self, option.name), getattr(option.type, "__name__", option.type)
            if expected := _expected(kind, value):
                raise BackendError(f"{type(self).__name__}({option.name}={value!r}): expected {expected}")
        every = self.drift_check
        if every is not None and (type(every) is not int or every < 0):
            raise BackendError(f"{type(self).__name__}(drift_check={every!r}): expected a number of steps, 0 or None")
        self.check_values()

    def check_values(self) -> None:
        """Refuse (BackendError) other values that these options cannot have."""


def _expected(kind: Any, value: object) -> str:
    """What was expected of an option, by its type as the class declares it; empty where the value is one, or nothing is known."""
    if kind == "bool":
        return "" if type(value) is bool else "True or False"
    if kind == "int":
        return "" if type(value) is int and value > 0 else "a whole number of at least 1"
    if kind.startswith("Literal["):
        known: list[object] = [*re.findall(r"['\"](\w+)['\"]", kind), *([None] if kind.endswith("| None") else [])]
        return "" if value in known else f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
    if kind.startswith("bool | tuple[type"):
        classes = type(value) is tuple and all(isinstance(c, type) for c in value)
        return "" if type(value) is bool or classes else "True, False or a tuple of module classes"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions(Options):
    """Of engines whose forward is the model's own.

    Args:
        activation_checkpointing: blocks keep only their inputs, and compute their activations again in backward: those that
            repeat in a ModuleList or Sequential and have submodules (with ``wrap``: those that it chooses), or modules of
            the classes in a tuple.
    """

    activation_checkpointing: bool | tuple[type[nn.Module], ...] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOptions(LayerOptions):
    """Of engines whose ranks compute whole layers each, and average gradients.

    Args:
        sequence_parallel: so many neighbouring ranks have parts of each sequence (``accel.shard_sequence``), and exchange them
            for heads in attention. They read one batch.
        auto_refresh: look for a change of ``requires_grad`` before each forward, and compare it over the ranks.
    """

    sequence_parallel: int = 1
    auto_refresh: bool = True


@dataclass(frozen=True, slots=True)
class Context:
    """What an engine is built with beside its module."""

    process: Process
    precision: Precision
    loss_scale: LossScale
    options: Any
    #: The engine's number, the same on all ranks, and no other engine's.
    serial: int
    #: The parameters' values are read from files once ``start`` is over.
    reads: bool = False


class Engine(ABC):
    """One model's engine, with its ``gradients`` and its ``holdings``. Subclasses are final.

    *Local* methods run no collective; *collective* ones are called on every rank. docs/design.md shows who calls what.
    ``module`` is the user's raw one, ``entry`` what a forward calls: that, or its ``torch.compile`` wrapper.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[Options]]
    #: Packages beside torch: the module to import, and what to say to a user who lacks it.
    requires: ClassVar[dict[str, str]] = {}
    #: Keeps one model equal on all ranks; without it an optimizer at world size > 1 would train one model a rank.
    synchronizes: ClassVar[bool] = True
    #: When gradients are final, and who steps with them.
    gradients_type: type[Gradients] = Gradients
    #: What of the model and its optimizers lies on this rank.
    holdings_type: type[Holdings] = Holdings

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        self.module = module
        self.entry = entry
        self.process, self.options = context.process, context.options
        self.precision, self.loss_scale = context.precision, context.loss_scale
        self.serial, self.reads = context.serial, context.reads
        #: The user's class; a library may put another one in its place.
        self.kind = type(module).__name__
        #: Its name in whatever the ranks tell each other: models of one class must not be taken for each other.
        self.label = f"{self.kind} #{self.serial}"
        self.distributed = context.process.place.world_size > 1
        #: Why the process groups were ended, or the other ranks take no part in the end of this engine.
        self.ended = ""
        self.handle = ModelHandle(self)
        self.steppers: dict[int, Stepper] = {}
        self.optimizer_handles: dict[int, OptimizerHandle] = {}
        #: The raw ones, in the order in which they were added.
        self.optimizers: list[Optimizer] = []
        self.dtypes: Dtypes = []
        #: The children that a SyncBatchNorm replaced.
        self.replaced_modules: Replaced = []
        #: Takes away the forwards that are computed again.
        self.undo = contextlib.ExitStack()
        self.gradients = self.gradients_type(self)
        self._read_parameters()
        self.holdings = self.holdings_type(self)
        refreshes = getattr(self.options, "auto_refresh", True)
        self._watching_mask = self.gradients.reduced and self.distributed and refreshes
        self.restructured = self.started = False
        size = sequence_size(self.options, self.process)
        #: Where ranks have parts of sequences.
        self.sequence = SequenceParallel(self, size) if size > 1 else None
        compared = self.distributed and self.synchronizes
        self.drift = DriftGuard(self, self.options.drift_check if compared else 0)
        self._loads = watch_loads(self) if compared else None
        context.process.dependents.add(self)
        #: True if raw objects get methods that gather, because the backend may shard them.
        self._guards = self.distributed and self.holdings_type.partial is not Holdings.partial
        if self._guards:
            self.holdings.guard.watch_modules(module)

    def _read_parameters(self) -> None:
        """Take the module's parameters as they are: at first, and where ``start`` put others in their place."""
        self.named = dict(self.module.named_parameters())
        self.names, self.parameters = list(self.named), list(self.named.values())
        #: Identities of all parameter objects that are this engine's.
        self.known: Container[int] = {id(p) for p in self.parameters}
        self.mask = TrainableMask(self.parameters)
        self.gradients.follow(self.parameters)

    # -- before there is an engine --------------------------------------------------------------------------------

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        """Refuse what cannot work before anything changes. Local and pure."""
        return

    @classmethod
    def probe(cls) -> str:
        """Import what the backend needs, and say how it is limited on this machine; BackendError where it cannot run. Local."""
        for module in cls.requires:
            importlib.import_module(module)
        return ""

    @classmethod
    def replica(cls, options: Any, process: Process) -> tuple[int, int]:
        """This rank's data-parallel place, and how many there are: ranks of one place read one batch. Local."""
        size = sequence_size(options, process)
        return process.place.rank // size, process.place.world_size // size

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse | None:
        """Return the bytes on the rank that needs the most. Pure.

        By default every rank holds everything. None means that the backend can't train this module
        on so many ranks. Neither the backend's package nor a process group is needed.
        """
        return add_uses(tensor.use() for tensor in tensors)

    # -- life -----------------------------------------------------------------------------------------------------

    def wrap(self) -> None:
        """Build the backend's object around the module. Local."""
        return

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """What all ranks do together once each has wrapped and attached. Collective; again where optimizers are added."""
        if not self.started:
            self.holdings.synchronize()
            self.started = True
        self.gradients.find_unoptimized()

    def attach(self, optimizer: Optimizer) -> None:
        """Add an optimizer of this model's parameters; ``start`` follows. Local."""
        self.steppers[id(optimizer)] = Stepper(self, optimizer)
        handle = self.optimizer_handles[id(optimizer)] = OptimizerHandle(self, optimizer)
        HiddenAttribute.put(optimizer, weakref.ref(handle))
        self.optimizers.append(optimizer)
        if self._guards:
            self.holdings.guard.watch(optimizer)

    def detach(self, optimizer: Optimizer) -> None:
        """Give the optimizer back to its user. Local."""
        self.holdings.guard.release(optimizer)
        self.steppers.pop(id(optimizer)).close()
        HiddenAttribute.clear(optimizer)
        end(self.optimizer_handles.pop(id(optimizer)))
        self.optimizers[:] = [o for o in self.optimizers if o is not optimizer]

    def rebuild(self) -> None:
        """Make the changed trainable mask take effect; the ranks have agreed on it. Collective."""
        return

    def abandon(self, reason: str) -> None:
        """Let go of everything that uses a process group, because the groups are ended. Local."""
        self.ended = reason
        self.restructured = True
        self.drift.stop()

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        """Undo ``wrap`` and ``start``: module and optimizers as their author made them, with their trained values.

        Collective, but where ``ended`` says why the other ranks take no part: then what lies there is nan, and the error
        of ``lost_weights`` is raised.
        """
        return

    @final
    def teardown(self, alone: str = "") -> None:
        """End the engine: the raw module and optimizers are the user's own again.

        ``alone`` says why the other ranks take no part: then it is local, and AccelError comes at its end where weights lay on
        them. There ``p.grad`` that is not final is dropped.
        """
        self.ended = self.ended or alone
        with contextlib.ExitStack() as last:
            last.callback(end, self.handle)
            last.callback(self.process.dependents.discard, self)
            self._finish_gradients(self.ended)
            optimizers = list(self.optimizers)
            for optimizer in optimizers:
                with contextlib.suppress(OptimizerError):  # of a stranger, which stays what it is
                    take_added_groups(self, optimizer)
            last.callback(restore_dtypes, self.dtypes, optimizers)
            last.callback(self.undo.close)
            for optimizer in optimizers:
                self.detach(optimizer)
            self.gradients.close()
            self.drift.stop()
            if self._loads is not None:
                self._loads.remove()
            self.holdings.guard.release_modules()
            self.unwrap(optimizers)

    def _finish_gradients(self, problem: str) -> None:
        try:
            if not self.gradients.pending():
                problem = ""
            elif not problem:
                self.gradients.settle()
        except AccelError as error:
            problem = str(error)
        if problem:
            if any(p.grad is not None for p in self.parameters):
                logger.warning("teardown drops gradients of %s that cannot be made final: %s", self.label, problem)
            for parameter in self.parameters:
                parameter.grad = None

    # -- forwards -------------------------------------------------------------------------------------------------

    @abstractmethod
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function`` through the backend: ``entry``, which is a forward, or a method that may use parameters."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """``torch.compile`` the model in place, until ``teardown``."""
        kept = vars(self.module).get("_compiled_call_impl")
        self.undo.callback(vars(self.module).__setitem__, "_compiled_call_impl", kept)
        self.module.compile(*args, **kwargs)

    @final
    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward (``entry``), or a method of the user's, in the engine's precision."""
        if self.restructured:
            refuse_changes(self)
        if self.sequence is not None and not self.sequence.running:
            with self.sequence.forward(function, args, kwargs):
                return self.call(function, args, kwargs)
        if self._watching_mask and function is self.entry and torch.is_grad_enabled() and self.mask.changed():
            self.refresh()
        if self.drift.inputs is not None:
            self.drift.inputs.note(self, args, kwargs)
        inside_transform = torch._C._functorch.peek_interpreter_stack() is not None
        if inside_transform and function is self.entry and not self.holdings.partial(None):
            # A reducer can't look at the tensors of torch.func.grad. As a method it runs around the reducer.
            function = self.entry.__call__
        try:
            if self.precision.plain:
                return self.run(function, args, kwargs)
            return self.precision.call(self.run, (function, args, kwargs), {})
        except RuntimeError as error:
            name = "a forward" if function is self.entry else f"the method {getattr(function, '__name__', function)}"
            raise_lost(f"{name} ({self.label})", error)
            raise

    @final
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip the reduction of gradients in the backward passes of the forwards inside. Nests."""
        before = self.gradients.accumulating
        self.gradients.accumulate(True)
        try:
            yield
        finally:
            self.gradients.accumulate(before)

    def join(self) -> contextlib.AbstractContextManager[None]:
        """Let ranks run out of inputs at different times."""
        if self.distributed:
            raise BackendError(f"backend {self.name!r} does not support uneven inputs (accel.join)")
        return contextlib.nullcontext()

    @final
    def refresh(self) -> None:
        """Apply a change of ``requires_grad``, or refuse it (``accel.refresh_trainable``). Collective."""
        mask = self.mask.now()
        if self.gradients.reduced and self.distributed and mask != self.mask.known:
            self.compare("a change of requires_grad", mask, lambda masks: explain(masks, self.names))
            if self.gradients.pending() and not self.gradients.deferred:
                if self.gradients.accumulating:
                    raise BackendError(
                        "requires_grad changed while gradients are pending that were accumulated without reduction (accel."
                        "no_sync): end the accumulation with optimizer.step() before freezing or unfreezing"
                    )
                self.gradients.settle()  # a method's, say, which looks for no change, or what is reduced at the step
            self.rebuild()
        self.mask.known = mask

    # -- what the ranks tell each other ---------------------------------------------------------------------------

    @final
    def compare(
        self, what: str, value: Any = None, explain: Callable[[list[Any]], str] = str, beside: Any = None
    ) -> list[Any]:
        """All ranks do ``what`` to this model with one ``value``, or raise RankMismatchError; their ``beside``. Collective."""
        return require_equal(f"{what} ({self.label})", value, explain, beside)


def lost_weights(engine: Engine) -> AccelError:
    """The error of weights that lay on ranks which take no part in an engine's end."""
    return AccelError(
        f"the weights of {engine.label} are lost (nan now): parts of them lay on other ranks, and {engine.ended}; load a "
        "checkpoint"
    )
