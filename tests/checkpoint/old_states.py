"""The states that earlier versions saved: `python -m tests.checkpoint.old_states DIRECTORY` saves them with this version."""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

import accel
from tests.distributed import run

VALUES: dict[str, Any] = {
    "plain": [None, True, 3, 2.5, "text", {"a": [1], 4: (5,)}, {"!": 1}],
    "numbers": [2**70, float("inf"), 1 - 2j, range(3, 9, 2), numpy.float32(1.5), torch.Size([2, 3])],
    "sets": [{1, 2}, frozenset({"x"}), b"\x00\xff", bytearray(b"abc")],
    "types": [torch.bfloat16, torch.device("cpu"), Path("a/b")],
    "containers": [
        collections.OrderedDict(b=1, a=2),
        collections.Counter({5: 2}),
        collections.deque([1, 2], maxlen=7),
        collections.defaultdict(list, {1: [2]}),
        SimpleNamespace(a=1),
        argparse.Namespace(lr=0.1),
    ],
    "arrays": [numpy.arange(6, dtype=numpy.int16).reshape(2, 3), numpy.arange(500.0), torch.arange(3)],
}


def numbered(shape: Any, first: int) -> torch.Tensor:
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def state_of(backend: Any, first: int) -> dict[str, Any]:
    """A model, an optimizer with state, a loader and tensors. ``first`` sets all values."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    raw = torch.optim.AdamW(net.parameters(), lr=0.1 + first)
    for number, parameter in enumerate(net.parameters()):
        parameter.data.copy_(numbered(parameter.shape, first + 100 * number))
        raw.state[parameter] = {
            "step": torch.tensor(float(first)),
            "exp_avg": numbered(parameter.shape, first + 1000),
            "exp_avg_sq": numbered(parameter.shape, first + 2000),
        }
    data = DataLoader(TensorDataset(torch.arange(24.0)), batch_size=2, shuffle=True)
    options = accel.LoaderOptions(seed=first)
    model, optimizer, loader = accel.setup(net, raw, data, backend=backend, loader_options=options)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": accel.rng_state()}
    return {**state, "complex": torch.tensor([1 + 2j, 3]) * first, "half": numbered((4, 3), first).half()}


def save(directory: str, name: str) -> list[float]:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    backends = {"ddp": "ddp", "fsdp": "fsdp", "cut": accel.FSDP(tensor_parallel=2, plan=plan)}
    state, given = state_of(backends[name], 1), list[float]()
    for number, (batch,) in enumerate(state["loader"]):
        given += batch.tolist()
        if number == 2:
            accel.save({**state, "values": VALUES}, directory)
            break
    return given


if __name__ == "__main__":
    for name in ("ddp", "cut"):
        print(name, run(2, save, f"{sys.argv[1]}/{name}", name))
