"""``ddp``: ``torch.nn.parallel.DistributedDataParallel``, a process for each device."""

from dataclasses import dataclass
from typing import final

from ._reducer import ReducingEngine, ReducingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(ReducingOptions):
    """Options of ``ddp``; names and meanings are those of ``DistributedDataParallel`` where it has them.

    Args:
        find_unused_parameters: allow parameters that get no gradient in a step.
        static_graph: the graph and the used parameters are the same in every step; excludes ``no_sync``.
        gradient_as_bucket_view: gradients live in the reducer's buckets, which saves a copy of them.
        batched_grad_copy: gradients enter a bucket together, not one by one (torch 2.13; without effect before it).
        bucket_cap_mb: size of a bucket in MiB (None: torch's default of 25, its first bucket being 1).
        broadcast_buffers: all ranks take rank 0's buffers once a step.
        sync_batchnorm: BatchNorm over the batches of all ranks (accelerators only).
        comm_hook: compress gradients on the wire: "fp16", "bf16" or "powersgd" (Vogels et al., arXiv 1905.13727).
        powersgd_rank: rank of PowerSGD's approximation.
        auto_refresh: look for a change of ``requires_grad`` before each forward.
    """


@final
class DDPEngine(ReducingEngine):
    """The reducer around the module: all of it is ``ReducingEngine`` (``_reducer.py``)."""

    name = "ddp"
    options_type = DDP
