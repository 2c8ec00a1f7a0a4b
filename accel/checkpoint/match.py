"""Match a user's state with the saved values: objects to fill, values to replace, differences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from ..errors import CheckpointError
from ..process import rank
from ..shard import Shard
from .objects import Node, StateObject
from .record import Stored
from .shards import BY_NAME
from .state import OF_VALUES, Leaf, State
from .values import TAG, Decoder, Json, items_of, place

logger = logging.getLogger("accel")

#: Updates a value of the state, and returns the value that takes its place.
Apply = Callable[[], Any]


def _is_object(node: Json) -> bool:
    """True if the node can only be filled into an object of a state."""
    if not isinstance(node, dict):
        return False
    if node.get(TAG) == "tensor":
        return not node.get("name", OF_VALUES).startswith(OF_VALUES)
    return node.get(TAG) in ("module", "optimizer", "stateful", "ranks")


def _holds_objects(node: Json) -> bool:
    """True if the node is, or contains, an object."""
    if _is_object(node):
        return True
    if isinstance(node, dict):
        node = list(node.values())
    return isinstance(node, list) and any(map(_holds_objects, node))


def _describe(node: Json) -> str:
    if isinstance(node, dict):
        return f"a {node[TAG]}" if TAG in node else f"a dict of {len(node)}"
    return f"a list of {len(node)}" if isinstance(node, list) else f"the value {node!r}"


@dataclass(slots=True)
class Summary:
    """The result of matching a state with a checkpoint on one rank. The ranks exchange it."""

    #: Paths that the checkpoint doesn't have.
    missing: list[str] = field(default_factory=list)
    #: Descriptions of both sides.
    unfit: list[str] = field(default_factory=list)
    unfit_optimizers: set[str] = field(default_factory=set)
    #: Extra state of modules that only the checkpoint has.
    untouched: set[str] = field(default_factory=set)
    #: The numbers of tensors that only the checkpoint has, as bits.
    unneeded: int = 0
    arguments: dict[str, object] = field(default_factory=dict)
    #: The checksum of the record, and a digest of the objects.
    digits: str = ""
    structure: str = ""


@final
class Match:
    """A state next to the saved values.

    ``update`` replaces the plain values in the state. Call ``decode`` first.

    Args:
        state: None if only the plain values are wanted.
    """

    def __init__(self, state: State | None, saved: Json, decoder: Decoder) -> None:
        self._state = state
        self._decoder = decoder
        self.objects: list[tuple[StateObject, Node]] = []
        #: The saved plain values that are used, and the same once decoded.
        self.plain: list[Json] = []
        self._decoded: list[Any] = []
        #: Paths of tensors that a load without a state leaves out.
        self.left_out: list[str] = []
        self.summary = Summary()
        if state is None:
            self.update = self._take(saved)
        else:
            self.update = self._visit(state.state, state.tree, saved, "state")

    def _visit(self, value: Any, tree: Any, node: Json, path: str) -> Apply:
        """Match a value of the state, and its part of the tree of objects, with its saved node."""
        if isinstance(tree, Leaf):
            self._visit_object(tree, node)
            return lambda: value
        is_dict, has_objects = isinstance(value, dict), tree is not value
        if not is_dict and not has_objects and not _holds_objects(node):
            return self._take(node)
        children = self._decoder.children(node) if is_dict or has_objects else None
        fits = isinstance(children, dict) if is_dict else isinstance(children, list)
        if children is None or not fits or (not is_dict and len(children) != len(value)):
            size = f" of {len(value)}" if is_dict or has_objects else ""
            here = f"{path} is a {type(value).__name__}{size}"
            self.summary.unfit.append(f"{here}, and in the checkpoint {_describe(node)}")
            return lambda: value
        saved = dict(items_of(children))
        updates: dict[Any, Apply] = {}
        for key, item in items_of(value):
            if key in saved:
                updates[key] = self._visit(item, tree[key], saved[key], place(path, key))
            else:
                self.summary.missing.append(place(path, key))
        # A dict of plain values is replaced as a whole: a history may have grown.
        if is_dict and not has_objects and path != "state":
            for key in [key for key in saved if key not in value]:
                if not _holds_objects(saved[key]):
                    updates[key] = self._take(saved[key])
                elif not value:
                    text = f"{path} is an empty dict, and the checkpoint has the object "
                    self.summary.unfit.append(text + place(path, key))
        return lambda: _replace(value, updates)

    def _visit_object(self, leaf: Leaf, node: Json) -> None:
        assert self._state is not None
        one = self._state.object_of(leaf)
        if not isinstance(node, dict) or node.get(TAG) != one.kind:
            text = f"{one.path} is a {one.kind}, and in the checkpoint {_describe(node)}"
            self.summary.unfit.append(text)
        elif problem := one.problem(node):
            self.summary.unfit.append(f"{one.path}: {problem}")
        else:
            self.objects.append((one, node))

    def _take(self, node: Json) -> Apply:
        """Return a function that gives the decoded value of a node."""
        number = len(self.plain)
        self.plain.append(node)
        return lambda: self._decoded[number]

    def decode(self) -> None:
        """Decode all plain values that are used."""
        self._decoded = [self._decode(node, "state") for node in self.plain]

    def _decode(self, node: Json, path: str) -> Any:
        """Return a value without its objects. Dicts leave them out, lists have None instead."""
        if not _holds_objects(node):
            return self._decoder.decode(node)
        children = self._decoder.children(node) or {}
        values: dict[Any, Any] = {}
        for key, child in items_of(children):
            if not _is_object(child):
                values[key] = self._decode(child, place(path, key))
            elif child[TAG] == "tensor" and path != "state":
                self.left_out.append(place(path, key))
        if isinstance(children, dict):
            return values
        items = [values.get(number) for number in range(len(children))]
        return items if isinstance(node, list) else tuple(items)


def _replace(container: Any, updates: dict[Any, Apply]) -> Any:
    """Replace the items of a container, and return it. Of a tuple a new one is returned."""
    new = {key: update() for key, update in updates.items()}
    if isinstance(container, tuple):
        items = [new.get(number, item) for number, item in enumerate(container)]
        return getattr(container, "_make", type(container))(items)
    for key, item in new.items():
        container[key] = item
    return container


# -- differences -----------------------------------------------------------------------------------

#: Differences that a message lists.
_FIRST: Final = 10


def report(
    directory: str, summaries: Sequence[Summary], unneeded: Iterable[str], strict: bool
) -> None:
    """Raise or warn if the state of any rank doesn't fit. No rank reads ``unneeded`` tensors."""
    missing = dict.fromkeys(path for one in summaries for path in one.missing)
    untouched = set.intersection(*(one.untouched for one in summaries)).union(unneeded)
    unfit = dict.fromkeys(text for one in summaries for text in one.unfit)
    lines = [
        *_first("in the state, not in the checkpoint: ", list(missing), ", "),
        *_first("in the checkpoint, not in the state: ", sorted(untouched), ", "),
        *_first("", list(unfit), "\n  "),
    ]
    text = "\n  ".join(lines)
    if lines and strict:
        raise CheckpointError(
            f"{directory} does not fit the state, and nothing was changed:\n  {text}"
        )
    if lines and rank() == 0:
        logger.warning("%s does not fit the state; skipped:\n  %s", directory, text)


def _first(title: str, texts: Sequence[str], between: str) -> list[str]:
    more = [f"and {len(texts) - _FIRST} more"] if len(texts) > _FIRST else []
    return [title + between.join([*texts[:_FIRST], *more])] if texts else []


def unfit(stored: Stored, slot: Shard, convert: bool) -> str:
    """Return why a saved tensor can't be read into a shard, or an empty string."""
    dtype, here = BY_NAME[stored.dtype], slot.tensor
    if stored.shape != tuple(slot.shape):
        return f"{list(stored.shape)} in the checkpoint, {list(slot.shape)} here"
    if dtype is not here.dtype:
        text = f"{dtype} in the checkpoint, {here.dtype} here"
        if not torch.can_cast(dtype, here.dtype):
            return f"{text}, which cannot hold its values"
        if not convert:
            return f"{text} (convert=True converts)"
        # Integers may be quantized weights.
        if here.is_floating_point() and not dtype.is_floating_point:
            return f"{text}. Only the library that wrote them can convert integers"
    return ""
