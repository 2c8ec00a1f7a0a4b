"""The directories of checkpoints: names in one, the lock of the job that saves, what dead saves left; the newest of several."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Container, Hashable, Iterable, Iterator
from typing import Final, Literal

from ..errors import CheckpointError, is_url, refuse_url
from ..process import current, rank
from ..process.control import locked
from . import shared_memory
from .background import background
from .failures import exchange, explain, on_every_rank
from .placement import Sight, newest, sight
from .record import NAME, Record, encode, exists, is_damaged, read
from .shared_memory import NUMBER
from .storage import Claim, StoreError, check_size, storage_of, unreadable

logger = logging.getLogger("accel")

#: Only names of this form are ever removed: shards, records on their way, and the status files of background saves.
_OURS: Final = re.compile(
    r"accel-[0-9a-f]{12}-\d{5,}(-still|-apart)?\.safetensors(\.tmp)?|\.accel-[0-9a-f]{12}(-\d{5,})?\.(record|done|seen)(\.tmp)?"
)


def named(path: object) -> str:
    """A directory or URL as a user names it; ``~`` at its beginning is the home directory. Refuses what is neither."""
    if path is None:
        raise CheckpointError("expected a directory, found None; accel.latest gives None where there is no checkpoint")
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        found = repr(path) if isinstance(path, str | bytes) else f"a {type(path).__name__}"
        swapped = ": the order is accel.save(state, dir) and accel.load(dir, state)" if isinstance(path, dict) else ""
        raise CheckpointError(f"expected the path of a directory, found {found}{swapped}")
    if not is_url(text):
        return os.path.expanduser(refuse_url(text, CheckpointError))
    protocol, _, rest = text.partition("://")
    if protocol.lower() in ("file", "local"):
        return rest if rest.startswith("/") else refuse_url(text, CheckpointError)
    return text.rstrip("/")


def absolute(path: object) -> str:
    """The same from the root on, whatever the working directory becomes."""
    text = named(path)
    return text if is_url(text) else os.path.abspath(text)


def shard_name(save: str, rank: int, kind: str) -> str:
    """A file of one rank, of one of ``KINDS``."""
    return f"accel-{save}-{rank:05d}{kind}.safetensors"


def record_name(save: str) -> str:
    """The record until it is the record."""
    return f".accel-{save}.record"


def begin(directory: str, resources: contextlib.ExitStack, saves: Container[str] = ()) -> Claim:
    """Take a directory, made if need be, as long as ``resources`` last, and clean what dead saves left; refuses others' ones.

    ``saves`` are not dead: other hosts have records of them.
    """
    storage_of(directory).make(directory)
    present(directory)  # raises before anything is written into another program's directory
    claim = storage_of(directory).claim(directory)
    resources.callback(claim.release)
    old = present(directory)
    if claim.exclusive:
        sweep(
            directory, storage_of(directory).names(directory), {file.name for file in old.files} if old else (), saves
        )
    return claim


def sweep(directory: str, names: Iterable[str], keep: Iterable[str], saves: Container[str] = ()) -> None:
    """Remove those of the files named that accel has written, except some and those of ``saves``; no other save can need them."""
    kept, storage = set(keep), storage_of(directory)
    for name in names:
        if _OURS.fullmatch(name) and name not in kept and name.removeprefix("accel-")[:12] not in saves:
            storage.remove(os.path.join(directory, name))


def present(directory: str) -> Record | None:
    """The record that is to be replaced; None if there is none, or a damaged one. Refuses another program's, or a newer one."""
    if not exists(directory):
        return None
    path = os.path.join(directory, NAME)
    key = path, storage_of(directory).identity(path)
    if key in _known:
        return _known[key]
    try:
        found, _ = read(directory)
    except CheckpointError:
        if is_damaged(path):
            return None
        raise
    _know(key, found)
    return found


def note(directory: str, new: Record) -> None:
    """Keep in mind the record that was written there while nobody else could: the next save need not read it."""
    path = os.path.join(directory, NAME)
    _know((path, storage_of(directory).identity(path)), new)


#: What the record says that a save has read or written last, by its path and identity.
_known: Final[dict[tuple[str, Hashable], Record]] = {}


def _know(key: tuple[str, Hashable], found: Record) -> None:
    _known.clear()
    _known[key] = found


