"""The bytes of shard files: written with checksums and early write-out, or linked where they are on disk; read by ranges."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Final, TypeVar, final

import torch
import xxhash

from ..errors import CheckpointError
from .failures import explain, naming
from .safetensors import CHUNK, DIGITS, ITEM_BYTES, MAX_HEADER, Entry, build_header, chunks_of, is_lazy, memory, resolve
from .transfer import PIECE, on_host

_WRITE: Final = 8 << 20  # bytes of one write, after which the kernel is asked to begin writing out
_MAX_VECTORS: Final = 512
_SMALL: Final = 256 << 10  # bytes that are copied rather than written by a call of their own
_START_WRITING: Final = 2  # SYNC_FILE_RANGE_WRITE


@dataclass(frozen=True, slots=True)
class WriteItem:
    """An entry of a file to be, and the tensor that holds it from element ``offset`` on."""

    entry: Entry
    tensor: torch.Tensor
    offset: int

    def pieces(self) -> Iterable[torch.Tensor]:
        """Its elements, as ``pieces`` gives them."""
        return pieces(self.tensor, self.offset, self.offset + self.entry.count)


@dataclass(frozen=True, slots=True)
class CopiedItem:
    """The same where the elements were copied: flat tensors on the CPU, one after the other."""

    entry: Entry
    copies: Sequence[torch.Tensor]

    def pieces(self) -> Iterable[torch.Tensor]:
        """The copies."""
        return self.copies


#: What a file is made of.
Item = WriteItem | CopiedItem
AnyItem = TypeVar("AnyItem", WriteItem, Item)


@dataclass(frozen=True, slots=True)
class Written:
    """What the record says of a file: its name, its size, and the checksums of its header's chunks."""

    name: str
    size: int
    header: tuple[str, ...]


def checksum(data: bytes | memoryview) -> str:
    """XXH3-64 of some bytes, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def checksum_of(parts: Iterable[bytes | memoryview]) -> str:
    """The same of bytes that come in parts, which need not be there at once."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def checksums_of(data: bytes | memoryview) -> tuple[str, ...]:
    """Of each chunk."""
    view = memoryview(data)
    return tuple(checksum(view[at : at + CHUNK]) for at in range(0, len(view), CHUNK))


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


_FULL: Final = frozenset({errno.EFBIG, errno.ENOSPC, errno.EDQUOT})


