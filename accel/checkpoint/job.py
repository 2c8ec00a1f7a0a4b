"""One rank's part of one save, once it is agreed on: files are written, and rank 0 commits."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from ..errors import CheckpointError
from . import folder, manage, record, shards
from .background import Marks, background
from .draft import Draft
from .record import Record
from .shards import Source, Written, arrange, build, checksum, checksums_of, data_checksums
from .together import explain

# -- unchanged tensors -------------------------------------------------------------------------------------------------
# Tensors that did not change since an earlier checkpoint of this process are linked, not written again.

_REMEMBERED: Final = 16


@dataclass(frozen=True, slots=True)
class _File:
    """A file that this process wrote; were it written to since, its inode or time would tell."""

    path: str
    size: int
    inode: tuple[int, int]
    modified: int


def _look(path: str) -> _File:
    status = os.lstat(path)
    return _File(path, status.st_size, (status.st_dev, status.st_ino), status.st_mtime_ns)


@final
class Known:
    """Files of earlier saves, by a checksum of their headers, which hold the checksums of all that is in them."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}

    def remember(self, directory: str, written: Written) -> None:
        """Note a file that can be linked next time."""
        key = checksum("".join(written.header).encode())
        self._files.pop(key, None)
        self._files[key] = _look(os.path.join(directory, written.name))
        while len(self._files) > _REMEMBERED:
            self._files.pop(next(iter(self._files)))

    def link(self, directory: str, name: str, sources: Sequence[Source]) -> Written | None:
        """Give a file of an earlier save that holds just these sources a second name; None if there is none."""
        if not sources or not self._files:
            return None
        entries = [sources[i].entry for i in arrange([s.entry for s in sources])]
        header = build(entries, data_checksums(sources))
        checksums = checksums_of(header)
        file = self._files.get(checksum("".join(checksums).encode()))
        # Where it is gone, was changed, or cannot be linked from there, the tensors are written again.
        with contextlib.suppress(OSError):
            if file is not None and _look(file.path) == file:
                path = os.path.join(directory, name)
                os.link(file.path, path, follow_symlinks=False)
                if os.lstat(path).st_size == file.size:
                    return Written(name, file.size, checksums)
                os.unlink(path)
        return None


known: Final = Known()


logger = logging.getLogger("accel")

#: A rank's two files: what moves, and what may be as it was.
Pair = tuple[Written | None, Written | None]


