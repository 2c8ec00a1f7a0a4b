"""Checkpoints whose files stay on the hosts that wrote them, on disk or in memory: who has what, and how it moves.

No name of a host is relied on: ranks share a disk where they see each other's probes, and a file lies where it is seen whole.
A record on any disk says that all files are durable on all of them; nothing older is removed before it is on every one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import or_
from typing import Final, NamedTuple, final

import torch
import torch.distributed as dist

from ..errors import CheckpointError, is_url
from ..process import current
from ..process.control import Waiting, raise_lost
from . import record
from .layout import digest
from .record import Record
from .safetensors import memory
from .shards import Written
from .steps import DamageError, exchange, explain, on_every_rank
from .storage import MEMORY, Write, storage_of

logger = logging.getLogger("accel")


class FileTransfer(NamedTuple):
    """A file that goes from the disk of one rank to that of another."""

    name: str
    size: int
    source: int
    target: int


@final
@dataclass(frozen=True, slots=True)
class Disks:
    """Of one directory: by rank, the lowest rank that sees the same files there; and the saves of which there are records."""

    leaders: Sequence[int]
    saves: Collection[str]

    def copies(
        self, written: Sequence[Sequence[Written | None]], replicas: int
    ) -> tuple[list[FileTransfer], list[tuple[str, list[int]]]]:
        """What must go where, so that so many other hosts have each file too; and the files of each host, by number."""
        firsts = sorted(set(self.leaders))
        held: dict[int, list[int]] = {first: [] for first in firsts}
        # In the order of the record: all ranks' files of one kind, then those of the next.
        files = [(source, file) for kind in zip(*written, strict=True) for source, file in enumerate(kind) if file]
        transfers = []
        for number, (source, file) in enumerate(files):
            at = firsts.index(self.leaders[source])
            ring = [*firsts[at:], *firsts[:at]][: replicas + 1]
            transfers += [FileTransfer(file.name, file.size, source, target) for target in ring[1:]]
            for first in ring:
                held[first].append(number)
        if replicas >= len(firsts) and current().place.rank == 0:
            logger.warning("accel.save: replicas=%d, and there are %d hosts; each has all files", replicas, len(firsts))
        names = current().hosts or (socket.gethostname(),)
        return transfers, [(names[first], numbers) for first, numbers in held.items()]


def find_disks(directory: str, present: Callable[[str], Record | None]) -> Disks:
    """Which ranks share the directory, made if need be, in which ``present`` finds a record. Collective."""
    storage = storage_of(directory)
    probe = f".accel-{secrets.token_hex(6)}-{current().place.rank:05d}.seen"

    def put() -> tuple[None, tuple[str, str, float]]:
        storage.make(directory)
        found = present(directory)
        storage.create(os.path.join(directory, probe), 0, 0, lambda _: b"")
        return None, (probe, found.id if found else "", found.time if found else 0.0)

    def look() -> tuple[None, int]:
        record.later_than(max(time for *_, time in told))
        there = set(storage.names(directory))
        seen = [rank for rank, (name, *_) in enumerate(told) if name in there]
        if not seen:
            raise CheckpointError(
                f"{directory}: what this rank put there is gone; another job saves there, give each its own"
            )
        return None, seen[0]

    try:
        _, told = exchange("the hosts of a checkpoint", put)
        _, leaders = exchange("the disks of a checkpoint", look)
    finally:
        with contextlib.suppress(OSError):
            storage.remove(os.path.join(directory, probe))
    return Disks(leaders, {save for _, save, _ in told})


# -- In memory of a host -----------------------------------------------------------------------------------------------
# The newest snapshot of a checkpoint lies in files in /dev/shm, which outlive the processes. It is a checkpoint on disks of hosts
# in another place, which follows from the identity of an empty file in the directory that it belongs to: so whoever removes that
# directory is rid of it. Directories whose names end in a number are a series with one such file above them, and one snapshot,
# the newest. Places in a store have no such file: their snapshots lie together by the URL above them.

NUMBER: Final = re.compile(r"\d+\Z")
_MARK: Final = ".accel.memory"
#: The places of snapshots that this process has found or made, and the directories of those that it has made.
seen_in_memory: Final[dict[str, str]] = {}


def memory_place(directory: str, *, make: bool = False) -> str | None:
    """Where the snapshot of a directory lies on this host; None: nowhere. CheckpointError where it cannot ``make`` a place."""
    parent, name = os.path.split(directory)
    # What a store does not list is found by what is above it.
    if not (is_url(parent) if is_url(directory) else NUMBER.search(name)):
        return _folder(directory, make)
    folder = _folder(parent, make)
    return folder and os.path.join(folder, name)


def memory_names(root: str) -> list[str]:
    """The names of the directories in ``root`` of which this host has snapshots that lie together."""
    folder = _folder(root)
    names = os.listdir(folder) if folder and os.path.isdir(folder) else []
    return [name for name in names if os.path.isdir(os.path.join(str(folder), name))]


def _folder(directory: str, make: bool = False) -> str | None:
    """What belongs to a directory, in this user's folder, into which nobody else may look; None where there is neither."""
    home, mark = os.path.join(MEMORY, f"accel-{os.geteuid()}"), os.path.join(directory, _MARK)
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(home, 0o700)
            if not is_url(directory):
                storage_of(directory).make(directory)
                os.close(os.open(mark, os.O_CREAT | os.O_NOFOLLOW, 0o666))
        file = None if is_url(directory) else os.lstat(mark)
        status = os.lstat(home)
        own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if own and status.st_mode & 0o077 and not make:
            _warn_of_open(home)
        if not own or status.st_mode & 0o077:
            raise CheckpointError(f"{home} is not a directory of this user alone, and others may read it: remove it")
    except (OSError, CheckpointError) as error:
        if make:
            raise CheckpointError(f"in_memory=True needs shared memory in {MEMORY}: {explain(error)}") from error
        return None
    return os.path.join(home, digest([directory] if file is None else [file.st_ino, file.st_mtime_ns]))