def pieces(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Elements ``start`` to ``stop`` in row-major order, as flat contiguous tensors where they are; copies are small."""
    if start >= stop:
        return
    step = PIECE // tensor.element_size()
    if tensor.is_contiguous() and not is_lazy(tensor):
        yield tensor.view(-1)[start:stop]
    elif tensor.numel() <= step:
        # reshape() of one dimension is a view, which may skip elements.
        yield resolve(tensor).reshape(-1)[start:stop].contiguous()
    else:
        row = tensor.numel() // tensor.shape[0]
        rows = max(1, step // row)
        for at in range(start // row, -(-stop // row), rows):
            block = tensor[at : at + rows] if rows > 1 else tensor[at]
            first = at * row
            yield from pieces(block, max(start - first, 0), min(stop - first, block.numel()))


class _Stream:
    """Data on its way into a file, or without one only hashed: by chunk."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._small = bytearray()  # what is written together
        self._hash = xxhash.xxh3_64()
        self._room = CHUNK
        self._checksums: list[str] = []

    def add(self, piece: torch.Tensor) -> None:
        """Take all of it."""
        data = memory(piece)
        for at in range(0, len(data), _WRITE):
            self._checksum(data[at : at + _WRITE])
            if self._fd is not None:
                self._write(self._fd, data[at : at + _WRITE])

    def _checksum(self, part: memoryview) -> None:
        while len(part) >= self._room:
            self._hash.update(part[: self._room])
            self._checksums.append(self._hash.hexdigest())
            self._hash.reset()
            part, self._room = part[self._room :], CHUNK
        self._hash.update(part)
        self._room -= len(part)

    def _write(self, fd: int, part: memoryview) -> None:
        """Small parts are gathered, so that one call writes many of them."""
        if len(part) < _SMALL and len(self._small) < _WRITE:
            self._small += part
            return
        _write_out(fd, self._small)
        _write_out(fd, part)
        self._small = bytearray()

    def close(self) -> str:
        """Write the rest; returns the checksums of all chunks, of which the last ends here."""
        if self._fd is not None:
            _write_out(self._fd, self._small)
        if self._room < CHUNK:
            self._checksums.append(self._hash.hexdigest())
        return "".join(self._checksums)


def _write_out(fd: int, data: bytearray | memoryview) -> None:
    """Write, and let the kernel begin to write out: waiting for the disk only at the end would leave it idle until then."""
    begin = os.lseek(fd, 0, os.SEEK_CUR)
    write_all(fd, data)
    if data and hasattr(_libc(), "sync_file_range"):
        _libc().sync_file_range(fd, ctypes.c_longlong(begin), ctypes.c_longlong(len(data)), _START_WRITING)


@contextlib.contextmanager
def new_file(path: str, flags: int = os.O_EXCL) -> Iterator[int]:
    """Context: a new file, which is durable afterwards, and removed after an error. An OSError names it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
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


def _arranged(items: Sequence[AnyItem]) -> list[AnyItem]:
    """In the order of a file: wide elements first, so that all are aligned."""
    return sorted(items, key=lambda item: -ITEM_BYTES[item.entry.dtype])


def _header(items: Sequence[Item], checksums: str) -> bytes:
    return build_header([item.entry for item in items], {"accel": "1", "xxh3": checksums})


def write(directory: str, name: str, items: Sequence[Item]) -> Written:
    """Write and fsync a new file of ``items``; after an OSError it is removed."""
    items = _arranged(items)
    size = sum(item.entry.nbytes for item in items)
    blank = "0" * (DIGITS * chunks_of(size))  # the checksums are known last, and as long
    header = _header(items, blank)
    path = os.path.join(directory, name)
    with new_file(path) as fd:
        reserve(fd, len(header) + size)
        os.lseek(fd, len(header), os.SEEK_SET)
        header = header.replace(blank.encode(), _stream(items, fd).encode(), 1)
        if os.pwrite(fd, header, 0) != len(header):
            raise OSError(errno.ENOSPC, "the header was written only in part")
    return Written(name, len(header) + size, checksums_of(header))


def _stream(items: Sequence[Item], fd: int | None) -> str:
    """Write the items' data into a file, where one is given; returns the checksums that belong into its header."""
    stream = _Stream(fd)
    for piece in on_host(chain.from_iterable(item.pieces() for item in items)):
        stream.add(piece)
    return stream.close()


# -- Unchanged tensors: a file of an earlier save of this process gets a second name, and is not written again ---------

_REMEMBERED: Final = 16


def _identity(path: str) -> tuple[int, ...]:
    """Of a file that this process wrote; were it written to since, its inode or time would tell."""
    status = os.lstat(path)
    return status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns


@final
class EarlierFiles:
    """Files of earlier saves, by the checksums of their headers, which hold those of all that is in them."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, ...], tuple[str, tuple[int, ...]]] = {}
        #: By the names of several tensors, where they lay, and how often they had been written to.
        self._versions: dict[str, list[tuple[int, int]]] = {}

    def remember(self, directory: str, written: Written) -> None:
        """Note a file that can be linked next time."""
        path = os.path.join(directory, written.name)
        self._files.pop(written.header, None)
        self._files[written.header] = path, _identity(path)
        while len(self._files) > _REMEMBERED:
            self._files.pop(next(iter(self._files)))

    def link(self, directory: str, name: str, items: Sequence[WriteItem]) -> Written | None:
        """Give a file of an earlier save that holds just these items a second name; None if there is none."""
        if not items or not self._files:
            return None
        items = _arranged(items)
        header = checksums_of(_header(items, _stream(items, None)))
        old, identity = self._files.get(header, ("", ()))
        path = os.path.join(directory, name)
        # Where it is gone, was changed, or cannot be linked from there, the tensors are written again.
        with contextlib.suppress(OSError):
            if old and _identity(old) == identity:
                os.link(old, path, follow_symlinks=False)
                if os.lstat(path).st_size == identity[0]:
                    return Written(name, identity[0], header)
                os.unlink(path)
        return None

    def written_since(self, items: Sequence[WriteItem]) -> bool:
        """Whether a tensor was surely written to since it was asked for last; also where not, only its values tell."""
        names = checksum(_header(items, ""))
        versions = [(i.tensor.data_ptr(), 0 if i.tensor.is_inference() else i.tensor._version) for i in items]
        before = self._versions.pop(names, versions)
        self._versions[names] = versions
        while len(self._versions) > _REMEMBERED:
            self._versions.pop(next(iter(self._versions)))
        return any(old[0] == new[0] and old[1] != new[1] for old, new in zip(before, versions, strict=True))


earlier_files: Final = EarlierFiles()


# -- Reading -----------------------------------------------------------------------------------------------------------


def unreadable(error: OSError) -> str:
    """What to say of a file of a checkpoint that cannot be read."""
    missing = error.errno in (errno.ENOENT, errno.ELOOP)
    return f"{explain(error)}{'; the checkpoint is not complete, load another one' if missing else ''}"


@contextlib.contextmanager
def open_file(path: str, size: int | None) -> Iterator[int]:
    """Context: a regular file for reading, not through a link; raises where it is missing, something else, or not of ``size``."""
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
            yield fd
    finally:
        os.close(fd)


def check_size(path: str, found: int, written: int) -> None:
    """Refuse a file of a checkpoint that has another size than the record says."""
    if found != written:
        raise CheckpointError(
            f"{path}: has {found} bytes, and {written} were written; it was cut or changed, load another checkpoint"
        )


def write_all(fd: int, content: bytes | bytearray | memoryview) -> None:
    """Write all of it."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def read_into(fd: int, path: str, views: list[memoryview], offset: int) -> None:
    """Fill ``views`` with the bytes from ``offset`` on; raises where the file ends before."""
    views, at = [view for view in views if view], 0
    while at < len(views):
        try:
            count = os.preadv(fd, views[at : at + _MAX_VECTORS], offset)
        except OSError as error:
            error.filename = path
            raise CheckpointError(unreadable(error)) from error
        if count == 0:
            raise CheckpointError(f"{path}: ends at byte {offset}, in the middle of a tensor; load another checkpoint")
        offset += count
        while at < len(views) and count >= len(views[at]):
            count -= len(views[at])
            at += 1
        if count:  # the rest of a view that was filled in part
            views = [views[at][count:], *views[at + 1 :]]
            at = 0


def read_header(fd: int, path: str) -> bytearray:
    """The first bytes of a safetensors file up to its data; none where it has not as many as they say."""
    size, length = os.fstat(fd).st_size, 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
    content = bytearray(length if length <= min(size, MAX_HEADER + 8) else 0)
    read_into(fd, path, [memoryview(content)], 0)
    return content


def read_whole(path: str, limit: int, kind: str) -> bytes:
    """A small file; raises where it is missing, or too large for ``kind`` (a record, say)."""
    with open_file(path, None) as fd:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes are too many for {kind}")
        content = bytearray(size)
        read_into(fd, path, [memoryview(content)], 0)
    return bytes(content)
