"""What each rank has, as numbers that are sent to the other ranks, and what all have together."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError
from ..shard import Shard
from .dtypes import NAMES, element_bytes, memory
from .header import Entry
from .layout import Ranges, Sizes, assign
from .leaves import Listed
from .shards import Source, checksum, pieces

#: Name, dtype and shape of a tensor.
Row = tuple[str, str, tuple[int, ...]]


def digest(value: Any) -> str:
    """A short name of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Listing:
    """The ranges on one rank: of which tensor, first element, number of elements, and what they hold (0: not compared)."""

    table: list[Row]
    tensor: array[int]
    start: array[int]
    count: array[int]
    content: array[int]

    def digest(self) -> str:
        """Equal on ranks that have the same ranges."""
        return digest([self.table, *(list(c) for c in (self.tensor, self.start, self.count, self.content))])


def make_listing(listed: Sequence[Listed], compare: bool) -> Listing:
    """The listing of this rank.

    Args:
        listed: its ranges.
        compare: whether other ranks could have other values of what is not sure to be equal.

    Raises:
        CheckpointError: two tensors have one name.
    """
    table: dict[str, Row] = {}
    numbers: dict[str, int] = {}
    columns = array("q"), array("q"), array("q"), array("q")
    for one in listed:
        s = one.shard
        row = (s.name, NAMES[s.tensor.dtype], s.shape)
        if table.setdefault(s.name, row) != row or s.start + s.tensor.numel() > math.prod(s.shape):
            raise CheckpointError(
                f"two tensors of the state have the name {s.name!r}, or a range is outside of its tensor"
            )
        number = numbers.setdefault(s.name, len(numbers))
        whole = s.tensor.numel() == math.prod(s.shape)
        content = _content(s.tensor) if compare and whole and not one.sure else 0
        for column, value in zip(columns, (number, s.start, s.tensor.numel(), content), strict=True):
            column.append(value)
    return Listing(list(table.values()), *columns)


def _content(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's values that is never 0."""
    parts = [checksum(memory(piece)) for piece in pieces(tensor, 0, tensor.numel())]
    return int(checksum("".join(parts).encode()), 16) - 2**63 or 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The tensors of a checkpoint, and which rank writes which range of them."""

    table: list[Row]
    ranges: Ranges


def make_plan(listings: Sequence[Listing], world: int) -> Plan:
    """Divide the work.

    Args:
        listings: of each rank; or one, if all ranks have the same.
        world: the number of ranks.

    Raises:
        CheckpointError: the ranks differ in a tensor's shape or dtype, or a range is on no rank.
    """
    table: dict[str, tuple[int, Row]] = {}
    columns: list[list[torch.Tensor]] = [[], [], [], [], []]
    for rank, listing in enumerate(listings):
        numbers = []
        for row in listing.table:
            number, known = table.setdefault(row[0], (len(table), row))
            if known != row:
                raise CheckpointError(
                    f"{row[0]} is {known[1]} {list(known[2])} on one rank and {row[1]} {list(row[2])} on rank {rank}; "
                    "make it the same on all ranks (accel.all_gather), or leave it out of the state"
                )
            numbers.append(number)
        tensor = _vector(listing.tensor)
        columns[0].append(torch.tensor(numbers, dtype=torch.int64)[tensor] if numbers else tensor)
        for column, values in zip(columns[1:4], (listing.start, listing.count, listing.content), strict=True):
            column.append(_vector(values))
        columns[4].append(torch.full((len(tensor),), rank))
    rows = [row for _, row in table.values()]
    tensor, start, count, content, rank_of = (torch.cat(column) for column in columns)
    ranges = _lowest(Ranges(tensor, start, count, rank_of), content, len(rows))
    sizes = Sizes([r[0] for r in rows], [math.prod(r[2]) for r in rows], [element_bytes(r[1]) for r in rows])
    return Plan(rows, assign(world, sizes, ranges, replicated=len(listings) == 1 and world > 1))


def _lowest(ranges: Ranges, content: torch.Tensor, num_tensors: int) -> Ranges:
    """Without the ranges whose values differ from those of the lowest rank that has the tensor."""
    compared = content != 0
    if not bool(compared.any()):
        return ranges
    first = torch.full((num_tensors,), len(content), dtype=torch.int64)
    first.scatter_reduce_(0, ranges.tensor, torch.arange(len(content)), "amin")
    return ranges.select(~compared | (content == content[first[ranges.tensor]]))


def _vector(numbers: array[int]) -> torch.Tensor:
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)


def sources(plan: Plan, rank: int, listed: Sequence[Listed]) -> list[Source]:
    """What one rank writes, from where it lies."""
    places: dict[str, list[Shard]] = {}
    for listing in listed:
        places.setdefault(listing.shard.name, []).append(listing.shard)
    found = []
    mine = plan.ranges.select(plan.ranges.rank == rank)
    for number, start, count in zip(mine.tensor.tolist(), mine.start.tolist(), mine.count.tolist(), strict=True):
        name, dtype, shape = plan.table[number]
        one = next(s for s in places[name] if s.start <= start and start + count <= s.start + s.tensor.numel())
        found.append(Source(Entry(name, dtype, shape, start, count), one.tensor, start - one.start))
    return found
