"""Saving: agree on what is written, write it on every rank, and commit once all of it is on disk."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict, final, overload

import torch

from ..errors import CheckpointError, is_url
from ..process import Process, current
from ..process.control import locked
from . import folder, record, shards
from .background import Pace, Words, background
from .layout import Inventory, Layout, PackedInventory, digest, make_inventory, make_layout, unpack, write_items
from .match import check_engines, check_progress
from .objects import KINDS, LocalRange, RankObject, StateObject, engines_of, progress_of
from .placement import Disks, broadcast, find_disks, memory_place, move, move_alone, seen_in_memory
from .record import Record, Stored, encode
from .shards import Item, Written, earlier_files
from .state import State, local_ranges, value_range
from .steps import Progress, check_flags, check_options, exchange, explain, log_end, on_every_rank, progress_bar
from .storage import Claim, storage_of
from .values import Encoder, Json

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("accel")


class SaveOptions(TypedDict, total=False):
    """What ``save`` takes besides ``wait``, which decides what it returns."""

    keep: int | None
    filter: Callable[[str], bool] | None
    placement: Literal["shared", "host"]
    replicas: int
    in_memory: bool
    progress: bool


@overload
def save(
    state: dict[Any, Any], dir: str | os.PathLike[str], *, wait: Literal[True] = True, **options: Unpack[SaveOptions]
) -> None: ...
@overload
def save(
    state: dict[Any, Any], dir: str | os.PathLike[str], *, wait: Literal[False], **options: Unpack[SaveOptions]
) -> Future[None]: ...
@overload
def save(
    state: dict[Any, Any], dir: str | os.PathLike[str], *, wait: bool, **options: Unpack[SaveOptions]
) -> Future[None] | None: ...
@locked
def save(
    state: dict[Any, Any],
    dir: str | os.PathLike[str],
    *,
    wait: bool = True,
    keep: int | None = None,
    filter: Callable[[str], bool] | None = None,
    placement: Literal["shared", "host"] = "shared",
    replicas: int = 0,
    in_memory: bool = False,
    progress: bool = True,
) -> Future[None] | None:
    """Write a checkpoint of ``state`` into ``dir``, from one moment to the next. Collective.

    The earlier checkpoint in ``dir`` can be loaded until the new one is complete and durable; then it is gone.

    Args:
        state: a nested dict of handles, raw modules and optimizers, objects with a state dict, tensors and plain values.
            Where the ranks have different plain values or tensors of their own, rank 0's are saved.
        dir: the checkpoint's directory, the same on all ranks, on a file system that all of them see; or a URL in a store.
        wait: return when the checkpoint is durable; else as soon as a copy of this rank's part is in memory.
        keep: afterwards remove older checkpoints next to ``dir`` with the same name up to its number
            (``step-100``, ``step-200``), so that the newest ``keep`` are left.
        filter: tells by a tensor's name (``"model/head.weight"``) whether it is saved; an optimizer's always are.
        placement: "host" where ``dir`` is on each host's own disk: its ranks' files stay there, where a load finds them.
        in_memory: put it into the hosts' shared memory, in place of the last such save; what is on disk stays. A load of ``dir``
            finds it there until a save to disk, which frees it, or a new start of the host.
        replicas: with these two, on how many other hosts each file is as well, so that it outlives a lost host.
        progress: show a bar on rank 0, where that has a terminal or a notebook, it takes over two seconds and tqdm is
            installed; ``ACCEL_QUIET=1`` shows none.

    Returns:
        None; with ``wait=False`` a future, done when the checkpoint is durable and this rank knows it: from then on it may
        rename or remove ``dir``.

    Raises:
        CheckpointError: something cannot be stored (nothing is written), another job saves there, or the disk or memory fails;
            also where the background save before this one failed. On every rank.
    """
    process, options = current(), (wait, keep, placement, replicas, in_memory)

    def prepare() -> tuple[Contents, tuple[str, tuple[object, ...], Summary]]:
        directory = _ready(process, dir, progress, *options)
        contents = contents_of(state, filter, process.place.world_size)
        contents.place(folder.absolute(dir), in_memory)
        return contents, (directory, options, contents.summary(process.place.rank))

    contents, told = exchange("accel.save", prepare)
    _check_equal(told)
    disks = find_disks(contents.directory, folder.present) if placement == "host" or in_memory else None
    with contextlib.ExitStack() as resources:
        writer = _begin(disks, contents, [summary for *_, summary in told], resources, keep, not wait)
        if wait:
            _finish(writer, disks, replicas, progress)
            return None
        words = Words(process, writer.save, contents.directory)
        return background.start(functools.partial(writer.finish_alone, words, disks, replicas), resources.pop_all())


@functools.cache
def _look(directory: str) -> None:
    """What this process saves there shall be later than what is there, whatever the clocks of those that saved it."""
    for where in filter(None, (memory_place(directory), directory)):
        with contextlib.suppress(OSError, CheckpointError):
            folder.present(where)


def _begin(
    disks: Disks | None,
    contents: Contents,
    summaries: Sequence[Summary],
    resources: contextlib.ExitStack,
    keep: int | None,
    copy: bool,
) -> Writer:
    """Take the directory, on each disk, and plan what is written. Collective."""
    rank = current().place.rank
    first, saves = (0, ()) if disks is None else (disks.leaders[rank], disks.saves)

    def begin() -> tuple[Claim | None, SaveMessage]:
        claim = folder.begin(contents.directory, resources, saves) if rank == first else None
        return claim, contents.message(summaries, rank)

    claim, messages = exchange("accel.save (the directory)", begin)
    plan = functools.partial(Writer, contents.directory, claim, contents, messages, rank, keep, copy)
    return on_every_rank("accel.save (the plan)", plan)


def _check_equal(told: Sequence[tuple[str, tuple[object, ...], Summary]]) -> None:
    check_engines("accel.save", [summary.engines for *_, summary in told])
    check_progress([summary.progress for *_, summary in told])
    check_options("accel.save", "wait, keep, placement, replicas and in_memory", [options for _, options, _ in told])
    for rank, (directory, _, summary) in enumerate(told):
        if directory != told[0][0]:
            raise CheckpointError(f"accel.save: rank 0 saves into {told[0][0]!r}, and rank {rank} into {directory!r}")
        if summary.structure != told[0][2].structure:
            raise CheckpointError(
                f"accel.save: the state of rank {rank} has other objects or tensors than that of rank 0; give every rank "
                "the same keys in one order, and its own part of data only as plain values"
            )


def _ready(
    process: Process,
    dir: str | os.PathLike[str],
    progress: bool,
    wait: bool,
    keep: int | None,
    placement: str,
    replicas: object,
    in_memory: bool,
) -> str:
    """The directory's name, where the options are right, and the background save before this one ended well."""
    background.settle()
    directory = folder.named(dir)
    check_flags(wait=wait, in_memory=in_memory, progress=progress)
    if keep is not None:
        folder.check_keep(directory, keep)
    folder.check_placement(placement)
    if placement == "host" and is_url(directory):
        raise CheckpointError(
            f"placement='host' of {directory}: all hosts see a store; leave it out, or give a directory"
        )
    if type(replicas) is not int or replicas < 0 or (replicas and placement == "shared" and not in_memory):
        raise CheckpointError(
            f"replicas={replicas!r}: expected a number of hosts, with placement='host' or in_memory=True"
        )
    if not wait and process.control is not None:
        process.store("save", aside=True)  # connects, the first time, while all ranks are there
    return directory


