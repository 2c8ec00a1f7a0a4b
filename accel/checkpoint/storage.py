"""Storage of checkpoints: local file systems here, and object stores in ``remote.py``.

``storage_of(path)`` returns the storage of a path. Files are written once, sequentially, and
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

#: Both have the same methods. The OSErrors that they raise contain the path.
Storage: TypeAlias = "Local | Remote"
#: Returns the bytes of a new file in blocks.
Content = Callable[[], Iterable["bytes | bytearray | memoryview"]]

#: Bytes per checksum.
CHUNK: Final = 4 << 20
#: Bytes to read at once. They stay in a core's cache until they are hashed.
STEP: Final = 256 << 10


def storage_of(path: str) -> Storage:
    """Return the local or remote storage of a path."""
    if not is_url(path):
        return _local
    # An import at the top would be circular, because remote.py imports this module.
    from .remote import remote

    return remote(path)


def read_whole(path: str) -> bytes:
    """Return the content of a small file."""
    with storage_of(path).open(path) as file:
        return bytes(file.read(0, file.size))


class StoreError(OSError):
    """A failed request to a store. The file may still exist."""


def replaced(path: str) -> CheckpointError:
    """Return the error for a record that changed during the save."""
    return CheckpointError(
        f"{path} was written by a different job during this save. "
        "Use a different directory for each job."
    )


@dataclass(frozen=True, slots=True)
class File:
    """A file opened for reading. Threads may share it."""

    path: str
    size: int
    #: Fills buffers with the bytes from an offset, and yields each part once it is filled.
    #: Raises if the file is too short.
    fill: Callable[[int, Sequence[memoryview]], Iterator[memoryview]]
    #: The number of threads to read with. 0 means this rank's share of the cores.
    in_flight: int = 0
    #: The attempts to read a chunk with a correct checksum, as a network may corrupt it.
    tries: int = 1

    def read(self, offset: int, count: int) -> bytearray:
        """Return ``count`` bytes."""
        content = bytearray(count)
        for _ in self.fill(offset, [memoryview(content)]):
            pass
        return content


@final
class Local:
    """Local files, made durable with fsync."""

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
        """Return the modification time of a file, or None if it doesn't exist."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.lstat(path).st_mtime
        return None

    def version(self, path: str) -> str:
        """Return a string that identifies a file's content. It is empty without a file."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.lstat(path)
            return f"{status.st_size} {status.st_dev} {status.st_ino} {status.st_mtime_ns}"
        return ""

    def make(self, directory: str) -> None:
        """Create a directory and its parents, durably."""
        if not os.path.isdir(directory):
            parent = os.path.dirname(os.path.abspath(directory))
            self.make(parent)
            with contextlib.suppress(FileExistsError):  # another rank was first
                os.mkdir(directory)
            self.sync(parent)

    def sync(self, directory: str) -> None:
        """Make a directory's entries durable."""
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
        """Write a new file, durably. After an error, it doesn't exist."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            at = 0
            for block in content():
                view = memoryview(block)
                while view:
                    view = view[os.write(fd, view) :]
                # Start to write now, or the disk is idle until fsync. macOS lacks this call.
                if hasattr(_libc, "sync_file_range"):
                    start = ctypes.c_longlong(at)
                    count = ctypes.c_longlong(len(block))
                    _libc.sync_file_range(fd, start, count, 2)  # SYNC_FILE_RANGE_WRITE
                at += len(block)
            os.fsync(fd)
        except BaseException as error:
            # Errors of os.write() and os.fsync() don't contain the path.
            if isinstance(error, OSError) and error.filename is None:
                error.filename = path
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(fd)

    def put(self, path: str, content: bytes, version: str) -> None:
        """Replace a file, durably. Raise if it no longer has this version."""
        directory = os.path.dirname(path)
        passing = os.path.join(directory, f".accel-{secrets.token_hex(6)}.record")
        self.create(passing, len(content), lambda: [content])
        # The kernel's timestamps are too coarse to order saves in quick succession.
        now = time.time_ns()
        os.utime(passing, ns=(now, now))
        if self.version(path) != version:
            os.unlink(passing)
            raise replaced(path)
        os.replace(passing, path)
        self.sync(directory)

    def link(self, old: str, new: str) -> None:
        """Create the hard link ``new`` to ``old``. You can remove either."""
        # Names contain the random id of a save, so an existing file is the same one.
        with contextlib.suppress(FileExistsError):
            os.link(old, new, follow_symlinks=False)

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _fill(fd: int, path: str, offset: int, views: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in views:
        while view:
            try:
                count = os.preadv(fd, [view[:STEP]], offset)
            except OSError as error:
                error.filename = path
                raise
            if count == 0:
                raise CheckpointError(
                    f"{path} ends at byte {offset}, inside a tensor. Load a different checkpoint."
                )
            yield view[:count]
            view = view[count:]
            offset += count


_libc: Final[Any] = ctypes.CDLL(None)
_local: Final = Local()
