"""Iterable datasets: a rank's share of a stream, its shards, or the batches that rank 0 sends."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
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
from ..process.rng import Generators, Private, global_generators
from .checks import LoaderOptions, LoaderPlace, shape_of
from .readers import Reader, RealRows, Start, real_rows
from .sampling import Division, divide, identity, mix, on_cpu, portion, set_epoch

#: Every rank reads the full stream and keeps its share, each rank reads its shards of a Hugging
#: Face dataset, or rank 0 reads for all ranks.
FULL, SHARDS, DISPATCHED = "full", "shards", "dispatched"
_LABEL: Final = "reading an iterable dataset"


def mode_of(dataset: Any, options: LoaderOptions, place: LoaderPlace) -> str:
    """Return how the ranks read a dataset."""
    if not options.shard or not isinstance(dataset, IterableDataset):
        return FULL
    if options.dispatch and place.process is not None and place.process.place.world_size > 1:
        return DISPATCHED
    count = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
    divides = isinstance(count, int) and place.world > 1 and count % place.world == 0
    return SHARDS if divides and callable(getattr(dataset, "shard", None)) else FULL


# -- In the process that reads the dataset ---------------------------------------------------------


class Tag(NamedTuple):
    """The origin of a batch. It travels with the batch from the worker."""

    #: The number of the worker.
    stream: int
    #: The number of items that were read from this stream.
    position: int
    #: The number of samples in the global step, 0 for padding.
    samples: int
    #: A checksum of the first items of the stream.
    first: int = 0
    #: The dataset's ``state_dict()``, if each rank reads its shards.
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
        self.mode = mode
        self.control = control
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
        elif info is None and self.states:
            self._context = Private(generators, self.states)
        elif info is None:
            self.states = generators.states()
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
        if self.continues_in_place:
            # rng_state() has restored the generators, so the rest is drawn in place.
            self._context = nullcontext()
        for share, chunk in divide(self._read, self.division, head):
            if not first and self.division.world > 1:
                first = identity(chunk)
            if self.mode == SHARDS and hasattr(self.dataset, "state_dict"):
                state = self.dataset.state_dict()
            position = self.tag.position + len(chunk)
            self.tag = Tag(self.tag.stream, position, len(chunk), first, state)
            if self.mode != DISPATCHED:
                yield from share
            elif share:
                ranks = range(self.division.world)
                yield [portion(chunk, replace(self.division, rank=rank), head) for rank in ranks]

    def _read(self, count: int) -> list[Any]:
        with self._context:
            return list(islice(self._items, count))

    def _skip(self, count: int) -> list[Any]:
        """Drop ``count`` items, and return the first ones for padding."""
        head = self._read(min(count, self.division.world - 1))
        with self._context:
            dropped = len(head) + sum(1 for _ in islice(self._items, count - len(head)))
        # loader.skip() counts full steps, but the last step may have fewer items.
        if dropped <= count - self.division.width:
            raise LoaderError(
                f"{type(self.dataset).__name__} ended after {dropped} items, before the position "
                f"{count}. Use the same dataset as when the state was saved."
            )
        return head


@final
class _StreamView(IterableDataset[Any]):
    """A rank's share as a dataset, with the attributes of the user's dataset.

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
class StreamReader(Reader):
    """The stand-in for the dataset of an iterable loader."""

    def __init__(
        self, loader: DataLoader[Any], division: Division, mode: str, process: Process | None
    ) -> None:
        self._dataset: Any = loader.dataset
        self._division = division
        self._mode = mode
        self._process = process
        self._workers = loader.num_workers
        self._streams = max(1, self._workers)
        self._units = shape_of(loader).units
        dataset: Any = self._dataset
        if mode == SHARDS:
            dataset = dataset.shard(num_shards=division.world, index=division.rank)
            division = replace(division, rank=0, world=1)
        self.stateful = mode == SHARDS and hasattr(dataset, "state_dict")
        # A loader seeds its workers from this generator, and they draw the stream.
        self._seeding = Generators({"seeds": loader.generator or torch.default_generator})
        self._control = torch.zeros(3 + self._streams, dtype=torch.int64, device="cpu")
        if self._workers:
            self._control.share_memory_()
        self._stream = _DividedStream(dataset, division, mode, self._control)

    def install(self, loader: DataLoader[Any]) -> None:
        vars(loader)["dataset"] = _StreamView(self._stream)
        if self._mode == DISPATCHED:
            vars(loader).update(batch_sampler=None, batch_size=None)
            loader.collate_fn = partial(_collated, loader.collate_fn, self._units)
        elif not self._units:
            batch = self._division.batch
            vars(loader)["batch_sampler"] = BatchSampler(loader.sampler, batch, loader.drop_last)
        loader.collate_fn = partial(_tagged, loader.collate_fn, self._stream)

    def begin(self, start: Start, in_place: bool) -> None:
        super().begin(start, in_place)
        self._positions = list(start.at) or [0] * self._streams
        self._states: list[Any] = list(start.own or [None] * self._streams)
        seed = 0 if start.seed is None else mix(start.seed, start.epoch)
        control = [start.seed is None, start.epoch, seed, *self._positions]
        self._control.copy_(torch.tensor(control, device="cpu"))
        self._stream.states = start.states or {}
        self._stream.continues_in_place = in_place
        self._stream.own = list(start.own or [])
        self._seeds = self._seeding.states()
        self.more = None

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if self._mode == DISPATCHED:
            return self._dispatched(loader)
        batches = iter(loader)
        if self._process is None or self._division.world == 1:
            return batches
        if self._mode == FULL:
            return self._compared(batches)
        return self._in_step(batches) if self._division.even else batches

    def take(self, item: Any) -> Any:
        tag, batch = item
        self.given += 1
        self.more = tag.more
        self._positions[tag.stream] = tag.position
        self._states[tag.stream] = tag.state
        self.rows = real_rows(self._division, self._units, tag.samples)
        if self._mode == SHARDS:
            # The batches of a step are of different shards. All of their rows are real, or none.
            self.rows = RealRows(self._division.even, None, min(1, tag.samples))
        return batch

    def complete(self) -> bool:
        # A rank without a share of the last step has read it all the same.
        read_nothing = self._stream.tag.position == sum(self.start.at)
        return self._closed and (not self._division.ragged or read_nothing)

    def position(self) -> Start:
        states = self.start.states
        if self.given:
            self._check_position()
            if self.start.in_place:
                states = self._seeds if self._workers else self._stream.states
        own = self._states if self.stateful else None
        at = tuple(self._positions)
        return self.start._replace(at=at, checksum=None, states=states, own=own)

    def skip(self, start: Start, count: int) -> Start:
        if not count:
            return start
        self._check_position()
        at = list(start.at) or [0] * self._streams
        for batch in range(count):
            # The loader takes a batch from each worker in turn.
            at[batch % self._streams] += self._stream.division.width
        return start._replace(at=tuple(at), own=None)

    def resume(self, start: Start) -> None:
        if not any(start.at):
            return
        self._check_position()
        has_seeds = start.states is not None and "seeds" in start.states
        is_seeded = start.states is None or has_seeds == bool(self._workers)
        if len(start.at) != self._streams or start.checksum is not None or not is_seeded:
            raise LoaderError(
                f"The state was saved in mid-epoch with num_workers={len(start.at)} or a different "
                "dataset. Use the same num_workers, or save between epochs."
            )

    def _check_position(self) -> None:
        # Each worker has its own last step, so the ranks' loops are at different samples.
        if self._workers and self._division.ragged and self._mode == FULL:
            raise LoaderError(
                "An iterable dataset with num_workers and even_batches=False has no position in "
                "mid-epoch. Use even_batches=True, or save between epochs."
            )

    def __len__(self) -> int:
        return self._stream.division.local_steps(len(self._stream.dataset))

    # -- Streams that the ranks read together. Every step of these iterators is collective. --

    def _compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches after the ranks have compared the first items of the stream."""
        item, firsts = _read_together(batches, lambda item: item[0].first)
        if len(set(firsts) - {None}) > 1:
            raise LoaderError(
                f"The ranks read different items from {type(self._dataset).__name__}, which shards "
                "itself or shuffles differently on each rank. Use a fixed seed, or "
                "LoaderOptions(shard=False)."
            )
        if item is not None:
            yield item
            yield from batches

    def _first_item(self) -> Iterator[Any]:
        generators = Generators(global_generators())
        with Private(generators, generators.seeded(0)):
            items = list(islice(self._dataset, 1))
        yield Tag(0, 0, 0, identity(items)), items

    def _in_step(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's batches, then its first one until all ranks have read their shards."""
        if not self.start.epoch:
            # If the dataset was sharded before, sharding it once more would lose most of it.
            list(self._compared(self._first_item()))
        item, present = _read_together(batches, lambda item: True)
        padding = copy.deepcopy(item)
        if any(present) and not all(present):
            # A resumed rank may have read its shards already, and repeats another rank's batch.
            sender = present.index(True)
            is_sender = self._process is not None and self._process.place.rank == sender
            batch = agree(_LABEL, item[1] if is_sender else None)[sender]
            empty = Tag(0, self._positions[0], 0, state=self._states[0])
            padding = padding or (empty, batch)
        while any(present):
            following, present = _read_together(batches, lambda item: True)
            tag, batch = padding if item is None else item
            yield tag._replace(more=any(present)), batch
            item, padding = following, (tag._replace(samples=0), padding[1])

    def _dispatched(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield this rank's share of the batches that rank 0 reads."""
        process = self._process
        assert process is not None
        places = agree(_LABEL, self._division.rank)
        is_reader = process.place.rank == 0
        steps = _pickled_steps(loader) if is_reader else iter(())
        messages, present = _read_together(steps, lambda item: True)
        while present[0]:
            following, present = _read_together(steps, lambda item: True)
            sent = [messages[place] for place in places] if is_reader else None
            received: list[Any] = [None]
            with Waiting(process, _LABEL):
                dist.scatter_object_list(received, sent, group=process.control, group_src=0)
            tag, batch = pickle.loads(received[0])
            yield tag._replace(more=bool(present[0])), batch
            messages = following


def _pickled_steps(loader: DataLoader[Any]) -> Iterator[list[bytes]]:
    # The loader starts at the first step, where an error reaches all ranks.
    with on_cpu():
        steps = iter(loader)
    for tag, batches in steps:
        yield [pickle.dumps((tag, batch)) for batch in batches]


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
    answers = agree(_LABEL, (own_fact, text_of_error(error)))
    raise_together(_LABEL, error, [text for _, text in answers], LoaderError)
    return item, [other for other, _ in answers]
