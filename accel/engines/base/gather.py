"""Whole values from what lies on the ranks, on every rank, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, final

import torch

from ...errors import AccelError
from ...process import Process
from ...process.control import agree
from ...process.packing import broadcast_
from ...shard import Box, Grid, Shard
from ...trees import TensorPlace, map_tensors, put_back, to_device

#: Of what is put together in one go.
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
    """The values of all ranks, whole, on every rank; by name and key; ``title`` is for messages. Collective.

    A value may hold tensors in nested containers. What several ranks have is the first one's; what is no tensor stays this
    rank's own where it has it. Who has what is found from the shards themselves, which ``part`` makes of a tensor that is here.
    AccelError where no rank has some of the elements, or as in ``agree``.

    ``device`` is where whole tensors lie; None: where their parts do, as single numbers do but on the host. Without ``keep`` this
    rank only gives its parts, and gets nothing.
    """
    mine = _Given(part)
    for item in held:
        mine.add(*item)
    rank = process.place.rank
    rows = mine.rows(process.device, device)
    told = agree(title, (rows, {key: mine.is_tensor(key) for key in mine.forms}))
    holders: dict[tuple[str, Any], list[int]] = {}
    for holder, (_, keys) in enumerate(told):
        for key in keys:
            holders.setdefault(key, []).append(holder)
    # Few values are neither a tensor nor on all ranks.
    lacking = [k for k, ranks in holders.items() if len(ranks) < len(told) and not told[ranks[0]][1][k]]
    forms: dict[tuple[str, Any], Any] = {}
    if lacking:
        # Sparse tensors through the host: a pickled device would be the sender's.
        first = {k: to_device(mine.forms[k], "cpu") for k in lacking if holders[k][0] == rank}
        forms = {
            k: to_device(f, device or process.device)
            for theirs in agree(f"{title}: values", first)
            for k, f in theirs.items()
        }
    tensors = _assemble([rows for rows, _ in told], mine.shards, process, keep)
    if not keep:
        return {}
    return {key: put_back(mine.forms.get(key, forms.get(key, TensorPlace(key))), tensors) for key in holders}


@final
class _Given:
    """What this rank gives: values without their tensors, whose places are by name and key; and what it has of these."""

    def __init__(self, part: Callable[[str, torch.Tensor, Any], Shard | None]) -> None:
        self._part = part
        self.forms: dict[tuple[str, Any], Any] = {}
        self.shards: dict[Any, Shard] = {}
        self._seen: dict[int, tuple[torch.Tensor, TensorPlace]] = {}

    def add(self, name: str, key: Any, value: Any) -> None:
        """Take a value apart; a tensor that was met before is that one again. Sparse tensors stay values."""
        own, numbers = (name, key), count()

        def visit(tensor: torch.Tensor) -> Any:
            if tensor.layout is not torch.strided:
                return tensor
            if id(tensor) not in self._seen:
                place = TensorPlace(own if tensor is value else (*own, next(numbers)))
                self._seen[id(tensor)] = tensor, place
                if (mine := self._part(name, tensor, key)) is not None:
                    self.shards[place.number] = mine
            return self._seen[id(tensor)][1]

        self.forms[own] = map_tensors(visit, value, others=True)

    def is_tensor(self, key: Any) -> bool:
        """Whether a value is a tensor of its own."""
        form = self.forms[key]
        return type(form) is TensorPlace and form.number == key

    def rows(self, own: torch.device, device: torch.device | None) -> list[tuple[Any, ...]]:
        """Where the parts lie, and whether the whole is to lie on the process's ``own`` device, rather than on the host."""

        def comes(tensor: torch.Tensor) -> bool:
            stays = device is None or (device.type != "cpu" and not tensor.dim())
            return (tensor.device.type if stays else device.type) == own.type  # type: ignore[union-attr]

        return [
            (key, s.shape, s.tensor.dtype, comes(s.tensor), s.start, s.tensor.numel(), s.box)
            for key, s in self.shards.items()
        ]


#: Elements of the line of a tensor's grid: the tensor's key, the first of them, and the one after the last.
_Range = tuple[Any, int, int]


