"""Which children of a Sequential make which stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..footprint import Footprint, MemoryUse
from ..process import Process
from ._memory import layers, stages
from ._pipeline_stages import Named, Swapped, flatten, unflatten, without_hooks

Balance = Sequence[int] | str


def sizes_of(children: Sequence[Named]) -> list[float]:
    """The bytes of each child's parameters and buffers."""
    return [float(sum(t.nbytes for t in (*child.parameters(), *child.buffers()))) for _, child in children]


def balanced(weights: Sequence[float], count: int) -> list[int]:
    """How many neighbours each of ``count`` groups gets, so that the heaviest group is as light as can be."""
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    best: list[tuple[float, float, tuple[int, ...]]] = [(total[i], total[i] ** 2, (i,)) for i in range(len(total))]
    for groups in range(2, count + 1):
        following = []
        for end in range(len(total)):
            options = [
                (max(best[at][0], last := total[end] - total[at]), best[at][1] + last**2, (*best[at][2], end - at))
                for at in range(groups - 1, end)
            ]
            following.append(min(options, default=(float("inf"), 0.0, ())))
        best = following
    return list(best[-1][2])


def times_of(children: Sequence[Named], value: Any) -> list[float]:
    """Seconds of each child's forward and backward on ``value``; nothing of the model or the random numbers changes."""
    seconds = []
    cuda = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(cuda), torch.inference_mode(False), torch.enable_grad():
        for name, child in children:
            tensors, form = flatten(value, f"the input of {name}")
            leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
            wanted = [t for t in (*leaves, *child.parameters()) if t.requires_grad]
            best = float("inf")
            buffers = [(m, k, b) for m in child.modules() for k, b in m._buffers.items() if b is not None]
            with Swapped(buffers), without_hooks(wanted):
                for _ in range(3):
                    copies = [t.clone() for t in leaves]  # a child may work in place
                    start = time.perf_counter()
                    value = child(unflatten(form, copies))
                    out = [t for t in flatten(value, f"the output of {name}")[0] if t.requires_grad]
                    if out and wanted:
                        torch.autograd.grad(out, wanted, [torch.ones_like(t) for t in out], allow_unused=True)
                    if cuda:
                        torch.cuda.synchronize()
                    best = min(best, time.perf_counter() - start)
            seconds.append(best)
    return seconds


def count_stages(balance: Balance, process: Process) -> int:
    """One for each rank or device; on a single device, as many as the balance lists."""
    if process.place.world_size > 1:
        return process.place.world_size
    if len(process.devices) > 1 or isinstance(balance, str):
        return len(process.devices)
    return len(balance)


def listed(balance: Balance, children: Sequence[Named], stages: int) -> list[int]:
    """The number of children of each stage, by size where it is not given."""
    return balanced(sizes_of(children), stages) if isinstance(balance, str) else list(balance)


def split(children: Sequence[Named], balance: Sequence[int]) -> list[list[Named]]:
    """The children of each stage."""
    rest = iter(children)
    return [[next(rest) for _ in range(count)] for count in balance]


def predicted(footprint: Footprint, balance: Balance, world_size: int) -> tuple[MemoryUse, ...]:
    """What each rank's stage needs; nothing where the module is no Sequential of so many children."""
    number = len(footprint.layers)
    if number < world_size:
        return ()
    counts: Sequence[int] = () if isinstance(balance, str) else balance
    if len(counts) != world_size or sum(counts) != number:
        parameters = [sum(p.nbytes for p in layer) for layer in layers(footprint)]
        sizes = zip(parameters, footprint.layers, strict=True)
        counts = balanced([float(nbytes + buffers) for nbytes, (_, buffers) in sizes], world_size)
    return stages(footprint, counts)
