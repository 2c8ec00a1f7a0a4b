"""Where the newest snapshot of a checkpoint lies in memory of a host that outlives its processes: files in ``/dev/shm``.

It is a checkpoint on disks of hosts (``placement.py``) in another place, which follows from name and identity of the directory
that it belongs to: so none is found by another directory of that name, nor by one that was made after that was removed. Those that
differ in the number at the end of their names are a series, and share a place. Its record says whose it is.
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
from . import record
from .failures import explain
from .layout import digest
from .storage import MEMORY, storage_of

logger = logging.getLogger("accel")

NUMBER: Final = re.compile(r"\d+\Z")
#: By place: the save of which this process has made or seen a snapshot there; and the directory, where it is newer than what is on disk.
known: Final[dict[str, str]] = {}
left: Final[dict[str, str]] = {}


def place(directory: str, *, make: bool = False) -> str | None:
    """Where the snapshot of a directory, or of another one of its series, lies on this host, if there is one; None: nowhere.

    Raises:
        CheckpointError: one is to be made, and cannot be.
    """
    directory = directory if is_url(directory) else os.path.abspath(directory)
    parent, name = os.path.split(directory)
    if not NUMBER.search(name):
        return _folder(directory, make)
    folder = _folder(parent, make)
    return folder and os.path.join(folder, NUMBER.sub("0", name))


def name_of(directory: str) -> str:
    """That the record of its snapshot has."""
    return os.path.basename(directory if is_url(directory) else os.path.abspath(directory))


def series(root: str) -> list[str]:
    """The directories in ``root``, of names that end in a number, of which this host has snapshots."""
    folder = _folder(root if is_url(root) else os.path.abspath(root), False)
    found = []
    for name in os.listdir(folder) if folder and os.path.isdir(folder) else ():
        with contextlib.suppress(CheckpointError):  # there is none, or it is damaged
            found.append(os.path.join(root, record.read(os.path.join(str(folder), name))[0].name))
    return found


def _folder(directory: str, make: bool) -> str | None:
    """What belongs to a directory, in this user's folder, into which nobody else may look; None where there is neither."""
    home = os.path.join(MEMORY, f"accel-{os.geteuid()}")
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(home, 0o700)
        status = os.lstat(home)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise CheckpointError(
                f"{home} is not a directory of this user alone: whoever made it can read it; remove it"
            )
        identity: tuple[object, ...] = ()
        if not is_url(directory):
            if make:
                storage_of(directory).make(directory)
            status = os.stat(directory)
            identity = os.path.realpath(directory), status.st_dev, status.st_ino
    except (OSError, CheckpointError) as error:
        if make:
            raise CheckpointError(f"in_memory=True needs shared memory in {MEMORY}: {explain(error)}") from error
        return None
    return os.path.join(home, digest([directory, *identity] if is_url(directory) else identity))


def _say_what_is_left() -> None:
    for where, directory in left.items():
        logger.warning(
            "the newest checkpoint of %s is in the memory of this host alone, in %s, until the host starts anew: a save to disk "
            "(accel.save without in_memory=True) keeps it, and frees the memory",
            directory,
            where,
        )


atexit.register(_say_what_is_left)
os.register_at_fork(after_in_child=left.clear)
