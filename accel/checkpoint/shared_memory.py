"""Where the newest snapshot of a checkpoint lies in memory of a host that outlives its processes: files in ``/dev/shm``.

It is a checkpoint on disks of hosts (``placement.py``) in another place, which follows from the identity of an empty file in the
directory that it belongs to: so whoever removes that directory is rid of it. Directories whose names end in a number are a series
with one such file above them, and one snapshot, the newest.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import stat
from typing import Final

from ..errors import CheckpointError, is_url
from .failures import explain
from .layout import digest
from .storage import MEMORY, storage_of

logger = logging.getLogger("accel")

NUMBER: Final = re.compile(r"\d+\Z")
_MARK: Final = ".accel.memory"
#: The places of snapshots that this process has found or made, and the directories of those that it has made.
seen: Final[dict[str, str]] = {}


def place(directory: str, *, make: bool = False) -> str | None:
    """Where the snapshot of a directory lies on this host, if there is one; None: nowhere.

    Raises:
        CheckpointError: one is to be made, and cannot be.
    """
    parent, name = os.path.split(directory)
    if not NUMBER.search(name):
        return _folder(directory, make)
    folder = _folder(parent, make)
    return folder and os.path.join(folder, name)


def series(root: str) -> list[str]:
    """The names, which end in a number, of the directories in ``root`` of which this host may have snapshots."""
    folder = _folder(root)
    return list(filter(NUMBER.search, os.listdir(folder))) if folder and os.path.isdir(folder) else []


def _folder(directory: str, make: bool = False) -> str | None:
    """What belongs to a directory, in this user's folder, into which nobody else may look; None where there is neither."""
    home, mark = os.path.join(MEMORY, f"accel-{os.geteuid()}"), os.path.join(directory, _MARK)
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(home, 0o700)
            if not is_url(directory):
                storage_of(directory).make(directory)
                os.close(os.open(mark, os.O_CREAT | os.O_NOFOLLOW, 0o666))
        file = None if is_url(directory) else os.lstat(mark)
        status = os.lstat(home)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise CheckpointError(f"{home} is not a directory of this user alone, and others may read it: remove it")
    except (OSError, CheckpointError) as error:
        if make:
            raise CheckpointError(f"in_memory=True needs shared memory in {MEMORY}: {explain(error)}") from error
        return None
    return os.path.join(home, digest([directory] if file is None else [file.st_ino, file.st_mtime_ns]))


@atexit.register
def _say_what_is_left() -> None:
    for where, directory in seen.items():
        if directory:
            logger.warning(
                "the newest checkpoint of %s stays in memory, in %s, until it is saved to disk", directory, where
            )


os.register_at_fork(after_in_child=seen.clear)