def _finish(writer: Writer, disks: Disks | None, replicas: int, shown: bool) -> None:
    try:
        with progress_bar("accel.save", writer.nbytes, shown=shown) as progress:
            written = exchange("accel.save (writing)", lambda: (None, writer.write(progress)))[1]
    except CheckpointError:
        writer.discard()  # on all ranks; after another error some may think that all is written
        raise
    if disks is None:
        on_every_rank("accel.save (the record)", functools.partial(writer.commit, written))
    else:
        _commit_placed(writer, written, disks, replicas)
    writer.ended()


def _commit_placed(writer: Writer, written: Sequence[Files], disks: Disks, replicas: int) -> None:
    """Copy to other hosts, and once all of it is durable commit on all; only then goes what was before. Collective."""
    rank = current().place.rank
    transfers, hosts = disks.copies(written, replicas)
    try:
        move("accel.save (the copies)", writer.directory, writer.save, transfers)
    except CheckpointError:
        writer.discard()  # the next save removes what came to other hosts
        raise
    content = on_every_rank("accel.save (the record)", lambda: b"" if rank else encode(writer.record(written, hosts)))
    content = broadcast(content, 0)
    on_every_rank("accel.save (the commit)", lambda: writer.put(content))
    # All have it: it is done.
    writer.committed(record.parse(content, writer.directory)[0])


