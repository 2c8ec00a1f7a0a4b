"""The directory of a checkpoint: the names in it, the lock of the job that saves, and what dead saves left."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
import weakref
from collections.abc import Iterable
from typing import Final, Literal, final

from ..errors import CheckpointError, refuse_url
from .failures import explain, naming
from .record import NAME, Record, exists, is_damaged, read, sync
from .shards import unreadable

logger = logging.getLogger("accel")

LOCK: Final = ".accel.lock"
#: Only names of this form are ever removed: shards, records on their way, and the status files of background saves.
_OURS: Final = re.compile(
    r"accel-[0-9a-f]{12}-\d{5,}(-still)?\.safetensors|\.accel-[0-9a-f]{12}(-\d{5,})?\.(record|done|seen)(\.tmp)?"
)


def named(path: object) -> str:
    """A directory as a user names it; ``~`` at its beginning is the home directory.

    Raises:
        CheckpointError: it is no path, or a URL.
    """
    if path is None:
        raise CheckpointError("expected a directory, found None; accel.latest gives None where there is no checkpoint")
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"expected the path of a directory, found {path!r}")
    return os.path.expanduser(refuse_url(text, CheckpointError))


def absolute(path: object) -> str:
    """The same from the root on, whatever the working directory becomes."""
    return os.path.abspath(named(path))


def new_id() -> str:
    """The id of a new save."""
    return secrets.token_hex(6)


def shard_name(save: str, rank: int, *, frozen: bool) -> str:
    """The file of one rank: of what changes, or of what is frozen."""
    return f"accel-{save}-{rank:05d}{'-still' if frozen else ''}.safetensors"


def record_name(save: str) -> str:
    """The record until it is the record."""
    return f".accel-{save}.record"


def status_name(save: str, rank: int, kind: Literal["done", "seen"]) -> str:
    """The file that a rank of a background save leaves when it has written, or when it knows how the save has ended."""
    return f".accel-{save}-{rank:05d}.{kind}"


def status_names(save: str, world: int) -> list[str]:
    """Those of all ranks; the last are what the others look at to the end."""
    kinds: tuple[Literal["done", "seen"], ...] = ("done", "seen")
    return [status_name(save, rank, kind) for kind in kinds for rank in range(world)]


def make(directory: str) -> None:
    """Make a directory and what is above it, durably.

    Raises:
        OSError: it cannot be made, or is something else.
    """
    missing = []
    path = os.path.abspath(directory)
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    os.makedirs(directory, exist_ok=True)
    for made in missing:
        sync(os.path.dirname(made))


@final
class Lock:
    """Held by the job that saves into a directory; it ends with its process at the latest.

    Raises:
        CheckpointError: another job holds it.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: str) -> None:
        self._path = path = os.path.join(directory, LOCK)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _open.add(self)
        try:
            self._take(path)
        except BaseException:
            self.forget()
            raise

    def _take(self, path: str) -> None:
        # A process that has just died may hold it for another moment.
        for wait in (0.0, 0.1, 0.4):
            time.sleep(wait)
            with contextlib.suppress(BlockingIOError), naming(path):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there(path):
                    return
                raise CheckpointError(f"{path} was removed by another job just now; try again")
        raise CheckpointError(
            f"{path} is held by another job that saves here now; give each job a directory of its own, or end the other"
        )

    def _is_there(self, path: str) -> bool:
        """Whether the file is the one that others will find."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(path))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Let the next job in, and leave no file."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self.release()

    def release(self) -> None:
        """Let the next job in; again is harmless."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close the file; the lock stays with the processes that have it open too."""
        os.close(self._fd)
        self._fd = -1
        _open.discard(self)


_open: Final[weakref.WeakSet[Lock]] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_open):
        lock.forget()


# Else a forked process, such as a loader's worker, would keep the lock of a job that has died.
os.register_at_fork(after_in_child=_forget_all)


def sweep(directory: str, keep: Iterable[str]) -> None:
    """Remove what accel has written into a directory, except the files named. The lock is held."""
    kept = set(keep)
    for name in os.listdir(directory):
        if _OURS.fullmatch(name) and name not in kept:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))


def present(directory: str) -> Record | None:
    """The record of a directory that is to be replaced; None if there is none, or a damaged one.

    Raises:
        CheckpointError: another program, or a newer version, wrote a file of that name.
    """
    if not exists(directory):
        return None
    try:
        return read(directory)[0]
    except CheckpointError:
        if is_damaged(os.path.join(directory, NAME)):
            return None
        raise


def complete(directory: str) -> Record | None:
    """The record of a checkpoint whose files are there; None if there is none, or, with a warning, one that cannot be loaded."""
    try:
        if not exists(directory):
            return None
        record, _ = read(directory)
        check_sizes(directory, record)
    except (CheckpointError, OSError, MemoryError) as error:
        logger.warning("%s is passed over: %s", directory, explain(error))
        return None
    return record


def check_sizes(directory: str, record: Record) -> None:
    """Compare the files of a checkpoint with the sizes that its record names.

    Raises:
        CheckpointError: names the first that is missing or of another size.
    """
    for file in record.files:
        path = os.path.join(directory, file.name)
        try:
            size = os.lstat(path).st_size
        except OSError as error:
            raise CheckpointError(unreadable(error)) from error
        if size != file.size:
            raise CheckpointError(
                f"{path}: has {size} bytes, and {file.size} were written; it was cut or changed, load another checkpoint"
            )


def remove(directory: str) -> None:
    """Remove the checkpoint in a directory, and the directory if nothing else is in it.

    Raises:
        CheckpointError: a job saves there.
    """
    lock = Lock(directory)
    try:
        os.unlink(os.path.join(directory, NAME))  # first: from here on it is no checkpoint
        sync(directory)
        sweep(directory, ())
    finally:
        lock.remove()
    with contextlib.suppress(OSError):
        os.rmdir(directory)
