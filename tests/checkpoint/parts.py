"""States of which each rank has parts that are cut along several dimensions, through the real save and load."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accel
from accel.checkpoint import folder, record, shards
from accel.checkpoint.layout import Run
from accel.checkpoint.objects import ModuleObject, OptimizerObject, StateObject
from accel.checkpoint.plan import make_plan
from accel.checkpoint.record import Record
from accel.checkpoint.save import contents_of
from accel.checkpoint.shards import LocalShard, Written
from accel.checkpoint.storage import storage_of
from accel.checkpoint.values import Encoder, Json
from accel.shard import Box, Manifest, Raw, Shard, StateEntry, divided, flat_shard, flattened, shape_of, slices, whole

Shape = tuple[int, ...]


class Parts(StateObject):
    kind = "module"

    def __init__(self, shards: Sequence[Shard], *, equal: bool = True) -> None:
        super().__init__()
        self.parts, self._equal = list(shards), equal

    def shards(self) -> Iterator[LocalShard]:
        return (LocalShard(self.named(one), self._equal) for one in self.parts)

    def value(self, encoder: Encoder) -> dict[str, Json]:
        return {"extra": {}}

    def slots(self, manifest: Manifest) -> list[tuple[str, Shard]]:
        return [(one.name, one) for one in self.parts]


def parts_of(name: str, full: torch.Tensor, box: Box, start: int = 0, stop: int | None = None) -> list[Shard]:
    """Elements of a box in row-major order, as boxes in memory of their own."""
    stop = math.prod(shape_of(box)) if stop is None else stop
    boxes = list(divided(box, start, stop)) if full.numel() else [box]
    return [part_of(name, full, one) for one in boxes]


def part_of(name: str, full: torch.Tensor, box: Box) -> Shard:
    return box_shard(name, tuple(full.shape), box, full[slices(box)].clone())


def box_shard(name: str, shape: Shape, box: Box, tensor: torch.Tensor) -> Shard:
    """A box of a tensor, as a range if its elements are one."""
    return Shard(name, shape, flattened(box, shape) or box, tensor)


def flat_part(name: str, full: torch.Tensor, start: int, stop: int) -> Shard:
    return flat_shard(name, tuple(full.shape), start, full.reshape(-1)[start:stop].clone())


def blank(shard: Shard) -> Shard:
    return replace(shard, tensor=torch.full_like(shard.tensor, 77))


def expected(shard: Shard, full: torch.Tensor) -> torch.Tensor:
    found = torch.empty_like(shard.tensor, dtype=full.dtype)
    replace(shard, tensor=found).fill(full)
    return found


class Job:
    """A save in steps: those of all its ranks, one after the other."""

    def __init__(self, directory: str, states: Sequence[Mapping[str, Any]]) -> None:
        self.directory, self.save = directory, secrets.token_hex(6)
        self.contents = [contents_of(state, None) for state in states]
        self.plan = make_plan(tuple(one.listing for one in self.contents))
        self.version = folder.version_of(directory)

    def write(self) -> Mapping[int, Written]:
        storage_of(self.directory).make(self.directory)
        files = {}
        for rank, one in enumerate(self.contents):
            if items := shards.write_items(self.plan.entries(rank), one.shards):
                files[rank] = shards.write(self.directory, f"accel-{self.save}-{rank:05d}.safetensors", items)
        return files

    def finish(self, files: Mapping[int, Written]) -> None:
        new = Record(
            id=self.save,
            time=0.0,
            world_size=len(self.contents),
            files=list(files.values()),
            tensors=self.plan.stored({rank: number for number, rank in enumerate(files)}),
            values=self.contents[0].values,
        )
        folder.remove(self.directory, folder.commit(self.directory, self.version, new))


def save_as_ranks(held: Sequence[Sequence[Shard]], directory: str, *, equal: bool = True) -> None:
    """What ``accel.save`` does on as many ranks as there are lists of shards."""
    job = Job(directory, [{"model": Parts(own, equal=equal)} for own in held])
    job.finish(job.write())


def runs(directory: str | Path, name: str) -> Sequence[Run]:
    return record.read(str(directory)).tensors[name].runs


def split(number: int, places: Sequence[int]) -> list[tuple[int, int]]:
    """0 to ``number``, cut at places."""
    edges = [0, *places, number]
    return list(zip(edges, edges[1:], strict=False))


def values(shape: Shape, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Other numbers at each place, as far as the dtype has so many."""
    return (torch.arange(math.prod(shape)) * 7 + seed).view(shape).to(dtype)


