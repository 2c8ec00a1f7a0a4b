"""The user's raw objects while an engine works on them.

What stands in a module's places for a while; what the methods of an object refuse of which this rank holds a part; what a
library put on a module, to be taken away again; and copies of a module without any of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ...errors import AccelError, BackendError, OptimizerError
from ...gradients.log import remove_hooks
from ...handles import HiddenAttribute
from .absent import Absent, attributes, name_of

if TYPE_CHECKING:
    from .holdings import Holdings


@contextlib.contextmanager
def in_place_of(
    module: nn.Module, others: Mapping[int, torch.Tensor], before_hooks: Callable[[], None] | None = None
) -> Iterator[None]:
    """Inside, other tensors are in the places of a module's own, by the identity of these.

    Hooks that run after a module was loaded find its own tensors again; ``before_hooks`` fills them. FSDP2's do not run: they
    look for tensors that were replaced, and none is.
    """
    places: dict[int, list[tuple[Any, str, Any, Any]]] = {}
    hooks: list[tuple[dict[str, Any], Any]] = []

    def put_back(child: nn.Module) -> None:
        for part in child.modules():
            for container, name, other, own in places.pop(id(part), ()):
                if container.get(name) is other:
                    dict.__setitem__(container, name, own)

    def loaded(child: nn.Module, *_: Any) -> None:
        assert before_hooks is not None
        put_back(child)
        before_hooks()

    try:
        for part in module.modules():
            places[id(part)] = [
                (container, name, others[id(own)], own)
                for container in (part._parameters, part._buffers)
                for name, own in container.items()
                if id(own) in others
            ]
            for container, name, other, _ in places[id(part)]:
                dict.__setitem__(container, name, other)  # past a container's own ways, which may gather
            own_hooks = part._load_state_dict_post_hooks
            theirs = {k: h for k, h in own_hooks.items() if not str(h.__module__).startswith("torch.distributed.")}
            if before_hooks is not None and own_hooks:
                hooks.append((vars(part), own_hooks))
                vars(part)["_load_state_dict_post_hooks"] = OrderedDict({-1: loaded, **theirs} if theirs else {})
        yield
    finally:
        put_back(module)
        for attributes, own_hooks in hooks:
            attributes["_load_state_dict_post_hooks"] = own_hooks


@contextlib.contextmanager
def copied_to() -> Iterator[None]:
    """Inside, a state is loaded by copies to a module's tensors, also where torch would put others in their places."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


@final
class Target(Absent, torch.Tensor):
    """Stands in a module for a tensor while a whole state is loaded, and notes what is copied to it."""

    plain = frozenset(attributes("requires_grad", "__get__"))
    given: torch.Tensor | None

    @staticmethod
    def of(tensor: torch.Tensor, shape: torch.Size | None) -> Target:
        """A stand-in with the whole shape, in one element's memory."""
        blank = torch.empty((), dtype=tensor.dtype, device=tensor.device)
        made = blank.expand(tensor.shape if shape is None else shape).as_subclass(Target)
        made.given = None
        return made

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"{name_of(function)} of a parameter while a state is loaded, of which this rank may hold a part: a hook that comes "
            "before a load, or an own _load_from_state_dict, finds no values there; change the state dict instead"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[0], Target):
            if isinstance(args[1], Target) and args[1] is not args[0]:
                args[1].fetch(func)
            if args[1] is not args[0]:  # else it is filled with itself
                args[0].given = args[1]
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


# -- A state dict, a copy or a pickle of one would look whole -----------------------------------------------------------

#: How ``copy`` and ``pickle`` ask an object for what they take; of the instance, since the class is the user's.
_COPIES: Final = ("__deepcopy__", "__getstate__")
_STATE_DICT: Final = "state_dict"
#: In whose place an engine may put another one, in a module's own attributes.
REPLACED: Final = (*_COPIES, _STATE_DICT, "zero_grad", "forward", HiddenAttribute.KEY)


