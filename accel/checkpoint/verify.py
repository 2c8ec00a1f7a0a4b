"""Whether a checkpoint can be trusted: its files by their checksums, divided over the ranks; its record by its format."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

import torch

from ..process.control import locked
from ..process.environments import Place
from ..shard import Shard
from . import folder, record
from .background import background
from .match import children_of, objects_in
from .objects import ModuleObject, OptimizerObject, RankObject, StatefulObject, StateObject, TensorObject
from .reader import Reader
from .record import Record
from .safetensors import BY_NAME, chunks_of
from .state import OF_VALUES
from .steps import exchange, log_end, on_running_ranks, parsing
from .values import DEPTH, TAG, Decoder, Json


def chunks_due(reader: Reader, found: Record, needs: Sequence[Shard], place: Place, host: str) -> dict[int, set[int]]:
    """By file the chunks that this rank compares: each that some rank needs falls to one rank of each ``host``. Collective."""
    sizes = torch.tensor([chunks_of(file.size) for file in found.files], dtype=torch.int64, device="cpu")
    bases = (sizes.cumsum(0) - sizes).tolist()

    def mark() -> tuple[torch.Tensor, tuple[str, list[int], bool]]:
        # Where nothing is read, nobody has compared the sizes with those of the files.
        needed = torch.zeros(int(sizes.sum()) if needs else 0, dtype=torch.bool, device="cpu")
        for need in needs:
            for file, first, last in reader.chunks(need):
                needed[bases[file] + first : bases[file] + last] = True
        # The others are told where that changes: in few places, also where very many ranks have saved.
        changes = torch.nonzero(needed[1:] != needed[:-1]).squeeze(1).tolist()
        return torch.nonzero(needed).squeeze(1), (host, changes, bool(needed[:1].any()))

    mine, told = exchange("accel.load (the files)", mark)
    neighbours = [rank for rank, (host, *_) in enumerate(told) if host == told[place.rank][0]]
    mine = _share(mine, [told[rank][1:] for rank in neighbours], neighbours.index(place.rank))
    due: dict[int, set[int]] = {}
    for number in mine.tolist():
        file = bisect_right(bases, number) - 1
        due.setdefault(file, set()).add(number - bases[file])
    return due


def _share(needed: torch.Tensor, told: Sequence[tuple[list[int], bool]], me: int) -> torch.Tensor:
    """The chunks, of those needed here, that fall to one of several ranks; each falls to one that needs it, in turn.

    Each tells after which chunks it begins or ceases to need them, and whether it needs the first.
    """
    everyone = torch.stack(
        [
            (torch.searchsorted(torch.tensor(changes, dtype=torch.int64, device="cpu"), needed) % 2 == 1) ^ first
            for changes, first in told
        ]
    )
    order = everyone.cumsum(0)
    return needed[order[me] - 1 == needed % order[-1]]


@locked
def verify(dir: str | os.PathLike[str]) -> None:
    """Compare every byte of a checkpoint with its checksums, and its record with the format. Collective on several ranks.

    Args:
        dir: the checkpoint's directory.

    Raises:
        CheckpointError: names what is missing, damaged or nonsense.
    """

    begin = time.monotonic()

    def look() -> dict[str, object]:
        background.wait()
        return {"dir": folder.named(dir)}

    def act(rank: int, world: int) -> None:
        directory = folder.absolute(dir)
        found, _ = record.read(directory)
        _compare_all(directory, found, rank, world)
        log_end(directory, f"1 of {world} parts verified" if world > 1 else "verified", found.nbytes // world, begin)

    with folder.reporting_replacement(dir):
        on_running_ranks("accel.verify", look, act)


def _compare_all(directory: str, found: Record, rank: int, world: int) -> None:
    """Compare one rank's share of all chunks, and the record."""
    check_record(found, os.path.join(directory, record.NAME))
    folder.check_sizes(directory, found)
    reader = Reader(directory, found, stream=False)
    for name, stored in islice(found.tensors.items(), rank, None, world):
        for _ in reader.locate(name, 0, stored.numel):
            pass
    for file in range(len(found.files)):
        reader.verify(file, range(rank, len(reader.header(file).checksums), world))


# -- Whether all of a record can be what accel wrote: the kinds of values, their ranges, and what they refer to --------
# Every value is decoded, though no shard is read. The work grows with the size of the record, whatever it says.

_KINDS: Final[dict[str, type[StateObject]]] = {
    cls.kind: cls for cls in (ModuleObject, OptimizerObject, StatefulObject, TensorObject, RankObject)
}


def check_record(record: Record, source: str) -> set[int]:
    """Refuse a record that accel did not write; returns what ``objects_in`` finds in its values."""
    named: set[str] = set()

    def fetch(name: str) -> torch.Tensor:
        """A value's tensor without its memory; accel keeps each for one value only, so that no record says more than it holds."""
        if not name.startswith(OF_VALUES) or name not in record.tensors or name in named:
            raise ValueError(f"a value names the tensor {name!r}, which is another's or not in the checkpoint")
        named.add(name)
        stored = record.tensors[name]
        return torch.empty(stored.shape, dtype=BY_NAME[stored.dtype], device="meta")

    with parsing(f"{source} does not keep to the format of accel's checkpoints"):
        objects = objects_in(record.values)
        decoder = Decoder(source, fetch, objects)
        _check(record.values, decoder, record.ranks, 0)
        for own in record.ranks:
            for value in own.values():
                decoder.decode(value)
        return objects


def _check(node: Json, decoder: Decoder, ranks: Sequence[Mapping[str, Any]], depth: int) -> None:
    if not decoder.holds_object(node):
        decoder.decode(node)
    elif isinstance(node, dict) and str(node.get(TAG)) in _KINDS:
        _check_object(node, decoder, ranks)
    else:
        children = children_of(node, decoder)
        if children is None or depth > DEPTH:
            raise ValueError(f"a {node[TAG]} holds an object" if children is None else "nested too deeply")
        for child in children.values():
            _check(child, decoder, ranks, depth + 1)


def _check_object(node: Mapping[str, Any], decoder: Decoder, ranks: Sequence[Mapping[str, Any]]) -> None:
    cls = _KINDS[node[TAG]]
    cls.check(node)
    if type(node.get("name", "")) is not str:
        raise ValueError(f"the name of a {cls.kind} is no string")
    for value in cls.encoded(node):
        decoder.decode(value)
    if cls is RankObject and not (ranks and all(node["name"] in own for own in ranks)):
        raise ValueError(f"the values of a rank lack {node['name']!r}")
