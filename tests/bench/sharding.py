"""``python -m tests.bench.sharding``: the ways to split optimizer state and gradients over ranks, for docs/sharded.md.

All train the 500-tensor model: DDP, fairscale's own wrappers, the engine, and a prototype that reduces while backward runs.
"""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import accel  # noqa: E402
from accel.engines._exchange import broadcast_from_owners  # noqa: E402
from accel.engines._sharded import Owners  # noqa: E402

from .contenders import Step, plain_step  # noqa: E402
from .measure import _together  # noqa: E402
from .ranks import run  # noqa: E402
from .timing import Times, build, interleave, over_ranks, summarise  # noqa: E402
from .workloads import MANY, Workload  # noqa: E402


def adamw(workload: Workload) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = workload.build()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-9)


def by_engine(workload: Workload, backend: Any) -> Step:
    handles = accel.setup(*adamw(workload), backend=backend, devices="cpu")
    return plain_step(workload, handles.model, handles.optimizers)


def by_fairscale(workload: Workload, buffer: int) -> Step:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model, _ = workload.build()
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-9)
    return plain_step(workload, ShardedDataParallel(model, optimizer, reduce_buffer_size=buffer), optimizer)


class Overlapped:
    """Reduces buckets of one owner each as soon as their gradients are there; only for one whole backward a step."""

    def __init__(self, workload: Workload, bucket: int) -> None:
        self.model, self.optimizer = adamw(workload)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        parameters = list(self.model.parameters())
        owners = Owners(self.rank, self.world)
        owners.take(parameters)
        self.by_owner: list[list[Any]] = [[] for _ in range(self.world)]
        self.buckets: list[tuple[int, list[Any]]] = []
        open_: dict[int, tuple[list[Any], int]] = {}
        for p in reversed(parameters):
            owner = owners.rank_of[id(p)]
            self.by_owner[owner].append(p)
            tensors, size = open_.get(owner, ([], 0))
            tensors.append(p)
            open_[owner] = (tensors, size + p.numel())
            if size + p.numel() >= bucket:
                self.buckets.append((owner, open_.pop(owner)[0]))
        self.buckets += [(owner, tensors) for owner, (tensors, _) in open_.items()]
        self.missing = [len(tensors) for _, tensors in self.buckets]
        self.works: list[Any] = []
        for number, (_, tensors) in enumerate(self.buckets):
            for p in tensors:
                p.register_post_accumulate_grad_hook(lambda _, number=number: self.came(number))
        self.inputs, self.targets = workload.batch()
        self.loss = workload.loss

    def came(self, number: int) -> None:
        self.missing[number] -= 1
        if self.missing[number] == 0:
            owner, tensors = self.buckets[number]
            self.missing[number] = len(tensors)
            flat = torch.cat([p.grad.view(-1) for p in tensors]).mul_(1 / self.world)
            self.works.append((dist.reduce(flat, owner, async_op=True), owner, tensors, flat))

    @torch.no_grad()
    def finish(self) -> None:
        for work, owner, tensors, flat in self.works:
            work.wait()
            parts = flat.split([p.numel() for p in tensors])
            for p, part in zip(tensors, parts, strict=True):
                p.grad = part.view(p.shape) if owner == self.rank else None
        self.works.clear()

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(self.inputs), self.targets).backward()
        self.finish()
        self.optimizer.step()
        broadcast_from_owners(self.by_owner, self.rank, None)


def _variants(seconds: float) -> dict[str, Times]:
    def ddp() -> Step:
        model, optimizer = adamw(MANY)
        return plain_step(MANY, nn.parallel.DistributedDataParallel(model), optimizer)

    makers: dict[str, Any] = {
        "raw DDP": ddp,
        'accel, backend="ddp"': lambda: by_engine(MANY, "ddp"),
        'accel, backend="sharded"': lambda: by_engine(MANY, "sharded"),
        "fairscale, reduce_buffer_size=0": lambda: by_fairscale(MANY, 0),
        "fairscale, reduce_buffer_size=2**23": lambda: by_fairscale(MANY, 2**23),
        "reduced while backward runs, buckets of 1 MiB": lambda: Overlapped(MANY, 1 << 18),
        "reduced while backward runs, one bucket for each owner": lambda: Overlapped(MANY, 1 << 30),
    }
    return interleave([build(name, make) for name, make in makers.items()], seconds, 1, **_together())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sharding", description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    seconds = parser.parse_args().seconds
    for world in (2, 4):
        print(f"\n{world} ranks\n\n| | cpu, ms | wall, ms | cpu ratio | wall ratio |\n|---|---:|---:|---:|---:|")
        for row in summarise(over_ranks(run(world, _variants, seconds))):
            figures = [f"{row.cpu / 1e3:.1f}", f"{row.wall / 1e3:.1f}", f"{row.cpu_ratio:.2f}", f"{row.wall_ratio:.2f}"]
            print(f"| {row.name} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
