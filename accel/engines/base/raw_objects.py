"""The user's raw model and optimizers while an engine works on them.

This file has stand-ins for a module's tensors in ``state_dict`` and
``load_state_dict``, overrides of sharded objects' methods, a record of a
library's changes to a module, and copies of a module.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError
from ...handles import HiddenAttribute
from ...precision import Replaced, restore_batchnorms
from .absent import Absent, attributes, name_of

if TYPE_CHECKING:
    from .holdings import Holdings


Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# -- stand-ins for a module's tensors --------------------------------------------------------------

#: The module's table of hooks to run after ``load_state_dict``.
_POST_HOOKS: Final = "_load_state_dict_post_hooks"
_FSDP: Final = "torch.distributed."
#: A table of a module, a name in it, and the tensor.
_Place = tuple[Any, str, Any]
#: The replacement of each tensor, by ``id(tensor)``.
StandIns = Mapping[int, Tensor]


@contextlib.contextmanager
def in_place_of(
    module: nn.Module, stand_ins: StandIns, before_hooks: Function | None = None
) -> Iterator[None]:
    """Temporarily replace parameters and buffers.

    During a load, a module's post-load hooks see the module's own tensors
    again. ``before_hooks`` is called before these hooks.
    """
    places: dict[int, list[_Place]] = {}
    hooks: list[tuple[dict[str, Any], Any]] = []

    def put_back(parent: nn.Module) -> None:
        for child in parent.modules():
            for table, name, tensor in places.pop(id(child), ()):
                if table.get(name) is stand_ins[id(tensor)]:
                    dict.__setitem__(table, name, tensor)

    def loaded(child: nn.Module, *_: Any) -> None:
        assert before_hooks is not None
        put_back(child)
        before_hooks()

    try:
        for child in module.modules():
            places[id(child)] = _replace_tensors(child, stand_ins)
            names = vars(child)
            own_hooks = names[_POST_HOOKS]
            if before_hooks is not None and own_hooks:
                hooks.append((names, own_hooks))
                # FSDP2's hooks would raise for replaced tensors.
                users = [h for h in own_hooks.values() if not _is_from(h, _FSDP)]
                chain = [loaded, *users] if users else []
                names[_POST_HOOKS] = OrderedDict(enumerate(chain))
        yield
    finally:
        put_back(module)
        for names, own_hooks in hooks:
            names[_POST_HOOKS] = own_hooks


def _replace_tensors(module: nn.Module, stand_ins: StandIns) -> list[_Place]:
    """Replace a module's own tensors. Return their places."""
    places: list[_Place] = []
    for table in (vars(module)["_parameters"], vars(module)["_buffers"]):
        for name, tensor in list(table.items()):
            if id(tensor) in stand_ins:
                places.append((table, name, tensor))
                # dict's method, because the methods of DeepSpeed's table would gather weights.
                dict.__setitem__(table, name, stand_ins[id(tensor)])
    return places


@final
class Target(Absent, Tensor):
    """A stand-in during a load, which records the value copied to it."""

    plain = frozenset(attributes("requires_grad", "__get__"))
    given: Tensor | None

    @staticmethod
    def of(tensor: Tensor, shape: torch.Size | None) -> Target:
        """Return a stand-in of full shape that expands one element."""
        blank = torch.empty((), dtype=tensor.dtype, device=tensor.device)
        full = blank.expand(tensor.shape if shape is None else shape)
        target = full.as_subclass(Target)
        target.given = None
        return target

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"A load hook used {name_of(function)} of a sharded parameter, "
            "which has no values during a load. Change the state dict."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_ or not isinstance(args[0], Target):
            return super().__torch_function__(func, types, args, kwargs)
        target, value = args[:2]
        # A module may load its own tensors.
        if value is not target:
            if isinstance(value, Target):
                value.fetch(func)
            target.given = value
        return target


# -- methods of raw objects ------------------------------------------------------------------------