@functools.cache
def _warn_of_open(home: str) -> None:
    logger.warning("what was saved in memory is passed over: others may look into %s: chmod 700 it, or remove it", home)


@atexit.register
def _say_what_is_left() -> None:
    for where, directory in seen_in_memory.items():
        if directory:
            logger.warning(
                "the newest checkpoint of %s stays in memory, in %s, until it is saved to disk or you remove that",
                directory,
                where,
            )


os.register_at_fork(after_in_child=seen_in_memory.clear)


# -- What lies where ---------------------------------------------------------------------------------------------------


#: What a rank tells of a checkpoint that it sees: when its save was committed, and which save it is.
Sight = tuple[float, str]


def _whole_files(directory: str, found: Record) -> int:
    """Which files of a checkpoint are there whole, as bits; they may be in memory, too."""
    whole = 0
    for where in filter(None, (directory, memory_place(directory))):
        for number, file in enumerate(found.files):
            with contextlib.suppress(OSError):
                whole |= (storage_of(where).size(os.path.join(where, file.name)) == file.size) << number
    return whole


def newest(own: Mapping[str, Record], told: Sequence[Mapping[str, Sight]]) -> str | None:
    """Of checkpoints by their names, as each rank sees them, the newest all of whose files some rank sees. Collective."""
    for name, placed in _newest_first(own, told):
        # One that is not of hosts is read from a shared directory, by each rank itself.
        alone = not placed.record.hosts and len({names.get(name) for names in told}) > 1
        if not (placed.absent or alone):
            return name
        if alone and current().place.rank == 0:
            logger.warning("%s is passed over: not all ranks see it", name)
    return None


