"""The directories of checkpoints: names, the commit, leftovers of killed saves, the newest one."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable
from typing import Final, final

from ..errors import CheckpointError, is_url, refuse_url
from ..process import rank
from ..process.control import locked
from .background import background
from .record import NAME, Record, encode, is_record, read
from .steps import explain, on_every_rank
from .storage import StoreError, check_size, read_whole, storage_of

logger = logging.getLogger("accel")

#: Only files with these names are ever removed. accel 0.1 wrote some of them.
_OURS: Final = re.compile(
    r"accel-[0-9a-f]{12}-\d{5,}(-still|-apart)?\.safetensors(\.tmp)?"
    r"|\.accel-[0-9a-f]{12}(-\d{5,})?\.(record|done|seen)(\.tmp)?"
    r"|\.accel\.lock"
)
_NUMBER: Final = re.compile(r"\d+\Z")


# -- names -----------------------------------------------------------------------------------------


def named(path: object) -> str:
    """Return a directory or URL as the user means it, or raise for anything else."""
    if path is None:
        raise CheckpointError(
            "expected a directory, found None. accel.latest returns None if there is no checkpoint."
        )
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        kind = "a dict" if isinstance(path, dict) else repr(path)
        raise CheckpointError(
            f"expected the path of a directory, found {kind}. "
            "Write accel.save(state, dir) and accel.load(dir, state)."
        )
    if not is_url(text):
        return os.path.expanduser(refuse_url(text, CheckpointError))
    protocol, _, rest = text.partition("://")
    if protocol.lower() in ("file", "local"):
        return rest if rest.startswith("/") else refuse_url(text, CheckpointError)
    if not rest.strip("/"):
        raise CheckpointError(f"{text} has no bucket. Pass a URL such as 's3://bucket/run'.")
    return f"{protocol.lower()}://{re.sub('//+', '/', rest).rstrip('/')}"


def absolute(path: object) -> str:
    """Return a directory or URL that stays the same if the working directory changes."""
    text = named(path)
    return text if is_url(text) else os.path.abspath(text)


def shard_name(save: str, rank: int) -> str:
    """Return the name of a rank's file."""
    return f"accel-{save}-{rank:05d}.safetensors"


# -- the commit ------------------------------------------------------------------------------------


@final
class Commit:
    """Replaces the record that was in a directory at the beginning, and only that one.

    Until then the checkpoint before can be loaded. All names of a save are new. So if a save is
    killed or two jobs save into one directory, the record names files that are all there.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path = os.path.join(directory, NAME)
        self._storage = storage_of(directory)
        self._version = self._storage.version(self._path)
        # Before anything is written into the directory of another program.
        if self._version and not is_record(self._path):
            raise CheckpointError(
                f"{self._path} has another format: it is not a record of accel. "
                "Save into a different directory."
            )

    def put(self, record: Record, content: bytes = b"", keep: int | None = None) -> None:
        """Make a record that of the directory, and remove the files of the one before."""
        names = self._storage.names(self._directory)
        try:
            self._storage.put(self._path, content or encode(record), self._version)
        except FileExistsError as error:
            raise CheckpointError(
                f"{self._path} is another job's: it has saved there since this save began. "
                "Give each job its own directory."
            ) from error
        # A failure from here on is no failure of the save.
        try:
            sweep(self._directory, names, [file.name for file in record.files])
            if keep is not None:
                prune(self._directory, keep)
        except (OSError, CheckpointError) as error:
            text = "%s is saved, but older files could not be removed: %s"
            logger.warning(text, self._directory, explain(error))


def sweep(directory: str, names: Iterable[str], keep: Iterable[str] = ()) -> None:
    """Remove those of the files that accel has written, except some."""
    kept, storage = {*keep}, storage_of(directory)
    for name in names:
        if _OURS.fullmatch(name) and name not in kept:
            storage.remove(os.path.join(directory, name))


def check_sizes(directory: str, record: Record) -> None:
    """Raise if a file of a checkpoint is missing or has a different size than in the record."""
    names = [file.name for file in record.files]
    sizes = storage_of(directory).sizes(directory, names)
    for file, size in zip(record.files, sizes, strict=True):
        check_size(os.path.join(directory, file.name), size, file.size)


def remove(directory: str) -> None:
    """Remove the checkpoint in a directory, and the directory if nothing else is in it."""
    storage = storage_of(directory)
    names = storage.names(directory)
    # Without its record it is no checkpoint any more.
    storage.remove(os.path.join(directory, NAME))
    storage.sync(directory)
    sweep(directory, names)
    storage.remove_directory(directory)


# -- several checkpoints ---------------------------------------------------------------------------


def check_keep(directory: str, keep: object) -> None:
    """Raise if older checkpoints can't be found or counted."""
    if type(keep) is not int or keep < 1 or not _NUMBER.search(os.path.abspath(directory)):
        raise CheckpointError(
            f"keep={keep!r} for {directory!r}: expected a number of at least 1, and a directory "
            "whose name ends in a number, such as 'ckpt/step-100'."
        )


