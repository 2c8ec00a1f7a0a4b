"""The user's raw model and optimizers while an engine works on them.

Stand-ins for a module's tensors while a full state is loaded or returned. Methods of raw objects that are sharded. A
record of what a library changed on a module, so that it can be undone, for good or while the module is copied.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError
from ...handles import HiddenAttribute
from ...precision import Replaced
from .absent import Absent, attributes, name_of

if TYPE_CHECKING:
    from .holdings import Holdings


# -- tensors in the places of a module's own ---------------------------------------------------------------------------


@contextlib.contextmanager
def in_place_of(
    module: nn.Module,
    others: Mapping[int, torch.Tensor],
    before_hooks: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Temporarily replace parameters and buffers of ``module``. ``others`` maps ``id(tensor)`` to its replacement.

    While a state is loaded, ``before_hooks`` is called before the hooks that run after a module was loaded. These hooks
    see the module's own tensors again. FSDP2's hooks don't run, because they raise for replaced tensors.
    """
    places: dict[int, list[tuple[Any, str, Any, Any]]] = {}
    hooks: list[tuple[dict[str, Any], Any]] = []

    def put_back(child: nn.Module) -> None:
        for part in child.modules():
            for container, name, other, tensor in places.pop(id(part), ()):
                if container.get(name) is other:
                    dict.__setitem__(container, name, tensor)

    def loaded(child: nn.Module, *_: Any) -> None:
        assert before_hooks is not None
        put_back(child)
        before_hooks()

    try:
        for part in module.modules():
            places[id(part)] = [
                (container, name, others[id(tensor)], tensor)
                for container in (part._parameters, part._buffers)
                for name, tensor in container.items()
                if id(tensor) in others
            ]
            for container, name, other, _ in places[id(part)]:
                dict.__setitem__(
                    container, name, other
                )  # DeepSpeed's container gathers in its own methods
            own_hooks = part._load_state_dict_post_hooks
            if before_hooks is not None and own_hooks:
                kept = {
                    k: h
                    for k, h in own_hooks.items()
                    if not str(h.__module__).startswith("torch.distributed.")
                }
                hooks.append((vars(part), own_hooks))
                vars(part)["_load_state_dict_post_hooks"] = OrderedDict(
                    {-1: loaded, **kept} if kept else {}
                )
        yield
    finally:
        put_back(module)
        for names, own_hooks in hooks:
            names["_load_state_dict_post_hooks"] = own_hooks


@contextlib.contextmanager
def copied_to() -> Iterator[None]:
    """Load states by copying into a module's tensors, even if torch was told to swap tensors instead."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


@final
class Target(Absent, torch.Tensor):
    """A stand-in for a tensor while a full state is loaded, which records the value that is copied to it."""

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
            f"{name_of(function)} of a parameter while a state is loaded: a load hook finds no values there, because this "
            "rank may hold a shard only. Change the state dict instead."
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


@final
class NotGathered(Absent, torch.Tensor):
    """A value in the ``state_dict()`` of a submodule of a sharded model: it has a shape and a dtype, but no values."""

    @staticmethod
    def of(tensor: torch.Tensor) -> NotGathered:
        """Return a stand-in for a sharded parameter."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(NotGathered)

    def detach(self) -> NotGathered:
        return self

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"{name_of(function)}() needs a value of a submodule's state_dict(), but the model is sharded. Use "
            "accel.full_state_dict(model), which every rank calls."
        )


# -- methods of raw objects that are sharded ---------------------------------------------------------------------------

#: The methods that raw objects get as instance attributes while an engine works on them.
_METHODS: Final = ("state_dict", "load_state_dict", "__getstate__", "__deepcopy__")


