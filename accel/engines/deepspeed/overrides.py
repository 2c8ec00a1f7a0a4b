"""Methods of the user's raw objects that are others while DeepSpeed works on them: ``zero_grad``, and copies of a module."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import AccelError
from .stage3 import Method

if TYPE_CHECKING:
    from . import DeepSpeedEngine

#: What stands in the place of a raw object's own.
_OWN: Final = ("zero_grad", "__deepcopy__", "__getstate__")


@final
class Overrides:
    """Puts them into the raw objects of one engine, which it holds weakly.

    Args:
        engine: drops the gradients.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = weakref.ref(engine)
        self._copying = False

    def put(self, raw: nn.Module | Optimizer) -> None:
        """Into a module and all in it, or into an optimizer."""
        if isinstance(raw, Optimizer):
            vars(raw)["zero_grad"] = Method(_optimizer_zero_grad(self._engine), raw)
            return
        for child in raw.modules():
            if any(True for _ in child.parameters()):
                vars(child)["__deepcopy__"] = Method(self._deepcopy(), child)
                vars(child)["__getstate__"] = Method(self._getstate(), child)
            vars(child)["zero_grad"] = Method(_module_zero_grad(self._engine), child)

    def remove(self, raw: nn.Module | Optimizer) -> None:
        """Take them out again."""
        for holder in [raw] if isinstance(raw, Optimizer) else raw.modules():
            for name in _OWN:
                if isinstance(vars(holder).get(name), Method):
                    del vars(holder)[name]

    def _deepcopy(self) -> Callable[..., Any]:
        reference = weakref.ref(self)

        def deepcopy(module: nn.Module, memo: dict[int, Any]) -> Any:
            own, overrides = vars(module).pop("__deepcopy__"), reference()
            assert overrides is not None  # the module's engine has it
            before, overrides._copying = overrides._copying, True
            try:
                return copy.deepcopy(module, memo)
            finally:
                overrides._copying = before
                vars(module)["__deepcopy__"] = own

        return deepcopy

    def _getstate(self) -> Callable[..., Any]:
        """For a copy of a whole module, without these; a pickle there is none of what the library adds to parameters."""
        reference = weakref.ref(self)

        def getstate(module: nn.Module) -> Any:
            overrides = reference()
            if overrides is None or not overrides._copying:
                raise AccelError(
                    f"a {type(module).__name__} cannot be pickled while DeepSpeed works on its weights: pickle what "
                    "accel.full_state_dict(model) returns, which every rank calls, or the module that accel.teardown(model) "
                    "returns; accel.save writes a checkpoint"
                )
            state = type(module).__getstate__(module) if hasattr(type(module), "__getstate__") else vars(module)
            return {k: v for k, v in state.items() if k not in _OWN} if isinstance(state, dict) else state

        return getstate


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
