"""Decide which rank writes which elements of which tensor. Pure: boxes in, boxes out.

Ranks hold disjoint or identical boxes of a tensor. The only rank that holds a box writes it. A box
on several ranks is divided among them so that their bytes are equal.

Most tensors of a model have few shapes, and tensors of one shape lie alike. So a rank tells the
others its kinds of shards, and planning takes time by kinds and ranks, not by tensors and ranks.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import CheckpointError
from ..shard import Box, expanded, shape_of
from .layout import Run, runs_of
from .record import Stored
from .shards import ITEM_BYTES, NAMES, Entry, LocalShard

# -- the shards on one rank ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """The form of a shard: many tensors of a rank have the same."""

    dtype: str
    shape: tuple[int, ...]
    box: Box
    #: True if nothing keeps the values equal on all ranks. Then the lowest rank writes its own.
    lead: bool


@dataclass(frozen=True, slots=True)
class Table:
    """The names of the shards on a rank, each with the number of its kind."""

    digest: str
    rows: tuple[tuple[str, int], ...] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """All shards on one rank. Ranks that differ only in the boxes have equal tables."""

    table: Table
    kinds: tuple[Kind, ...]


def list_shards(shards: Sequence[LocalShard]) -> Listing:
    """Return the listing of a rank. Local."""
    numbers: dict[Kind, int] = {}
    rows = []
    for one in shards:
        shard = one.shard
        box = shard.region
        if math.prod(shape_of(box)) != shard.tensor.numel():
            raise CheckpointError(f"{shard.name} {list(shard.shape)} has a shard outside of it.")
        kind = Kind(NAMES[shard.tensor.dtype], shard.shape, box, not one.equal)
        rows.append((shard.name, numbers.setdefault(kind, len(numbers))))
    text = "\n".join(f"{number} {name}" for name, number in rows)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return Listing(Table(digest, tuple(rows)), tuple(numbers))


# -- the plan --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that lie alike on all ranks, and the boxes of each that have one writer."""

    names: Sequence[str]
    dtype: str
    shape: tuple[int, ...]
    alone: Sequence[tuple[int, Box]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a shared box: rows of its first long side, for the rank at ``place``."""

    group: int
    name: str
    place: int
    dim: int
    rows: tuple[int, int]

    def of(self, box: Box) -> Box:
        begin, _ = box[self.dim]
        side = (begin + self.rows[0], begin + self.rows[1])
        return (*box[: self.dim], side, *box[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Sharing:
    """Sets of ranks that hold boxes of the same sizes, so each set divides them in the same way."""

    sets: Sequence[tuple[int, ...]]
    #: For each group a box of each set.
    boxes: dict[int, list[Box]]
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Plan:
    """The tensors of a checkpoint and their writers."""

    names: Sequence[str]
    groups: Sequence[Group]
    sharings: Sequence[Sharing]

    def entries(self, rank: int) -> Iterator[Entry]:
        """Give the elements that a rank writes."""
        for group in self.groups:
            for writer, box in group.alone:
                for name in group.names if writer == rank else ():
                    yield Entry(name, group.dtype, group.shape, box)
        for sharing in self.sharings:
            for number, ranks in enumerate(sharing.sets):
                place = ranks.index(rank) if rank in ranks else -1
                for piece in sharing.pieces if place >= 0 else ():
                    if piece.place == place:
                        group = self.groups[piece.group]
                        box = piece.of(sharing.boxes[piece.group][number])
                        yield Entry(piece.name, group.dtype, group.shape, box)

    def stored(self, files: Mapping[int, int]) -> dict[str, Stored]:
        """Return the tensors of the record. ``files`` gives the numbers of the ranks' files."""
        found: dict[str, list[Run]] = {name: [] for name in self.names}
        forms = {}
        for group in self.groups:
            alone = runs_of([(files[writer], box) for writer, box in group.alone])
            for name in group.names:
                found[name] += alone
                forms[name] = group
        for sharing in self.sharings:
            known: dict[tuple[int, int], list[Run]] = {}
            for piece in sharing.pieces:
                key = piece.group, piece.place
                if key not in known:
                    writers = [files[ranks[piece.place]] for ranks in sharing.sets]
                    known[key] = runs_of(
                        list(zip(writers, sharing.boxes[piece.group], strict=True))
                    )
                found[piece.name] += [replace(r, box=piece.of(r.box)) for r in known[key]]
        return {n: Stored(forms[n].dtype, forms[n].shape, tuple(runs)) for n, runs in found.items()}


@functools.lru_cache(2)  # most saves of a job have the same shards
def make_plan(listings: tuple[Listing, ...]) -> Plan:
    """Plan for ranks with these listings. Each rank makes the same plan.

    Raises:
        CheckpointError: the shards of a tensor overlap or don't cover it.
    """
    tables: dict[Table, list[int]] = {}
    for rank, listing in enumerate(listings):
        tables.setdefault(listing.table, []).append(rank)
    sources: dict[str, list[tuple[Table, int]]] = {}
    for table in tables:
        for name, kind in table.rows:
            sources.setdefault(name, []).append((table, kind))
    alike: dict[tuple[tuple[Table, int], ...], list[str]] = {}
    for name, own in sources.items():
        alike.setdefault(tuple(own), []).append(name)
    groups: list[Group] = []
    shared: dict[tuple[int, ...], dict[int, list[Box]]] = {}
    for places, names in alike.items():
        held = []
        for table, number in places:
            held += [(rank, listings[rank].kinds[number]) for rank in tables[table]]
        first, alone = held[0][1], []
        for box, writers in _holders(names[0], held).items():
            if len(writers) == 1 or first.lead:
                alone.append((min(writers), box))
            else:
                own_boxes = shared.setdefault(tuple(sorted(writers)), {})
                own_boxes.setdefault(len(groups), []).append(box)
        groups.append(Group(names, first.dtype, first.shape, alone))
    return Plan(list(sources), groups, _share(groups, shared))


def _holders(name: str, held: Sequence[tuple[int, Kind]]) -> dict[Box, list[int]]:
    """Return the ranks that hold each box of a tensor, once they are known to cover it."""
    first = held[0][1]
    shape = first.shape
    full = [kind for _, kind in held if all(begin < end for begin, end in kind.box)]
    is_flat = all(len(kind.box) == 1 for kind in full)
    whole: Box = ((0, math.prod(shape)),) if is_flat else tuple((0, size) for size in shape)
    holders: dict[Box, list[int]] = {}
    for rank, kind in held:
        if (kind.dtype, kind.shape) != (first.dtype, shape):
            raise CheckpointError(
                f"{name} is {first.dtype} {list(shape)} on one rank and "
                f"{kind.dtype} {list(kind.shape)} on rank {rank}. Save the same tensor on all."
            )
        if all(begin < end for begin, end in kind.box):
            for box in [kind.box] if is_flat else expanded(kind.box, shape):
                holders.setdefault(box, []).append(rank)
    # Engines give disjoint or identical boxes. So boxes inside the tensor with as many elements as
    # the tensor are all of it.
    count, is_inside = 0, True
    for box in holders:
        count += math.prod(shape_of(box))
        for (begin, end), (_, size) in zip(box, whole, strict=True):
            is_inside = is_inside and begin >= 0 and end <= size
    if not is_inside or count != math.prod(shape):
        raise CheckpointError(
            f"the shards of {name} {list(shape)} overlap or leave a hole. "
            f"They are {sorted(holders)[:4]}."
        )
    return holders


def _share(
    groups: Sequence[Group], shared: dict[tuple[int, ...], dict[int, list[Box]]]
) -> list[Sharing]:
    """Divide the boxes that several ranks hold."""
    alike: dict[tuple[object, ...], list[tuple[tuple[int, ...], dict[int, list[Box]]]]] = {}
    for ranks, boxes in shared.items():
        sizes = [(group, *map(shape_of, own)) for group, own in boxes.items()]
        alike.setdefault((len(ranks), *sizes), []).append((ranks, boxes))
    sharings = []
    for members in alike.values():
        sets = [ranks for ranks, _ in members]
        _, first = members[0]
        # Usually a set has one box of a tensor.
        for number in range(max(map(len, first.values()))):
            chosen = [group for group, own in first.items() if len(own) > number]
            boxes = {group: [own[group][number] for _, own in members] for group in chosen}
            pieces = list(_deal(groups, {g: b[0] for g, b in boxes.items()}, len(sets[0])))
            sharings.append(Sharing(sets, boxes, pieces))
    return sharings


def _deal(groups: Sequence[Group], boxes: dict[int, Box], number: int) -> Iterator[Piece]:
    """Cut the boxes, one after the other, into shares of equal bytes."""
    nbytes = {g: math.prod(shape_of(b)) * ITEM_BYTES[groups[g].dtype] for g, b in boxes.items()}
    total = sum(size * len(groups[group].names) for group, size in nbytes.items())
    done, place = 0, 0
    for group, box in boxes.items():
        sizes = shape_of(box)
        dim = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
        row_bytes = max(1, nbytes[group] // sizes[dim])
        for name in groups[group].names:
            row = 0
            while row < sizes[dim]:
                limit = total * (place + 1) // number
                rows = min(sizes[dim], row + max(0, limit - done) // row_bytes)
                if place == number - 1:
                    rows = sizes[dim]
                if rows > row:
                    yield Piece(group, name, place, dim, (row, rows))
                    done += (rows - row) * row_bytes
                    row = rows
                if row < sizes[dim]:
                    place += 1
