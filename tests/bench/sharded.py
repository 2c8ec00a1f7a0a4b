"""Section ``sharded``: DDP, fairscale's own wrappers, and the backend."""

from __future__ import annotations

from functools import partial

import torch

from .contenders import by_accel, plain_step, raw_ddp
from .steps import ACCEL, Comparison, Makers, Step, Target, section
from .workloads import MANY, RATE, with_adamw

RAW, STOCK = "raw DDP", "fairscale, `reduce_buffer_size=0`"
BUCKETS = "fairscale, `reduce_buffer_size=2**23` and its own `zero_grad()`"


def _by_fairscale(buffer: int) -> Step:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model, _ = MANY.build()
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=RATE)
    wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=buffer)
    if buffer:  # The optimizer's own would take the gradients out of the buckets, and stale buckets would be sent.
        optimizer.zero_grad = wrapped.zero_grad
    return plain_step(MANY, wrapped, optimizer)


def _makers() -> Makers:
    workload = with_adamw(MANY)
    return {
        RAW: partial(raw_ddp, workload),
        ACCEL: partial(by_accel, workload, "sharded"),
        STOCK: partial(_by_fairscale, 0),
        BUCKETS: partial(_by_fairscale, 2**23),
    }


def _ranks(world: int, limit: float, share: float) -> Comparison:
    targets = (
        Target(f"step of `sharded` against raw DDP, {world} ranks", limit, clocks=("cpu",)),
        Target(f"step of `sharded` against stock fairscale without buckets, {world} ranks", 1.02, STOCK),
    )
    return Comparison(f"{world} ranks: 500 tensors, AdamW", world, _makers, targets=targets, share=share)


ROWS = {"2 ranks": _ranks(2, 0.86, 4.0), "4 ranks": _ranks(4, 0.80, 3.0)}
SECTION = section("sharded", "Sharded optimizer state", ROWS, (8.0, 60.0))
