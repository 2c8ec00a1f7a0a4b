"""Iterable datasets: a rank's share of a stream, its shards, or the batches that rank 0 sends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, final

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from ..errors import LoaderError, text_of_error
from ..process import Process
from ..process.control import Waiting, agree, raise_together
from ..process.packing import packed, unpacked
from ..process.rng import Generators, Private, global_generators
from .checks import LoaderOptions, shape_of
from .readers import EpochReader, RealRows, Start, real_rows
from .sampling import Division, divide, fingerprint, mix, portion, set_epoch

#: Every rank reads the full stream and keeps its share, each rank reads its shards of a Hugging
#: Face dataset, or rank 0 reads for all ranks.
FULL, SHARDS, DISPATCHED = "full", "shards", "dispatched"


def mode_of(dataset: Any, options: LoaderOptions, world: int) -> str:
    """Return how the ranks read an iterable dataset."""
    if world == 1 or not options.shard:
        return FULL
    if options.dispatch:
        return DISPATCHED
    count = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
    divides = isinstance(count, int) and count % world == 0
    return SHARDS if divides and callable(getattr(dataset, "shard", None)) else FULL


# -- In the process that reads the dataset ---------------------------------------------------------


class Tag(NamedTuple):
    """The origin of a batch. It travels with the batch from the worker."""

    #: The number of the worker.
    stream: int
    #: The number of items that were read from this stream.
    position: int
    #: The number of samples in the global step.
    samples: int
    #: A checksum of the first items of the stream.
    first: int = 0
    #: The dataset's ``state_dict()``, if it gives each rank its shards.
    state: Any = None
    #: True if another batch follows, None if unknown.
    more: bool | None = None


@final
class _DividedStream:
    """One rank's share of a stream.

    ``control`` holds: drawn in place, epoch, seed, and the items to skip for each worker. It is
    shared memory, because persistent workers live longer than an epoch.
    """

    def __init__(self, dataset: Any, division: Division, mode: str, control: torch.Tensor) -> None:
        self.dataset = dataset
        self.division = division
        self.control = control
        self.mode = mode
        self.tag = Tag(0, 0, 0)
        #: A snapshot of the generators at the start of a stream that is drawn in place.
        self.states: Mapping[str, Any] = {}
        self.continues_in_place = False
        #: States of the dataset to resume from, by worker.
        self.own: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        stream = info.id if info else 0
        in_place, epoch, seed, *skips = self.control.tolist()
        generators = Generators(global_generators())
        self._context: Any = nullcontext()
        if not in_place:
            set_epoch(self.dataset, epoch)
            self._context = Private(generators, generators.seeded(mix(seed, stream)))
        elif info is None:
            self.states = self.states or generators.states()
            self._context = Private(generators, self.states) if skips[0] else nullcontext()
        skip = skips[stream]
        self.tag = Tag(stream, skip, 0)
        if self.own:
            if self.own[stream] is not None:
                self.dataset.load_state_dict(self.own[stream])
            self.own, skip = [], 0
        with self._context:
            self._items = iter(self.dataset)
        return self._shares(skip)

    def _shares(self, skip: int) -> Iterator[Any]:
        head, first, state = self._skip(skip), 0, None
        for share, chunk in divide(self._read, self.division, head):
            if not first and self.division.world > 1:
                first = fingerprint(chunk).identity
            if self.mode == SHARDS and hasattr(self.dataset, "state_dict"):
                state = self.dataset.state_dict()
            position = self.tag.position + len(chunk)
            self.tag = Tag(self.tag.stream, position, len(chunk), first, state)
            if self.mode != DISPATCHED:
                yield from share
            elif share:
                divisions = [replace(self.division, rank=r) for r in range(self.division.world)]
                yield [portion(chunk, division, head) for division in divisions]

    def _read(self, count: int) -> list[Any]:
        with self._context:
            return list(islice(self._items, count))

    def _skip(self, count: int) -> list[Any]:
        """Drop ``count`` items, and return the first ones for padding."""
        head = self._read(min(count, self.division.world - 1))
        with self._context:
            dropped = len(head) + sum(1 for _ in islice(self._items, count - len(head)))
        # skip() counts full steps, but the last step may have fewer items.
        if dropped <= count - self.division.width:
            raise LoaderError(
                f"{type(self.dataset).__name__} ended after {dropped} items, before the position "
                f"{count}. Use the same dataset as when the state was saved."
            )
        if self.continues_in_place:
            # rng_state() has restored the generators, so the rest is drawn in place.
            self._context = nullcontext()
        return head


@final
class _StreamView(IterableDataset[Any]):
    """The dataset of the loader's copy: a rank's share, with the attributes of the user's dataset.

    A ``worker_init_fn`` sets attributes of ``get_worker_info().dataset``.
    """

    def __init__(self, stream: _DividedStream) -> None:
        vars(self)["_stream"] = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self)["_stream"])

    def __len__(self) -> int:
        return len(vars(self)["_stream"].dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_stream"].dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_stream"].dataset, name, value)


def _tagged(collate: Callable[[Any], Any], stream: _DividedStream, items: Any) -> tuple[Tag, Any]:
    return stream.tag, collate(items)


def _collated(collate: Callable[[Any], Any], units: bool, shares: list[list[Any]]) -> list[Any]:
    return [collate(share[0] if units else share) for share in shares]


# -- In the process that runs the loop -------------------------------------------------------------


@final
class StreamReader(EpochReader):
    """The stand-in for the dataset of an iterable loader."""

    def __init__(
        self, loader: DataLoader[Any], division: Division, mode: str, process: Process | None
    ) -> None:
        self._division = division
        self._mode = mode
        self._process = process
        self._workers = loader.num_workers
        self._units = shape_of(loader).units
        dataset: Any = loader.dataset
        if mode == SHARDS:
            dataset = dataset.shard(num_shards=division.world, index=division.rank)
            division = replace(division, rank=0, world=1)
            self.stateful = hasattr(dataset, "state_dict")
        # A loader seeds its workers from this generator, and they draw the stream.
        self._seeding = Generators({"seeds": loader.generator or torch.default_generator})
        self._control = torch.zeros(3 + max(1, self._workers), dtype=torch.int64, device="cpu")
        if self._workers:
            self._control.share_memory_()
        self._stream = _DividedStream(dataset, division, mode, self._control)
        self._full_dataset: Any = loader.dataset
        self.tag = Tag(0, 0, 0)

    def install(self, loader: DataLoader[Any]) -> None:
        vars(loader)["dataset"] = _StreamView(self._stream)
        if self._mode == DISPATCHED:
            vars(loader).update(batch_sampler=None, batch_size=None)
            loader.collate_fn = partial(_collated, loader.collate_fn, self._units)
        elif not self._units:
            batch = self._division.batch
            vars(loader)["batch_sampler"] = BatchSampler(loader.sampler, batch, loader.drop_last)
        loader.collate_fn = partial(_tagged, loader.collate_fn, self._stream)

    def skip(self, start: Start, count: int) -> Start:
        if not count:
            return start
        self._check_known()
        # The loader takes a batch from each worker in turn.
        streams = max(1, self._workers)
        at = list(start.at) or [0] * streams
        for batch in range(count):
            at[batch % streams] += self._stream.division.width
        return start._replace(at=tuple(at), own=None)

    def begin(self, start: Start, in_place: bool) -> None:
        super().begin(start, in_place)
        streams = max(1, self._workers)
        self._at = list(start.at) or [0] * streams
        self._own: list[Any] = list(start.own or [None] * streams)
        seed = 0 if start.seed is None else mix(start.seed, start.epoch)
        control = [start.seed is None, start.epoch, seed, *self._at]
        self._control.copy_(torch.tensor(control, device="cpu"))
        self._stream.states = start.states or {}
        self._stream.continues_in_place = in_place
        self._stream.own = list(start.own or [])
        self._seeds = self._seeding.states()
        self.tag = Tag(0, 0, 0)

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if self._process is None or self._process.place.world_size == 1:
            return iter(loader)
        if self._mode == DISPATCHED:
            return Dispatched(self._process, self._division.rank, loader)
        batches = iter(loader)
        if self._mode == FULL:
            return self._compared(batches)
        return self._in_step(batches) if self._division.even else batches

    def upcoming(self, count: int) -> int | None:
        return int(self.tag.more) if count == 1 and self.tag.more is not None else None

    def take(self, item: Any) -> Any:
        self.tag, batch = item
        self.given += 1
        self._at[self.tag.stream] = self.tag.position
        self._own[self.tag.stream] = self.tag.state
        if self._mode == SHARDS:
            # A step's batches come from different shards, and all of their rows are real or none.
            self.rows = RealRows(self._division.even, None, min(1, self.tag.samples))
        else:
            self.rows = real_rows(self._division, self._units, self.tag.samples)
        return batch

    def complete(self) -> bool:
        # A rank that had no share of the last batch has read it all the same.
        read_nothing = self._stream.tag.position == sum(self.start.at)
        return self._closed and (not self._division.ragged or read_nothing)

    def position(self) -> Start:
        states = self.start.states
        if self.given:
            self._check_known()
            if self.start.in_place:
                states = self._seeds if self._workers else self._stream.states
        own = self._own if self.stateful else None
        return self.start._replace(at=tuple(self._at), checksum=None, states=states, own=own)

    def resume(self, start: Start) -> None:
        if not any(start.at):
            return
        self._check_known()
        streams = max(1, self._workers)
        is_seeded = start.states is None or ("seeds" in start.states) == bool(self._workers)
        if len(start.at) != streams or start.checksum is not None or not is_seeded:
            raise LoaderError(
                f"The state was saved in mid-epoch from {len(start.at)} workers or another kind of "
                f"dataset, and this iterable dataset has {streams}. Use the same num_workers."
            )

    def _check_known(self) -> None:
        # Each worker has its own last batch, so the ranks' loops are at different samples.
        if self._workers and self._division.ragged and self._mode == FULL:
            raise LoaderError(
                "An iterable dataset with num_workers and even_batches=False has no position in "
                "mid-epoch. Use even_batches=True, or save between epochs."
            )

    def length(self) -> int:
        return self._division.local_steps(len(self._stream.dataset))

    def _compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Check that the ranks read the same stream first. The first batch is collective."""
        item, firsts = _read_together(batches, lambda item: item[0].first)
        if len(set(firsts) - {None}) > 1:
            raise LoaderError(
                f"The ranks read different first items from {type(self._full_dataset).__name__}, "
                "which shards itself or shuffles differently on each rank. Use a fixed seed, or "
                "LoaderOptions(shard=False)."
            )
        if item is not None:
            yield item
            yield from batches

    def _first_item(self) -> Iterator[Any]:
        """Yield the first item of all shards, to compare it."""
        generators = Generators(global_generators())
        with Private(generators, generators.seeded(0)):
            items = list(islice(self._full_dataset, 1))
        yield Tag(0, 0, 0, fingerprint(items).identity), items

    def _in_step(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Repeat this rank's first batch until all ranks have read their shards. Collective."""
        # Sharding a dataset that was sharded before would lose most of it.
        list(self._compared(self._first_item()))
        item, present = _read_together(batches, lambda item: True)
        if any(present) and not all(present):
            raise LoaderError(
                f"Rank {present.index(None)} has no batch in its shards of "
                f"{type(self._full_dataset).__name__}. Use larger shards, or fewer ranks."
            )
        padding = copy.deepcopy(item)
        while any(present):
            following, present = _read_together(batches, lambda item: True)
            tag, batch = padding if item is None else item
            yield tag._replace(more=any(present)), batch
            padding = tag._replace(samples=0), padding[1]
            item = following


def _read_together(batches: Iterator[Any], fact: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    """Read a batch on every rank, and return it and every rank's ``fact``. Collective.

    The batch and its fact are None at the end. If reading fails on a rank, every rank raises.
    """
    item, error = None, None
    try:
        item = next(batches, None)
    except Exception as problem:
        error = problem
    own_fact = None if item is None else fact(item)
    answers = agree(_READING, (own_fact, text_of_error(error)))
    raise_together(_READING, error, [text for _, text in answers], LoaderError)
    return item, [other for other, _ in answers]


_READING: Final = "reading an iterable dataset"


# -- Batches that rank 0 reads ---------------------------------------------------------------------


@final
class Dispatched:
    """The batches that rank 0 reads for all ranks. Every step is collective.

    ``loader`` gives (tag, a batch for each place). Rank 0 reads one step ahead, so that each step
    tells if a step follows.
    """

    def __init__(self, process: Process, place: int, loader: Iterable[Any]) -> None:
        self._process = process
        self._place = place
        self._loader = loader
        self._items: Iterator[Any] | None = None
        self._error: Exception | None = None
        self._next = self._read() if process.place.rank == 0 else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def _read(self) -> Any:
        """Return rank 0's next step, or None at the end. An error is raised in its turn."""
        try:
            if self._items is None:
                self._items = iter(self._loader)
            return next(self._items, None)
        except Exception as error:
            self._error = error
            return None

    def __next__(self) -> Any:
        step, error, messages = self._next, self._error, []
        if step is not None:
            try:
                self._next = self._read()
                tag = step[0]._replace(more=self._next is not None or self._error is not None)
                messages = [packed((tag, batch)) for batch in step[1]]
            except Exception as problem:
                error = problem
        answers = agree(_READING, (self._place, text_of_error(error), list(map(len, messages))))
        raise_together(_READING, error, [text for _, text, _ in answers], LoaderError)
        sizes = answers[0][2]
        if not sizes:
            raise StopIteration
        largest = max(sizes)
        received = torch.empty(largest, dtype=torch.uint8, device="cpu")
        pad = torch.nn.functional.pad
        padded = [pad(message, (0, largest - len(message))) for message in messages]
        sent = [padded[place] for place, *_ in answers] if padded else None
        with Waiting(self._process, _READING):
            dist.scatter(received, sent, group=self._process.control, group_src=0)
        return unpacked(received[: sizes[self._place]], received.device)
