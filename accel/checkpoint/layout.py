"""Who writes which range of which tensor: pure planning on numbers, near-linear in the number of ranges.

All elements of all tensors lie behind one another on a line: those of a tensor that is cut into boxes in the order of its
grid's line. A range is an interval on it. Where intervals of several ranks overlap, the line is cut at their ends, so that each
segment has one set of holders; the segments of a set are dealt to its ranks so that their bytes come out level.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

import torch

from ..errors import CheckpointError
from ..process.transfer import is_remote, on_host
from ..shard import Box, Cuts, Grid, shape_of
from .objects import LocalRange
from .safetensors import ITEM_BYTES, NAMES, Entry, from_bytes, memory
from .shards import WriteItem, checksum, checksum_of, pieces

#: A part of a tensor in the record: (first file, first element, elements per file, number of consecutive files).
Part = tuple[int, int, int, int]
_KEPT: Final = 6  # inventories of the last saves, and what is made of them
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The tensors of a checkpoint, by number."""

    names: Sequence[str]
    numels: Sequence[int]
    itemsizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of tensors, as int64 vectors: ``count`` elements from ``start``, on or for ``rank``."""

    tensor: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    rank: torch.Tensor

    def select(self, which: torch.Tensor) -> Ranges:
        """The ranges that a mask or an index selects."""
        index = which.nonzero().squeeze(1) if which.dtype is torch.bool else which
        columns = (self.tensor, self.start, self.count, self.rank)
        return Ranges(*(column.index_select(0, index) for column in columns))


def vector(numbers: Sequence[int]) -> torch.Tensor:
    """An int64 vector."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def assign(
    world: int,
    sizes: Sizes,
    held: Ranges,
    *,
    replicated: bool = False,
    like: torch.Tensor | None = None,
) -> Ranges:
    """Decide who writes what of these tensors, of which ``held`` lies on the ranks.

    ``replicated``: ``held`` is one rank's, and every rank has the same. ``like`` gives for each tensor the first of those that
    lie as it does; ``held`` then has these alone. Returns ranges that cover each tensor exactly once, in the tensors' order, each
    in one range of ``held``, which ``rank`` writes; where no rank has what another one has, the first of ``like``
    stand for all. CheckpointError where a range of a tensor lies on no rank.
    """
    tensors = torch.arange(len(sizes.numels), device="cpu")
    like = tensors if like is None else like
    numels = vector(sizes.numels)
    # The others take no place on the line.
    ends = torch.where(like == tensors, numels, 0).cumsum(0)
    bases = ends - torch.where(like == tensors, numels, 0)
    held = held.select(held.count > 0)
    first = bases[held.tensor] + held.start
    if bool((first[1:] < first[:-1]).any()):
        order = first.argsort(stable=True)
        first, held = first[order], held.select(order)
    last = first + held.count
    if not replicated and bool((first[1:] >= last[:-1]).all()):
        _check_cover(first, last, sizes, ends)
        return held
    segments, members = _overlay(first, last, held.rank, bases, world)
    if replicated:
        segments[2], members = -1, [torch.arange(world, device="cpu")]
    _check_cover(segments[0], segments[1], sizes, ends)
    segments = _for_all(segments, bases, numels, like)
    ends = numels.cumsum(0)
    itemsizes = vector(sizes.itemsizes)[torch.searchsorted(ends, segments[0], right=True)]
    first, last, rank = _deal(segments, members, itemsizes, world)
    tensor = torch.searchsorted(ends, first, right=True)
    return Ranges(tensor, first - (ends - numels)[tensor], last - first, rank)


