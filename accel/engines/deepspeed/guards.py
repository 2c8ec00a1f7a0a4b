"""What the user's raw objects do while their state is divided: the same as their handles, or an error."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...errors import AccelError
from .._copies import allow_copies, copies_refused
from .stage3 import Method

if TYPE_CHECKING:
    from . import DeepSpeedEngine

#: What stands in the place of a raw object's own.
_OWN: Final = ("zero_grad", "__deepcopy__", "__getstate__")


@final
class Guards:
    """Replaces ``zero_grad`` and watches ``state_dict`` of the raw module and of the raw optimizers."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = weakref.ref(engine)
        self._hooks: list[RemovableHandle] = []
        self._module: nn.Module | None = None
        self._optimizers: dict[int, list[RemovableHandle]] = {}
        self._inside = self._copying = False

    def module(self, module: nn.Module) -> None:
        """Guard the raw module."""
        self._module = module
        for child in module.modules():
            if any(True for _ in child.parameters()):
                vars(child)["__deepcopy__"] = Method(self._deepcopy(), child)
                vars(child)["__getstate__"] = Method(self._getstate(), child)
            vars(child)["zero_grad"] = Method(_module_zero_grad(self._engine), child)
            self._hooks.append(child.register_state_dict_pre_hook(lambda *_: self._refuse_module("state_dict")))
            self._hooks.append(
                child.register_load_state_dict_pre_hook(lambda *_: self._refuse_module("load_state_dict"))
            )

    def optimizer(self, optimizer: Optimizer) -> None:
        """Guard a raw optimizer."""
        vars(optimizer)["zero_grad"] = Method(_optimizer_zero_grad(self._engine), optimizer)
        self._optimizers[id(optimizer)] = [
            optimizer.register_state_dict_pre_hook(lambda _: self._refuse_optimizer("state_dict")),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._refuse_optimizer("load_state_dict")),
        ]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The engine itself calls what is guarded."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _refuse_module(self, what: str) -> None:
        engine = self._engine()
        if engine is not None and engine.weights_divided and not self._inside:
            raise AccelError(
                f"{what}() of a raw module whose weights are divided over the ranks would see this rank's part: use "
                "accel.full_state_dict(model), accel.save and accel.load, or the handle's load_state_dict(full)"
            )

    def _refuse_optimizer(self, what: str) -> None:
        engine = self._engine()
        if engine is not None and engine.divided and not self._inside:
            raise AccelError(
                f"{what}() of a raw optimizer whose state is divided over the ranks would see this rank's part: use "
                "accel.full_state_dict(optimizer), accel.save and accel.load, or the handle's load_state_dict(full)"
            )

    def remove(self, optimizer: Optimizer) -> None:
        """Unguard an optimizer."""
        for hook in self._optimizers.pop(id(optimizer), ()):
            hook.remove()
        allow_copies(optimizer)
        _drop(optimizer)

    def close(self) -> None:
        """Unguard the module."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._module is not None:
            for child in self._module.modules():
                _drop(child)
            self._module = None

    def _deepcopy(self) -> Callable[..., Any]:
        reference = weakref.ref(self)

        def deepcopy(module: nn.Module, memo: dict[int, Any]) -> Any:
            guards = reference()
            if guards is None or (guards._divided and not guards._inside):
                raise AccelError(copies_refused(module))
            own, before = vars(module).pop("__deepcopy__"), guards._copying
            guards._copying = True
            try:
                return copy.deepcopy(module, memo)
            finally:
                guards._copying = before
                vars(module)["__deepcopy__"] = own

        return deepcopy

    def _getstate(self) -> Callable[..., Any]:
        """Of a whole module a copy without the guards, and no pickle: what the library adds to parameters has none."""
        reference = weakref.ref(self)

        def getstate(module: nn.Module) -> Any:
            guards = reference()
            if guards is None or not guards._copying:
                raise AccelError(
                    f"a {type(module).__name__} cannot be pickled while DeepSpeed works on its weights: pickle what "
                    "accel.full_state_dict(model) returns, which every rank calls, or the module that accel.teardown(model) "
                    "returns; accel.save writes a checkpoint"
                )
            state = type(module).__getstate__(module) if hasattr(type(module), "__getstate__") else vars(module)
            return {k: v for k, v in state.items() if k not in _OWN} if isinstance(state, dict) else state

        return getstate

    @property
    def _divided(self) -> bool:
        engine = self._engine()
        return engine is not None and engine.weights_divided


def _drop(guarded: nn.Module | Optimizer) -> None:
    for name in _OWN:
        if isinstance(vars(guarded).get(name), Method):
            del vars(guarded)[name]


def _module_zero_grad(reference: weakref.ref[DeepSpeedEngine]) -> Callable[..., None]:
    def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        engine, own = reference(), list(module.parameters())
        _, dropped = call_zero_grad(module, own, args, kwargs)
        if engine is not None:  # a copy of the module has this method too, and other parameters
            engine.gradients.drop(own, dropped)

    return zero_grad


def _optimizer_zero_grad(reference: weakref.ref[DeepSpeedEngine]) -> Callable[..., Any]:
    def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        engine = reference()
        if engine is None:
            return type(optimizer).zero_grad(optimizer, *args, **kwargs)
        return engine.gradients.zero(optimizer, args, kwargs)

    return zero_grad


def call_zero_grad(
    holder: nn.Module | Optimizer, parameters: Sequence[nn.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool]:
    """What the class's own ``zero_grad`` returns, and whether it dropped gradients rather than filling them with zeros.

    Its arguments need not be torch's, so that is seen by what becomes of one gradient.
    """
    probe = next((p for p in parameters if p.requires_grad), None)
    with torch._C.DisableTorchFunctionSubclass():
        had = probe is None or probe.grad is not None
        if probe is not None and not had:
            probe.grad = torch.zeros_like(probe)
        out = type(holder).zero_grad(holder, *args, **kwargs)  # type: ignore[arg-type]
        dropped = probe is None or probe.grad is None
        if probe is not None and not had:
            probe.grad = None
        return out, dropped
