"""Checkpoint directories: names, commit, removal of old files, the newest."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ..errors import CheckpointError, is_url, refuse_url
from ..process import rank
from .background import background
from .reader import BoxReader
from .record import NAME, OTHER, Record, encode, is_record, read
from .steps import explain, log_end, on_every_rank, on_running_ranks
from .storage import StoreError, read_whole, storage_of

logger = logging.getLogger("accel")

#: Only files with these names are ever removed. Some names are from old versions.
_OURS: Final = re.compile(
    r"accel-[0-9a-f]{12}-\d{5,}(-still|-apart)?\.safetensors"
    r"|\.accel-[0-9a-f]{12}\.record|\.accel\.lock"
)
_NUMBER: Final = re.compile(r"\d+\Z")


def named(path: object) -> str:
    """Return a normalized directory or URL. Raise for anything else."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        # accel.latest() may have returned None. A dict means that the arguments are swapped.
        raise CheckpointError(
            f"expected the path of a directory, found a {type(path).__name__}. "
            "Write accel.save(state, dir) and accel.load(dir, state)."
        )
    if not is_url(text):
        return os.path.expanduser(refuse_url(text, CheckpointError))
    protocol, _, rest = text.partition("://")
    if protocol.lower() in ("file", "local"):
        return rest if rest.startswith("/") else refuse_url(text, CheckpointError)
    return f"{protocol.lower()}://{re.sub('//+', '/', rest).rstrip('/')}"


def absolute(path: object) -> str:
    """Return an absolute path or URL, because the working directory may change."""
    text = named(path)
    return text if is_url(text) else os.path.abspath(text)


# -- the commit ------------------------------------------------------------------------------------

# You can load the earlier checkpoint until the commit, because a save only adds files with new
# names. So all files in the record exist, even if a save is killed or two jobs share a directory.


def version_of(directory: str) -> str:
    """Return the version of the record in a directory, for ``commit``."""
    path = os.path.join(directory, NAME)
    version = storage_of(path).version(path)
    # Raise before the save writes into a directory of a different program.
    if version and not is_record(path):
        raise CheckpointError(f"{path} was not written by accel. Save to a different directory.")
    return version


def commit(directory: str, version: str, record: Record, content: bytes = b"") -> list[str]:
    """Replace the record if it has this version. Return paths to remove."""
    try:
        names = check_sizes(directory, record)
    except CheckpointError as error:
        raise CheckpointError(
            "Rank 0 can't see the complete file of every rank. Save to a directory that only "
            f"this job uses, on a file system that all nodes share ({error})"
        ) from error
    storage_of(directory).put(os.path.join(directory, NAME), content or encode(record), version)
    for file in record.files:
        names.pop(file.name)
    return _our_files(directory, names)


def _our_files(directory: str, names: Iterable[str]) -> list[str]:
    return [os.path.join(directory, name) for name in sorted(filter(_OURS.fullmatch, names))]


def remove(directory: str, paths: Sequence[str]) -> None:
    """Remove old files, and then empty directories except ``directory``."""
    with _warning(directory):
        for path in paths:
            storage_of(path).remove(path)
    for other in {*map(os.path.dirname, paths)} - {directory}:
        # It may contain other files, and object stores have no directories.
        with contextlib.suppress(OSError):
            os.rmdir(other)


@contextlib.contextmanager
def _warning(directory: str) -> Iterator[None]:
    """Log errors, because the checkpoint is already committed."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        text = "%s is saved, but older files could not be removed: %s"
        logger.warning(text, directory, explain(error))


def check_sizes(directory: str, record: Record) -> dict[str, int]:
    """Raise if a file is missing or truncated. Return the sizes of all files."""
    sizes = storage_of(directory).sizes(directory)
    for file in record.files:
        path, size = os.path.join(directory, file.name), sizes.get(file.name)
        if size != file.size:
            state = "is missing" if size is None else f"was truncated or changed to {size} bytes"
            raise CheckpointError(f"{path} {state}: the checkpoint is not complete. {OTHER}")
    return sizes


def check_keep(directory: str, keep: object) -> None:
    """Raise if older checkpoints can't be found or counted."""
    if type(keep) is not int or keep < 1 or not _NUMBER.search(os.path.abspath(directory)):
        raise CheckpointError(
            f"keep={keep!r} for {directory!r}: expected a positive integer, and a directory with "
            "a number at the end, such as 'ckpt/step-100'."
        )