@torch.no_grad()
def _assemble(
    told: Sequence[Sequence[Any]], mine: Mapping[Any, Shard], process: Process, keep: bool
) -> dict[Any, torch.Tensor]:
    """Whole tensors from the parts that the ranks have told of. Collective."""
    kinds: dict[Any, tuple[tuple[int, ...], torch.dtype, bool]] = {}
    held: dict[Any, list[tuple[int, int, int, Box]]] = {}
    for holder, rows in enumerate(told):
        for key, shape, dtype, on_device, start, numel, box in rows:
            kinds.setdefault(key, (shape, dtype, on_device))
            held.setdefault(key, []).extend([(start, holder, numel, box)] if numel else ())
    grids = {key: Grid.of(key, kinds[key][0], {box for *_, box in those}) for key, those in held.items()}
    covers = {key: list(_cover(key, those, grids[key])) for key, those in held.items()}
    flat: dict[Any, torch.Tensor] = {}
    for batch in _batches(kinds):
        places: list[tuple[_Range, torch.Tensor]] = []
        for key, first, last in batch:
            shape, dtype, on_device = kinds[key]
            if keep and key not in flat:
                place = process.device if on_device else torch.device("cpu")
                flat[key] = torch.empty(torch.Size(shape).numel(), dtype=dtype, device=place)
            there = keep and flat[key].device == process.carrier and not grids[key].cuts
            travels = flat[key][first:last] if there else torch.empty(last - first, dtype=dtype, device=process.carrier)
            places.append(((key, first, last), travels))
        _exchange(places, covers, mine, grids, process)
        for (key, first, last), travels in places if keep else ():
            if grids[key].cuts:
                grids[key].put(travels, first, flat[key].view(kinds[key][0]))
            elif flat[key].device != process.carrier:
                flat[key][first:last].copy_(travels)
    return {key: tensor.view(kinds[key][0]) for key, tensor in flat.items()}


def _exchange(
    places: Iterable[tuple[_Range, torch.Tensor]],
    covers: Mapping[Any, list[_Range]],
    mine: Mapping[Any, Shard],
    grids: Mapping[Any, Grid],
    process: Process,
) -> None:
    """Fill ranges of tensors with what the ranks have of them. Collective."""
    by_rank: dict[int, list[torch.Tensor]] = {}
    for (key, first, last), travels in places:
        for holder, start, end in covers[key]:
            start, end = max(start, first), min(end, last)
            if start >= end:
                continue
            by_rank.setdefault(holder, []).append(travels[start - first : end - first])
            if holder == process.place.rank:
                part = mine[key]
                begin = grids[key].first(part.box) + part.start
                by_rank[holder][-1].copy_(part.tensor.reshape(-1)[start - begin : end - begin])
    for holder in sorted(by_rank):
        broadcast_(by_rank[holder], process.group, holder)


def _batches(kinds: Mapping[Any, tuple[tuple[int, ...], torch.dtype, bool]]) -> Iterator[list[_Range]]:
    """All elements, as many as fit into a batch at a time."""
    batch: list[_Range] = []
    room = _BATCH_BYTES
    for key, (shape, dtype, _) in kinds.items():
        numel, at = torch.Size(shape).numel(), 0
        while True:
            count = min(numel - at, room // dtype.itemsize)
            batch.append((key, at, at + count))
            at, room = at + count, room - count * dtype.itemsize
            if at == numel:
                break
            yield batch
            batch, room = [], _BATCH_BYTES
    yield batch


def _cover(key: Any, held: list[tuple[int, int, int, Box]], grid: Grid) -> Iterator[tuple[int, int, int]]:
    """Which rank gives what: (rank, first element, after the last), each element of the line once, in order; or AccelError."""
    at, numel = 0, torch.Size(grid.shape).numel()
    for start, holder, length in sorted((grid.first(box) + start, *rest) for start, *rest, box in held):
        if start > at:
            break
        if start + length > at:
            yield holder, at, start + length
            at = start + length
    if at < numel:
        raise AccelError(f"no rank holds element {at} of the {numel} of {key}, so that it cannot be put together")
