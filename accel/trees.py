"""Functions of every leaf of nested containers."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from torch import Size, Tensor, nn

from .errors import AccelError, described

T = TypeVar("T")


def map_tensors(fn: Callable[[Tensor], Any], tree: T, *, others: bool = False) -> T:
    """Apply ``fn`` to every tensor in nested dicts, lists, tuples, namedtuples and dataclasses.

    Containers without changes are returned themselves. Other leaves are kept if ``others`` is True.

    Raises:
        AccelError: a leaf is not a tensor. The error names its path, such as ``data["a"][1]``.
    """

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return fn(leaf)
        if others:
            return leaf
        raise AccelError(
            f"{path} is {described(leaf)}; expected a tensor, or dicts, lists and tuples of them"
        )

    return walk(visit, tree, "data")


def map_leaves(fn: Callable[[Any, str], Any], tree: Any, path: str) -> Any:
    """Replace each leaf by ``fn(leaf, path)``. None stays None."""
    return (
        None
        if tree is None
        else walk(lambda path, leaf: None if leaf is None else fn(leaf, path), tree, path)
    )


def to_device(tree: T, device: Any) -> T:
    """Move tensors to a device. None leaves each where it is."""
    return map_tensors(lambda tensor: tensor.to(device), tree, others=True)


def all_tensors(tree: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors in nested containers, in order, each with its path."""
    tensors: list[tuple[str, Tensor]] = []

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            tensors.append((path, leaf))
        return leaf

    walk(visit, tree, path)
    return tensors


def inner_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Replace quantized tensors by their plain tensors, such as torchao's codes and scales."""
    plain: list[Tensor] = []
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            plain += inner_tensors(getattr(tensor, name) for name in names)
        else:
            plain.append(tensor)
    return plain


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """A placeholder for a tensor that was taken out of a tree."""

    number: Any


def put_back(tree: Any, tensors: Sequence[Any] | Mapping[Any, Any]) -> Any:
    """Replace placeholders by tensors, by their numbers."""

    def is_place(leaf: Any) -> bool:
        return isinstance(leaf, TensorPlace)

    return walk(
        lambda _, leaf: tensors[leaf.number] if is_place(leaf) else leaf, tree, "value", is_place
    )


def move(tree: Any, to: Callable[[Any], Any]) -> Any:
    """Apply ``to`` to tensors and to everything else that has a method ``to``."""

    def is_movable(leaf: Any) -> bool:
        return hasattr(leaf, "to") and not isinstance(leaf, type)

    def visit(path: str, leaf: Any) -> Any:
        if is_movable(leaf):
            return to(leaf)
        if isinstance(leaf, Mapping):  # it is immutable, and has to be constructed
            return type(leaf)({key: move(value, to) for key, value in leaf.items()})  # type: ignore[call-arg]
        return leaf

    return walk(visit, tree, "data", is_movable)


def exchange(
    give: Callable[[Tensor], Tensor],
    tree: Any,
    give_inside: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """Replace every tensor by ``give(tensor)``.

    Tensors in the attributes of other objects are replaced in place, by ``give_inside`` if it is
    given.
    """

    def visit(_: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return give(leaf)
        if hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            attributes = vars(leaf)
            for name, value in list(attributes.items()):
                if isinstance(value, Tensor):
                    attributes[name] = (give_inside or give)(value)
        return leaf

    return walk(visit, tree, "")


def walk(
    visit: Callable[[str, Any], Any],
    tree: T,
    path: str,
    is_leaf: Callable[[Any], bool] = lambda tree: False,
) -> T:
    """Replace each leaf by ``visit(path, leaf)``, with paths that begin with ``path``.

    A container is a leaf too if ``is_leaf`` says so, or if it is inside of itself.
    """
    new_tree: T = _walk(visit, tree, path, is_leaf, set())
    return new_tree


def _walk(
    visit: Callable[[str, Any], Any],
    tree: Any,
    path: str,
    is_leaf: Callable[[Any], bool],
    parents: set[int],
) -> Any:
    keys: list[Any]
    if isinstance(tree, Tensor) or id(tree) in parents or is_leaf(tree):
        return visit(path, tree)
    if isinstance(tree, MutableMapping):
        keys, values = list(tree), list(tree.values())
        paths = [f"{path}[{name}]" for name in _key_texts(keys)]
    elif isinstance(tree, list | tuple):
        keys, values = list(range(len(tree))), list(tree)
        names = getattr(tree, "_fields", None)
        paths = [f"{path}[{key}]" if names is None else f"{path}.{names[key]}" for key in keys]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type | nn.Module):
        keys = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        values = [getattr(tree, key) for key in keys]
        paths = [f"{path}.{key}" for key in keys]
    else:
        return visit(path, tree)
    parents.add(id(tree))
    new_values = [
        _walk(visit, value, name, is_leaf, parents)
        for value, name in zip(values, paths, strict=True)
    ]
    parents.discard(id(tree))
    if all(new is value for new, value in zip(new_values, values, strict=True)):
        return tree
    return _rebuild(tree, keys, new_values)


def _key_texts(keys: Sequence[Any]) -> list[str]:
    """Return a different text for each key, or its number if the text depends on the rank."""
    texts = [f'"{key}"' if isinstance(key, str) and '"' not in key else repr(key) for key in keys]
    times = Counter(texts)
    for number, key in enumerate(keys):
        text_method: Any = type(key).__repr__
        if (
            times[texts[number]] > 1
            or isinstance(key, Tensor | nn.Module)
            or text_method is object.__repr__
        ):
            texts[number] = f"{type(key).__name__} #{number}"
    return texts


def _rebuild(tree: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return a container of the same class with new values."""
    if isinstance(tree, tuple):
        if type(tree) in (tuple, Size):  # a Size can hold numbers only
            return tuple(values)
        if hasattr(tree, "n_fields"):  # structseqs of torch and C
            return type(tree)(values)
        # A constructor of a namedtuple's subclass may have different arguments.
        new = tuple.__new__(type(tree), values)
        if hasattr(tree, "__dict__"):
            vars(new).update(vars(tree))
        return new
    new_container = copy.copy(tree)
    for key, value in zip(keys, values, strict=True):
        if isinstance(tree, list | MutableMapping):
            new_container[key] = value
        else:
            object.__setattr__(new_container, key, value)  # the dataclass may be frozen
    return new_container
