"""Saves that go on while training does: one at a time, in a thread that uses no process group, but files to tell each other."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, final

import torch

from ..errors import CheckpointError
from ..process import ended
from .failures import explain
from .shards import CopiedItem, WriteItem
from .storage import storage_of
from .transfer import begun, finish, host_memory, is_remote

_BLOCK: Final = 64 << 20  # a power of two, to which sizes of pinned memory are rounded
_ALIGN: Final = 64
_LOOK: Final = 4 << 20  # bytes between two looks at what a save costs
_SHARE: Final = 0.04  # of a core that may be taken from the loop


@final
class Background:
    """The save that is under way, and the memory that its copy is in, which the next one uses again."""

    def __init__(self) -> None:
        self._future: Future[None] | None = None
        self._blocks: list[torch.Tensor] = []

    def start(self, finish: Callable[[], None], resources: contextlib.ExitStack) -> Future[None]:
        """Run ``finish`` in a thread, then let go of ``resources``."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a save that has begun cannot be cancelled

        def run() -> None:
            try:
                with resources:
                    finish()
            except CheckpointError as error:
                future.set_exception(error)
            except BaseException as error:
                wrapped = CheckpointError(f"accel.save in the background: {explain(error)}")
                wrapped.__cause__ = error
                future.set_exception(wrapped)
            else:
                future.set_result(None)

        # Not a daemon: the interpreter waits for it at exit.
        threading.Thread(target=run, name="accel.save").start()
        self._future = future
        return future

    def wait(self) -> None:
        """Wait for the save that is under way; its failure is the next save's to raise."""
        if (future := self._future) is not None:
            wait([future])  # not for the thread, which may be in a callback that calls this

    def settle(self) -> None:
        """Wait for the save that is under way; raises if it failed, once."""
        future, self._future = self._future, None
        error = None if future is None else future.exception()
        if error is not None:
            raise CheckpointError(f"the background save before this one failed: {error}") from error

    def snapshot(self, groups: Sequence[Sequence[WriteItem]]) -> list[list[CopiedItem]]:
        """The same items in host memory of accel's own."""
        devices = {item.tensor.device for group in groups for item in group if is_remote(item.tensor)}
        if devices and not all(block.is_pinned() for block in self._blocks):
            self._blocks = []
        room = _Room(self._blocks, pinned=bool(devices))
        copied = [[CopiedItem(item.entry, list(room.copies(item))) for item in group] for group in groups]
        finish(begun(devices))
        return copied

    def forget(self) -> None:
        """In a forked process, which has no part in the save that was under way."""
        self._future = None

    def at_exit(self) -> None:
        """Make a failed save the failure of the process."""
        try:
            self.settle()
        except CheckpointError as error:
            print(f"accel: {error}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            logging.shutdown()
            os._exit(1)  # the only way to another exit status from here


@final
class Pace:
    """Slows this thread down where it takes cores from another one, the one that made this: hears how many more bytes are done.

    What is taken is at most what this thread has computed, and what either has waited for a core, as Linux tells: so cores
    that nobody needs are used, and so are those of a thread that waits for this one. Other systems do not tell.
    """

    def __init__(self) -> None:
        self._trains = threading.get_native_id()
        self._bytes = 0
        self._before: tuple[float, float, float] | None = None

    def __call__(self, nbytes: int) -> None:
        """Sleep until what was taken since the last look is no more than a share of the time."""
        self._bytes += nbytes
        if self._before is not None and self._bytes < _LOOK:
            return
        now = time.monotonic(), time.thread_time(), self._waited()
        if self._before is not None:
            wall, cpu, waited = (b - a for a, b in zip(self._before, now, strict=True))
            time.sleep(max(min(cpu, waited) / _SHARE - wall, 0.0))
        self._bytes, self._before = 0, (time.monotonic(), *now[1:])

    def _waited(self) -> float:
        """Seconds that both threads were ready, and had no core."""
        total = 0
        for thread in (self._trains, threading.get_native_id()):
            with contextlib.suppress(OSError, IndexError), open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
                total += int(file.read().split()[1])
        return total / 1e9


@final
class _Room:
    """Blocks of memory that are filled one after the other; new ones as needed."""

    def __init__(self, blocks: list[torch.Tensor], *, pinned: bool) -> None:
        self._blocks, self._pinned = blocks, pinned
        self._number, self._at = -1, _BLOCK

    def copies(self, item: WriteItem) -> Iterator[torch.Tensor]:
        """Copies of the elements, which may have only begun."""
        for piece in item.pieces():
            while len(piece):
                count = min(len(piece), (_BLOCK - self._at) // piece.itemsize)
                if count:
                    nbytes = count * piece.itemsize
                    copy = self._blocks[self._number][self._at : self._at + nbytes].view(piece.dtype)
                    yield copy.copy_(piece[:count], non_blocking=is_remote(piece))
                    piece, self._at = piece[count:], self._at + -(-nbytes // _ALIGN) * _ALIGN
                else:
                    self._number, self._at = self._number + 1, 0
                    if self._number == len(self._blocks):
                        self._blocks.append(host_memory(_BLOCK, pinned=self._pinned))


background: Final = Background()
# Registered with the library, so that it runs after what was registered later.
atexit.register(background.at_exit)
os.register_at_fork(after_in_child=background.forget)


# -- Status files ------------------------------------------------------------------------------------------------------
# How the ranks of a background save hear of each other: by small files in its directory, and by no process group.
# Each rank writes what it has done, rank 0 then how the save has ended, and every rank that it knows. A rank that knows the end
# needs the directory no more; and none is done before all know, so that whoever is done may rename or remove the directory.

logger = logging.getLogger("accel")

_WARNING: Final = 60.0  # seconds of waiting after which a rank says so
#: Seconds for a rank to read how it ended; then it has ended itself, and nothing depends on it.
_LAST_WAIT: Final = 180.0
_MAX_STATUS: Final = 1 << 30  # bytes


def status_name(save: str, rank: int, kind: str) -> str:
    """The file that a rank of a background save leaves when it has written, or when it knows how the save has ended."""
    return f".accel-{save}-{rank:05d}.{kind}"


def status_names(save: str, world: int) -> list[str]:
    """Those of all ranks; the last are what the others look at to the end."""
    return [status_name(save, rank, kind) for kind in ("done", "seen") for rank in range(world)]


@final
class StatusFiles:
    """One rank's side of it: it waits ``timeout`` seconds for another; ``lock`` is a file that rank 0 has put there."""

    def __init__(self, directory: str, lock: str, save: str, rank: int, world: int, timeout: float) -> None:
        self._directory = directory
        self._storage = storage_of(directory)
        self._save = save
        self._rank = rank
        self._world = world
        self._timeout = timeout
        self._last_wait = min(timeout, _LAST_WAIT)
        self._lost: set[int] = set()
        #: What this rank has put there, or, before that, the lock: where it is gone, the directory is.
        self._own = lock

    def _path(self, rank: int, kind: str = "done") -> str:
        return os.path.join(self._directory, status_name(self._save, rank, kind))

    def write(self, status: dict[str, Any]) -> None:
        """Tell the other ranks; an OSError where nothing can be written."""
        path = self._path(self._rank)
        try:
            self._storage.put(path, json.dumps(status).encode("ascii"))
        except OSError:
            self._storage.put(path, b"")  # a full disk may have room for that, which is taken for a failure
        self._own = path

    def read(self, rank: int) -> dict[str, Any]:
        """What another rank told; raises where it ended or did not tell in time, or the directory is gone."""
        if not self._wait_for(rank, "done", self._timeout):
            self._lost.add(rank)
            what = f"its part of {self._directory}"
            if reason := ended():
                raise CheckpointError(f"rank {rank} may have ended before {what} was done: {reason}")
            if not self._storage.exists(self._own):
                raise CheckpointError(
                    f"{self._directory} was removed or renamed while a background save wrote into it: wait for the future "
                    "(.result()) first"
                )
            raise CheckpointError(f"rank {rank} did not finish {what} within {self._timeout:g} s")
        try:
            content = self._storage.read_whole(self._path(rank), _MAX_STATUS, "what a rank tells")
            status: dict[str, Any] = json.loads(content)
        except ValueError:
            return {"error": f"rank {rank} could not tell what it has done, as on a full disk"}
        return status

    def finish(self) -> None:
        """Tell that this rank knows the end, and wait until every rank does; rank 0 then removes all files."""
        own, others = self._path(self._rank, "seen"), set(range(1, self._world)) - self._lost
        with contextlib.suppress(OSError):  # the end is known whatever becomes of the directory now
            self._storage.put(own, b"")
            self._own = own
            if self._rank:
                self._wait(lambda: not self._storage.exists(own), 0, self._last_wait)
            elif all(self._wait_for(rank, "seen", self._last_wait) for rank in others):
                for name in status_names(self._save, self._world):
                    self._storage.remove(os.path.join(self._directory, name))

    def _wait_for(self, rank: int, kind: str, timeout: float) -> bool:
        path = self._path(rank, kind)
        return self._wait(lambda: self._storage.exists(path), rank, timeout)

    def _wait(self, look: Callable[[], bool], rank: int, timeout: float) -> bool:
        """Look again and again; False where it is of no use any more."""
        begin, pause, warning = time.monotonic(), 0.005, _WARNING
        while True:
            lost = bool(ended()) or not self._storage.exists(self._own)
            if look():  # after that: what was written last is read
                return True
            waited = time.monotonic() - begin
            if lost or waited > timeout:
                return False
            if waited > warning:
                logger.warning(
                    "a background save into %s: rank %d has waited %.0f s for rank %d",
                    *(self._directory, self._rank, waited, rank),
                )
                warning += _WARNING
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
