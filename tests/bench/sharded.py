"""Section ``sharded``: DDP, fairscale's own wrappers, and the backend."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .contenders import by_accel, plain_step, raw_ddp
from .section import Data, Panel, Section, Verdict
from .steps import Comparison, Makers, Step, compare, ratio_panel, ratio_verdicts, tell
from .workloads import Workload, with_adamw

RAW, AGAIN, ACCEL_DDP, ACCEL = "raw DDP", "raw DDP, again", 'accel, `backend="ddp"`', 'accel, `backend="sharded"`'
STOCK = "fairscale, `reduce_buffer_size=0`"
BUCKETS = "fairscale, `reduce_buffer_size=2**23` and its own `zero_grad()`"
#: By the number of ranks, what a step may cost as a multiple of raw DDP's.
LIMITS = {2: 0.86, 4: 0.80}
#: Of the time: more where the figure is close to its limit.
SHARES = {2: 4.0, 4: 3.0}
ABOUT = """250 Linear layers, 500 tensors, AdamW, over gloo; times in microseconds per step. Of all of them only DDP and \
accel are right in every raw loop: fairscale without buckets computes what DDP does but not with accumulation or \
clipping of a user's own, and with its buckets it is also wrong after torch's `zero_grad()`."""


def by_fairscale(workload: Workload, buffer: int) -> Step:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model, _ = workload.build()
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-9)
    wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=buffer)
    if buffer:  # the optimizer's would take the gradients out of the buckets, which are then sent as they were
        optimizer.zero_grad = wrapped.zero_grad
    return plain_step(workload, wrapped, optimizer)


def _makers() -> Makers:
    workload = with_adamw("many")
    return {
        RAW: lambda: raw_ddp(workload),
        AGAIN: lambda: raw_ddp(workload),
        ACCEL_DDP: lambda: by_accel(workload, "ddp"),
        ACCEL: lambda: by_accel(workload, "sharded"),
        STOCK: lambda: by_fairscale(workload, 0),
        BUCKETS: lambda: by_fairscale(workload, 2**23),
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
    names = [RAW, ACCEL_DDP, ACCEL, STOCK, BUCKETS]
    return [ratio_panel(data, "AdamW on 500 tensors, raw DDP is 1", names, 1.0)]


SECTION = Section("sharded", "Sharded optimizer state", _measure, lambda data: [ABOUT, *tell(data)], _judge, _draw)