def _by_age(paths: Iterable[str]) -> list[tuple[float, str]]:
    """Return directories with records and the times of these files, the newest first."""
    found = []
    for path in paths:
        time = storage_of(path).modified(os.path.join(path, NAME))
        if time is not None:
            # Times of object stores have whole seconds.
            number = _NUMBER.search(path)
            found.append((time, int(number[0]) if number else -1, path))
    return [(time, path) for time, _, path in sorted(found, reverse=True)]


def prune(directory: str, keep: int) -> None:
    """Remove the oldest checkpoints of the series of ``directory``, but never that one itself."""
    root, name = os.path.split(directory)
    storage, series = storage_of(root), _NUMBER.sub("", name)
    real, others = storage.real(root), []
    for other in storage.names(root):
        if other not in (name, series) and _NUMBER.sub("", other) == series:
            path = os.path.join(root, other)
            # Only directories, not links to a checkpoint that shall stay.
            if storage.real(os.path.join(real, other)) == os.path.join(real, other):
                others.append(path)
    for _, path in _by_age(others)[keep - 1 :]:
        with contextlib.suppress(CheckpointError):
            remove(path)


def latest(root: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint in ``root``, or ``root`` itself, or None. Local.

    Args:
        root: a directory of checkpoints, which need not exist. A checkpoint that is damaged or not
            complete is passed over, with a warning that names it.

    Raises:
        CheckpointError: ``root`` can't be read.
    """
    background.wait()
    path = named(root)
    try:
        names = storage_of(path).names(path)
        newest = _by_age([path, *(os.path.join(path, name) for name in names)])
    except (FileNotFoundError, NotADirectoryError):
        newest = []
    except OSError as error:
        raise CheckpointError(f"{path} may be a checkpoint: {explain(error)}") from error
    best: tuple[float, str] | None = None
    for time, one in newest:
        # A record is as old as its file or, if it was linked or copied, older.
        if best is not None and time + 1 < best[0]:
            break
        record = _complete(one)
        if record is not None and (best is None or record.time > best[0]):
            best = record.time, one
    return None if best is None else best[1]


def _complete(directory: str) -> Record | None:
    """Return the record of a checkpoint that can be loaded. Warns of one that can't."""
    path = os.path.join(directory, NAME)
    version = ""
    try:
        version = storage_of(path).version(path)
        if not version:
            return None
        record = read(directory)
        check_sizes(directory, record)
        return record
    except (CheckpointError, OSError, MemoryError) as error:
        if isinstance(error, StoreError) or isinstance(error.__cause__, StoreError):
            raise CheckpointError(f"{directory} may be a checkpoint: {explain(error)}") from error
        # A save may have replaced it in between.
        if version and storage_of(path).version(path) not in ("", version):
            return _complete(directory)
        logger.warning("%s is passed over: %s", directory, explain(error))
        return None


@locked
def link(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
    """Make ``dst`` a second name of the checkpoint ``src``. Collective.

    Its files are linked, so either directory can be removed. A checkpoint in ``dst`` is replaced.

    Raises:
        CheckpointError: ``src`` is not a complete checkpoint, or ``dst`` can't be written.
    """

    def act() -> None:
        background.wait()
        if rank() == 0:
            _link(absolute(src), absolute(dst))

    on_every_rank("accel.link", act)


def _link(src: str, dst: str) -> None:
    storage = storage_of(dst)
    if storage_of(src) is not storage:
        raise CheckpointError(
            f"{src} can't be linked to {dst}: both must be in one store, or on one file system."
        )
    record = read(src)
    check_sizes(src, record)
    if storage.real(src) == storage.real(dst):
        return
    commit = Commit(dst)
    storage.make(dst)
    for file in record.files:
        storage.link(os.path.join(src, file.name), os.path.join(dst, file.name))
    storage.sync(dst)
    check_sizes(dst, record)
    commit.put(record, read_whole(os.path.join(src, NAME)))
