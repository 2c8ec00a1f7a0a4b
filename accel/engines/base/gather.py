"""Full values on every rank from the shards on each of them, through batches of bounded size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch

from ...errors import AccelError
from ...process import Process
from ...process.control import agree
from ...process.packing import broadcast_
from ...shard import Box, Shard, divided, relative, shape_of, slices
from ...trees import TensorPlace, map_tensors, put_back, to_device

#: The bytes that travel at a time.
_BATCH_BYTES: Final = 64 << 20

#: The name of a parameter, buffer or extra state, the key of an optimizer's state or "", the value.
Item = tuple[str, Any, Any]


def gather(
    title: str,
    held: Iterable[Item],
    part: Callable[[str, torch.Tensor, Any], Shard | None],
    process: Process,
    *,
    device: torch.device | None,
    keep: bool = True,
) -> dict[tuple[str, Any], Any]:
    """Return the full values of all ranks by name and key. Collective.

    A value may hold tensors in nested containers. If several ranks have the same elements, those of
    the lowest rank count. Values that are not tensors are this rank's own if it has them.

    Args:
        title: names the gathering in messages.
        held: the values on this rank.
        part: returns the shard that a tensor of this rank is.
        device: the device of full tensors. None: that of their shards. Single numbers may stay in
            host memory.
        keep: False if this rank only sends, and gets nothing.

    Raises:
        AccelError: if no rank has some of the elements, or as ``agree`` does.
    """
    forms, shards = _take_apart(held, part)
    rows = {key: _row_of(shard, process.device, device) for key, shard in shards.items()}
    is_tensor = {}
    for key, form in forms.items():
        is_tensor[key] = type(form) is TensorPlace and form.number == key
    by_rank = agree(title, (rows, is_tensor))
    # Values that are not tensors, and not on all ranks, are sent by the lowest rank.
    senders: dict[tuple[str, Any], int] = {}
    for rank, (_, keys) in enumerate(by_rank):
        for key, alone in keys.items():
            if not alone and not all(key in others for _, others in by_rank):
                senders.setdefault(key, rank)
    if senders:
        # In host memory, because the device of a pickled tensor would be the sender's.
        own = [key for key, sender in senders.items() if sender == process.place.rank]
        for sent in agree(f"{title}: values", {key: to_device(forms[key], "cpu") for key in own}):
            for key, form in sent.items():
                forms.setdefault(key, to_device(form, device or process.device))
    fulls = _describe([rows for rows, _ in by_rank], process, keep)
    _send(list(fulls.values()), shards, process)
    if not keep:
        return {}
    tensors = {key: full.tensor for key, full in fulls.items()}
    names = dict.fromkeys(key for _, keys in by_rank for key in keys)
    return {key: put_back(forms.get(key, TensorPlace(key)), tensors) for key in names}


def _take_apart(
    held: Iterable[Item], part: Callable[[str, torch.Tensor, Any], Shard | None]
) -> tuple[dict[tuple[str, Any], Any], dict[Any, Shard]]:
    """Return the values without their tensors, and the shards of the tensors."""
    forms: dict[tuple[str, Any], Any] = {}
    shards: dict[Any, Shard] = {}
    # Values keep their tensors alive. A tensor that is in several values stays one.
    places: dict[int, tuple[torch.Tensor, TensorPlace]] = {}

    def add(name: str, key: Any, value: Any) -> Any:
        numbers = count()

        def visit(tensor: torch.Tensor) -> Any:
            if tensor.layout is not torch.strided:
                return tensor
            if id(tensor) not in places:
                number = (name, key) if tensor is value else (name, key, next(numbers))
                places[id(tensor)] = tensor, TensorPlace(number)
                shard = part(name, tensor, key)
                if shard is not None:
                    shards[number] = shard
            return places[id(tensor)][1]

        return map_tensors(visit, value, others=True)

    for name, key, value in held:
        forms[name, key] = add(name, key, value)
    return forms, shards


@dataclass(frozen=True, slots=True)
class _Row:
    """Describes the shard of a tensor to the other ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    #: True if the full tensor goes to the process's device.
    on_device: bool
    region: Box


def _row_of(shard: Shard, own: torch.device, device: torch.device | None) -> _Row:
    target = shard.tensor.device
    # Step counters stay in host memory.
    if device is not None and (device.type == "cpu" or shard.tensor.dim()):
        target = device
    return _Row(shard.shape, shard.tensor.dtype, target.type == own.type, shard.region)


class _FullTensor:
    """A tensor that is put together, and the ranks that send its boxes."""

    def __init__(self, key: Any, row: _Row, process: Process, keep: bool) -> None:
        self.key, self.dtype, self.numel = key, row.dtype, math.prod(row.shape)
        self.boxes: dict[Box, int] = {}
        device = process.device if row.on_device else torch.device("cpu")
        self.tensor = torch.empty(row.shape, dtype=row.dtype, device=device) if keep else None

    def add(self, rank: int, row: _Row) -> None:
        """Add a shard of a rank, unless a lower rank has it."""
        size = math.prod(shape_of(row.region))
        if size and self.numel not in map(math.prod, map(shape_of, self.boxes)):
            # Ranks with full tensors need no shards of others.
            self.boxes = (
                {row.region: rank} if size == self.numel else {row.region: rank, **self.boxes}
            )

    def pieces(self) -> Iterator[tuple[Box, Box]]:
        """Give boxes that fit into a batch, each with the box around it that a rank has."""
        found = sum(math.prod(shape_of(box)) for box in self.boxes)
        if found != self.numel:
            raise AccelError(
                f"{self.key} can't be put together: ranks have {found} of {self.numel} elements."
            )
        step = max(1, _BATCH_BYTES // self.dtype.itemsize)
        for held in self.boxes:
            total = math.prod(shape_of(held))
            for start in range(0, total, step):
                for box in divided(held, start, min(start + step, total)):
                    yield held, box

    def view(self, box: Box) -> torch.Tensor | None:
        """Return the elements of a box."""
        if self.tensor is None:
            return None
        flat = len(box) == 1 and self.tensor.dim() != 1
        return (self.tensor.view(-1) if flat else self.tensor)[slices(box)]


def _describe(
    by_rank: Sequence[Mapping[Any, _Row]], process: Process, keep: bool
) -> dict[Any, _FullTensor]:
    """Return the full tensors, by their keys."""
    fulls: dict[Any, _FullTensor] = {}
    for rank, rows in enumerate(by_rank):
        for key, row in rows.items():
            if key not in fulls:
                fulls[key] = _FullTensor(key, row, process, keep)
            fulls[key].add(rank, row)
    return fulls


@torch.no_grad()
def _send(fulls: Sequence[_FullTensor], shards: Mapping[Any, Shard], process: Process) -> None:
    """Broadcast all boxes from the ranks that have them, in batches. Collective."""
    by_rank: dict[int, list[torch.Tensor]] = {}
    received: list[tuple[torch.Tensor | None, torch.Tensor]] = []
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
            nbytes = math.prod(shape_of(box)) * full.dtype.itemsize
            if nbytes > room:
                flush()
                room = _BATCH_BYTES
            room -= nbytes
            if target is not None and target.device == process.carrier and target.is_contiguous():
                values = target
            else:
                values = torch.empty(shape_of(box), dtype=full.dtype, device=process.carrier)
                received.append((target, values))
            by_rank.setdefault(source, []).append(values)
            if source == process.place.rank:
                local = shards[full.key].tensor.reshape(shape_of(held))
                values.copy_(local[slices(relative(box, held))])
    flush()
