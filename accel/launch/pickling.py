"""What can be sent to another process, and where the rest is: the path of each thing that cannot."""

from __future__ import annotations

import copyreg
import functools
import os
import pickle
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import LaunchError
from ..handles import ModelHandle, OptimizerHandle
from ..handles import raw as raw_of

_MOST = 5  # culprits that an error names

# A function that calls torch.ops... brings it along, as a module of a class of its own, which pickle does not know.
copyreg.pickle(type(torch.ops), lambda ops: (getattr, (torch, "ops")))


def _attempt(obj: object, plainly: bool) -> list[Any]:
    """Pickles an object without keeping it; returns the objects on the way that have a state to load."""
    import cloudpickle

    found: dict[int, Any] = {}

    class Attempt(pickle.Pickler if plainly else cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, item: Any) -> str | None:
            kind = type(item)
            if kind is ModelHandle and not plainly:  # there it would be a raw module, which trains for itself
                raise TypeError("a handle belongs to this process")
            if isinstance(item, torch.storage.TypedStorage | torch.UntypedStorage):
                return "storage"  # not its bytes
            if hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict"):
                found.setdefault(id(item), item)
            return None

    with open(os.devnull, "wb") as nowhere:
        Attempt(nowhere, protocol=4).dump(obj)
    return list(found.values())


def stateful(parts: dict[str, object]) -> list[Any]:
    """What ``parts`` reach that has a state to load: modules (not those inside others), optimizers, schedulers.

    Raises:
        LaunchError: names the paths of what cannot be sent; the keys of ``parts`` are their roots.
    """
    found: dict[int, Any] = {}
    for name, part in parts.items():
        found.update({id(item): item for item in require(part, name)})
    modules = [item for item in found.values() if isinstance(item, nn.Module)]
    inside = {id(child) for module in modules for child in module.modules() if child is not module}
    return [item for key, item in found.items() if key not in inside]


def check_picklable(obj: object, name: str = "obj") -> None:
    """Check that ``obj`` can be pickled, as ``torch.save(obj)`` and the workers of a spawning loader do.

    ``accel.launch`` sends more than that: lambdas, and functions and classes of a notebook or a script.

    Args:
        obj: a model, a dataset, anything.
        name: what the error calls it.

    Raises:
        LaunchError: names the path and kind of each thing that cannot: ``model.head.act: lambda at train.py:12``.
    """
    require(obj, name, plainly=True)


def require(obj: object, name: str, plainly: bool = False) -> list[Any]:
    """What of ``obj`` has a state to load; a LaunchError names what cannot be pickled, ``plainly`` or by value."""
    try:
        return _attempt(obj, plainly)
    except RecursionError as error:
        raise LaunchError(
            f"cannot be pickled, and so not sent to another process: {name} is nested too deeply, such as a long chain of "
            "objects that each hold the next one: keep them in a list"
        ) from error
    except Exception as error:
        culprits = list(dict.fromkeys(_culprits(obj, name, plainly, set())))
        more = f" and {len(culprits) - _MOST} more" if len(culprits) > _MOST else ""
        what = "; ".join(culprits[:_MOST]) or f"{name}: {error}"
        raise LaunchError(f"cannot be pickled, and so not sent to another process: {what}{more}") from error


def _culprits(obj: object, path: str, plainly: bool, seen: set[int]) -> Iterator[str]:
    """Descends to what fails though nothing inside it does."""
    seen.add(id(obj))
    deeper = False
    for suffix, child in _children(raw_of(obj) if plainly and type(obj) is ModelHandle else obj):
        if _error(child, plainly) is not None:
            deeper = True
            if id(child) not in seen:
                yield from _culprits(child, path + suffix, plainly, seen)
    if not deeper:
        yield f"{path}: {_describe(obj, _error(obj, plainly))}"


def _error(obj: object, plainly: bool) -> Exception | None:
    try:
        _attempt(obj, plainly)
    except Exception as error:
        return error
    return None


def _children(obj: Any) -> Iterator[tuple[str, object]]:
    if isinstance(obj, ModelHandle | OptimizerHandle | type | ModuleType):
        return
    if isinstance(obj, dict):
        yield from ((f"[{_shown(key)}]", value) for key, value in obj.items())
    elif isinstance(obj, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, set | frozenset):
        yield from ((f"{{{_shown(value)}}}", value) for value in obj)
    elif isinstance(obj, functools.partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    elif isinstance(obj, MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, FunctionType):
        yield from _of_function(obj)
    else:
        yield from _attributes(obj)


def _shown(key: object) -> str:
    """A key as it is written; by its class where it cannot be written."""
    try:
        return repr(key)
    except Exception:
        return type(key).__qualname__


def _attributes(obj: Any) -> Iterator[tuple[str, object]]:
    try:
        attributes = dict(vars(obj))
    except Exception:  # it has none, or says so in its own way
        return
    for name, value in attributes.items():
        if isinstance(obj, nn.Module) and name in ("_parameters", "_buffers", "_modules"):
            yield from ((f".{key}", child) for key, child in value.items())
        else:
            yield f".{name}", value


def _of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    """What a function that is sent by its value takes along; one that is sent by its name takes nothing."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"()'s {name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in sorted(_names(function.__code__) & function.__globals__.keys()):
        yield f"()'s {name}", function.__globals__[name]
    yield " (defaults)", function.__defaults__
    yield " (keyword defaults)", function.__kwdefaults__


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _describe(obj: Any, error: Exception | None) -> str:
    if type(obj) in (ModelHandle, OptimizerHandle):
        kind = type(raw_of(obj)).__name__
        return f"{type(obj).__name__}; send the raw {kind}, and call accel.setup in the function that runs there"
    if isinstance(obj, FunctionType):
        where = f"{os.path.basename(obj.__code__.co_filename)}:{obj.__code__.co_firstlineno}"
        return f"lambda at {where}" if obj.__name__ == "<lambda>" else f"function {obj.__qualname__} at {where}"
    return f"{type(obj).__module__}.{type(obj).__qualname__} ({type(error).__name__}: {error})"


def name_of(function: Callable[..., Any]) -> str:
    """What errors call a function."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__
