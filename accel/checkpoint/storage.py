"""Storage of checkpoints: the file systems of this machine here, object stores in ``remote.py``.

``storage_of(path)`` returns the one that has a path. Files are written once, front to back, and
never changed. Only the record is replaced, by ``put``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from ..errors import CheckpointError, is_url

if TYPE_CHECKING:
    from .remote import Remote

#: Both have the same methods. Their OSErrors name the path.
Storage: TypeAlias = "Local | Remote"
#: Gives the bytes of a new file.
Content = Callable[[], Iterable["bytes | bytearray | memoryview"]]

#: Bytes under one checksum.
CHUNK: Final = 4 << 20
_MAX_VECTORS: Final = 512


def storage_of(path: str) -> Storage:
    """Return the disk or object store of a path."""
    if not is_url(path):
        return _local
    # fsspec is not always installed.
    from .remote import remote

    return remote(path)


def read_whole(path: str) -> bytes:
    """Return the content of a small file."""
    with storage_of(path).open(path) as file:
        return bytes(file.read(0, file.size))


class StoreError(OSError):
    """A failure of a store, which may still have the file."""


def replaced(path: str) -> CheckpointError:
    """Return the error for a record by another job, written in between."""
    return CheckpointError(
        f"{path} is another job's: it has saved there since this save began. "
        "Give each job its own directory."
    )


@dataclass(frozen=True, slots=True)
class File:
    """A file that is open for reading. Threads may share it."""

    path: str
    size: int
    #: Fills memory with the bytes from an offset on. Raises if the file is too short.
    fill: Callable[[int, Sequence[memoryview]], None]
    #: Bytes to read before they are hashed. By default they stay in the caches of a core.
    step: int = 256 << 10
    #: Threads that read at a time. 0: as many as the rank has cores.
    in_flight: int = 0
    #: How often a chunk with a wrong checksum is read, because a network may have changed it.
    tries: int = 1

    def read(self, offset: int, count: int) -> bytearray:
        """Return some bytes."""
        content = bytearray(count)
        self.fill(offset, [memoryview(content)])
        return content


@final
class Local:
    """Files that are durable by fsync."""

    names = staticmethod(os.listdir)
    is_directory = staticmethod(os.path.isdir)
    rename = staticmethod(os.replace)

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the sizes of the files in a directory by name."""
        sizes = {}
        for name in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):  # another job has removed it
                sizes[name] = os.stat(os.path.join(directory, name)).st_size
        return sizes

    def modified(self, path: str) -> float | None:
        """Return the time of a file in seconds, or None if there is no such file."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.lstat(path).st_mtime
        return None

    def version(self, path: str) -> str:
        """Return a name for the content of a file, or an empty string if there is no file."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.lstat(path)
            return f"{status.st_size} {status.st_dev} {status.st_ino} {status.st_mtime_ns}"
        return ""

    def make(self, directory: str) -> None:
        """Make a directory and those above, durably."""
        if not os.path.isdir(directory):
            parent = os.path.dirname(os.path.abspath(directory))
            self.make(parent)
            with contextlib.suppress(FileExistsError):  # another rank was first
                os.mkdir(directory)
            self.sync(parent)

    def sync(self, directory: str) -> None:
        """Make the names in a directory durable."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[File]:
        """Open a file."""
        fd = os.open(path, os.O_RDONLY)
        try:
            yield File(path, os.fstat(fd).st_size, partial(_fill, fd, path))
        finally:
            os.close(fd)

    def create(self, path: str, size: int, content: Content) -> None:
        """Write a new file, durably. After an error it does not exist."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            at = 0
            for block in content():
                view = memoryview(block)
                while view:
                    view = view[os.write(fd, view) :]
                # The disk would be idle until the fsync. macOS has no such call.
                if hasattr(_libc, "sync_file_range"):
                    start, count = ctypes.c_longlong(at), ctypes.c_longlong(len(block))
                    _libc.sync_file_range(fd, start, count, 2)  # SYNC_FILE_RANGE_WRITE
                at += len(block)
            os.fsync(fd)
        except BaseException as error:
            # Errors from an open file have no name.
            if isinstance(error, OSError) and error.filename is None:
                error.filename = path
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(fd)

    def put(self, path: str, content: bytes, version: str) -> None:
        """Replace a file, durably, or raise if it doesn't have this version any more."""
        directory = os.path.dirname(path)
        passing = os.path.join(directory, f".accel-{secrets.token_hex(6)}.record")
        self.create(passing, len(content), lambda: [content])
        # Times of the system are too coarse to order saves that follow each other quickly.
        now = time.time_ns()
        os.utime(passing, ns=(now, now))
        if self.version(path) != version:
            os.unlink(passing)
            raise replaced(path)
        os.replace(passing, path)
        self.sync(directory)

    def link(self, old: str, new: str) -> None:
        """Make ``new`` a file like ``old``. Each can be removed without the other."""
        # The names have the id of a save, so a file of this name is the same.
        with contextlib.suppress(FileExistsError):
            os.link(old, new, follow_symlinks=False)

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _fill(fd: int, path: str, offset: int, views: Sequence[memoryview]) -> None:
    left = list(filter(None, views))
    while left:
        try:
            count = os.preadv(fd, left[:_MAX_VECTORS], offset)
        except OSError as error:
            error.filename = path
            raise
        if count == 0:
            raise CheckpointError(
                f"{path} ends at byte {offset}, inside a tensor. Load another checkpoint."
            )
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:  # a view was filled in part
            left[0] = left[0][count:]


_libc: Final[Any] = ctypes.CDLL(None)
_local: Final = Local()
