"""Boxes in tensors, and the grids that they make: where the parts of a tensor lie that is cut along several dimensions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator
from itertools import pairwise, product
from operator import itemgetter
from typing import final

import torch

from .errors import CheckpointError

#: (begin, end) in each dimension; () is all of a tensor.
Box = tuple[tuple[int, int], ...]
#: Where each dimension of a tensor is cut, increasing; () is nowhere.
Cuts = tuple[tuple[int, ...], ...]


def shape_of(box: Box) -> tuple[int, ...]:
    """Its sizes."""
    return tuple(end - begin for begin, end in box)


def in_box(box: Box, other: Box) -> tuple[slice, ...]:
    """What two boxes have in common, as it is indexed in the other one."""
    return tuple(slice(max(a, c) - c, min(b, d) - c) for (a, b), (c, d) in zip(box, other, strict=True))


def divided(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Elements ``start`` to ``stop`` of a box in row-major order, as few boxes, in order."""
    if not box and start < stop:
        yield box
        return
    while start < stop:
        row = math.prod(shape_of(box[1:]))
        line, within = divmod(start, row)
        rows = 0 if within else (stop - start) // row
        count = rows * row or min(stop - start, row - within)
        side = box[0][0] + line, box[0][0] + line + max(rows, 1)
        yield from ((side, *rest) for rest in ([box[1:]] if rows else divided(box[1:], within, within + count)))
        start += count


@final
class Grid:
    """A tensor that is cut into blocks, at the same places everywhere.

    Its line is all elements: block after block in row-major order, and so within each; of a tensor that is not cut, as they are.
    """

    def __init__(self, shape: tuple[int, ...], cuts: Cuts = ()) -> None:
        self.shape, self.cuts = shape, cuts
        self.whole: Box = tuple((0, n) for n in shape)
        self._sides = [list(pairwise((0, *at, n))) for n, at in zip(shape, cuts or [()] * len(shape), strict=True)]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], boxes: Collection[Box]) -> Grid:
        """That of a tensor's parts; CheckpointError where they overlap, leave a hole, or are no grid."""
        if not any(boxes):
            return cls(shape)
        found = {box or cls(shape).whole for box in boxes}
        grid = cls(shape, tuple(tuple(sorted({box[d][0] for box in found} - {0})) for d in range(len(shape))))
        if len(found) != math.prod(map(len, grid._sides)) or found != set(grid.blocks(grid.whole)):
            raise CheckpointError(f"the parts of {name} {list(shape)} overlap or leave a hole: {sorted(found)[:4]}")
        return grid

    def first(self, block: Box) -> int:
        """The first element of a block on the line."""
        sides = enumerate(block)
        return sum(math.prod(shape_of(block[:d])) * begin * math.prod(self.shape[d + 1 :]) for d, (begin, _) in sides)

    def block(self, element: int) -> Box:
        """The block that an element of the line is in."""
        block: Box = ()
        for d, sides in enumerate(self._sides):
            row = math.prod(shape_of(block)) * math.prod(self.shape[d + 1 :])
            side = sides[bisect_right(sides, element // row, key=itemgetter(0)) - 1]
            block, element = (*block, side), element - side[0] * row
        return block

    def blocks(self, box: Box) -> Iterator[Box]:
        """Those that have something of a box."""
        sides = zip(self._sides, box, strict=True)
        return product(*([side for side in own if side[0] < end and begin < side[1]] for own, (begin, end) in sides))

    def put(self, values: torch.Tensor, start: int, whole: torch.Tensor) -> None:
        """Copy elements of the line, from ``start`` on, to where they belong in the tensor."""
        at = 0
        while at < len(values):
            block = self.block(start + at)
            within = start + at - self.first(block)
            for box in divided(block, within, min(within + len(values) - at, math.prod(shape_of(block)))):
                part = whole[tuple(slice(*side) for side in box)]
                part.copy_(values[at : at + part.numel()].view(part.shape))
                at += part.numel()
