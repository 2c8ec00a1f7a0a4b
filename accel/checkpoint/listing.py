"""What each rank has, as numbers that are sent to the other ranks, and what all have together."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..errors import CheckpointError
from ..shard import Shard
from .dtypes import NAMES, element_bytes, memory
from .header import METADATA, Entry
from .layout import Ranges, Sizes, assign, vector
from .leaves import Listed
from .shards import Source, checksum, pieces

#: Name, dtype and shape of a tensor.
Row = tuple[str, str, tuple[int, ...]]
_COLUMNS: Final = 4


def digest(value: Any) -> str:
    """A short name of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Listing:
    """The ranges on one rank.

    Args:
        table: the tensors.
        numbers: int64, a column for each range: number of the tensor, first element, number of elements, and what they
            hold (0: not compared).
    """

    table: list[Row]
    numbers: torch.Tensor

    def digest(self) -> str:
        """Equal on ranks that have the same ranges."""
        return digest([self.table, hashlib.blake2b(memory(self.numbers), digest_size=16).hexdigest()])

    def pack(self, same: int | None) -> Packed:
        """As it is sent; ``same`` is a rank that sends the same table."""
        return Packed(self.table if same is None else same, zlib.compress(memory(self.numbers), 1))


@dataclass(frozen=True, slots=True)
class Packed:
    """A listing on its way: its table, or the rank that sends the same, and its numbers, compressed."""

    table: list[Row] | int
    numbers: bytes


def unpack(packed: Sequence[Packed]) -> list[Listing]:
    """The listings of all ranks; equal tables are one object."""
    found: list[Listing] = []
    for one in packed:
        table = one.table if isinstance(one.table, list) else found[one.table].table
        content = bytearray(zlib.decompress(one.numbers))
        numbers = (
            torch.frombuffer(content, dtype=torch.int64) if content else torch.empty(0, dtype=torch.int64, device="cpu")
        )
        found.append(Listing(table, numbers.view(_COLUMNS, -1)))
    return found


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
    columns: list[tuple[int, int, int, int]] = []
    for one in listed:
        s = one.shard
        _check_name(s.name)
        row = (s.name, NAMES[s.tensor.dtype], s.shape)
        if table.setdefault(s.name, row) != row or s.start + s.tensor.numel() > math.prod(s.shape):
            raise CheckpointError(
                f"two tensors of the state have the name {s.name!r}, or a range is outside of its tensor"
            )
        number = numbers.setdefault(s.name, len(numbers))
        whole = s.tensor.numel() == math.prod(s.shape)
        content = _content(s.tensor) if compare and whole and not one.sure else 0
        columns.append((number, s.start, s.tensor.numel(), content))
    numbers_of_all = torch.tensor(columns, dtype=torch.int64, device="cpu").view(-1, _COLUMNS)
    return Listing(list(table.values()), numbers_of_all.T.contiguous())


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the tensor {name!r} of the state has a name that is no valid Unicode") from error
    if name == METADATA:
        raise CheckpointError(
            f"the tensor {name!r} of the state has a name that safetensors files use themselves: rename it"
        )


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
    rows, columns = _merge(listings)
    tensor, start, count, content, rank = columns
    ranges = _lowest(Ranges(tensor, start, count, rank), content, len(rows))
    del tensor, start, count, content, rank, columns  # of many ranks they are large
    sizes = Sizes([r[0] for r in rows], [math.prod(r[2]) for r in rows], [element_bytes(r[1]) for r in rows])
    return Plan(rows, assign(world, sizes, ranges, replicated=len(listings) == 1 and world > 1))


def _merge(listings: Sequence[Listing]) -> tuple[list[Row], torch.Tensor]:
    """One table, and the listings' columns after one another, with the ranks as the last."""
    table: dict[str, tuple[int, Row]] = {}
    numbering: dict[int, torch.Tensor] = {}  # ranks whose tables are one object share it
    columns = []
    for rank, listing in enumerate(listings):
        if id(listing.table) not in numbering:
            numbering[id(listing.table)] = _number(listing.table, table, rank)
        number = numbering[id(listing.table)][listing.numbers[0]]
        columns.append(torch.stack([number, *listing.numbers[1:], torch.full_like(number, rank)]))
    rows = [row for _, row in table.values()]
    if len({one.shape[1] for one in columns}) == 1:
        # Ranks that list the same tensors: then the ranges of one tensor are neighbours, and need no sorting.
        return rows, torch.stack(columns).permute(1, 2, 0).flatten(1)
    return rows, torch.cat(columns, 1)


def _number(rows: Sequence[Row], table: dict[str, tuple[int, Row]], rank: int) -> torch.Tensor:
    """The number in ``table``, which grows, of each of a rank's rows."""
    numbers = []
    for row in rows:
        number, known = table.setdefault(row[0], (len(table), row))
        if known != row:
            raise CheckpointError(
                f"{row[0]} is {known[1]} {list(known[2])} on one rank and {row[1]} {list(row[2])} on rank {rank}; "
                "make it the same on all ranks (accel.all_gather), or leave it out of the state"
            )
        numbers.append(number)
    return vector(numbers)


def _lowest(ranges: Ranges, content: torch.Tensor, num_tensors: int) -> Ranges:
    """Without the ranges whose values differ from those of the lowest rank that has the tensor."""
    compared = content != 0
    if not bool(compared.any()):
        return ranges
    lowest = torch.full((num_tensors,), int(ranges.rank.max()) + 1, device="cpu")
    lowest.scatter_reduce_(0, ranges.tensor, ranges.rank, "amin")
    its = ranges.rank == lowest[ranges.tensor]
    saved = torch.zeros(num_tensors, dtype=torch.int64, device="cpu")
    saved[ranges.tensor[its]] = content[its]
    return ranges.select(~compared | (content == saved[ranges.tensor]))


def sources(plan: Plan, rank: int, listed: Sequence[Listed]) -> list[Source]:
    """What one rank writes, from where it lies."""
    places: dict[str, list[Shard]] = {}
    for one in listed:
        if one.shard.tensor.numel():
            places.setdefault(one.shard.name, []).append(one.shard)
    for shards in places.values():
        shards.sort(key=_start)
    found = []
    mine = plan.ranges.select(plan.ranges.rank == rank)
    for number, start, count in zip(mine.tensor.tolist(), mine.start.tolist(), mine.count.tolist(), strict=True):
        name, dtype, shape = plan.table[number]
        shards = places[name]
        held = shards[bisect_right(shards, start, key=_start) - 1]
        found.append(Source(Entry(name, dtype, shape, start, count), held.tensor, start - held.start))
    return found


def _start(shard: Shard) -> int:
    return shard.start
