"""The directories of checkpoints: names in one, the lock of the job that saves, what dead saves left; the newest of several."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Final, final

from ..errors import CheckpointError, is_url, refuse_url
from ..process import rank
from ..process.control import locked
from .background import background
from .reader import WorkerThreads
from .record import NAME, Record, encode, exists, is_damaged, read
from .steps import check_arguments, exchange, explain, on_every_rank
from .storage import Claim, StoreError, check_size, storage_of, unreadable

logger = logging.getLogger("accel")

#: Only names of this form are ever removed: shards (0.1 wrote up to three for each rank), records on their way, and status files.
_OURS: Final = re.compile(
    r"accel-[0-9a-f]{12}-\d{5,}(-still|-apart)?\.safetensors(\.tmp)?|\.accel-[0-9a-f]{12}(-\d{5,})?\.(record|done|seen)(\.tmp)?"
)
_REMOVERS: Final = 4  # threads
_NUMBER: Final = re.compile(r"\d+\Z")


def named(path: object) -> str:
    """A directory or URL as a user names it; ``~`` at its beginning is the home directory. Refuses what is neither."""
    if path is None:
        raise CheckpointError(
            "expected a directory, found None; accel.latest gives None where there is no checkpoint"
        )
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        found = repr(path) if isinstance(path, str | bytes) else f"a {type(path).__name__}"
        swapped = (
            ": the order is accel.save(state, dir) and accel.load(dir, state)"
            if isinstance(path, dict)
            else ""
        )
        raise CheckpointError(f"expected the path of a directory, found {found}{swapped}")
    if not is_url(text):
        return os.path.expanduser(refuse_url(text, CheckpointError))
    protocol, _, rest = text.partition("://")
    if protocol.lower() in ("file", "local"):
        return rest if rest.startswith("/") else refuse_url(text, CheckpointError)
    if not rest.strip("/"):
        raise CheckpointError(
            f"{text} names nothing in a store: expected a place, as in 's3://bucket/run'"
        )
    return f"{protocol.lower()}://{re.sub('//+', '/', rest).rstrip('/')}"


def absolute(path: object) -> str:
    """The same from the root on, whatever the working directory becomes."""
    text = named(path)
    return text if is_url(text) else os.path.abspath(text)


def shard_name(save: str, rank: int) -> str:
    """The file of one rank."""
    return f"accel-{save}-{rank:05d}.safetensors"


def begin(directory: str, resources: contextlib.ExitStack) -> Claim:
    """Take a directory, made if need be, as long as ``resources`` last, and clean what dead saves left; refuses others' ones."""
    storage = storage_of(directory)
    storage.make(directory)
    present(directory)  # raises before anything is written into another program's directory
    claim = storage.claim(directory)
    resources.callback(claim.release)
    old = present(directory)
    if claim.exclusive:
        sweep(directory, storage.names(directory), [file.name for file in old.files] if old else ())
    return claim


def sweep(directory: str, names: Iterable[str], keep: Iterable[str]) -> None:
    """Remove those of the files named that accel has written, except some; no other save can need them."""
    kept, storage = set(keep), storage_of(directory)
    gone = [n for n in names if _OURS.fullmatch(n) and n not in kept]
    # Each takes a system as long as its size, or a request.
    WorkerThreads().each(
        lambda name: storage.remove(os.path.join(directory, name)), gone, _REMOVERS
    )


def present(directory: str) -> Record | None:
    """The record that is to be replaced; None if there is none, or a damaged one. Refuses another program's, or a newer one."""
    if not exists(directory):
        return None
    if (key := key_of(directory)) in _known:
        return _known[key]
    try:
        found, _ = read(directory)
    except CheckpointError:
        if is_damaged(key[0]):
            return None
        raise
    note(key, found)
    return found


#: The record that a save has read or written last, by its path and identity.
_known: Final[dict[tuple[str, Hashable], Record]] = {}


def note(key: tuple[str, Hashable], found: Record) -> None:
    """So that the next save need not read it; ``key`` was found before, or while nobody else could write."""
    _known.clear()
    _known[key] = found


def key_of(directory: str) -> tuple[str, Hashable]:
    """Path and identity of a record."""
    path = os.path.join(directory, NAME)
    return path, storage_of(directory).identity(path)


@final
class ReplacedError(CheckpointError):
    """A checkpoint was replaced while it was read."""


@contextlib.contextmanager
def reporting_replacement(path: object) -> Iterator[None]:
    """Context: raise ``ReplacedError`` for a CheckpointError if a save has replaced the checkpoint meanwhile."""
    before = _identity(path)
    try:
        yield
    except CheckpointError as error:
        now = _identity(path)
        if now is None or now == before:  # a checkpoint that is gone is not replaced
            raise
        raise ReplacedError(
            f"{absolute(path)} was replaced while it was read: load it again"
        ) from error


def _identity(path: object) -> Hashable:
    """Identify the record of a directory; None if there is no record."""
    with contextlib.suppress(CheckpointError, OSError):
        return key_of(absolute(path))
    return None


def complete(directory: str) -> Record | None:
    """The record of a checkpoint whose files are there; None if there is none, or, with a warning, one that cannot be loaded."""
    try:
        with reporting_replacement(directory):
            if not exists(directory):
                return None
            record, _ = read(directory)
            check_sizes(directory, record)
            return record
    except ReplacedError:
        return complete(directory)
    except (CheckpointError, OSError, MemoryError) as error:
        if isinstance(error, StoreError) or isinstance(error.__cause__, StoreError):
            raise CheckpointError(f"{directory} may be a checkpoint: {explain(error)}") from error
        logger.warning("%s is passed over: %s", directory, explain(error))
        return None


