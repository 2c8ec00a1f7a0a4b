"""The boxes of a tensor in files, as few runs of equally spaced boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..shard import Box, intersection


@dataclass(frozen=True, slots=True)
class Run:
    """Equally spaced boxes: each is ``shift`` further along ``dim`` and ``step`` files later."""

    file: int
    box: Box
    count: int = 1
    step: int = 0
    dim: int = 0
    shift: int = 0

    def at(self, number: int) -> tuple[int, Box]:
        """Return the file and the box at index ``number``."""
        if not number:
            return self.file, self.box
        begin, end = self.box[self.dim]
        moved = number * self.shift
        side = (begin + moved, end + moved)
        box = (*self.box[: self.dim], side, *self.box[self.dim + 1 :])
        return self.file + number * self.step, box

    def overlaps(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the files and boxes with elements of ``box``."""
        numbers = range(1)
        if self.count > 1:
            # -(-a // b) rounds up.
            (begin, end), (first, last) = box[self.dim], self.box[self.dim]
            low = max(0, -(-(begin - last + 1) // self.shift))
            numbers = range(low, min(self.count, -(-(end - first) // self.shift)))
        for number in numbers:
            file, stored = self.at(number)
            if intersection(stored, box) is not None:
                yield file, stored

    def extended(self, file: int, box: Box) -> Run | None:
        """Return the run with a box added, or None if the box doesn't continue the run."""
        longer = replace(self, count=self.count + 1)
        if self.count == 1:
            for dim, (new, old) in enumerate(zip(box, self.box, strict=True)):
                if new != old:
                    shift = new[0] - old[0]
                    longer = Run(self.file, self.box, 2, file - self.file, dim, shift)
        # at() doesn't return ``box`` if its size is different, or if several sides differ.
        return longer if longer.shift > 0 and longer.at(self.count) == (file, box) else None


def runs_of(cells: Sequence[tuple[int, Box]]) -> list[Run]:
    """Return boxes, each with its rank or file, in few runs."""
    found: list[list[Run]] = []
    # Try two orders, because the ranks of a mesh are ordered by rows or by columns.
    for key in (lambda cell: cell[1], lambda cell: cell[1][::-1]):
        runs: list[Run] = []
        for file, box in sorted(cells, key=key):
            longer = runs[-1].extended(file, box) if runs else None
            if longer is None:
                runs.append(Run(file, box))
            else:
                runs[-1] = longer
        found.append(runs)
        if not cells or len(cells[0][1]) == 1:
            break
    return min(found, key=len)
