"""Object stores: every store that fsspec has a file system for, by URL.

Nothing is cached, and a request that may work the next time is repeated.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

from ..errors import CheckpointError
from .storage import Content, File, StoreError, check_size, unreadable

logger = logging.getLogger("accel")

#: Seconds before a request is repeated. Most file systems of fsspec repeat some by themselves.
_PAUSES: Final = (0.2, 0.8, 3.2)
#: Bytes of a request that puts an object on a condition, which can't have parts.
_LARGEST: Final = 5 << 30
#: Bytes of a part of an upload. An upload has at most 10,000 parts.
_BLOCK: Final = 16 << 20
#: The protocols of stores without directories.
_FLAT: Final = frozenset(
    ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "cos", "obs", "memory"]
)
#: Statuses of HTTP, numbers of system errors and names of classes that may be gone the next time.
_PASSING_STATUS: Final = frozenset({408, 429, 500, 502, 503, 504})
_PASSING_ERRNO: Final = frozenset({errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.EPIPE, 121})
_PASSING: Final = re.compile(
    "Timeout|Connect|Checksum|Incomplete|Payload|Throttl|ServerDisconnected|HTTPClientError"
    "|ServiceUnavailable"
)
_DENIED: Final = re.compile("Credential|Permission|Authenti|Authoriz|Token|Forbidden")
#: The times of objects, as the file systems of fsspec call them.
_TIMES: Final = ("LastModified", "mtime", "updated", "last_modified", "created")


def remote(url: str) -> Remote:
    """Return the store of a URL. Local: the store is not asked."""
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
            f"{url}: {error} (pip install s3fs for s3://, gcsfs for gs://, adlfs for az://)"
        ) from error
    except Exception as error:
        # A file system that is made around another one raises anything.
        raise CheckpointError(
            f"{url}: fsspec cannot open this by its URL alone ({type(error).__name__}: {error}). "
            "Pass the URL of a store, for example 's3://bucket/run'."
        ) from error


@functools.cache
def _opened(pid: int, protocol: str, options: tuple[tuple[str, Any], ...]) -> Remote:
    """Return one for each process, because a fork has no thread for the connections."""
    from fsspec import filesystem

    fs = filesystem(protocol, use_listings_cache=False, skip_instance_cache=True, **dict(options))
    return Remote(protocol, fs)


# -- errors ----------------------------------------------------------------------------------------


def _as_os_error(error: BaseException, url: str) -> OSError:
    """Return an error of fsspec as an OSError with the URL and advice."""
    text = f"{type(error).__name__}: {str(error).strip() or 'no more is known'}"
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    if missing and not re.search("bucket does|container does", text):
        return FileNotFoundError(errno.ENOENT, "it is not there", url)
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, text, url)
    if _is_denied(error):
        # The next call looks for credentials again.
        _opened.cache_clear()
        advice = "renew the credentials, or ask for the permission to do this"
        return StoreError(0, f"{text}; {advice}", url)
    return StoreError(0, f"{text}; the store, or the way to it, fails", url)


def _cause_of(error: Exception) -> BaseException:
    """Return the cause if a connection failed and the file system (of http) says "not found"."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None:
        return error
    lost = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return cause if lost or getattr(cause, "status", 404) not in (404, 410) else error


def _status(error: BaseException) -> object:
    """Return the status of HTTP, which each library has in a different place."""
    answer = error.__cause__ or error
    response = getattr(answer, "response", None)
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for name in ("status", "status_code", "code"):
        if status := getattr(answer, name, None):
            return status
    return None


def _class_names(error: BaseException) -> str:
    return " ".join(cls.__name__ for cls in type(error).__mro__)


def _is_denied(error: BaseException) -> bool:
    # S3 answers a HEAD with an expired token by "Bad Request" alone.
    vague = getattr(error, "errno", 0) == errno.EINVAL
    if vague and re.search("Bad Request|token", str(error)):
        return True
    return bool(_status(error) == 401 or _DENIED.search(_class_names(error)))


def _is_passing(error: BaseException) -> bool:
    if getattr(error, "errno", -1) in _PASSING_ERRNO or _status(error) in _PASSING_STATUS:
        return True
    return bool(_PASSING.search(_class_names(error)))


# -- the store -------------------------------------------------------------------------------------


