"""Saving: agree on what is written, write it on every rank, and commit once all of it is on disk."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..errors import CheckpointError
from ..process import current
from ..process.control import locked
from . import folder
from .background import background
from .draft import Draft, Message, Summary, make_draft
from .job import Job
from .manage import check_keep
from .meeting import check_models
from .together import together


@locked
def save(
    state: dict[Any, Any],
    dir: str | os.PathLike[str],
    *,
    wait: bool = True,
    keep: int | None = None,
    filter: Callable[[str], bool] | None = None,
) -> Future[None] | None:
    """Write a checkpoint of ``state`` into ``dir``, from one moment to the next. Collective.

    The earlier checkpoint in ``dir`` can be loaded until the new one is complete and durable; then it is gone.

    Args:
        state: a nested dict of handles, raw modules and optimizers, objects with a state dict, tensors and plain values.
            Where the ranks have different plain values or tensors of their own, rank 0's are saved.
        dir: the checkpoint's directory, the same on all ranks, on a file system that all of them see.
        wait: return when the checkpoint is durable; else as soon as a copy of this rank's part is in memory.
        keep: afterwards remove older checkpoints next to ``dir`` with the same name up to its number
            (``step-100``, ``step-200``), so that the newest ``keep`` are left.
        filter: tells by a tensor's name (``"model/head.weight"``) whether it is saved; an optimizer's always are.

    Returns:
        None; with ``wait=False`` a future, done when the checkpoint is durable and every rank knows it: from then on any of
        them may rename or remove ``dir``.

    Raises:
        CheckpointError: something cannot be stored (nothing is written), another job saves there, or the disk fails;
            also where the background save before this one failed. On every rank.
    """
    process = current()
    rank, world = process.place.rank, process.place.world_size

    def prepare() -> tuple[Draft, tuple[str, tuple[object, ...], Summary]]:
        background.settle()
        directory = folder.named(dir)
        if keep is not None:
            check_keep(directory, keep)
        draft = make_draft(state, filter, world)
        return draft, (directory, (wait, keep), draft.summary())

    draft, told = together("accel.save", prepare)
    _check_equal(told)
    with contextlib.ExitStack() as resources:
        job = Job(folder.absolute(dir), rank, world, keep)
        _begin(job, draft, told, resources, wait)
        if wait:
            _finish(job)
            return None
        return background.start(
            functools.partial(job.finish_alone, process.timeout.total_seconds()), resources.pop_all()
        )


_Told = list[tuple[str, tuple[object, ...], Summary]]


def _begin(job: Job, draft: Draft, told: _Told, resources: contextlib.ExitStack, wait: bool) -> None:
    """Rank 0 takes the directory; all learn what each of them writes. Collective."""

    def begin() -> tuple[None, tuple[str, Message]]:
        save = job.begin(resources) if job.rank == 0 else ""
        return None, (save, draft.message([summary for _, _, summary in told], job.rank))

    _, messages = together("accel.save (the directory)", begin)
    job.save = messages[0][0]

    def take() -> tuple[None, None]:
        draft.complete([message for _, message in messages])
        job.take(draft)
        if not wait:
            job.snapshot()
        return None, None

    together("accel.save (the plan)", take)


def _finish(job: Job) -> None:
    """Write, and commit once all ranks have. Collective."""
    try:
        _, written = together("accel.save (writing)", lambda: (None, job.write()))
    except CheckpointError:
        job.discard()  # on all ranks; after another error some may think that all is written
        raise
    together("accel.save (the record)", lambda: job.conclude(written))


def _check_equal(told: _Told) -> None:
    check_models("accel.save", [summary.models for _, _, summary in told])
    for rank, (directory, options, summary) in enumerate(told):
        if directory != told[0][0]:
            raise CheckpointError(f"accel.save: rank 0 saves into {told[0][0]!r}, and rank {rank} into {directory!r}")
        if options != told[0][1]:
            raise CheckpointError(
                f"accel.save: wait and keep are {told[0][1]} on rank 0, and {options} on rank {rank}; give every rank the same"
            )
        if summary.structure != told[0][2].structure:
            raise CheckpointError(
                f"accel.save: the state of rank {rank} has other objects or tensors than that of rank 0; give every rank "
                "the same keys, and its own part of data only as plain values"
            )
