"""Save: agree on the content, write a file on every rank, and commit once all files are written."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch

from ..errors import CheckpointError
from ..process import Process, current
from ..process.control import agree, locked
from . import folder, shards
from .background import background
from .match import check_engines, check_progress
from .objects import RankObject, StateObject, engines_of, progress_of
from .plan import Kind, Listing, Plan, Table, list_shards, make_plan
from .record import Record
from .shards import Item, LocalShard, WriteItem, Written
from .state import State, shards_of, value_shard
from .steps import (
    Gather,
    background_gather,
    check_arguments,
    digest,
    exchange,
    log_end,
    on_every_rank,
)
from .storage import storage_of
from .values import Encoder, Json

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SaveOptions(TypedDict, total=False):
    """The options of ``save``, except ``wait``, which decides on the result."""

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
    """Write a checkpoint of ``state`` into ``dir``. Collective.

    You can load the earlier checkpoint in ``dir`` until the new one is complete and durable. Then
    the new one replaces it.

    Args:
        state: a nested dict of handles, raw modules and optimizers, objects with a state dict,
            tensors and plain values. If the ranks have different plain values, tensors or raw
            modules, those of rank 0 are saved.
        dir: the directory, the same on all ranks and on a file system that all of them see, or a
            URL such as ``"s3://bucket/run"``.
        wait: return when the checkpoint is durable. If False, return once a copy is in host memory.
        keep: remove older checkpoints next to ``dir`` with the same name up to the number at its
            end (``step-100``, ``step-200``), so that the newest ``keep`` are left.
        filter: returns, for the name of a tensor (``"model/head.weight"``), if it is saved. The
            state of optimizers is always saved.

    Returns:
        None, or with ``wait=False`` a future that is done when the checkpoint is durable.

    Raises:
        CheckpointError: something can't be stored, another job saves there, the disk or memory
            fails, or the background save before this one failed. It is raised on every rank.
    """
    process = current()
    rank, begin = process.place.rank, time.monotonic()

    def prepare() -> tuple[tuple[Contents, folder.Commit | None], Message]:
        background.settle()
        arguments = {"dir": folder.named(dir), "wait": wait, "keep": keep}
        if keep is not None:
            folder.check_keep(folder.named(dir), keep)
        contents = contents_of(state, filter)
        commit = None if rank else folder.Commit(folder.absolute(dir))
        return (contents, commit), contents.message(arguments)

    (contents, commit), messages = exchange("accel.save", prepare)
    _check_equal(messages)
    contents.complete(messages, rank)
    plan = make_plan(contents.listings)
    items = shards.items_of(plan.entries(rank), contents.shards)
    writing = Writing(folder.absolute(dir), messages[0].save, rank, begin, keep)
    # A thread must not keep the tensors of the state alive, so it gets only the values.
    record = partial(_record_of, messages, plan, contents.values)
    if wait:
        writing.finish(lambda: items, record, commit, agree)
        return None
    return _finish_in_background(process, writing, items, record, commit)


def _record_of(
    messages: Sequence[Message],
    plan: Plan,
    values: dict[str, Json],
    files: Sequence[Written | None],
) -> Record:
    numbers = [number for number, file in enumerate(files) if file is not None]
    own = [message.own for message in messages]
    return Record(
        id=messages[0].save,
        time=time.time(),
        world_size=len(files),
        files=[file for file in files if file is not None],
        tensors=plan.stored({number: i for i, number in enumerate(numbers)}),
        values=values,
        ranks=own if any(own) else [],
    )


def _finish_in_background(
    process: Process,
    writing: Writing,
    items: Sequence[WriteItem],
    record: Callable[[Sequence[Written | None]], Record],
    commit: folder.Commit | None,
) -> Future[None]:
    gather = background_gather(process)
    copies: Future[Sequence[Item]] = Future()
    try:
        copies.set_result(background.copy(items))
    except Exception as error:
        # It is raised in the thread, where all ranks hear of it.
        copies.set_exception(error)
    return background.start(process, lambda: writing.finish(copies.result, record, commit, gather))


# -- the content on one rank -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Message:
    """Sent by each rank to the others."""

    #: A name for the save. That of rank 0 is used.
    save: str
    arguments: dict[str, object]
    #: Digests of the objects, and of the values that belong to all ranks together.
    structure: str
    nodes: str
    engines: dict[str, str]
    progress: dict[str, str]
    #: The digest of the table and the kinds of a listing.
    table: str
    kinds: tuple[Kind, ...]
    own: dict[str, Json]


@dataclass(slots=True)
class Contents:
    """The content of a save on one rank."""

    #: The state as JSON. The nodes of objects in it are filled in by ``complete``.
    values: dict[str, Json]
    objects: list[StateObject]
    #: The objects whose nodes are made of all ranks' nodes, with this rank's.
    merged: list[tuple[StateObject, dict[str, Json]]]
    #: The values that belong to this rank alone, by the name of the object.
    own: dict[str, Json]
    shards: list[LocalShard]
    listing: Listing
    #: The listings of all ranks.
    listings: tuple[Listing, ...] = ()

    def message(self, arguments: dict[str, object]) -> Message:
        lead = sorted(one.shard.name for one in self.shards if not one.equal)
        return Message(
            save=secrets.token_hex(6),
            arguments=arguments,
            structure=digest([[(one.name, one.kind) for one in self.objects], lead]),
            nodes=digest([node for _, node in self.merged]),
            engines=engines_of(self.objects),
            progress=progress_of(self.objects),
            table=self.listing.table.digest,
            kinds=self.listing.kinds,
            own=self.own,
        )

    def complete(self, messages: Sequence[Message], rank: int) -> None:
        """Get from the other ranks what is not the same on all. Collective."""
        tables = [message.table for message in messages]
        rows = nodes = None
        if len({*tables}) > 1 and tables.index(tables[rank]) == rank:
            rows = self.listing.table.rows  # of ranks with the same table the first one sends it
        if len({message.nodes for message in messages}) > 1:
            nodes = [{**node} if not rank else one.part_of(node) for one, node in self.merged]
        everyone: list[Any] = [(None, None)]
        if len({*tables}) > 1 or nodes is not None:
            everyone = agree("accel.save (details)", (rows, nodes))
        known = {self.listing.table.digest: self.listing.table}
        for name, (rows, _) in zip(tables, everyone, strict=False):
            if rows is not None:
                known[name] = Table(name, rows)
        self.listings = tuple(Listing(known[m.table], m.kinds) for m in messages)
        for number, (one, node) in enumerate(self.merged):
            parts = [nodes[number] for _, nodes in everyone if nodes is not None]
            one.node.update(one.merge(parts or [node]))


def contents_of(state: Any, filter: Callable[[str], bool] | None) -> Contents:
    """Take a state apart, or raise with the path of something that can't be stored. Local."""
    of_values: list[LocalShard] = []

    def store(tensor: torch.Tensor, path: str) -> str:
        of_values.append(value_shard(len(of_values), path, tensor))
        return of_values[-1].shard.name

    encoder = Encoder(store)
    values, objects = State(state).encode(encoder)
    merged = []
    for one in objects:
        node = one.value(encoder)
        if one.merged:
            merged.append((one, node))
        else:
            one.node.update(node)
    # In the record, because each tensor in a file belongs to all ranks.
    own = {one.name: one.own(Encoder(None)) for one in objects if isinstance(one, RankObject)}
    held = shards_of(objects, filter) + of_values
    return Contents(values, objects, merged, own, held, list_shards(held))


