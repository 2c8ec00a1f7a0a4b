"""Save: agree on the content, write a file on every rank, and commit once all files are written."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, overload

import torch

from .. import shard
from ..errors import CheckpointError
from ..process import current
from ..process.control import agree
from . import folder, shards
from .background import background
from .objects import OptimizerObject, RankObject, StateObject, structure_of
from .plan import BoxKind, Listing, Table, WritePlan, list_shards, make_plan
from .record import Record
from .shards import LocalShard, WriteItem, Written, check_tensor
from .state import OF_VALUES, State, name_of
from .steps import (
    ARGUMENTS,
    Gather,
    background_gather,
    check_equal,
    digest,
    exchange,
    log_end,
    on_every_rank,
    paused_collector,
)
from .storage import storage_of
from .values import Encoder, Json

#: The errors if ranks pass something else, by attribute of ``Message``.
_DIFFERENCES: Final = {
    "arguments": f"accel.save() got {ARGUMENTS}",
    "structure": "accel.save: the state of rank {rank} has other objects or tensors than that of "
    "rank 0. Pass the same keys in the same order on every rank.",
    # A signal handler runs on each rank at its own time.
    "progress": "accel.save: {name} is after {first} on rank 0 and after {other} on rank {rank}. "
    "Stop all ranks after the same step with accel.any_rank(flag). "
    "To go on, load an earlier checkpoint.",
}


@overload
def save(
    state: dict[Any, Any],
    dir: str | os.PathLike[str],
    *,
    wait: Literal[False],
    keep: int | None = ...,
    filter: Callable[[str], bool] | None = ...,
) -> Future[None]: ...
@overload
def save(
    state: dict[Any, Any],
    dir: str | os.PathLike[str],
    *,
    wait: bool = ...,
    keep: int | None = ...,
    filter: Callable[[str], bool] | None = ...,
) -> Future[None] | None: ...
@paused_collector()
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
    process, begin = current(), time.monotonic()
    rank = process.place.rank

    def prepare() -> tuple[tuple[Contents, str], Message]:
        background.settle()
        arguments = {"dir": folder.named(dir), "wait": wait, "keep": keep}
        if keep is not None:
            folder.check_keep(folder.named(dir), keep)
        contents = contents_of(state, filter)
        version = "" if rank else folder.version_of(folder.absolute(dir))
        return (contents, version), contents.message(arguments)

    (contents, version), messages = exchange("accel.save", prepare)
    check_equal(messages, _DIFFERENCES)
    plan = make_plan(contents.merge(messages, rank))
    items = shards.write_items(plan.entries(rank), contents.shards)
    # A thread must not keep the tensors of the state alive, so it gets only the values.
    writing = Writing(
        folder.absolute(dir), version, rank, begin, keep, messages, plan, contents.values
    )
    if wait:
        writing.finish(items, agree)
        return None
    gather = background_gather(process)
    copies = on_every_rank("accel.save (the copy)", lambda: background.copy(items))
    return background.start(process, lambda: writing.finish(copies, gather))


@dataclass(frozen=True, slots=True)
class Message:
    """Sent by each rank to the others."""

    arguments: dict[str, object]
    #: Digests of the objects, and of the values that belong to all ranks together.
    structure: dict[str, str]
    nodes: str
    #: The digest of the table and the kinds of a listing.
    table: str
    kinds: tuple[BoxKind, ...]
    #: The steps of each engine by path.
    progress: dict[str, str] = field(default_factory=dict)
    #: The values that belong to this rank alone, by the name of the object.
    own: dict[str, Json] = field(default_factory=dict)
    #: The id in the names of files. Rank 0's is used.
    save_id: str = field(default_factory=partial(secrets.token_hex, 6))


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a save on one rank."""

    #: The state as JSON. Before ``merge``, nodes of merged objects have this rank's entries alone.
    values: dict[str, Json]
    objects: list[StateObject]
    shards: list[LocalShard]
    listing: Listing

    @property
    def merged(self) -> list[StateObject]:
        return [one for one in self.objects if one.merged]

    def message(self, arguments: dict[str, object]) -> Message:
        # A single rank writes these, so all ranks must have them.
        of_one_rank = sorted(one.shard.name for one in self.shards if not one.equal)
        message = Message(
            arguments=arguments,
            structure={"": digest([structure_of(self.objects), of_one_rank])},
            nodes=digest([one.node for one in self.merged]),
            table=self.listing.table.digest,
            kinds=self.listing.kinds,
        )
        for one in self.objects:
            if one.engine is not None:
                message.progress[one.path] = one.engine.drift.progress
            if isinstance(one, RankObject):
                # It goes into the record, because files have no values of single ranks.
                message.own[one.name] = one.state(Encoder(None))
        return message

    def merge(self, messages: Sequence[Message], rank: int) -> tuple[Listing, ...]:
        """Merge all ranks' nodes into ``values``. Return all ranks' listings. Collective."""
        table, nodes = self.listing.table, set()
        holders: dict[str, int] = {}
        for number, message in enumerate(messages):
            holders.setdefault(message.table, number)
            nodes.add(message.nodes)
        tables = {table.digest: table}
        # With DDP all ranks are equal. In a pipeline each has its own parameters.
        if len(holders) > 1 or len(nodes) > 1:
            # Of ranks with the same table the first one sends it.
            rows = table.rows if holders[table.digest] == rank else ()
            entries = [one.node[one.divided] for one in self.merged]
            everyone = agree("accel.save (details)", (rows, entries))
            for name, holder in holders.items():
                tables[name] = Table(name, everyone[holder][0])
            for number, one in enumerate(self.merged):
                # The entries of rank 0 are the last ones, so they win.
                for _, others in reversed(everyone):
                    one.node[one.divided] |= others[number]
        return tuple(Listing(tables[message.table], message.kinds) for message in messages)


