"""A module as its author made it: what copies and pickles of its handle hold. The module itself stays as it is meanwhile."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from .holdings import Holdings

_TABLES: Final = frozenset(name for name in vars(nn.Module()) if name.endswith("_hooks"))


def is_of(value: Any, packages: tuple[str, ...]) -> bool:
    """Whether a class, a function or a hook, or the class of another object, is defined in one of these packages."""
    value = value.hook if type(value).__name__ == "_WrappedHook" else value
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    owner = value if isinstance(value, type) or hasattr(value, "__code__") else type(value)
    return f"{owner.__module__}.".startswith(packages)


@final
class _Sharing(TorchFunctionMode):
    """Inside, a copy has the very tensors of what is copied, also those that torch would not copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def copied(holdings: Holdings, whole: Mapping[int, torch.Tensor], memo: dict[int, Any], root: Any = None) -> nn.Module:
    """A copy of the model; one to be pickled has its very tensors, as far as these are whole.

    Args:
        holdings: say what of the model is its author's.
        whole: tensors for the places of others, by the identity of these.
        memo: as of ``copy.deepcopy``.
        root: what is pickled, to which the model's references to itself lead then.
    """
    module = holdings.module
    memo |= whole
    for p in module.parameters():
        if root is not None and id(p) not in whole:
            memo[id(p)] = nn.Parameter(p.detach(), p.requires_grad)
            memo[id(p)].__class__ = type(p)
        if id(p) in memo:
            vars(memo[id(p)]).update(_without(vars(p), holdings.added(p)))
    kinds: dict[nn.Module, Any] = {part: holdings.kind(part) for part in module.modules()}
    theirs = {part: kind for part, kind in kinds.items() if root is None and hasattr(kind, "__deepcopy__")}
    shells = {part: kind.__new__(kind) for part, kind in kinds.items() if part not in theirs}
    memo |= {id(part): shell for part, shell in shells.items()}
    if module in shells:
        memo[id(module)] = memo[id(holdings.engine.handle)] = shells[module] if root is None else root
    memo |= {id(part): kind.__deepcopy__(part, memo) for part, kind in theirs.items()}
    with contextlib.nullcontext() if root is None else _Sharing():
        for part, shell in shells.items():
            shell.__setstate__(copy.deepcopy(_state(holdings, part, kinds[part].__getstate__(part)), memo))
    made: nn.Module = shells[module] if module in shells else memo[id(module)]
    return made


def _state(holdings: Holdings, part: nn.Module, state: Any) -> Any:
    """What a pickle of a module holds, without what its author did not put there."""
    if isinstance(state, dict):
        state = _without(state, holdings.added(part))
        state["_parameters"] = dict(state["_parameters"])
        for name in _TABLES & state.keys():
            kept = [number for number, hook in state[name].items() if not is_of(hook, holdings.packages)]
            for more in {name, f"{name}_with_kwargs", f"{name}_always_called"} & state.keys():
                state[more] = type(state[more])((n, state[more][n]) for n in kept if n in state[more])
    return state


def _without(own: Mapping[str, Any], added: set[str]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if name not in added}