def _newest_first(own: Mapping[str, Record], told: Sequence[Mapping[str, Sight]]) -> Iterator[tuple[str, Placed]]:
    """The saves that any rank sees, each with its name. Collective, each of them."""
    seen = {(*one, name): rank for rank, names in enumerate(told) for name, one in names.items()}
    for (_, save, name), source in sorted(seen.items(), reverse=True):
        yield name, _everywhere(name, own.get(name), save, source)


def _everywhere(directory: str, own: Record | None, save: str, source: int) -> Placed:
    """A save of which rank ``source`` has the record, as all ranks see it. Collective."""
    content = record.encode(own) if own is not None and own.id == save else b""
    found, digits = record.parse(broadcast(content, source), os.path.join(directory, record.NAME))
    _, wholes = exchange("the files of a checkpoint", lambda: (None, _whole_files(directory, found)))
    return Placed(found, digits, wholes)


@final
@dataclass(frozen=True, slots=True)
class Placed:
    """A save as all ranks see it: its record, the record's checksum, and which files each rank has whole, as bits."""

    record: Record
    digits: str
    wholes: Sequence[int]

    @property
    def absent(self) -> list[int]:
        """The files that nobody has."""
        found = functools.reduce(or_, self.wholes)
        return [number for number in range(len(self.record.files)) if not found >> number & 1]

    def fetch(self, directory: str, wanted: Collection[int]) -> str:
        """Bring here what this rank wants and its disk lacks; returns what is one text for the ranks of a disk. Collective."""
        disks = find_disks(directory, lambda _: None)
        _, told = exchange("the files that are elsewhere", lambda: (None, set(wanted)))
        lacking = {
            (n, leader)
            for leader, numbers in zip(disks.leaders, told, strict=True)
            for n in numbers
            if not self.wholes[leader] >> n & 1
        }
        transfers = []
        for number, leader in sorted(lacking):
            sources = [rank for rank in set(disks.leaders) if self.wholes[rank] >> number & 1]
            file = self.record.files[number]
            transfers.append(FileTransfer(file.name, file.size, sources[(number + leader) % len(sources)], leader))
        rank = current().place.rank
        move("accel.load (files of other hosts)", directory, self.record.id, transfers)
        if transfers:
            came = any(one.target == rank for one in transfers)
            on_every_rank("accel.load (their record)", lambda: self._adopt(directory) if came else None)
        return str(disks.leaders[rank])

    def _adopt(self, directory: str) -> None:
        """A host without a record has these files from now on as if it had been there."""
        if not record.exists(directory):
            with contextlib.ExitStack() as stack:
                claim = storage_of(directory).claim(directory)
                stack.callback(claim.release)
                claim.commit(record.encode(self.record))


def find(directory: str, own: Record | None, told: Sequence[Sight | None]) -> Placed:
    """The newest save in a directory that is whole: a job that dies in a commit leaves the new record on some hosts. Collective.

    CheckpointError where each lacks files: it names those of the newest, and the hosts that wrote them; a DamageError where that
    was one host, which has its record: then it has lost them.
    """
    problem: CheckpointError | None = None
    everyone = [{} if one is None else {directory: one} for one in told]
    for _, placed in _newest_first({} if own is None else {directory: own}, everyone):
        found = placed.record
        if not (absent := placed.absent):
            return placed
        hosts = sorted({name for number in absent for name in found.hosts_of(number)})
        problem = problem or (DamageError if len(found.hosts) == 1 else CheckpointError)(
            f"{directory}: {len(absent)} of {len(found.files)} files, such as {found.files[absent[0]].name}, are whole "
            f"on none of these hosts, but were left on {', '.join(hosts)}: bring these back, or load another checkpoint "
            "(accel.latest(root, placement='host')); accel.save(..., replicas=1) keeps a copy on another host"
        )
    assert problem is not None
    raise problem


# -- From one host to another ------------------------------------------------------------------------------------------

_PIECE: Final = 16 << 20  # bytes of one message, which has one more in front: whether it is one
_TAG: Final = 0x686F7374


