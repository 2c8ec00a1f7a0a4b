"""Match a state with the saved values, and report differences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from ..errors import CheckpointError
from ..process import rank
from ..shard import Shard
from .objects import StateObject
from .record import Stored
from .shards import BY_NAME
from .state import Leaf, State
from .values import TAG, Decoder, Json, items_of, place

logger = logging.getLogger("accel")

#: Updates a value of the state. Returns the value to store in its place.
Apply = Callable[[], Any]


def _is_object(node: Json) -> bool:
    """True if the node is the saved state of an object. Tensors are values too."""
    tag = node.get(TAG) if isinstance(node, dict) else None
    return tag in ("module", "optimizer", "stateful", "ranks")


def _holds_objects(node: Json) -> bool:
    """True if the node is, or contains, an object."""
    if _is_object(node):
        return True
    children = node.values() if isinstance(node, dict) else node
    return isinstance(node, dict | list) and any(map(_holds_objects, children))


def _describe(node: Json) -> str:
    if isinstance(node, dict):
        return f"a {node[TAG]}" if TAG in node else f"a dict of {len(node)}"
    return f"a list of {len(node)}" if isinstance(node, list) else f"the value {node!r}"


@dataclass(slots=True)
class Summary:
    """A rank's differences from the checkpoint, which ranks exchange."""

    #: Paths that exist only in the state.
    missing: list[str] = field(default_factory=list)
    #: Descriptions of values that differ in type, size or dtype.
    unfit: list[str] = field(default_factory=list)
    unfit_optimizers: set[str] = field(default_factory=set)
    #: The number of saved tensors of the state's objects, and of those that fit.
    saved: int = 0
    fitting: int = 0
    #: Tensors and extra state of modules that exist only in the checkpoint.
    untouched: set[str] = field(default_factory=set)
    arguments: dict[str, object] = field(default_factory=dict)
    #: The checksum of the record by directory. ``structure`` is a digest of the objects.
    digits: dict[str, str] = field(default_factory=dict)
    structure: dict[str, str] = field(default_factory=dict)


@final
class Match:
    """A state matched with saved values. Call ``decode``, then ``update``."""

    def __init__(self, state: State | None, saved: Json, decoder: Decoder) -> None:
        self._state = state
        self._decoder = decoder
        #: The objects to fill, by name.
        self.objects: dict[str, StateObject] = {}
        #: The nodes of the plain values to load, and the decoded values.
        self.plain: list[Json] = []
        self._decoded: list[Any] = []
        self.summary = Summary()
        if state is None:
            self.update = self._take(saved)
        else:
            self.update = self._visit(state.state, state.tree, saved, "state")

    def _visit(self, value: Any, tree: Any, node: Json, path: str) -> Apply:
        """Match a value, and its subtree of ``State.tree``, with its node."""
        if isinstance(tree, Leaf):
            self._visit_object(tree, node)
            return lambda: value
        is_dict, has_objects = isinstance(value, dict), tree is not value
        if not is_dict and not has_objects and not _holds_objects(node):
            return self._take(node)
        children, size = None, ""
        if is_dict or has_objects:
            children, size = self._decoder.children(node), f" of {len(value)}"
        fits = isinstance(children, dict)
        if not is_dict:
            fits = isinstance(children, list) and len(children) == len(value)
        if not fits:
            self._refuse(f"{path} is a {type(value).__name__}{size}", node)
            return lambda: value
        saved = dict(items_of(children))
        updates: dict[Any, Apply] = {}
        for key, item in items_of(value):
            if key in saved:
                part = tree[key]
                saved_node = saved.pop(key)
                updates[key] = self._visit(item, part, saved_node, place(path, key))
            else:
                self.summary.missing.append(place(path, key))
        # A saved dict of plain values, such as a history, may have more keys than the state's.
        if is_dict and not has_objects and path != "state":
            updates |= self._new_keys(value, saved, path)
        return lambda: _replace(value, updates)

    def _new_keys(self, value: Any, saved: dict[Any, Json], path: str) -> dict[Any, Apply]:
        updates = {}
        for key, node in saved.items():
            if not _holds_objects(node):
                updates[key] = self._take(node)
            elif not value:
                text = "is an empty dict, but the checkpoint has the object"
                self.summary.unfit.append(f"{path} {text} {place(path, key)}")
        return updates

    def _visit_object(self, leaf: Leaf, node: Json) -> None:
        assert self._state is not None
        tag = node.get(TAG) if isinstance(node, dict) else None
        entry = self._state.object_of(leaf, tag)
        if tag != entry.kind:
            self._refuse(f"{entry.path} is a {entry.kind}", node)
            return
        entry.node = node
        problem = entry.problem()
        if problem:
            self.summary.unfit.append(f"{entry.path}: {problem}")
        else:
            self.objects[entry.name] = entry

    def _refuse(self, here: str, node: Json) -> None:
        self.summary.unfit.append(f"{here}, but {_describe(node)} in the checkpoint")

    def _take(self, node: Json) -> Apply:
        """Return a function that returns the decoded value of a node."""
        number = len(self.plain)
        self.plain.append(node)
        return lambda: self._decoded[number]

    def decode(self) -> None:
        """Decode all plain values to load."""
        for node in self.plain:
            self._decoded.append(self._decode(node))

    def _decode(self, node: Json) -> Any:
        """Return a value without its objects. In lists, None replaces them."""
        if not _holds_objects(node):
            return self._decoder.decode(node)
        children = self._decoder.children(node) or {}
        values: dict[Any, Any] = {}
        for key, child in items_of(children):
            if not _is_object(child):
                values[key] = self._decode(child)
        if isinstance(children, dict):
            return values
        items = list(map(values.get, range(len(children))))
        return items if isinstance(node, list) else tuple(items)


