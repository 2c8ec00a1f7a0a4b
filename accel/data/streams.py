"""Iterable datasets: shares of a stream, shards, or batches from rank 0."""

from __future__ import annotations

import copy
from collections.abc import Iterator
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
from .readers import Batches, Reader, SampleSource, Tag
from .sampling import Division, identity, portion

#: Ranks read the full stream, or their shards of a Hugging Face dataset, or rank 0 reads for all.
FULL, SHARDS, DISPATCHED = "full", "shards", "dispatched"
_LABEL: Final = "reading an iterable dataset"


def mode_of(dataset: Any, options: LoaderOptions, place: LoaderPlace) -> str:
    """Return how the ranks read a dataset."""
    if not options.shard or not isinstance(dataset, IterableDataset):
        return FULL
    process = place.process
    if options.dispatch and process is not None and process.place.world_size > 1:
        return DISPATCHED
    count = getattr(dataset, "num_shards", None)
    divides = isinstance(count, int) and place.world > 1 and count % place.world == 0
    return SHARDS if divides and hasattr(dataset, "shard") else FULL


@final
class _StreamView(IterableDataset[Any]):
    """A rank's share of a stream, as a dataset."""

    def __init__(self, source: SampleSource, mode: str) -> None:
        vars(self).update(_source=source, _mode=mode)

    def __iter__(self) -> Iterator[Any]:
        source: SampleSource = self._source
        division, info, first = source.division, get_worker_info(), 0
        if info:
            # The saved states only seed the workers. A worker draws from its own generators.
            source.start = replace(source.start, states=None)
        for chunk in source.chunks(info.id if info else 0):
            if division.world > 1:
                first = first or identity(chunk)
                source.tag = replace(source.tag, first=first)
            share = portion(chunk, division, source.head)
            if self._mode != DISPATCHED:
                yield from share
            elif share:
                yield chunk

    def __len__(self) -> int:
        return len(self._source.items)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._source.items, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A worker_init_fn may set attributes of the user's dataset.
        setattr(self._source.items, name, value)


def _tagged(collate: Any, source: SampleSource, mode: str, items: Any) -> tuple[Tag, Any]:
    if mode != DISPATCHED:
        return source.tag, collate(items)
    division, batches = source.division, []
    for rank in range(division.world):
        share = portion(items, replace(division, rank=rank), source.head)
        batches.append(collate(share[0] if division.units else share))
    return source.tag, batches


@final
class StreamReader(Reader):
    """The stand-in for the dataset of an iterable loader."""

    def __init__(
        self, loader: DataLoader[Any], division: Division, mode: str, process: Process | None
    ) -> None:
        dataset: Any = loader.dataset
        self._division = division
        if mode == SHARDS:
            dataset = dataset.shard(num_shards=division.world, index=division.rank)
            division = replace(division, rank=0, world=1)
        source = SampleSource(dataset, division, {})
        super().__init__(loader, source, max(1, loader.num_workers))
        self._mode = mode
        self._process = process

    def open(self, loader: DataLoader[Any]) -> Batches:
        process, mode = self._process, self._mode
        source, division = self._source, self._division
        # The state that seeds the workers. Without workers, chunks() replaces it.
        seeding = self._loader.generator or torch.default_generator
        source.states = Generators({"seeds": seeding}).states()
        parts = vars(loader)
        parts["dataset"] = _StreamView(source, mode)
        if mode == DISPATCHED:
            parts.update(batch_sampler=None, batch_size=None)
        elif not division.units:
            parts["batch_sampler"] = BatchSampler(loader.sampler, division.batch, loader.drop_last)
        loader.collate_fn = partial(_tagged, self._loader.collate_fn, source, mode)
        in_step = mode == DISPATCHED or (mode == SHARDS and division.even)
        if in_step and process is not None:
            is_reader = mode == SHARDS or process.place.rank == 0
            return self._in_step(iter(loader if is_reader else ()), process)
        is_compared = process is not None and mode == FULL and division.world > 1
        return self._compared(iter(loader)) if is_compared else iter(loader)

    # -- Streams that the ranks read together. Every step is collective. --

    def _compared(self, batches: Batches) -> Batches:
        """Compare the ranks' first items of the stream, then yield the batches."""
        item, firsts = _read_together(batches)
        if len(set(firsts)) > 1:
            kind = type(self._loader.dataset).__name__
            text = f"{kind} shards itself or shuffles, so the ranks read different items."
            raise LoaderError(f"{text} Use a fixed seed or shard=False.")
        if item is not None:
            yield item
            yield from batches

    def _in_step(self, batches: Batches, process: Process) -> Batches:
        """Yield a batch on every rank until all ranks are done."""
        is_dispatched = self._mode == DISPATCHED
        places = agree(_LABEL, self._division.rank) if is_dispatched else []
        if not is_dispatched and not self.start.epoch:
            # Make sure that the dataset isn't sharded yet. A second sharding would lose most of it.
            items = islice(self._loader.dataset, 1)
            list(self._compared((Tag(first=identity(item)), item) for item in items))
        padding: Any = None
        received: list[Any] = [None]
        following, next_firsts = _read_together(batches)
        while next_firsts:
            item, firsts = following, next_firsts
            following, next_firsts = _read_together(batches)
            if is_dispatched:
                sent = item and [(item[0], item[1][place]) for place in places]
                with Waiting(process, _LABEL):
                    group = process.control
                    dist.scatter_object_list(received, sent, group=group, group_src=0)
                item = received[0]
            elif padding is None:
                # A rank that resumes may have no item left to copy, so ask the other ranks.
                is_full = len(firsts) == process.place.world_size
                others = [item] if is_full else agree(_LABEL, item)
                padding = Tag(), copy.deepcopy(next(filter(None, others))[1])
            tag, batch = item or padding
            yield replace(tag, more=bool(next_firsts)), batch


def _read_together(batches: Batches) -> tuple[Any, list[int]]:
    """Return the next batch, or None, and all ranks' checksums. Collective."""
    item, error = None, None
    try:
        item = next(batches, None)
    except Exception as problem:
        error = problem
    first = None if item is None else item[0].first
    answers = agree(_LABEL, (first, text_of_error(error)))
    raise_together(_LABEL, error, [text for _, text in answers], LoaderError)
    return item, [other for other, _ in answers if other is not None]
