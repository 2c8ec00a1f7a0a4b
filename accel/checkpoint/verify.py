"""Comparing checksums: the chunks that the ranks of a host need are shared among them."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import torch

from ..errors import CheckpointError
from ..process import running
from ..process.control import locked
from ..process.environments import Place
from . import folder, record, schema
from .reader import Reader
from .record import Record
from .shards import CHUNK, chunks_of
from .together import explain, together

_BATCH: Final = 64  # chunks between two words of progress


def verify_needed(reader: Reader, found: Record, needs: Sequence[tuple[str, int, int]], place: Place) -> None:
    """Compare the checksums of all chunks that some rank needs, each on one rank of each host. Collective.

    Raises:
        CheckpointError: a file is missing, cut or damaged; on every rank.
    """
    sizes = torch.tensor([chunks_of(file.size) for file in found.files], dtype=torch.int64, device="cpu")
    bases = (sizes.cumsum(0) - sizes).tolist()

    def mark() -> tuple[torch.Tensor, tuple[str, bytes]]:
        # Where nothing is read, nobody has compared the sizes with those of the files.
        needed = torch.zeros(int(sizes.sum()) if needs else 0, dtype=torch.bool, device="cpu")
        for need in needs:
            for file, first, last in reader.chunks(*need):
                needed[bases[file] + first : bases[file] + last] = True
        return needed, (socket.gethostname(), zlib.compress(bytes(needed.tolist()), 1))

    needed, told = together("accel.load (the files)", mark)
    neighbours = [rank for rank, (host, _) in enumerate(told) if host == told[place.rank][0]]
    masks = [_mask(told[rank][1]) for rank in neighbours]
    length = max(map(len, masks))
    everyone = torch.stack([torch.nn.functional.pad(mask, (0, length - len(mask))) for mask in masks])
    mine = _share(everyone, neighbours.index(place.rank))

    def compare() -> tuple[None, None]:
        for file, base in enumerate(bases):
            chunks = torch.nonzero(mine[base : base + int(sizes[file])]).squeeze(1).tolist()
            if chunks:
                reader.verify(file, chunks)
        return None, None

    together("accel.load (the checksums)", compare)


def _mask(packed: bytes) -> torch.Tensor:
    content = bytearray(zlib.decompress(packed))
    return (
        torch.frombuffer(content, dtype=torch.uint8).bool()
        if content
        else torch.empty(0, dtype=torch.bool, device="cpu")
    )


def _share(everyone: torch.Tensor, me: int) -> torch.Tensor:
    """The chunks that fall to one of several ranks; each falls to one that needs it, in turn."""
    order = everyone.cumsum(0)
    turn = torch.arange(everyone.shape[1], device="cpu") % order[-1].clamp(min=1)
    return everyone[me] & (order[me] - 1 == turn)


@locked
def verify(dir: str | os.PathLike[str]) -> None:
    """Compare every byte of a checkpoint with its checksums, and its record with the format. Collective on several ranks.

    Raises:
        CheckpointError: names what is missing, damaged or nonsense.
    """
    directory = folder.absolute(dir)
    process = running()
    rank, world = (0, 1) if process is None else (process.place.rank, process.place.world_size)

    def act() -> tuple[None, None]:
        compare_all(directory, rank, world)
        return None, None

    if world > 1:
        together("accel.verify", act)
    else:
        _alone(act)


def compare_all(directory: str, rank: int, world: int, progress: Callable[[int], Any] = lambda nbytes: None) -> None:
    """Compare one rank's share of all chunks; ``progress`` hears how many bytes are done.

    Raises:
        CheckpointError: names what is missing or damaged.
        OSError: a file cannot be read.
    """
    found, _ = record.read(directory)
    schema.check(found, os.path.join(directory, record.NAME))
    reader = Reader(directory, found, stream=False)
    for name, stored in islice(found.tensors.items(), rank, None, world):
        for _ in reader.locate(name, 0, stored.numel):
            pass
    for file in range(len(found.files)):
        for chunks in batched(range(rank, len(reader.header(file).checksums), world), _BATCH):
            reader.verify(file, chunks)
            progress(len(chunks) * CHUNK)


def batched(chunks: range, size: int) -> Iterator[range]:
    """Parts of a range, in order."""
    return (chunks[at : at + size] for at in range(0, len(chunks), size))


def _alone(act: object) -> None:
    try:
        act()  # type: ignore[operator]
    except OSError as error:
        raise CheckpointError(f"accel.verify: {explain(error)}") from error