@final
class Job:
    """A save on one rank.

    Args:
        directory: where to, absolute.
        rank: this one.
        world: of how many.
        keep: how many checkpoints are left.
    """

    def __init__(self, directory: str, rank: int, world: int, keep: int | None) -> None:
        self.directory = directory
        self.rank = rank
        self.world = world
        self.keep = keep
        self.save = ""
        self._draft: Draft | None = None
        self._moving: Sequence[Source] = ()
        self._still: Sequence[Source] = ()
        self._linked: Written | None = None

    def begin(self, stack: contextlib.ExitStack) -> str:
        """Rank 0: take the directory, and clean what dead saves left. Returns the id of this save."""
        folder.make(self.directory)
        folder.present(self.directory)  # raises before anything is written into another program's directory
        lock = folder.Lock(self.directory)
        stack.callback(lock.release)
        old = folder.present(self.directory)
        folder.sweep(self.directory, {file.name for file in old.files} if old else ())
        return folder.new_id()

    def take(self, draft: Draft) -> None:
        """Learn what to write, and link what is on disk already."""
        os.makedirs(self.directory, exist_ok=True)  # a host may not have heard yet that rank 0 made it
        self._draft = draft
        self._moving, self._still = draft.sources(self.rank)
        self._linked = known.link(self.directory, self._name(still=True), self._still)
        if self._linked is not None:
            self._still = ()

    def _name(self, *, still: bool = False) -> str:
        return folder.shard_name(self.save, self.rank, still=still)

    def snapshot(self) -> None:
        """Copy what is to be written, so that training may go on."""
        self._moving, self._still = background.snapshot(self._moving, self._still)

    def write(self) -> Pair:
        """Write this rank's files, durably."""
        moving = shards.write(self.directory, self._name(), self._moving) if self._moving else None
        still = self._linked
        if self._still:
            still = shards.write(self.directory, self._name(still=True), self._still)
        if still is not None:
            known.remember(self.directory, still)
        record.sync(self.directory)
        return moving, still

    def discard(self) -> None:
        """Remove this rank's files, which no record names."""
        for still in (False, True):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.directory, self._name(still=still)))

    def commit(self, written: Sequence[Pair]) -> None:
        """Rank 0: make it the checkpoint of the directory, then remove the one before.

        Raises:
            CheckpointError: a rank wrote to another place.
            OSError: the record cannot be written.
        """
        assert self._draft is not None
        try:
            new = self._draft.record(self.save, time.time(), written)
            for file in new.files:
                self._check_visible(file)
            record.commit(self.directory, record.encode(new), folder.record_name(self.save))
        except BaseException:
            self._drop_all()
            raise
        # It is done; what fails from here on is no failure of the save.
        try:
            self._sweep(new)
            if self.keep is not None:
                manage.prune(self.directory, self.keep)
        except (OSError, CheckpointError) as error:
            logger.warning("%s is saved, but older files could not be removed: %s", self.directory, explain(error))

    def conclude(self, written: Sequence[Pair]) -> tuple[None, None]:
        """Commit on rank 0."""
        if self.rank == 0:
            self.commit(written)
        return None, None

    def _drop_all(self) -> None:
        with contextlib.suppress(OSError, CheckpointError):
            self._sweep(folder.present(self.directory))

    def _sweep(self, kept: Record | None) -> None:
        """Remove what is neither of this record, nor needed by ranks that wait for the end of this save."""
        names = [file.name for file in kept.files] if kept else []
        folder.sweep(self.directory, names + folder.mark_names(self.save, self.world))

    def _check_visible(self, file: Written) -> None:
        path = os.path.join(self.directory, file.name)
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            size = -1
        if size != file.size:
            raise CheckpointError(
                f"{path}: a rank wrote it, but rank 0 does not see it {'whole' if size >= 0 else 'at all'}: save into a "
                "directory on a file system that all hosts share"
            )

    # -- in the background: without collectives ---------------------------------------------------------------------

    def finish_alone(self, timeout: float) -> None:
        """Write, and commit once all ranks have written; returns when every rank knows it. In a thread, on every rank.

        Raises:
            CheckpointError: it failed on this rank or on another.
        """
        marks = Marks(self.directory, self.save, self.rank, self.world, timeout)
        failure: Exception | None = None
        pair: Pair = (None, None)
        try:
            pair = self.write()
            if self.rank == 0:
                self.commit([pair, *(_heard(marks.hear(rank)) for rank in range(1, self.world))])
        except Exception as error:
            failure = error
            if self.rank == 0:
                self._drop_all()
        if self.world > 1:
            end = self._part(marks, pair, failure)
            failure = failure or (CheckpointError(end["error"]) if end["error"] else None)
        if failure is not None:
            raise failure

    def _part(self, marks: Marks, pair: Pair, failure: Exception | None) -> Mapping[str, Any]:
        """Tell what this rank has done, and hear from rank 0 how the save has ended, as every rank does."""
        error = ""
        if failure is not None:
            error = f"rank {self.rank}: {explain(failure)}" if self.rank else explain(failure)
        files = [None if w is None else [w.name, w.size, list(w.header)] for w in pair]
        try:
            marks.tell({"error": error, "files": files})
            end = marks.hear(0)
        except (OSError, CheckpointError) as lost:
            if failure is not None:
                raise failure from lost
            raise
        marks.part()
        return end


def _heard(told: Mapping[str, Any]) -> Pair:
    """What another rank has written.

    Raises:
        CheckpointError: it failed.
    """
    if told["error"]:
        raise CheckpointError(told["error"])
    moving, still = (None if f is None else Written(f[0], f[1], tuple(f[2])) for f in told["files"])
    return moving, still