def _by_age(paths: Iterable[str]) -> list[tuple[float, int, str]]:
    """Return each directory's time, number and path, newest first."""
    ages = []
    for path in paths:
        time = storage_of(path).modified(os.path.join(path, NAME))
        if time is not None:
            # Object stores have times in whole seconds, so the number orders quick saves.
            number = _NUMBER.search(path)
            ages.append((time, int(number[0]) if number else -1, path))
    return sorted(ages, reverse=True)


def prune(directory: str, keep: int) -> list[str]:
    """Remove the oldest records in the series of ``directory``. Return paths to remove."""
    root, name = os.path.split(directory)
    storage, series = storage_of(root), _NUMBER.sub("", name)
    others, old = [], []
    with _warning(directory):
        for other in storage.names(root):
            path = os.path.join(root, other)
            # Skip symbolic links, because the user wants to keep their targets.
            is_other = other not in (name, series) and not os.path.islink(path)
            if is_other and _NUMBER.sub("", other) == series:
                others.append(path)
        for _, _, path in _by_age(others)[keep - 1 :]:
            names = storage.names(path)
            record = os.path.join(path, NAME)
            # Remove the record first, so that an interruption doesn't leave a broken checkpoint.
            storage.remove(record)
            storage.sync(path)
            old += [record, *_our_files(path, names)]
    return old


def latest(root: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint in ``root``, or ``root`` itself, or None. Local.

    Args:
        root: a directory of checkpoints, which may not exist. Damaged and incomplete checkpoints
            are skipped with a warning.

    Raises:
        CheckpointError: ``root`` can't be read.
    """
    background.wait()
    path = named(root)
    try:
        names = storage_of(path).names(path)
        directories = _by_age([path, *(os.path.join(path, name) for name in names)])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {explain(error)}") from error
    newest, newest_time = None, -1.0
    for modified, _, directory in directories:
        # A record is never newer than its file, so the remaining ones can't be the newest.
        if modified + 1 < newest_time:
            break
        try:
            record = read(directory)
            check_sizes(directory, record)
        except (CheckpointError, OSError) as error:
            if StoreError in (type(error), type(error.__cause__)):
                text = f"{directory} can't be read: {explain(error)}"
                raise CheckpointError(text) from error
            logger.warning("%s is skipped: %s", directory, explain(error))
            continue
        if record.time > newest_time:
            newest, newest_time = directory, record.time
    return newest


def link(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
    """Make ``dst`` a second name for the checkpoint ``src``. Collective.

    Files are linked, so you can remove either directory. A checkpoint in ``dst`` is replaced.

    Raises:
        CheckpointError: ``src`` is not a complete checkpoint, or ``dst`` can't be written.
    """

    def act() -> None:
        background.wait()
        if rank():
            return
        old, new = absolute(src), absolute(dst)
        storage = storage_of(new)
        if storage_of(old) is not storage:
            raise CheckpointError(f"{old} and {new} must be in the same store. Move one first.")
        record = read(old)
        check_sizes(old, record)
        version = version_of(new)
        storage.make(new)
        for file in record.files:
            storage.link(os.path.join(old, file.name), os.path.join(new, file.name))
        storage.sync(new)
        remove(new, commit(new, version, record, read_whole(os.path.join(old, NAME))))

    on_every_rank("accel.link", act)


def verify(dir: str | os.PathLike[str]) -> None:
    """Compare every byte of a checkpoint with its checksums. Collective on several ranks.

    Args:
        dir: the checkpoint's directory.

    Raises:
        CheckpointError: a file is missing or damaged. The error names it.
    """
    begin = time.monotonic()

    def act(rank: int, world: int) -> None:
        background.wait()
        directory = absolute(dir)
        record = read(directory)
        check_sizes(directory, record)
        reader = BoxReader(directory, record)
        # Ranks split each file by chunks, because files have different sizes.
        for file in range(len(record.files)):
            reader.verify(file, rank, world)
        log_end(directory, "verified", record.nbytes, begin)

    on_running_ranks("accel.verify", act)
