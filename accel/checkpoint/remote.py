"""Object stores: every store that fsspec supports, by URL. Nothing is cached."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

from ..errors import CheckpointError
from .storage import Content, File, StoreError, replaced

#: The minimum bytes per part of an upload. An upload can have at most 10,000 parts.
_BLOCK: Final = 16 << 20
#: The protocols of stores without directories.
_FLAT: Final = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "cos", "memory")


def remote(url: str) -> Remote:
    """Return the store of a URL, without a request to it. Local."""
    protocol = url.partition("://")[0].lower()
    try:
        from fsspec import get_filesystem_class

        options = get_filesystem_class(protocol)._get_kwargs_from_urls(url)
        return _opened(os.getpid(), protocol, tuple(sorted(options.items())))
    except Exception as error:  # file systems that wrap others can raise anything
        raise CheckpointError(
            f"fsspec can't open {url} ({type(error).__name__}: {error}). Pass a URL such as "
            "'s3://bucket/run', and pip install s3fs for s3://, gcsfs for gs://, adlfs for az://."
        ) from error


@functools.cache
def _opened(pid: int, protocol: str, options: tuple[tuple[str, Any], ...]) -> Remote:
    """Return a store per process, because a fork lacks the thread of the connections."""
    from fsspec import filesystem

    fs = filesystem(protocol, use_listings_cache=False, skip_instance_cache=True, **dict(options))
    return Remote(protocol, fs)


def _as_os_error(error: Exception, url: str) -> OSError:
    """Convert an error of fsspec to an OSError with the URL and advice."""
    cause = error.__cause__
    # fsspec's http file system raises FileNotFoundError if it can't reach the server.
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        error = cause
    text = f"{type(error).__name__}: {str(error).strip() or 'no details'}"
    is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    if is_missing and not re.search("bucket does|container does", text):
        return FileNotFoundError(errno.ENOENT, "File not found", url)
    _opened.cache_clear()  # the next call looks for credentials again
    advice = "Check the credentials, the permissions and the connection to the store"
    return StoreError(0, f"{text}. {advice}", url)


@final
class Remote:
    """An fsspec file system with the methods of ``storage.Local``.

    s3fs, gcsfs and adlfs retry failed requests.
    """

    def __init__(self, protocol: str, fs: Any) -> None:
        self._fs = fs
        self._protocol = protocol
        # Synchronous file systems need a lock: all readers of a memory:// file share a position.
        self._lock: Any = contextlib.nullcontext() if fs.async_impl else threading.RLock()
        self._in_flight = 8 if fs.async_impl else 1

    @contextlib.contextmanager
    def _request(self, url: str) -> Iterator[str]:
        """Yield the path of a URL, and convert errors of the file system to OSErrors."""
        try:
            with self._lock:
                yield self._fs._strip_protocol(url)
        except (CheckpointError, MemoryError, NotImplementedError):
            raise
        except Exception as error:
            raise _as_os_error(error, url) from error

    def ask(self, method: str, url: str, *args: Any, **options: Any) -> Any:
        """Call a method of the file system for a URL."""
        with self._request(url) as path:
            return getattr(self._fs, method)(path, *args, **options)

    def _info(self, url: str) -> dict[str, Any]:
        """Return the description of an object or directory, or an empty dict if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return dict(self.ask("info", url))
        return {}

    def is_directory(self, path: str) -> bool:
        return self._info(path).get("type") == "directory"

    def version(self, path: str) -> str:
        info = self._info(path)
        return str(info.get("ETag") or sorted(info.items(), key=str)) if info else ""

    def modified(self, path: str) -> float | None:
        # Web servers may not report times.
        with contextlib.suppress(FileNotFoundError, NotImplementedError):
            time = self.ask("modified", path)
            return float(time.timestamp() if hasattr(time, "timestamp") else time)
        return None

    def sizes(self, directory: str) -> dict[str, int]:
        sizes = {}
        with contextlib.suppress(FileNotFoundError):
            for entry in self.ask("ls", directory, detail=True):
                name = os.path.basename(entry["name"].rstrip("/"))
                sizes[name] = entry["size"] or 0
        return sizes

    names = sizes

    def make(self, directory: str) -> None:
        # In stores without directories, makedirs() would create a bucket.
        if self._protocol not in _FLAT:
            self.ask("makedirs", directory, exist_ok=True)

    def sync(self, directory: str) -> None:
        """Do nothing, because written objects are durable."""

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[File]:
        size, fill = int(self.ask("info", path)["size"]), functools.partial(self._fill, path)
        yield File(path, size, fill, in_flight=self._in_flight, tries=2)

    def _fill(self, path: str, offset: int, views: Sequence[memoryview]) -> Iterator[memoryview]:
        end = offset + sum(map(len, views))
        ask = functools.partial(self.ask, "cat_file", path, start=offset, end=end)
        try:
            content = memoryview(ask())
        except StoreError:  # for example, the network changed bytes
            content = memoryview(ask())
        for view in views:
            view[:] = content[: len(view)]
            yield view
            content = content[len(view) :]

    def create(self, path: str, size: int, content: Content) -> None:
        block = -(-max(_BLOCK, size // 9000) >> 18 << 18)
        with self._request(path) as name:
            file = self._fs.open(name, "wb", block_size=block)
            try:
                for part in content():
                    file.write(part)
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    file.closed = True  # or garbage collection completes the object
                    file.discard()
                raise

    def put(self, path: str, content: bytes, version: str) -> None:
        problem: OSError | None = None
        conditions: dict[str, Any] = {} if version else {"mode": "create"}
        try:
            if version and self._protocol in ("s3", "s3a"):
                # Only a single request can be conditional, so prevent an upload in parts.
                conditions = {"IfMatch": version, "chunksize": 5 << 30}
            elif self.version(path) != version:
                raise replaced(path)
            self.ask("pipe_file", path, content, **conditions)
        except OSError as error:
            problem = error
        # Read it back: a failed request may have succeeded, and a proxy may report false success.
        with contextlib.suppress(CheckpointError, OSError):
            if self.ask("cat_file", path) == content:
                return
        text = "the store accepted the file, but it can't be read back"
        problem = problem or StoreError(0, text, path)
        if self.version(path) == version:
            raise problem
        raise replaced(path) from problem

    def link(self, old: str, new: str) -> None:
        self.ask("cp_file", old, self._fs._strip_protocol(new))

    def rename(self, old: str, new: str) -> None:
        self.link(old, new)
        self.remove(old)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.ask("rm_file", path)
