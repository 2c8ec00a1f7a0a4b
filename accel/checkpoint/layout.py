"""Who writes which range of which tensor: pure planning on numbers, near-linear in the number of listed ranges.

All elements of all tensors lie behind one another on a line. A listed range is an interval on it. Where intervals of
several ranks overlap, the line is cut at their ends, so that each segment has one set of holders; the segments of a set
are dealt to its ranks so that their bytes come out level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ..errors import CheckpointError

#: A part of a tensor in the record: (first file, first element, elements per file, number of consecutive files).
Part = tuple[int, int, int, int]
_MASK: Final = 2**64 - 1


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


def assign(world: int, sizes: Sizes, listed: Ranges, *, replicated: bool = False) -> Ranges:
    """Decide who writes what.

    Args:
        world: the number of ranks.
        sizes: the tensors.
        listed: what lies on the ranks.
        replicated: ``listed`` is one rank's, and every rank has the same.

    Returns:
        Ranges that cover each tensor exactly once, in the tensors' order; ``rank`` writes them. Each is in one listed range.

    Raises:
        CheckpointError: a range of a tensor lies on no rank.
    """
    numels = vector(sizes.numels)
    ends = numels.cumsum(0)
    bases = ends - numels
    listed = listed.select(listed.count > 0)
    first = bases[listed.tensor] + listed.start
    if bool((first[1:] < first[:-1]).any()):
        order = first.argsort(stable=True)
        first, listed = first[order], listed.select(order)
    last = first + listed.count
    disjoint = bool((first[1:] >= last[:-1]).all())
    if disjoint and not replicated:
        _check_cover(first, last, sizes, ends, bases)
        return listed
    if disjoint:
        segments = _Segments(first, last, torch.full_like(first, -1))
        holders = [(torch.arange(world, device="cpu"), torch.arange(len(first), device="cpu"))]
    else:
        segments, holders = _overlay(first, last, listed.rank, bases, world, replicated)
    _check_cover(segments.first, segments.last, sizes, ends, bases)
    itemsizes = vector(sizes.itemsizes)[torch.searchsorted(ends, segments.first, right=True)]
    segments = _deal(segments, holders, itemsizes, world)
    tensor = torch.searchsorted(ends, segments.first, right=True)
    return Ranges(tensor, segments.first - bases[tensor], segments.last - segments.first, segments.rank)


@dataclass(frozen=True, slots=True)
class _Segments:
    """Intervals on the line, in order; ``rank`` is -1 where several ranks hold one."""

    first: torch.Tensor
    last: torch.Tensor
    rank: torch.Tensor


#: Sets of several ranks, each with the numbers of the segments that it holds.
_Holders = list[tuple[torch.Tensor, torch.Tensor]]


def _overlay(
    first: torch.Tensor, last: torch.Tensor, rank: torch.Tensor, bases: torch.Tensor, world: int, replicated: bool
) -> tuple[_Segments, _Holders]:
    """The segments of overlapping intervals, and who holds those that several ranks have."""
    cuts = torch.unique(torch.cat([first, last, bases]))
    begin, end = torch.searchsorted(cuts, first), torch.searchsorted(cuts, last)

    def total(weights: torch.Tensor) -> torch.Tensor:
        """For each segment the sum of the weights of the intervals that cover it."""
        steps = torch.zeros(len(cuts), dtype=torch.int64, device="cpu")
        steps.index_add_(0, begin, weights).index_add_(0, end, -weights)
        return steps.cumsum(0)[:-1]

    number = total(torch.ones_like(rank))
    # A rank counts once per segment as long as it lists no element twice, which the caller checks.
    names = vector([_scramble(r) for r in range(world)])
    key = total(names[rank])
    held = number > 0
    owner = torch.where(number == 1, total(rank), -1)
    if replicated:
        segments = _Segments(cuts[:-1][held], cuts[1:][held], torch.full_like(owner, -1)[held])
        return segments, [(torch.arange(world, device="cpu"), torch.arange(len(segments.first), device="cpu"))]
    shared = torch.nonzero(number > 1).squeeze(1)
    keys, inverse = torch.unique(key[shared], return_inverse=True)
    example = torch.full((len(keys),), len(cuts), dtype=torch.int64, device="cpu")
    example.scatter_reduce_(0, inverse, shared, "amin")
    members = _members(example, begin, end, rank)
    number_of = held.cumsum(0) - 1
    of_sets = number_of[shared[inverse.argsort(stable=True)]].split(torch.bincount(inverse).tolist())
    return _Segments(cuts[:-1][held], cuts[1:][held], owner[held]), list(zip(members, of_sets, strict=True))


def _members(example: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, rank: torch.Tensor) -> list[torch.Tensor]:
    """The ranks that hold each example segment."""
    if not len(example):
        return []
    ordered, back = example.sort()
    low, high = torch.searchsorted(ordered, begin), torch.searchsorted(ordered, end)
    counts = high - low
    rows = torch.repeat_interleave(torch.arange(len(begin), device="cpu"), counts)
    offsets = torch.arange(len(rows), device="cpu") - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    which = low[rows] + offsets
    which, by = which.sort(stable=True)
    groups = rank[rows[by]].split(torch.bincount(which, minlength=len(example)).tolist())
    result = [torch.empty(0, dtype=torch.int64, device="cpu")] * len(example)
    for position, ranks in zip(back.tolist(), groups, strict=True):
        result[position] = torch.unique(ranks)
    return result


def _scramble(rank: int) -> int:
    """A number of 64 bits of a rank: sums of them tell sets of ranks apart."""
    z = (rank + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return (z ^ z >> 31) - 2**63


def _check_cover(
    first: torch.Tensor, last: torch.Tensor, sizes: Sizes, ends: torch.Tensor, bases: torch.Tensor
) -> None:
    total = int(ends[-1]) if len(ends) else 0
    before = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), last])
    after = torch.cat([first, vector([total])])
    gaps = torch.nonzero(before != after)
    if len(gaps):
        at, until = int(before[gaps[0]]), int(after[gaps[0]])
        tensor = int(torch.searchsorted(ends, at, right=True))
        start = at - int(bases[tensor])
        stop = min(until - int(bases[tensor]), sizes.numels[tensor])
        raise CheckpointError(f"elements {start} to {stop - 1} of {sizes.names[tensor]} lie on no rank")


def _deal(segments: _Segments, holders: _Holders, itemsizes: torch.Tensor, world: int) -> _Segments:
    """Give every segment that several ranks hold to one of them, cut where that makes their bytes level."""
    size = (segments.last - segments.first) * itemsizes
    alone = segments.rank >= 0
    loads = torch.zeros(world, dtype=torch.int64, device="cpu").index_add_(0, segments.rank[alone], size[alone])
    pieces = [_Segments(segments.first[alone], segments.last[alone], segments.rank[alone])]
    for ranks, which in sorted(holders, key=lambda pair: len(pair[0])):
        first, last, item = segments.first[which], segments.last[which], itemsizes[which]
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
        pieces.append(_Segments(starts, torch.minimum(following, last[segment]), owner))
    first = torch.cat([p.first for p in pieces])
    order = first.argsort()
    return _Segments(
        first[order], torch.cat([p.last for p in pieces])[order], torch.cat([p.rank for p in pieces])[order]
    )


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
