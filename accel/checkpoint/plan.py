"""Decide which rank writes which elements of which tensor, without communication.

Ranks have disjoint or identical boxes of a tensor. If several ranks have a box, each writes an
equal share of its bytes. The tensors of a model have only a few shapes. So ranks exchange the kinds
of their shards, and the time to plan grows with kinds and ranks, not with tensors and ranks.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import CheckpointError
from ..shard import Box, expanded, shape_of
from .layout import Run, runs_of
from .record import Stored
from .shards import ITEM_BYTES, NAMES, Entry, LocalShard
from .steps import digest


@dataclass(frozen=True, slots=True)
class BoxKind:
    """The form of a shard. Many tensors on a rank have the same."""

    dtype: str
    shape: tuple[int, ...]
    box: Box
    #: True if the values may differ between ranks. Then the lowest rank with the box writes it.
    one_writer: bool


@dataclass(frozen=True, slots=True)
class Table:
    """The names of the shards on a rank, each with the number of its kind."""

    digest: str
    rows: tuple[tuple[str, int], ...] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """All shards on one rank. Ranks often have equal names (table) and different boxes (kinds)."""

    table: Table
    kinds: tuple[BoxKind, ...]


def list_shards(shards: Sequence[LocalShard]) -> Listing:
    """Return the listing of a rank. Local."""
    numbers: dict[BoxKind, int] = {}
    rows = []
    for one in shards:
        shard = one.shard
        kind = BoxKind(NAMES[shard.tensor.dtype], shard.shape, shard.region, not one.equal)
        rows.append((shard.name, numbers.setdefault(kind, len(numbers))))
    return Listing(Table(digest(rows), tuple(rows)), tuple(numbers))


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a box that the rank at ``place`` of a set writes."""

    name: str
    #: The name of the first tensor that has the same boxes as this one.
    like: str
    place: int = 0
    dim: int = 0
    #: The start and end along ``dim``, or None for the full box.
    rows: tuple[int, int] | None = None

    def of(self, box: Box) -> Box:
        """Return this part of a box."""
        if self.rows is None:
            return box
        begin, _ = box[self.dim]
        side = (begin + self.rows[0], begin + self.rows[1])
        return (*box[: self.dim], side, *box[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Sharing:
    """Sets of ranks with boxes of the same sizes, which every set splits in the same way."""

    sets: Sequence[tuple[int, ...]]
    #: The box of each set, by ``Piece.like``.
    boxes: Mapping[str, Sequence[Box]]
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The tensors of a checkpoint and their writers."""

    #: The kind of each tensor, which has its dtype and shape.
    kinds: Mapping[str, BoxKind]
    sharings: Sequence[Sharing]

    def entries(self, rank: int) -> Iterator[Entry]:
        """Yield the entries that a rank writes."""
        for sharing in self.sharings:
            for number, ranks in enumerate(sharing.sets):
                if rank not in ranks:
                    continue
                for piece in sharing.pieces:
                    if ranks[piece.place] == rank:
                        kind = self.kinds[piece.name]
                        box = piece.of(sharing.boxes[piece.like][number])
                        yield Entry(piece.name, kind.dtype, kind.shape, box)

    def stored(self, files: Mapping[int, int]) -> dict[str, Stored]:
        """Return the tensors of the record. ``files`` maps ranks to numbers of files."""
        found: dict[str, list[Run]] = defaultdict(list)
        for sharing in self.sharings:
            known: dict[tuple[str, int], list[Run]] = {}
            for piece in sharing.pieces:
                key = piece.like, piece.place
                if key not in known:
                    writers = [files[ranks[piece.place]] for ranks in sharing.sets]
                    known[key] = runs_of([*zip(writers, sharing.boxes[piece.like], strict=True)])
                for run in known[key]:
                    part = run if piece.rows is None else replace(run, box=piece.of(run.box))
                    found[piece.name].append(part)
        tensors = {}
        for name, kind in self.kinds.items():
            tensors[name] = Stored(kind.dtype, kind.shape, tuple(found[name]))
        return tensors


@functools.lru_cache(2)  # most saves of a job have the same shards
def make_plan(listings: tuple[Listing, ...]) -> WritePlan:
    """Return the plan for all ranks' listings. It is the same on every rank."""
    tables: dict[Table, list[int]] = defaultdict(list)
    for rank, listing in enumerate(listings):
        tables[listing.table].append(rank)
    sources: dict[str, list[tuple[Table, int]]] = defaultdict(list)
    # The record has this order, so exported files list the tensors in the order of the state.
    kinds: dict[str, BoxKind] = {}
    for table, ranks in tables.items():
        for name, number in table.rows:
            sources[name].append((table, number))
            kinds.setdefault(name, listings[ranks[0]].kinds[number])
    alike: dict[tuple[tuple[Table, int], ...], list[str]] = defaultdict(list)
    for name, own in sources.items():
        alike[tuple(own)].append(name)
    names_of: dict[str, list[str]] = {}
    sharings: list[Sharing] = []
    shared: dict[tuple[int, ...], dict[str, list[Box]]] = {}
    for places, names in alike.items():
        like, held = names[0], []
        for table, number in places:
            for rank in tables[table]:
                held.append((rank, listings[rank].kinds[number]))
        names_of[like] = names
        sets, boxes = [], []
        for box, ranks in _holders(like, held).items():
            if len(ranks) == 1 or kinds[like].one_writer:
                sets.append((min(ranks),))
                boxes.append(box)
            else:
                shared.setdefault(tuple(sorted(ranks)), {}).setdefault(like, []).append(box)
        pieces = [Piece(name, like) for name in names]
        sharings.append(Sharing(sets, {like: boxes}, pieces))
    sharings += _share(shared, names_of, kinds)
    return WritePlan(kinds, sharings)


def _holders(name: str, held: Sequence[tuple[int, BoxKind]]) -> dict[Box, list[int]]:
    """Return the ranks that have each box of a tensor. Raise if the boxes don't cover it."""
    first = held[0][1]
    shape = first.shape
    is_flat = all(len(kind.box) == 1 for _, kind in held)
    sizes = (math.prod(shape),) if is_flat else shape
    holders: dict[Box, list[int]] = {}
    for rank, kind in held:
        if (kind.dtype, kind.shape) != (first.dtype, shape):
            raise CheckpointError(
                f"{name} is {first.dtype} {list(shape)} on one rank and {kind.dtype} "
                f"{list(kind.shape)} on rank {rank}. Save the same tensor on every rank."
            )
        if math.prod(shape_of(kind.box)):
            for box in [kind.box] if is_flat else expanded(kind.box, shape):
                holders.setdefault(box, []).append(rank)
    # Engines return disjoint or identical boxes. So different boxes that lie inside the tensor
    # cover it if together they have as many elements as the tensor.
    count, is_inside = 0, True
    for box in holders:
        count += math.prod(shape_of(box))
        for (begin, end), size in zip(box, sizes, strict=True):
            is_inside = is_inside and 0 <= begin <= end <= size
    if not is_inside or count != math.prod(shape):
        raise CheckpointError(
            f"the shards of {name} {list(shape)} overlap or leave a gap. "
            f"They are {sorted(holders)[:4]}."
        )
    return holders


def _share(
    shared: Mapping[tuple[int, ...], Mapping[str, list[Box]]],
    names_of: Mapping[str, Sequence[str]],
    kinds: Mapping[str, BoxKind],
) -> Iterator[Sharing]:
    """Split boxes among the ranks that have them."""
    alike: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    for ranks, boxes in shared.items():
        sizes = [(like, *map(shape_of, own)) for like, own in boxes.items()]
        alike.setdefault((len(ranks), *sizes), []).append(ranks)
    for sets in alike.values():
        first = shared[sets[0]]
        # A set usually shares one box per tensor. Each further box needs its own Sharing.
        for number in range(max(map(len, first.values()))):
            boxes = {}
            for like, own in first.items():
                if number < len(own):
                    boxes[like] = [shared[ranks][like][number] for ranks in sets]
            yield Sharing(sets, boxes, [*_deal(boxes, names_of, kinds, len(sets[0]))])


def _deal(
    boxes: Mapping[str, Sequence[Box]],
    names_of: Mapping[str, Sequence[str]],
    kinds: Mapping[str, BoxKind],
    number: int,
) -> Iterator[Piece]:
    """Split the boxes, in order, into ``number`` shares of equal bytes."""
    nbytes, total = {}, 0
    for like, (box, *_) in boxes.items():
        nbytes[like] = math.prod(shape_of(box)) * ITEM_BYTES[kinds[like].dtype]
        total += nbytes[like] * len(names_of[like])
    done, place = 0, 0
    for like, (box, *_) in boxes.items():
        sizes = shape_of(box)
        dim = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
        row_bytes = nbytes[like] // sizes[dim]
        for name in names_of[like]:
            row = 0
            while row < sizes[dim]:
                limit = total * (place + 1) // number
                rows = min(sizes[dim], row + (limit - done) // row_bytes)
                if rows > row:
                    yield Piece(name, like, place, dim, (row, rows))
                    done += (rows - row) * row_bytes
                    row = rows
                if row < sizes[dim]:
                    place += 1
