"""A user's state matched with the saved values: what a load fills, what it replaces, and where the two do not fit. Local."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from ..errors import CheckpointError
from ..shard import Shard, overlaps_itself
from .objects import StateObject
from .record import Stored
from .safetensors import BY_NAME
from .state import OF_VALUES, PLAIN, State, below, component, is_object, items_of
from .steps import parsing
from .values import TAG, Decoder, Json, items_in, members, place

logger = logging.getLogger("accel")

#: Gives a value of the state its new content, and returns what takes its place.
Apply = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Differences:
    """Between a state and a checkpoint, as this rank sees them."""

    missing: list[str] = field(default_factory=list)  # in the checkpoint
    unfit: list[str] = field(default_factory=list)  # with both sides
    #: Extra state that the checkpoint has of modules, and they have not here.
    untouched: set[str] = field(default_factory=set)


@final
class Match:
    """What a load will do with a state: its objects with their saved nodes, the nodes of plain values, what does not fit."""

    def __init__(self, state: State, decoder: Decoder) -> None:
        self._state = state
        self._decoder = decoder
        self.objects: list[tuple[StateObject, Mapping[str, Json]]] = []
        self.plain: list[Json] = []
        self._decoded: list[Any] = []
        self.differences = Differences()

    def visit(self, value: Any, node: Json, name: str = "", path: str = "state") -> Apply:
        """Match ``value`` with its saved node; returns what gives its replacement once everything is decoded."""
        walked = isinstance(value, dict) or self._state.holds_object(value)
        if is_object(value):
            self._visit_object(self._state.object_of(value, name, path), node)
        elif walked or self._decoder.holds_object(node):
            children = children_of(node, self._decoder) if walked else None
            numbered = _is_numbered(node)
            fits = children is not None and (
                not numbered if isinstance(value, dict) else numbered and len(children) == len(value)
            )
            if children is not None and fits:
                return self._visit_container(value, children, name, path)
            here = f"a {type(value).__name__}{f' of {len(value)}' if walked else ''}"
            filled = self._state.holds_object(value) or self._decoder.holds_object(node)
            advice = _FILLED if filled else ": a dict takes what was saved of one"
            self.differences.unfit.append(f"{path} is {here}, and in the checkpoint {_describe(node)}{advice}")
        else:
            return self._take(node)
        return lambda: value

    def _take(self, node: Json) -> Apply:
        """What gives the value of a node, once all are decoded."""
        self.plain.append(node)
        return functools.partial(self._decoded.__getitem__, len(self.plain) - 1)

    def decode(self) -> list[Any]:
        """The values of the nodes in ``plain``."""
        self._decoded += [plain(node, self._decoder) for node in self.plain]
        return self._decoded

    def _visit_object(self, one: StateObject, node: Json) -> None:
        if not isinstance(node, dict) or node.get(TAG) != one.kind:
            self.differences.unfit.append(f"{one.path} is a {one.kind}, and in the checkpoint {_describe(node)}")
            return
        if problem := one.problem(node):
            self.differences.unfit.append(f"{one.path}: {problem}")
        else:
            self.objects.append((one, node))

    def _visit_container(self, value: Any, children: Mapping[Any, Json], name: str, path: str) -> Apply:
        applies: dict[Any, Apply] = {}
        taken: list[Any] = []  # keys of values that are replaced as they are: there may be very many
        # By the saved key: 1, True and numpy's 1 are one key with several names.
        saved = {key: key for key in children}
        for key, item in items_of(value):
            if key not in children:
                self.differences.missing.append(place(path, key))
            elif type(item) in PLAIN and not self._decoder.holds_object(children[key]):
                taken.append(key)
            else:
                where = place(path, key)
                applies[key] = self.visit(item, children[key], below(name, component(saved[key])), where)
        if isinstance(value, dict) and name and not self._state.holds_object(value):
            self._add(value, children, path, taken)
        values = self._take([children[key] for key in taken])

        def apply() -> Any:
            new = dict(zip(taken, values(), strict=True)) | {key: one() for key, one in applies.items()}
            if isinstance(value, tuple):
                items = [new.get(i, item) for i, item in enumerate(value)]
                changed = any(a is not b for a, b in zip(items, value, strict=True))
                make = getattr(value, "_make", type(value))
                return make(items) if changed else value
            for key, item in new.items():
                value[key] = item
            return value

        return apply

    def _add(self, value: dict[Any, Any], children: Mapping[Any, Json], path: str, taken: list[Any]) -> None:
        """A dict of plain values is one: what it has not yet is taken as well, as a history that grew."""
        for key, node in children.items():
            if key in value:
                continue
            if not self._decoder.holds_object(node):
                taken.append(key)
            elif not value:
                where = place(path, key)
                self.differences.unfit.append(
                    f"{path} is an empty dict, and in the checkpoint {where} holds {_describe(node)} to be filled"
                )


# -- Saved values, as JSON ---------------------------------------------------------------------------------------------

_MAPPINGS: Final = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
_OBJECTS: Final = frozenset({"module", "optimizer", "stateful", "ranks"})
_ARRAYS: Final = frozenset({"tensor", "numpy", "ndarray"})


def children_of(node: Json, decoder: Decoder) -> dict[Any, Json] | None:
    """Keys and nodes of a saved container; None if it is none."""
    if isinstance(node, list):
        return dict(enumerate(node))
    if not isinstance(node, dict):
        return None
    tag = str(node.get(TAG))
    if TAG not in node:
        return dict(node)
    with parsing(f"{decoder.source}: a container is not as accel writes it"):
        if tag == "tuple":
            return dict(enumerate(items_in(node)))
        if tag in _MAPPINGS:
            keys = members([decoder.decode(key) for key, _ in items_in(node)])
            return dict(zip(keys, [item for _, item in items_in(node)], strict=True))
    return None


def _is_numbered(node: Json) -> bool:
    """Whether it is of a list or tuple."""
    return isinstance(node, list) or (isinstance(node, dict) and node.get(TAG) == "tuple")


def objects_in(root: Json) -> set[int]:
    """The ids of the nodes that are, or hold, what can only be filled into an object of the state; in one pass over all."""
    found: set[int] = set()

    def visit(node: Json) -> bool:
        holds = type(node) is dict and TAG in node and _is_saved_object(node)
        for child in node.values() if type(node) is dict else node:
            if child and type(child) in _CONTAINERS and visit(child):
                holds = True
        if holds:
            found.add(id(node))
        return holds

    visit(root)
    return found


_CONTAINERS: Final = (dict, list)


def _is_saved_object(node: dict[str, Json]) -> bool:
    tensor = node.get(TAG) == "tensor" and not str(node.get("name", OF_VALUES)).startswith(OF_VALUES)
    return tensor or str(node.get(TAG)) in _OBJECTS


def value_tensors(node: Json) -> Iterator[str]:
    """The tensors that the values in a node consist of."""
    todo = [node] if type(node) in _CONTAINERS else []
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            if TAG in one and str(one[TAG]) in _ARRAYS and "name" in one:
                yield str(one["name"])
            one = one.values()
        todo += [child for child in one if type(child) in _CONTAINERS]


def plain(node: Json, decoder: Decoder) -> Any:
    """The plain values of a saved state, without its objects: in dicts they are left out, in lists None."""
    if not decoder.holds_object(node):
        return decoder.decode(node)
    children = children_of(node, decoder)
    if children is None:
        return None
    if _is_numbered(node):
        items = [plain(child, decoder) for child in children.values()]
        return items if isinstance(node, list) else tuple(items)
    return {
        key: plain(child, decoder)
        for key, child in children.items()
        if not (isinstance(child, dict) and _is_saved_object(child))
    }


def left_out(node: Json, decoder: Decoder, path: str = "state") -> Iterator[str]:
    """The tensors that ``plain`` leaves out of the containers in a state."""
    for key, child in (children_of(node, decoder) or {}).items():
        where = place(path, key)
        if path != "state" and isinstance(child, dict) and child.get(TAG) == "tensor" and _is_saved_object(child):
            yield where
        elif decoder.holds_object(child):
            yield from left_out(child, decoder, where)


_FILLED: Final = ": tensors and objects are filled where they are, so give as many of them as were saved"


def _describe(node: Json) -> str:
    if isinstance(node, dict):
        return f"a {node[TAG]}" if TAG in node else f"a dict of {len(node)}"
    return f"a list of {len(node)}" if isinstance(node, list) else f"the value {node!r}"


# -- Where they do not fit ---------------------------------------------------------------------------------------------

_FIRST: Final = 10  # differences that a message lists


def report(
    directory: str,
    differences: Sequence[Differences],
    unneeded: Iterable[str],
    strict: bool,
    rank: int,
    way_out: str = " (strict=False loads what fits)",
) -> None:
    """Raise, or warn of, what does not fit on any rank; ``unneeded`` are tensors of which none needs anything."""
    lines = []
    missing = dict.fromkeys(name for d in differences for name in d.missing)
    untouched = set.intersection(*(d.untouched for d in differences)).union(unneeded)
    for what, names in (
        ("in the state, not in the checkpoint", list(missing)),
        ("in the checkpoint, not in the state", sorted(untouched)),
    ):
        if names:
            more = f", and {len(names) - _FIRST} more" if len(names) > _FIRST else ""
            lines.append(f"{what}: {', '.join(names[:_FIRST])}{more}")
    unfit = list(dict.fromkeys(text for d in differences for text in d.unfit))
    lines += unfit[:_FIRST]
    if len(unfit) > _FIRST:
        lines.append(f"and {len(unfit) - _FIRST} more")
    if lines and strict:
        raise CheckpointError(
            f"{directory} does not fit the state, and nothing was changed{way_out}:\n  " + "\n  ".join(lines)
        )
    if lines and rank == 0:
        logger.warning("%s does not fit the state; skipped:\n  %s", directory, "\n  ".join(lines))


def unfit(stored: Stored, slot: Shard, convert: bool, planned: bool) -> str:
    """Why a saved tensor cannot be read into a range; empty if it can."""
    dtype = BY_NAME[stored.dtype]
    if stored.shape != tuple(slot.shape):
        return f"{list(stored.shape)} in the checkpoint, {list(slot.shape)} here"
    if dtype is not slot.tensor.dtype and (problem := _unconverted(dtype, slot.tensor, convert, planned)):
        return f"{dtype} in the checkpoint, {slot.tensor.dtype} here{problem}"
    if slot.tensor.is_meta and not planned:
        return "it is on the meta device, which holds no values; give it memory first (module.to_empty(device=...))"
    if overlaps_itself(slot.tensor):
        return "its elements share memory (an expanded or overlapping view), so that they cannot be filled; give its clone()"
    return ""


def _unconverted(dtype: torch.dtype, here: torch.Tensor, convert: bool, planned: bool) -> str:
    """Why values of a dtype are not converted to that of a tensor."""
    if not _holds(here.dtype, dtype):
        return ", which cannot hold its values"
    if not convert:
        return " (convert=True converts)"
    if planned and here.is_meta and here.is_floating_point() and not dtype.is_floating_point:
        return ", a weight: these are of a quantised format, which its own library reads"
    return ""


def _holds(here: torch.dtype, saved: torch.dtype) -> bool:
    """Whether values of a saved dtype can be converted, as far as the dtypes tell: integers would wrap around."""
    if not torch.can_cast(saved, here):
        return False
    if here.is_floating_point or here.is_complex or torch.bool in (here, saved):
        return True
    return torch.iinfo(here).min <= torch.iinfo(saved).min and torch.iinfo(saved).max <= torch.iinfo(here).max


def check_engines(what: str, told: Sequence[Mapping[str, str]]) -> None:
    """Refuse, in ``what``, that the ranks give different models: a part of one would pass for a part of the other."""
    for rank, theirs in enumerate(told):
        for path in dict.fromkeys([*told[0], *theirs]):
            first, other = told[0].get(path, "without an engine"), theirs.get(path, "without an engine")
            if first != other:
                raise CheckpointError(
                    f"{what}: {path} is {first} on rank 0 and {other} on rank {rank}: give every rank the same model there"
                )


def check_progress(told: Sequence[Mapping[str, str]]) -> None:
    """Refuse to save of different steps, of each rank a part: an interruption comes to ranks in their own time."""
    for rank, theirs in enumerate(told):
        for path, progress in theirs.items():
            if progress != told[0][path]:
                raise CheckpointError(
                    f"accel.save: {path} is after {told[0][path]} on rank 0 and after {progress} on rank {rank}, so that the "
                    "ranks would save parts of different models: stop all ranks after the same step (a signal's handler that "
                    "sets a flag, and accel.any_rank(flag) after each step); to go on now, accel.load an earlier checkpoint"
                )


def check_objects(digests: Sequence[str]) -> None:
    """What is filled on some ranks only would let the others go on with another model, optimizer or position."""
    for rank, one in enumerate(digests):
        if one != digests[0]:
            raise CheckpointError(
                f"accel.load: the state of rank {rank} has other objects than that of rank 0, and nothing was changed; give "
                "every rank the same keys"
            )
