"""Which dataloaders can be distributed, and what of them must be equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch.utils.data as torch_data
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from ..errors import LoaderError
from ..process import world_size
from .feeds import Shape, shape_of
from .iteration import LoaderOptions
from .sampling import Generators, Private, Source, digest, drawn_from, own_generators, parts

_OFF = "use LoaderOptions(shard=False)"
_COMPARED = 1 << 16  # items of a sampler's order


def check(loader: Any, options: Any, world_size: int) -> None:
    """Refuses what cannot be distributed, before anything changes.

    Raises:
        LoaderError: the loader is not a ``DataLoader``, is distributed already, or reads in a way that cannot be shared.
    """
    if not isinstance(loader, DataLoader):
        raise LoaderError(f"expected a torch.utils.data.DataLoader, found a {type(loader).__qualname__}")
    check_options(options)
    if world_size < 1:
        raise LoaderError(f"expected a world size of at least 1, found {world_size}")
    if not options.shard:
        return
    if isinstance(loader.dataset, torch_data.IterDataPipe | torch_data.MapDataPipe):
        raise LoaderError(f"torch shards DataPipes by itself, with their sharding_filter: {_OFF}")
    if loader.num_workers and not loader.in_order:
        raise LoaderError(
            "in_order=False gives batches in another order than they were drawn, so that neither the padding nor the "
            f"position of a batch is known: use in_order=True, or {_OFF}"
        )
    if isinstance(loader.dataset, IterableDataset):
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise LoaderError(
                f"{type(loader).__qualname__} has an __iter__ of its own, which accel cannot feed from an iterable "
                f"dataset: use a plain DataLoader, or {_OFF}"
            )
        return
    _check_sampler(loader)


def check_options(options: Any) -> None:
    """Refuses other things than LoaderOptions, and bad values in them."""
    if not isinstance(options, LoaderOptions):
        raise LoaderError(f"expected LoaderOptions, found a {type(options).__qualname__}")
    for name in ("shard", "even_batches", "move"):
        if not isinstance(getattr(options, name), bool):
            raise LoaderError(f"LoaderOptions({name}=...): expected a bool, found {getattr(options, name)!r}")
    if options.seed is not None and type(options.seed) is not int:
        raise LoaderError(f"LoaderOptions(seed=...): expected an int or None, found {options.seed!r}")


def _check_sampler(loader: DataLoader[Any]) -> None:
    """Refuses samplers that are distributed already."""
    for part in (*parts(loader.batch_sampler), *parts(loader.sampler)):
        ranks = (
            {getattr(part, name, None) for name in ("num_replicas", "num_processes")}
            if isinstance(part, Sampler)
            else set()
        )
        if isinstance(part, DistributedSampler) or ranks - {None, 1}:
            raise LoaderError(
                f"the loader is distributed already, by a {type(part).__qualname__}: give accel the loader that one "
                f"process would use, or {_OFF}"
            )


def length_of(dataset: Any) -> int | None:
    """The length of a dataset that has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def describe(loader: DataLoader[Any], options: LoaderOptions | None = None) -> str:
    """What must be equal on all ranks for their parts to fit together, as text. Local."""
    options = options or LoaderOptions()
    if not options.shard:
        return f"{options}"
    dataset, shape = loader.dataset, shape_of(loader)
    facts: dict[str, Any] = {
        "dataset": type(dataset).__qualname__,
        "length": length_of(dataset),
        "sampler": type(shape.sampler).__qualname__,
        "batch": shape[1:],
    }
    if isinstance(dataset, Subset):
        # A random_split with another seed on each rank would mix training and validation data.
        facts["checksum of the Subset's indices"] = digest(dataset.indices)
    if isinstance(dataset, IterableDataset):
        facts["num_workers"] = loader.num_workers
    elif type(shape.sampler) not in (SequentialSampler, RandomSampler) and world_size() > 1:
        facts["checksum of the sampler's order"] = _order_of(loader, shape)
    return f"{facts}, {options}"


def _order_of(loader: DataLoader[Any], shape: Shape) -> str:
    """The beginning of what a sampler draws from fixed seeds; the error where it cannot, which iterating will raise."""
    generators = Generators(drawn_from(shape.sampler, own_generators(loader)))
    try:
        source = Source(shape.sampler, Private(generators, generators.seeded(0)), ahead=True)
        return str(digest(source.read(_COMPARED)))
    except Exception as error:
        return f"{type(error).__qualname__}"
