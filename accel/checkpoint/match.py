"""Match a user's state with the saved values: objects to fill, values to replace, differences."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from ..errors import CheckpointError
from ..shard import Shard
from .objects import StateObject
from .record import Stored
from .shards import BY_NAME
from .state import OF_VALUES, PLAIN, Leaf, State, Tree, items_of
from .values import TAG, Decoder, Json, place

logger = logging.getLogger("accel")

#: Updates a value of the state, and returns the value that takes its place.
Apply = Callable[[], Any]

# -- saved values as JSON --------------------------------------------------------------------------

_MAPPINGS: Final = ("dict", "OrderedDict", "defaultdict", "Counter")
_OBJECTS: Final = ("module", "optimizer", "stateful", "ranks")


def children_of(node: Json, decoder: Decoder) -> dict[Any, Json] | None:
    """Return the items of a saved dict, list or tuple, or None for any other value."""
    if isinstance(node, list):
        return dict(enumerate(node))
    if not isinstance(node, dict) or TAG not in node:
        return node if isinstance(node, dict) else None
    if node[TAG] == "tuple":
        return dict(enumerate(node["items"]))
    if node[TAG] in _MAPPINGS:
        return {decoder.decode(key): item for key, item in node["items"]}
    return None


def _is_object(node: Json) -> bool:
    """True if the node can only be filled into an object of a state."""
    if not isinstance(node, dict):
        return False
    if node.get(TAG) == "tensor":
        return not node.get("name", OF_VALUES).startswith(OF_VALUES)
    return node.get(TAG) in _OBJECTS


def _holds(node: Json) -> bool:
    """True if the node is, or contains, an object."""
    if _is_object(node):
        return True
    if isinstance(node, dict):
        node = list(node.values())
    return isinstance(node, list) and any(map(_holds, node))


def _is_sequence(node: Json) -> bool:
    return isinstance(node, list) or (isinstance(node, dict) and node.get(TAG) == "tuple")


def _describe(node: Json) -> str:
    if isinstance(node, dict):
        return f"a {node[TAG]}" if TAG in node else f"a dict of {len(node)}"
    return f"a list of {len(node)}" if isinstance(node, list) else f"the value {node!r}"


# -- the walk over both ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences between a state and a checkpoint on one rank."""

    #: Paths that the checkpoint doesn't have.
    missing: list[str] = field(default_factory=list)
    #: Descriptions of both sides.
    unfit: list[str] = field(default_factory=list)
    #: Extra state of modules that only the checkpoint has.
    untouched: set[str] = field(default_factory=set)


@final
class Match:
    """A state next to the saved values."""

    def __init__(self, state: State, decoder: Decoder) -> None:
        self._state = state
        self._decoder = decoder
        self.objects: list[tuple[StateObject, Mapping[str, Json]]] = []
        #: The saved plain values that are used, and the same once decoded.
        self.plain: list[Json] = []
        self._decoded: list[Any] = []
        #: Paths of tensors that ``decode`` leaves out.
        self.left_out: list[str] = []
        self.differences = Differences()

    def visit(self, tree: Tree | None, value: Any, node: Json, path: str = "state") -> Apply:
        """Match a value with its saved node. The returned function is called after ``decode``."""
        if isinstance(tree, Leaf):
            self._visit_object(self._state.object_of(tree), node)
            return lambda: value
        is_dict = isinstance(value, dict)
        walked = tree is not None or is_dict
        if not walked and not _holds(node):
            return self.take(node)
        children = children_of(node, self._decoder) if walked else None
        fits = children is not None and (is_dict or len(children) == len(value))
        if children is not None and fits and is_dict != _is_sequence(node):
            return self._visit_container(tree, value, children, path)
        size = f" of {len(value)}" if walked else ""
        reason = "only a dict fits"
        if tree is not None or _holds(node):
            reason = "objects are filled in place, so give as many as were saved"
        self.differences.unfit.append(
            f"{path} is a {type(value).__name__}{size}, and in the checkpoint "
            f"{_describe(node)}: {reason}"
        )
        return lambda: value

    def take(self, node: Json) -> Apply:
        """Return a function that gives the decoded value of a node."""
        self.plain.append(node)
        return functools.partial(self._decoded.__getitem__, len(self.plain) - 1)

    def decode(self) -> None:
        """Decode all plain values that are used."""
        self._decoded += [self._decode(node) for node in self.plain]

    def _decode(self, node: Json, path: str = "state") -> Any:
        """Return a value without its objects. Dicts leave them out, lists have None instead."""
        if not _holds(node):
            return self._decoder.decode(node)
        values: dict[Any, Any] = {}
        children = children_of(node, self._decoder) or {}
        for key, child in children.items():
            where = place(path, key)
            if not _is_object(child):
                values[key] = self._decode(child, where)
            elif child[TAG] == "tensor" and path != "state":
                self.left_out.append(where)
        if not _is_sequence(node):
            return values
        items = [values.get(number) for number in range(len(children))]
        return items if isinstance(node, list) else tuple(items)

    def _visit_object(self, one: StateObject, node: Json) -> None:
        if not isinstance(node, dict) or node.get(TAG) != one.kind:
            text = f"{one.path} is a {one.kind}, and in the checkpoint {_describe(node)}"
            self.differences.unfit.append(text)
        elif problem := one.problem(node):
            self.differences.unfit.append(f"{one.path}: {problem}")
        else:
            self.objects.append((one, node))

    def _visit_container(
        self, tree: Tree | None, value: Any, children: Mapping[Any, Json], path: str
    ) -> Apply:
        trees = {} if tree is None or isinstance(tree, Leaf) else tree.children
        applies: dict[Any, Apply] = {}
        for key, item in items_of(value):
            if key not in children:
                self.differences.missing.append(place(path, key))
            elif type(item) in PLAIN and not _holds(children[key]):
                applies[key] = self.take(children[key])
            else:
                applies[key] = self.visit(trees.get(key), item, children[key], place(path, key))
        if isinstance(value, dict) and tree is None and path != "state":
            # A dict of plain values is replaced as a whole: a history may have grown.
            for key in [key for key in children if key not in value]:
                if not _holds(children[key]):
                    applies[key] = self.take(children[key])
                elif not value:
                    self.differences.unfit.append(
                        f"{path} is an empty dict, and in the checkpoint {place(path, key)} is "
                        f"{_describe(children[key])}, which is filled in place"
                    )
        return functools.partial(_replace, value, applies)


