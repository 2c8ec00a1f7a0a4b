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

#: A value: the name of a parameter, buffer or extra state, the key of an optimizer's state or "",
#: and the value itself.
Item = tuple[str, Any, Any]
#: Returns the shard that a tensor of this rank is, by its name and key.
Part = Callable[[str, torch.Tensor, Any], Shard | None]


def gather(
    title: str,
    held: Iterable[Item],
    part: Part,
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
    rank = process.place.rank
    rows = {}
    for key, shard in shards.items():
        tensor = shard.tensor
        stays = device is None or (device.type != "cpu" and not tensor.dim())
        target = tensor.device if stays or device is None else device
        on_device = target.type == process.device.type
        rows[key] = _Row(shard.shape, tensor.dtype, on_device, shard.region)
    # Only values that are not tensors have to be sent to ranks that don't have them.
    is_tensor = {}
    for key, form in forms.items():
        is_tensor[key] = type(form) is TensorPlace and form.number == key
    by_rank = agree(title, (rows, is_tensor))
    holders: dict[tuple[str, Any], list[int]] = {}
    for holder, (_, keys) in enumerate(by_rank):
        for key in keys:
            holders.setdefault(key, []).append(holder)
    lacking = {}
    for key, ranks in holders.items():
        if len(ranks) < len(by_rank) and not by_rank[ranks[0]][1][key]:
            lacking[key] = ranks[0]
    received: dict[tuple[str, Any], Any] = {}
    if lacking:
        # In host memory, because the device of a pickled tensor would be the sender's.
        first = {k: to_device(forms[k], "cpu") for k, owner in lacking.items() if owner == rank}
        for sent in agree(f"{title}: values", first):
            for key, form in sent.items():
                received[key] = to_device(form, device or process.device)
    described: dict[Any, list[tuple[int, _Row]]] = {}
    for holder, (rows, _) in enumerate(by_rank):
        for key, row in rows.items():
            described.setdefault(key, []).append((holder, row))
    fulls = [_FullTensor(key, own, process, keep) for key, own in described.items()]
    _send(fulls, shards, process)
    if not keep:
        return {}
    received |= forms
    tensors = {full.key: full.tensor for full in fulls}
    return {key: put_back(received.get(key, TensorPlace(key)), tensors) for key in holders}


@dataclass(frozen=True, slots=True)
class _Row:
    """Describes the shard of a tensor to the other ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    #: True if the full tensor goes to the process's device.
    on_device: bool
    region: Box


def _take_apart(
    held: Iterable[Item], part: Part
) -> tuple[dict[tuple[str, Any], Any], dict[Any, Shard]]:
    """Return the values without their tensors, and the shards of the tensors."""
    forms: dict[tuple[str, Any], Any] = {}
    shards: dict[Any, Shard] = {}
    # Values keep their tensors alive. A tensor that is in several values stays one.
    places: dict[int, tuple[torch.Tensor, TensorPlace]] = {}
    for name, key, value in held:
        numbers = count()

        def visit(
            tensor: torch.Tensor,
            name: str = name,
            key: Any = key,
            value: Any = value,
            numbers: Iterator[int] = numbers,
        ) -> Any:
            if tensor.layout is not torch.strided:
                return tensor
            if id(tensor) not in places:
                number = (name, key) if tensor is value else (name, key, next(numbers))
                places[id(tensor)] = tensor, TensorPlace(number)
                shard = part(name, tensor, key)
                if shard is not None:
                    shards[number] = shard
            return places[id(tensor)][1]

        forms[name, key] = map_tensors(visit, value, others=True)
    return forms, shards


class _FullTensor:
    """A tensor that is put together, and the boxes that ranks send of it."""

    def __init__(
        self, key: Any, rows: Sequence[tuple[int, _Row]], process: Process, keep: bool
    ) -> None:
        first = rows[0][1]
        self.key, self.dtype = key, first.dtype
        numel = math.prod(first.shape)
        self.boxes: dict[Box, int] = {}
        for rank, row in rows:
            size = math.prod(shape_of(row.region))
            if size == numel:
                self.boxes = {row.region: rank}
                break
            if size:
                self.boxes.setdefault(row.region, rank)
        found = sum(math.prod(shape_of(box)) for box in self.boxes)
        if found != numel:
            raise AccelError(
                f"{key} can't be put together, because the ranks have {found} of its {numel} "
                "elements."
            )
        device = process.device if first.on_device else torch.device("cpu")
        shape = first.shape
        self.tensor = torch.empty(shape, dtype=self.dtype, device=device) if keep else None

    def view(self, box: Box) -> torch.Tensor | None:
        """Return the elements of a box."""
        if self.tensor is None:
            return None
        flat = len(box) == 1 and self.tensor.dim() != 1
        return (self.tensor.view(-1) if flat else self.tensor)[slices(box)]


def _batches(fulls: Iterable[_FullTensor]) -> Iterator[list[tuple[_FullTensor, Box, Box]]]:
    """Give boxes, each with the box around it that a rank has, as many as fit into a batch."""
    batch: list[tuple[_FullTensor, Box, Box]] = []
    room = _BATCH_BYTES
    for full in fulls:
        size, step = full.dtype.itemsize, max(1, _BATCH_BYTES // full.dtype.itemsize)
        for held in full.boxes:
            total = math.prod(shape_of(held))
            for start in range(0, total, step):
                for box in divided(held, start, min(start + step, total)):
                    nbytes = math.prod(shape_of(box)) * size
                    if batch and nbytes > room:
                        yield batch
                        batch, room = [], _BATCH_BYTES
                    batch.append((full, held, box))
                    room -= nbytes
    if batch:
        yield batch


@torch.no_grad()
def _send(fulls: Iterable[_FullTensor], shards: Mapping[Any, Shard], process: Process) -> None:
    """Broadcast all boxes from the ranks that have them. Collective."""
    rank, carrier = process.place.rank, process.carrier
    for batch in _batches(fulls):
        by_rank: dict[int, list[torch.Tensor]] = {}
        received = []
        for full, held, box in batch:
            source, target = full.boxes[held], full.view(box)
            values = target
            if target is None or target.device != carrier or not target.is_contiguous():
                values = torch.empty(shape_of(box), dtype=full.dtype, device=carrier)
                received.append((target, values))
            by_rank.setdefault(source, []).append(values)
            if source == rank:
                local = shards[full.key].tensor.reshape(shape_of(held))
                values.copy_(local[slices(relative(box, held))])
        for source in sorted(by_rank):
            broadcast_(by_rank[source], process.group, source)
        for target, values in received:
            if target is not None:
                target.copy_(values)