def broadcast(content: bytes, source: int) -> bytes:
    """The bytes of one rank, on every rank. Collective."""
    process = current()
    _, sizes = exchange("the record of a checkpoint", lambda: (None, len(content)))
    if process.control is None:
        return content
    data = torch.zeros(sizes[source], dtype=torch.uint8, device="cpu")
    if process.place.rank == source:
        memory(data)[:] = content
    with Waiting(process, "the record of a checkpoint"):
        dist.broadcast(data, source, group=process.control)
    return bytes(memory(data))


def move(what: str, directory: str, save: str, transfers: Sequence[FileTransfer]) -> None:
    """Do all of them, those of different ranks at once: what comes is there whole and durable, or not at all. Collective."""
    waiting = functools.partial(Waiting, current())
    if transfers:
        on_every_rank(what, lambda: move_alone(directory, save, transfers, waiting))


@contextlib.contextmanager
def _in_the_background(what: str) -> Iterator[None]:
    """As ``Waiting`` in a thread that does not train: where the loop is, is not what this waits for."""
    try:
        yield
    except RuntimeError as error:
        raise_lost(what, error)
        raise


_Waiting = Callable[[str], contextlib.AbstractContextManager[None]]


def move_alone(
    directory: str, save: str, transfers: Sequence[FileTransfer], waiting: _Waiting = _in_the_background
) -> None:
    """This rank's part of ``move``, while the others do theirs."""
    rank = current().place.rank
    # In one order on all ranks, sending and receiving apart: the first that is not done can always go on.
    with ThreadPoolExecutor(1, "accel.send") as thread:
        sent = [thread.submit(_send, directory, one) for one in transfers if one.source == rank]
        problems = [_receive(directory, save, one, waiting) for one in transfers if one.target == rank]
        for future in sent:
            future.result()
    for problem in filter(None, problems):
        raise problem
    storage_of(directory).sync(directory)


def _messages(size: int) -> Iterator[tuple[int, torch.Tensor]]:
    for at in range(0, size, _PIECE):
        yield at, torch.zeros(1 + min(_PIECE, size - at), dtype=torch.uint8, device="cpu")


def _send(directory: str, one: FileTransfer) -> None:
    path, process, messages = os.path.join(directory, one.name), current(), _messages(one.size)
    taken: list[torch.Tensor] = []
    try:
        with storage_of(path).open(path, one.size) as file:
            for at, message in messages:
                taken = [message]
                file.fill([(at, [memory(message)[1:]])])
                message[0] = 1
                dist.send(message, one.target, process.control, _TAG)
                taken = []
    except (OSError, CheckpointError):
        for message in [*taken, *(message for _, message in messages)]:
            dist.send(message, one.target, process.control, _TAG)
        raise


def _receive(directory: str, save: str, one: FileTransfer, waiting: _Waiting) -> Exception | None:
    """What goes wrong here is told once all has come."""
    storage, parts = storage_of(directory), _received(one, waiting)
    passing = os.path.join(directory, f".accel-{save}-{one.source:05d}.record.tmp")

    def content(write: Write) -> bytes:
        first = next(parts)
        write(first[8:])
        for part in parts:
            write(part)
        return bytes(first[:8])

    try:
        storage.remove(passing)
        storage.create(passing, one.size, 8, content)
        storage.rename(passing, os.path.join(directory, one.name))
    except (OSError, CheckpointError) as error:
        with contextlib.suppress(CheckpointError):
            list(map(len, parts))
        return error
    return None


def _received(one: FileTransfer, waiting: _Waiting) -> Iterator[memoryview]:
    process, whole = current(), True
    for _, message in _messages(one.size):
        with waiting(f"a file of a checkpoint that comes from rank {one.source}"):
            dist.recv(message, one.source, process.control, _TAG)
        whole = whole and bool(message[0])
        yield memory(message)[1:]
    if not whole:
        raise CheckpointError(f"rank {one.source} could not read {one.name}")
