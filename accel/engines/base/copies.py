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
    kinds: dict[nn.Module, Any] = {part: holdings.kind(part) for part in module.modules()}
    own = {part for part, kind in kinds.items() if root is None and _copies_itself(kind)}
    memo |= whole
    if not own:
        return _rebuilt(holdings, kinds, own, memo, root, root is not None)
    # What copies itself may do so by any way into its children: it is given children that are their author's too.
    memo.update({id(value): value for value in list(memo.values())})
    places = dict(memo)
    twin = _rebuilt(holdings, kinds, own, places, None, True)
    made: nn.Module = copy.deepcopy(twin, memo)
    memo.update({key: memo[id(value)] for key, value in places.items() if id(value) in memo})
    return made


def _copies_itself(kind: Any) -> bool:
    """Whether a class says itself how its objects are copied."""
    reduces = any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
    return reduces or hasattr(kind, "__deepcopy__")


def _rebuilt(
    holdings: Holdings,
    kinds: Mapping[nn.Module, Any],
    own: set[nn.Module],
    memo: dict[int, Any],
    root: Any,
    sharing: bool,
) -> nn.Module:
    """New modules of these classes; ``own`` ones with the very attributes, the others with what a pickle would hold."""
    module = holdings.module
    for p in module.parameters():
        if sharing and id(p) not in memo:
            memo[id(p)] = nn.Parameter(p.detach(), p.requires_grad)
            memo[id(p)].__class__ = type(p)
        if id(p) in memo:
            vars(memo[id(p)]).update(_without(vars(p), holdings.added(p)))
    shells = {part: kind.__new__(kind) for part, kind in kinds.items()}
    memo |= {id(part): shell for part, shell in shells.items()}
    memo[id(module)] = memo[id(holdings.engine.handle)] = shells[module] if root is None else root
    with _Sharing() if sharing else contextlib.nullcontext():
        for part, shell in shells.items():
            state = vars(part) if part in own else kinds[part].__getstate__(part)
            state = copy.deepcopy(_state(holdings, part, state), memo)
            vars(shell).update(state) if part in own else shell.__setstate__(state)
    made: nn.Module = shells[module]
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
