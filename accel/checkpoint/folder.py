"""The directories of checkpoints: names in one, the lock of the job that saves, what dead saves left; the newest of several."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Container, Hashable, Iterable
from typing import Final, Literal, TypeVar

from ..errors import CheckpointError, is_url, refuse_url
from ..process import current, rank
from ..process.control import locked
from .background import background
from .placement import NUMBER, Sight, memory_names, memory_place, newest, seen_in_memory
from .reader import WorkerThreads
from .record import NAME, Record, encode, exists, is_damaged, read
from .steps import check_arguments, exchange, explain, on_every_rank
from .storage import MEMORY, Claim, StoreError, check_size, storage_of, unreadable

logger = logging.getLogger("accel")

T = TypeVar("T")

#: Only names of this form are ever removed: shards, records on their way, and the status files of background saves.
_OURS: Final = re.compile(
    r"accel-[0-9a-f]{12}-\d{5,}(-still|-apart)?\.safetensors(\.tmp)?|\.accel-[0-9a-f]{12}(-\d{5,})?\.(record|done|seen)(\.tmp)?"
)
_REMOVERS: Final = 4  # threads


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
    if not rest.strip("/"):
        raise CheckpointError(f"{text} names nothing in a store: expected a place, as in 's3://bucket/run'")
    return f"{protocol.lower()}://{re.sub('//+', '/', rest).rstrip('/')}"


def absolute(path: object) -> str:
    """The same from the root on, whatever the working directory becomes."""
    text = named(path)
    return text if is_url(text) else os.path.abspath(text)


def shard_name(save: str, rank: int, kind: str) -> str:
    """A file of one rank, of one of ``KINDS``."""
    return f"accel-{save}-{rank:05d}{kind}.safetensors"


def begin(directory: str, resources: contextlib.ExitStack, saves: Container[str] = ()) -> Claim:
    """Take a directory, made if need be, as long as ``resources`` last, and clean what dead saves left; refuses others' ones.

    ``saves`` are not dead: other hosts have records of them.
    """
    storage = storage_of(directory)
    storage.make(directory)
    present(directory)  # raises before anything is written into another program's directory
    claim = storage.claim(directory)
    resources.callback(claim.release)
    old = present(directory)
    if claim.exclusive:
        sweep(directory, storage.names(directory), [file.name for file in old.files] if old else (), saves)
    return claim


def sweep(directory: str, names: Iterable[str], keep: Iterable[str], saves: Container[str] = ()) -> None:
    """Remove those of the files named that accel has written, except some and those of ``saves``; no other save can need them."""
    kept, storage = set(keep), storage_of(directory)
    gone = [n for n in names if _OURS.fullmatch(n) and n not in kept and n.removeprefix("accel-")[:12] not in saves]
    # Each takes a system as long as its size, or a request.
    WorkerThreads().each(lambda name: storage.remove(os.path.join(directory, name)), gone, _REMOVERS)


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


_READS: Final = 8  # of a checkpoint that is replaced each time before it is read


def read_standing(path: object, act: Callable[[], T], on_any: Callable[[bool], bool] = bool) -> T:
    """What ``act`` returns, which reads a checkpoint; where it fails, and a save has replaced that meanwhile, of the new one.

    ``on_any`` tells whether something holds on any rank, where all of them act together.
    """
    for _ in range(_READS - 1):
        before = _standing(path)
        try:
            return act()
        except CheckpointError as error:
            # One that is gone, or was set aside, is not replaced.
            if not on_any(any(new and new != old for old, new in zip(before, _standing(path), strict=False))):
                raise
            logger.info("%s was replaced while it was read, so the new one is: %s", path, error)
    return act()


def _standing(path: object) -> list[Hashable]:
    """What identifies the records of a directory, on disk and in memory."""
    found: list[Hashable] = []
    with contextlib.suppress(CheckpointError):
        for where in (absolute(path), memory_place(absolute(path))):
            try:
                found.append(where and key_of(where))
            except OSError:
                found.append(None)
    return found


def complete(directory: str, *, elsewhere: bool = False) -> Record | None:
    """The record of a checkpoint whose files are there; None if there is none, or, with a warning, one that cannot be loaded.

    ``elsewhere``: files that were left on other hosts need not be there.
    """

    def look() -> Record | None:
        if not exists(directory):
            return None
        record, _ = read(directory)
        if not (elsewhere and record.hosts):
            check_sizes(directory, record)
        return record

    try:
        return read_standing(directory, look)
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
        asked = names if len(record.hosts) > 1 else []  # the only host, which has the record, has lost what it lacks
        left = [n for n, name in enumerate(asked) if not storage.exists(os.path.join(directory, name))]
        if left:
            path, hosts = os.path.join(directory, names[left[0]]), " and ".join(record.hosts_of(left[0]))
            how = "in memory of" if directory.startswith(MEMORY) else "on the disk of"
            raise CheckpointError(
                f"{path} lies {how} host {hosts}, where the save has left it: accel.load on all hosts and accel.latest(..., "
                "placement='host') find it; accel.verify, export and link, and the commands, see the files of one host: for them "
                "load it on all hosts, and save it to a directory that these share"
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


def in_memory(directory: str, *, elsewhere: bool = True) -> tuple[Record | None, str]:
    """As ``complete``, of the snapshot of a directory; and where that lies."""
    where = memory_place(absolute(directory)) or ""
    found = complete(where, elsewhere=elsewhere) if where else None
    if found is not None:
        seen_in_memory.setdefault(where, "")
    return found, where


def newest_of(path: str, *, elsewhere: bool = False) -> tuple[float, str, Record] | None:
    """The newest complete checkpoint that this host has of a directory, on disk and in memory: its time, place and record."""
    both = (complete(path, elsewhere=elsewhere), path), in_memory(path, elsewhere=elsewhere)
    return max(((one.time, where, one) for one, where in both if one is not None), default=None)


def newest_place(path: object) -> str:
    """Where the checkpoint lies that a load of a directory takes, as far as this host has it."""
    directory = absolute(path)
    found = newest_of(directory) if in_memory(directory)[0] else None
    return directory if found is None else found[1]


def set_aside(where: str, save: str) -> None:
    """On the first rank of each host: let a snapshot that is damaged be none, unless it is another save's by now.

    Else it would be the newest checkpoint at each start. The next save removes its files.
    """
    path = os.path.join(where, NAME)
    with contextlib.ExitStack() as resources, contextlib.suppress(CheckpointError):  # another job saves there
        if current().place.local_rank == 0:
            resources.callback(storage_of(where).claim(where).release)
            if read(where)[0].id == save:
                os.replace(path, os.path.join(where, f".accel-{save}.record"))  # as one before its commit


def free(directory: str, kept: str | None = None) -> None:
    """On the first rank of each host: remove the snapshots of a directory and its series but that in one place, which are older.

    A place without a record was left by a dead save; of the series, one that this process has not seen may be another job's.
    """
    own = memory_place(directory)
    root, name = os.path.split(directory)
    alike = (os.path.join(root, one) for one in _others_of_series(name, memory_names(root)))
    for where in () if current().place.local_rank else {own, *map(memory_place, alike)} - {None, kept}:
        assert where is not None
        if os.path.isdir(where) and (where == own or where in seen_in_memory or not exists(where)):
            with contextlib.suppress(CheckpointError, OSError):  # another job saves there
                remove(where)
                seen_in_memory.pop(where, None)
    if own and os.path.basename(own) == name and not current().place.local_rank:
        storage_of(own).remove_directory(os.path.dirname(own))  # that of the series, once it is empty


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


def _others_of_series(name: str, names: Iterable[str]) -> list[str]:
    """Those that differ from it by the number at their end, which all of a series have."""
    series = NUMBER.sub("", name)
    return [n for n in names if n not in (series, name) and name != series == NUMBER.sub("", n)]


def prune(directory: str, keep: int) -> None:
    """Remove the oldest checkpoints of the series of ``directory``, but never that one itself."""
    root, name = os.path.split(directory)
    storage = storage_of(root)
    others = _others_of_series(name, storage.names(root))
    real = storage.real(root)
    paths = [os.path.join(root, n) for n in others if storage.real(os.path.join(real, n)) == os.path.join(real, n)]
    found = [(one.time, path) for path in paths if (one := complete(path, elsewhere=True)) is not None]
    for _, path in sorted(found, reverse=True)[keep - 1 :]:
        with contextlib.suppress(CheckpointError):  # somebody saves there
            remove(path)


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
    found = ((newest_of(path), path) for path in _candidates(named(root)))
    return max(((one[0], path) for one, path in found if one), default=(0.0, None))[1]


def check_placement(placement: object) -> None:
    """Refuse what is none."""
    if placement not in ("shared", "host"):
        raise CheckpointError(f"placement={placement!r}: expected 'shared' or 'host'")


def _candidates(path: str) -> list[str]:
    """What may be checkpoints: a directory, and what is in it, on disk or in memory."""
    held = memory_names(absolute(path))
    try:
        names = {*storage_of(path).names(path), *held}
    except (FileNotFoundError, NotADirectoryError):
        names = set(held)
    except OSError as error:  # there may be one
        raise CheckpointError(f"accel.latest: {explain(error)}") from error
    return [path, *(os.path.join(path, name) for name in names)]


@locked
def _latest_of_hosts(root: str | os.PathLike[str]) -> str | None:
    def look() -> tuple[dict[str, Record], dict[str, Sight]]:
        background.wait()
        looked = ((path, newest_of(path, elsewhere=True)) for path in _candidates(named(root)))
        found = {path: one[2] for path, one in looked if one is not None}
        return found, {path: (one.time, one.id) for path, one in found.items()}

    return newest(*exchange("accel.latest", look))


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
            if (found := newest_place(src)) != absolute(src):
                raise CheckpointError(
                    f"accel.link: the newest checkpoint of {absolute(src)} is in memory, in {found}, which no link on disk can "
                    "reach: accel.save it to disk first"
                )
            read_standing(found, lambda: _link(found, absolute(dst)))

    check_arguments("accel.link", exchange("accel.link (the beginning)", look)[1])
    on_every_rank("accel.link", act)
    free(absolute(dst))


def _link(src: str, dst: str) -> None:
    storage = storage_of(dst)
    if storage_of(src) is not storage:
        raise CheckpointError(f"{src} cannot be linked to {dst}: both must be in one store, or on one file system")
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
            raise CheckpointError(f"{explain(error)}; both must be on one file system that has links") from error
        storage.sync(dst)
        before = storage.names(dst)
        claim.commit(encode(one))
        sweep(dst, before, names)