@final
class Override:
    """A raw object's method, replaced by ``act(raw, original, *args)``.

    ``remove`` undoes it. If it was wrapped in the meantime, it stays and calls the original.
    """

    def __init__(self, raw: Any, name: str, act: Function) -> None:
        self._name = name
        # A weak reference, because a cycle would keep the raw object until a garbage collection.
        self._raw = reference = weakref.ref(raw)
        #: The program's own attribute, such as a scheduler's wrapper of ``step``.
        self._earlier = earlier = vars(raw).get(name)
        self._active = active = [True]

        def method(_: Any, *args: Any, **kwargs: Any) -> Any:
            owner = reference()
            original: Any = earlier
            if earlier is None and hasattr(type(owner), name):
                original = MethodType(getattr(type(owner), name), owner)
            if not active:
                return original(*args, **kwargs)
            return act(owner, original, *args, **kwargs)

        # Schedulers mark the function with attributes, and take ``optimizer.step.__func__``.
        vars(method).update(getattr(earlier, "__dict__", {}))
        self._method = vars(raw)[name] = MethodType(method, reference)

    def remove(self) -> None:
        self._active.clear()
        raw = self._raw()
        if raw is None or vars(raw).get(self._name) is not self._method:
            return
        if self._earlier is None:
            del vars(raw)[self._name]
        else:
            vars(raw)[self._name] = self._earlier


def move_hook(handle: Any, *, last: bool) -> None:
    """Make a hook the first or the last to be called."""
    handle.hooks_dict_ref().move_to_end(handle.id, last=last)


#: The methods to override on sharded raw objects. Optimizers don't have the last.
_METHODS: Final = ("state_dict", "load_state_dict", "__getstate__", "__deepcopy__")


