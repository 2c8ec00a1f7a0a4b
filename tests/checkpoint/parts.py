"""States of which each rank has parts that are cut along several dimensions, through the real save and load."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from accel.boxes import Box
from accel.checkpoint import folder
from accel.checkpoint.objects import LocalRange, StateObject
from accel.checkpoint.save import Writer, contents_of
from accel.checkpoint.values import Encoder, Json
from accel.shard import Manifest, Shard

Shape = tuple[int, ...]


class Parts(StateObject):
    """The shards of a model on one rank."""

    kind = "module"

    def __init__(self, shards: Sequence[Shard], *, equal: bool = True) -> None:
        super().__init__("", "")
        self.shards, self._equal = list(shards), equal

    def ranges(self) -> Iterator[LocalRange]:
        return (self.local_range(one, self._equal) for one in self.shards)

    def value(self, encoder: Encoder) -> dict[str, Json]:
        return {"extra": {}}

    def slots(self, manifest: Manifest, node: Mapping[str, Json]) -> list[tuple[str, Shard]]:
        return [(one.name, one) for one in self.shards]


def part_of(name: str, whole: torch.Tensor, box: Box, start: int = 0, stop: int | None = None) -> Shard:
    """A range of a box of a tensor, in memory of its own."""
    values = whole[slices(box)].reshape(-1)[start:stop].clone()
    return Shard(name, tuple(whole.shape), start, values, box)


def blank(shard: Shard, dtype: torch.dtype | None = None) -> Shard:
    """The same part, without its values."""
    tensor = torch.full_like(shard.tensor, 77, dtype=dtype)
    return Shard(shard.name, shard.shape, shard.start, tensor, shard.box)


def expected(shard: Shard, whole: torch.Tensor) -> torch.Tensor:
    """What a shard must hold."""
    box = whole[slices(shard.box)] if shard.box else whole
    return box.reshape(-1)[shard.start : shard.start + shard.tensor.numel()].view(shard.tensor.shape)


def save_as_ranks(held: Sequence[Sequence[Shard]], directory: str, *, equal: bool = True) -> None:
    """What ``accel.save`` does on as many ranks as there are lists of shards, here one after the other."""
    contents = [contents_of({"model": Parts(shards, equal=equal)}, None, len(held)) for shards in held]
    summaries = [one.summary() for one in contents]
    messages = [one.message(summaries, rank) for rank, one in enumerate(contents)]
    with contextlib.ExitStack() as resources:
        folder.begin(directory, resources)
        writers = [Writer(directory, one, messages, rank, None, False) for rank, one in enumerate(contents)]
        writers[0].commit([writer.write() for writer in writers])


def slices(box: Box) -> tuple[slice, ...]:
    """What indexes a box in its tensor."""
    return tuple(slice(begin, end) for begin, end in box)


def split(number: int, places: Sequence[int]) -> list[tuple[int, int]]:
    """0 to ``number``, cut at places."""
    edges = [0, *places, number]
    return list(zip(edges, edges[1:], strict=False))


def values(shape: Shape, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Other numbers at each place, as far as the dtype has so many."""
    return (torch.arange(math.prod(shape)) * 7 + seed).view(shape).to(dtype)
