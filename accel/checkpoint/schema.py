"""Whether all of a record can be what accel wrote: the kinds of values, their ranges, and what they refer to.

Every value is decoded, though no shard is read. The work grows with the size of the record, whatever it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import torch

from ..errors import CheckpointError
from .dtypes import BY_NAME
from .leaves import Leaf, ModuleLeaf, OptimizerLeaf, RankLeaf, StatefulLeaf, TensorLeaf
from .meeting import children_of, objects_in
from .record import Record
from .state import KEPT
from .values import DEPTH, TAG, Decoder, Json

_LEAVES: Final[dict[str, type[Leaf]]] = {
    leaf.kind: leaf for leaf in (ModuleLeaf, OptimizerLeaf, StatefulLeaf, TensorLeaf, RankLeaf)
}


def check(record: Record, source: str) -> set[int]:
    """Refuse a record that accel did not write; returns what ``objects_in`` finds in its values.

    Raises:
        CheckpointError: names the file, and what in it cannot be.
    """
    try:
        objects = objects_in(record.values)
        _Check(record, source, objects).all()
        return objects
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{source} does not keep to the format of accel's checkpoints ({type(error).__name__}: {error})"
        ) from error


@final
class _Check:
    """The check of one record."""

    def __init__(self, record: Record, source: str, objects: set[int]) -> None:
        self._record = record
        self._objects = objects
        self._named: set[str] = set()
        self._decoder = Decoder(source, self._fetch, self._objects)

    def _fetch(self, name: str) -> torch.Tensor:
        """A kept tensor without its memory; accel keeps each for one value only, so that no record says more than it holds."""
        if not name.startswith(KEPT) or name not in self._record.tensors or name in self._named:
            raise ValueError(f"a value names the tensor {name!r}, which is another's or not in the checkpoint")
        self._named.add(name)
        stored = self._record.tensors[name]
        return torch.empty(stored.shape, dtype=BY_NAME[stored.dtype], device="meta")

    def all(self) -> None:
        """The whole record."""
        self._visit(self._record.values, 0)
        for own in self._record.ranks:
            for value in own.values():
                self._decoder.decode(value)

    def _visit(self, node: Json, depth: int) -> None:
        if id(node) not in self._objects:
            self._decoder.decode(node)
        elif isinstance(node, dict) and str(node.get(TAG)) in _LEAVES:
            self._leaf(node)
        else:
            children = children_of(node, self._decoder)
            if children is None or depth > DEPTH:
                raise ValueError(f"a {node[TAG]} holds an object" if children is None else "nested too deeply")
            for child in children.values():
                self._visit(child, depth + 1)

    def _leaf(self, node: Mapping[str, Any]) -> None:
        kind = _LEAVES[node[TAG]]
        kind.check(node)
        if type(node.get("name", "")) is not str:
            raise ValueError(f"the name of a {kind.kind} is no string")
        for value in kind.encoded(node):
            self._decoder.decode(value)
        if kind is RankLeaf and not all(node["name"] in own for own in self._record.ranks):
            raise ValueError(f"the values of a rank lack {node['name']!r}")
