"""Boxes in tensors, and the grids that they make: where the parts of a tensor lie that is cut along several dimensions."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise, product
from typing import final

import torch

#: (begin, end) in each dimension.
Box = tuple[tuple[int, int], ...]
#: Where each dimension of a tensor is cut, increasing; () for one that is cut nowhere.
Cuts = tuple[tuple[int, ...], ...]


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((0, n) for n in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Its sizes."""
    return tuple(end - begin for begin, end in box)


def slices(box: Box) -> tuple[slice, ...]:
    """What indexes it in a tensor."""
    return tuple(slice(begin, end) for begin, end in box)


def strides_of(box: Box) -> tuple[int, ...]:
    """How far its elements lie from one another in each dimension, in its own row-major order."""
    return tuple(math.prod(shape_of(box[d + 1 :])) for d in range(len(box)))


def offset_in(box: Box, other: Box) -> int:
    """The number that the first element of a box has in one that holds it."""
    return sum((a[0] - b[0]) * n for a, b, n in zip(box, other, strides_of(other), strict=True))


def span_in(box: Box, other: Box) -> int:
    """How many elements of one that holds it lie from its first to its last, in row-major order."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape_of(box), strides_of(other), strict=True))


def range_of(box: Box, shape: tuple[int, ...]) -> int | None:
    """The first element of a box whose elements lie behind one another in the tensor; else None.

    By the dimensions that are cut, so that it is the same for all boxes of a grid.
    """
    cut = [d for d, (n, side) in enumerate(zip(shape, box, strict=True)) if side != (0, n)]
    if not cut or 0 in shape:
        return 0
    alone = cut == [next(d for d, n in enumerate(shape) if n > 1 or d == cut[0])]
    return offset_in(box, whole_box(shape)) if alone else None


def divided(box: Box, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Elements ``start`` to ``stop`` of a box as boxes, few and in order; each with the number of elements before it."""
    if not box:
        yield from [(0, box)] if start < stop else ()
        return
    (begin, _), inner, at = box[0], box[1:], start
    while at < stop:
        line, within = divmod(at, row := math.prod(shape_of(inner)))
        if within == 0 and stop - at >= row:
            end = stop - stop % row
            yield at - start, ((begin + line, begin + end // row), *inner)
        else:
            end = min(stop, (line + 1) * row)
            for before, part in divided(inner, within, within + end - at):
                yield at - start + before, ((begin + line, begin + line + 1), *part)
        at = end


def strips(box: Box, other: Box, most: int, gap: int) -> Iterator[Box]:
    """A box in parts that each span at most ``most`` elements of one that holds it, and have no gaps of more than ``gap``."""
    lengths, strides = shape_of(box), strides_of(other)
    span = 1  # of the dimensions so far, which are taken whole
    for d in reversed(range(len(box))):
        rows = 1 if strides[d] - span > gap else (most - span) // strides[d] + 1
        if rows < lengths[d]:
            break
        span += (lengths[d] - 1) * strides[d]
    else:
        yield box
        return
    begin, end = box[d]
    for i in range(math.prod(lengths[:d])):
        [(_, place)] = divided(box[:d], i, i + 1)
        for at in range(begin, end, rows):
            yield (*place, (at, min(at + rows, end)), *box[d + 1 :])


@final
class Grid:
    """A tensor cut along its dimensions, each at the same places everywhere, into blocks.

    Its line has the blocks one after the other in row-major order of the grid, the elements of each in row-major order: all
    elements of the tensor, which in a tensor that is not cut stand in their own order.

    Args:
        shape: of the tensor.
        cuts: where it is cut.
    """

    __slots__ = ("_edges", "cuts", "shape")

    def __init__(self, shape: tuple[int, ...], cuts: Cuts = ()) -> None:
        self.shape, self.cuts = shape, cuts
        self._edges = [(0, *places, n) for n, places in zip(shape, cuts or [()] * len(shape), strict=True)]

    @classmethod
    def of(cls, shape: tuple[int, ...], boxes: Collection[Box]) -> Grid:
        """The grid of these blocks, of which () is the whole tensor.

        Raises:
            ValueError: they overlap, leave a hole, or are cut differently from one another; says where.
        """
        boxes = {box or whole_box(shape) for box in boxes}
        edges = [sorted({0, n} | {box[d][0] for box in boxes}) for d, n in enumerate(shape)]
        sides = [set(pairwise(places)) for places in edges]
        wrong = [box for box in boxes if any(side not in those for side, those in zip(box, sides, strict=True))]
        if wrong or len(boxes) != math.prod(map(len, sides)):
            some = ", ".join(map(label, sorted(wrong or boxes)[:4]))
            raise ValueError(
                f"its parts overlap, leave a hole, or are no grid: {some}{', ...' if len(boxes) > 4 else ''}"
            )
        cuts = tuple(tuple(places[1:-1]) for places in edges)
        return cls(shape, cuts if any(cuts) else ())

    def first(self, block: Box) -> int:
        """The first element of a block on the line; () is all of the tensor."""
        if not block:
            return 0
        done = math.prod(self.shape)
        wide, before = 1, 0
        for (begin, end), n in zip(block, self.shape, strict=True):
            done //= n
            before, wide = before + wide * begin * done, wide * (end - begin)
        return before

    def block(self, element: int) -> tuple[int, Box]:
        """Where an element of the line is: the first element of its block, and the block."""
        row, rest = math.prod(self.shape), element
        sides = []
        for n, edges in zip(self.shape, self._edges, strict=True):
            row //= n
            i = bisect_right(edges, rest // row) - 1
            rest -= edges[i] * row
            sides.append((edges[i], edges[i + 1]))
            row *= edges[i + 1] - edges[i]
        return element - rest, tuple(sides)

    def blocks(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The blocks that a box overlaps, in order, each with its first element on the line."""
        found = [
            pairwise(edges[bisect_right(edges, begin) - 1 : bisect_left(edges, end) + 1])
            for (begin, end), edges in zip(box, self._edges, strict=True)
        ]
        return ((self.first(block), block) for block in product(*found))

    def put(self, values: torch.Tensor, start: int, whole: torch.Tensor) -> None:
        """Copy elements of the line, from ``start`` on, into the whole tensor."""
        at, stop = start, start + len(values)
        while at < stop:
            first, block = self.block(at)
            end = min(stop, first + math.prod(shape_of(block)))
            for before, box in divided(block, at - first, end - first):
                part = whole[slices(box)]
                begin = at - start + before
                part.copy_(values[begin : begin + part.numel()].view(part.shape))
            at = end


def overlap(box: Box, other: Box) -> Box:
    """What two boxes have in common that have something in common."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))


def label(box: Box) -> str:
    """How it is written behind the name of a tensor."""
    return f"[{','.join(f'{begin}:{end}' for begin, end in box)}]"
