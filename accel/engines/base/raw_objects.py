"""The user's raw model and optimizers while an engine works on them.

The sections are stand-ins for tensors while a full state is loaded or returned, methods of raw
objects that are sharded, a record of what a library changed on a module, and copies of a module.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError
from ...handles import HiddenAttribute
from ...precision import Replaced, restore_batchnorms
from .absent import Absent, attributes, name_of

if TYPE_CHECKING:
    from .holdings import Holdings


# -- stand-ins for a module's tensors --------------------------------------------------------------


@contextlib.contextmanager
def in_place_of(
    module: nn.Module,
    stand_ins: Mapping[int, torch.Tensor],
    before_hooks: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Temporarily replace parameters and buffers. ``stand_ins`` has them by ``id(tensor)``.

    While a state is loaded, the hooks that run after a module was loaded see the module's own
    tensors again, and ``before_hooks`` is called before them.
    """
    places: dict[int, list[tuple[Any, str, Any]]] = {}
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
            own_hooks = child._load_state_dict_post_hooks
            if before_hooks is not None and own_hooks:
                hooks.append((vars(child), own_hooks))
                # Hooks of FSDP2 raise for replaced tensors.
                users = [h for h in own_hooks.values() if not _is_from(h, "torch.distributed.")]
                chain = OrderedDict(enumerate([loaded, *users] if users else []))
                vars(child)["_load_state_dict_post_hooks"] = chain
        yield
    finally:
        put_back(module)
        for names, own_hooks in hooks:
            names["_load_state_dict_post_hooks"] = own_hooks


def _replace_tensors(
    module: nn.Module, stand_ins: Mapping[int, torch.Tensor]
) -> list[tuple[Any, str, Any]]:
    """Replace a module's own tensors. Return the tables, names and tensors that were there."""
    places: list[tuple[Any, str, Any]] = []
    tables: tuple[Any, Any] = (module._parameters, module._buffers)
    for table in tables:
        for name, tensor in list(table.items()):
            if id(tensor) in stand_ins:
                places.append((table, name, tensor))
                # The methods of DeepSpeed's table gather.
                dict.__setitem__(table, name, stand_ins[id(tensor)])
    return places


@contextlib.contextmanager
def copied_to() -> Iterator[None]:
    """Load states by copying, even if torch was told to swap tensors instead."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


@final
class Target(Absent, torch.Tensor):
    """A stand-in while a full state is loaded, which records the value that is copied to it."""

    plain = frozenset(attributes("requires_grad", "__get__"))
    given: torch.Tensor | None

    @staticmethod
    def of(tensor: torch.Tensor, shape: torch.Size | None) -> Target:
        """Return a stand-in of the full shape in the memory of one element."""
        blank = torch.empty((), dtype=tensor.dtype, device=tensor.device)
        target = blank.expand(tensor.shape if shape is None else shape).as_subclass(Target)
        target.given = None
        return target

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"A load hook used {name_of(function)} of a sharded parameter, which has no values "
            "while a state is loaded. Change the state dict instead."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.copy_ or not isinstance(args[0], Target):
            return super().__torch_function__(func, types, args, kwargs)
        target, value = args[:2]
        if value is not target:  # a module may load its own tensors
            if isinstance(value, Target):
                value.fetch(func)
            target.given = value
        return target


# -- methods of raw objects ------------------------------------------------------------------------


@final
class Override:
    """A method in the attributes of a raw object, which calls ``act(raw, original, *args)``.

    ``remove`` undoes it. If something else has wrapped it since, it stays, and calls the original.
    """

    def __init__(self, raw: Any, name: str, act: Callable[..., Any]) -> None:
        self._name = name
        # A weak reference, so that the raw object is freed without the garbage collector.
        self._raw = reference = weakref.ref(raw)
        #: The program's own attribute, such as a scheduler's wrapper of ``step``.
        self._earlier = earlier = vars(raw).get(name)
        self._active = active = [True]

        def method(_: Any, *args: Any, **kwargs: Any) -> Any:
            owner = reference()
            original: Any = earlier
            if earlier is None and hasattr(type(owner), name):
                original = MethodType(getattr(type(owner), name), owner)
            return act(owner, original, *args, **kwargs) if active else original(*args, **kwargs)

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


#: The methods of raw objects that are sharded. Optimizers lack the last one.
_METHODS: Final = ("state_dict", "load_state_dict", "__getstate__", "__deepcopy__")


@final
class Guard:
    """Overrides that gather in ``state_dict`` and ``copy.deepcopy``, and raise in pickle.

    ``load_state_dict`` takes a full state. Objects that are not sharded run their own methods.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = weakref.ref(holdings)
        self._is_open = False
        self._overrides: dict[int, list[Override]] = {}

    def watch(self, raw: nn.Module | Optimizer) -> None:
        """Put the methods on a raw model or optimizer."""
        self.release(raw)
        names = _METHODS if isinstance(raw, nn.Module) else _METHODS[:-1]
        self._overrides[id(raw)] = [
            Override(raw, name, functools.partial(self._call, name)) for name in names
        ]

    def release(self, raw: nn.Module | Optimizer) -> None:
        """Remove the methods of a raw object."""
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
        # A pickle of the raw object, or an optimizer that outlives its model.
        advice = f"accel.full_state_dict({'optimizer' if optimizer else 'model'})"
        raise OptimizerError(
            f"{type(raw).__name__} holds only this rank's shard of its state. Call {advice} on "
            "every rank."
        )


