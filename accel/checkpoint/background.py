"""Saves that go on while training does: one at a time, in a thread that uses no process group, but the store of the start."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, thread, wait  # noqa: F401 - executors, which are to end after this
from typing import Any, Final, final

import torch

from ..errors import CheckpointError
from ..process import Process, ended, reason_of
from ..process.transfer import PIECE, begun, finish, host_memory, is_remote
from .reader import WorkerThreads
from .shards import CopiedItem, WriteItem, batched
from .steps import explain

_BLOCK: Final = 64 << 20  # a power of two, to which sizes of pinned memory are rounded
_ALIGN: Final = 64


@final
class Background:
    """The save that is under way, and the memory that its copy is in, which the next one uses again."""

    def __init__(self) -> None:
        self._future: Future[None] | None = None
        self._blocks: list[torch.Tensor] = []
        self._over = (
            False  # what is registered with atexit before the first save runs after this one's part
        )

    def start(self, finish: Callable[[], None], resources: contextlib.ExitStack) -> Future[None]:
        """Run ``finish`` in a thread, then let go of ``resources``."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a save that has begun cannot be cancelled
        taken = threading.Lock()  # by the thread, or by what keeps it from beginning

        def run() -> None:
            if not taken.acquire(blocking=False):
                return
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

        # Known before it begins, which an interruption may not let return: the next save uses the same memory.
        self._future = future
        try:
            # Not a daemon: the interpreter waits for it at exit.
            threading.Thread(target=run, name="accel.save").start()
            if (
                self._over
            ):  # the interpreter has waited for its threads, and would end while this one writes
                self.wait()
        except BaseException:
            if taken.acquire(blocking=False):
                self._future = None
                resources.close()
            raise
        return future

    def wait(self) -> None:
        """Wait for the save that is under way; its failure is the next save's to raise."""
        if (future := self._future) is not None:
            wait([future])  # not for the thread, which may be in a callback that calls this

    def settle(self) -> None:
        """Wait for the save that is under way; raises if it failed, once."""
        future = self._future
        error = None if future is None else future.exception()
        self._future = None  # only now: an interruption of the wait leaves it under way
        if error is not None:
            raise CheckpointError(f"the background save before this one failed: {error}") from error

    def snapshot(self, items: Sequence[WriteItem]) -> list[CopiedItem]:
        """The same items in host memory of accel's own."""
        devices = {item.tensor.device for item in items if is_remote(item.tensor)}
        if devices and not all(block.is_pinned() for block in self._blocks):
            self._blocks = []
        room = _Room(self._blocks, pinned=bool(devices))
        copied = [CopiedItem(item.entry, list(room.copies(item))) for item in items]
        room.finish()
        finish(begun(devices))
        return copied

    def forget(self) -> None:
        """In a forked process, which has no part in the save that was under way."""
        self._future = None

    def at_exit(self) -> None:
        """Make a failed save the failure of the process."""
        self._over = True
        try:
            self.settle()
        except CheckpointError as error:
            print(f"accel: {error}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            logging.shutdown()
            os._exit(1)  # the only way to another exit status from here


#: To this address, from that one, so many bytes.
_Move = tuple[int, int, int]


def _move(moves: Sequence[_Move]) -> None:
    for move in moves:
        ctypes.memmove(*move)  # takes less time than the kernel that copies elements


@final
class _Room:
    """Blocks of memory that are filled one after the other; new ones as needed.

    What lies in the host's memory is moved last, all at once: code that runs in between would have to come into the caches again.
    """

    def __init__(self, blocks: list[torch.Tensor], *, pinned: bool) -> None:
        self._blocks, self._pinned = blocks, pinned
        self._number, self._at = -1, _BLOCK
        self._threads = WorkerThreads()
        self._moves: list[_Move] = []
        self._pieces: list[torch.Tensor] = []  # from which they are
        self._made = 0  # bytes of those that are copies themselves

    def finish(self) -> None:
        self._threads.each(_move, list(batched(self._moves, lambda move: move[2], PIECE)))
        self._moves, self._pieces, self._made = [], [], 0

    def copies(self, item: WriteItem) -> Iterator[torch.Tensor]:
        """Copies of the elements' bytes, which are there after ``finish``."""
        for piece in item.pieces():
            done, size, address = 0, piece.nbytes, piece.data_ptr()
            while done < size:
                if count := min(size - done, _BLOCK - self._at):
                    copy = self._blocks[self._number][self._at : self._at + count]
                    if piece.is_cpu:
                        self._moves.append((copy.data_ptr(), address + done, count))
                    else:
                        copy.copy_(
                            piece.view(torch.uint8)[done : done + count],
                            non_blocking=is_remote(piece),
                        )
                    yield copy
                    done, self._at = done + count, -(-(self._at + count) // _ALIGN) * _ALIGN
                else:
                    self._number, self._at = self._number + 1, 0
                    if self._number == len(self._blocks):
                        self._blocks.append(host_memory(_BLOCK, pinned=self._pinned))
            self._keep(piece, address != item.address)

    def _keep(self, piece: torch.Tensor, made: bool) -> None:
        """Until the moves from it are made."""
        self._pieces.append(piece)
        self._made += piece.nbytes * made
        if self._made >= PIECE:
            self.finish()


background: Final = Background()
# Registered with the library, so that it runs after what was registered later.
atexit.register(background.at_exit)
# Executors take nothing more once this has begun, and a save into an object store may need theirs to the end.
threading._register_atexit(background.wait)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=background.forget)


# -- Words -------------------------------------------------------------------------------------------------------------
# How the ranks of a background save hear of each other: in the store that they met by, and by no process group. Each rank tells
# what it has done, rank 0 then how the save has ended, and every rank that it knows: the store may be rank 0's, and ends with it.

logger = logging.getLogger("accel")

_WARNING: Final = 60.0  # seconds of waiting after which a rank says so
_LAST_WAIT: Final = 180.0  # seconds for a rank to hear how it ended


@final
class Words:
    """One rank's side of it, for the save of this id into ``directory``."""

    def __init__(self, process: Process, save: str, directory: str) -> None:
        self._rank, self._world = process.place.rank, process.place.world_size
        self._store: Any = process.store("save", save, aside=True) if self._world > 1 else None
        self._process, self._what = process, directory
        self._timeout = process.timeout.total_seconds()
        self._lost: set[int] = set()

    def tell(self, status: dict[str, Any]) -> None:
        with _reaching():
            self._store.set(f"done/{self._rank}", json.dumps(status))

    def read(self, rank: int) -> dict[str, Any]:
        """What another rank told; raises where it ended or did not tell in time."""
        if not self._wait_for(rank, "done", self._timeout):
            self._lost.add(rank)
            what = f"its part of {self._what}"
            if reason := self._end_of(rank):
                raise CheckpointError(
                    f"rank {rank} may have ended before {what} was done: {reason}"
                )
            raise CheckpointError(f"rank {rank} did not finish {what} within {self._timeout:g} s")
        with _reaching():
            status: dict[str, Any] = json.loads(self._store.get(f"done/{rank}"))
        return status

    def finish(self) -> None:
        """Tell that this rank knows the end; rank 0 waits until every rank does, and takes all words back."""
        others = set(range(1, self._world)) - self._lost
        with contextlib.suppress(OSError), _reaching():  # the end is known
            if self._rank:
                self._store.set(f"seen/{self._rank}", "")
                return
            seen = [self._wait_for(rank, "seen", min(self._timeout, _LAST_WAIT)) for rank in others]
            if all(seen):
                for rank in range(self._world):
                    self._store.delete_key(f"done/{rank}")
                    self._store.delete_key(f"seen/{rank}")

    def _end_of(self, rank: int) -> str:
        """Why nothing more comes of a rank; the thread that trains may wait for this save, and notice nothing."""
        detector = self._process.watchdog
        how = "" if detector is None else detector.left.get(rank, "")
        return ended() or (how and f"rank {rank} {how}")

    def _wait_for(self, rank: int, kind: str, timeout: float) -> bool:
        """Look again and again; False where it is of no use any more."""
        begin, pause, warning = time.monotonic(), 0.005, _WARNING
        while True:
            lost = bool(self._end_of(rank))
            with _reaching():
                if self._store.check([f"{kind}/{rank}"]):  # after that: what was told last is read
                    return True
            waited = time.monotonic() - begin
            if lost or waited > timeout:
                return False
            if waited > warning:
                text = "a background save into %s: rank %d has waited %.0f s for rank %d"
                logger.warning(text, self._what, self._rank, waited, rank)
                warning += _WARNING
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise OSError(
            errno.EHOSTUNREACH,
            f"the store by which the ranks met is not reached ({reason_of(error)})",
        ) from error
