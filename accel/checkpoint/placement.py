"""Checkpoints whose files stay on the disks of the hosts that wrote them: who shares a disk, what lies there, how it moves.

No name of a host is relied on: ranks share a disk where they see each other's probes, and a file lies where it is seen whole.
A record on any disk says that all files are durable on all of them; nothing older is removed before it is on every one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..process import current
from ..process.control import Waiting
from . import record
from .background import status_name
from .failures import exchange, on_every_rank
from .record import Record
from .safetensors import memory
from .shards import Written
from .storage import Write, storage_of

logger = logging.getLogger("accel")

_PIECE: Final = 16 << 20  # bytes of one message
_TAG: Final = 0x686F7374


@final
@dataclass(frozen=True, slots=True)
class Disks:
    """Of one directory: by rank, the lowest rank that sees the same files there; and the saves of which there are records."""

    leaders: tuple[int, ...]
    saves: frozenset[str]

    @property
    def firsts(self) -> list[int]:
        """One rank of each disk."""
        return sorted(set(self.leaders))

    def after(self, rank: int, count: int) -> list[int]:
        """The first ranks of the disks that come after this rank's, in a ring."""
        at, firsts = self.firsts.index(self.leaders[rank]), self.firsts
        return [firsts[(at + step) % len(firsts)] for step in range(1, min(count, len(firsts) - 1) + 1)]

    def copies(
        self, written: Sequence[Sequence[Written | None]], replicas: int
    ) -> tuple[list[Transfer], list[tuple[str, list[int]]]]:
        """What must go where, so that other hosts have so many copies of each rank's files; and each host's files, by number."""
        if replicas >= len(self.firsts) and current().place.rank == 0:
            logger.warning(
                "accel.save: there are %d hosts, so that no file has %d replicas", len(self.firsts), replicas
            )
        held: dict[int, list[int]] = {first: [] for first in self.firsts}
        transfers, number = [], 0
        for files in zip(*written, strict=True):  # as `Contents.record` numbers them
            for source, file in enumerate(files):
                if file is None:
                    continue
                others = self.after(source, replicas)
                transfers += [Transfer(file.name, file.size, source, target) for target in others]
                for first in (self.leaders[source], *others):
                    held[first].append(number)
                number += 1
        names = current().hosts or (socket.gethostname(),)
        return transfers, [(names[first], numbers) for first, numbers in held.items()]


def find_disks(directory: str, present: Callable[[str], Record | None]) -> Disks:
    """Which ranks share the directory, made if need be, in which ``present`` finds a record. Collective."""
    process, storage = current(), storage_of(directory)
    name = status_name(secrets.token_hex(6), process.place.rank, "seen")

    def put() -> tuple[None, tuple[str, str, float]]:
        storage.make(directory)
        found = present(directory)
        storage.put(os.path.join(directory, name), b"")
        return None, (name, found.id if found else "", found.time if found else 0.0)

    def look() -> tuple[None, int]:
        there = set(storage.names(directory))
        for *_, time in told:
            record.clock.see(time)
        return None, next(rank for rank, (one, *_) in enumerate(told) if one in there)

    try:
        _, told = exchange("the hosts of a checkpoint", put)
        _, leaders = exchange("the disks of a checkpoint", look)
    finally:
        with contextlib.suppress(OSError):
            storage.remove(os.path.join(directory, name))
    return Disks(tuple(leaders), frozenset(save for _, save, _ in told))


# -- What lies where ---------------------------------------------------------------------------------------------------


class Sight(NamedTuple):
    """What a rank sees of a checkpoint: of which save, committed when, and which of how many files are there whole."""

    save: str
    time: float
    files: int
    whole: bytes


def sight(directory: str, found: Record) -> Sight:
    """Of the checkpoint with this record."""
    return Sight(found.id, found.time, len(found.files), _whole(directory, found))


