"""Object stores, through fsspec: whatever it has a filesystem for, by URL.

An object is there whole or not at all, and nothing keeps another job out. So a save claims nothing: it remembers which record
it found, and its own is put only where that one still is (``Turn``). All names of a save are its own, and what it sweeps
afterwards was there before its record, so that nobody can commit it any more.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, final

from ..errors import CheckpointError
from .storage import RECORD, Claim, File, StoreError, Write, check_size, unreadable

logger = logging.getLogger("accel")

_PAUSES: Final = (
    0.2,
    0.8,
    3.2,
)  # seconds before a request is tried again; most filesystems try by themselves, too
_LARGEST: Final = 5 << 30  # bytes of one request; what is put on a condition is put by one
_BLOCK: Final = 16 << 20  # bytes of a part of an upload, of which there may be 10,000
_GAP: Final = (
    1 << 20
)  # bytes that are read in vain rather than asking twice; so much of a file's beginning is kept
#: Have no directories, by their protocols.
_FLAT: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "cos", "obs", "memory"}
)
_LATER: Final = frozenset(
    {408, 429, 500, 502, 503, 504}
)  # answers of a server, or of what is in front of it
_BUSY: Final = frozenset(
    {
        errno.EBUSY,
        errno.EAGAIN,
        errno.ETIMEDOUT,
        errno.EPIPE,
        getattr(errno, "EREMOTEIO", errno.EBUSY),
    }
)
#: In names of classes, of the error or above it.
_PASSING: Final = re.compile(
    "Timeout|Connect|Checksum|Incomplete|Payload|Throttl|ServerDisconnected|HTTPClientError|ServiceUnavailable"
)
_DENIED: Final = re.compile("Credential|Permission|Authenti|Authoriz|Token|Forbidden")


def remote(url: str) -> Remote:
    """The store of a URL. Local: asks nothing of it."""
    try:
        from fsspec import get_filesystem_class
    except ImportError as error:
        raise CheckpointError(f"{url} needs fsspec: pip install 'fsspec>=2025.3'") from error
    protocol = url.partition("://")[0].lower()
    try:
        options = get_filesystem_class(protocol)._get_kwargs_from_urls(url)
        return _opened(os.getpid(), protocol, tuple(sorted(options.items())))
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"{url}: {error} (pip install it: s3fs for s3://, gcsfs for gs://, adlfs for az://)"
        ) from error
    except Exception as error:  # of one that is made around another file system, anything
        raise CheckpointError(
            f"{url}: fsspec cannot open this by its URL alone ({type(error).__name__}: {error}); expected the URL of a store, "
            "as 's3://bucket/run'"
        ) from error


@functools.cache
def _opened(pid: int, protocol: str, options: tuple[tuple[str, Any], ...]) -> Remote:
    """Return one for each process, because a forked process doesn't have the thread of the connections."""
    from fsspec import filesystem

    return Remote(
        protocol,
        filesystem(protocol, use_listings_cache=False, skip_instance_cache=True, **dict(options)),
    )


def _kinds(error: BaseException) -> str:
    return " ".join(cls.__name__ for cls in type(error).__mro__)


def _named(error: BaseException, url: str) -> OSError:
    """The same as an OSError of this URL."""
    text = f"{type(error).__name__}: {str(error).strip() or 'no more is known'}"
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not re.search(
        "bucket does|container does", text
    ):
        return FileNotFoundError(errno.ENOENT, "it is not there", url)
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, text, url)
    if _is_denied(error):
        _opened.cache_clear()  # the next request of another call looks for credentials again
        return StoreError(
            0, f"{text}; renew the credentials, or ask for the permission to do this", url
        )
    return StoreError(0, f"{text}; the store, or the way to it, fails", url)


def _meant(error: Exception) -> BaseException:
    """An error, or what it came of: some filesystems (of http) call missing what they could not ask for."""
    cause = error.__cause__
    lost = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    if isinstance(error, FileNotFoundError) and (
        lost or getattr(cause, "status", 404) not in (404, 410)
    ):
        assert cause is not None
        return cause
    return error


def _status(error: BaseException) -> object:
    """The answer of HTTP that an error came of, where each library has it."""
    answer = error.__cause__ or error
    if isinstance(found := getattr(answer, "response", None), dict):
        return found.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return next(
        (
            found
            for name in ("status", "status_code", "code")
            if (found := getattr(answer, name, None))
        ),
        None,
    )


def _is_denied(error: BaseException) -> bool:
    """Whether the credentials are to blame: of a token that has expired S3 says no more to a HEAD than "Bad Request"."""
    vague = getattr(error, "errno", 0) == errno.EINVAL and re.search(
        "Bad Request|token", str(error)
    )
    return bool(vague or _status(error) == 401 or _DENIED.search(_kinds(error)))