def contents_of(state: Any, filter: Callable[[str], bool] | None) -> Contents:
    """Take a state apart. Errors name the path of an object without a stored form. Local."""
    local_shards: list[LocalShard] = []

    def store(tensor: torch.Tensor, path: str) -> str:
        """Store a tensor inside a plain value."""
        name = f"{OF_VALUES}{len(local_shards)}/{name_of([path])}"
        local_shards.append(LocalShard(shard.whole(name, tensor), equal=False))
        return name

    encoder = Encoder(store)
    values, objects = State(state).encode(encoder)
    for one in objects:
        one.node.update(one.value(encoder))  # the node is in ``values`` already
    for one in objects:
        for local in one.shards():
            name = local.shard.name
            if filter is None or isinstance(one, OptimizerObject) or filter(name):
                check_tensor(local.shard.tensor, f"{one.path}, {name}")
                local_shards.append(local)
    return Contents(values, objects, local_shards, list_shards(local_shards))


@dataclass(frozen=True, slots=True)
class Writing:
    """The second half of a save. It needs no model, so a thread can run it."""

    directory: str
    #: The version of the record that the save replaces, on rank 0.
    version: str
    rank: int
    begin: float
    keep: int | None
    messages: Sequence[Message]
    plan: WritePlan
    values: dict[str, Json]

    def finish(self, items: Sequence[WriteItem], gather: Gather) -> None:
        """Write this rank's file and, on rank 0, the record once all files exist. Collective."""
        storage, save_id = storage_of(self.directory), self.messages[0].save_id
        name = f"accel-{save_id}-{self.rank:05d}.safetensors"

        def write() -> tuple[None, Written | None]:
            storage.make(self.directory)
            written = shards.write(self.directory, name, items) if items else None
            storage.sync(self.directory)
            return None, written

        try:
            _, files = exchange("accel.save (writing)", write, gather)
        except CheckpointError:
            # A rank has reported a failure, so all ranks know that no record will name it.
            with contextlib.suppress(OSError):
                storage.remove(os.path.join(self.directory, name))
            raise

        def replace_record() -> None:
            if self.rank:
                return
            writers = [rank for rank, file in enumerate(files) if file]
            record = Record(
                id=save_id,
                time=time.time(),
                world_size=len(files),
                files=list(filter(None, files)),
                tensors=self.plan.stored({rank: n for n, rank in enumerate(writers)}),
                values=self.values,
                ranks=[message.own for message in self.messages if message.own],
            )
            folder.commit(self.directory, self.version, record, keep=self.keep)
            log_end(self.directory, "saved", record.nbytes, self.begin)

        on_every_rank("accel.save (the record)", replace_record, gather)
