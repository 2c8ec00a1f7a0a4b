"""Verify: compare every byte of a checkpoint with its checksums, divided over the ranks."""

from __future__ import annotations

import os
import time

from ..process.control import locked
from . import folder, record
from .background import background
from .reader import Reader
from .steps import log_end, on_running_ranks


@locked
def verify(dir: str | os.PathLike[str]) -> None:
    """Compare every byte of a checkpoint with its checksums. Collective on several ranks.

    Args:
        dir: the checkpoint's directory.

    Raises:
        CheckpointError: a file is missing or damaged. The error names it.
    """
    begin = time.monotonic()

    def act(rank: int, world: int) -> None:
        background.wait()
        directory = folder.absolute(dir)
        found = record.read(directory)
        folder.check_sizes(directory, found)
        reader = Reader(directory, found)
        # Each rank takes every so-many-th chunk of each file, as sizes of files differ.
        for file in range(len(found.files)):
            reader.verify(file, rank, world)
        done = f"1 of {world} parts verified" if world > 1 else "verified"
        log_end(directory, done, found.nbytes // world, begin)

    on_running_ranks("accel.verify", act)