# -- a model and its optimizer in parts, as an engine would hold them --------------------------------------------------


def side(number: int, parts: int, place: int) -> tuple[int, int]:
    """What falls to one of several places, as ``torch.chunk`` has it: the last ones may have less, or nothing."""
    each = -(-number // parts)
    return min(number, place * each), min(number, (place + 1) * each)


def columns(shape: Shape, world: int, rank: int) -> Box:
    return (*((0, n) for n in shape[:-1]), side(shape[-1], world, rank))


def rows_and_columns(shape: Shape, world: int, rank: int) -> Box:
    """Columns over pairs of ranks, and over the pairs the rows."""
    return (side(shape[0], world // 2, rank // 2), *columns(shape, 2, rank % 2)[1:])


def replicas(shape: Shape, world: int, rank: int) -> Box:
    return columns(shape, 2, rank % 2)


def both_ends(shape: Shape, world: int, rank: int) -> Box:
    return (side(shape[0], world // 2, rank // 2), *((0, n) for n in shape[1:-1]), side(shape[-1], 2, rank % 2))


Mesh = Callable[[Shape, int, int], Box]
MESHES: dict[str, Mesh] = {f.__name__: f for f in (columns, rows_and_columns, replicas, both_ends)}


class Net(nn.Module):
    """A matrix, three dimensions, what is not cut, and a buffer of few columns of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(7, 10))
        self.deep = nn.Parameter(torch.zeros(4, 5, 6))
        self.bias = nn.Parameter(torch.zeros(9))
        self.register_buffer("narrow", torch.zeros(5, 3, dtype=torch.bfloat16))


class Cut(Raw):
    """What lies on this rank of a ``Net`` whose parameters and buffers of several dimensions are cut."""

    def __init__(self, module: nn.Module, shapes: Mapping[str, Shape], mesh: str) -> None:
        super().__init__(module, {id(p): name for name, p in module.named_parameters()})
        self._shapes, self._mesh = shapes, mesh

    def box_of(self, name: str) -> Box:
        return MESHES[self._mesh](self._shapes[name], accel.world_size(), accel.rank())

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard:
        full = f"{name}/{key}" if key else name
        if len(self._shapes[name]) == 1:
            return whole(full, tensor)
        return box_shard(full, self._shapes[name], self.box_of(name), tensor.detach())

    def entries(self, optimizer: torch.optim.Optimizer) -> list[StateEntry]:
        return [replace(entry, shape=self._shapes[entry.name]) for entry in super().entries(optimizer)]

    def new_state(self, entry: StateEntry, key: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(entry.parameter, dtype=dtype)


class Divided:
    """A ``Net`` of which each rank has its parts, and an optimizer of these, once stepped."""

    def __init__(self, mesh: str) -> None:
        self.net = Net()
        shapes = {name: tuple(t.shape) for name, t in self.net.state_dict().items()}
        self.holdings = Cut(self.net, shapes, mesh)
        for name, tensor in [*self.net.named_parameters(), *self.net.named_buffers()]:
            if tensor.dim() > 1:
                tensor.data = torch.zeros(shape_of(self.holdings.box_of(name)), dtype=tensor.dtype)
        self.optimizer = stepped(self.net)
        names = self.holdings.parameter_names
        model = ModuleObject(self.net)
        optimizer = OptimizerObject(self.optimizer, None, names)
        model._holdings = optimizer._holdings = self.holdings
        self.state = {"model": model, "optimizer": optimizer}

    def shards(self) -> list[Shard]:
        return [*self.holdings.shards(None), *self.holdings.shards(self.optimizer)]

    def fill(self) -> None:
        for one in self.shards():
            one.fill(whole_value(one.name, one.shape, one.tensor.dtype))

    def wrong(self) -> list[str]:
        """Which parts have not the values that they should have; the count of steps too."""
        bad = []
        for one in self.shards():
            if not equal(one.tensor, expected(one, whole_value(one.name, one.shape, one.tensor.dtype))):
                bad.append(one.name)
        return bad + [str(s["step"]) for s in self.optimizer.state.values() if float(s["step"]) != 3]


def stepped(net: nn.Module) -> torch.optim.AdamW:
    """An optimizer that has state of all parameters, and counts three steps."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def whole_value(name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """What a tensor holds, of a model or of its optimizer; of all with one name the same."""
    return values(shape, dtype, sum(name.encode()) % 50)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)
