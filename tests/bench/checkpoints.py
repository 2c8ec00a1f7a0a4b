"""Saving and loading against the same bytes moved by hand, ``torch.save`` and torch's distributed checkpoint.

``python -m tests.bench.checkpoints [ranks] [rounds] [layers]`` prints seconds, medians of interleaved rounds, and their ratio
to writing (and syncing) or reading this rank's share of the same bytes with plain calls.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import accel
from accel.checkpoint.dtypes import memory
from tests.distributed import close_all, run


def build(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A transformer's weights, with the state of AdamW."""
    block = [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
    net = nn.ParameterList([nn.Parameter(torch.randn(*shape)) for shape in [(8000, 768), *block * layers]])
    optimizer = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return net, optimizer


class Contenders:
    """Each way of saving and loading, on one rank."""

    def __init__(self, directory: str, layers: int) -> None:
        self.directory = Path(directory)
        self.net, self.optimizer = build(layers)
        self.model, handle, _ = accel.setup(self.net, self.optimizer)
        self.state = {"model": self.model, "optimizer": handle}
        held = [v for s in self.optimizer.state.values() for v in s.values() if v.dim() > 0]
        self.tensors = [p.data for p in self.net.parameters()] + held
        self.nbytes = sum(t.nbytes for t in self.tensors)
        size = -(-self.nbytes // accel.world_size())
        self.share = torch.cat([t.reshape(-1) for t in self.tensors])[size // 4 * accel.rank() :][: size // 4]

    def plain_save(self) -> None:
        fd = os.open(self.directory / f"plain{accel.rank()}", os.O_WRONLY | os.O_CREAT)
        view = memory(self.share)
        while view:
            view = view[os.write(fd, view[: 8 << 20]) :]
        os.fsync(fd)
        os.close(fd)

    def plain_load(self) -> None:
        """All bytes, as each rank needs them."""
        for rank in range(accel.world_size()):
            fd = os.open(self.directory / f"plain{rank}", os.O_RDONLY)
            offset = 0
            for tensor in self.tensors:
                offset += os.preadv(fd, [memory(tensor)], offset)
            os.close(fd)

    def accel_save(self) -> None:
        accel.save(self.state, self.directory / "accel")

    def accel_stall(self) -> None:
        self.pending = accel.save(self.state, self.directory / "background", wait=False)

    def accel_load(self) -> None:
        accel.load(self.directory / "accel", self.state)

    def accel_stream(self) -> None:
        accel.load(self.directory / "accel", self.state, check="stream")

    def torch_save(self) -> None:
        if accel.is_main():
            state = {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, self.directory / "torch.pt")

    def torch_load(self) -> None:
        state = torch.load(self.directory / "torch.pt", mmap=True)
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _flat(self) -> dict[str, Any]:
        return {str(i): tensor for i, tensor in enumerate(self.tensors)}

    def dcp_save(self) -> None:
        dcp.save(self._flat(), checkpoint_id=self.directory / "dcp")

    def dcp_load(self) -> None:
        dcp.load(self._flat(), checkpoint_id=self.directory / "dcp")


ORDER = ["plain_save", "accel_save", "torch_save", "dcp_save", "accel_stall"]
ORDER += ["plain_load", "accel_load", "accel_stream", "torch_load", "dcp_load"]


def measure(directory: str, rounds: int, layers: int) -> tuple[int, dict[str, list[float]]]:
    contenders = Contenders(directory, layers)
    values = [t.clone() for t in contenders.tensors]
    spent: dict[str, list[float]] = {name: [] for name in ORDER}
    for _ in range(rounds):
        accel.barrier()
        if accel.is_main():
            shutil.rmtree(directory)
            os.makedirs(directory)
        for name in ORDER:
            spent[name].append(_timed(getattr(contenders, name)))
            if name == "accel_stall" and contenders.pending is not None:
                contenders.pending.result()
            for tensor, value in zip(contenders.tensors, values, strict=True):
                tensor.copy_(value)
    return contenders.nbytes, spent


def _timed(act: Callable[[], None]) -> float:
    accel.barrier()
    begin = time.perf_counter()
    act()
    accel.barrier()
    return time.perf_counter() - begin


def main() -> None:
    ranks, rounds, layers = (int(a) for a in [*sys.argv[1:], "2", "5", "6"][: max(3, len(sys.argv) - 1)][:3])
    with tempfile.TemporaryDirectory(dir=os.environ.get("ACCEL_BENCH_DIR")) as directory:
        nbytes, spent = run(ranks, measure, directory, rounds, layers, timeout=3600)[0]
    print(f"{ranks} ranks, {nbytes / 1e6:.0f} MB, medians of {rounds} rounds")
    for name in ORDER:
        floor = spent["plain_save" if ORDER.index(name) < 5 else "plain_load"]
        ratio = statistics.median(a / b for a, b in zip(spent[name], floor, strict=True))
        print(f"{name:14} {statistics.median(spent[name]):7.3f} s  ratio {ratio:5.2f}")
    close_all()


if __name__ == "__main__":
    main()
