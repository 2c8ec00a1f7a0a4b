"""Raw module -> its one engine, by identity: the live engines."""

from __future__ import annotations

import gc
import logging
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from .engines import FOREIGN, Engine, foreign_part
from .engines.base.step import prepare
from .errors import AccelError, BackendError, OptimizerError, PrecisionError, SharedParametersError, described
from .gradients.clip import Owners, clip_patches
from .gradients.log import remove_hooks
from .gradients.patches import (
    BackwardListener,
    Patch,
    backward_patches,
    changing,
    compile_patch,
)
from .handles import UNPACK, Handles, HiddenAttribute, LoaderHandle, ModelHandle, OptimizerHandle, raw
from .precision import LossScale, all_finite
from .shard import parameters_of

logger = logging.getLogger("accel")
_SERIAL: Final = operator.attrgetter("serial")


@final
class Registry:
    """The live engines. An engine is owned by its raw module; here it is only known."""

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.loss_scale = LossScale()
        #: The serials of engines that were torn down.
        self.ended: set[int] = set()
        #: The serial of the next engine, as far as this rank knows: the ranks agree on it in ``setup``.
        self.next_serial = 0
        #: Serials of the engines that may have parts on other ranks and were not torn down by name: equal on all ranks,
        #: whatever was garbage-collected here.
        self.divided: set[int] = set()
        #: Serials of the engines over several ranks with '16-mixed' that lived anywhere at the last setup, or were made since.
        self.scaled: set[int] = set()
        self._owners: Any = WeakIdKeyDictionary()
        #: Optimizers that setup never saw, and that have stepped beside an engine.
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        #: What was said, since a loop may make an optimizer for each sample, or a loader for each rollout.
        self._warnings: set[tuple[object, ...]] = set()
        #: What hears of backwards, in the engines' order.
        self._listeners: list[weakref.ref[BackwardListener]] = []
        self._hooks: list[RemovableHandle] = []
        self._watched: list[RemovableHandle] = []
        self._clipping = clip_patches(self)
        self._backwards = backward_patches(self._listeners, self._leaf)
        self._compiling = compile_patch(ModelHandle)
        self._needed: weakref.WeakKeyDictionary[Engine, list[Patch]] = weakref.WeakKeyDictionary()

    def add(self, engine: Engine) -> None:
        HiddenAttribute.put(engine.module, engine)
        with changing:
            self.engines.add(engine)
            self._find_listeners()
            self._add_hooks(engine)
        if engine.distributed and engine.gradients.partial:
            self.divided.add(engine.serial)
        if engine.distributed and engine.precision.scaled:
            self.scaled.add(engine.serial)
        reference = weakref.ref(engine)
        for module in engine.module.modules():
            self._owners[module] = reference
        self._needed[engine] = self._patches(engine)
        for patch in self._needed[engine]:
            patch.need(engine)
        weakref.finalize(engine, self._prune).atexit = False

    def _add_hooks(self, engine: Engine) -> None:
        if not self._hooks:
            self._hooks = [
                register_module_parameter_registration_hook(self._registered),
                register_module_module_registration_hook(self._registered),
            ]
        if engine.gradients.watched:
            self._watched = self._watched or [register_optimizer_step_pre_hook(self._before_any_step)]

    def _patches(self, engine: Engine) -> list[Patch]:
        needed = [self._compiling]
        if engine.gradients.watched:
            needed += [*self._clipping, *self._backwards]
        return needed + (engine.sequence.patches if engine.sequence is not None else [])

    def remove(self, engine: Engine) -> None:
        HiddenAttribute.clear(engine.module)
        self.ended.add(engine.serial)
        self.engines.discard(engine)
        self.divided.discard(engine.serial)
        self.scaled.discard(engine.serial)
        for module in engine.module.modules():
            self._owners.pop(module, None)
        for patch in self._needed.pop(engine):
            patch.drop(engine)
        self._prune()

    def _find_listeners(self) -> None:
        watched = [e.gradients for e in self.in_order() if e.gradients.watched]
        self._listeners[:] = [weakref.ref(gradients) for gradients in watched]

    def _prune(self) -> None:
        with changing:
            engines = list(self.engines)
            self._find_listeners()
            if not engines:
                remove_hooks(self._hooks)
            if not any(engine.gradients.watched for engine in engines):
                remove_hooks(self._watched)

    # -- the loss scale -------------------------------------------------------------------------------------------
    # Whether a loss is scaled, and by what, must not depend on what a rank's garbage collector has done.

    @property
    def scales(self) -> bool:
        return bool(self.scaled) or any(e.precision.scaled and not e.distributed for e in self.engines)

    def living(self) -> tuple[bool, list[int]]:
        """For ``agree_on_living``: whether an engine lives here, and the serials of those that scale losses on all ranks."""
        return bool(self.engines), [e.serial for e in self.engines if e.distributed and e.precision.scaled]

    def agree_on_living(self, everyone: Sequence[tuple[bool, list[int]]]) -> None:
        """Scale losses for what lives anywhere, by a new scale where nothing does."""
        self.scaled = {serial for _, serials in everyone for serial in serials}
        if not any(some for some, _ in everyone):
            self.loss_scale = LossScale()

    # -- the engines ----------------------------------------------------------------------------------------------

    def in_order(self) -> list[Engine]:
        """The engines that live in this process, in an order that is the same on all ranks.

        One that nobody holds any more is among them until the garbage collector comes, on each rank in its own time.
        """
        return sorted(self.engines, key=_SERIAL)

    def sweep(self, but: Engine | None = None) -> None:
        """Let engines go that nobody holds, so that what follows does not depend on when the collector would have come.

        Models sit in cycles, as raw DDP and FSDP2 modules do. With no engine beside ``but`` there is nothing to do.
        """
        if any(engine is not but for engine in self.engines):
            gc.collect()

    # -- look-up --------------------------------------------------------------------------------------------------

    @staticmethod
    def engine(module: nn.Module) -> Engine | None:
        engine: Engine | None = HiddenAttribute.get(module)
        return engine

    @staticmethod
    def optimizer_handle(optimizer: Optimizer) -> OptimizerHandle | None:
        """The handle of a raw optimizer, if it has one, or itself."""
        if type(optimizer) is OptimizerHandle:
            return optimizer
        reference: weakref.ref[OptimizerHandle] | None = HiddenAttribute.get(optimizer)
        return None if reference is None else reference()

    @staticmethod
    def of_handle(model: object) -> Engine:
        """The live engine behind a handle, its raw module, or its compile wrapper; AccelError without one."""
        module, _ = resolve_module(model)
        engine = Registry.engine(module)
        if engine is None:
            kind, own = type(module).__name__, [id(p) for p in module.parameters()]
            if whole := next((e for e in registry.engines if any(key in e.known for key in own)), None):
                raise AccelError(
                    f"this {kind} is a part of a {type(whole.module).__name__} that was set up: give that one"
                )
            raise AccelError(f"this {kind} has no live engine: call accel.setup(model, ...) first")
        return engine

    # -- refusals -------------------------------------------------------------------------------------------------

    def check_new(self, module: nn.Module) -> None:
        """Refuse a module whose parameters another engine drives, or that another library has wrapped or divided."""
        for name, child in _walk(module):
            if type(child) is ModelHandle:
                raise SharedParametersError(
                    f"{type(module).__name__}.{name} is a handle of accel.setup, whose parameters ({_first_names(raw(child))}) "
                    "have an engine: build the model from raw modules (accel.unwrap), or set up only the outer model"
                )
        for engine in self.engines:
            shared = [name for name, p in module.named_parameters() if id(p) in engine.known]
            if shared:
                raise SharedParametersError(
                    f"{len(shared)} parameters of this {type(module).__name__} belong to a live engine "
                    f"({engine.name}) of a {engine.kind}: {', '.join(shared[:5])}; "
                    "set up one model that holds both, or tear down the other first"
                )
        for name, child in _walk(module):  # after the engines, which may make such a class of a module themselves
            foreign = FOREIGN.intersection(f"{c.__module__}.{c.__qualname__}" for c in type(child).__mro__)
            if foreign:
                raise BackendError(
                    f"{name or 'the model'} is already wrapped by {next(iter(foreign))}: give accel.setup the raw module"
                )
        for name, parameter in module.named_parameters():
            if (what := foreign_part(parameter)) is not None:
                raise BackendError(f"{name} {what}")

    # -- events ---------------------------------------------------------------------------------------------------

    def _owner(self, module: nn.Module) -> Engine | None:
        reference = self._owners.get(module)
        return None if reference is None else reference()

    def _registered(self, module: nn.Module, name: str, value: object) -> None:
        if (engine := self._owner(module)) is not None:
            engine.restructured = True

    def _before_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        slot = optimizer.__dict__.get(HiddenAttribute.KEY)  # every step comes here: no call
        if slot is not None and slot.owner_id == id(optimizer):
            return
        self._tell_of_loose(optimizer)
        for engine in [e for e in self.in_order() if e.gradients.watched and _concerned(e)]:
            if not any(id(p) in engine.known for p in parameters_of(optimizer)):
                continue
            if engine.precision.scaled or engine.gradients.hidden():
                kind = f"'{engine.precision.name}' model with backend {engine.name!r}"
                raise OptimizerError(
                    f"{type(optimizer).__name__} steps parameters of a {kind}, but was not given to accel.setup"
                )
            prepare(engine, optimizer)
        if self.loss_scale.serial and not all_finite(optimizer):
            raise PrecisionError(
                f"the scaled loss overflowed into parameters of a {type(optimizer).__name__} that accel does not know, so "
                "that it cannot skip this step: skip it where a gradient is not finite"
            )

    def _tell_of_loose(self, optimizer: Optimizer) -> None:
        """Warn, once, of an optimizer beside others whose parameters are in no model: each rank may train its own. Local."""
        if optimizer in self._told or not any(engine.distributed and engine.optimizers for engine in self.engines):
            return
        self._told.add(optimizer)
        given = parameters_of(optimizer)
        if given and not any(type(p) is not nn.Parameter or id(p) in e.known for p in given for e in self.engines):
            found = (type(optimizer).__name__, len(given), tuple(given[0].shape))
            if not self.first(*found):
                return
            logger.warning(
                "%s steps %d parameters that are in no model of accel.setup, the first of shape %s: each rank trains its own. "
                "Give their module and this optimizer to accel.setup, unless the ranks are meant to differ",
                *found,
            )

    def first(self, *said: object) -> bool:
        """Whether this is about to be said for the first time. Local."""
        known = said in self._warnings
        self._warnings.add(said)
        return not known

    def owners(self, parameters: Sequence[torch.Tensor]) -> tuple[Owners, list[torch.Tensor]]:
        """Return the engines' gradients with those of these parameters that are theirs, and the other parameters.

        The engines come in the order of all ranks. Without parameters, the engines that may have gradients on other ranks only
        take part too.

        Raises:
            BackendError: there are no parameters, and an engine has gradients that ``p.grad`` does not show.
        """
        if not parameters:
            self._refuse_hidden()
        found: Owners = []
        rest = list(parameters)
        for engine in [e for e in self.in_order() if e.distributed]:
            own: list[Any] = [p for p in rest if id(p) in engine.known]
            if own or (engine.gradients.spread and not parameters):
                found.append((engine.gradients, [engine.gradients.canonical(p) for p in own]))
                rest = [p for p in rest if id(p) not in engine.known]
        return found, rest

    def parameters_of(self, gradients: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the engines' parameters whose gradients these are, and the other gradients."""
        parameters = {id(p.grad): p for e in self.engines if e.distributed for p in e.parameters if p.grad is not None}
        own: list[torch.Tensor] = [parameters[id(g)] for g in gradients if id(g) in parameters]
        return own, [g for g in gradients if id(g) not in parameters]

    def _refuse_hidden(self) -> None:
        if any(engine.gradients.hidden() for engine in self.engines):
            self.sweep()
        for engine in [e for e in self.engines if e.gradients.hidden()]:
            raise BackendError(
                f"torch.nn.utils finds no final gradients in p.grad of a {engine.kind} with backend "
                f"{engine.name!r}, which keeps them elsewhere: use accel.clip_grad_norm_(model, max_norm)"
            )

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        owner = _owner(tensor, self.engines)
        return tensor if owner is None else owner.gradients.leaf(tensor)


def _owner(tensor: torch.Tensor, engines: Iterable[Engine]) -> Engine | None:
    return next((e for e in engines if id(tensor) in e.known), None)


def _concerned(engine: Engine) -> bool:
    gradients = engine.gradients
    return gradients.before_any_step or engine.precision.scaled or gradients.pending() or gradients.hidden()


def _walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All submodules with their names; unlike ``named_modules`` it shows a handle as itself."""
    yield prefix, module
    if type(module) is not ModelHandle:
        for name, child in module._modules.items():
            if child is not None:
                yield from _walk(child, f"{prefix}.{name}" if prefix else name)


def _first_names(module: nn.Module) -> str:
    names = [name for name, _ in module.named_parameters()]
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def resolve_module(model: object) -> tuple[nn.Module, nn.Module]:
    """The raw module behind what a user holds, and what a forward should call (its compile wrapper, if any).

    AccelError for what is no module, and for the handle of an ended engine.
    """
    if type(model) is ModelHandle:
        if object.__getattribute__(model, "_accel_engine") is None:
            raise AccelError("this handle's engine was torn down: pass the raw module (accel.unwrap(handle))")
        module = raw(model)
        return module, module
    if not isinstance(model, nn.Module):
        raise AccelError(f"expected a torch.nn.Module as the model, got {described(model)}{_instead_of_model(model)}")
    if type(model).__name__ == "OptimizedModule" and "_orig_mod" in model._modules:
        return resolve_module(model._modules["_orig_mod"])[0], model
    return model, model


def _instead_of_model(other: object) -> str:
    """What to write instead of something that is no model; begins with a colon, or is empty."""
    if type(other) is Handles:
        return f": {UNPACK}"
    if type(other) is OptimizerHandle or isinstance(other, Optimizer | DataLoader | LoaderHandle):
        return ": give the model; in accel.setup it comes before its optimizers and dataloaders"
    if isinstance(other, type) and issubclass(other, nn.Module):
        return f": make one, {other.__name__}(...)"
    some = other.values() if isinstance(other, dict) else other if isinstance(other, list | tuple) else ()
    if isinstance(other, Iterator) or any(isinstance(item, Tensor) for item in some):
        return ": give the model itself, not its parameters or its state"
    return (
        ": each model has a call of accel.setup of its own" if any(isinstance(item, nn.Module) for item in some) else ""
    )


registry: Final = Registry()