@final
class Guard:
    """Overrides of a sharded object's methods for its state.

    ``state_dict`` and ``deepcopy`` gather, ``load_state_dict`` takes a full
    state, and pickle raises. Objects without shards run their own methods.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = weakref.ref(holdings)
        self._is_open = False
        self._overrides: dict[int, list[Override]] = {}

    def watch(self, raw: nn.Module | Optimizer) -> None:
        """Override the methods of a raw model or optimizer."""
        self.release(raw)
        names = _METHODS if isinstance(raw, nn.Module) else _METHODS[:-1]
        acts = [functools.partial(self._call, name) for name in names]
        self._overrides[id(raw)] = list(map(Override, repeat(raw), names, acts))

    def release(self, raw: nn.Module | Optimizer) -> None:
        """Remove the overrides of a raw object."""
        for override in self._overrides.pop(id(raw), ()):
            override.remove()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let the raw objects run their own methods."""
        was_open, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = was_open

    def _call(self, name: str, raw: Any, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        holdings = self._holdings()
        optimizer = raw if isinstance(raw, Optimizer) else None
        if holdings is not None:
            if name == "__deepcopy__":
                return holdings.copy(*args)
            if self._is_open or not holdings.partial(optimizer):
                if name == "__getstate__" and optimizer is None:
                    return holdings.copy({}).__getstate__()
                return original(*args, **kwargs)
            if name == "state_dict":
                return holdings.state_dict(optimizer, *args, **kwargs)
            if name == "load_state_dict":
                return holdings.load_state_dict(optimizer, args, kwargs)
        # The program pickles the raw object, or the model of this optimizer is deleted.
        advice = f"accel.full_state_dict({'optimizer' if optimizer else 'model'})"
        raise OptimizerError(
            f"{type(raw).__name__} holds only this rank's shard of its state. "
            f"Call {advice} on every rank."
        )


# -- a library's changes to a module ---------------------------------------------------------------

_HOOKS: Final = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
#: Attributes of modules that accel may replace.
_REPLACED: Final = (*_METHODS, "forward", "zero_grad", HiddenAttribute.KEY)
#: An attribute's name, or the name of a table of hooks and a key in it.
_Mark = str | tuple[str, int]


def _marks(owner: Any) -> set[_Mark]:
    """Return the attributes and hooks of a module or parameter."""
    marks: set[_Mark] = set(vars(owner))
    for table in _HOOKS:
        marks.update((table, key) for key in getattr(owner, table, None) or ())
    return marks


def _remove(owner: Any, marks: Iterable[_Mark]) -> None:
    for mark in marks:
        if isinstance(mark, str):
            vars(owner).pop(mark, None)
        else:
            table, key = mark
            (getattr(owner, table, None) or {}).pop(key, None)


@final
class Snapshot:
    """Classes, attributes and hooks before a library's changes.

    Attributes with a prefix in ``later`` always count as the library's.
    """

    def __init__(self, module: nn.Module, later: tuple[str, ...] = ()) -> None:
        self._module, self._later = module, later
        #: The owner, its class and its marks, by the owner's ``id``.
        self._before: dict[int, tuple[Any, type[Any], set[_Mark]]] = {}
        for owner in [*module.modules(), *module.parameters()]:
            self._before[id(owner)] = owner, type(owner), _marks(owner)
        #: The library's marks, by the owner's ``id``.
        self._added: dict[int, set[_Mark]] = {}

    def changed(self) -> None:
        """Record the library's changes. Later changes are the user's."""
        for key, (owner, _, marks) in self._before.items():
            self._added[key] = _marks(owner) - marks

    def kind(self, owner: Any) -> type[Any]:
        """Return the earlier class of a module or parameter."""
        _, kind, _ = self._before.get(id(owner), (owner, type(owner), set()))
        return kind

    def added(self, owner: Any) -> set[_Mark]:
        """Return a library's attributes and hooks of a module or parameter."""
        marks = self._added.get(id(owner), set())
        return marks | {name for name in vars(owner) if name.startswith(self._later)}

    def hooks(self, table: str) -> list[Any]:
        """Return the library's hooks of the root module."""
        added = self.added(self._module)
        hooks = vars(self._module)[table]
        return [hook for key, hook in hooks.items() if (table, key) in added]

    def change_hooks(self, table: str, change: Callable[[Function], Function]) -> None:
        """Replace the library's hooks of all modules."""
        for key, (owner, *_) in self._before.items():
            hooks = getattr(owner, table, {})
            for number, hook in hooks.items():
                if (table, number) in self._added[key]:
                    hooks[number] = change(hook)

    def restore(self) -> None:
        """Undo the library's changes, even if it failed halfway."""
        if not self._added:
            self.changed()
        for owner, kind, _ in self._before.values():
            _remove(owner, self.added(owner))
            table = vars(owner).get("_parameters", {})
            if type(table) is not dict:
                vars(owner)["_parameters"] = dict(table.items())
            if type(owner) is not kind:
                owner.__class__ = kind
        self._before.clear()
        self._added.clear()


# -- copies of a module ----------------------------------------------------------------------------


@contextlib.contextmanager
def as_author_made(
    module: nn.Module, snapshot: Snapshot | None, replaced: Replaced
) -> Iterator[None]:
    """Temporarily undo accel's and a library's changes, except to tensors."""
    before: list[tuple[Any, type[Any], dict[str, Any]]] = []
    for part in module.modules():
        if not isinstance(part, torch.jit.ScriptModule):
            before.append((part, type(part), dict(vars(part))))
    try:
        for part, *_ in before:
            marks = _marks_of_accel(part)
            if snapshot is not None:
                marks |= snapshot.added(part)
                part.__class__ = snapshot.kind(part)
            # Change copies of the tables. DeepSpeed's table of parameters becomes a plain dict.
            for name in _HOOKS:
                vars(part)[name] = vars(part)[name].copy()
            for name in ("_modules", "_parameters"):
                vars(part)[name] = dict(vars(part)[name].items())
            _remove(part, marks)
        restore_batchnorms(list(replaced))
        yield
    finally:
        for part, kind, names in before:
            part.__class__ = kind
            vars(part).clear()
            vars(part).update(names)


def _marks_of_accel(module: nn.Module) -> set[_Mark]:
    names = vars(module)
    marks: set[_Mark] = set()
    for name in _REPLACED:
        if _is_from(names.get(name), "accel."):
            marks.add(name)
    for table in _HOOKS:
        for key, hook in names[table].items():
            if _is_from(hook, "accel."):
                marks.add((table, key))
    return marks


def _is_from(value: Any, package: str) -> bool:
    """True if a function, or the class of an object, is from a package."""
    while isinstance(value, functools.partial):
        value = value.func
    homes = type(value).__module__, getattr(value, "__module__", None)
    return any(f"{home}.".startswith(package) for home in homes)