def _for_all(
    segments: torch.Tensor, bases: torch.Tensor, numels: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """The segments on the line of all tensors, of those on that of the first of each that lie alike."""
    begin = torch.searchsorted(segments[0].contiguous(), bases[like])
    counts = torch.searchsorted(segments[0].contiguous(), bases[like] + numels) - begin
    shift = numels.cumsum(0) - numels - bases[like]
    index = torch.arange(int(counts.sum()), device="cpu") + torch.repeat_interleave(
        begin - counts.cumsum(0) + counts, counts
    )
    found = segments[:, index]
    found[:2] += torch.repeat_interleave(shift, counts)
    return found


def _overlay(
    first: torch.Tensor, last: torch.Tensor, rank: torch.Tensor, bases: torch.Tensor, world: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The segments of overlapping intervals, and the sets of ranks that hold some of them together.

    A segment is a column: the first element on the line, the one after the last, the rank (-1 - n: the set n).
    """
    cuts = torch.unique(torch.cat([first, last, bases]))
    begin, end = torch.searchsorted(cuts, first), torch.searchsorted(cuts, last)

    def total(weights: torch.Tensor) -> torch.Tensor:
        """For each segment the sum of the weights of the intervals that cover it."""
        steps = torch.zeros(len(cuts), dtype=torch.int64, device="cpu")
        steps.index_add_(0, begin, weights).index_add_(0, end, -weights)
        return steps.cumsum(0)[:-1]

    number = total(torch.ones_like(rank))
    # A rank counts once per segment as long as it has no element twice, which the caller checks.
    names = vector([_hashed(r) for r in range(world)])
    key = total(names[rank])
    held = number > 0
    owner = torch.where(number == 1, total(rank), -1)
    shared = torch.nonzero(number > 1).squeeze(1)
    keys, inverse = torch.unique(key[shared], return_inverse=True)
    example = torch.full((len(keys),), len(cuts), dtype=torch.int64, device="cpu")
    example.scatter_reduce_(0, inverse, shared, "amin")
    members = _members(example, begin, end, rank)
    owner[shared] = -1 - inverse
    return torch.stack([cuts[:-1], cuts[1:], owner])[:, held], members


def _members(
    example: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, rank: torch.Tensor
) -> list[torch.Tensor]:
    """The ranks that hold each example segment."""
    if not len(example):
        return []
    ordered, back = example.sort()
    low, high = torch.searchsorted(ordered, begin), torch.searchsorted(ordered, end)
    counts = high - low
    rows = torch.repeat_interleave(torch.arange(len(begin), device="cpu"), counts)
    offsets = torch.arange(len(rows), device="cpu") - torch.repeat_interleave(
        counts.cumsum(0) - counts, counts
    )
    which = low[rows] + offsets
    which, by = which.sort(stable=True)
    groups = rank[rows[by]].split(torch.bincount(which, minlength=len(example)).tolist())
    result = [torch.empty(0, dtype=torch.int64, device="cpu")] * len(example)
    for position, ranks in zip(back.tolist(), groups, strict=True):
        result[position] = torch.unique(ranks)
    return result


def _hashed(rank: int) -> int:
    """Sums of these tell sets of ranks apart."""
    return int.from_bytes(
        hashlib.blake2b(b"%d" % rank, digest_size=8).digest(), "little", signed=True
    )


def _check_cover(first: torch.Tensor, last: torch.Tensor, sizes: Sizes, ends: torch.Tensor) -> None:
    total = int(ends[-1]) if len(ends) else 0
    before = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), last])
    after = torch.cat([first, vector([total])])
    gaps = torch.nonzero(before != after)
    if len(gaps):
        at, until = int(before[gaps[0]]), int(after[gaps[0]])
        tensor = int(torch.searchsorted(ends, at, right=True))
        base, stop = int(ends[tensor]) - sizes.numels[tensor], min(until, int(ends[tensor]))
        raise CheckpointError(
            f"elements {at - base} to {stop - base - 1} of {sizes.names[tensor]} lie on no rank"
        )


def _deal(
    segments: torch.Tensor, members: Sequence[torch.Tensor], itemsizes: torch.Tensor, world: int
) -> torch.Tensor:
    """Give every segment that several ranks hold to one of them, cut where that makes their bytes level."""
    size = (segments[1] - segments[0]) * itemsizes
    alone = segments[2] >= 0
    loads = torch.zeros(world, dtype=torch.int64, device="cpu").index_add_(
        0, segments[2, alone], size[alone]
    )
    pieces = [segments[:, alone]]
    shared = torch.nonzero(~alone).squeeze(1)
    sets = -1 - segments[2, shared]
    of_sets = shared[sets.argsort(stable=True)].split(
        torch.bincount(sets, minlength=len(members)).tolist()
    )
    for ranks, which in sorted(zip(members, of_sets, strict=True), key=lambda pair: len(pair[0])):
        first, last, item = segments[0, which], segments[1, which], itemsizes[which]
        behind = size[which].cumsum(0)
        if not len(behind):
            continue
        shares = level(loads[ranks].tolist(), int(behind[-1]))
        loads[ranks] += vector(shares)
        cuts = vector(shares).cumsum(0)[:-1]
        at = torch.searchsorted(behind, cuts, right=True).clamp_(max=len(first) - 1)
        within = cuts - (behind[at] - size[which][at])
        cuts = torch.minimum(first[at] + within // item[at], last[at])
        starts = torch.unique(torch.cat([first, cuts[cuts < last[at]]]))
        segment = torch.searchsorted(first, starts, right=True) - 1
        following = torch.cat([starts[1:], last[-1:]])
        owner = ranks[torch.searchsorted(cuts, starts, right=True)]
        pieces.append(torch.stack([starts, torch.minimum(following, last[segment]), owner]))
    dealt = torch.cat(pieces, 1)
    return dealt[:, dealt[0].argsort()]


def level(loads: Sequence[int], amount: int) -> list[int]:
    """Shares of ``amount`` that make the loads as equal as they can be."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    shares, line, raised = [0] * len(loads), loads[order[0]], 1
    rest = amount
    while raised < len(order) and (loads[order[raised]] - line) * raised <= rest:
        rest -= (loads[order[raised]] - line) * raised
        line = loads[order[raised]]
        raised += 1
    each, extra = divmod(rest, raised)
    for i, member in enumerate(order[:raised]):
        shares[member] = line - loads[member] + each + (i < extra)
    return shares


def parts(ranges: Ranges, files: torch.Tensor) -> dict[int, list[Part]]:
    """The record's parts of each tensor, equal ones in consecutive files being one entry; ``files`` is the file of each rank."""
    found: dict[int, list[Part]] = {}
    if not len(ranges.tensor):
        return found
    file = files[ranges.rank]
    new = torch.ones(len(file), dtype=torch.bool, device="cpu")
    new[1:] = (
        (ranges.tensor[1:] != ranges.tensor[:-1])
        | (file[1:] != file[:-1] + 1)
        | (ranges.count[1:] != ranges.count[:-1])
    )
    at = torch.nonzero(new).squeeze(1)
    repeat = torch.diff(at, append=vector([len(file)]))
    columns = (ranges.tensor[at], file[at], ranges.start[at], ranges.count[at], repeat)
    for tensor, *part in zip(*(column.tolist() for column in columns), strict=True):
        found.setdefault(tensor, []).append((part[0], part[1], part[2], part[3]))
    return found


# -- What each rank has, as numbers that are sent to the other ranks, and what all have together -----------------------

#: Name, dtype and shape of a tensor, and the box of it that is meant, () for all of it.
Row = tuple[str, str, tuple[int, ...], Box]
_START: Final = itemgetter(0)


def digest(value: Any) -> str:
    """A short name of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Form:
    """What ranks that have parts of the same tensors have in common: the tensors, and an int64 column for each range.

    A column has the number of the tensor, and that of the range's kind. Ranges of one kind begin at the same element, are as
    long, and are of tensors of one dtype and shape; so many tensors have few kinds, which are all that each rank must tell.
    """

    table: list[Row]
    places: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Inventory:
    """The ranges on one rank; ``kinds`` has int64 columns: first element, number of elements, contents (0: not compared)."""

    form: Form
    kinds: torch.Tensor

    @functools.lru_cache(_KEPT)  # noqa: B019 - few are kept
    def digests(self) -> tuple[str, str, str]:
        """Equal on ranks that have the same tensors; the same ranges of them; of those compared, the same contents."""
        table, places = self.form.table, self.form.places
        form = digest([table, checksum(memory(places))])
        ranges = checksum(memory(torch.cat([self.kinds[:2], self.kinds[2:] != 0])))
        held = zip(places[0].tolist(), self.kinds[2, places[1]].tolist(), strict=True)
        return (
            form,
            digest([form, ranges]),
            digest(sorted([table[n], content] for n, content in held if content)),
        )

    def pack(self, same: int | None) -> PackedInventory:
        """As it is sent; ``same`` is a rank that sends the same form."""
        form = (
            (self.form.table, zlib.compress(memory(self.form.places), 1)) if same is None else same
        )
        return PackedInventory(form, zlib.compress(memory(self.kinds), 1))


@dataclass(frozen=True, slots=True)
class PackedInventory:
    """One on its way: its form, or the rank that sends the same, and its kinds; numbers are compressed."""

    form: tuple[list[Row], bytes] | int
    kinds: bytes


def unpack(packed: Sequence[PackedInventory]) -> list[Inventory]:
    """Those of all ranks; equal forms are one object."""
    found: list[Inventory] = []
    for one in packed:
        form = (
            found[one.form].form
            if isinstance(one.form, int)
            else Form(one.form[0], _numbers(one.form[1], 2))
        )
        found.append(Inventory(form, _numbers(one.kinds, 3)))
    return found


def _numbers(packed: bytes, rows: int) -> torch.Tensor:
    content = zlib.decompress(packed)
    return from_bytes(content, torch.int64, (rows, len(content) // (rows * torch.int64.itemsize)))


def inventory(table: list[Row], ranges: Sequence[tuple[int, int, int, int]]) -> Inventory:
    """Of ranges of these tensors: tensor's number, first element, number of elements, what they hold (0: not compared)."""
    kinds: dict[tuple[Any, ...], int] = {}
    places: list[tuple[int, int]] = []
    columns: list[tuple[int, int, int]] = []
    for number, start, count, content in ranges:
        # What is compared is of a kind of its own, since its contents change.
        key = (table[number][1:], start, count, number if content else -1)
        if (kind := kinds.setdefault(key, len(kinds))) == len(columns):
            columns.append((start, count, content))
        places.append((number, kind))
    return Inventory(Form(table, _transposed(places, 2)), _transposed(columns, 3))


def _transposed(columns: Sequence[tuple[int, ...]], rows: int) -> torch.Tensor:
    return torch.tensor(columns, dtype=torch.int64, device="cpu").view(-1, rows).T.contiguous()


def make_inventory(ranges: Sequence[LocalRange], compare: bool) -> Inventory:
    """That of this rank; ``compare``: other ranks could have other values of what is not equal by what an engine does."""
    listed = []
    for one in ranges:
        s, numel = (
            one.shard,
            math.prod(shape_of(one.shard.box) if one.shard.box else one.shard.shape),
        )
        content = (
            _content(s.tensor) if compare and s.tensor.numel() == numel and not one.equal else 0
        )
        listed.append(
            (
                (s.name, NAMES[s.tensor.dtype], s.shape, s.box),
                numel,
                s.start,
                s.tensor.numel(),
                content,
            )
        )
    return _listing(tuple(listed))


@functools.lru_cache(_KEPT)
def _listing(ranges: tuple[tuple[Row, int, int, int, int], ...]) -> Inventory:
    """Where a save has the ranges of the one before, it has its inventory."""
    table: dict[tuple[str, Box], Row] = {}
    numbers: dict[tuple[str, Box], int] = {}
    columns: list[tuple[int, int, int, int]] = []
    for row, numel, start, count, content in ranges:
        name, _, shape, box = row
        if _SURROGATE.search(name):
            raise CheckpointError(
                f"the tensor {name!r} of the state has a name that is no valid Unicode"
            )
        inside = not box or all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
        if table.setdefault((name, box), row) != row or start + count > numel or not inside:
            raise CheckpointError(
                f"two tensors of the state have the name {name!r}, or a range is outside of its tensor"
            )
        columns.append((numbers.setdefault((name, box), len(numbers)), start, count, content))
    return inventory(list(table.values()), columns)


def _content(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's values that is never 0; on a device of its own kind, which takes no copy."""
    if is_remote(tensor):
        return content_there(tensor) or 1
    return (
        int(checksum_of(map(memory, on_host(pieces(tensor, 0, tensor.numel())))), 16) - 2**63 or 1
    )


_MIXED: Final = 1 << 20  # elements of a piece, whose places and sums take memory of the device
_SPLITMIX: Final = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))


@torch.no_grad()
def content_there(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's values that its device makes: the sum of each value mixed with its place, as by splitmix64.

    Ranks that have the same take the tensor for equal, so that no pattern may hide, as it does in sums of rows and columns.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    at = 1
    for piece in (part for one in pieces(tensor, 0, tensor.numel()) for part in one.split(_MIXED)):
        bits = piece.view({1: torch.int8, 2: torch.int16}.get(piece.itemsize, torch.int32)).to(
            torch.int64
        )
        mixed = bits + (torch.arange(at, at + len(bits), device=bits.device) << 32)
        at += len(bits)
        for shift, factor in _SPLITMIX:
            mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
        total += mixed.sum()
    return int(total)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The tensors of a checkpoint, each with its dtype, shape and cuts, and which rank writes which range of their lines.

    ``ranges`` has those of the tensors that are in ``like``, which says for each tensor whose ranges are written of it.
    """

    table: Sequence[tuple[str, str, tuple[int, ...], Cuts]]
    ranges: Ranges
    like: Sequence[int]

    def of(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """What a rank writes, in the tensors' order: tensor's number, first element, number of elements."""
        mine = self.ranges.select(self.ranges.rank == rank)
        own: dict[int, list[tuple[int, int]]] = {}
        for number, start, count in zip(
            mine.tensor.tolist(), mine.start.tolist(), mine.count.tolist(), strict=True
        ):
            own.setdefault(number, []).append((start, count))
        return (
            (number, *one) for number, first in enumerate(self.like) for one in own.get(first, ())
        )

    def part(self, rank: int) -> Layout:
        """Without what others write."""
        return replace(self, ranges=self.ranges.select(self.ranges.rank == rank))

    def parts(self, files: torch.Tensor) -> list[list[Part]]:
        """The record's parts of each tensor; ``files`` is the file of each rank."""
        found = parts(self.ranges, files)
        return [found.get(first, []) for first in self.like]


def make_layout(inventories: Sequence[Inventory], world: int) -> Layout:
    """Divide the work between ranks with these inventories (one, if all have the same), if they fit together."""
    # In large jobs very many tensors lie alike on all ranks: who writes what is found for the first of them.
    like = _alike(list({id(one.form): one.form for one in inventories}.values()))
    rows, columns = _merge(inventories, set(like.values()))
    tensor, start, count, content, rank = columns
    ranges = _lowest(Ranges(tensor, start, count, rank), content, len(rows))
    del tensor, start, count, content, rank, columns  # of many ranks they are large
    table, ranges = _whole(rows, ranges)
    sizes = Sizes(
        [r[0] for r in table], [math.prod(r[2]) for r in table], [ITEM_BYTES[r[1]] for r in table]
    )
    numbers = {name: i for i, name in enumerate(like)}
    first = [numbers[one] for one in like.values()]
    ranges = assign(
        world, sizes, ranges, replicated=len(inventories) == 1 and world > 1, like=vector(first)
    )
    own = set(torch.unique(ranges.tensor).tolist())
    return Layout(table, ranges, [i if i in own else one for i, one in enumerate(first)])


def _alike(forms: Sequence[Form]) -> dict[str, str]:
    """The first of the tensors that lie on all ranks as each one does, by name."""
    traits: dict[str, list[tuple[Any, ...]]] = {}
    for which, form in enumerate(forms):
        kinds: list[list[int]] = [[] for _ in form.table]
        for number, kind in form.places.T.tolist():
            kinds[number].append(kind)
        for (name, *row), own in zip(form.table, kinds, strict=True):
            traits.setdefault(name, []).append((which, *row, *own))
    first: dict[tuple[Any, ...], str] = {}
    return {name: first.setdefault(tuple(own), name) for name, own in traits.items()}


def _whole(
    rows: list[Row], ranges: Ranges
) -> tuple[Sequence[tuple[str, str, tuple[int, ...], Cuts]], Ranges]:
    """The tensors of which the rows are boxes, and the ranges on their lines."""
    if not any(row[3] for row in rows):
        return rows, ranges
    tensors: dict[tuple[str, Box], tuple[int, Row]] = {}
    number = _number([(*row[:3], ()) for row in rows], tensors, "another")
    boxes: dict[str, list[Box]] = {name: [] for name, _ in tensors}
    for name, _, shape, box in rows:
        if 0 not in (shape_of(box) if box else shape):  # what has no elements is no part of a grid
            boxes[name].append(box)
    grids = [Grid.of(name, row[2], boxes[name]) for (name, _), (_, row) in tensors.items()]
    first = vector([grids[i].first(row[3]) for i, row in zip(number.tolist(), rows, strict=True)])
    table = [(*row[:3], grid.cuts) for (_, row), grid in zip(tensors.values(), grids, strict=True)]
    return table, Ranges(
        number[ranges.tensor], ranges.start + first[ranges.tensor], ranges.count, ranges.rank
    )


def _merge(
    inventories: Sequence[Inventory], names: Container[str]
) -> tuple[list[Row], torch.Tensor]:
    """The tensors of these names, and the inventories' columns of them after one another, with the ranks as the last."""
    table: dict[tuple[str, Box], tuple[int, Row]] = {}
    taken: dict[
        int, tuple[torch.Tensor, torch.Tensor]
    ] = {}  # ranks whose forms are one object share it
    columns = []
    for rank, one in enumerate(inventories):
        if id(one.form) not in taken:
            number = _number(one.form.table, table, f"rank {rank}")
            chosen = torch.tensor(
                [row[0] in names for row in one.form.table], dtype=torch.bool, device="cpu"
            )
            places = one.form.places[:, chosen[one.form.places[0]]]
            taken[id(one.form)] = number[places[0]], places[1]
        number, kind = taken[id(one.form)]
        columns.append(torch.stack([number, *one.kinds[:, kind], torch.full_like(number, rank)]))
    rows = [row for _, row in table.values()]
    if len({column.shape[1] for column in columns}) == 1:
        # Ranks that have the same tensors: then the ranges of one tensor are neighbours, and need no sorting.
        return rows, torch.stack(columns).permute(1, 2, 0).flatten(1)
    return rows, torch.cat(columns, 1)


def _number(
    rows: Sequence[Row], table: dict[tuple[str, Box], tuple[int, Row]], where: str
) -> torch.Tensor:
    """The number in ``table``, which grows, of each of a rank's rows."""
    numbers = []
    for row in rows:
        number, known = table.setdefault((row[0], row[3]), (len(table), row))
        if known != row:
            raise CheckpointError(
                f"{row[0]} is {known[1]} {list(known[2])} on one rank and {row[1]} {list(row[2])} on {where}; "
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


def write_items(
    rank: int, layout: Layout, own: Inventory, ranges: Sequence[LocalRange]
) -> list[WriteItem]:
    """What one rank writes, from where it lies; ``own`` is the inventory of the ranges."""
    return [
        WriteItem(entry, ranges[at].shard.tensor, offset)
        for entry, at, offset in _written(rank, layout, own)
    ]


@functools.lru_cache(_KEPT)
def _written(rank: int, layout: Layout, own: Inventory) -> list[tuple[Entry, int, int]]:
    """Each entry, the number of the range that has it, and where it begins in that."""
    grids = {name: Grid(shape, cuts) for name, _, shape, cuts in layout.table if cuts}
    places: dict[str, list[tuple[int, int]]] = {}
    starts, counts, _ = own.kinds.tolist()
    for at, (number, kind) in enumerate(own.form.places.T.tolist()):
        name, *_, box = own.form.table[number]
        if counts[kind]:
            places.setdefault(name, []).append(
                (starts[kind] + (grids[name].first(box) if box else 0), at)
            )
    for held in places.values():
        held.sort()
    found = []
    for number, start, count in layout.of(rank):
        name, dtype, shape, cuts = layout.table[number]
        first, at = places[name][bisect_right(places[name], start, key=_START) - 1]
        entry = Entry(name, dtype, shape, start, count)
        found.append((entry_of(entry, grids[name]) if cuts else entry, at, start - first))
    return found


def entry_of(line: Entry, grid: Grid) -> Entry:
    """How a file has elements of the line of a grid: as those of a block, of which accel lets none go over its end."""
    block = grid.block(line.start)
    name = f"{line.name}[{','.join(f'{begin}:{end}' for begin, end in block)}]"
    return Entry(name, line.dtype, shape_of(block), line.start - grid.first(block), line.count)
