"""A user's state as a tree of dicts, lists and tuples, with objects as leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..handles import ModelHandle, raw
from ..registry import resolve_module
from .objects import StateObject, make_object
from .values import Encoder, Json, Placeholder, items_of, place

#: The first character in the names of tensors that are part of plain values.
OF_VALUES: Final = "~"
#: Types of values that are not objects and contain none.
PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


def name_of(keys: Sequence[object]) -> str:
    """Return the name, or its prefix, for a tensor under these keys."""
    return "/".join(map(_component, keys))


def _component(key: object) -> str:
    text = key if isinstance(key, str) else f"[{key!r}]"
    text = text.replace("%", "%25").replace("/", "%2F")
    is_reserved = isinstance(key, str) and text[:1] in ("[", OF_VALUES)
    return f"%{ord(text[0]):02X}{text[1:]}" if is_reserved else text


def is_object(value: Any) -> bool:
    """True if a checkpoint fills the value in place instead of replacing it."""
    if type(value) in PLAIN or isinstance(value, type):
        return False
    if isinstance(value, torch.Tensor | nn.Module | Optimizer | StateObject):
        return True
    save = getattr(value, "state_dict", None)
    return callable(save) and callable(getattr(value, "load_state_dict", None))


@final
@dataclass(eq=False)
class Leaf(Placeholder):
    """An object, and its path of keys from the outermost dict."""

    value: Any
    keys: tuple[object, ...]


@final
class State:
    """A user's state, a nested dict."""

    def __init__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise CheckpointError(
                f"Expected the state as a dict, found a {type(state).__name__}. "
                'Write accel.save({"model": model, "optimizer": optimizer}, dir).'
            )
        self.state = state
        self.leaves: list[Leaf] = []
        #: The state with a leaf in place of each object. Containers without objects are not copied.
        self.tree = self._flatten(state, ())
        #: The modules that have names for the parameters of raw optimizers.
        self._modules: list[nn.Module] = []
        for leaf in self.leaves:
            if type(leaf.value) is ModelHandle:
                # resolve_module() would raise without a path if the model was torn down.
                self._modules.append(raw(leaf.value))
            elif isinstance(leaf.value, nn.Module):
                self._modules.append(resolve_module(leaf.value)[0])

    def _flatten(self, value: Any, keys: tuple[object, ...]) -> Any:
        if is_object(value):
            self.leaves.append(Leaf(value, keys))
            return self.leaves[-1]
        if not isinstance(value, dict | list | tuple):
            return value
        tree, is_changed = {}, False
        for key, item in items_of(value):
            # Histories are long lists of numbers, which need no call and no tuple of keys.
            tree[key] = item if type(item) in PLAIN else self._flatten(item, (*keys, key))
            is_changed = is_changed or tree[key] is not item
        if not is_changed or isinstance(value, dict):
            return tree if is_changed else value
        items = list(tree.values())
        return tuple(items) if isinstance(value, tuple) else items

    def object_of(self, leaf: Leaf, tag: object = None) -> StateObject:
        """Return the object of a leaf to save, or to load from a node with this tag."""
        path = "state"
        for key in leaf.keys:
            path = place(path, key)
        return make_object(leaf.value, name_of(leaf.keys), path, self._modules, tag)

    def encode(self, encoder: Encoder) -> tuple[dict[str, Json], list[StateObject]]:
        """Return the state as JSON, and its objects. The caller fills their nodes."""
        objects = []
        for leaf in self.leaves:
            objects.append(self.object_of(leaf))
            leaf.node = objects[-1].node
        return encoder.encode(self.tree, "state"), objects
