"""The interface of engines, and their common code."""

from __future__ import annotations

import contextlib
import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import AccelError, BackendError
from ...facts import first_difference
from ...gradients.watch import REQUIRES_GRAD, trainable
from ...handles import ModelHandle, end
from ...precision import LossScale, Precision, Replaced
from ...process import Process, reason_of
from ...process.control import raise_lost, require_equal
from .absent import as_plain
from .drift import DriftGuard, before_load
from .gradients import Gradients
from .holdings import Holdings
from .memory import MemoryUse, TensorSize, add_uses
from .options import Options
from .placement import REPLICATED, Placements
from .raw_objects import Args, Function, Kwargs
from .sequence import SequenceParallel, sequence_size
from .step import Stepper, refuse_changes, refuse_steps

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("accel")


@dataclass(frozen=True, slots=True)
class Context:
    """The arguments of an engine, besides its module."""

    process: Process
    precision: Precision
    loss_scale: LossScale
    options: Any
    #: Unique to an engine, and equal on all ranks.
    serial: int
    #: True if the weights are read from files after ``start``.
    reads: bool = False


class Engine(ABC):
    """Runs a model on a backend, with its ``gradients`` and ``holdings``.

    A *local* method doesn't communicate. A *collective* method must be
    called on every rank. docs/internals.md shows the order of the calls.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[Options]]
    #: Packages besides torch: the module to import, and the argument for ``pip install``.
    requires: ClassVar[dict[str, str]] = {}
    #: False if each rank would train its own model, so an optimizer on several ranks raises.
    synchronizes: ClassVar[bool] = True
    #: How tensors are distributed over ranks. A single rank holds everything.
    placements: Placements = REPLICATED
    gradients_type: type[Gradients] = Gradients
    holdings_type: type[Holdings] = Holdings
    #: The device mesh of the model, if it has one.
    mesh: DeviceMesh | None = None

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        #: The user's raw module, and the callable for a forward: ``module`` or a compile wrapper.
        self.module, self.entry = module, entry
        self.process = context.process
        self.options = context.options
        self.precision = context.precision
        self.loss_scale = context.loss_scale
        self.serial = context.serial
        self.reads = context.reads
        # Read now, because the backend's library may change the class of the module.
        self.kind = type(module).__name__
        #: The name in messages between ranks.
        self.label = f"{self.kind} #{self.serial}"
        self.distributed = context.process.place.world_size > 1
        if not self.distributed:
            self.placements = REPLICATED
        #: Why the process groups were ended, or why other ranks don't take part in teardown.
        self.ended = ""
        self.handle = ModelHandle(self)
        self.steppers: dict[int, Stepper] = {}
        self.optimizers: list[Optimizer] = []
        #: The children that SyncBatchNorm replaced.
        self.replaced_modules: Replaced = []
        #: Undoes accel's own changes of the module: compilation, checkpointing.
        self.undo = contextlib.ExitStack()
        self.gradients = self.gradients_type(self)
        self._read_parameters()
        #: The parameters of the user's optimizers, before shards replace them.
        self._raw_parameters = dict(self.named)
        self.holdings = self.holdings_type(self)
        refreshes = getattr(self.options, "auto_refresh", True)
        self._watches_mask = self.distributed and refreshes
        self.restructured = self.started = False
        size = sequence_size(self.options, self.process)
        self.sequence = SequenceParallel(self, size) if size > 1 else None
        compared = self.distributed and self.synchronizes
        self.drift = DriftGuard(self, self.options.drift_check if compared else 0)
        self._load_hook = module.register_load_state_dict_pre_hook(before_load)
        context.process.dependents.add(self)
        if self.placements.partial:
            self.holdings.guard.watch(module)

    def _read_parameters(self) -> None:
        """Read the parameters. Called again after ``start`` replaced some."""
        self.named = dict(self.module.named_parameters())
        self.names = list(self.named)
        self.parameters = list(self.named.values())
        #: The identities of all parameter objects that belong to this engine.
        self.known: Container[int] = {id(p) for p in self.parameters}
        #: ``requires_grad`` of each parameter, as the engine has last applied it.
        self.mask = trainable(self.parameters)

    # -- before there is an engine ---------------------------------------------------------------

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        """Raise BackendError for an unsupported module. Local."""
        return

    @classmethod
    def probe(cls) -> str:
        """Import packages. Return limits here, or raise BackendError. Local."""
        for module in cls.requires:
            importlib.import_module(module)
        return ""

    @classmethod
    def replica(cls, options: Any, process: Process) -> tuple[int, int]:
        """Return this rank's data-parallel place, and the number of places. Local."""
        size = sequence_size(options, process)
        return process.place.rank // size, process.place.world_size // size

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse | None:
        """Return the bytes on the fullest rank, or None if unsupported. Pure."""
        return add_uses(map(TensorSize.use, tensors))

    # -- lifetime --------------------------------------------------------------------------------

    def wrap(self) -> None:
        """Build the backend's object around the module. Local."""
        return

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Distribute rank 0's weights. Called again for new optimizers. Collective."""
        if not self.started:
            self.holdings.synchronize()
            self.started = True

    def attach(self, optimizer: Optimizer) -> None:
        """Add an optimizer, before ``start``. Local."""
        self.steppers[id(optimizer)] = Stepper(self, optimizer)
        self.optimizers.append(optimizer)
        if self.placements.partial:
            self.holdings.guard.watch(optimizer)

    def detach(self, optimizer: Optimizer) -> None:
        """Remove an optimizer. Local."""
        self.holdings.guard.release(optimizer)
        self.steppers.pop(id(optimizer)).close()
        self.optimizers[:] = [o for o in self.optimizers if o is not optimizer]

    def rebuild(self) -> None:
        """Apply a change of ``requires_grad`` on all ranks. Collective."""
        return

    def abandon(self, reason: str) -> None:
        """Release all uses of the ended process groups. Local."""
        self.ended, self.restructured = reason, True
        self.drift.pause()

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        """Undo ``wrap`` and ``start``. The raw module keeps its trained weights.

        Collective, unless ``ended``. Lost weights then become NaN, and it raises an error.
        """
        return

    @final
    def teardown(self, alone: str = "") -> None:
        """Give the raw module and optimizers back to the user. Collective.

        With a reason in ``alone``, it is local and drops unreduced gradients.
        """
        self.ended = self.ended or alone
        with contextlib.ExitStack() as last:
            last.callback(end, self.handle)
            last.callback(self.process.dependents.discard, self)
            self._finish_gradients()
            optimizers = list(self.optimizers)
            self._give_state_back()
            last.callback(self.undo.close)
            for optimizer in optimizers:
                self.detach(optimizer)
            self._load_hook.remove()
            self.holdings.guard.release(self.module)
            self.unwrap(optimizers)

    def _give_state_back(self) -> None:
        """Gather the state of optimizers, or make their steps raise."""
        sharded: list[Optimizer] = []
        if self.started:
            sharded += filter(self.holdings.partial, self.optimizers)
        try:
            for optimizer in [] if self.ended else sharded:
                title = "the state of an optimizer at the end of its model"
                self.holdings.give_back(title, optimizer, self._raw_parameters)
        except (AccelError, RuntimeError) as error:
            self.ended = str(error) if isinstance(error, AccelError) else reason_of(error)
        if self.ended:
            for optimizer in sharded:
                refuse_steps(optimizer, self.ended)

    def _finish_gradients(self) -> None:
        """Reduce pending gradients, or drop all of them after an error."""
        problem = self.ended
        try:
            if not self.gradients.pending():
                return
            if not problem:
                self.gradients.settle()
                return
        except AccelError as error:
            problem = str(error)
        logger.warning("teardown drops unreduced gradients of %s: %s", self.label, problem)
        for p in self.parameters:
            p.grad = None

    # -- forwards --------------------------------------------------------------------------------

    @abstractmethod
    def run(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        """Run ``entry`` or a method of the model through the backend."""

    @final
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model in place, until ``teardown``."""
        before = vars(self.module).get("_compiled_call_impl")
        restore = vars(self.module).__setitem__
        self.undo.callback(restore, "_compiled_call_impl", before)
        self.module.compile(*args, **kwargs)

    @final
    def call(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        """Run ``entry`` or a method of the model in its precision."""
        if self.restructured:
            refuse_changes(self)
        if self.sequence is not None and not self.sequence.running:
            with self.sequence.forward(function):
                return self.call(function, args, kwargs)
        if function is self.entry:
            # LoRA and GAN loops freeze and unfreeze parameters between forwards. The idea of this
            # comparison is from fairscale (pull request 369).
            if self._watches_mask and torch.is_grad_enabled():
                # `trainable` is inlined, because this runs in every forward.
                with as_plain():
                    changed = list(map(REQUIRES_GRAD, self.parameters)) != self.mask
                if changed:
                    self.refresh()
            # Only forwards: an RLHF loop calls `generate` with the same prompt on every rank.
            if self.drift.watches_inputs:
                self.drift.note(self, args, kwargs)
        try:
            if self.precision.plain:
                return self.run(function, args, kwargs)
            return self.precision.call(self.run, (function, args, kwargs), {})
        except RuntimeError as error:
            raise_lost(f"a forward ({self.label})", error)
            raise

    @final
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip the reduction of gradients for the forwards inside."""
        before = self.gradients.accumulating
        self.gradients.accumulate(True)
        try:
            yield
        finally:
            self.gradients.accumulate(before)

    def join(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ranks may have different numbers of batches."""
        if self.distributed:
            raise BackendError(f"backend={self.name!r} does not support accel.join().")
        return contextlib.nullcontext()

    @final
    def refresh(self) -> None:
        """Apply a change of ``requires_grad``, equal on all ranks. Collective."""
        mask = trainable(self.parameters)
        if self.distributed and mask != self.mask:
            by_name = dict(zip(self.names, mask, strict=True))
            self.compare("a change of requires_grad", by_name, first_difference)
            if self.gradients.pending() and not self.gradients.deferred:
                if self.gradients.accumulating:
                    raise BackendError(
                        "requires_grad changed while gradients from accel.no_sync "
                        "are pending. Call optimizer.step() before you freeze "
                        "or unfreeze parameters."
                    )
                self.gradients.settle()
            self.rebuild()
        self.mask = mask

    # -- agreement between ranks -----------------------------------------------------------------

    @final
    def compare(
        self, what: str, value: Any = None, explain: Function = str, beside: Any = None
    ) -> list[Any]:
        """Raise an error if ``value`` differs between ranks. Collective.

        ``explain(values)`` is in its text. Return every rank's ``beside``.
        """
        return require_equal(f"{what} ({self.label})", value, explain, beside)


def lost_weights(engine: Engine) -> AccelError:
    """Return the error for weights lost on other ranks."""
    return AccelError(
        f"The weights of {engine.label} are lost (now NaN). Shards were on "
        f"other ranks, and {engine.ended}. Load a checkpoint."
    )