def _replace(container: Any, applies: Mapping[Any, Apply]) -> Any:
    """Replace the items of a container, and return it. Of a tuple a new one is returned."""
    new = {key: apply() for key, apply in applies.items()}
    if isinstance(container, tuple):
        items = [new.get(i, item) for i, item in enumerate(container)]
        return getattr(container, "_make", type(container))(items)
    for key, item in new.items():
        container[key] = item
    return container


# -- differences -----------------------------------------------------------------------------------

#: Differences that a message lists.
_FIRST: Final = 10


def report(
    directory: str,
    differences: Sequence[Differences],
    unneeded: Iterable[str],
    strict: bool,
    rank: int,
    way_out: str = " (strict=False loads what fits)",
) -> None:
    """Raise or warn if the state of any rank doesn't fit. No rank reads ``unneeded`` tensors."""
    missing = dict.fromkeys(path for one in differences for path in one.missing)
    untouched = set.intersection(*(one.untouched for one in differences)).union(unneeded)
    unfit = dict.fromkeys(text for one in differences for text in one.unfit)
    lines = [
        *_first("in the state, not in the checkpoint: ", list(missing), ", "),
        *_first("in the checkpoint, not in the state: ", sorted(untouched), ", "),
        *_first("", list(unfit), "\n  "),
    ]
    text = "\n  ".join(lines)
    if lines and strict:
        raise CheckpointError(
            f"{directory} does not fit the state, and nothing was changed{way_out}:\n  {text}"
        )
    if lines and rank == 0:
        logger.warning("%s does not fit the state; skipped:\n  %s", directory, text)


def _first(title: str, texts: Sequence[str], between: str) -> list[str]:
    more = [f"and {len(texts) - _FIRST} more"] if len(texts) > _FIRST else []
    return [title + between.join([*texts[:_FIRST], *more])] if texts else []


def unfit(stored: Stored, slot: Shard, convert: bool, planned: bool) -> str:
    """Return why a saved tensor can't be read into a shard, or an empty string."""
    dtype, here = BY_NAME[stored.dtype], slot.tensor
    if stored.shape != tuple(slot.shape):
        return f"{list(stored.shape)} in the checkpoint, {list(slot.shape)} here"
    if dtype is not here.dtype and (problem := _not_converted(dtype, here, convert, planned)):
        return f"{dtype} in the checkpoint, {here.dtype} here{problem}"
    if here.is_meta and not planned:
        return "it is on the meta device. Call module.to_empty(device=...) first"
    sides = zip(here.shape, here.stride(), strict=True)
    if any(size > 1 and not stride for size, stride in sides):
        return "its elements share memory (an expanded view). Use tensor.clone()"
    return ""


def _not_converted(dtype: torch.dtype, here: torch.Tensor, convert: bool, planned: bool) -> str:
    if not torch.can_cast(dtype, here.dtype):
        return ", which cannot hold its values"
    if not convert:
        return " (convert=True converts)"
    if planned and here.is_meta and here.is_floating_point() and not dtype.is_floating_point:
        return ". Quantized weights need the library that wrote them"
    return ""


def check_engines(function: str, by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise if ranks have different models: shards of one would pass for shards of the other."""
    none = "without an engine"
    for rank, engines in enumerate(by_rank):
        for path in dict.fromkeys([*by_rank[0], *engines]):
            first, other = by_rank[0].get(path, none), engines.get(path, none)
            if first != other:
                raise CheckpointError(
                    f"{function}: {path} is {first} on rank 0 and {other} on rank {rank}. "
                    "Give every rank the same model."
                )


def check_progress(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise if ranks save different steps. A signal handler runs on each rank at its own time."""
    for rank, progress in enumerate(by_rank):
        for path, steps in progress.items():
            first = by_rank[0][path]
            if steps != first:
                raise CheckpointError(
                    f"accel.save: {path} is after {first} on rank 0 and after {steps} on rank "
                    f"{rank}. Stop all ranks after the same step with accel.any_rank(flag). "
                    "To go on, load an earlier checkpoint."
                )