def _is_passing(error: BaseException) -> bool:
    """Whether it may be well the next time."""
    known = getattr(error, "errno", -1) in _BUSY or _status(error) in _LATER
    return known or bool(_PASSING.search(_kinds(error)))


@final
class Remote:
    """A filesystem of fsspec. Nothing is cached, and each request is tried again where that may help."""

    def __init__(self, protocol: str, fs: Any) -> None:
        self._fs = fs
        self.conditional = "s3" in protocol
        self._flat = protocol in _FLAT
        #: Those that are not asynchronous are for one thread; memory's files even have one place that is read next.
        self._turn: Any = contextlib.nullcontext() if fs.async_impl else threading.RLock()
        self.in_flight = 8 if fs.async_impl else 1

    def ask(self, what: str, url: str, *args: Any, **options: Any) -> Any:
        """What a method of the filesystem returns for a path."""
        return self._again(
            lambda: getattr(self._fs, what)(self._fs._strip_protocol(url), *args, **options), url
        )

    def _again(self, act: Callable[[], Any], url: str) -> Any:
        for pause in (*_PAUSES, None):
            try:
                with self._turn:
                    return act()
            except (CheckpointError, MemoryError):
                raise
            except Exception as raised:
                error = _meant(raised)
                if pause is None or not _is_passing(error):
                    raise _named(error, url) from raised
                # The second time what the filesystem tries by itself has taken a minute, perhaps.
                level = logging.INFO if pause == _PAUSES[0] else logging.WARNING
                logger.log(level, "%s: %s: %s; once more", url, type(error).__name__, error)
                time.sleep(pause * random.uniform(0.5, 1.5))
        raise AssertionError

    def info(self, url: str) -> dict[str, Any] | None:
        """What the store says of an object or a directory; None where there is none."""
        with contextlib.suppress(FileNotFoundError):
            found: dict[str, Any] = self.ask("info", url)
            return found
        return None

    def real(self, path: str) -> str:
        return path

    def names(self, directory: str) -> list[str]:
        return list(self._listing(directory))

    def _listing(self, directory: str) -> dict[str, int]:
        own, found = self._fs._strip_protocol(directory), {}
        with contextlib.suppress(FileNotFoundError):
            found = {
                one["name"].rstrip("/"): one["size"] or 0
                for one in self.ask("ls", directory, detail=True)
            }
        return {
            os.path.basename(name): size
            for name, size in found.items()
            if name.strip("/") != own.strip("/")
        }

    def exists(self, path: str) -> bool:
        return self.info(path) is not None

    def is_directory(self, path: str) -> bool:
        return (self.info(path) or {}).get("type") == "directory"

    def size(self, path: str) -> int:
        found = self.info(path) or {}
        if found.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, "it is not there", path)
        return int(found["size"])

    def sizes(self, directory: str, names: Sequence[str]) -> Iterator[int]:
        listing = self._listing(directory) if names else {}
        for name in names:
            if name not in listing:
                raise FileNotFoundError(
                    errno.ENOENT, "it is not there", os.path.join(directory, name)
                )
            yield listing[name]

    def identity(self, path: str) -> Hashable:
        return str(self.ask("ukey", path))

    def make(self, directory: str) -> None:
        """Most have none, only names that begin alike: there it would make a bucket, if anything."""
        if not self._flat:
            self.ask("makedirs", directory, exist_ok=True)

    def sync(self, directory: str) -> None:
        """What has been put is durable."""

    def remove_directory(self, directory: str) -> None:
        """An empty one may stay: what some filesystems call ``rmdir`` takes all that is in it, too."""

    def claim(self, directory: str) -> Claim:
        return Turn(self, directory)

    @contextlib.contextmanager
    def open(self, path: str, size: int | None) -> Iterator[File]:
        try:
            found = self.size(path)
        except FileNotFoundError as error:
            raise CheckpointError(unreadable(error)) from error
        if size is not None:
            check_size(path, found, size)
        yield _Object(self, path, found)

    def create(self, path: str, size: int, header: int, content: Callable[[Write], bytes]) -> bytes:
        first = content(lambda part: None) if header else b""  # an upload begins with it
        block = -(-max(_BLOCK, size // 9000) >> 18 << 18)

        def upload() -> None:
            file = self._fs.open(self._fs._strip_protocol(path), "wb", block_size=block)
            try:
                file.write(first)
                if content(file.write) != first:
                    raise CheckpointError(
                        f"{path}: its tensors have changed while they were written"
                    )
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                with contextlib.suppress(Exception):
                    file.closed = True  # else it would be closed when it is collected, and what there is of it be kept
                with contextlib.suppress(Exception):
                    self._fs.rm_file(self._fs._strip_protocol(path))
                raise

        self._again(upload, path)
        return first

    def holds(self, path: str, content: bytes) -> bool:
        """Whether an object surely is this."""
        with contextlib.suppress(CheckpointError, OSError):
            return bool(self.ask("cat_file", path) == content)
        return False

    def unfinished(self, directory: str) -> list[Callable[[], Any]]:
        """What ends each upload of accel's that has begun there, as dead saves have left them."""
        if not self.conditional:
            return []
        bucket, key, _ = self._fs.split_path(self._fs._strip_protocol(directory))
        call, where = self._fs.call_s3, {"Bucket": bucket, "Prefix": f"{key}/accel-"}
        try:
            found = self._again(lambda: call("list_multipart_uploads", **where), directory).get(
                "Uploads", ()
            )
        except OSError:  # not all stores have them, nor may everybody look
            return []
        ends = [{"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]} for one in found]
        abort = functools.partial(call, "abort_multipart_upload")
        return [
            functools.partial(self._again, functools.partial(abort, **end), directory)
            for end in ends
        ]

    def link(self, old: str, new: str) -> None:
        self.ask("cp_file", old, self._fs._strip_protocol(new))

    def rename(self, old: str, new: str) -> None:
        self.link(old, new)
        self.remove(old)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.ask("rm_file", path)


@final
class _Object(File):
    """Read by ranges, those that lie close to each other in one request."""

    tries = 2

    def __init__(self, store: Remote, path: str, size: int) -> None:
        super().__init__(path, size)
        self._store, self.in_flight = store, store.in_flight
        self._first = b""

    def fill(self, ranges: Sequence[tuple[int, list[memoryview]]]) -> None:
        begin = end = 0
        near: list[tuple[int, memoryview]] = []
        for offset, views in ranges:
            if near and offset > end + _GAP:
                self._take(begin, end, near)
                near = []
            begin = begin if near else offset
            end = offset
            for view in views:
                near.append((end, view))
                end += len(view)
        self._take(begin, end, near)

    def _take(self, begin: int, end: int, wanted: Sequence[tuple[int, memoryview]]) -> None:
        if begin == 0 and not self._first:
            self._first = self._bytes(0, min(self.size, max(end, _GAP)))
        content = self._first[begin:end] if end <= len(self._first) else self._bytes(begin, end)
        for at, view in wanted:
            view[:] = content[at - begin : at - begin + len(view)]

    def _bytes(self, begin: int, end: int) -> bytes:
        if end > self.size:
            raise CheckpointError(
                f"{self.path}: ends at byte {self.size}, in the middle of a tensor; load another checkpoint"
            )
        content: bytes = (
            self._store.ask("cat_file", self.path, start=begin, end=end) if end > begin else b""
        )
        if len(content) != end - begin:
            raise CheckpointError(
                f"{self.path}: the store gave {len(content)} bytes from byte {begin} on, not {end - begin}"
            )
        return content


@final
class Turn:
    """The record that a save has found: its own replaces just that one."""

    exclusive = False

    def __init__(self, store: Remote, directory: str) -> None:
        self._store, self._directory, self._record = (
            store,
            directory,
            os.path.join(directory, RECORD),
        )
        self._seen = self._version()

    def _version(self) -> str:
        found = self._store.info(self._record)
        return str(found.get("ETag") or sorted(found.items(), key=str)) if found else ""

    def commit(self, content: bytes) -> None:
        path = self._record
        left = self._store.unfinished(self._directory)
        problem = self._put(content)
        # What failed may have been the answer alone; and what says that all is well may not be the store.
        if not self._store.holds(path, content):
            problem = problem or StoreError(
                0, "it is written, by the answer, and cannot be read back", path
            )
            if isinstance(problem, StoreError) and self._version() == self._seen:
                raise problem
            raise CheckpointError(
                f"{path} is another job's: it has saved there since this save began; give each job a directory of its own, or "
                "end the other"
            ) from problem
        for abort in left:
            with contextlib.suppress(OSError):
                abort()

    def _put(self, content: bytes) -> OSError | None:
        conditions: dict[str, Any] = {} if self._seen else {"mode": "create"}
        if self._seen and self._store.conditional:
            conditions = {"IfMatch": self._seen, "chunksize": _LARGEST}
        elif self._version() != self._seen:
            return FileExistsError(errno.EEXIST, "there is another record", self._record)
        try:
            self._store.ask("pipe_file", self._record, content, **conditions)
        except OSError as error:
            return error
        return None

    def release(self) -> None:
        """Nothing was taken."""

    remove = release
