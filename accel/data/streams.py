"""Iterable datasets: shares of a stream, shards, or batches from rank 0."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from ..errors import LoaderError, text_of_error
from ..process import Process
from ..process.control import Waiting, agree, raise_together
from ..process.rng import Generators
from .checks import LoaderOptions, LoaderPlace
from .readers import Position, Reader, SampleSource, Steps, Tag
from .sampling import Division, Share, identity, portion

#: Every rank reads the full stream and keeps its share, each rank reads its shards of a Hugging
#: Face dataset, or rank 0 reads for all ranks.
FULL, SHARDS, DISPATCHED = "full", "shards", "dispatched"
_LABEL: Final = "reading an iterable dataset"

Batches = Iterator[Any]
Collate = Callable[[Any], Any]


def mode_of(dataset: Any, options: LoaderOptions, place: LoaderPlace) -> str:
    """Return how the ranks read a dataset."""
    if not options.shard or not isinstance(dataset, IterableDataset):
        return FULL
    process = place.process
    if options.dispatch and process is not None and process.place.world_size > 1:
        return DISPATCHED
    count = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
    divides = isinstance(count, int) and place.world > 1 and count % place.world == 0
    return SHARDS if divides and callable(getattr(dataset, "shard", None)) else FULL


# -- In the process that reads the dataset ---------------------------------------------------------


@final
class _StreamView(IterableDataset[Any]):
    """A rank's share of a stream as a dataset.

    It has the attributes of the user's dataset, because a ``worker_init_fn`` may set them.
    """

    def __init__(self, source: SampleSource, mode: str) -> None:
        vars(self).update(_source=source, _mode=mode)

    def __iter__(self) -> Iterator[Any]:
        source: SampleSource = vars(self)["_source"]
        start, info = source.start, get_worker_info()
        if info:
            # The states seed the workers, which draw from their own generators.
            source.start = replace(start, states=None)
        steps = source.steps(info.id if info else 0)
        # Workers that live longer than an epoch start the next epoch at its beginning.
        source.start = Position(epoch=start.epoch + 1)
        return _given(source, steps, vars(self)["_mode"])

    def __len__(self) -> int:
        return len(vars(self)["_source"].items)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_source"].items, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_source"].items, name, value)


def _given(source: SampleSource, steps: Steps, mode: str) -> Iterator[Any]:
    division, first = source.division, 0
    for share, items in steps:
        if division.world > 1:
            first = first or identity(items)
            source.tag = replace(source.tag, first=first)
        if mode != DISPATCHED:
            yield from share
        elif share:
            places = [replace(division, rank=rank) for rank in range(division.world)]
            yield [portion(items, place, source.head) for place in places]


def _tagged(collate: Collate, source: SampleSource, items: Any) -> tuple[Tag, Any]:
    return source.tag, collate(items)


def _collated(collate: Collate, units: bool, shares: list[Any]) -> list[Any]:
    return [collate(share[0] if units else share) for share in shares]


# -- In the process that runs the loop -------------------------------------------------------------


@final
class StreamReader(Reader):
    """The stand-in for the dataset of an iterable loader."""

    def __init__(
        self, loader: DataLoader[Any], division: Division, mode: str, process: Process | None
    ) -> None:
        dataset: Any = loader.dataset
        own_division = division
        if mode == SHARDS:
            dataset = dataset.shard(num_shards=division.world, index=division.rank)
            own_division = replace(division, rank=0, world=1)
        source = SampleSource(dataset, own_division, {})
        super().__init__(loader, division, source, max(1, loader.num_workers))
        self._mode = mode
        self._process = process

    def install(self, loader: DataLoader[Any]) -> None:
        vars(loader)["dataset"] = _StreamView(self._source, self._mode)
        if self._mode == DISPATCHED:
            vars(loader).update(batch_sampler=None, batch_size=None)
            loader.collate_fn = partial(_collated, loader.collate_fn, self._units)
        elif not self._units:
            batch, drop_last = self._division.batch, loader.drop_last
            batches = BatchSampler(loader.sampler, batch, drop_last)
            vars(loader)["batch_sampler"] = batches
        loader.collate_fn = partial(_tagged, loader.collate_fn, self._source)

    def begin(self, start: Position) -> None:
        super().begin(start)
        # A loader seeds its workers from this generator, and they draw the stream. Without workers
        # the snapshot is taken later.
        seeding = self._loader.generator or torch.default_generator
        self._source.states = Generators({"seeds": seeding}).states()

    def open(self, loader: DataLoader[Any]) -> Batches:
        process = self._process
        if self._mode == DISPATCHED and process is not None:
            is_reader = process.place.rank == 0
            return self._dispatched(process, iter(loader if is_reader else ()))
        batches = iter(loader)
        if self._process is None or self._division.world == 1:
            return batches
        if self._mode == FULL:
            return self._compared(batches)
        return self._in_step(batches) if self._division.even else batches

    def real_rows(self, samples: int) -> Share:
        if self._mode == SHARDS and self._division.even:
            # The batches of a step are of different shards. All of their rows are real, or none.
            return Share(0, -1, min(1, samples))
        return super().real_rows(samples)

    # -- Streams that the ranks read together. Every step is collective. --

    def _compared(self, batches: Batches) -> Batches:
        """Yield the batches after a comparison of the first items of the stream."""
        item, firsts = _read_together(batches)
        if len(set(firsts) - {None}) > 1:
            kind = type(self._loader.dataset).__name__
            raise LoaderError(
                f"The ranks read different items from {kind}, which shards itself or "
                "shuffles differently on each rank. Use a fixed seed, or "
                "LoaderOptions(shard=False)."
            )
        if item is not None:
            yield item
            yield from batches

    def _in_step(self, batches: Batches) -> Batches:
        """Yield this rank's batches, then the first again until all ranks are done."""
        if not self.start.epoch:
            # If the dataset was sharded before, sharding it once more would lose most of it.
            items = islice(self._loader.dataset, 1)
            list(self._compared((Tag(first=identity(item)), item) for item in items))
        tag, padding = self.tags[0], None
        for item, firsts, more in _steps(batches):
            tag, batch = item or (tag, padding)
            if padding is None:
                # A resumed rank may have read its shards already.
                others = agree(_LABEL, batch) if None in firsts else [batch]
                padding = copy.deepcopy(next(other for other in others if other is not None))
                batch = batch if item else padding
            yield replace(tag, more=more), batch

    def _dispatched(self, process: Process, batches: Batches) -> Batches:
        """Yield this rank's share of rank 0's batches."""
        places = agree(_LABEL, self._division.rank)
        for item, _, more in _steps(batches):
            sent = item and [(item[0], item[1][place]) for place in places]
            received: list[Any] = [None]
            with Waiting(process, _LABEL):
                dist.scatter_object_list(received, sent, group=process.control, group_src=0)
            tag, batch = received[0]
            yield replace(tag, more=more), batch


def _steps(batches: Batches) -> Iterator[tuple[Any, list[Any], bool]]:
    """Yield a batch or None, all checksums, and if a step follows. Collective."""
    item, firsts = _read_together(batches)
    while set(firsts) != {None}:
        following, next_firsts = _read_together(batches)
        yield item, firsts, set(next_firsts) != {None}
        item, firsts = following, next_firsts


def _read_together(batches: Batches) -> tuple[Any, list[int | None]]:
    """Read a batch on every rank, and return it and every rank's checksum. Collective.

    Both are None at the end. If reading fails on a rank, every rank raises.
    """
    item, error = None, None
    try:
        item = next(batches, None)
    except Exception as problem:
        error = problem
    first = None if item is None else item[0].first
    answers = agree(_LABEL, (first, text_of_error(error)))
    raise_together(_LABEL, error, [text for _, text in answers], LoaderError)
    return item, [other for other, _ in answers]