# -- what a library changed on a module ------------------------------------------------------------

_HOOKS: Final = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
#: Attributes that accel may put on a module.
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
    """The classes, attributes and hooks of modules and parameters before a library changed them.

    The library may add attributes that begin with one of ``later`` at any time.
    """

    def __init__(self, module: nn.Module, later: tuple[str, ...] = ()) -> None:
        self._module, self._later = module, later
        owners = [*module.modules(), *module.parameters()]
        self._before = [(owner, type(owner), _marks(owner)) for owner in owners]
        #: By identity: the owner, its class if the library changed it, and what the library added.
        self._changes: dict[int, tuple[Any, type[Any] | None, set[_Mark]]] = {}

    def changed(self) -> None:
        """Record the library's changes. Later changes are the user's."""
        for owner, kind, marks in self._before:
            changed = None if type(owner) is kind else kind
            self._changes[id(owner)] = owner, changed, _marks(owner) - marks
        self._before.clear()

    def kind(self, owner: Any) -> type[Any]:
        """Return the class that a module or parameter had before."""
        _, kind, _ = self._changes.get(id(owner), (owner, None, set()))
        return kind or type(owner)

    def added(self, owner: Any) -> set[_Mark]:
        """Return the library's attributes and hooks of a module or parameter."""
        *_, marks = self._changes.get(id(owner), (owner, None, set()))
        return marks | {name for name in vars(owner) if name.startswith(self._later)}

    def hooks(self, table: str) -> list[Any]:
        """Return the library's hooks of the root module."""
        added = self.added(self._module)
        return [hook for key, hook in getattr(self._module, table).items() if (table, key) in added]

    def change_hooks(
        self, table: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace the library's hooks of all modules."""
        for owner, _, marks in self._changes.values():
            hooks = getattr(owner, table, {})
            for key in [key for key in hooks if (table, key) in marks]:
                hooks[key] = change(hooks[key])

    def restore(self) -> None:
        """Undo the library's changes, also if the library failed half-way."""
        self.changed()
        for owner, kind, _ in self._changes.values():
            _remove(owner, self.added(owner))
            if isinstance(owner, nn.Module) and type(owner._parameters) is not dict:
                vars(owner)["_parameters"] = dict(owner._parameters.items())
            if kind is not None:
                owner.__class__ = kind
        self._changes.clear()


# -- copies of a module ----------------------------------------------------------------------------


@contextlib.contextmanager
def as_author_made(
    module: nn.Module, snapshot: Snapshot | None, replaced: Replaced
) -> Iterator[None]:
    """Temporarily undo all that accel and a library did to a module, except to its tensors.

    ``replaced`` has the BatchNorms that a SyncBatchNorm replaced, with their parents and names.
    """
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    before = [(part, type(part), dict(vars(part))) for part in parts]
    try:
        for part in parts:
            marks = _marks_of_accel(part)
            if snapshot is not None:
                marks |= snapshot.added(part)
                part.__class__ = snapshot.kind(part)
            # Changed are copies of its tables. DeepSpeed's table of parameters is no plain dict.
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
    marks: set[_Mark] = {name for name in _REPLACED if _is_from(vars(module).get(name), "accel.")}
    for table in _HOOKS:
        hooks = vars(module)[table].items()
        marks.update((table, key) for key, hook in hooks if _is_from(hook, "accel."))
    return marks


def _is_from(value: Any, package: str) -> bool:
    """True if a function or hook, or the class of an object, is defined in a package."""
    while isinstance(value, functools.partial):
        value = value.func
    modules = type(value).__module__, getattr(value, "__module__", None)
    return any(f"{module}.".startswith(package) for module in modules)
