"""A model's engine in a few lines of text."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .registry import registry
from .shard import Shard


def summary(model: nn.Module) -> str:
    """The model's engine: backend, ranks, precision, parameters, and the bytes that lie on this rank. Local.

    Print it where it is wanted: ``accel.print(accel.summary(model))`` on rank 0, with ``every_rank=True`` on all.

    Args:
        model: a model that is set up.

    Raises:
        AccelError: it is not.
    """
    engine = registry.of_handle(model)
    place, options = engine.process.place, engine.options
    total = sum(engine.numels)
    trainable = sum(n for n, p in zip(engine.numels, engine.parameters, strict=True) if p.requires_grad)
    optimizers = [stepper.optimizer for stepper in engine.steppers.values()]
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    weights = _bytes(engine.shards(None))
    state = sum(_bytes(engine.shards(optimizer)) for optimizer in optimizers)
    ranks = f"{place.world_size} rank{'s' if place.world_size > 1 else ''}"
    rows = {
        "backend": f"{engine.name} on {ranks} ({engine.process.device.type}), {engine.precision.name}",
        "options": f"{options}",
        "parameters": f"{total:,}: {trainable:,} trainable, {total - trainable:,} frozen",
        "optimizers": kinds,
        f"on rank {place.rank}": f"weights and buffers {_megabytes(weights)}, optimizer state {_megabytes(state)}",
    }
    width = max(map(len, rows))
    return "\n".join([type(engine.module).__name__, *(f"  {key.ljust(width)}  {text}" for key, text in rows.items())])


def _bytes(shards: Iterable[Shard]) -> int:
    """What shards occupy; memory that several of them name counts once."""
    seen = {(s.tensor.data_ptr(), s.tensor.numel()): s.tensor.numel() * s.tensor.element_size() for s in shards}
    return sum(seen.values())


def _megabytes(number: int) -> str:
    return f"{number / 1e6:,.2f} MB"
