"""Options of loaders, and checks before a loader is sharded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, final

import torch
import torch.utils.data as torch_data
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from ..errors import LoaderError
from ..process import Process
from .sampling import length_of, mix, parts_of


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Options for how ``setup`` shards dataloaders.

    Args:
        shard: give each rank its share of every epoch. False leaves samplers and
            datasets as they are, so each rank reads the loader as in raw PyTorch.
        even_batches: pad the last batch from the start of the epoch, so that all ranks
            get equally many samples. False splits it as it is: ranks may differ by one
            sample or one batch.
        dispatch: let rank 0 read an iterable dataset and send each rank its batches.
        split_batches: treat a loader's ``batch_size`` as that of all ranks together.
        move: move batches to the rank's device.
        seed: the seed of every epoch's order. None takes rank 0's
            ``torch.initial_seed()``, and in one process draws as raw PyTorch does.
    """

    shard: bool = True
    even_batches: bool = True
    dispatch: bool = False
    split_batches: bool = False
    move: bool = True
    seed: int | None = None


class LoaderPlace(NamedTuple):
    """A rank's place among the replicas of a model, and the device of its batches."""

    rank: int
    world: int
    device: torch.device
    #: The process for which the loader was sharded. None is always valid.
    process: Process | None = None


class Shape(NamedTuple):
    """The sampler and batch size. With ``units`` an item of the sampler stays whole."""

    sampler: Any
    batch: int
    drop_last: bool
    units: bool


def shape_of(loader: DataLoader[Any]) -> Shape:
    """Read the shape each time, because a program may change its batch sampler."""
    batcher: Any = loader.batch_sampler
    if batcher is None:
        return Shape(loader.sampler, 1, False, True)
    is_plain = type(batcher) is BatchSampler
    if is_plain or (isinstance(batcher, BatchSampler) and loader.batch_size is not None):
        return Shape(batcher.sampler, batcher.batch_size, batcher.drop_last, False)
    return Shape(batcher, 1, False, True)


def has_own_iter(loader: DataLoader[Any]) -> bool:
    """True if the loader's class has its own ``__iter__``."""
    return type(loader).__iter__ is not DataLoader.__iter__


def check(loader: DataLoader[Any], options: LoaderOptions, world: int) -> None:
    """Raise LoaderError if a loader can't be sharded over ``world`` ranks."""
    shape = shape_of(loader)
    even = options.even_batches
    is_uneven = not even and not shape.drop_last and world > 1
    is_stream = isinstance(loader.dataset, IterableDataset)
    off = "Use a plain DataLoader, or LoaderOptions(shard=False)."
    problem = ""
    if options.dispatch and not (is_stream and options.shard and even):
        problem = "dispatch=True needs an iterable dataset, shard=True and even_batches=True."
    elif options.split_batches and shape.batch % world:
        problem = f"batch_size={shape.batch} does not divide over {world} ranks. Use a multiple."
    elif not options.shard:
        return
    elif is_stream and has_own_iter(loader):
        kind = type(loader).__qualname__
        problem = f"{kind} reads an iterable dataset in its own __iter__. {off}"
    elif is_stream and loader.num_workers and is_uneven:
        # Each worker has its own last step, so the ranks' loops would be at different samples.
        problem = (
            "even_batches=False needs num_workers=0 for an iterable dataset. "
            "Use even_batches=True or drop_last=True."
        )
    for part in (*parts_of(loader.batch_sampler), *parts_of(loader.sampler)):
        # Accelerate and others name it num_processes.
        ranks = getattr(part, "num_replicas", None) or getattr(part, "num_processes", None)
        is_distributed = isinstance(part, torch_data.DistributedSampler) or ranks not in (None, 1)
        if isinstance(part, Sampler) and is_distributed:
            kind = type(part).__qualname__
            problem = f"The loader is distributed already, by a {kind}. {off}"
    if problem:
        raise LoaderError(problem)


def describe(loader: DataLoader[Any], options: LoaderOptions) -> dict[str, Any]:
    """Return the facts of a loader, to compare them over the ranks. Local."""
    facts = asdict(options)
    if not options.shard:
        return facts
    dataset, shape = loader.dataset, shape_of(loader)
    facts |= {
        "dataset": type(dataset).__qualname__,
        "length": length_of(dataset),
        "sampler": type(shape.sampler).__qualname__,
        "batch size": shape.batch,
        "drop_last": shape.drop_last,
        "custom batches": shape.units,
        "workers of the stream": isinstance(dataset, IterableDataset) and loader.num_workers,
    }
    if isinstance(dataset, torch_data.Subset):
        # random_split with a different seed on each rank mixes training and validation data.
        indices: Any = dataset.indices
        if hasattr(indices, "tolist"):
            indices = indices.tolist()
        facts["checksum of the Subset's indices"] = mix(indices)
    return facts
