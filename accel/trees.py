"""Nested containers: a function of each leaf, in the same containers."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from torch import Size, Tensor, nn

from .errors import AccelError, described

#: The type of a tree: its containers stay, whatever takes a leaf's place.
T = TypeVar("T")


def map_tensors(fn: Callable[[Tensor], Any], tree: T, *, others: bool = False) -> T:
    """The same nested dicts, lists, tuples, namedtuples and dataclasses with ``fn`` of each tensor.

    Containers in which nothing changed are returned themselves; the others are copied. Leaves that are no tensors stay with
    ``others``; else they are refused (AccelError) by their paths, as ``data["a"][1]``.
    """

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return fn(leaf)
        if others:
            return leaf
        raise AccelError(f"{path} is {described(leaf)}; expected a tensor, or dicts, lists and tuples of them")

    return walk(visit, tree, "data")


def inner_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors, with those that a quantized tensor consists of in its place: torchao's have codes and scales."""
    plain: list[Tensor] = []
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            plain += inner_tensors(getattr(tensor, name) for name in names)
        else:
            plain.append(tensor)
    return plain


def to_device(tree: T, device: Any) -> T:
    """The same with its tensors on a device; None leaves each where it is."""
    return map_tensors(lambda tensor: tensor.to(device), tree, others=True)


def map_leaves(fn: Callable[[Any, str], Any], tree: Any, path: str) -> Any:
    """The same containers with ``fn(leaf, path)`` in each leaf's place; None stays None."""
    return walk(lambda path, leaf: None if leaf is None else fn(leaf, path), tree, path)


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """Stands in a tree for a tensor that was taken out of it."""

    number: Any  # or another name of it


def put_back(tree: Any, tensors: Sequence[Any] | Mapping[Any, Any]) -> Any:
    """The tree with tensors, by their numbers, in the places."""

    def is_place(leaf: Any) -> bool:
        return isinstance(leaf, TensorPlace)

    return walk(lambda _, leaf: tensors[leaf.number] if is_place(leaf) else leaf, tree, "value", is_place)


def move(tree: Any, to: Callable[[Any], Any]) -> Any:
    """The same containers with ``to`` of their tensors, and of whatever else has a method of this name."""

    def movable(leaf: Any) -> bool:
        return hasattr(leaf, "to") and not isinstance(leaf, type)

    def visit(path: str, leaf: Any) -> Any:
        if movable(leaf):
            return to(leaf)
        if isinstance(leaf, Mapping):  # one that cannot be changed, only made
            return type(leaf)({key: move(value, to) for key, value in leaf.items()})  # type: ignore[call-arg]
        return leaf

    return walk(visit, tree, "data", movable)


def exchange(give: Callable[[Tensor], Tensor], tree: Any, give_inside: Callable[[Tensor], Tensor] | None = None) -> Any:
    """The tree with another tensor for each; in an object of another kind they are exchanged in place, by ``give_inside``."""

    def visit(_: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return give(leaf)
        own = _attributes(leaf)
        own.update({name: (give_inside or give)(v) for name, v in own.items() if isinstance(v, Tensor)})
        return leaf

    return walk(visit, tree, "")


def _attributes(leaf: Any) -> dict[str, Any]:
    return vars(leaf) if hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module) else {}


def all_tensors(tree: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors in nested containers, in order, each with its path."""
    found: list[tuple[str, Tensor]] = []

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append((path, leaf))
        return leaf

    walk(visit, tree, path)
    return found


def walk(
    visit: Callable[[str, Any], Any], tree: T, path: str, is_leaf: Callable[[Any], bool] = lambda tree: False
) -> T:
    """The tree with ``visit(path, leaf)`` in each leaf's place; a container inside of itself is a leaf there.

    Paths begin with ``path``. ``is_leaf`` tells of a container that it is a leaf all the same.
    """
    same: T = _walk(visit, tree, path, is_leaf, set())
    return same


def _walk(
    visit: Callable[[str, Any], Any], tree: Any, path: str, is_leaf: Callable[[Any], bool], around: set[int]
) -> Any:
    keys: list[Any]
    if isinstance(tree, Tensor) or id(tree) in around or is_leaf(tree):
        return visit(path, tree)
    if isinstance(tree, MutableMapping):
        keys, values = list(tree), list(tree.values())
        paths = [f"{path}[{name}]" for name in _names(keys)]
    elif isinstance(tree, list | tuple):
        keys, values = list(range(len(tree))), list(tree)
        names = getattr(tree, "_fields", None)
        paths = [f"{path}[{key}]" if names is None else f"{path}.{names[key]}" for key in keys]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type | nn.Module):
        keys = [f.name for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
        values, paths = [getattr(tree, key) for key in keys], [f"{path}.{key}" for key in keys]
    else:
        return visit(path, tree)
    around.add(id(tree))
    new = [_walk(visit, value, name, is_leaf, around) for value, name in zip(values, paths, strict=True)]
    around.discard(id(tree))
    if all(mine is value for mine, value in zip(new, values, strict=True)):
        return tree
    return _rebuild(tree, keys, new)


def _names(keys: Sequence[Any]) -> list[str]:
    """What keys are called, each otherwise: what has no text that is its own, and the same on all ranks, by its place."""
    names = [f'"{key}"' if isinstance(key, str) and '"' not in key else repr(key) for key in keys]
    times = Counter(names)
    for place, key in enumerate(keys):
        plain: Any = type(key).__repr__
        if times[names[place]] > 1 or isinstance(key, Tensor | nn.Module) or plain is object.__repr__:
            names[place] = f"{type(key).__name__} #{place}"
    return names


def _rebuild(tree: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    if isinstance(tree, tuple):
        if type(tree) in (tuple, Size):  # of other values a Size is none
            return tuple(values)
        if hasattr(tree, "n_fields"):  # what torch and C return knows no other way
            return type(tree)(values)
        made = tuple.__new__(type(tree), values)  # not by a constructor of the class, whose arguments may be others
        if hasattr(tree, "__dict__"):
            vars(made).update(vars(tree))
        return made
    result = copy.copy(tree)
    for key, value in zip(keys, values, strict=True):
        if isinstance(tree, list | MutableMapping):
            result[key] = value
        else:
            object.__setattr__(result, key, value)  # also where the dataclass is frozen
    return result