def complete(directory: str, *, elsewhere: bool = False) -> Record | None:
    """The record of a checkpoint whose files are there; None if there is none, or, with a warning, one that cannot be loaded.

    ``elsewhere``: files that were left on other hosts need not be there.
    """
    try:
        if not exists(directory):
            return None
        record, _ = read(directory)
        if not (elsewhere and record.hosts):
            check_sizes(directory, record)
    except (CheckpointError, OSError, MemoryError) as error:
        if isinstance(error, StoreError) or isinstance(error.__cause__, StoreError):
            raise CheckpointError(f"{directory} may be a checkpoint: {explain(error)}") from error
        logger.warning("%s is passed over: %s", directory, explain(error))
        return None
    return record


def check_sizes(directory: str, record: Record) -> None:
    """Compare the files of a checkpoint with the sizes that its record names; raises for the first that is missing or another."""
    storage, names = storage_of(directory), [file.name for file in record.files]
    try:
        sizes = list(storage.sizes(directory, names))
    except OSError as error:
        left = [n for n, name in enumerate(names) if record.hosts and not storage.exists(os.path.join(directory, name))]
        if left:
            path, hosts = os.path.join(directory, names[left[0]]), " and ".join(record.hosts_of(left[0]))
            raise CheckpointError(
                f"{path} lies on the disk of host {hosts}, since it was saved with placement='host': accel.load on all hosts and "
                "accel.latest(..., placement='host') find it"
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
        sweep(directory, storage.names(directory) if old is None else [file.name for file in old.files], ())
    finally:
        claim.remove()
    storage.remove_directory(directory)


# -- The snapshot in memory of the host, beside what is on disk --------------------------------------------------------


def in_memory(directory: str, *, elsewhere: bool = False) -> Record | None:
    """As ``complete``: of the snapshot of a directory."""
    where = shared_memory.place(directory)
    found = None if where is None else complete(where, elsewhere=elsewhere)
    if where is None or found is None or found.name != shared_memory.name_of(directory):
        return None
    shared_memory.known[where] = found.id
    return found


def replaceable(where: str, directory: str) -> bool:
    """Whether what is in a place in memory is of ``directory``, or this job's own as far as is known, and not another one's."""
    old = present(where) if os.path.isdir(where) else None
    return old is None or old.name == shared_memory.name_of(directory) or shared_memory.known.get(where) == old.id


def newest_place(path: object) -> str:
    """Where the checkpoint lies that a load of a directory takes, as far as this host has it."""
    directory = absolute(path)
    held = in_memory(directory)
    if held is None or (exists(directory) and read(directory)[0].time > held.time):
        return directory
    return shared_memory.place(directory) or directory


def free(directory: str) -> None:
    """On the first rank of each host: remove the snapshot of the series, than which what is on disk is newer."""
    where = shared_memory.place(directory)
    if where is None or current().place.local_rank or not os.path.isdir(where):
        return
    try:
        if replaceable(where, directory):
            shared_memory.left.pop(where, None)
            remove(where)
    except (CheckpointError, OSError) as error:
        logger.warning("%s is on disk, but an older one stays in memory: %s", directory, explain(error))


# -- Several checkpoints: the newest one, a second name for one, the oldest ones away ----------------------------------


def check_keep(directory: str, keep: object) -> None:
    """Refuse a number that is none, or a directory whose older ones nobody can tell."""
    if type(keep) is not int or keep < 1:
        raise CheckpointError(f"keep={keep!r}: expected a number of checkpoints of at least 1")
    if not NUMBER.search(os.path.abspath(directory)):
        raise CheckpointError(
            f"keep={keep}: the name of {directory!r} does not end in a number, so that its older ones are not known; save "
            "into directories such as 'ckpt/step-100'"
        )


def prune(directory: str, keep: int) -> None:
    """Remove the oldest checkpoints of the series of ``directory``, but never that one itself."""
    root, name = os.path.split(directory)
    series = NUMBER.sub("", name)
    storage = storage_of(root)
    others = [n for n in storage.names(root) if NUMBER.sub("", n) == series and n not in (series, name)]
    real = storage.real(root)
    paths = [os.path.join(root, n) for n in others if storage.real(os.path.join(real, n)) == os.path.join(real, n)]
    for path in _newest_first(paths, elsewhere=True)[keep - 1 :]:
        with contextlib.suppress(CheckpointError):  # somebody saves there
            remove(path)


def _newest_first(paths: Iterable[str], *, elsewhere: bool = False) -> list[str]:
    """Those of them that are complete checkpoints."""
    return _by_time((complete(path, elsewhere=elsewhere), path) for path in paths)


def _by_time(found: Iterable[tuple[Record | None, str]]) -> list[str]:
    return [path for _, path in sorted(((one.time, path) for one, path in found if one is not None), reverse=True)]


def latest(root: str | os.PathLike[str], *, placement: Literal["shared", "host"] = "shared") -> str | None:
    """The newest complete checkpoint in ``root``, or ``root`` itself; None if there is none. Local.

    Args:
        root: a directory of checkpoints; it need not exist. One in it that is damaged or not complete is passed over, with a
            warning that names it.
        placement: "host" where checkpoints were saved so: the newest whose files are all on some host, the same on every rank.
            Collective.

    Raises:
        CheckpointError: ``root`` is there, and cannot be read.
    """
    check_placement(placement)
    if placement == "host":
        return _latest_of_hosts(root)
    background.wait()
    found = [(one, path) for (path, _), one in _found(named(root), elsewhere=False)]
    return next(iter(_by_time(found)), None)


def check_placement(placement: object) -> None:
    """Refuse what is none."""
    if placement not in ("shared", "host"):
        raise CheckpointError(f"placement={placement!r}: expected 'shared' or 'host'")


def _found(path: str, *, elsewhere: bool) -> Iterator[tuple[tuple[str, bool], Record]]:
    """The complete checkpoints in a directory, and that it is itself, each by its path and whether it is in memory."""
    try:
        paths = [path, *(os.path.join(path, name) for name in storage_of(path).names(path))]
    except (FileNotFoundError, NotADirectoryError):
        paths = [path]
    except OSError as error:  # there may be one
        raise CheckpointError(f"accel.latest: {explain(error)}") from error
    held = [path, *(one for one in paths[1:] if not NUMBER.search(one)), *shared_memory.series(path)]
    for one, inside in [*((one, False) for one in paths), *((one, True) for one in held)]:
        record = in_memory(one, elsewhere=elsewhere) if inside else complete(one, elsewhere=elsewhere)
        if record is not None:
            yield (one, inside), record


def _lies(at: tuple[str, bool]) -> str:
    """Where what is so called is on this host."""
    path, inside = at
    return (shared_memory.place(path) if inside else None) or path


@locked
def _latest_of_hosts(root: str | os.PathLike[str]) -> str | None:
    def look() -> tuple[dict[tuple[str, bool], Record], dict[tuple[str, bool], Sight]]:
        background.wait()
        found = dict(_found(named(root), elsewhere=True))
        return found, {at: sight(_lies(at), one) for at, one in found.items()}

    at = newest(*exchange("accel.latest", look), _lies)
    return None if at is None else at[0]


@locked
def link(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
    """Make ``dst`` a second name of the checkpoint ``src``: its files are linked, so that either can be removed. Collective.

    A checkpoint that ``dst`` has already is replaced.

    Raises:
        CheckpointError: ``src`` is no complete checkpoint, or ``dst`` cannot be written.
    """

    def act() -> None:
        background.wait()
        if rank() == 0:
            _link(newest_place(src), absolute(dst))

    on_every_rank("accel.link", act)
    free(absolute(dst))


def _link(src: str, dst: str) -> None:
    storage = storage_of(dst)
    if storage.real(src) == storage.real(dst):
        return
    if storage_of(src) is not storage:
        raise CheckpointError(f"{src} cannot be linked to {dst}: both must be in one store, or on one file system")
    one, _ = read(src)
    check_sizes(src, one)
    with contextlib.ExitStack() as resources:
        claim = begin(dst, resources)
        names = [file.name for file in one.files]
        try:
            for name in names:
                storage.link(os.path.join(src, name), os.path.join(dst, name))
        except OSError as error:
            raise CheckpointError(f"{explain(error)}; both must be on one file system that has links") from error
        storage.sync(dst)
        before = storage.names(dst)
        claim.commit(os.path.join(dst, NAME), encode(one), record_name(one.id))
        sweep(dst, before, names)
