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
from ...shard import Shard
from ...trees import map_tensors, walk

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
    on_device: bool,
) -> dict[tuple[str, Any], Any]:
    """The values of all ranks, whole, on every rank; by name and key. Collective.

    A value may hold tensors in nested containers. What several ranks have is the first one's; what is no tensor stays this
    rank's own where it has it. Who has what is found from the shards themselves.

    Args:
        title: for messages, the same on all ranks.
        held: what this rank has.
        part: what of a tensor lies here.
        process: of this rank.
        on_device: whole tensors lie on the process's device, wherever their parts do; but for single numbers.

    Raises:
        AccelError: no rank has some of the elements; or, as in ``agree``, a rank did not come, or is at another call.
    """
    mine = _Given(part)
    for item in held:
        mine.add(*item)
    rank = process.place.rank
    rows = mine.rows(process.device.type, on_device)
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
        first = {k: _moved(mine.forms[k], "cpu") for k in lacking if holders[k][0] == rank}
        forms = {k: _moved(f, process.device) for theirs in agree(f"{title}: values", first) for k, f in theirs.items()}
    tensors = _assemble([rows for rows, _ in told], mine.shards, process)
    whole = {key: mine.forms.get(key, forms.get(key, _Reference(key))) for key in holders}
    return {
        key: walk(lambda _, leaf: tensors[leaf.key] if type(leaf) is _Reference else leaf, form, "")
        for key, form in whole.items()
    }


def _moved(value: Any, device: torch.device | str) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), value, others=True)


@final
class _Reference:
    """Stands in a value for a tensor, by name and key."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


@final
class _Given:
    """What this rank gives: values with references in the places of their tensors, and what it has of these tensors."""

    def __init__(self, part: Callable[[str, torch.Tensor, Any], Shard | None]) -> None:
        self._part = part
        self.forms: dict[tuple[str, Any], Any] = {}
        self.shards: dict[Any, Shard] = {}
        self._seen: dict[int, tuple[torch.Tensor, _Reference]] = {}

    def add(self, name: str, key: Any, value: Any) -> None:
        """Take a value apart; a tensor that was met before is that one again. Sparse tensors stay values."""
        own, numbers = (name, key), count()

        def visit(tensor: torch.Tensor) -> Any:
            if tensor.layout is not torch.strided:
                return tensor
            if id(tensor) not in self._seen:
                reference = _Reference(own if tensor is value else (*own, next(numbers)))
                self._seen[id(tensor)] = tensor, reference
                if (mine := self._part(name, tensor, key)) is not None:
                    self.shards[reference.key] = mine
            return self._seen[id(tensor)][1]

        self.forms[own] = map_tensors(visit, value, others=True)

    def is_tensor(self, key: Any) -> bool:
        """Whether a value is a tensor of its own."""
        form = self.forms[key]
        return type(form) is _Reference and form.key == key

    def rows(self, device: str, on_device: bool) -> list[tuple[Any, ...]]:
        """Where the parts lie, and whether the whole is to lie on the device."""
        return [
            (key, s.shape, t.dtype, t.device.type == device or (on_device and t.dim() > 0), s.start, t.numel())
            for key, s, t in ((key, shard, shard.tensor) for key, shard in self.shards.items())
        ]


@torch.no_grad()
def _assemble(told: Sequence[Sequence[Any]], mine: Mapping[Any, Shard], process: Process) -> dict[Any, torch.Tensor]:
    """Whole tensors from the ranges that the ranks have told of. Collective."""
    kinds: dict[Any, tuple[tuple[int, ...], torch.dtype, bool]] = {}
    ranges: dict[Any, list[tuple[int, int, int]]] = {}
    for holder, rows in enumerate(told):
        for key, shape, dtype, on_device, start, numel in rows:
            kinds.setdefault(key, (shape, dtype, on_device))
            ranges.setdefault(key, []).append((start, holder, numel))
    whole: dict[Any, torch.Tensor] = {}
    for batch in _batches(kinds):
        by_rank: dict[int, list[torch.Tensor]] = {}
        for key in batch:
            shape, dtype, _ = kinds[key]
            whole[key] = flat = torch.empty(torch.Size(shape).numel(), dtype=dtype, device=process.carrier)
            for holder, start, end in _cover(key, ranges[key], len(flat)):
                by_rank.setdefault(holder, []).append(flat[start:end])
                if holder == process.place.rank:
                    part = mine[key]
                    flat[start:end] = part.tensor.reshape(-1)[start - part.start : end - part.start]
        for holder in sorted(by_rank):
            broadcast_(by_rank[holder], process.group, holder)
        for key in batch:
            shape, _, on_device = kinds[key]
            whole[key] = whole[key].view(shape).to(process.device if on_device else "cpu")
    return whole


def _batches(kinds: Mapping[Any, tuple[tuple[int, ...], torch.dtype, bool]]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    size = 0
    for key, (shape, dtype, _) in kinds.items():
        if size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(key)
        size += torch.Size(shape).numel() * dtype.itemsize
    yield batch


def _cover(key: Any, ranges: list[tuple[int, int, int]], numel: int) -> Iterator[tuple[int, int, int]]:
    """Which rank gives what: (rank, first element, after the last), each element once, in order.

    Raises:
        AccelError: no rank has some of them.
    """
    at = 0
    for start, holder, length in sorted(ranges):
        if start > at:
            break
        if start + length > at:
            yield holder, at, start + length
            at = start + length
    if at < numel:
        raise AccelError(f"no rank holds element {at} of the {numel} of {key}, so that it cannot be put together")
