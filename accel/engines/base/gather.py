"""Full values on every rank from the shards on each of them, through batches of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple, final

import torch

from ...errors import AccelError
from ...process import Process
from ...process.control import agree
from ...process.packing import broadcast_
from ...shard import Box, Grid, Shard
from ...trees import TensorPlace, map_tensors, put_back, to_device

#: The bytes that travel at a time.
_BATCH_BYTES: Final = 64 << 20

#: A value of the state: the name of a parameter, buffer or extra state, the key of an optimizer's state of it or "", the value.
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

    A value may hold tensors in nested containers. If several ranks have the same elements, those of the lowest rank count.
    Values that are not tensors are this rank's own if it has them.

    Args:
        title: names the gathering in messages.
        held: the values on this rank.
        part: returns the shard that a tensor of this rank is.
        device: where full tensors go. None: where their shards are. Single numbers may stay in host memory.
        keep: False if this rank only sends, and gets nothing.

    Raises:
        AccelError: if no rank has some of the elements, or as ``agree`` does.
    """
    local = _LocalValues(part)
    for item in held:
        local.add(*item)
    rank = process.place.rank
    by_rank = agree(
        title,
        (local.rows(process.device, device), {key: local.is_tensor(key) for key in local.forms}),
    )
    holders: dict[tuple[str, Any], list[int]] = {}
    for holder, (_, keys) in enumerate(by_rank):
        for key in keys:
            holders.setdefault(key, []).append(holder)
    # Few values are neither a tensor nor on all ranks.
    lacking = [
        k
        for k, ranks in holders.items()
        if len(ranks) < len(by_rank) and not by_rank[ranks[0]][1][k]
    ]
    forms: dict[tuple[str, Any], Any] = {}
    if lacking:
        # In host memory, because the device of a pickled tensor would be the sender's.
        first = {
            key: to_device(local.forms[key], "cpu") for key in lacking if holders[key][0] == rank
        }
        for sent in agree(f"{title}: values", first):
            forms |= {key: to_device(form, device or process.device) for key, form in sent.items()}
    tensors = _assemble([rows for rows, _ in by_rank], local.shards, process, keep)
    if not keep:
        return {}
    forms |= local.forms
    return {key: put_back(forms.get(key, TensorPlace(key)), tensors) for key in holders}


class _Row(NamedTuple):
    """Describes the shard of a tensor to the other ranks."""

    key: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_device: bool  # the full tensor goes to the process's device
    start: int
    numel: int
    box: Box


@final
class _LocalValues:
    """The values on this rank: ``forms`` without their tensors, and the ``shards`` of the tensors."""

    def __init__(self, part: Callable[[str, torch.Tensor, Any], Shard | None]) -> None:
        self._part = part
        self.forms: dict[tuple[str, Any], Any] = {}
        self.shards: dict[Any, Shard] = {}
        self._places: dict[int, tuple[torch.Tensor, TensorPlace]] = {}

    def add(self, name: str, key: Any, value: Any) -> None:
        """Add a value. A tensor that is in several values stays one. Sparse tensors stay in the form."""
        numbers = count()

        def visit(tensor: torch.Tensor) -> Any:
            if tensor.layout is not torch.strided:
                return tensor
            if id(tensor) not in self._places:
                place = TensorPlace((name, key) if tensor is value else (name, key, next(numbers)))
                self._places[id(tensor)] = tensor, place
                if (shard := self._part(name, tensor, key)) is not None:
                    self.shards[place.number] = shard
            return self._places[id(tensor)][1]

        self.forms[name, key] = map_tensors(visit, value, others=True)

    def is_tensor(self, key: Any) -> bool:
        """Return True if a value is a tensor that no earlier value had."""
        form = self.forms[key]
        return type(form) is TensorPlace and form.number == key

    def rows(self, process_device: torch.device, device: torch.device | None) -> list[_Row]:
        """Return a row for each shard."""
        rows = []
        for key, shard in self.shards.items():
            tensor = shard.tensor
            stays = device is None or (device.type != "cpu" and not tensor.dim())
            target = tensor.device if stays or device is None else device
            on_device = target.type == process_device.type
            rows.append(
                _Row(
                    key,
                    shard.shape,
                    tensor.dtype,
                    on_device,
                    shard.start,
                    tensor.numel(),
                    shard.box,
                )
            )
        return rows


