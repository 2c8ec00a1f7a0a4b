"""The directories of checkpoints: names, the commit, leftovers of killed saves, the newest."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterable
from typing import Final

from ..errors import CheckpointError, is_url, refuse_url
from ..process import rank
from .background import background
from .reader import BoxReader
from .record import NAME, OTHER, Record, encode, is_record, read
from .steps import explain, log_end, on_every_rank, on_running_ranks
from .storage import StoreError, read_whole, storage_of

logger = logging.getLogger("accel")

#: Only files with these names are ever removed. Some are of old versions.
_OURS: Final = re.compile(
    r"accel-[0-9a-f]{12}-\d{5,}(-still|-apart)?\.safetensors"
    r"|\.accel-[0-9a-f]{12}\.record|\.accel\.lock"
)
_NUMBER: Final = re.compile(r"\d+\Z")


def named(path: object) -> str:
    """Return a directory or URL as the user means it, or raise for anything else."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        # None is that of accel.latest, and a dict is that of arguments in the wrong order.
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
    """Return a full path or a URL, because the working directory may change."""
    text = named(path)
    return text if is_url(text) else os.path.abspath(text)


# -- the commit ------------------------------------------------------------------------------------

# The earlier checkpoint can be loaded until the commit. All names of a save are new. So if a save is
# killed or two jobs save into one directory, all files in the record exist.


def version_of(directory: str) -> str:
    """Return the version of the record in a directory, for ``commit``."""
    path = os.path.join(directory, NAME)
    version = storage_of(path).version(path)
    # Before anything is written into the directory of another program.
    if version and not is_record(path):
        raise CheckpointError(f"{path} has another format. Save into a different directory.")
    return version


def commit(
    directory: str, version: str, record: Record, content: bytes = b"", keep: int | None = None
) -> None:
    """Write the record if it has this version, and remove the files of the checkpoint before."""
    try:
        names = check_sizes(directory, record)
    except CheckpointError as error:
        raise CheckpointError(
            "A rank wrote its file, and rank 0 does not see it whole: save into a directory of "
            f"this job alone, on a file system that all nodes share ({error})"
        ) from error
    storage_of(directory).put(os.path.join(directory, NAME), content or encode(record), version)
    # A failure from here on is no failure of the save.
    try:
        for file in record.files:
            names.pop(file.name)
        sweep(directory, names)
        if keep is not None:
            prune(directory, keep)
    except (OSError, CheckpointError) as error:
        text = "%s is saved, but older files could not be removed: %s"
        logger.warning(text, directory, explain(error))


def sweep(directory: str, names: Iterable[str]) -> None:
    """Remove the files of accel among these."""
    for name in sorted(filter(_OURS.fullmatch, names)):
        storage_of(directory).remove(os.path.join(directory, name))


def check_sizes(directory: str, record: Record) -> dict[str, int]:
    """Raise if a file of a checkpoint is missing or was cut. Return the sizes of all files."""
    sizes = storage_of(directory).sizes(directory)
    for file in record.files:
        path, size = os.path.join(directory, file.name), sizes.get(file.name)
        if size != file.size:
            state = "is missing" if size is None else f"was cut or changed to {size} bytes"
            raise CheckpointError(f"{path} {state}: the checkpoint is not complete. {OTHER}")
    return sizes


# -- several checkpoints ---------------------------------------------------------------------------


def check_keep(directory: str, keep: object) -> None:
    """Raise if older checkpoints can't be found or counted."""
    if type(keep) is not int or keep < 1 or not _NUMBER.search(os.path.abspath(directory)):
        raise CheckpointError(
            f"keep={keep!r} for {directory!r}: expected a number of at least 1, and a directory "
            "whose name ends in a number, such as 'ckpt/step-100'."
        )


def _by_age(paths: Iterable[str]) -> list[tuple[float, int, str]]:
    """Return the times of records, the numbers of their directories and these, newest first."""
    ages = []
    for path in paths:
        time = storage_of(path).modified(os.path.join(path, NAME))
        if time is not None:
            # Times of object stores have whole seconds.
            number = _NUMBER.search(path)
            ages.append((time, int(number[0]) if number else -1, path))
    return sorted(ages, reverse=True)


def prune(directory: str, keep: int) -> None:
    """Remove the oldest checkpoints of the series of ``directory``, but never ``directory``."""
    root, name = os.path.split(directory)
    storage, series, others = storage_of(root), _NUMBER.sub("", name), []
    for other in storage.names(root):
        path = os.path.join(root, other)
        # The user wants to keep the target of a link.
        is_other = other not in (name, series) and not os.path.islink(path)
        if is_other and _NUMBER.sub("", other) == series:
            others.append(path)
    for _, _, path in _by_age(others)[keep - 1 :]:
        names = storage.names(path)
        # Without its record it is no checkpoint any more.
        storage.remove(os.path.join(path, NAME))
        storage.sync(path)
        sweep(path, names)
        # It may have other files. In object stores there is no directory.
        with contextlib.suppress(OSError):
            os.rmdir(path)


def latest(root: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint in ``root``, or ``root`` itself, or None. Local.

    Args:
        root: a directory of checkpoints, which need not exist. Damaged and incomplete checkpoints
            are passed over with a warning.

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
        raise CheckpointError(f"{path} may be a checkpoint: {explain(error)}") from error
    newest, newest_time = None, -1.0
    for modified, _, directory in directories:
        # A record is as old as its file or, if it was linked or copied, older.
        if modified + 1 < newest_time:
            break
        try:
            record = read(directory)
            check_sizes(directory, record)
        except (CheckpointError, OSError) as error:
            if StoreError in (type(error), type(error.__cause__)):
                text = f"{directory} may be a checkpoint: {explain(error)}"
                raise CheckpointError(text) from error
            logger.warning("%s is passed over: %s", directory, explain(error))
            continue
        if record.time > newest_time:
            newest, newest_time = directory, record.time
    return newest


def link(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
    """Make ``dst`` a second name of the checkpoint ``src``. Collective.

    Its files are linked, so either directory can be removed. A checkpoint in ``dst`` is replaced.

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
            raise CheckpointError(f"{old} and {new} must be in one store. Move one first.")
        record = read(old)
        check_sizes(old, record)
        version = version_of(new)
        storage.make(new)
        for file in record.files:
            storage.link(os.path.join(old, file.name), os.path.join(new, file.name))
        storage.sync(new)
        commit(new, version, record, read_whole(os.path.join(old, NAME)))

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
        # Each rank takes every so-many-th chunk of each file, as sizes of files differ.
        for file in range(len(record.files)):
            reader.verify(file, rank, world)
        log_end(directory, "verified", record.nbytes, begin)

    on_running_ranks("accel.verify", act)
