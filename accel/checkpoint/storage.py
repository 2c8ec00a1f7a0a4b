"""Where checkpoints lie. All of ``checkpoint/`` asks for its files here, by path: ``storage_of(path).names(path)``.

A file is there whole or not at all, and never changed afterwards; the record replaces the one before it from one moment to the
next (``Claim.commit``). ``Local``: the file systems of this machine; ``remote.py``: object stores.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import secrets
import stat
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from ..errors import CheckpointError, is_url
from .safetensors import CHUNK, MAX_HEADER
from .steps import explain, naming

if TYPE_CHECKING:
    from .remote import Remote, Turn

#: Each has the other's methods. An OSError of theirs says what went wrong, and with which path.
Storage: TypeAlias = "Local | Remote"
#: What one job has of a directory while it saves there.
Claim: TypeAlias = "Lock | Turn"
#: Takes the bytes that come next in a new file, and is done with them when it returns.
Write = Callable[[memoryview], None]


def storage_of(path: str) -> Storage:
    """The storage in which a path lies."""
    if not is_url(path):
        return _local
    from .remote import remote  # what it needs is not always installed

    return remote(path)


class File(ABC):
    """A file that is open for reading, by any thread."""

    #: Bytes that are read at a time where they are looked at before those that follow.
    step = CHUNK
    in_flight = (
        0  #: Threads that read from it, where it matters more than how many cores there are.
    )
    tries = 1  #: How often what has another checksum is read: a network may have changed it.

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size

    @abstractmethod
    def fill(self, ranges: Sequence[tuple[int, list[memoryview]]]) -> None:
        """Fill memory with what follows each offset, these in order; raises where the file ends before."""

    def read(self, offset: int, count: int) -> bytearray:
        content = bytearray(count)
        self.fill([(offset, [memoryview(content)])])
        return content

    def read_header(self) -> bytearray:
        """The first bytes of a safetensors file up to its data; none where it has not as many as they say."""
        length = 8 + int.from_bytes(self.read(0, min(8, self.size)), "little")
        return self.read(0, length if length <= min(self.size, MAX_HEADER + 8) else 0)


def read_whole(path: str, limit: int, kind: str) -> bytes:
    """A small file; raises where it is missing, or too large for ``kind`` (a record, say)."""
    with storage_of(path).open(path, None) as file:
        if file.size > limit:
            raise CheckpointError(f"{path}: {file.size} bytes are too many for {kind}")
        return bytes(file.read(0, file.size))


class StoreError(OSError):
    """What a store did not do, and what to do; it says nothing of what is there."""


def unreadable(error: OSError) -> str:
    """What to say of a file of a checkpoint that cannot be read."""
    missing = (
        "; the checkpoint is not complete, load another one" if error.errno == errno.ENOENT else ""
    )
    return f"{explain(error)}{missing}"


def check_size(path: str, found: int, written: int) -> None:
    """Refuse a file of a checkpoint that has another size than the record says."""
    if found != written:
        raise CheckpointError(
            f"{path}: has {found} bytes, and {written} were written; it was cut or changed, load another checkpoint"
        )


# -- The file systems of this machine ----------------------------------------------------------------------------------

RECORD: Final = "accel.json"
LOCK: Final = ".accel.lock"
MEMORY: Final = "/dev/shm"  # a file system that lies in memory
_WRITE: Final = 8 << 20  # bytes of small parts that are written together
_SMALL: Final = 256 << 10  # bytes that are copied rather than written by a call of their own
_MAX_VECTORS: Final = 512
_START_WRITING: Final = 2  # SYNC_FILE_RANGE_WRITE
_FULL: Final = frozenset({errno.EFBIG, errno.ENOSPC, errno.EDQUOT})


@final
class Local:
    """Durable by fsync; a directory is one job's by a lock that ends with its process.

    ``claim``      takes a directory for this job, or refuses it where another one saves there now
    ``create``     a new file, durable or, after an error, not there at all: ``header`` bytes that are known last, and what
                   follows them. ``content`` hands that over and returns the header, and the same if it is called again.
                   ``size`` is to be reserved, 0 where it is not known. Returns the header
    ``exists``     whether there surely is a file, directory or link
    ``identity``   is another one if a file is written again, or another is put in its place
    ``link``       makes ``new`` a file like ``old``, each of which can go by itself; their bytes do not come through this process
    ``make``       a directory and what is above it, durable once it is synced: that takes as long as a disk does
    ``open``       a file for reading; a CheckpointError where it is missing, a link, something else, or not of ``size``
    ``real``       the path without links
    ``remove``     a file, if it is there; ``remove_directory`` an empty one
    ``rename``     gives a file another name, in place of one that has it: each is there whole at any moment
    ``sync``       makes the names in a directory durable, and its own where it was made
    """

    names = staticmethod(os.listdir)
    exists = staticmethod(os.path.lexists)
    is_directory = staticmethod(os.path.isdir)
    rename = staticmethod(os.replace)

    def real(self, path: str) -> str:
        return os.path.realpath(path)

    def size(self, path: str) -> int:
        return os.lstat(path).st_size

    def sizes(self, directory: str, names: Sequence[str]) -> Iterator[int]:
        return (self.size(os.path.join(directory, name)) for name in names)

    def identity(self, path: str) -> Hashable:
        status = os.lstat(path)
        return status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns

    def make(self, directory: str) -> None:
        missing = []
        path = os.path.abspath(directory)
        while not os.path.lexists(path):
            missing.append(path)
            path = os.path.dirname(path)
        try:
            os.makedirs(directory, exist_ok=True)
        except FileNotFoundError:  # one above was empty, and another job has removed it just then
            os.makedirs(directory, exist_ok=True)
        _made.update(missing)

    def sync(self, directory: str) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with naming(directory):
                os.fsync(fd)
        finally:
            os.close(fd)
        if (path := os.path.abspath(directory)) in _made:
            self.sync(os.path.dirname(path))
            _made.discard(path)

    def claim(self, directory: str) -> Claim:
        return Lock(directory)

    @contextlib.contextmanager
    def open(self, path: str, size: int | None) -> Iterator[File]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(unreadable(error)) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: is not a regular file")
            if size is not None:
                check_size(path, status.st_size, size)
            with naming(path):
                yield _LocalFile(path, status.st_size, fd)
        finally:
            os.close(fd)

    def create(self, path: str, size: int, header: int, content: Callable[[Write], bytes]) -> bytes:
        with _new_file(path) as fd:
            if not path.startswith(f"{MEMORY}/"):  # which would take pages twice in hand
                reserve(fd, size)
            os.lseek(fd, header, os.SEEK_SET)
            writing = _Writing(fd)
            first = content(writing.write)
            writing.finish()
            if os.pwrite(fd, first, 0) != header:
                raise OSError(errno.ENOSPC, "the header was written only in part")
        return first

    def link(self, old: str, new: str) -> None:
        passing = f"{new}.tmp"
        self.remove(passing)
        os.link(old, passing, follow_symlinks=False)
        os.replace(passing, new)
        self.remove(passing)  # two names of one file are not replaced by each other

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_directory(self, directory: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(directory)


@final
class _LocalFile(File):
    step = 256 << 10  # which are in the caches of a core that has read them

    def __init__(self, path: str, size: int, fd: int) -> None:
        super().__init__(path, size)
        self._fd = fd

    def fill(self, ranges: Sequence[tuple[int, list[memoryview]]]) -> None:
        for offset, views in ranges:
            self._fill(offset, views)

    def _fill(self, offset: int, views: list[memoryview]) -> None:
        views, at = [view for view in views if view], 0
        while at < len(views):
            try:
                count = os.preadv(self._fd, views[at : at + _MAX_VECTORS], offset)
            except OSError as error:
                error.filename = self.path
                raise CheckpointError(unreadable(error)) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: ends at byte {offset}, in the middle of a tensor; load another checkpoint"
                )
            offset += count
            while at < len(views) and count >= len(views[at]):
                count -= len(views[at])
                at += 1
            if count:  # the rest of a view that was filled in part
                views = [views[at][count:], *views[at + 1 :]]
                at = 0


@final
class _Writing:
    """Data on its way into a file: small parts are gathered, so that one call writes many of them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._small = bytearray()

    def write(self, part: memoryview) -> None:
        if len(part) < _SMALL and len(self._small) < _WRITE:
            self._small += part
            return
        self.finish()
        _write_out(self._fd, part)

    def finish(self) -> None:
        _write_out(self._fd, self._small)
        self._small = bytearray()


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def reserve(fd: int, size: int) -> None:
    """Take the space at once, where the file system can; one that is full says so before anything is written."""
    if not hasattr(_libc(), "fallocate") or not size:
        return
    if _libc().fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) != 0:
        number = ctypes.get_errno()
        if number in _FULL:
            raise OSError(number, os.strerror(number))


