"""What the engines around a reducer ask it, and say about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..compression import comm_hook


def register(
    ddp: DistributedDataParallel,
    name: str | None,
    group: dist.ProcessGroup | None,
    rank: int,
    entries: list[int | None],
) -> Any:
    """Let a compression reduce the buckets, which adds None to ``entries`` at the last of them; returns its state."""
    state, hook = comm_hook(name, group, rank)

    # It holds no engine: the reducer keeps it, where no garbage collector looks.
    def noting(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        if bucket.is_last():
            entries.append(None)
        return future

    noting.__annotations__.clear()  # of which torch accepts only its own
    ddp.register_comm_hook(None, noting)
    return state


def complete(ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter], missing: Iterable[int]) -> None:
    """Let the reducer end a reduction for which these parameters got no gradient yet, and leave them without. Collective."""
    numbers = {id(p): n for n, p in enumerate(p for p in ddp.module.parameters() if p.requires_grad)}
    reducer: Any = ddp.reducer
    absent = [parameters[i] for i in missing]
    empty = [p for p in absent if p.grad is None]

    def take(_: torch.Tensor) -> None:
        for parameter in empty:
            parameter.grad = torch.zeros_like(parameter)
        for parameter in absent:
            try:
                reducer._autograd_hook(numbers[id(parameter)])
            except RuntimeError as error:
                # With find_unused_parameters it may know already that no gradient will come.
                if "ready only once" not in str(error):
                    raise

    # The reducer waits for its buckets in a callback of autograd's, which only a backward has.
    start = torch.zeros((), requires_grad=True)
    end = start.clone()
    end.register_hook(take)
    torch.autograd.grad(end, start)
    for parameter in empty:
        parameter.grad = None


def bucket_bytes(ddp: DistributedDataParallel) -> int:
    """Bytes of the reducer's buckets, which only the reducer sees."""
    data = ddp._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return sum(map(int, sizes.split(",")))


def explain_missing(
    names: Sequence[str], parameters: Sequence[nn.Parameter], missing: Iterable[int], options: object
) -> str:
    """Why a reduction never ended, and what to do."""
    texts = [
        names[i]
        if parameters[i].requires_grad
        else f"{names[i]} (frozen since: accel.refresh_trainable was not called)"
        for i in missing
    ]
    if texts:
        return (
            f"{len(texts)} parameters got no gradient in the last backward, so that its reduction never ended: "
            f"{', '.join(texts[:5])}{', ...' if len(texts) > 5 else ''}; use them in the loss, freeze them "
            f"(requires_grad_(False)), or pass backend=accel.{type(options).__name__}(find_unused_parameters=True)"
        )
    return (
        "every parameter got a gradient, but the reduction did not end: an exception ended the backward (then call "
        "zero_grad() and go on), or static_graph=True was given for a graph that changes or that "
        "torch.autograd.grad goes through"
    )