def save_alone(state: Mapping[str, Any], directory: str) -> None:
    """``save`` by this process alone, whatever others there are."""
    contents = contents_of(state, None, 1)
    with contextlib.ExitStack() as resources:
        claim = folder.begin(directory, resources)
        writer = Writer(directory, claim, contents, [contents.message([contents.summary(0)], 0)], 0, None, False)
        try:
            written = writer.write()
        except BaseException:
            writer.discard()
            raise
        writer.commit([written])


# -- What is saved: what each rank has, and what all of them together will write. Writes nothing -----------------------

#: A rank's files, in the order of ``KINDS``.
Files = tuple[Written | None, ...]


class SaveMessage(NamedTuple):
    """What a rank tells the others: an id for the save (rank 0's is taken), what is not equal on all, and its own values."""

    save: str
    inventories: list[PackedInventory] | None
    nodes: list[dict[str, Json]] | None
    own: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Summary:
    """Digests of contents, of what is equal on all ranks and of what is sent only where it is not; the engines, their steps."""

    structure: str
    ranges: str
    forms: str
    contents: str
    nodes: str
    engines: dict[str, str]
    progress: dict[str, str]
    #: Of the plan that this rank has from the save before.
    plan: str


@dataclass(slots=True)
class Contents:
    """What this rank has to save."""

    values: dict[str, Json]  # the state as JSON, with open nodes
    objects: list[StateObject]
    merged: list[tuple[StateObject, dict[str, Json]]]  # those whose nodes are made of all ranks', with this rank's
    own: dict[str, Json]  # values that belong to this rank alone, by the object's name
    ranges: list[list[LocalRange]]  # that lie on this rank, for each of ``KINDS``
    inventories: list[Inventory]  # the same as numbers
    layouts: Sequence[Layout] = ()  # who writes what of each, once it is known; this rank's part alone, but on rank 0
    plan: str = ""  # a name for these
    own_of_all: list[dict[str, Json]] = field(default_factory=list)  # every rank's ``own``, likewise
    directory: str = ""  # where the files go
    snapshot_of: str = ""  # the directory to which they belong, where that is in memory

    def place(self, directory: str, in_memory: bool) -> None:
        if current().place.rank == 0:
            _look(directory)
        self.directory = directory
        if in_memory:
            self.directory, self.snapshot_of = str(memory_place(directory, make=True)), directory

    def summary(self, rank: int) -> Summary:
        """What the ranks compare before they send more."""
        compared = [one.shard.name for ranges in self.ranges for one in ranges if not one.equal]
        structure = [[(one.name, one.kind) for one in self.objects], sorted(compared)]
        digests = [one.digests() for one in self.inventories]
        return Summary(
            digest(structure),
            digest([ranges for _, ranges, _ in digests]),
            digest([form for form, *_ in digests]),
            digest([contents for *_, contents in digests]),
            digest([node for _, node in self.merged]),
            engines_of(self.objects),
            progress_of(self.objects),
            plans.name if plans.rank == rank else "",
        )

    def message(self, summaries: Sequence[Summary], rank: int) -> SaveMessage:
        """What the other ranks must be told; each table by one of those that have it."""
        packed = nodes = None
        # Contents that are the same everywhere make no difference, and may change from save to save.
        told = [s.contents for s in summaries] if len({s.contents for s in summaries}) > 1 else []
        self.plan = digest([[s.ranges for s in summaries], told])
        if all(s.plan == self.plan for s in summaries):
            self.layouts = plans.layouts
        elif told or len({s.ranges for s in summaries}) > 1:
            first = [s.forms for s in summaries].index(summaries[rank].forms)
            packed = [one.pack(None if first == rank else first) for one in self.inventories]
        if len({s.nodes for s in summaries}) > 1:
            nodes = [node for _, node in self.merged]
        return SaveMessage(secrets.token_hex(6), packed, nodes, self.own)

    def complete(self, messages: Sequence[SaveMessage], rank: int) -> None:
        """Learn what all ranks have, and divide the work."""
        if not self.layouts:
            self.layouts = [self._layout(which, messages, rank) for which in range(len(KINDS))]
            plans.rank, plans.name, plans.layouts = rank, self.plan, self.layouts
        told = [m.nodes for m in messages if m.nodes is not None]
        for i, (one, node) in enumerate(self.merged):
            one.node.update(one.merge([nodes[i] for nodes in told] or [node]))
        self.own_of_all = [m.own for m in messages]

    def _layout(self, which: int, messages: Sequence[SaveMessage], rank: int) -> Layout:
        everyone = unpack([m.inventories[which] for m in messages if m.inventories is not None])
        found = make_layout(everyone or [self.inventories[which]], len(messages))
        return found.part(rank) if rank else found

    def record(self, save: str, written: Sequence[Files], hosts: Sequence[tuple[str, Sequence[int]]]) -> Record:
        """Of the files that each rank has written, each on its host where hosts are given."""
        files: list[Written] = []
        tensors: dict[str, Stored] = {}
        for which, layout in enumerate(self.layouts):
            numbers = []
            for file in (theirs[which] for theirs in written):
                numbers.append(-1 if file is None else len(files))
                files += [] if file is None else [file]
            found = layout.parts(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
            for (name, dtype, shape, cuts), own in zip(layout.table, found, strict=True):
                tensors[name] = Stored(dtype, shape, tuple(own), cuts)
        return Record(
            id=save,
            time=record.next_time(),
            world_size=len(written),
            files=files,
            tensors=tensors,
            values=self.values,
            ranks=self.own_of_all if any(self.own_of_all) else [],
            hosts=hosts,
        )


@dataclass(slots=True)
class _Plans:
    """Those of the last save: where all ranks have the same ranges again, nothing is listed and planned anew."""

    rank: int = 0
    name: str = ""
    layouts: Sequence[Layout] = ()


plans: Final = _Plans()


def contents_of(state: Any, filter: Callable[[str], bool] | None, world: int) -> Contents:
    """Take a state apart; refuses what cannot be stored, by its path. Local, and writes nothing."""
    if filter is not None and not callable(filter):
        raise CheckpointError(
            f"filter={filter!r}: expected a function of a tensor's name, as lambda name: name.startswith('model/')"
        )
    of_values: list[LocalRange] = []

    def store(tensor: torch.Tensor, path: str) -> str:
        of_values.append(value_range(len(of_values), path, tensor))
        return of_values[-1].shard.name

    encoder = Encoder(store)
    values, objects = State(state).encode(encoder)
    merged = []
    for one in objects:
        node = one.value(encoder)
        if one.merged:
            merged.append((one, node))
        else:  # rank 0's is taken
            one.node.update(node)
    # In the record, since the tensors of the shards are those of all ranks together.
    own = {one.name: one.own(Encoder(None)) for one in objects if isinstance(one, RankObject)}
    ranges = local_ranges(objects, filter) + of_values
    divided = [[one for one in ranges if one.kind == kind] for kind in KINDS]
    for some, others in itertools.combinations([{one.shard.name for one in part} for part in divided], 2):
        if both := some & others:
            raise CheckpointError(f"two tensors of the state have the name {min(both)!r}")
    return Contents(values, objects, merged, own, divided, [make_inventory(part, world > 1) for part in divided])


# -- One rank's files, and the commit ----------------------------------------------------------------------------------


@final
class Writer:
    """A save on one rank, once it has the messages of all; with ``copy`` what is to be written may change from now on."""

    def __init__(
        self,
        directory: str,
        claim: Claim | None,  # rank 0's
        contents: Contents,
        messages: Sequence[SaveMessage],
        rank: int,
        keep: int | None,
        copy: bool,
    ) -> None:
        self.directory, self._contents, self._rank, self._keep = directory, contents, rank, keep
        self._claim, self._storage = claim, storage_of(directory)
        self.save, self._world = messages[0].save, len(messages)
        self._before: Sequence[str] = ()  # what was there before the commit; others may save there afterwards
        self._begin = time.monotonic()
        self._sent = False  # whether the record is on its way to a store, and may arrive after it was given up
        self._placed = False  # whether another host may have it already
        contents.complete(messages, rank)
        self._storage.make(directory)  # a host may not have heard yet that rank 0 made it
        items = list(map(functools.partial(write_items, rank), contents.layouts, contents.inventories, contents.ranges))
        self._linked: list[Written | None] = [None] * len(KINDS)
        for which, (kind, name) in enumerate(zip(KINDS, self._names(), strict=True)):
            # What is on disk already is linked. A look at what changes after all is cheaper than comparing its values.
            if kind == "-still" or (kind == "-apart" and not earlier_files.written_since(items[which])):
                self._linked[which] = earlier_files.link(directory, name, items[which])
            if self._linked[which] is not None:
                items[which] = []
        self._items: Sequence[Sequence[Item]] = background.snapshot(items) if copy else items

    def _names(self) -> list[str]:
        return [folder.shard_name(self.save, self._rank, kind) for kind in KINDS]

    @property
    def nbytes(self) -> int:
        return sum(item.entry.nbytes for items in self._items for item in items)

    def write(self, progress: Progress = lambda nbytes: None) -> Files:
        """Write this rank's files, durably; ``progress`` hears how many more bytes are written."""
        files = list(self._linked)
        for which, (name, items) in enumerate(zip(self._names(), self._items, strict=True)):
            if items:
                files[which] = shards.write(self.directory, name, items, progress)
            if which and (file := files[which]) is not None:
                earlier_files.remember(self.directory, file)
        self._storage.sync(self.directory)
        return tuple(files)

    def discard(self) -> None:
        for name in self._names():
            with contextlib.suppress(OSError):
                self._storage.remove(os.path.join(self.directory, name))

    def commit(self, written: Sequence[Files]) -> None:
        """Rank 0: make it the checkpoint of the directory, then remove the one before."""
        if self._claim is None:
            return
        try:
            new = self.record(written)
            self._check_visible(new)
            self.put(encode(new))
        except BaseException:
            self._clean()
            raise
        self.committed(new)

    def record(self, written: Sequence[Files], hosts: Sequence[tuple[str, Sequence[int]]] = ()) -> Record:
        """What names all that the ranks have written."""
        return self._contents.record(self.save, written, hosts)

    def put(self, content: bytes) -> None:
        """The first rank of a disk: make ``content`` the record there."""
        if self._claim is not None:
            self._before, self._sent = self._storage.names(self.directory), not self._claim.exclusive
            self._claim.commit(content)

    def committed(self, new: Record) -> None:
        """The first rank of a disk, once all is done: remove what was before. What fails here is no failure of the save."""
        if self._claim is None:
            return
        log_end(self.directory, "saved", new.nbytes, self._begin)
        try:
            if self._claim.exclusive:
                folder.note(folder.key_of(self.directory), new)
            self._sweep(new, self._before)
            if self._keep is not None and not self._contents.snapshot_of:
                folder.prune(self.directory, self._keep)
        except (OSError, CheckpointError) as error:
            logger.warning("%s is saved, but older files could not be removed: %s", self.directory, explain(error))

    def ended(self) -> None:
        """Each rank, once it knows that the save is done: what is in memory beside it is not needed any more."""
        if not (snapshot_of := self._contents.snapshot_of):
            folder.free(self.directory)
            return
        seen_in_memory[self.directory] = "" if current().place.local_rank else snapshot_of
        folder.free(snapshot_of, self.directory)

    def _check_visible(self, new: Record) -> None:
        try:
            folder.check_sizes(self.directory, new)
        except CheckpointError as error:
            raise CheckpointError(
                "a rank wrote its part, and rank 0 does not see it whole: save into a directory of this job alone, on a file "
                f"system that all hosts share ({error})"
            ) from error

    def _clean(self) -> None:
        with contextlib.suppress(OSError, CheckpointError):
            if self._sent:
                return  # the next save removes them
            names = [name for name in self._storage.names(self.directory) if self.save in name]
            self._sweep(folder.present(self.directory), names)

    def _sweep(self, kept: Record | None, names: Sequence[str]) -> None:
        folder.sweep(self.directory, names, [file.name for file in kept.files] if kept else ())

    def _stands(self) -> bool:
        """Whether the record may name this save's files: it has its name before that is durable, which may fail."""
        try:
            found = folder.present(self.directory)
        except (OSError, CheckpointError):
            return True
        return self._sent or (found is not None and found.id == self.save)

    # -- in the background: without collectives ---------------------------------------------------------------------

    def finish_alone(self, words: Words, disks: Disks | None, replicas: int, pace: Pace) -> None:
        """Write, and commit once all ranks have written; all know how it ended, and raise any rank's failure. In a thread."""
        if disks is None:
            self._round(words, "done", lambda: self.write(pace), self.commit)
        else:
            told = self._round(words, "files", lambda: self.write(pace), lambda written: list(map(_told, written)))
            written = list(map(_written, told))
            transfers, hosts = disks.copies(written, replicas)
            copy = functools.partial(move_alone, self.directory, self.save, transfers)
            content = self._round(words, "record", copy, lambda _: encode(self.record(written, hosts)).decode())
            self._placed = True
            self._round(words, "done", lambda: self.put(content.encode()), lambda _: None)
            self.committed(record.parse(content.encode(), self.directory)[0])
        self.ended()

    def _round(
        self, words: Words, name: str, act: Callable[[], Files | None], conclude: Callable[[list[Files]], Any]
    ) -> Any:
        """Act on every rank, then conclude on rank 0, and return what that gives. All raise any rank's failure."""
        failure: Exception | None = None
        files: Files = (None,) * len(KINDS)
        found = None
        try:
            files = act() or files
            if self._rank == 0:
                found = conclude([files, *(_heard(words.read(rank, name)) for rank in range(1, self._world))])
        except Exception as error:
            failure = error
            if self._rank == 0 and not self._placed:
                self._clean()
        if self._world > 1:
            end = self._tell(words, name, {"files": _told(files), "found": found}, failure)
            if end["error"] and self._rank:
                # What went wrong here may follow from the end of the save, which removes files.
                if not end.get("stands", True):
                    self.discard()
                raise CheckpointError(end["error"]) from failure
            found = end["found"]
        if failure is not None:
            raise failure
        return found

    def _tell(self, words: Words, name: str, told: dict[str, Any], failure: Exception | None) -> Mapping[str, Any]:
        """Tell what this rank has done, and hear from rank 0 how that has ended, as every rank does."""
        error = ""
        if failure is not None:
            error = f"rank {self._rank}: {explain(failure)}" if self._rank else explain(failure)
        stands = failure is None or self._placed or self._stands()
        try:
            words.tell({"error": error, "stands": stands, **told}, name)
            end = words.read(0, name)
        except (OSError, CheckpointError) as lost:
            raise failure or lost from None
        if name == "done" or end["error"]:
            words.finish()
        return end


def _told(files: Files) -> list[Any]:
    """As JSON."""
    return [None if file is None else [file.name, file.size, file.header] for file in files]


def _written(told: Sequence[Any]) -> Files:
    return tuple(None if one is None else Written(one[0], one[1], tuple(one[2])) for one in told)


def _heard(status: Mapping[str, Any]) -> Files:
    if status["error"]:
        raise CheckpointError(status["error"])
    return _written(status["files"])
