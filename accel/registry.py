"""The registry of live engines by model, optimizer and parameters."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from .engines import Engine, refuse_foreign
from .engines.base.step import prepare
from .errors import AccelError, OptimizerError, SharedParametersError, described
from .gradients.clip import clip_patches
from .gradients.hooks import remove_hooks
from .gradients.patches import Listeners, Patch, backward_patches, changing, compile_patch
from .handles import HiddenAttribute, ModelHandle, engine_behind, raw
from .precision import LossScale
from .shard import parameters_of

logger = logging.getLogger("accel")


@final
class Registry:
    """The live engines. Raw modules keep them alive, but the registry doesn't."""

    def __init__(self) -> None:
        self.engines = weakref.WeakSet[Engine]()
        self.loss_scale = LossScale()
        #: Yields the serial of each new engine, which is equal on all ranks.
        self.serials = itertools.count()
        #: Serials of engines that were torn down.
        self.ended: set[int] = set()
        # The next two are equal on all ranks, even if this rank has garbage-collected some engines.
        #: Serials of sharded engines that were not torn down.
        self.divided: set[int] = set()
        #: Serials of engines with "16-mixed" that were not torn down.
        self.scaled: set[int] = set()
        #: A weak reference to the engine of each submodule.
        self._owners: Any = WeakIdKeyDictionary()
        #: Optimizers that step parameters outside every model, and were warned about.
        self._strangers: set[tuple[object, ...]] = set()
        #: Listeners of backward passes, in the order of the engines.
        self._listeners: Listeners = []
        self._hooks: list[RemovableHandle] = []
        self._clipping = clip_patches(self)
        self._backwards = backward_patches(self._listeners, self._leaf)
        self._compiling = compile_patch(ModelHandle)

    def add(self, engine: Engine) -> None:
        """Add an engine, and install its hooks and patches."""
        HiddenAttribute.put(engine.module, engine)
        self.engines.add(engine)
        self._install_hooks()
        if engine.distributed and engine.placements.partial:
            self.divided.add(engine.serial)
        if engine.precision.scaled:
            self.scaled.add(engine.serial)
            # An earlier model may have diverged, which leaves a tiny scale.
            self.loss_scale.restore()
        reference = weakref.ref(engine)
        for module in engine.module.modules():
            self._owners[module] = reference
        for patch in self._patches(engine):
            patch.need(engine)
        weakref.finalize(engine, self._install_hooks).atexit = False

    def remove(self, engine: Engine) -> None:
        """Forget an engine before its teardown."""
        HiddenAttribute.clear(engine.module)
        self.ended.add(engine.serial)
        self.engines.discard(engine)
        self.divided.discard(engine.serial)
        self.scaled.discard(engine.serial)
        for module in engine.module.modules():
            self._owners.pop(module, None)
        for patch in self._patches(engine):
            patch.drop(engine)
        self._install_hooks()

    def _patches(self, engine: Engine) -> list[Patch]:
        patches = [self._compiling]
        if engine.gradients.watched:
            patches += [*self._clipping, *self._backwards]
        return patches if engine.sequence is None else patches + engine.sequence.patches

    def _install_hooks(self) -> None:
        """Install the hooks of live engines, and remove all others."""
        with changing:
            # len(self.engines) would also count engines that are being collected.
            engines = self.in_order()
            gradients = [engine.gradients for engine in engines]
            # Replace the items at once, because a garbage collection may call this meanwhile.
            self._listeners[:] = [weakref.ref(g) for g in gradients if g.watched]
            if not engines:
                remove_hooks(self._hooks)
            elif not self._hooks:
                self._hooks += [
                    register_module_parameter_registration_hook(self._registered),
                    register_module_module_registration_hook(self._registered),
                    register_optimizer_step_pre_hook(self._before_any_step),
                ]

    # -- look-up -----------------------------------------------------------------------------------

    def in_order(self) -> list[Engine]:
        """Return engines by serial, including unreachable ones."""
        return sorted(self.engines, key=lambda engine: engine.serial)

    def sweep(self) -> None:
        """Collect unreachable engines, which are in reference cycles."""
        if self.engines:
            gc.collect()

    def find_engine(self, model: object) -> Engine:
        """Return the engine of a handle, raw module or compile wrapper."""
        module, _ = resolve_module(model)
        engine = self.engine(module)
        if engine is not None:
            return engine
        this = f"This {type(module).__name__}"
        for outer in self.owners_of(list(module.parameters())):
            raise AccelError(f"{this} is a part of a {outer.kind}. Pass the {outer.kind}.")
        raise AccelError(f"{this} is not set up. Call accel.setup(model, ...) first.")

    @staticmethod
    def engine(module: nn.Module) -> Engine | None:
        """Return the engine of a raw module, or None."""
        return HiddenAttribute.get(module)  # type: ignore[no-any-return]

    @staticmethod
    def find_engine_of(optimizer: Optimizer) -> Engine | None:
        """Return the live engine of an optimizer, or None before ``setup``."""
        reference: weakref.ref[Engine] | None = HiddenAttribute.get(optimizer)
        return None if reference is None else reference()

    def owners_of(self, params: Sequence[Tensor]) -> Iterator[Engine]:
        """Yield the engines with any of these parameters, in order."""
        for engine in self.in_order():
            if any(id(p) in engine.known for p in params):
                yield engine

    def check_new(self, module: nn.Module) -> None:
        """Raise if a different engine or library has a parameter."""
        for name, p in module.named_parameters():
            for engine in self.owners_of([p]):
                raise SharedParametersError(
                    f"{type(module).__name__} shares {name} with a {engine.kind} that is "
                    "already set up. Set up one module that contains both, or call "
                    "accel.teardown() on the other."
                )
        # Check the engines first, because their backends' libraries may have changed classes.
        refuse_foreign(module)

    # -- events ------------------------------------------------------------------------------------

    def _leaf(self, tensor: Tensor) -> Tensor:
        """Return autograd's leaf for a parameter."""
        for engine in self.owners_of([tensor]):
            return engine.gradients.leaf(tensor)
        return tensor

    def _registered(self, module: nn.Module, name: str, value: object) -> None:
        reference = self._owners.get(module)
        engine = None if reference is None else reference()
        # Programs may add LoRA layers after setup. The next forward or step checks for these.
        if engine is not None:
            engine.restructured = True

    def _before_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Make gradients final for an optimizer unknown to ``setup``."""
        # HiddenAttribute.get without the call, because this runs before every step.
        slot = optimizer.__dict__.get(HiddenAttribute.KEY)
        if slot is not None and slot.owner_id == id(optimizer):
            return
        parameters = parameters_of(optimizer)
        engines = list(self.owners_of(parameters))
        if not engines:
            self._warn_of_stranger(optimizer, parameters)
        for engine in engines:
            gradients = engine.gradients
            if not gradients.watched:
                continue
            if engine.precision.scaled or gradients.hidden():
                raise OptimizerError(
                    f"This {type(optimizer).__name__} was not given to accel.setup, but "
                    f"steps a {engine.kind} with precision {engine.precision.name!r} and "
                    f"backend {engine.name!r}. Call accel.setup(model, optimizer)."
                )
            if gradients.before_any_step or gradients.pending():
                prepare(engine, optimizer)

    def _warn_of_stranger(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        """Warn once about parameters that are in no model. Local."""
        # For example, the class centers of ArcFace may have their own optimizer.
        trains = any(e.distributed and e.optimizers for e in self.engines)
        if not trains or set(map(type, params)) != {nn.Parameter}:
            return
        facts = (type(optimizer).__name__, len(params), tuple(params[0].shape))
        if facts not in self._strangers:
            self._strangers.add(facts)
            logger.warning(
                "%s steps %d parameters that aren't set up, the first of shape %s, so each "
                "rank trains its own. Pass their module and this optimizer to accel.setup().",
                *facts,
            )


def resolve_module(model: object) -> tuple[nn.Module, nn.Module]:
    """Return the raw module, and it or its compile wrapper to call."""
    if type(model) is ModelHandle:
        if engine_behind(model) is None:
            raise AccelError("This model was torn down. Pass accel.unwrap(model).")
        return raw(model), raw(model)
    if not isinstance(model, nn.Module):
        raise AccelError(f"The model is {described(model)}. Pass a torch.nn.Module.")
    if type(model).__name__ == "OptimizedModule":
        return resolve_module(model.get_submodule("_orig_mod"))[0], model
    return model, model


registry: Final = Registry()