def _whole(directory: str, found: Record) -> bytes:
    storage, bits = storage_of(directory), 0
    for number, file in enumerate(found.files):
        with contextlib.suppress(OSError):
            bits |= (storage.size(os.path.join(directory, file.name)) == file.size) << number
    return bits.to_bytes(len(found.files) // 8 + 1, "little")


def _tell(directory: str, found: Record) -> tuple[None, bytes]:
    return None, _whole(directory, found)


def has(whole: bytes, number: int) -> bool:
    """Whether a file is among those of ``Sight.whole``."""
    return bool(whole[number // 8] >> number % 8 & 1)


def _covered(seen: Sequence[bytes], files: int) -> bool:
    bits = 0
    for whole in seen:
        bits |= int.from_bytes(whole, "little")
    return bits == (1 << files) - 1


def newest(told: Sequence[Mapping[str, Sight]]) -> str | None:
    """Of checkpoints by their names, as each rank sees them, the newest all of whose files some rank sees."""
    seen: dict[tuple[float, str, str, int], list[bytes]] = {}
    for names in told:
        for name, one in names.items():
            seen.setdefault((one.time, one.save, name, one.files), []).append(one.whole)
    complete = [key for key, wholes in seen.items() if _covered(wholes, key[3])]
    return max(complete)[2] if complete else None


def newest_here(directory: str, own: Record | None, told: Sequence[Sight | None]) -> tuple[Record, str, list[bytes]]:
    """The newest save in a directory all of whose files are on some host: its record, its checksum, and what each rank has.

    A job that is killed while it commits leaves the new record on some hosts and the old one on others. Collective.

    Raises:
        CheckpointError: each lacks files; names those of the newest, and the hosts that wrote them.
    """
    path = os.path.join(directory, record.NAME)
    saves = {one.save: (one.time, rank) for rank, one in reversed(list(enumerate(told))) if one is not None}
    problem = ""
    for save, (_, source) in sorted(saves.items(), key=lambda item: item[1][0], reverse=True):
        content = record.encode(own) if own is not None and own.id == save else b""
        found, digits = record.parse(broadcast(content, source), path)
        _, wholes = exchange("the files of a checkpoint", functools.partial(_tell, directory, found))
        if _covered(wholes, len(found.files)):
            return found, digits, wholes
        missing = [n for n in range(len(found.files)) if not any(has(whole, n) for whole in wholes)]
        hosts = sorted({name for n in missing for name in found.hosts_of(n)})
        problem = problem or (
            f"{directory}: {len(missing)} of {len(found.files)} files, such as {found.files[missing[0]].name}, are on none of these "
            f"hosts; they were left on {', '.join(hosts)}: bring these back, or load another checkpoint (accel.latest(..., "
            "placement='host')); accel.save(..., replicas=1) keeps a copy on another host"
        )
    raise CheckpointError(problem)


# -- From one host to another ------------------------------------------------------------------------------------------


class Transfer(NamedTuple):
    """A file of a directory that goes from the disk of one rank to that of another."""

    name: str
    size: int
    source: int
    target: int


def broadcast(content: bytes, source: int) -> bytes:
    """The bytes of one rank, on every rank. Collective."""
    process = current()
    _, sizes = exchange("the record of a checkpoint", lambda: (None, len(content)))
    if process.control is None:
        return content
    mine = process.place.rank == source
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8).clone() if mine else torch.empty(0)
    data = data if mine else torch.empty(sizes[source], dtype=torch.uint8, device="cpu")
    with Waiting(process, "the record of a checkpoint"):
        dist.broadcast(data, source, group=process.control)
    return bytes(memory(data))


def _adopt(directory: str, found: Record) -> None:
    """Give a host that has no record the one of the files that came: it has them from now on as if it had been there."""
    if record.exists(directory):
        return
    claim = storage_of(directory).claim(directory)
    try:
        claim.commit(os.path.join(directory, record.NAME), record.encode(found), f".accel-{found.id}.record")
    finally:
        claim.release()


@final
@dataclass(frozen=True, slots=True)
class Placed:
    """Where the files of a checkpoint are: who shares a disk, and which files each rank sees whole."""

    disks: Disks
    wholes: Sequence[bytes]

    def fetch(self, directory: str, found: Record, wanted: Collection[int]) -> str:
        """Bring here what this rank wants and its disk lacks; returns what is one text for the ranks of a disk. Collective."""
        _, told = exchange("the files that are elsewhere", lambda: (None, sorted(wanted)))
        lacking: set[tuple[int, int]] = set()
        for leader, numbers in zip(self.disks.leaders, told, strict=True):
            lacking.update((number, leader) for number in numbers if not has(self.wholes[leader], number))
        transfers = []
        for number, leader in sorted(lacking):
            sources = [rank for rank in self.disks.firsts if has(self.wholes[rank], number)]
            file = found.files[number]
            transfers.append(Transfer(file.name, file.size, sources[(number + leader) % len(sources)], leader))
        move("accel.load (files of other hosts)", directory, found.id, transfers)
        if transfers:
            came = current().place.rank in {one.target for one in transfers}
            on_every_rank("accel.load (the record of other hosts)", lambda: _adopt(directory, found) if came else None)
        return str(self.disks.leaders[current().place.rank])


def move(what: str, directory: str, save: str, transfers: Sequence[Transfer]) -> None:
    """Do all of them, those of different ranks at once: what comes is there whole and durable, or not at all. Collective."""
    rank = current().place.rank

    def act() -> None:
        # In one order on all ranks, sending and receiving apart: the first that is not done can always go on.
        with ThreadPoolExecutor(1, "accel.send") as thread:
            sent = thread.submit(_send_all, directory, [one for one in transfers if one.source == rank])
            problems = [_receive(directory, save, one) for one in transfers if one.target == rank]
            sent.result()
        for problem in filter(None, problems):
            raise problem
        if problems:
            storage_of(directory).sync(directory)

    if transfers:
        on_every_rank(what, act)


def _send_all(directory: str, transfers: Sequence[Transfer]) -> None:
    for one in transfers:
        _send(directory, one)


def _send(directory: str, one: Transfer) -> None:
    """In pieces, each after a word that it is well."""
    process = current()
    path = os.path.join(directory, one.name)
    try:
        with storage_of(path).open(path, one.size) as file:
            for at in range(0, one.size, _PIECE):
                piece = torch.empty(min(_PIECE, one.size - at), dtype=torch.uint8, device="cpu")
                file.fill([(at, [memory(piece)])])
                dist.send(torch.ones(1, dtype=torch.uint8, device="cpu"), one.target, process.control, _TAG)
                dist.send(piece, one.target, process.control, _TAG)
    except (OSError, CheckpointError):
        dist.send(torch.zeros(1, dtype=torch.uint8, device="cpu"), one.target, process.control, _TAG)
        raise


def _receive(directory: str, save: str, one: Transfer) -> Exception | None:
    """What goes wrong here is told once all has come."""
    storage, pieces = storage_of(directory), _pieces(one)
    passing = os.path.join(directory, f".accel-{save}-{one.source:05d}.record.tmp")

    def content(write: Write) -> bytes:
        first = memory(next(pieces))
        begin = bytes(first[:8])
        write(first[8:])
        for piece in pieces:
            write(memory(piece))
        return begin

    try:
        storage.remove(passing)
        storage.create(passing, one.size, min(8, one.size), content)
        storage.rename(passing, os.path.join(directory, one.name))
    except (OSError, CheckpointError) as error:
        with contextlib.suppress(CheckpointError):
            for _ in pieces:
                pass
        return error
    return None


def _pieces(one: Transfer) -> Iterator[torch.Tensor]:
    process, word = current(), torch.empty(1, dtype=torch.uint8, device="cpu")
    for at in range(0, one.size, _PIECE):
        piece = torch.empty(min(_PIECE, one.size - at), dtype=torch.uint8, device="cpu")
        with Waiting(process, f"a file of a checkpoint that comes from rank {one.source}"):
            dist.recv(word, one.source, process.control, _TAG)
            if word.item():
                dist.recv(piece, one.source, process.control, _TAG)
        if not word.item():
            raise CheckpointError(f"rank {one.source} could not read {one.name}")
        yield piece
