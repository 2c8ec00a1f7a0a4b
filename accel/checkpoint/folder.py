"""The directories of checkpoints: names in one, the lock of the job that saves, what dead saves left; the newest of several."""

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
from typing import Final, final

from ..errors import CheckpointError, refuse_url
from ..process import rank
from ..process.control import locked
from .background import background
from .failures import explain, naming, on_every_rank
from .record import NAME, Record, commit, exists, is_damaged, parse, read, sync
from .shards import unreadable

logger = logging.getLogger("accel")

LOCK: Final = ".accel.lock"
#: Only names of this form are ever removed: shards, records on their way, and the status files of background saves.
_OURS: Final = re.compile(
    r"accel-[0-9a-f]{12}-\d{5,}(-still)?\.safetensors|\.accel-[0-9a-f]{12}(-\d{5,})?\.(record|done|seen)(\.tmp)?"
)


def named(path: object) -> str:
    """A directory as a user names it; ``~`` at its beginning is the home directory. Refuses what is no path, and URLs."""
    if path is None:
        raise CheckpointError("expected a directory, found None; accel.latest gives None where there is no checkpoint")
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"expected the path of a directory, found {path!r}")
    return os.path.expanduser(refuse_url(text, CheckpointError))


def absolute(path: object) -> str:
    """The same from the root on, whatever the working directory becomes."""
    return os.path.abspath(named(path))


def shard_name(save: str, rank: int, *, frozen: bool) -> str:
    """The file of one rank: of what changes, or of what is frozen."""
    return f"accel-{save}-{rank:05d}{'-still' if frozen else ''}.safetensors"


def record_name(save: str) -> str:
    """The record until it is the record."""
    return f".accel-{save}.record"


def make(directory: str) -> None:
    """Make a directory and what is above it, durably; an OSError where it cannot be made, or is something else."""
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


def begin(directory: str, resources: contextlib.ExitStack) -> set[str]:
    """Take a directory, made if need be, to write a checkpoint into it, and clean what dead saves left.

    Args:
        directory: where to.
        resources: end the lock.

    Returns:
        The names of the files of the checkpoint that is there.

    Raises:
        CheckpointError: another job saves there, or the directory is another program's.
    """
    make(directory)
    present(directory)  # raises before anything is written into another program's directory
    resources.callback(Lock(directory).release)
    old = present(directory)
    files = {file.name for file in old.files} if old else set()
    sweep(directory, files)
    return files


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
    """Compare the files of a checkpoint with the sizes that its record names; raises for the first that is missing or another."""
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
    """Remove the checkpoint in a directory, and the directory if nothing else is in it; raises while a job saves there."""
    lock = Lock(directory)
    try:
        os.unlink(os.path.join(directory, NAME))  # first: from here on it is no checkpoint
        sync(directory)
        sweep(directory, ())
    finally:
        lock.remove()
    with contextlib.suppress(OSError):
        os.rmdir(directory)


# -- Several checkpoints: the newest one, a second name for one, the oldest ones away ----------------------------------

_NUMBERED: Final = re.compile(r"(.*?)(\d+)")


def check_keep(directory: str, keep: object) -> None:
    """Refuse a number that is none, or a directory whose older ones nobody can tell."""
    if type(keep) is not int or keep < 1:
        raise CheckpointError(f"keep={keep!r}: expected a number of checkpoints of at least 1")
    if not _NUMBERED.fullmatch(os.path.basename(os.path.abspath(directory))):
        raise CheckpointError(
            f"keep={keep}: the name of {directory!r} does not end in a number, so that its older ones are not known; save "
            "into directories such as 'ckpt/step-100'"
        )


def prune(directory: str, keep: int) -> None:
    """Remove the oldest checkpoints of the series of ``directory``, but never that one itself."""
    root, name = os.path.split(os.path.abspath(directory))
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    series = []
    for other in os.listdir(root):
        found = _NUMBERED.fullmatch(other)
        path = os.path.join(root, other)
        if found and found[1] == match[1] and other != name and not os.path.islink(path):
            one = complete(path)
            if one is not None:
                series.append((one.time, path))
    for _, path in sorted(series, reverse=True)[keep - 1 :]:
        with contextlib.suppress(CheckpointError):  # somebody saves there
            remove(path)


def latest(root: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint in ``root``, or ``root`` itself; None if there is none. Local.

    Args:
        root: a directory of checkpoints; it need not exist. One in it that is damaged or not complete is passed over, with a
            warning that names it.

    Raises:
        CheckpointError: ``root`` is there, and cannot be read.
    """
    background.wait()
    path = named(root)
    candidates = [path]
    try:
        candidates += [os.path.join(path, name) for name in os.listdir(path)]
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # there may be one
        raise CheckpointError(f"accel.latest: {explain(error)}") from error
    found = []
    for candidate in candidates:
        one = complete(candidate)
        if one is not None:
            found.append((one.time, candidate))
    return max(found)[1] if found else None


@locked
def link(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
    """Make ``dst`` a second name of the checkpoint ``src``: its files are linked, so that either can be removed. Collective.

    A checkpoint that ``dst`` has already is replaced.

    Raises:
        CheckpointError: ``src`` is no complete checkpoint, or ``dst`` cannot be written.
    """

    def act() -> None:
        background.wait()
        if rank() == 0:
            _link(absolute(src), absolute(dst))

    on_every_rank("accel.link", act)


def _link(src: str, dst: str) -> None:
    if os.path.realpath(src) == os.path.realpath(dst):
        return
    one, _ = read(src)
    check_sizes(src, one)
    with contextlib.ExitStack() as resources:
        _link_files(src, dst, one, begin(dst, resources))
        sync(dst)
        with open(os.path.join(src, NAME), "rb") as file:
            content = file.read()
        if parse(content, src)[0].id != one.id:
            raise CheckpointError(f"{src} was replaced while it was linked; link it again")
        commit(dst, content, record_name(one.id))
        sweep(dst, {file.name for file in one.files})


def _link_files(src: str, dst: str, one: Record, already: set[str]) -> None:
    for file in one.files:
        source, target = os.path.join(src, file.name), os.path.join(dst, file.name)
        if file.name in already:
            if os.path.samefile(source, target):
                continue
            # The same save, copied by hand; a name on the way makes the exchange atomic.
            passing = os.path.join(dst, f".accel-{one.id}-{secrets.randbelow(10**5):05d}.done.tmp")
            os.link(source, passing)
            os.replace(passing, target)
        else:
            try:
                os.link(source, target)
            except OSError as error:
                raise CheckpointError(f"{explain(error)}; both must be on one file system that has links") from error
