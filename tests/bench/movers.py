"""The ways to save and load that section ``checkpoints`` compares, on one rank; each peer as its own documentation shows."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

import accel
from accel.checkpoint.shards import memory

PIECE = 8 << 20
STEP = 256 << 10  # which is in a core's caches after it was read
#: Does the work; what it returns is to be waited for afterwards, when the clock has stopped.
Act = Callable[[], Any]


class Block(nn.Module):
    """The weights of a transformer's block, without a use for them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shapes = [(width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(*shape)) for shape in shapes)


def build(layers: int, width: int = 768) -> nn.Module:
    return nn.Sequential(nn.Embedding(8000, width), *(Block(width) for _ in range(layers)))


def trained(net: nn.Module) -> torch.optim.Optimizer:
    """AdamW with its state."""
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    for p in net.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sync_files(path: Path) -> None:
    """Make durable what a library has only written."""
    for file in [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _views(tensors: list[torch.Tensor], first: int, last: int, step: int = PIECE) -> Iterator[memoryview]:
    """The bytes ``first`` to ``last`` of all tensors, one behind the other."""
    start = 0
    for tensor in tensors:
        view = memory(tensor)
        low, high = max(first - start, 0), min(last - start, len(view))
        for place in range(low, high, step):
            yield view[place : min(place + step, high)]
        start += len(view)


class Movers:
    """One state, replicated (``ddp``) or in shards (``fsdp``), with every way to move it."""

    def __init__(self, directory: str, backend: str, layers: int, width: int = 768) -> None:
        self.directory = Path(directory)
        self.layers, self.width = layers, width
        self.model, self.optimizer, _ = accel.setup(*self._new(), backend=backend, devices="cpu")
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.replicated = backend == "ddp"
        held = [v for s in self.optimizer.state.values() for v in s.values() if v.dim() > 0]
        self.whole = {str(i): t.detach() for i, t in enumerate([*self.model.parameters(), *held])}
        self.tensors = [local(t) for t in self.whole.values()]
        self.rank, self.world = accel.rank(), accel.world_size()
        self.nbytes = sum(t.nbytes for t in self.tensors)
        share = -(-self.nbytes // self.world)
        cuts = [min(share * r, self.nbytes) for r in range(self.world + 1)]
        #: Which bytes of this rank's tensors lie in which rank's raw file, and which of them this rank writes.
        self.files = {r: (cuts[r], cuts[r + 1]) for r in range(self.world)}
        if not self.replicated:
            self.files = {self.rank: (0, self.nbytes)}
        self.copies: list[torch.Tensor] = []
        self.stager: Any = None
        # DCP's background thread speaks to the other ranks while this one goes on.
        self.group = dist.new_group(backend="gloo")
        self.accelerator: Any = None

    def _new(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = build(self.layers, self.width)
        return net, trained(net)

    def digest(self) -> list[int]:
        return [xxhash.xxh3_64_intdigest(memory(t)) for t in self.tensors]

    def acts(self, group: str) -> dict[str, Act]:
        """By title; the first is what the others are compared with."""
        if group == "save":
            found: dict[str, Act] = {RAW_SAVE: self.raw_save, HASHED_SAVE: lambda: self.raw_save(hashed=True)}
            found |= {ACCEL: self.accel_save, "safetensors": self.st_save}
            found |= {"torch.save": self.torch_save, "DCP": self.dcp_save, "DCP, safetensors": self.hf_save}
            return found | ({"Accelerate": self.accelerate_save} if self.replicated else {})
        if group == "load":
            found = {
                RAW_LOAD: self.raw_load,
                HASHED_LOAD: lambda: self.raw_load(hashed=True),
                ACCEL: self.accel_load,
            }
            found |= {"safetensors": self.st_load, "torch.load(mmap)": self.torch_load}
            found |= {"DCP": self.dcp_load, "DCP, safetensors": self.hf_load}
            return found | ({"Accelerate": self.accelerate_load} if self.replicated else {})
        if group == "async":
            return {MEMCPY: self.memcpy, ACCEL: self.accel_stall, "DCP": self.dcp_stall, REUSED: self.dcp_reused}
        return {READ: self.raw_read, HASHED_READ: lambda: self.raw_read(hashed=True), ACCEL: self.accel_verify}

    # -- by hand --------------------------------------------------------------------------------------------------

    def raw_save(self, hashed: bool = False) -> None:
        fd = os.open(self.directory / f"{'hashed' if hashed else 'raw'}{self.rank}", os.O_WRONLY | os.O_CREAT)
        state = xxhash.xxh3_64()
        for view in _views(self.tensors, *self.files[self.rank], STEP if hashed else PIECE):
            if hashed:
                state.update(view)
            while view:
                view = view[os.write(fd, view) :]
        os.fsync(fd)
        os.close(fd)

    def raw_load(self, hashed: bool = False) -> None:
        """All bytes that this rank needs, from the files in which they lie; ``hashed``: its share of them on the way."""
        for rank, (first, last) in self.files.items():
            fd = os.open(self.directory / f"raw{rank}", os.O_RDONLY)
            own, state, offset = hashed and rank == self.rank, xxhash.xxh3_64(), 0
            for view in _views(self.tensors, first, last, STEP if own else PIECE):
                offset += os.preadv(fd, [view], offset)
                if own:
                    state.update(view)
            os.close(fd)

    def _pieces(self, rank: int, step: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(step))
        fd = os.open(self.directory / f"raw{rank}", os.O_RDONLY)
        offset = 0
        while count := os.preadv(fd, [buffer], offset):
            offset += count
            yield buffer[:count]
        os.close(fd)

    def raw_read(self, hashed: bool = False) -> None:
        state = xxhash.xxh3_64()
        for piece in self._pieces(self.rank, STEP if hashed else PIECE):
            if hashed:
                state.update(piece)

    def memcpy(self) -> None:
        """What this rank writes, into buffers that are there already."""
        views = list(_views(self.tensors, *self.files[self.rank]))
        if not self.copies:
            self.copies = [torch.zeros(len(v), dtype=torch.uint8) for v in views]
        for copy, view in zip(self.copies, views, strict=True):
            copy.copy_(torch.frombuffer(view, dtype=torch.uint8))

    # -- accel ----------------------------------------------------------------------------------------------------

    def accel_save(self) -> None:
        accel.save(self.state, self.directory / "accel")

    def accel_load(self) -> None:
        accel.load(self.directory / "accel", self.state)

    def accel_stall(self) -> Any:
        return accel.save(self.state, self.directory / "background", wait=False)

    def accel_verify(self) -> None:
        accel.verify(self.directory / "accel")

    # -- torch ----------------------------------------------------------------------------------------------------

    def torch_save(self) -> None:
        path = self.directory / "torch.pt"
        full = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in self.whole.items()}
        if accel.is_main():
            torch.save(full, path)
            sync_files(path)

    def torch_load(self) -> None:
        self._fill(torch.load(self.directory / "torch.pt", mmap=True), cut=not self.replicated)

    def _fill(self, found: dict[str, torch.Tensor], cut: bool = False) -> None:
        for tensor, name in zip(self.tensors, self.whole, strict=True):
            if name in found:
                tensor.copy_(found[name].chunk(self.world)[self.rank] if cut else found[name])

    def dcp_save(self) -> None:
        dcp.save(self.whole, checkpoint_id=self.directory / "dcp")

    def dcp_load(self) -> None:
        dcp.load(self.whole, checkpoint_id=self.directory / "dcp")

    def hf_save(self) -> None:
        path = self.directory / "hf"
        dcp.save(self.whole, storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True))
        if accel.is_main():
            sync_files(path)

    def hf_load(self) -> None:
        dcp.load(self.whole, storage_reader=HuggingFaceStorageReader(str(self.directory / "hf")))

    def dcp_stall(self) -> Any:
        return dcp.async_save(self.whole, checkpoint_id=self.directory / "dcp-background", process_group=self.group)

    def dcp_reused(self) -> Any:
        if self.stager is None:
            names = ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy")
            self.stager = DefaultStager(StagingOptions(**dict.fromkeys(names, False)))
        path = self.directory / "dcp-reused"
        return dcp.async_save(self.whole, checkpoint_id=path, async_stager=self.stager, process_group=self.group)

    # -- others ---------------------------------------------------------------------------------------------------

    def _mine(self) -> dict[str, torch.Tensor]:
        """Whole tensors, about this rank's share of the bytes; its shards, where they are."""
        named = dict(zip(self.whole, self.tensors, strict=True))
        if not self.replicated:
            return named
        loads, mine = [0] * self.world, {}
        for name, tensor in named.items():
            rank = loads.index(min(loads))
            loads[rank] += tensor.nbytes
            if rank == self.rank:
                mine[name] = tensor
        return mine

    def st_save(self) -> None:
        path = self.directory / f"st{self.rank}.safetensors"
        save_file(self._mine(), path)
        sync_files(path)

    def st_load(self) -> None:
        for rank in self.files:
            self._fill(load_file(self.directory / f"st{rank}.safetensors"))

    def accelerate_save(self) -> None:
        if self.accelerator is None:
            self.accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
            self.accelerator.prepare(*self._new())
        path = self.directory / "accelerate"
        self.accelerator.save_state(str(path))
        if accel.is_main():
            sync_files(path)

    def accelerate_load(self) -> None:
        self.accelerator.load_state(str(self.directory / "accelerate"))


ACCEL = "accel"
RAW_SAVE, RAW_LOAD, READ = "raw write and fsync", "raw pread", "raw pread of a share"
HASHED_SAVE, HASHED_LOAD = "raw write and fsync, with xxh3", "raw pread, with xxh3"
HASHED_READ = "raw pread of a share, with xxh3"
MEMCPY, REUSED = "memcpy into reused buffers", "DCP, its copy reused"
