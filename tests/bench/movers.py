"""The ways to save and load that section ``checkpoints`` compares, on one rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

import accel
from accel.checkpoint.shards import memory

from .workloads import GPT, adamw

#: Does the work. The result of a background save is waited for when the clock has stopped.
Act = Callable[[], Any]
#: By group, the contender that the others are compared with.
BASES = {
    "save": "raw write and fsync",
    "load, warm": "raw pread",
    "load, cold": "raw pread",
    "verify": "raw pread of a share",
    "stall": "memcpy into reused buffers",
}


def _trained(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a GPT, and AdamW with its state."""
    torch.manual_seed(0)
    model = GPT(768, layers)
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Movers:
    """One state, replicated (``ddp``) or in shards (``fsdp``), with every way to move it."""

    def __init__(self, directory: str, backend: str, layers: int) -> None:
        self.directory = Path(directory)
        self.model, self.optimizer, _ = accel.setup(*_trained(layers), backend=backend, devices="cpu")
        self.state = {"model": self.model, "optimizer": self.optimizer}
        moments = [v for s in self.optimizer.state.values() for v in s.values() if v.dim() > 0]
        self.whole = {str(i): t.detach() for i, t in enumerate([*self.model.parameters(), *moments])}
        self.tensors = [t.to_local() if isinstance(t, DTensor) else t for t in self.whole.values()]
        self.nbytes = sum(t.nbytes for t in self.tensors)
        self.rank, world = accel.rank(), accel.world_size()
        #: Of this rank's tensors, those in the raw file of each rank.
        self.files = {self.rank: self.tensors}
        if backend == "ddp":
            by_size = sorted(self.tensors, key=lambda t: t.nbytes)
            self.files = {r: by_size[r::world] for r in range(world)}
        self.copies = [torch.zeros_like(t) for t in self.files[self.rank]]
        # DCP's background thread speaks to the other ranks while this one goes on.
        self.group = dist.new_group(backend="gloo")

    def digest(self) -> list[int]:
        return [xxhash.xxh3_64_intdigest(memory(t)) for t in self.tensors]

    def raw(self, rank: int) -> Path:
        return self.directory / f"raw{rank}"

    def raw_save(self) -> None:
        """Write and sync this rank's share of the bytes."""
        with open(self.raw(self.rank), "wb", buffering=0) as file:
            for tensor in self.files[self.rank]:
                view = memory(tensor)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())

    def raw_load(self) -> None:
        """Read all bytes of this rank."""
        for rank, tensors in self.files.items():
            with open(self.raw(rank), "rb", buffering=0) as file:
                for tensor in tensors:
                    file.readinto(memory(tensor))

    def raw_read(self) -> None:
        """Read this rank's share of the bytes into a buffer."""
        buffer = memoryview(bytearray(8 << 20))
        with open(self.raw(self.rank), "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def memcpy(self) -> None:
        """Copy the share that this rank writes into buffers that exist already."""
        for copy, tensor in zip(self.copies, self.files[self.rank], strict=True):
            copy.copy_(tensor)

    def acts(self, group: str) -> dict[str, Act]:
        """Return the contenders of a group by name."""
        path, background = self.directory / "accel", self.directory / "background"
        dcp_path, dcp_background = self.directory / "dcp", self.directory / "dcp-background"
        whole, subgroup = self.whole, self.group
        if group == "save":
            return {
                BASES[group]: self.raw_save,
                "accel": lambda: accel.save(self.state, path),
                "DCP": lambda: dcp.save(whole, checkpoint_id=dcp_path),
            }
        if group == "stall":
            return {
                BASES[group]: self.memcpy,
                "accel": lambda: accel.save(self.state, background, wait=False),
                "DCP": lambda: dcp.async_save(whole, checkpoint_id=dcp_background, process_group=subgroup),
            }
        if group == "verify":
            return {BASES[group]: self.raw_read, "accel": lambda: accel.verify(path)}
        return {
            BASES[group]: self.raw_load,
            "accel": lambda: accel.load(path, self.state),
            "DCP": lambda: dcp.load(whole, checkpoint_id=dcp_path),
        }
