"""Section ``sharded``: ways to split optimizer state and gradients over ranks.

DDP, fairscale's own wrappers, the engine, and a prototype that reduces while backward runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from .contenders import by_accel, plain_step, raw_ddp
from .section import Data, Panel, Section, Verdict
from .steps import Comparison, Makers, Step, compare, ratio_panel, ratio_verdicts, tell
from .workloads import Workload, with_adamw

RAW, AGAIN, ACCEL_DDP, ACCEL = "raw DDP", "raw DDP, again", 'accel, `backend="ddp"`', 'accel, `backend="sharded"`'
STOCK = "fairscale, `reduce_buffer_size=0`"
BUCKETS = "fairscale, `reduce_buffer_size=2**23` and its own `zero_grad()`"
EACH_MIB = "prototype: one reduction for each MiB while backward runs"
EACH_OWNER = "prototype: one reduction for each owner, at the end of backward"
#: By the number of ranks, what a step may cost as a multiple of raw DDP's.
LIMITS = {2: 0.86, 4: 0.80}
#: Of the time: more where the figure is close to its limit.
SHARES = {2: 4.0, 4: 3.0}
ABOUT = """250 Linear layers, 500 tensors, AdamW, over gloo; times in microseconds per step. Of all of them only DDP and \
accel are right in every raw loop: fairscale without buckets computes what DDP does but not with accumulation or \
clipping of a user's own, with its buckets it is also wrong after torch's `zero_grad()`, and the prototypes, with accel's own \
weights, allow one whole backward a step ([sharded](sharded.md) says why accel reduces at the step)."""


def by_fairscale(workload: Workload, buffer: int) -> Step:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model, _ = workload.build()
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-9)
    wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=buffer)
    if buffer:  # the optimizer's would take the gradients out of the buckets, which are then sent as they were
        optimizer.zero_grad = wrapped.zero_grad
    return plain_step(workload, wrapped, optimizer)


class Overlapped:
    """Reduces buckets of one owner each as soon as their gradients are there; only for one whole backward a step."""

    def __init__(self, workload: Workload, bucket: int) -> None:
        from accel.engines._oss import Shards

        self.model, self.optimizer = workload.build()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.parameters = parameters = list(self.model.parameters())
        self.shards = Shards(self.optimizer, [0] * self.world)
        self.shards.add(parameters)
        self.buckets: list[tuple[int, list[Any]]] = []
        open_: dict[int, tuple[list[Any], int]] = {}
        for p in reversed(parameters):
            owner = self.shards.owner[id(p)]
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
        self.shards.broadcast(self.parameters, self.rank)


def _makers() -> Makers:
    workload = with_adamw("many")
    return {
        RAW: lambda: raw_ddp(workload),
        AGAIN: lambda: raw_ddp(workload),
        ACCEL_DDP: lambda: by_accel(workload, "ddp"),
        ACCEL: lambda: by_accel(workload, "sharded"),
        STOCK: lambda: by_fairscale(workload, 0),
        BUCKETS: lambda: by_fairscale(workload, 2**23),
        EACH_MIB: lambda: Overlapped(workload, 1 << 18),
        EACH_OWNER: lambda: Overlapped(workload, 1 << 30),
    }


def _key(world: int) -> str:
    return f"{world} ranks"


def _measure(quick: bool) -> Data:
    title = "500 tensors, AdamW"
    comparisons = {_key(w): Comparison(f"{_key(w)}: {title}", w, _makers, (), share=SHARES[w]) for w in LIMITS}
    return compare(comparisons, 8.0 if quick else 60.0)


def _judge(data: Data) -> Iterator[Verdict]:
    for world, most in LIMITS.items():
        key = _key(world)
        for base, what, limit in (
            (RAW, "step of `sharded` against raw DDP", most),
            (STOCK, "step of `sharded` against stock fairscale without buckets", 1.02),
        ):
            yield from ratio_verdicts(data, key, f"{what}, {key}", ACCEL, base, AGAIN, limit, wall=base == STOCK)


def _draw(data: Data) -> list[Panel]:
    names = [RAW, ACCEL_DDP, ACCEL, STOCK, BUCKETS, EACH_MIB, EACH_OWNER]
    return [ratio_panel(data, "AdamW on 500 tensors, raw DDP is 1", names, 1.0)]


SECTION = Section("sharded", "Sharded optimizer state", _measure, lambda data: [ABOUT, *tell(data)], _judge, _draw)
