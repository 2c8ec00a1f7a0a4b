"""Methods of the user's raw objects that are others while DeepSpeed works on them: ``zero_grad``, and copies of a module."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import AccelError

if TYPE_CHECKING:
    from . import DeepSpeedEngine

#: What stands in the place of a raw object's own.
_OWN: Final = ("zero_grad", "__deepcopy__", "__getstate__")


@final
class Method:
    """A bound method whose repr is not its owner's: some modules (``EmbeddingBag``) show all of their attributes in theirs."""

    def __init__(self, function: Callable[..., Any], owner: Any) -> None:
        self._function = function
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._owner, *args, **kwargs)


def put(raw: nn.Module | Optimizer, engine: DeepSpeedEngine) -> None:
    """Put them into an optimizer, or into a module and all in it that have parameters; the engine is held weakly."""
    functions: dict[str, Callable[..., Any]] = {"zero_grad": _zero_grad(weakref.ref(engine))}
    if isinstance(raw, nn.Module):
        functions |= {"__deepcopy__": _deepcopy, "__getstate__": _getstate}
    for holder in [raw] if isinstance(raw, Optimizer) else raw.modules():
        if isinstance(holder, Optimizer) or any(True for _ in holder.parameters()):
            vars(holder).update({name: Method(function, holder) for name, function in functions.items()})


def remove(raw: nn.Module | Optimizer) -> None:
    """Take them out again."""
    for holder in [raw] if isinstance(raw, Optimizer) else raw.modules():
        for name in _OWN:
            if isinstance(vars(holder).get(name), Method):
                del vars(holder)[name]


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> Any:
    own = {name: vars(module).pop(name) for name in _OWN}
    try:
        return copy.deepcopy(module, memo)
    finally:
        vars(module).update(own)


def _getstate(module: nn.Module) -> NoReturn:
    raise AccelError(
        f"a {type(module).__name__} cannot be pickled while DeepSpeed works on its weights: pickle what "
        "accel.full_state_dict(model) returns, which every rank calls, or the module that accel.teardown(model) returns; "
        "accel.save writes a checkpoint"
    )


def _zero_grad(reference: weakref.ref[DeepSpeedEngine]) -> Callable[..., Any]:
    """The class's own, whose arguments need not be torch's: what becomes of one gradient tells whether it drops them."""

    def zero_grad(holder: Any, *args: Any, **kwargs: Any) -> Any:
        engine, parameters = reference(), []
        if isinstance(holder, nn.Module):
            parameters = list(holder.parameters())
        elif engine is not None:
            parameters = [engine.parameters[i] for i in engine.indices(holder)]
        probe: Any = next((p for p in parameters if p.requires_grad), None)
        with torch._C.DisableTorchFunctionSubclass():
            if lacking := probe is not None and probe.grad is None:
                probe.grad = torch.zeros_like(probe)
            out = type(holder).zero_grad(holder, *args, **kwargs)
            dropped = probe is None or probe.grad is None
            if lacking:
                probe.grad = None
        if engine is not None:
            engine.gradients.drop(parameters, dropped)
        return out

    return zero_grad
