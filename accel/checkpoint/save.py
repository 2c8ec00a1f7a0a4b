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

#: The error texts for ranks that disagree, by attribute of ``Message``.
_DIFFERENCES: Final = {
    "arguments": f"accel.save() got {ARGUMENTS}",
    "structure": "accel.save: rank {rank} and rank 0 have different objects or tensors in the "
    "state. Pass the same keys in the same order on every rank.",
    # For example, ranks that save in a signal handler are interrupted at different steps.
    "progress": "accel.save: {name} has run {first} on rank 0 and {other} on rank {rank}. "
    "Stop all ranks after the same step with accel.any_rank(flag). "
    "To continue, load an earlier checkpoint.",
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
        state: a nested dict of models, optimizers, objects with a state dict, tensors and plain
            values. If plain values, tensors or raw modules differ between ranks, those of rank 0
            are saved.
        dir: a directory on a file system that all ranks share, or a URL such as
            ``"s3://bucket/run"``. Pass the same on every rank.
        wait: return when the checkpoint is durable. If False, return once a copy is in host memory.
        keep: keep the newest ``keep`` checkpoints with the same name up to the number at the end
            (``step-100``, ``step-200``), and remove older ones next to ``dir``.
        filter: a function that takes the name of a tensor (``"model/head.weight"``) and returns
            True to save it. Optimizer state is always saved.

    Returns:
        None, or with ``wait=False`` a future that is done when the checkpoint is durable.

    Raises:
        CheckpointError: a value can't be stored, a different job saved to ``dir``, a write
            failed, or the last background save failed. It is raised on every rank.
    """
    process = current()
    begin = time.monotonic()
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
    # The background thread gets only the values, because it must not keep the tensors alive.
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
    """The summary of a state that ranks exchange."""

    arguments: dict[str, object]
    #: Digests: of all objects, and of the JSON nodes of merged objects.
    structure: dict[str, str]
    nodes: str
    #: This rank's ``Listing``: the digest of its table, and its kinds.
    table: str
    kinds: tuple[BoxKind, ...]
    #: The steps that each engine has run, by the path of its object in the state.
    progress: dict[str, str] = field(default_factory=dict)
    #: The values specific to this rank, such as RNG state, by the name of their object.
    own: dict[str, Json] = field(default_factory=dict)
    #: A random id for the names of files. All ranks use rank 0's.
    save_id: str = field(default_factory=partial(secrets.token_hex, 6))


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a save on one rank."""

    #: The state as JSON. Before ``merge``, nodes of merged objects have only this rank's entries.
    values: dict[str, Json]
    objects: list[StateObject]
    shards: list[LocalShard]
    listing: Listing

    @property
    def merged(self) -> list[StateObject]:
        return [one for one in self.objects if one.merged]

    def message(self, arguments: dict[str, object]) -> Message:
        # Only one rank writes each of these tensors, so all ranks must list the same ones.
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
                # Encoder(None) keeps tensors in the JSON: only tensors of all ranks are in files.
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
        # DDP skips this, because all ranks are equal. Pipeline ranks have different parameters.
        if len(holders) > 1 or len(nodes) > 1:
            # If several ranks have the same table, only the first of them sends it.
            rows = table.rows if holders[table.digest] == rank else ()
            entries = [one.node[one.divided] for one in self.merged]
            everyone = agree("accel.save (details)", (rows, entries))
            for name, holder in holders.items():
                tables[name] = Table(name, everyone[holder][0])
            for number, one in enumerate(self.merged):
                # Rank 0 comes last, so its entries replace those of other ranks.
                for _, others in reversed(everyone):
                    one.node[one.divided] |= others[number]
        return tuple(Listing(tables[message.table], message.kinds) for message in messages)


def contents_of(state: Any, filter: Callable[[str], bool] | None) -> Contents:
    """Split a state into JSON, objects and shards. Errors name the value's path. Local."""
    local_shards: list[LocalShard] = []

    def store(tensor: torch.Tensor, path: str) -> str:
        """Add a plain value's tensor to the shards."""
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
        storage = storage_of(self.directory)
        save_id = self.messages[0].save_id
        name = f"accel-{save_id}-{self.rank:05d}.safetensors"

        def write() -> tuple[None, Written | None]:
            storage.make(self.directory)
            written = shards.write(self.directory, name, items) if items else None
            storage.sync(self.directory)
            return None, written

        try:
            _, files = exchange("accel.save (writing)", write, gather)
        except CheckpointError:
            # All ranks get the failure of a rank, so no record will name this file.
            with contextlib.suppress(OSError):
                storage.remove(os.path.join(self.directory, name))
            raise

        def replace_record() -> tuple[None, list[str]]:
            if self.rank:
                return None, []
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
            old = folder.commit(self.directory, self.version, record)
            if self.keep is not None:
                old += folder.prune(self.directory, self.keep)
            log_end(self.directory, "saved", record.nbytes, self.begin)
            return None, old

        _, (old, *_) = exchange("accel.save (the record)", replace_record, gather)
        # Removing large files takes time, so each rank removes a share.
        remove = partial(folder.remove, self.directory, old[self.rank :: len(files)])
        on_every_rank("accel.save (old files)", remove, gather)