@final
class Guard:
    """Instance attributes of raw models and optimizers, so that their methods mean the same as those of their handles.

    ``state_dict()`` and ``copy.deepcopy(model)`` gather shards, ``load_state_dict()`` takes a full state, and pickle
    raises. Objects that are not sharded run their own methods.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = weakref.ref(holdings)
        self._is_open = False
        self._watched: dict[int, weakref.ref[Any]] = {}

    def watch(self, raw: nn.Module | Optimizer) -> None:
        """Put the methods on a raw model or optimizer. The base engine calls it for every backend that shards."""
        self.release(raw)
        self._watched[id(raw)] = weakref.ref(raw)
        for name in _METHODS if isinstance(raw, nn.Module) else _METHODS[:-1]:
            # The program may have put a method of its own there.
            vars(raw)[name] = functools.partial(
                self._call, name, weakref.ref(raw), vars(raw).get(name)
            )

    def watch_modules(self, module: nn.Module) -> None:
        """Put the methods on a model. The ``state_dict()`` of a submodule has the keys and shapes of shards."""
        self.watch(module)
        for child in module.modules():
            if child is not module and "state_dict" not in vars(child):
                vars(child)["state_dict"] = SubmoduleStateDict(self, child)
                self._watched[id(child)] = weakref.ref(child)

    def release_modules(self) -> None:
        """Remove the methods of all modules, also of submodules that were taken out of the model."""
        for reference in list(self._watched.values()):
            if isinstance(raw := reference(), nn.Module):
                self.release(raw)

    def release(self, raw: nn.Module | Optimizer) -> None:
        """Remove the methods of a raw object."""
        self._watched.pop(id(raw), None)
        for name in _METHODS:
            method: Any = vars(raw).get(name)
            if isinstance(method, SubmoduleStateDict):
                del vars(raw)[name]
            elif getattr(method, "func", None) == self._call:
                del vars(raw)[name]
                vars(raw).update({name: method.args[2]} if method.args[2] else {})

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let the raw objects run their own methods."""
        was_open, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = was_open

    def _call(
        self, name: str, reference: weakref.ref[Any], replaced: Any, *args: Any, **kwargs: Any
    ) -> Any:
        raw: Any = reference()
        holdings = self._holdings()
        optimizer = raw if isinstance(raw, Optimizer) else None
        if holdings is not None and name == "__deepcopy__":
            return holdings.copy(*args)
        if holdings is not None and name == "__getstate__" and optimizer is None:
            return holdings.copy_to_pickle().__getstate__()
        if holdings is not None and (self._is_open or not holdings.partial(optimizer)):
            return (replaced or functools.partial(getattr(type(raw), name), raw))(*args, **kwargs)
        if (
            holdings is None or name == "__getstate__"
        ):  # an optimizer doesn't keep its model and engine
            raise OptimizerError(
                f"{type(raw).__name__} holds only this rank's part of its state, so it can't be copied. Call "
                "accel.full_state_dict(optimizer) on every rank."
            )
        if name == "state_dict":
            return holdings.state_dict(optimizer, *args, **kwargs)
        return holdings.load_state_dict(optimizer, args, kwargs)

    def state_dict_of_submodule(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return ``module.state_dict()`` with stand-ins for values: peft asks a submodule for its keys."""
        holdings = self._holdings()
        is_sharded = (
            not self._is_open
            and holdings is not None
            and holdings.partial(None)
            and id(module) in self._watched
        )
        tensors = [*module.parameters(), *module.buffers()] if is_sharded else []
        with in_place_of(module, {id(tensor): NotGathered.of(tensor) for tensor in tensors}):
            return type(module).state_dict(module, *args, **kwargs)


@final
class SubmoduleStateDict:
    """The ``state_dict`` method of a submodule. EmbeddingBag shows its attributes, so this one has a short repr."""

    def __init__(self, guard: Guard, module: nn.Module) -> None:
        self._guard = guard
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._guard.state_dict_of_submodule(self._module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SubmoduleStateDict:
        return SubmoduleStateDict(self._guard, copy.deepcopy(self._module, memo))


# -- what a library changed on a module --------------------------------------------------------------------------------

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
    """The classes, attributes and hooks of a module, its submodules and parameters before a library changed them.

    The library may add attributes that begin with one of ``later`` at any time.
    """

    def __init__(self, module: nn.Module, later: tuple[str, ...] = ()) -> None:
        self._module, self._later = module, later
        owners = [*module.modules(), *module.parameters()]
        self._before = [(owner, type(owner), _marks(owner)) for owner in owners]
        #: By identity: the owner, its class before if the library changed it, and what the library added.
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
        """Undo the library's changes, also if it failed half-way, because its hooks would run in the user's model."""
        self.changed()
        for owner, kind, _ in self._changes.values():
            _remove(owner, self.added(owner))
            if isinstance(owner, nn.Module) and type(owner._parameters) is not dict:
                vars(owner)["_parameters"] = dict(owner._parameters.items())
            if kind is not None:
                owner.__class__ = kind
        self._changes.clear()


# -- a module as its author made it ------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_author_made(
    module: nn.Module, snapshot: Snapshot | None, replaced: Replaced
) -> Iterator[None]:
    """Temporarily undo all that accel and the libraries did to a module, but for its tensors.

    ``replaced`` has the BatchNorms that a SyncBatchNorm replaced, with their parents and names.
    """
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    before = [(part, type(part), dict(vars(part))) for part in parts]
    try:
        for part, _, names in before:
            tables = {name: names[name].copy() for name in _HOOKS}
            keys = {
                key
                for table in tables.values()
                for key, hook in table.items()
                if _is_from_accel(hook)
            }
            marks: set[_Mark] = {(name, key) for name in tables for key in keys}
            marks |= {name for name in _REPLACED if _is_from_accel(names.get(name))}
            if snapshot is not None:
                marks |= snapshot.added(part)
                part.__class__ = snapshot.kind(part)
            containers = {name: dict(names[name].items()) for name in ("_modules", "_parameters")}
            vars(part).update(tables | containers)  # the module's own are not changed
            _remove(part, marks)
        for parent, name, child in replaced:
            stand_in: Any = parent._modules[name]
            child.train(stand_in.training)
            child._buffers.update(stand_in._buffers)
            parent._modules[name] = child
        yield
    finally:
        for part, kind, names in before:
            part.__class__ = kind
            vars(part).clear()
            vars(part).update(names)


def _is_from_accel(value: Any) -> bool:
    """True if a function or hook, or the class of an object, is defined in accel."""
    while isinstance(value, functools.partial):
        value = value.func
    modules = type(value).__module__, getattr(value, "__module__", None)
    return any(f"{module}.".startswith("accel.") for module in modules)
