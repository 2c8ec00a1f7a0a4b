"""The registry of live engines: from a module, handle, optimizer or parameter to its engine."""

from __future__ import annotations

import gc
import logging
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from .engines import FOREIGN, Engine, foreign_part
from .engines.base.step import prepare
from .errors import (
    AccelError,
    BackendError,
    OptimizerError,
    PrecisionError,
    SharedParametersError,
    described,
)
from .gradients.clip import Owners, clip_patches
from .gradients.hooks import remove_hooks
from .gradients.patches import BackwardListener, Patch, backward_patches, changing, compile_patch
from .handles import Handles, HiddenAttribute, ModelHandle, OptimizerHandle, raw
from .precision import LossScale, all_finite
from .shard import parameters_of

logger = logging.getLogger("accel")
_SERIAL: Final = operator.attrgetter("serial")


@final
class Registry:
    """The live engines. An engine is kept alive by its raw module, not by the registry."""

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.loss_scale = LossScale()
        #: The serial of the next engine. The ranks agree on it in ``setup``.
        self.next_serial = 0
        #: Serials of engines that were torn down.
        self.ended: set[int] = set()
        #: Serials of sharded engines that were not torn down explicitly. Equal on all ranks, even
        #: if some engines were garbage-collected on this rank.
        self.divided: set[int] = set()
        #: Serials of engines with "16-mixed", equal on all ranks like ``divided``.
        self.scaled: set[int] = set()
        #: The engine of each submodule.
        self._owners: Any = WeakIdKeyDictionary()
        #: Optimizers that were not given to ``setup``, and have stepped while an engine lived.
        self._loose: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._warnings: set[tuple[object, ...]] = set()
        #: Listeners of backward passes, in the order of the engines.
        self._listeners: list[weakref.ref[BackwardListener]] = []
        self._module_hooks: list[RemovableHandle] = []
        self._step_hooks: list[RemovableHandle] = []
        self._clipping = clip_patches(self)
        self._backwards = backward_patches(self._listeners, self._leaf)
        self._compiling = compile_patch(ModelHandle)

    def add(self, engine: Engine) -> None:
        """Add an engine, and install the hooks and patches that it needs."""
        HiddenAttribute.put(engine.module, engine)
        with changing:
            self.engines.add(engine)
            self._find_listeners()
            if not self._module_hooks:
                self._module_hooks = [
                    register_module_parameter_registration_hook(self._registered),
                    register_module_module_registration_hook(self._registered),
                ]
            if engine.gradients.watched and not self._step_hooks:
                self._step_hooks = [register_optimizer_step_pre_hook(self._before_any_step)]
        if engine.distributed and engine.gradients.partial:
            self.divided.add(engine.serial)
        if engine.precision.scaled:
            self.scaled.add(engine.serial)
        reference = weakref.ref(engine)
        for module in engine.module.modules():
            self._owners[module] = reference
        for patch in self._patches(engine):
            patch.need(engine)
        weakref.finalize(engine, self._prune).atexit = False

    def remove(self, engine: Engine) -> None:
        """Forget an engine that is about to be torn down."""
        HiddenAttribute.clear(engine.module)
        self.ended.add(engine.serial)
        self.engines.discard(engine)
        self.divided.discard(engine.serial)
        self.scaled.discard(engine.serial)
        for module in engine.module.modules():
            self._owners.pop(module, None)
        for patch in self._patches(engine):
            patch.drop(engine)
        self._prune()

    def _patches(self, engine: Engine) -> list[Patch]:
        patches = [self._compiling]
        if engine.gradients.watched:
            patches += [*self._clipping, *self._backwards]
        return patches if engine.sequence is None else patches + engine.sequence.patches

    def _find_listeners(self) -> None:
        watched = [engine.gradients for engine in self.in_order() if engine.gradients.watched]
        self._listeners[:] = [weakref.ref(gradients) for gradients in watched]

    def _prune(self) -> None:
        """Remove hooks that no live engine needs."""
        with changing:
            self._find_listeners()
            if not self.engines:
                remove_hooks(self._module_hooks)
            if not any(engine.gradients.watched for engine in list(self.engines)):
                remove_hooks(self._step_hooks)

    # -- look-up -----------------------------------------------------------------------------------

    def in_order(self) -> list[Engine]:
        """Return the live engines in an order that is the same on all ranks.

        They include engines that nobody references any more, until a garbage collection.
        """
        return sorted(self.engines, key=_SERIAL)

    def sweep(self) -> None:
        """Collect garbage, because engines that nobody references are in reference cycles."""
        if self.engines:
            gc.collect()

    @staticmethod
    def engine(module: nn.Module) -> Engine | None:
        """Return the engine of a raw module."""
        engine: Engine | None = HiddenAttribute.get(module)
        return engine

    @staticmethod
    def optimizer_handle(optimizer: Optimizer) -> OptimizerHandle | None:
        """Return the handle of a raw optimizer, or the handle that is given."""
        if type(optimizer) is OptimizerHandle:
            return optimizer
        reference: weakref.ref[OptimizerHandle] | None = HiddenAttribute.get(optimizer)
        return None if reference is None else reference()

    @staticmethod
    def of_handle(model: object) -> Engine:
        """Return the engine of a handle, a raw module, or a ``torch.compile`` wrapper.

        Raises:
            AccelError: it has none.
        """
        module, _ = resolve_module(model)
        engine = Registry.engine(module)
        if engine is not None:
            return engine
        kind = type(module).__name__
        if outer := registry._other_owner(list(module.parameters()), None):
            raise AccelError(
                f"This {kind} is a part of a {outer.kind} that was set up. Pass the {outer.kind}."
            )
        raise AccelError(f"This {kind} has no live engine. Call accel.setup(model, ...) first.")

    def other_owner(
        self, parameters: Sequence[torch.Tensor], engine: Engine | None
    ) -> Engine | None:
        """Return an engine other than ``engine`` that has some of these parameters."""
        if self._other_owner(parameters, engine) is not None:
            self.sweep()  # it may be a dropped engine
        return self._other_owner(parameters, engine)

    def _other_owner(
        self, parameters: Sequence[torch.Tensor], engine: Engine | None
    ) -> Engine | None:
        for other in self.in_order():
            if other is not engine and any(id(p) in other.known for p in parameters):
                return other
        return None

    def check_new(self, module: nn.Module) -> None:
        """Raise if a different engine or library distributes a module or some of its parameters."""
        for name, child in _named_modules(module):
            if type(child) is ModelHandle:
                names = ", ".join([name for name, _ in raw(child).named_parameters()][:5])
                raise SharedParametersError(
                    f"{type(module).__name__}.{name} is a handle of accel.setup (parameters "
                    f"{names}). Build the model from accel.unwrap(handle), or set up only the "
                    "outer model."
                )
        for engine in self.engines:
            shared = [name for name, p in module.named_parameters() if id(p) in engine.known]
            if shared:
                raise SharedParametersError(
                    f"{type(module).__name__} shares {len(shared)} parameters with a {engine.kind} "
                    f"that is already set up ({', '.join(shared[:5])}). Set up one module that "
                    "contains both, or call accel.teardown() on the other."
                )
        # After the engines, because a backend may change classes of modules.
        for name, child in _named_modules(module):
            foreign = FOREIGN.intersection(
                f"{c.__module__}.{c.__qualname__}" for c in type(child).__mro__
            )
            if foreign:
                raise BackendError(
                    f"{name or 'The model'} is already wrapped by {next(iter(foreign))}. Pass the module that it wraps."
                )
        for name, parameter in module.named_parameters():
            problem = foreign_part(parameter)
            if problem is not None:
                raise BackendError(f"{name} {problem}")

    def owners(self, parameters: Sequence[torch.Tensor]) -> tuple[Owners, list[torch.Tensor]]:
        """Return the gradients of each engine with its parameters, and the parameters of no engine.

        The engines come in the order of all ranks. Without parameters, engines that may have
        gradients on other ranks only take part too.

        Raises:
            BackendError: there are no parameters, and ``p.grad`` doesn't show all gradients.
        """
        if not parameters:
            self._refuse_hidden()
        owners: Owners = []
        rest = list(parameters)
        for engine in [engine for engine in self.in_order() if engine.distributed]:
            params: list[Any] = [p for p in rest if id(p) in engine.known]
            if params or (engine.gradients.spread and not parameters):
                owners.append((engine.gradients, [engine.gradients.canonical(p) for p in params]))
                rest = [p for p in rest if id(p) not in engine.known]
        return owners, rest

    def parameters_of(
        self, gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the engines' parameters whose gradients these are, and the other gradients."""
        by_gradient = {
            id(p.grad): p
            for e in self.engines
            if e.distributed
            for p in e.parameters
            if p.grad is not None
        }
        params: list[torch.Tensor] = [by_gradient[id(g)] for g in gradients if id(g) in by_gradient]
        return params, [g for g in gradients if id(g) not in by_gradient]

    def _refuse_hidden(self) -> None:
        if any(engine.gradients.hidden() for engine in self.engines):
            self.sweep()
        for engine in [engine for engine in self.engines if engine.gradients.hidden()]:
            raise BackendError(
                f"torch.nn.utils finds no gradients in p.grad of a {engine.kind}, because backend "
                f"{engine.name!r} keeps them elsewhere. Use accel.clip_grad_norm_(model, max_norm)."
            )

    # -- what all engines share --------------------------------------------------------------------

    def scaled_engines(self) -> frozenset[int]:
        """Return the serials of the engines with "16-mixed" that live on this rank."""
        return frozenset(engine.serial for engine in self.engines if engine.precision.scaled)

    def agree_on_scaling(
        self, scaled_by_rank: Sequence[frozenset[int]], loss_scale: tuple[float, int]
    ) -> None:
        """Scale losses while an engine with "16-mixed" lives on any rank, from rank 0's scale on.

        Whether a loss is scaled must not depend on the garbage collector of a rank.
        """
        self.scaled = {serial for serials in scaled_by_rank for serial in serials}
        if self.scaled:
            self.loss_scale.restore(*loss_scale)
        else:
            self.loss_scale.restore()

    def first(self, *warning: object) -> bool:
        """True the first time that a warning is given, because loops repeat. Local."""
        known = warning in self._warnings
        self._warnings.add(warning)
        return not known

    # -- events ------------------------------------------------------------------------------------

    def _registered(self, module: nn.Module, name: str, value: object) -> None:
        reference = self._owners.get(module)
        engine = None if reference is None else reference()
        if engine is not None:
            engine.restructured = True

    def _before_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Make gradients final for an optimizer that was not given to ``setup``, or raise."""
        slot = optimizer.__dict__.get(
            HiddenAttribute.KEY
        )  # without a call, because every step comes here
        if slot is not None and slot.owner_id == id(optimizer):
            return
        self._warn_of_loose(optimizer)
        kind = type(optimizer).__name__
        for engine in [e for e in self.in_order() if e.gradients.watched and _needs_preparation(e)]:
            if not any(id(p) in engine.known for p in parameters_of(optimizer)):
                continue
            if engine.precision.scaled or engine.gradients.hidden():
                raise OptimizerError(
                    f"{kind} steps parameters of a {engine.precision.name!r} model with backend "
                    f"{engine.name!r}, but was not given to accel.setup. Call accel.setup(model, "
                    "optimizer)."
                )
            prepare(engine, optimizer)
        if self.scaled and self.loss_scale.serial and not all_finite(optimizer):
            raise PrecisionError(
                f"The scaled loss overflowed in gradients of a {kind} that was not given to "
                "accel.setup. Skip its step if a gradient is not finite."
            )

    def _warn_of_loose(self, optimizer: Optimizer) -> None:
        """Warn once of an optimizer whose parameters are in no model, and not synchronized. Local."""
        if optimizer in self._loose or not any(
            engine.distributed and engine.optimizers for engine in self.engines
        ):
            return
        self._loose.add(optimizer)
        params = parameters_of(optimizer)
        known = any(id(p) in engine.known for p in params for engine in self.engines)
        if not params or known or any(type(p) is not nn.Parameter for p in params):
            return
        facts = (type(optimizer).__name__, len(params), tuple(params[0].shape))
        if self.first(*facts):
            logger.warning(
                "%s steps %d parameters that are in no model of accel.setup, the first of shape "
                "%s, so each rank trains its own. Give their module and this optimizer to "
                "accel.setup, unless ranks are meant to differ.",
                *facts,
            )

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        owner = _owner(tensor, self.engines)
        return tensor if owner is None else owner.gradients.leaf(tensor)


def _owner(tensor: torch.Tensor, engines: Iterable[Engine]) -> Engine | None:
    return next((e for e in engines if id(tensor) in e.known), None)


def _needs_preparation(engine: Engine) -> bool:
    gradients = engine.gradients
    return (
        gradients.before_any_step
        or engine.precision.scaled
        or gradients.pending()
        or gradients.hidden()
    )


def _named_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Give submodules with their names, like ``named_modules``, but none inside a handle."""
    yield prefix, module
    if type(module) is not ModelHandle:
        for name, child in module._modules.items():
            if child is not None:
                yield from _named_modules(child, f"{prefix}.{name}" if prefix else name)


def resolve_module(model: object) -> tuple[nn.Module, nn.Module]:
    """Return a raw module, and the module that a forward calls, such as a compile wrapper.

    Raises:
        AccelError: the object is not a module, or the handle of an engine that has ended.
    """
    if type(model) is ModelHandle:
        if object.__getattribute__(model, "_accel_engine") is None:
            raise AccelError(
                "The engine of this handle was torn down. Pass the raw module, accel.unwrap(handle)."
            )
        module = raw(model)
        return module, module
    if not isinstance(model, nn.Module):
        raise AccelError(
            f"Expected a torch.nn.Module as the model, got {described(model)}. {hint(model)}"
        )
    if type(model).__name__ == "OptimizedModule" and "_orig_mod" in model._modules:
        return resolve_module(model._modules["_orig_mod"])[0], model
    return model, model


def hint(value: object) -> str:
    """Return a sentence that tells what to pass to ``setup`` instead of a wrong argument."""
    if isinstance(value, Handles):
        return (
            "Unpack the result: model, optimizer, loader = accel.setup(model, optimizer, loader)."
        )
    if isinstance(value, type):
        return f"Pass an object of this class: {value.__name__}(...)."
    if isinstance(getattr(value, "optimizer", None), Optimizer):
        return f"Pass the optimizer of this {type(value).__name__}, and keep the scheduler in the loop."
    if isinstance(value, Dataset):
        return "Wrap the dataset: DataLoader(dataset, batch_size=...)."
    if isinstance(value, Iterator):
        return "Pass the model, the optimizer or the DataLoader itself, not an iterator."
    return "The order is accel.setup(model, optimizers, dataloaders)."


registry: Final = Registry()
