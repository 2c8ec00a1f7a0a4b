"""Send objects to other processes. Errors name each object by its path."""

from __future__ import annotations

import copyreg
import functools
import inspect
import os
import pickle
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from .errors import LaunchError
from .handles import ModelHandle, raw

# Functions may refer to torch.ops. Without this, cloudpickle can't pickle its class _Ops.
copyreg.pickle(type(torch.ops), lambda ops: (getattr, (torch, "ops")))


def save_by_value(value: object, path: Path, name: str) -> None:
    """Write a value to a file, including functions and classes of ``__main__``."""
    import cloudpickle

    try:
        torch.save(value, path, pickle_module=cloudpickle)
    except Exception as error:
        find_stateful(value, name)
        raise LaunchError(f"{name} can't be sent to another process: {error}") from error


def check_picklable(obj: object, name: str = "obj") -> None:
    """Try to pickle ``obj``, as ``torch.save(obj)`` and spawned workers do.

    Args:
        obj: a model, a dataset, or any other object.
        name: the name of ``obj`` in the error.

    Raises:
        LaunchError: names the path and kind of each object that can't be pickled, such as
            ``model.head.act: lambda at train.py:12``.
    """
    find_stateful(obj, name, by_name=True)


def find_stateful(obj: object, name: str, *, by_name: bool = False) -> list[Any]:
    """Return the objects in ``obj`` that have a state to load, except submodules."""
    try:
        return _try_pickle(obj, by_name)
    except Exception as error:
        text = "; ".join(_find_culprits(obj, name, by_name, set())[:5])
        raise LaunchError(f"These objects can't be pickled: {text}") from error


def _try_pickle(obj: object, by_name: bool) -> list[Any]:
    import cloudpickle

    stateful: dict[int, Any] = {}
    inner: set[int] = set()

    class Attempt(pickle.Pickler if by_name else cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, item: Any) -> str | None:
            kind = type(item)
            if kind is ModelHandle and not by_name:
                # The other process would get a raw module, and train it without an engine.
                raise TypeError("a handle belongs to this process")
            if isinstance(item, torch.storage.TypedStorage | torch.UntypedStorage):
                return "storage"  # skip the bytes
            has_state = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
            if has_state and id(item) not in inner:
                stateful[id(item)] = item
                if isinstance(item, nn.Module):
                    inner.update(map(id, item.modules()))
            return None

    with open(os.devnull, "wb") as nowhere:
        Attempt(nowhere, protocol=4).dump(obj)
    return list(stateful.values())


def _find_culprits(obj: object, path: str, by_name: bool, seen: set[int]) -> list[str]:
    """Describe the innermost unpicklable objects, with their paths."""
    if id(obj) in seen:
        return []
    try:
        _try_pickle(obj, by_name)
        return []
    except Exception as error:
        seen.add(id(obj))
        culprits: list[str] = []
        inner = raw(obj) if type(obj) is ModelHandle and by_name else obj
        for suffix, child in _children(inner).items():
            culprits += _find_culprits(child, path + suffix, by_name, seen)
        return culprits or [f"{path}: {_describe(obj, error)}"]


def _children(obj: Any) -> dict[str, Any]:
    """Return the objects inside an object, by the suffix of the path."""
    if isinstance(obj, ModelHandle | type | ModuleType):
        return {}
    form, children = ".{}", dict(getattr(obj, "__dict__", {}))
    if isinstance(obj, dict | list | tuple | set | frozenset):
        form, children = "[{!r}]", obj if isinstance(obj, dict) else dict(enumerate(obj))
    elif isinstance(obj, FunctionType):
        used = inspect.getclosurevars(obj)
        form, children = "()'s {}", {**used.globals, **used.nonlocals}
    elif isinstance(obj, functools.partial | MethodType):
        for name in ("func", "args", "keywords", "__self__"):
            children[name] = getattr(obj, name, None)
    elif isinstance(obj, nn.Module):
        # Merge the tables, so that the path of a layer is its name in the model.
        for name in ("_parameters", "_buffers", "_modules"):
            children |= children.pop(name, {})
    return {form.format(name): child for name, child in children.items()}


def _describe(obj: Any, error: Exception) -> str:
    if type(obj) is ModelHandle:
        return "ModelHandle (pass the raw module, and call accel.setup in the function)"
    if isinstance(obj, FunctionType):
        code = obj.__code__
        name = "lambda" if obj.__name__ == "<lambda>" else f"function {obj.__qualname__}"
        return f"{name} at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return f"{type(obj).__module__}.{type(obj).__qualname__} ({type(error).__name__}: {error})"
