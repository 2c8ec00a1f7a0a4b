"""Gather full values from shards, in batches of bounded size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from ...errors import AccelError
from ...process import Process
from ...process.control import agree
from ...process.packing import broadcast_
from ...shard import Box, Shard, divided, relative, shape_of, slices
from ...trees import TensorPlace, map_tensors, put_back, to_device

#: The most bytes to send at a time.
_BATCH_BYTES: Final = 64 << 20
_CPU: Final = torch.device("cpu")

#: The name of a parameter, buffer or extra state, the key of an optimizer's state or "", the value.
Item = tuple[str, Any, Any]
#: Returns the shard of a tensor with a name and a key, or None.
Part = Callable[[str, Tensor, Any], Shard | None]


def gather(
    title: str, held: Iterable[Item], part: Part, process: Process, device: torch.device, keep: bool
) -> dict[tuple[str, Any], Any]:
    """Return the full values of all ranks by name and key. Collective.

    A value may have tensors in nested containers. If several ranks have the
    same elements or value, the lowest rank's are used. Full tensors are on
    ``device``, but scalars may stay in CPU memory. Without ``keep``, this
    rank only sends.
    """
    forms: dict[tuple[str, Any], Any] = {}
    shards: dict[Any, Shard] = {}
    for item in held:
        forms[item[:2]] = _without_tensors(item, part, shards)
    rows = {}
    for key, shard in shards.items():
        # Offloaded shards and step counters are in CPU memory.
        on_device = shard.tensor.device.type == process.device.type
        rows[key] = _Row(shard.shape, shard.tensor.dtype, on_device, shard.region)
    # On the CPU, because a pickled tensor would be loaded on the sender's device.
    by_rank = agree(title, (rows, to_device(forms, "cpu")))
    fulls: dict[Any, _FullTensor] = {}
    values: dict[tuple[str, Any], Any] = {}
    for rank, (rows_of_rank, forms_of_rank) in enumerate(by_rank):
        for key, row in rows_of_rank.items():
            if key not in fulls:
                target = process.device if row.on_device else _CPU
                if device == _CPU or row.shape:
                    target = device
                fulls[key] = _FullTensor(key, row, target if keep else None)
            fulls[key].add(rank, row.region)
        for key, form in forms_of_rank.items():
            values.setdefault(key, form)
    _send(fulls.values(), shards, process)
    if not keep:
        return {}
    tensors = {key: full.tensor for key, full in fulls.items()}
    full: dict[tuple[str, Any], Any] = to_device(values, device)
    return put_back(full, tensors)  # type: ignore[no-any-return]


def _without_tensors(item: Item, part: Part, shards: dict[Any, Shard]) -> Any:
    """Replace tensors by placeholders, and add to ``shards``."""
    name, key, value = item
    numbers = count()

    def visit(tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return tensor
        number = (name, key) if tensor is value else (name, key, next(numbers))
        shard = part(name, tensor, key)
        if shard is not None:
            shards[number] = shard
        return TensorPlace(number)

    return map_tensors(visit, value)


@dataclass(frozen=True, slots=True)
class _Row:
    """Describes the shard of a tensor to the other ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_device: bool
    region: Box


class _FullTensor:
    """A full tensor, and the ranks with its boxes."""

    def __init__(self, key: Any, row: _Row, device: torch.device | None) -> None:
        self.key, self.dtype, self.numel = key, row.dtype, math.prod(row.shape)
        #: The lowest rank that has each box.
        self.boxes: dict[Box, int] = {}
        #: True if a rank has the full tensor.
        self.is_complete = False
        self.tensor: Tensor | None = None
        if device is not None:
            self.tensor = torch.empty(row.shape, dtype=row.dtype, device=device)

    def add(self, rank: int, box: Box) -> None:
        """Add the box of a rank, unless a lower rank has it."""
        size = math.prod(shape_of(box))
        if not size or self.is_complete:
            return
        # One full tensor is enough. Attention caches may have different lengths on ranks.
        if size == self.numel:
            self.is_complete = True
            self.boxes.clear()
        self.boxes.setdefault(box, rank)

    def pieces(self) -> Iterator[tuple[Box, Box]]:
        """Yield boxes of at most a batch, each after the box that contains it."""
        num_elements = sum(math.prod(shape_of(box)) for box in self.boxes)
        if num_elements != self.numel:
            raise AccelError(
                f"{self.key} can't be gathered, because ranks have {num_elements} "
                f"of {self.numel} elements. Load a checkpoint."
            )
        step = max(1, _BATCH_BYTES // self.dtype.itemsize)
        for held in self.boxes:
            total = math.prod(shape_of(held))
            for start in range(0, total, step):
                for box in divided(held, start, min(start + step, total)):
                    yield held, box

    def view(self, box: Box) -> Tensor | None:
        """Return the elements of a box, or None without ``keep``."""
        if self.tensor is None:
            return None
        flat = len(box) == 1 and self.tensor.dim() != 1
        return (self.tensor.view(-1) if flat else self.tensor)[slices(box)]


@torch.no_grad()
def _send(fulls: Iterable[_FullTensor], shards: Mapping[Any, Shard], process: Process) -> None:
    """Broadcast all boxes from their ranks, in batches. Collective."""
    by_rank: dict[int, list[Tensor]] = {}
    received: list[tuple[Tensor | None, Tensor]] = []
    room = _BATCH_BYTES

    def flush() -> None:
        for source in sorted(by_rank):
            broadcast_(by_rank[source], process.group, source)
        for target, values in received:
            if target is not None:
                target.copy_(values)
        by_rank.clear()
        received.clear()

    for full in fulls:
        for held, box in full.pieces():
            target, source = full.view(box), full.boxes[held]
            shape = shape_of(box)
            nbytes = math.prod(shape) * full.dtype.itemsize
            if nbytes > room:
                flush()
                room = _BATCH_BYTES
            room -= nbytes
            values = torch.empty(shape, dtype=full.dtype, device=process.carrier)
            received.append((target, values))
            by_rank.setdefault(source, []).append(values)
            if source == process.place.rank:
                local = shards[full.key].tensor.reshape(shape_of(held))
                values.copy_(local[slices(relative(box, held))])
    flush()
