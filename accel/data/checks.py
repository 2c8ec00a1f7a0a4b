"""Options of loaders, and checks before a loader is sharded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, Subset

from ..errors import LoaderError
from ..process import Process
from .sampling import length_of, mix, parts_of


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Options for how ``setup`` shards dataloaders.

    Args:
        shard: give each rank its share of every epoch. If False, each rank reads
            the loader as in raw PyTorch.
        even_batches: pad the last batch with the epoch's first samples, so that all
            ranks get the same number. If False, split it without padding.
        dispatch: read an iterable dataset on rank 0, which sends the batches.
        split_batches: divide ``batch_size`` among the ranks.
        move: move batches to the rank's device.
        seed: the seed of every epoch's order. None: rank 0's ``torch.initial_seed()``,
            or the order of raw PyTorch with a single process.
    """

    shard: bool = True
    even_batches: bool = True
    dispatch: bool = False
    split_batches: bool = False
    move: bool = True
    seed: int | None = None


class LoaderPlace(NamedTuple):
    """A rank's place among the replicas, and the device of its batches."""

    rank: int
    world: int
    device: torch.device
    #: The process that the loader was sharded for. None: valid after a teardown, too.
    process: Process | None = None


class Shape(NamedTuple):
    """The sampler and batch size. With ``units``, its items are not split."""

    sampler: Any
    batch: int
    drop_last: bool
    units: bool


def shape_of(loader: DataLoader[Any]) -> Shape:
    """Return the current shape. A program may change its batch sampler."""
    batcher: Any = loader.batch_sampler
    if type(batcher) is BatchSampler:
        return Shape(batcher.sampler, batcher.batch_size, batcher.drop_last, False)
    return Shape(loader.sampler if batcher is None else batcher, 1, False, True)


def check(loader: DataLoader[Any], options: LoaderOptions, world: int) -> None:
    """Raise LoaderError if a loader can't be sharded over ``world`` ranks."""
    shape = shape_of(loader)
    is_uneven = not options.even_batches and not shape.drop_last and world > 1
    is_stream = isinstance(loader.dataset, IterableDataset)
    problem = ""
    if options.dispatch and not (is_stream and options.shard and options.even_batches):
        problem = "dispatch=True needs an iterable dataset, shard=True and even_batches=True."
    elif options.split_batches and shape.batch % world:
        problem = f"batch_size={shape.batch} isn't a multiple of {world} ranks. Omit split_batches."
    elif not options.shard:
        return
    elif is_stream and type(loader).__iter__ is not DataLoader.__iter__:
        problem = f"{type(loader).__name__} reads a stream in its own __iter__. Use shard=False."
    elif is_stream and loader.num_workers and is_uneven:
        # Each worker has its own last step, so the ranks' loops would be at different samples.
        problem = "even_batches=False needs num_workers=0 or drop_last=True for a stream."
    for part in parts_of(shape.sampler):
        # Accelerate and other libraries call the attribute num_processes.
        is_distributed = hasattr(part, "num_replicas") or hasattr(part, "num_processes")
        if isinstance(part, Sampler) and is_distributed:
            kind = type(part).__name__
            problem = f"The loader is distributed already, by a {kind}. Remove the sampler."
    if problem:
        raise LoaderError(problem)


def describe(loader: DataLoader[Any], options: LoaderOptions) -> dict[str, Any]:
    """Return the facts of a loader, to compare across ranks. Local."""
    facts = asdict(options)
    if not options.shard:
        return facts
    dataset, shape = loader.dataset, shape_of(loader)
    is_stream = isinstance(dataset, IterableDataset)
    facts |= {
        "dataset": type(dataset).__name__,
        "length": length_of(dataset),
        "sampler": type(shape.sampler).__name__,
        "batch_size": shape.batch,
        "drop_last": shape.drop_last,
        "workers of the stream": is_stream and loader.num_workers,
    }
    for part in {id(p): p for p in (dataset, *parts_of(shape.sampler))}.values():
        # A split with a different seed on each rank mixes training and validation data.
        if isinstance(part, Subset | torch.utils.data.SubsetRandomSampler):
            name = f"{type(part).__name__}.indices (call accel.seed before you split)"
            facts[name] = mix([*getattr(part.indices, "tolist", part.indices.__iter__)()])
    return facts