@final
class _FullTensor:
    """A tensor that is put together from ranges of its elements, in the order of its grid."""

    def __init__(self, rows: Sequence[tuple[int, _Row]], process: Process, keep: bool) -> None:
        first = rows[0][1]
        self.key, self.shape, self.dtype = first.key, first.shape, first.dtype
        self.numel = torch.Size(self.shape).numel()
        self.grid = Grid.of(self.key, self.shape, {row.box for _, row in rows if row.numel})
        #: Which rank sends which range: (rank, first element, the one after the last).
        self.sources = list(self._cover(rows))
        self._carrier = process.carrier
        device = process.device if first.on_device else torch.device("cpu")
        self.tensor = torch.empty(self.shape, dtype=self.dtype, device=device) if keep else None
        in_place = self.tensor is not None and device == self._carrier and not self.grid.cuts
        self._line = self.tensor.view(-1) if self.tensor is not None and in_place else None

    def _cover(self, rows: Sequence[tuple[int, _Row]]) -> Iterator[tuple[int, int, int]]:
        ranges = [
            (self.grid.first(row.box) + row.start, rank, row.numel)
            for rank, row in rows
            if row.numel
        ]
        end = 0
        for start, rank, numel in sorted(ranges):
            if start > end:
                break
            if start + numel > end:
                yield rank, end, start + numel
                end = start + numel
        if end < self.numel:
            raise AccelError(
                f"{self.key} can't be put together, because no rank has its element {end} of {self.numel}."
            )

    def buffer(self, first: int, last: int) -> torch.Tensor:
        """Return memory for a range: the tensor's own, if it can be received there."""
        if self._line is not None:
            return self._line[first:last]
        return torch.empty(last - first, dtype=self.dtype, device=self._carrier)

    def put(self, first: int, values: torch.Tensor) -> None:
        """Copy a range of values to their places."""
        if self.tensor is None or self._line is not None:
            return
        if self.grid.cuts:
            self.grid.put(values, first, self.tensor)
        else:
            self.tensor.view(-1)[first : first + len(values)].copy_(values)


@torch.no_grad()
def _assemble(
    rows_by_rank: Sequence[Sequence[_Row]],
    shards: Mapping[Any, Shard],
    process: Process,
    keep: bool,
) -> dict[Any, torch.Tensor]:
    """Return full tensors from the shards that the ranks described. Collective."""
    rows: dict[Any, list[tuple[int, _Row]]] = {}
    for rank, described in enumerate(rows_by_rank):
        for row in described:
            rows.setdefault(row.key, []).append((rank, row))
    tensors = [_FullTensor(described, process, keep) for described in rows.values()]
    for batch in _batches(tensors):
        by_rank: dict[int, list[torch.Tensor]] = {}
        received = []
        for full, first, last in batch:
            values = full.buffer(first, last)
            received.append((full, first, values))
            for source, start, end in full.sources:
                start, end = max(start, first), min(end, last)
                if start >= end:
                    continue
                by_rank.setdefault(source, []).append(values[start - first : end - first])
                if source == process.place.rank:
                    shard = shards[full.key]
                    begin = full.grid.first(shard.box) + shard.start
                    by_rank[source][-1].copy_(shard.tensor.reshape(-1)[start - begin : end - begin])
        for source in sorted(by_rank):
            broadcast_(by_rank[source], process.group, source)
        for full, first, values in received:
            full.put(first, values)
    return {full.key: full.tensor for full in tensors if full.tensor is not None}


def _batches(tensors: Iterable[_FullTensor]) -> Iterator[list[tuple[_FullTensor, int, int]]]:
    """Return ranges of all tensors, as many at a time as fit into a batch."""
    batch: list[tuple[_FullTensor, int, int]] = []
    room = _BATCH_BYTES
    for full in tensors:
        first = 0
        while first < full.numel:
            last = min(full.numel, first + room // full.dtype.itemsize)
            batch.append((full, first, last))
            room -= (last - first) * full.dtype.itemsize
            first = last
            if first < full.numel:
                yield batch
                batch, room = [], _BATCH_BYTES
    yield batch