def _write_out(fd: int, data: bytearray | memoryview) -> None:
    """Write, and let the kernel begin to write out: waiting for the disk only at the end would leave it idle until then."""
    begin = os.lseek(fd, 0, os.SEEK_CUR)
    _write_all(fd, data)
    if data and hasattr(_libc(), "sync_file_range"):
        _libc().sync_file_range(
            fd, ctypes.c_longlong(begin), ctypes.c_longlong(len(data)), _START_WRITING
        )


def _write_all(fd: int, content: bytes | bytearray | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[int]:
    """Context: a new file, which is durable afterwards, and removed after an error. An OSError names it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL, 0o666)
    try:
        with naming(path):
            yield fd
            os.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


@final
class Lock:
    """Held by the job that saves into a directory, until its process ends at the latest; refuses another job.

    ``exclusive``  no other job can be writing there until this one lets go
    ``commit``     makes ``content`` the directory's record, durably, from one moment to the next
    ``release``    lets the next job in; again is harmless. ``remove`` leaves nothing in the directory, too
    """

    exclusive = True

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path = path = os.path.join(directory, LOCK)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _open.add(self)
        try:
            self._take(path)
        except BaseException:
            self.forget()
            raise

    def _take(self, path: str) -> None:
        # A process that has just died may hold it for another moment, or garbage of this one: a save that was interrupted.
        for wait in (0.0, 0.1, 0.4):
            time.sleep(wait)
            if wait:
                gc.collect()
            with contextlib.suppress(BlockingIOError), naming(path):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Others must find the file that is locked.
                if os.path.lexists(path) and os.path.samestat(os.fstat(self._fd), os.lstat(path)):
                    return
                raise CheckpointError(f"{path} was removed by another job just now; try again")
        raise CheckpointError(
            f"{path} is held by another job that saves here now; give each job a directory of its own, or end the other"
        )

    def commit(self, content: bytes) -> None:
        passing = os.path.join(self._directory, f".accel-{secrets.token_hex(6)}.record")
        with _new_file(passing) as fd:
            _write_all(fd, content)
        os.replace(passing, os.path.join(self._directory, RECORD))
        _local.sync(self._directory)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self.release()

    def release(self) -> None:
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.forget()

    def __del__(self) -> None:
        """An interrupt may have come in front of ``release``."""
        if hasattr(self, "_fd"):
            self.release()

    def forget(self) -> None:
        """Close the file; the lock stays with the processes that have it open too."""
        os.close(self._fd)
        self._fd = -1
        _open.discard(self)


_local: Final = Local()
_made: Final[set[str]] = set()  # directories whose names are not durable yet
_open: Final[weakref.WeakSet[Lock]] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_open):
        lock.forget()


# Else a forked process, such as a loader's worker, would keep the lock of a job that has died.
os.register_at_fork(after_in_child=_forget_all)
