"""The boxes of a tensor in files: at equal distances by a rule, others box by box."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..shard import Box, intersection


@dataclass(frozen=True, slots=True)
class Run:
    """Boxes in files at equal distances, each ``shift`` further along ``dim``. Often just one."""

    file: int
    box: Box
    count: int = 1
    step: int = 0
    dim: int = 0
    shift: int = 0

    def at(self, number: int) -> tuple[int, Box]:
        """Return the file and the box of one of the boxes."""
        if not number:
            return self.file, self.box
        begin, end = self.box[self.dim]
        moved = number * self.shift
        side = (begin + moved, end + moved)
        box = (*self.box[: self.dim], side, *self.box[self.dim + 1 :])
        return self.file + number * self.step, box

    def overlaps(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Give the files and boxes with elements of ``box``."""
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
        """Return the run with one more box, or None if the box is at a different distance."""
        longer = replace(self, count=self.count + 1)
        if self.count == 1:
            for dim, (new, old) in enumerate(zip(box, self.box, strict=True)):
                if new != old:
                    shift = new[0] - old[0]
                    longer = Run(self.file, self.box, 2, file - self.file, dim, shift)
        # Boxes of other sizes, or with several sides that differ, don't end up at ``box``.
        return longer if longer.shift > 0 and longer.at(self.count) == (file, box) else None


def runs_of(cells: Sequence[tuple[int, Box]]) -> list[Run]:
    """Return boxes, each with its rank or file, as few runs."""
    found: list[list[Run]] = []
    # On a mesh the ranks follow one another along the rows or along the columns.
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