def check_sizes(directory: str, record: Record) -> None:
    """Compare the files of a checkpoint with the sizes that its record names; raises for the first that is missing or another."""
    storage, names = storage_of(directory), [file.name for file in record.files]
    try:
        sizes = list(storage.sizes(directory, names))
    except OSError as error:
        if record.hosts:
            hosts = " and ".join(record.hosts)
            raise CheckpointError(
                f"{directory} was saved to the disks of {hosts}, and some of its files are not here. Copy all of its files into "
                f"one directory that every rank sees. ({unreadable(error)})"
            ) from error
        raise CheckpointError(unreadable(error)) from error
    for file, size in zip(record.files, sizes, strict=True):
        check_size(os.path.join(directory, file.name), size, file.size)


def remove(directory: str) -> None:
    """Remove the checkpoint in a directory, and the directory if nothing else is in it; raises while a job saves there."""
    storage = storage_of(directory)
    claim = storage.claim(directory)
    try:
        old = None if claim.exclusive else present(directory)
        storage.remove(os.path.join(directory, NAME))  # first: from here on it is no checkpoint
        storage.sync(directory)
        sweep(
            directory,
            storage.names(directory) if old is None else [file.name for file in old.files],
            (),
        )
    finally:
        claim.remove()
    storage.remove_directory(directory)


# -- Several checkpoints: the newest one, a second name for one, the oldest ones away ----------------------------------


def check_keep(directory: str, keep: object) -> None:
    """Refuse a number that is none, or a directory whose older ones nobody can tell."""
    if type(keep) is not int or keep < 1:
        raise CheckpointError(f"keep={keep!r}: expected a number of checkpoints of at least 1")
    if not _NUMBER.search(os.path.abspath(directory)):
        raise CheckpointError(
            f"keep={keep}: the name of {directory!r} does not end in a number, so that its older ones are not known; save "
            "into directories such as 'ckpt/step-100'"
        )


def _others_of_series(name: str, names: Iterable[str]) -> list[str]:
    """Those that differ from it by the number at their end, which all of a series have."""
    series = _NUMBER.sub("", name)
    return [n for n in names if n not in (series, name) and name != series == _NUMBER.sub("", n)]


def prune(directory: str, keep: int) -> None:
    """Remove the oldest checkpoints of the series of ``directory``, but never that one itself."""
    root, name = os.path.split(directory)
    storage = storage_of(root)
    others = _others_of_series(name, storage.names(root))
    real = storage.real(root)
    paths = [
        os.path.join(root, n)
        for n in others
        if storage.real(os.path.join(real, n)) == os.path.join(real, n)
    ]
    found = [(one.time, path) for path in paths if (one := complete(path)) is not None]
    for _, path in sorted(found, reverse=True)[keep - 1 :]:
        with contextlib.suppress(CheckpointError):  # somebody saves there
            remove(path)


def latest(root: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint in ``root``, or ``root`` itself; None if there is none. Local.

    Args:
        root: a directory of checkpoints; it need not exist. One in it that is damaged or not complete is passed over, with a
            warning that names it.

    Raises:
        CheckpointError: ``root`` is there, and cannot be read.
    """
    background.wait()
    found = [
        (one.time, path) for path in _candidates(named(root)) if (one := complete(path)) is not None
    ]
    return max(found)[1] if found else None


def _candidates(path: str) -> list[str]:
    """What may be checkpoints: a directory, and what is in it."""
    try:
        names = storage_of(path).names(path)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:  # there may be one
        raise CheckpointError(f"accel.latest: {explain(error)}") from error
    return [path, *(os.path.join(path, name) for name in names)]


@locked
def link(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
    """Make ``dst`` a second name of the checkpoint ``src``: its files are linked, so that either can be removed. Collective.

    A checkpoint that ``dst`` has already is replaced.

    Raises:
        CheckpointError: ``src`` is no complete checkpoint, or ``dst`` cannot be written.
    """

    def look() -> tuple[None, dict[str, object]]:
        background.wait()
        return None, {"src": named(src), "dst": named(dst)}

    def act() -> None:
        if rank() == 0:
            with reporting_replacement(src):
                _link(absolute(src), absolute(dst))

    check_arguments("accel.link", exchange("accel.link (the beginning)", look)[1])
    on_every_rank("accel.link", act)


def _link(src: str, dst: str) -> None:
    storage = storage_of(dst)
    if storage_of(src) is not storage:
        raise CheckpointError(
            f"{src} cannot be linked to {dst}: both must be in one store, or on one file system"
        )
    one, _ = read(src)
    check_sizes(src, one)
    if storage.real(src) == storage.real(dst):
        return
    with contextlib.ExitStack() as resources:
        claim = begin(dst, resources)
        names = [file.name for file in one.files]
        try:
            for name in names:
                storage.link(os.path.join(src, name), os.path.join(dst, name))
        except OSError as error:
            raise CheckpointError(
                f"{explain(error)}; both must be on one file system that has links"
            ) from error
        storage.sync(dst)
        before = storage.names(dst)
        claim.commit(encode(one))
        sweep(dst, before, names)