@final
class Remote:
    """A file system of fsspec, with the methods of ``storage.Local``."""

    def __init__(self, protocol: str, fs: Any) -> None:
        self._fs = fs
        self._is_s3 = "s3" in protocol
        self._is_flat = protocol in _FLAT
        # Those that are not asynchronous are for one thread: memory's files have one position.
        self._lock: Any = contextlib.nullcontext() if fs.async_impl else threading.RLock()
        self.in_flight = 8 if fs.async_impl else 1

    def ask(self, method: str, url: str, *args: Any, **options: Any) -> Any:
        """Call a method of the file system for a URL."""
        path = self._fs._strip_protocol(url)
        return self._repeat(lambda: getattr(self._fs, method)(path, *args, **options), url)

    def _repeat(self, act: Callable[[], Any], url: str) -> Any:
        for pause in (*_PAUSES, None):
            try:
                with self._lock:
                    return act()
            except (CheckpointError, MemoryError):
                raise
            except Exception as raised:
                error = _cause_of(raised)
                if pause is None or not _is_passing(error):
                    raise _as_os_error(error, url) from raised
                # What the file system repeats by itself may take a minute.
                level = logging.INFO if pause == _PAUSES[0] else logging.WARNING
                logger.log(level, "%s: %s: %s; once more", url, type(error).__name__, error)
                time.sleep(pause * random.uniform(0.5, 1.5))
        raise AssertionError

    def _info(self, url: str) -> dict[str, Any]:
        """Return the store's description of an object or directory; empty if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return dict(self.ask("info", url))
        return {}

    def _listing(self, directory: str) -> dict[str, int]:
        own = self._fs._strip_protocol(directory).strip("/")
        sizes = {}
        with contextlib.suppress(FileNotFoundError):
            for one in self.ask("ls", directory, detail=True):
                name = one["name"].strip("/")
                if name != own:
                    sizes[os.path.basename(name)] = one["size"] or 0
        return sizes

    def names(self, directory: str) -> list[str]:
        return list(self._listing(directory))

    def exists(self, path: str) -> bool:
        return bool(self._info(path))

    def is_directory(self, path: str) -> bool:
        return self._info(path).get("type") == "directory"

    def real(self, path: str) -> str:
        return path

    def sizes(self, directory: str, names: Sequence[str]) -> Iterator[int]:
        listing = self._listing(directory) if names else {}
        for name in names:
            if name not in listing:
                path = os.path.join(directory, name)
                raise FileNotFoundError(errno.ENOENT, "it is not there", path)
            yield listing[name]

    def modified(self, path: str) -> float | None:
        info = self._info(path)
        if info.get("type") != "file":
            return None
        time = next((info[name] for name in _TIMES if info.get(name)), 0.0)
        if isinstance(time, str):
            time = datetime.datetime.fromisoformat(time)
        return time.timestamp() if isinstance(time, datetime.datetime) else float(time)

    def version(self, path: str) -> str:
        info = self._info(path)
        return str(info.get("ETag") or sorted(info.items(), key=str)) if info else ""

    def make(self, directory: str) -> None:
        # Elsewhere it would make a bucket.
        if not self._is_flat:
            self.ask("makedirs", directory, exist_ok=True)

    def sync(self, directory: str) -> None:
        """An object is durable once it is written."""

    def remove_directory(self, directory: str) -> None:
        """An empty one stays, because ``rmdir`` of some file systems removes its content too."""

    @contextlib.contextmanager
    def open(self, path: str, size: int | None = None) -> Iterator[File]:
        info = self._info(path)
        if info.get("type") != "file":
            raise CheckpointError(
                unreadable(FileNotFoundError(errno.ENOENT, "it is not there", path))
            )
        if size is not None:
            check_size(path, int(info["size"]), size)
        yield _Object(self, path, int(info["size"]))

    def create(self, path: str, size: int, content: Content) -> None:
        block = -(-max(_BLOCK, size // 9000) >> 18 << 18)

        def upload() -> None:
            file = self._fs.open(self._fs._strip_protocol(path), "wb", block_size=block)
            try:
                for part in content():
                    file.write(part)
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                with contextlib.suppress(Exception):
                    file.closed = True  # else garbage collection completes the object
                with contextlib.suppress(Exception):
                    self._fs.rm_file(self._fs._strip_protocol(path))
                raise

        self._repeat(upload, path)

    def put(self, path: str, content: bytes, version: str) -> None:
        aborts = self._unfinished_uploads(os.path.dirname(path))
        problem: OSError | None = None
        try:
            self._put_if(path, content, version)
        except OSError as error:
            problem = error
        # A failure may be that of the answer alone, and a proxy may answer for the store.
        if not self._has(path, content):
            text = "it is written, by the answer, and cannot be read back"
            problem = problem or StoreError(0, text, path)
            if isinstance(problem, StoreError) and self.version(path) == version:
                raise problem
            raise FileExistsError(errno.EEXIST, "another record was written", path) from problem
        for abort in aborts:
            with contextlib.suppress(OSError):
                abort()

    def _put_if(self, path: str, content: bytes, version: str) -> None:
        conditions: dict[str, Any] = {} if version else {"mode": "create"}
        if version and self._is_s3:
            conditions = {"IfMatch": version, "chunksize": _LARGEST}
        elif self.version(path) != version:
            raise FileExistsError(errno.EEXIST, "another record was written", path)
        self.ask("pipe_file", path, content, **conditions)

    def _has(self, path: str, content: bytes) -> bool:
        with contextlib.suppress(CheckpointError, OSError):
            return bool(self.ask("cat_file", path) == content)
        return False

    def _unfinished_uploads(self, directory: str) -> list[Callable[[], Any]]:
        """Return functions that abort the uploads of saves that were killed."""
        if not self._is_s3:
            return []
        bucket, key, _ = self._fs.split_path(self._fs._strip_protocol(directory))
        call, where = self._fs.call_s3, {"Bucket": bucket, "Prefix": f"{key}/accel-"}
        try:
            answer = self._repeat(lambda: call("list_multipart_uploads", **where), directory)
        except OSError:  # not all stores have them, nor may everybody look
            return []
        aborts: list[Callable[[], Any]] = []
        for one in answer.get("Uploads", ()):
            upload = {"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]}
            abort = functools.partial(call, "abort_multipart_upload", **upload)
            aborts.append(functools.partial(self._repeat, abort, directory))
        return aborts

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
    """An object, read by ranges."""

    tries = 2

    def __init__(self, store: Remote, path: str, size: int) -> None:
        super().__init__(path, size)
        self._store, self.in_flight = store, store.in_flight

    def fill(self, offset: int, views: Sequence[memoryview]) -> None:
        count = sum(map(len, views))
        if not count:
            return
        content = self._store.ask("cat_file", self.path, start=offset, end=offset + count)
        if len(content) != count:
            raise CheckpointError(
                f"{self.path} has {len(content)} bytes from byte {offset} on, not {count}. "
                "Load another checkpoint."
            )
        for view in views:
            view[:] = content[: len(view)]
            content = content[len(view) :]
