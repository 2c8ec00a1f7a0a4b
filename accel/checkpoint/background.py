"""Background saves: one at a time, in a thread, from a copy."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, thread, wait  # noqa: F401 - see _register_atexit below
from typing import Final, final

import torch

from ..errors import CheckpointError
from ..process import Process, ended
from ..process.transfer import begun, finish, host_memory, is_remote
from .shards import WriteItem

#: A power of two, because torch rounds sizes of pinned memory up to powers of two.
_BLOCK: Final = 64 << 20
_ALIGN: Final = 64


@final
class Background:
    """The background save, and the memory of its copy, which the next save reuses."""

    def __init__(self) -> None:
        self._future: Future[None] | None = None
        self._blocks: list[torch.Tensor] = []

    def start(self, process: Process, finish: Callable[[], None]) -> Future[None]:
        """Run ``finish`` in a thread."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # it can't be cancelled

        def run() -> None:
            try:
                finish()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        if self._release not in process.releases:
            process.releases.append(self._release)
        # Not a daemon thread, so that the interpreter waits for it at exit.
        saver = threading.Thread(target=run, name="accel.save")
        saver.start()
        self._future = future
        return future

    def wait(self) -> None:
        """Wait for the save. If it failed, the next save raises the error."""
        # Don't join the thread, because a callback of the future may call this in the thread.
        if self._future is not None:
            wait([self._future])

    def settle(self) -> None:
        """Wait for the save. If it failed, raise the error once."""
        future = self._future
        error = future.exception() if future is not None else None
        self._future = None
        if error is not None:
            raise CheckpointError(f"the last background save failed: {error}") from error

    def _release(self) -> None:
        """Wait for the save before accel.teardown() destroys its process group."""
        if not ended():
            self.wait()

    def forget(self) -> None:
        """Forget the save in a forked process, which lacks its thread."""
        self._future = None

    def at_exit(self) -> None:
        """Exit with status 1 if the last save failed."""
        try:
            self.settle()
        except CheckpointError as error:
            print(f"accel: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            logging.shutdown()
            os._exit(1)  # exceptions in atexit don't set the status

    def copy(self, items: Sequence[WriteItem]) -> list[WriteItem]:
        """Copy the items to host memory, so that training can't change them."""
        devices = {item.tensor.device for item in items if is_remote(item.tensor)}
        if devices and self._blocks and not self._blocks[-1].is_pinned():
            self._blocks = []
        copied, number, at = [], 0, 0
        for item in items:
            copies = []
            for piece in item.pieces():
                data = piece.view(torch.uint8)
                while len(data):
                    if at >= _BLOCK:
                        number += 1
                        at = 0
                    if number == len(self._blocks):
                        self._blocks.append(host_memory(_BLOCK, pinned=bool(devices)))
                    room = self._blocks[number][at : at + len(data)]
                    room.copy_(data[: len(room)], non_blocking=is_remote(piece))
                    copies.append(room)
                    data = data[len(room) :]
                    at = -(-(at + len(room)) // _ALIGN) * _ALIGN
            # The item refers to a copy, so that the thread doesn't keep the tensor alive.
            copied.append(WriteItem(item.entry, copies[0], 0, copies))
        finish(begun(devices))
        return copied


background: Final = Background()
# It may call os._exit(), so it must run last. atexit calls functions in reverse order.
atexit.register(background.at_exit)
# At exit, concurrent.futures shuts down the executors that clients of object stores use. It is
# imported above, so its function is registered before this one and runs after it.
threading._register_atexit(background.wait)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=background.forget)
