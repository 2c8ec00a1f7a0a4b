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

from ..errors import CheckpointError
from ..process import Process, current
from ..process.control import locked
from . import folder, record, shards
from .background import Words, background
from .layout import (
    Inventory,
    Layout,
    PackedInventory,
    digest,
    make_inventory,
    make_layout,
    unpack,
    write_items,
)
from .match import check_engines, check_progress
from .objects import LocalRange, RankObject, StateObject, engines_of, progress_of
from .record import Record, Stored, encode
from .shards import Item, Written
from .state import State, local_ranges, value_range
from .steps import check_arguments, exchange, explain, log_end, on_every_rank
from .storage import Claim, storage_of
from .values import Encoder, Json

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("accel")


class SaveOptions(TypedDict, total=False):
    """What ``save`` takes besides ``wait``, which decides what it returns."""

    keep: int | None
    filter: Callable[[str], bool] | None


@overload
def save(
    state: dict[Any, Any],
    dir: str | os.PathLike[str],
    *,
    wait: Literal[True] = True,
    **options: Unpack[SaveOptions],
) -> None: ...
@overload
def save(
    state: dict[Any, Any],
    dir: str | os.PathLike[str],
    *,
    wait: Literal[False],
    **options: Unpack[SaveOptions],
) -> Future[None]: ...
@overload
def save(
    state: dict[Any, Any],
    dir: str | os.PathLike[str],
    *,
    wait: bool,
    **options: Unpack[SaveOptions],
) -> Future[None] | None: ...
@locked
def save(
    state: dict[Any, Any],
    dir: str | os.PathLike[str],
    *,
    wait: bool = True,
    keep: int | None = None,
    filter: Callable[[str], bool] | None = None,
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

    Returns:
        None; with ``wait=False`` a future, done when the checkpoint is durable and this rank knows it: from then on it may
        rename or remove ``dir``.

    Raises:
        CheckpointError: something cannot be stored (nothing is written), another job saves there, or the disk or memory fails;
            also where the background save before this one failed. On every rank.
    """
    process = current()

    def prepare() -> tuple[Contents, tuple[dict[str, object], Summary]]:
        asked = {"dir": _ready(process, dir, wait, keep), "wait": wait, "keep": keep}
        contents = contents_of(state, filter, process.place.world_size)
        if process.place.rank == 0:
            _look(folder.absolute(dir))
        return contents, (asked, contents.summary(process.place.rank))

    contents, told = exchange("accel.save", prepare)
    summaries = [summary for _, summary in told]
    check_arguments("accel.save", [asked for asked, _ in told])
    _check_equal(summaries)
    with contextlib.ExitStack() as resources:
        writer = _begin(folder.absolute(dir), contents, summaries, resources, keep, not wait)
        if wait:
            _finish(writer)
            return None
        words = Words(process, writer.save, writer.directory)
        return background.start(functools.partial(writer.finish_alone, words), resources.pop_all())


@functools.cache
def _look(directory: str) -> None:
    """What this process saves there shall be later than what is there, whatever the clocks of those that saved it."""
    with contextlib.suppress(OSError, CheckpointError):
        folder.present(directory)


def _begin(
    directory: str,
    contents: Contents,
    summaries: Sequence[Summary],
    resources: contextlib.ExitStack,
    keep: int | None,
    copy: bool,
) -> Writer:
    """Lock the directory and plan what each rank writes. Collective."""
    rank = current().place.rank

    def begin() -> tuple[Claim | None, SaveMessage]:
        claim = None if rank else folder.begin(directory, resources)
        return claim, contents.message(summaries, rank)

    claim, messages = exchange("accel.save (the directory)", begin)
    plan = functools.partial(Writer, directory, claim, contents, messages, rank, keep, copy)
    return on_every_rank("accel.save (the plan)", plan)


def _check_equal(summaries: Sequence[Summary]) -> None:
    check_engines("accel.save", [summary.engines for summary in summaries])
    check_progress([summary.progress for summary in summaries])
    for rank, summary in enumerate(summaries):
        if summary.structure != summaries[0].structure:
            raise CheckpointError(
                f"accel.save: the state of rank {rank} has other objects or tensors than that of rank 0; give every rank "
                "the same keys in one order, and its own part of data only as plain values"
            )


def _ready(process: Process, dir: str | os.PathLike[str], wait: bool, keep: int | None) -> str:
    """The directory's name, where the options are right, and the background save before this one ended well."""
    background.settle()
    directory = folder.named(dir)
    if keep is not None:
        folder.check_keep(directory, keep)
    if not wait and process.control is not None:
        process.store("save", aside=True)  # connects, the first time, while all ranks are there
    return directory


def _finish(writer: Writer) -> None:
    try:
        written = exchange("accel.save (writing)", lambda: (None, writer.write()))[1]
    except CheckpointError:
        writer.discard()  # on all ranks; after another error some may think that all is written
        raise
    on_every_rank("accel.save (the record)", functools.partial(writer.commit, written))


# -- What is saved: what each rank has, and what all of them together will write. Writes nothing -----------------------


class SaveMessage(NamedTuple):
    """What a rank tells the others: an id for the save (rank 0's is taken), what is not equal on all, and its own values."""

    save: str
    inventory: PackedInventory | None
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
    merged: list[
        tuple[StateObject, dict[str, Json]]
    ]  # those whose nodes are made of all ranks', with this rank's
    own: dict[str, Json]  # values that belong to this rank alone, by the object's name
    ranges: list[LocalRange]  # that lie on this rank
    inventory: Inventory  # the same as numbers
    layout: Layout | None = (
        None  # who writes what, once it is known; this rank's part alone, but on rank 0
    )
    plan: str = ""  # a name for it
    own_of_all: list[dict[str, Json]] = field(
        default_factory=list
    )  # every rank's ``own``, likewise

    def summary(self, rank: int) -> Summary:
        """What the ranks compare before they send more."""
        compared = [one.shard.name for one in self.ranges if not one.equal]
        structure = [[(one.name, one.kind) for one in self.objects], sorted(compared)]
        form, ranges, contents = self.inventory.digests()
        return Summary(
            digest(structure),
            ranges,
            form,
            contents,
            digest([node for _, node in self.merged]),
            engines_of(self.objects),
            progress_of(self.objects),
            last_plan.name if last_plan.rank == rank else "",
        )

    def message(self, summaries: Sequence[Summary], rank: int) -> SaveMessage:
        """What the other ranks must be told; each table by one of those that have it."""
        packed = nodes = None
        # Contents that are the same everywhere make no difference, and may change from save to save.
        told = [s.contents for s in summaries] if len({s.contents for s in summaries}) > 1 else []
        self.plan = digest([[s.ranges for s in summaries], told])
        if all(s.plan == self.plan for s in summaries):
            self.layout = last_plan.layout
        elif told or len({s.ranges for s in summaries}) > 1:
            first = [s.forms for s in summaries].index(summaries[rank].forms)
            packed = self.inventory.pack(None if first == rank else first)
        if len({s.nodes for s in summaries}) > 1:
            nodes = [node for _, node in self.merged]
        return SaveMessage(secrets.token_hex(6), packed, nodes, self.own)

    def complete(self, messages: Sequence[SaveMessage], rank: int) -> None:
        """Learn what all ranks have, and divide the work."""
        if self.layout is None:
            self.layout = self._divided(messages, rank)
            last_plan.rank, last_plan.name, last_plan.layout = rank, self.plan, self.layout
        told = [m.nodes for m in messages if m.nodes is not None]
        for i, (one, node) in enumerate(self.merged):
            one.node.update(one.merge([nodes[i] for nodes in told] or [node]))
        self.own_of_all = [m.own for m in messages]

    def _divided(self, messages: Sequence[SaveMessage], rank: int) -> Layout:
        everyone = unpack([m.inventory for m in messages if m.inventory is not None])
        layout = make_layout(everyone or [self.inventory], len(messages))
        return layout.part(rank) if rank else layout

    def record(self, save: str, written: Sequence[Written | None]) -> Record:
        """Of the files that the ranks have written; None where a rank has nothing to write."""
        assert self.layout is not None
        files = [file for file in written if file is not None]
        places = itertools.count()
        numbers = [-1 if file is None else next(places) for file in written]
        parts = self.layout.parts(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        tensors = {
            name: Stored(dtype, shape, tuple(own), cuts)
            for (name, dtype, shape, cuts), own in zip(self.layout.table, parts, strict=True)
        }
        return Record(
            id=save,
            time=record.next_time(),
            world_size=len(written),
            files=files,
            tensors=tensors,
            values=self.values,
            ranks=self.own_of_all if any(self.own_of_all) else [],
        )


@dataclass(slots=True)
class _Plan:
    """That of the last save: where all ranks have the same ranges again, nothing is listed and planned anew."""

    rank: int = 0
    name: str = ""
    layout: Layout | None = None


last_plan: Final = _Plan()


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
    return Contents(values, objects, merged, own, ranges, make_inventory(ranges, world > 1))


# -- One rank's file, and the commit ----------------------------------------------------------------------------------


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
        self._begin = time.monotonic()
        self._sent = False  # whether the record is on its way to a store, and may arrive after it was given up
        contents.complete(messages, rank)
        self._storage.make(directory)  # a host may not have heard yet that rank 0 made it
        assert contents.layout is not None
        items = write_items(rank, contents.layout, contents.inventory, contents.ranges)
        self._items: Sequence[Item] = background.snapshot(items) if copy else items
        self._name = folder.shard_name(self.save, rank)

    def write(self) -> Written | None:
        """Write this rank's file, durably. None: it has nothing to write."""
        written = shards.write(self.directory, self._name, self._items) if self._items else None
        self._storage.sync(self.directory)
        return written

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._storage.remove(os.path.join(self.directory, self._name))

    def commit(self, written: Sequence[Written | None]) -> None:
        """Rank 0: make it the checkpoint of the directory, then remove the one before."""
        if self._claim is None:
            return
        try:
            new = self._contents.record(self.save, written)
            self._check_visible(new)
            content = encode(new)
            before = self._storage.names(self.directory)  # others may save there after the commit
            self._sent = not self._claim.exclusive
            self._claim.commit(content)
        except BaseException:
            self._clean()
            raise
        log_end(self.directory, "saved", new.nbytes, self._begin)
        self._remove_older(new, before)

    def _remove_older(self, new: Record, before: Sequence[str]) -> None:
        """Remove the files of the checkpoint before. What fails here is no failure of the save."""
        try:
            if self._claim is not None and self._claim.exclusive:
                folder.note(folder.key_of(self.directory), new)
            self._sweep(new, before)
            if self._keep is not None:
                folder.prune(self.directory, self._keep)
        except (OSError, CheckpointError) as error:
            logger.warning(
                "%s is saved, but older files could not be removed: %s",
                self.directory,
                explain(error),
            )

    def _check_visible(self, new: Record) -> None:
        try:
            folder.check_sizes(self.directory, new)
        except CheckpointError as error:
            raise CheckpointError(
                "a rank wrote its part, and rank 0 does not see it whole: save into a directory of this job alone, on a file "
                f"system that all nodes share, or into an object store ('s3://...') ({error})"
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

    def finish_alone(self, words: Words) -> None:
        """Write, and commit once all ranks have written; all know how it ended, and raise any rank's failure. In a thread."""
        failure: Exception | None = None
        written: Written | None = None
        try:
            written = self.write()
            if self._rank == 0:
                self.commit(
                    [written, *(_heard(words.read(rank)) for rank in range(1, self._world))]
                )
        except Exception as error:
            failure = error
            if self._rank == 0:
                self._clean()
        if self._world > 1:
            end = self._tell(words, written, failure)
            if end["error"] and self._rank:
                # What went wrong here may follow from the end of the save, which removes files.
                if not end.get("stands", True):
                    self.discard()
                raise CheckpointError(end["error"]) from failure
        if failure is not None:
            raise failure

    def _tell(
        self, words: Words, written: Written | None, failure: Exception | None
    ) -> Mapping[str, Any]:
        """Tell what this rank has done, and hear from rank 0 how that has ended, as every rank does."""
        error = ""
        if failure is not None:
            error = f"rank {self._rank}: {explain(failure)}" if self._rank else explain(failure)
        file = None if written is None else [written.name, written.size, written.header]
        stands = failure is None or self._stands()
        try:
            words.tell({"error": error, "stands": stands, "file": file})
            end = words.read(0)
        except (OSError, CheckpointError) as lost:
            raise failure or lost from None
        words.finish()
        return end


def _heard(status: Mapping[str, Any]) -> Written | None:
    if status["error"]:
        raise CheckpointError(status["error"])
    if status["file"] is None:
        return None
    name, size, header = status["file"]
    return Written(name, size, tuple(header))
