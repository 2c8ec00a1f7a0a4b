"""Verifying: compare every byte of a checkpoint with its checksums, divided over the ranks."""

from __future__ import annotations

import os
import time
from itertools import islice

from ..process.control import locked
from . import folder, record
from .background import background
from .reader import Reader
from .record import Record
from .steps import log_end, on_running_ranks, parsing


@locked
def verify(dir: str | os.PathLike[str]) -> None:
    """Compare every byte of a checkpoint with its checksums. Collective on several ranks.

    Args:
        dir: the checkpoint's directory.

    Raises:
        CheckpointError: names what is missing or damaged.
    """

    begin = time.monotonic()

    def look() -> dict[str, object]:
        background.wait()
        return {"dir": folder.named(dir)}

    def act(rank: int, world: int) -> None:
        directory = folder.absolute(dir)
        found, _ = record.read(directory)
        _compare_all(directory, found, rank, world)
        log_end(
            directory,
            f"1 of {world} parts verified" if world > 1 else "verified",
            found.nbytes // world,
            begin,
        )

    with folder.reporting_replacement(dir):
        on_running_ranks("accel.verify", look, act)


def _compare_all(directory: str, found: Record, rank: int, world: int) -> None:
    """Compare one rank's share of all chunks."""
    folder.check_sizes(directory, found)
    reader = Reader(directory, found)
    with parsing(
        f"{os.path.join(directory, record.NAME)} does not keep to the format of accel's checkpoints"
    ):
        for name, stored in islice(found.tensors.items(), rank, None, world):
            for _ in reader.locate(name, 0, stored.numel):
                pass
    for file in range(len(found.files)):
        reader.verify(file, range(rank, len(reader.header(file).checksums), world))
