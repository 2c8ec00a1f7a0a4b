"""Tensors that did not change since an earlier checkpoint of this process are linked, not written again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from .header import arrange, build
from .shards import Source, Written, checksum, checksums_of, data_checksums

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