@final
class NotGathered(Absent, torch.Tensor):
    """A value in the ``state_dict()`` of a submodule of a sharded model: it has a shape and a dtype, but no values."""

    @staticmethod
    def of(tensor: torch.Tensor) -> NotGathered:
        """Return a stand-in for a parameter or buffer of a submodule."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(NotGathered)

    def detach(self) -> NotGathered:
        return self

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"{name_of(function)}() needs a value of a submodule's state_dict(), but the model is sharded. Use "
            "accel.full_state_dict(model), which every rank calls."
        )


@final
class Guard:
    """Refuses ``load_state_dict()``, copies and pickles of raw modules and optimizers, unless opened; ``state_dict()`` is whole.

    ``state_dict()`` of a submodule has its keys, and values that raise when they are used: peft asks a submodule for its keys.
    Where the engine is gone, which an optimizer does not keep, ``state_dict()`` is refused.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = weakref.ref(holdings)
        self._open = False
        self._watched: dict[int, tuple[weakref.ref[Any], list[RemovableHandle]]] = {}

    def watch(self, raw: nn.Module | Optimizer, load: Callable[..., Any] | None = None) -> None:
        """Refuse from now on; ``load`` is called instead before a raw optimizer loads a state, and may give another one."""
        self.release(raw)
        before_load = functools.partial(self._check, "load_state_dict()")
        hooks = [
            raw.register_state_dict_pre_hook(functools.partial(self._check, "state_dict()")),
            raw.register_load_state_dict_pre_hook(load or before_load),
        ]
        self._watched[id(raw)] = weakref.ref(raw), hooks
        found = vars(raw).get(_STATE_DICT)  # of the user's own
        vars(raw)[_STATE_DICT] = functools.partial(self._give, weakref.ref(raw), found)
        refused = _refusal(
            raw, f"a copy or pickle of this {type(raw).__name__}", "a copy or pickle would miss the rest"
        )
        for name in _COPIES:
            vars(raw)[name] = functools.partial(refuse_call, *refused)

    def watch_modules(self, module: nn.Module, holds_part: Callable[[nn.Module], bool]) -> None:
        """Refuse it of a module and of those in it of which this rank holds a part."""
        for child in filter(holds_part, module.modules()):
            self.watch(child)

    def release_modules(self) -> None:
        """The end of ``watch_modules``, also for those that were taken out of the module since."""
        for reference, _ in list(self._watched.values()):
            if isinstance(raw := reference(), nn.Module):
                self.release(raw)

    def release(self, raw: nn.Module | Optimizer) -> None:
        _, hooks = self._watched.pop(id(raw), (None, []))
        remove_hooks(hooks)
        for name in _COPIES:
            if getattr(vars(raw).get(name), "func", None) is refuse_call:
                del vars(raw)[name]
        given: Any = vars(raw).get(_STATE_DICT)
        if getattr(given, "func", None) == self._give:
            del vars(raw)[_STATE_DICT]
            vars(raw).update({_STATE_DICT: given.args[1]} if given.args[1] else {})

    def _give(self, reference: weakref.ref[Any], found: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of ``state_dict`` of a raw object; ``found`` was there before."""
        raw: Any = reference()
        holdings = self._holdings()
        optimizer = raw if isinstance(raw, Optimizer) else None
        if holdings is None or self._open or not holdings.partial(optimizer):
            return (found or functools.partial(type(raw).state_dict, raw))(*args, **kwargs)
        if optimizer is None and raw is not holdings.module:
            tensors = [*raw.parameters(), *raw.buffers()]
            with self.opened(), in_place_of(raw, {id(tensor): NotGathered.of(tensor) for tensor in tensors}):
                return raw.state_dict(*args, **kwargs)
        return holdings.state_dict(optimizer, *args, **kwargs)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let state dicts through inside."""
        before, self._open = self._open, True
        try:
            yield
        finally:
            self._open = before

    def _check(self, what: str, raw: nn.Module | Optimizer, *_: object) -> None:
        if not self._open:
            loading = "every rank loads a whole one by load_state_dict(full) of the handle, or by accel.load"
            lead = loading if what.startswith("load") else "it would miss the rest"
            refuse_call(*_refusal(raw, f"{what} of this {type(raw).__name__}", lead))


def _refusal(raw: nn.Module | Optimizer, what: str, why: str) -> tuple[type[AccelError], str]:
    """The error, which says what to do instead; that works on every backend."""
    kind, error = ("model", BackendError) if isinstance(raw, nn.Module) else ("optimizer", OptimizerError)
    ended = "returns it whole" if kind == "model" else "gives it back with its whole state"
    return error, (
        f"{what}: this rank holds only its own part of it, and {why}; use what accel.full_state_dict({kind}) returns, which "
        f"every rank calls; accel.teardown(model) {ended}; accel.save writes a checkpoint"
    )


def refuse_call(error: type[AccelError], text: str, *_: object) -> NoReturn:
    """Stands, with an error and its text, where a call would go wrong."""
    raise error(text)


# -- What a module was before a library changed it, beside its values --------------------------------------------------

_HOOKS: Final = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
#: An owner, its class, names of attributes and keys of hooks: as they are; or its own class where the library changed that, and
#: what the library added.
_Owned = tuple[Any, type[Any] | None, set[str], dict[str, set[int]]]


def _owned(owner: Any) -> _Owned:
    return owner, type(owner), set(vars(owner)), {name: set(getattr(owner, name, None) or ()) for name in _HOOKS}


@final
class Snapshot:
    """The classes, attributes and hooks of a module, its children and its parameters; holds no tensor's values.

    What the library adds while it runs begins with one of ``later``.
    """

    def __init__(self, module: nn.Module, later: tuple[str, ...] = ()) -> None:
        self._module, self._later = module, later
        self._before = [_owned(owner) for owner in (*module.modules(), *module.parameters())]
        self._containers = [(m, type(m._parameters)) for m in module.modules()]
        #: By the identity of owners, which it holds.
        self._added: dict[int, _Owned] = {}

    def changed(self) -> None:
        """Call it when the library has made its changes: later ones are the user's."""
        for owner, kind, names, hooks in self._before:
            _, kind_now, names_now, hooks_now = _owned(owner)
            changed = None if kind is kind_now else kind
            added = {k: hooks_now[k] - hooks[k] for k in hooks}
            self._added[id(owner)] = owner, changed, names_now - names, added
        self._before.clear()

    def added(self, owner: Any) -> set[str]:
        """The names of the attributes that the library has added to a module or parameter."""
        known = self._added.get(id(owner))
        found = set() if known is None else known[2]
        return found | {name for name in vars(owner) if name.startswith(self._later)}

    def hooks(self, name: str) -> list[Any]:
        """The library's hooks of the root module."""
        keys = self._added[id(self._module)][3][name]
        return [hook for key, hook in getattr(self._module, name).items() if key in keys]

    def change_hooks(self, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let the library's hooks of all modules be others."""
        for owner, _, _, hooks in self._added.values():
            for key in hooks[name]:
                kept = getattr(owner, name, {})
                if key in kept:  # one of the library's own may be removed again
                    kept[key] = change(kept[key])

    def restore(self) -> None:
        """Undo the library's changes, also where it failed half-way: hooks that it has left would run in the user's model."""
        self.changed()
        for module, container in self._containers:
            if type(module._parameters) is not container:
                vars(module)["_parameters"] = container(module._parameters.items())
        for owner, kind, _, hooks in self._added.values():
            own: Any = vars(owner)
            for name in self.added(owner):
                own.pop(name, None)
            for name, keys in hooks.items():
                for key in keys:
                    getattr(owner, name).pop(key, None)
            if kind is not None:
                owner.__class__ = kind
        self._added.clear()


# -- A module as its author made it: what copies and pickles of its handle hold. The module itself stays as it is meanwhile ------

_TABLES: Final = frozenset(name for name in _HOOKS if name.endswith("_hooks"))


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

    ``whole``: tensors for the places of others, by the identity of these. ``memo`` is as of ``copy.deepcopy``, ``root`` what is
    pickled, to which the model's references to itself lead then.
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
