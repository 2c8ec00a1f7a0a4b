"""Saves that go on while training does: one at a time, in a thread that uses no process group."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Final, final

import torch

from ..errors import CheckpointError
from .shards import Source, pieces
from .together import explain


@final
class Background:
    """The save that is under way, and the memory that its copy is in, which the next one uses again."""

    def __init__(self) -> None:
        self._future: Future[None] | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def start(self, finish: Callable[[], None], resources: contextlib.ExitStack) -> Future[None]:
        """Run ``finish`` in a thread, then let go of ``resources``."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a save that has begun cannot be cancelled

        def run() -> None:
            try:
                with resources:
                    finish()
            except BaseException as error:
                future.set_exception(error if isinstance(error, CheckpointError) else _wrapped(error))
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
        """Wait for the save that is under way.

        Raises:
            CheckpointError: it failed; it is raised once.
        """
        future, self._future = self._future, None
        error = None if future is None else future.exception()
        if error is not None:
            raise CheckpointError(f"the background save before this one failed: {error}") from error

    def snapshot(self, *groups: Sequence[Source]) -> tuple[list[Source], ...]:
        """The same sources in host memory of accel's own."""
        offsets, total = [], 0
        for source in (source for group in groups for source in group):
            offsets.append(total)
            total += -(-source.entry.nbytes // 64) * 64
        if self._buffer.numel() < total:
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # not both at once
            self._buffer = torch.empty(total, dtype=torch.uint8, device="cpu")
        places = iter(offsets)
        return tuple([self._copy(source, next(places)) for source in group] for group in groups)

    def _copy(self, source: Source, offset: int) -> Source:
        entry, dtype = source.entry, source.tensor.dtype
        first = offset // dtype.itemsize
        copy = self._buffer.view(dtype)[first : first + entry.count]
        at = 0
        for piece in pieces(source.tensor, source.offset, source.offset + entry.count):
            part = copy if piece.numel() == entry.count else copy[at : at + piece.numel()]
            part.copy_(piece)
            at += piece.numel()
        return Source(entry, copy, 0)

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


def _wrapped(error: BaseException) -> CheckpointError:
    wrapped = CheckpointError(f"accel.save in the background: {explain(error)}")
    wrapped.__cause__ = error
    return wrapped


background: Final = Background()
# Registered with the library, so that it runs after what was registered later.
atexit.register(background.at_exit)
os.register_at_fork(after_in_child=background.forget)
