"""Apply functions to the leaves of nested containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from torch import Size, Tensor, nn

T = TypeVar("T")


def map_tensors(fn: Callable[[Tensor], Any], tree: T) -> T:
    """Apply ``fn`` to every tensor in nested containers and dataclasses.

    Other leaves are kept. Containers without changes are returned as they are.
    """

    def visit(path: str, leaf: Any) -> Any:
        return fn(leaf) if isinstance(leaf, Tensor) else leaf

    return walk(visit, tree, "data")


def map_leaves(fn: Callable[[Any, str], Any], tree: Any, path: str) -> Any:
    """Replace each leaf with ``fn(leaf, path)``. None stays None."""
    return walk(lambda path, leaf: None if leaf is None else fn(leaf, path), tree, path)


def to_device(tree: T, device: Any) -> T:
    """Move tensors to a device. With None, nothing moves."""
    return map_tensors(lambda tensor: tensor.to(device), tree)


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
    """Replace tensor subclasses, such as torchao's, with their plain tensors."""
    plain: list[Tensor] = []
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            plain += inner_tensors(getattr(tensor, name) for name in names)
        else:
            plain.append(tensor)
    return plain


class TensorPlace:
    """A placeholder for a tensor taken out of a tree."""

    def __init__(self, number: Any) -> None:
        self.number = number


def put_back(tree: Any, tensors: Sequence[Any] | Mapping[Any, Any]) -> Any:
    """Replace each placeholder with the tensor of its number."""

    def visit(path: str, leaf: Any) -> Any:
        return tensors[leaf.number] if isinstance(leaf, TensorPlace) else leaf

    return walk(visit, tree, "value")


def move(tree: Any, to: Callable[[Any], Any]) -> Any:
    """Apply ``to`` to tensors and other objects with a ``to`` method."""

    def is_movable(leaf: Any) -> bool:
        return hasattr(leaf, "to") and not isinstance(leaf, type)

    def visit(path: str, leaf: Any) -> Any:
        return to(leaf) if is_movable(leaf) else leaf

    return walk(visit, tree, "data", is_movable)


def walk(
    visit: Callable[[str, Any], Any],
    tree: T,
    path: str,
    is_leaf: Callable[[Any], bool] = lambda tree: False,
) -> T:
    """Replace each leaf with ``visit(path, leaf)``. ``path`` is the root's.

    A container is a leaf if ``is_leaf`` returns True.
    """
    items = None if isinstance(tree, Tensor) or is_leaf(tree) else _items(tree)
    if items is None:
        return visit(path, tree)  # type: ignore[no-any-return]
    changes: dict[Any, Any] = {}
    for key, place, value in items:
        new_value = walk(visit, value, f"{path}{place}", is_leaf)
        if new_value is not value:
            changes[key] = new_value
    return _changed(tree, changes) if changes else tree


def _items(tree: Any) -> list[tuple[Any, str, Any]] | None:
    """Return the keys, path suffixes and values of a container, or None."""
    items: list[tuple[Any, str, Any]] = []
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            quoted = f'"{key}"' if isinstance(key, str) else repr(key)
            items.append((key, f"[{quoted}]", value))
    elif isinstance(tree, list | tuple):
        # A namedtuple's items are named in paths, as in batch.x.
        names = getattr(tree, "_fields", ())
        for index, value in enumerate(tree):
            place = f".{names[index]}" if names else f"[{index}]"
            items.append((index, place, value))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type | nn.Module):
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                items.append((field.name, f".{field.name}", getattr(tree, field.name)))
    else:
        return None
    return items


def _changed(tree: Any, changes: Mapping[Any, Any]) -> Any:
    """Return a container of the same class with new values for some keys."""
    if isinstance(tree, tuple):
        values = [changes.get(index, value) for index, value in enumerate(tree)]
        # torch.Size can hold only ints, but a new value may be anything.
        if type(tree) in (tuple, Size):
            return tuple(values)
        # The constructor of a structseq, such as torch.max returns, takes a single sequence.
        if hasattr(tree, "n_fields"):
            return type(tree)(values)
        # A subclass of a namedtuple may have a constructor with different arguments.
        return tuple.__new__(type(tree), values)
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return type(tree)({**tree, **changes})  # type: ignore[call-arg]
    result = copy.copy(tree)
    for key, value in changes.items():
        if isinstance(tree, list | MutableMapping):
            result[key] = value
        else:
            # setattr would raise for a frozen dataclass.
            object.__setattr__(result, key, value)
    return result
