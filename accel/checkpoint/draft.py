"""A save before anything is written: what each rank has, and what all of them together will write. Collective agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointError
from .layout import Listing, Packed, Plan, digest, make_listing, make_plan, parts, sources, unpack
from .leaves import Leaf, Listed, RankLeaf, models
from .record import Record, Stored
from .shards import Entry, Source, Written
from .state import State, kept_shard, listings
from .values import Encoder, Json

#: A rank's two listings and the nodes that are made of all ranks', where the ranks differ in them; and its own values.
Message = tuple[tuple[Packed, ...] | None, list[dict[str, Json]] | None, dict[str, Json]]


@dataclass(frozen=True, slots=True)
class Summary:
    """Digests of a draft: of what must be equal on all ranks, and of what is sent only where it is not; and its models."""

    structure: str
    listings: str
    tables: str
    nodes: str
    models: dict[str, str]


@dataclass(slots=True)
class Draft:
    """What this rank has to save.

    Args:
        values: the state as JSON, with open nodes.
        leaves: its objects.
        nodes: what this rank knows of each leaf's node.
        own: values that belong to this rank alone, by the leaf's name.
        listed: the ranges on this rank, those that move and those that may be as they were.
        listing: the same as numbers.
    """

    values: dict[str, Json]
    leaves: list[Leaf]
    nodes: list[dict[str, Json]]
    own: dict[str, Json]
    listed: tuple[list[Listed], list[Listed]]
    listing: tuple[Listing, Listing]
    plans: list[Plan] = field(default_factory=list)
    own_of_all: list[dict[str, Json]] = field(default_factory=list)

    def summary(self) -> Summary:
        """What the ranks compare before they send more."""
        compared = [one.shard.name for listed in self.listed for one in listed if not one.sure]
        structure = [[(leaf.name, leaf.kind) for leaf in self.leaves], sorted(compared)]
        return Summary(
            digest(structure),
            digest([one.digest() for one in self.listing]),
            digest([one.table for one in self.listing]),
            digest(self._merged_nodes()),
            models(self.leaves),
        )

    def _merged_nodes(self) -> list[dict[str, Json]]:
        """The nodes that are made of all ranks'; of the others rank 0's is taken."""
        return [n for leaf, n in zip(self.leaves, self.nodes, strict=True) if leaf.merged]

    def message(self, summaries: Sequence[Summary], rank: int) -> Message:
        """What the other ranks must be told: what is not equal on all, and each table by one of those that have it."""
        packed = nodes = None
        if len({s.listings for s in summaries}) > 1:
            first = [s.tables for s in summaries].index(summaries[rank].tables)
            packed = tuple(one.pack(None if first == rank else first) for one in self.listing)
        if len({s.nodes for s in summaries}) > 1:
            nodes = self._merged_nodes()
        return packed, nodes, self.own

    def complete(self, messages: Sequence[Message]) -> None:
        """Learn what all ranks have, and plan."""
        for which in (0, 1):
            everyone = unpack([m[0][which] for m in messages if m[0] is not None])
            self.plans.append(make_plan(everyone or [self.listing[which]], len(messages)))
        merged = [m[1] for m in messages if m[1] is not None] or [self._merged_nodes()]
        by_leaf = iter(zip(*merged, strict=True))
        for leaf, node in zip(self.leaves, self.nodes, strict=True):
            leaf.node.update(leaf.merge(next(by_leaf)) if leaf.merged else node)
        self.own_of_all = [m[2] for m in messages]

    def sources(self, rank: int) -> tuple[list[Source], list[Source]]:
        """What a rank writes into its two files."""
        moving, still = (sources(plan, rank, listed) for plan, listed in zip(self.plans, self.listed, strict=True))
        return moving, still

    def record(self, save: str, time: float, written: Sequence[tuple[Written | None, Written | None]]) -> Record:
        """The record of files that each rank has written."""
        files: list[Written] = []
        tensors: dict[str, Stored] = {}
        for which, plan in enumerate(self.plans):
            numbers = []
            for of_rank in written:
                file = of_rank[which]
                numbers.append(len(files) if file is not None else -1)
                if file is not None:
                    files.append(file)
            found = parts(plan.ranges, torch.tensor(numbers, dtype=torch.int64, device="cpu"))
            for number, (name, dtype, shape) in enumerate(plan.table):
                tensors[name] = Stored(dtype, shape, tuple(found.get(number, ())))
        return Record(
            id=save,
            time=time,
            world_size=len(written),
            files=files,
            tensors=tensors,
            values=self.values,
            ranks=self.own_of_all if any(self.own_of_all) else [],
        )


def make_draft(state: Any, keep: Callable[[str], bool] | None, world: int) -> Draft:
    """Take a state apart. Local, and writes nothing.

    Raises:
        CheckpointError: something in it cannot be stored; names its path.
    """
    kept: list[Listed] = []

    def store(tensor: torch.Tensor, path: str) -> str:
        kept.append(kept_shard(len(kept), path, tensor))
        return kept[-1].shard.name

    encoder = Encoder(store)
    values, leaves = State(state).encode(encoder)
    nodes = [leaf.value(encoder) for leaf in leaves]
    # In the record, since the tensors of the shards are those of all ranks together.
    own = {leaf.name: leaf.own(Encoder(None)) for leaf in leaves if isinstance(leaf, RankLeaf)}
    listed = listings(leaves, keep) + kept
    groups = [one for one in listed if not one.still], [one for one in listed if one.still]
    names = [one.shard.name for one in groups[0]]
    if both := set(names).intersection(one.shard.name for one in groups[1]):
        raise CheckpointError(f"two tensors of the state have the name {min(both)!r}")
    return Draft(
        values, leaves, nodes, own, groups, (make_listing(groups[0], world > 1), make_listing(groups[1], world > 1))
    )


def entries(found: Sequence[Source]) -> list[Entry]:
    """The entries of what a rank writes."""
    return [source.entry for source in found]