def _check_equal(messages: Sequence[Message]) -> None:
    check_arguments("accel.save", [message.arguments for message in messages])
    check_engines("accel.save", [message.engines for message in messages])
    check_progress([message.progress for message in messages])
    for rank, message in enumerate(messages):
        if message.structure != messages[0].structure:
            raise CheckpointError(
                f"accel.save: the state of rank {rank} has other objects or tensors than that of "
                "rank 0. Pass the same keys in the same order on every rank."
            )


# -- the files and the commit ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Writing:
    """The part of a save that may run in a thread."""

    directory: str
    save: str
    rank: int
    begin: float
    keep: int | None

    def finish(
        self,
        items: Callable[[], Sequence[Item]],
        record: Callable[[Sequence[Written | None]], Record],
        commit: folder.Commit | None,
        gather: Gather,
    ) -> None:
        """Write this rank's file and, on rank 0, the record once all files exist. Collective."""
        storage = storage_of(self.directory)
        name = folder.shard_name(self.save, self.rank)

        def write() -> tuple[None, Written | None]:
            own = items()
            storage.make(self.directory)
            written = shards.write(self.directory, name, own) if own else None
            storage.sync(self.directory)
            return None, written

        try:
            _, files = exchange("accel.save (writing)", write, gather)
        except CheckpointError:
            # All ranks know that no record will name it.
            with contextlib.suppress(OSError):
                storage.remove(os.path.join(self.directory, name))
            raise

        def replace_record() -> None:
            if commit is not None:
                new = record(files)
                check_visible(self.directory, new)
                commit.put(new, keep=self.keep)
                log_end(self.directory, "saved", new.nbytes, self.begin)

        on_every_rank("accel.save (the record)", replace_record, gather)


def check_visible(directory: str, record: Record) -> None:
    """Raise if rank 0 does not see the files of all ranks."""
    try:
        folder.check_sizes(directory, record)
    except CheckpointError as error:
        raise CheckpointError(
            "A rank wrote its file, and rank 0 does not see it whole: save into a directory of "
            "this job alone, on a file system that all nodes share, or into an object store "
            f"('s3://...') ({error})"
        ) from error