def _replace(container: Any, updates: dict[Any, Apply]) -> Any:
    """Replace the items of a container. Return it, or a new tuple."""
    items = list(container) if isinstance(container, tuple) else container
    for key, update in updates.items():
        items[key] = update()
    if items is container:
        return container
    return getattr(container, "_make", type(container))(items)


_FIRST: Final = 10  # differences per message


def report(directory: str, summaries: Sequence[Summary], strict: bool) -> None:
    """Raise or warn if the state of a rank doesn't fit."""
    missing, unfit = dict[str, None](), dict[str, None]()
    untouched = summaries[0].untouched
    for summary in summaries:
        missing |= dict.fromkeys(summary.missing)
        unfit |= dict.fromkeys(summary.unfit)
        untouched = untouched & summary.untouched
    lines = []
    for title, texts in (
        ("in the state, not in the checkpoint: ", [*missing]),
        ("in the checkpoint, not in the state: ", sorted(untouched)),
        ("", [*unfit]),
    ):
        first = texts[:_FIRST]
        if len(texts) > _FIRST:
            first.append(f"and {len(texts) - _FIRST} more")
        lines += [title + ", ".join(first)] if title and first else first
    text = "\n  ".join(lines)
    title = f"{directory} does not fit the state"
    if lines and strict:
        advice = "nothing was changed. Pass strict=False to load the rest"
        raise CheckpointError(f"{title}, and {advice}:\n  {text}")
    # For example, all names have a prefix, because the saved model is a part of this one.
    if lines and any(one.saved for one in summaries) and not any(one.fitting for one in summaries):
        advice = 'Pass the part with these names, such as {"model": model.base}'
        raise CheckpointError(f"{directory}: no tensor fits the state. {advice}:\n  {text}")
    if lines and rank() == 0:
        logger.warning("%s. Skipped:\n  %s", title, text)


def unfit(stored: Stored, slot: Shard, convert: bool) -> str:
    """Return why a saved tensor doesn't fit, or an empty string."""
    old = BY_NAME[stored.dtype]
    new = slot.tensor.dtype
    if stored.shape != tuple(slot.shape):
        return f"{list(stored.shape)} in the checkpoint, {list(slot.shape)} here"
    if old is new:
        return ""
    text = f"{old} in the checkpoint, {new} here"
    if not torch.can_cast(old, new):
        return f"{text}, which cannot hold its values"
    if not convert:
        return f"{text} (pass convert=True)"
    # Integers may be quantized weights. accel doesn't know their scales.
    if new.is_floating_point and not old.is_floating_point:
        return f"{text}. Only the library that wrote them can convert integers"
    return ""
