"""What one copy of a loader reads of an iterable dataset, by each rank or by rank 0 for all, and whether all read the same.

Every rank reads the whole stream in chunks of a global step and keeps its part. That works inside worker processes, each with
its copy of the dataset; what a batch is made of travels with the batch.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial, wraps
from itertools import islice
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from ..errors import LoaderError, text_of_error
from ..process import Process, ended
from ..process.control import Waiting, agree, raise_together
from ..process.packing import packed, unpacked
from ..process.rng import Generators, InPlace, Private, global_generators
from .readers import EpochReader, Shape, Start, kept_of
from .sampling import Division, Fingerprint, divide, fingerprint, mix, notify, portion

# -- One rank's part of a stream ----------------------------------------------------------------------------------------


class Tag(NamedTuple):
    """What a batch is made of."""

    stream: int  # its worker
    position: int  # that after it there
    samples: int  # those of its global step
    again: bool = True  # whether the stream would come out the same once more
    first: Fingerprint | None = None  # of the stream's first items
    more: bool | None = None  # whether another batch follows, where that is told


@final
class _DividedStream:
    """Reads a stream. ``control`` (in place, epoch, seed, samples to skip) is shared with workers that outlive an epoch."""

    def __init__(
        self, dataset: Any, division: Division, control: torch.Tensor, everyones: bool
    ) -> None:
        self.dataset = dataset
        #: It gives the parts of all ranks, each step as one item.
        self.everyones = everyones
        self.division = division
        self.control = control
        self.tag = Tag(0, 0, 0)
        #: Where the generators were when the stream began, if it is read in this process.
        self.states: Mapping[str, Any] = {}
        #: Whether a stream that was resumed goes on in place.
        self.settles = False
        self._epochs = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        stream = info.id if info else 0
        in_place, epoch, seed, *skips = self.control.tolist()
        self._rng = self._open(bool(in_place), epoch, seed, stream, bool(info))
        self._epochs += 1
        with self._rng:
            self._items = iter(self.dataset)
        return self._divide(stream, skips[stream])

    def _open(
        self, in_place: bool, epoch: int, seed: int, stream: int, worker: bool
    ) -> Private | InPlace:
        """The program's generators in one process, as in raw PyTorch; else private ones: all ranks see the same stream."""
        generators = Generators(global_generators())
        if not in_place:
            notify(self.dataset, epoch)
            return Private(generators, generators.seeded(mix(seed, stream)))
        if self.states and not worker:
            return Private(generators, self.states)
        rng = InPlace(generators)
        self.states = rng.states
        return rng

    def _divide(self, stream: int, skipped: int) -> Iterator[Any]:
        self.tag = Tag(stream, skipped, 0)
        head, first = self._skip(skipped), None
        if self.settles and self.states and isinstance(self._rng, Private):
            self._rng = self._rng.settled(self.states, ())
        for mine, chunk in divide(self._read, self.division, head):
            first = fingerprint(chunk) if first is None and self.division.world > 1 else first
            self.tag = Tag(stream, self.tag.position + len(chunk), len(chunk), self._again(), first)
            if not self.everyones:
                yield from mine
            elif mine:
                yield [
                    portion(chunk, replace(self.division, rank=rank), head)
                    for rank in range(self.division.world)
                ]

    def _again(self) -> bool:
        """Whether what was read can be read again; workers that outlive an epoch have generators in a state that nobody knows."""
        if isinstance(self._rng, Private):
            return True
        return self._rng.again and not (
            self._epochs > 1 and self._rng.drew and get_worker_info() is not None
        )

    def _read(self, count: int) -> list[Any]:
        with self._rng:
            return list(islice(self._items, count))

    def _skip(self, count: int) -> list[Any]:
        """Reads and drops ``count`` items, all but the first ones: those that padding may need."""
        head = self._read(min(count, self.division.world - 1))
        with self._rng:
            read = len(head) + sum(1 for _ in islice(self._items, count - len(head)))
        if read < count:
            raise LoaderError(
                f"{type(self.dataset).__name__} ended after {read} items where the saved position is {count} items into "
                "it: expected the same dataset, giving the same stream, as when the state was saved."
            )
        return head


@final
class _StreamView(IterableDataset[Any]):
    """One rank's part of an iterable dataset; its attributes are those of the user's dataset, as in get_worker_info()."""

    def __init__(self, reader: _DividedStream) -> None:
        vars(self)["_accel_reader"] = reader

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self)["_accel_reader"])

    def __len__(self) -> int:
        return len(vars(self)["_accel_reader"].dataset)

    def __reduce__(self) -> Any:  # the usual one looks at the class
        return _StreamView, (vars(self)["_accel_reader"],)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """The user's, for ``isinstance``."""
        return type(vars(self)["_accel_reader"].dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_accel_reader"].dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_accel_reader"].dataset, name, value)


def _tagged(collate: Callable[[Any], Any], reader: _DividedStream, items: Any) -> tuple[Tag, Any]:
    """A batch of the user's collate function, with the reader's tag beside it."""
    return reader.tag, collate(items)


def _collated(collate: Callable[[Any], Any], units: bool, parts: list[list[Any]]) -> list[Any]:
    return [collate(part[0] if units else part) for part in parts]


@final
class StreamReader(EpochReader):
    """Stands in for the dataset of an iterable loader."""

    def __init__(
        self,
        loader: DataLoader[Any],
        shape: Shape,
        division: Division,
        dispatcher: Process | None = None,
    ) -> None:
        self._division, self._dispatcher = division, dispatcher
        self._units = shape.units
        self._workers = loader.num_workers
        # What a loader with workers seeds them from; the stream is drawn again where they get the same seeds.
        self._seeding = Generators({"seeds": loader.generator or torch.default_generator})
        self._control = torch.zeros(3 + max(1, self._workers), dtype=torch.int64, device="cpu")
        if self._workers:
            self._control.share_memory_()
        self._reader = _DividedStream(
            loader.dataset, division, self._control, dispatcher is not None
        )
        self.tag = Tag(0, 0, 0)
        self._again = True

    def install(self, loader: DataLoader[Any]) -> None:
        vars(loader)["dataset"] = _StreamView(self._reader)
        if self._dispatcher is not None:
            vars(loader).update(batch_sampler=None, batch_size=None)
            loader.collate_fn = partial(_collated, loader.collate_fn, self._units)
        elif not self._units:
            vars(loader)["batch_sampler"] = BatchSampler(
                loader.sampler, self._division.batch, loader.drop_last
            )
        loader.collate_fn = partial(_tagged, loader.collate_fn, self._reader)

    def begin(self, start: Start, in_place: bool) -> None:
        """Tells the readers, in this process or in workers that live on."""
        super().begin(start, in_place)
        self._at = list(start.at) or [0] * max(1, self._workers)
        seed = 0 if start.seed is None else mix(start.seed, start.epoch)
        self._control.copy_(
            torch.tensor([start.seed is None, start.epoch, seed, *self._at], device="cpu")
        )
        self._reader.states, self._reader.settles = start.states or {}, in_place
        self._seeds, self.tag = self._seeding.states(), Tag(0, 0, 0)
        self._again, self.first = True, None
        if start.skip:
            self._check_known()

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if self._dispatcher is None:
            return iter(loader)
        return Dispatched(self._dispatcher, self._division.rank, loader)

    def upcoming(self, count: int) -> int | None:
        return int(self.tag.more) if count == 1 and self.tag.more is not None else None

    def take(self, item: Any) -> Any:
        self.tag, batch = item
        self.given += 1
        self._again = self._again and self.tag.again
        if self._division.world > 1:
            self._check_again()  # the other ranks may read another stream
        if self.first is None and self.tag.first is not None and not self._division.ragged:
            names, numbers = self.tag.first
            self.first = numbers if names is None else names
        self._at[self.tag.stream] = self.tag.position
        self.kept = kept_of(self._division, self._units, self.tag.samples)
        return batch

    def complete(self) -> bool:
        """Known at the end only; a rank without a share in the last batch still had an epoch."""
        return self._closed and (
            not self._division.ragged or self._reader.tag.position == sum(self.start.at)
        )

    def position(self) -> Start:
        if self.given:
            self._check_known()
        states = self.start.states
        if self.start.in_place and self.given:
            states = self._seeds if self._workers else self._reader.states
        return self.start._replace(at=tuple(self._at), checksum=None, states=states, own=None)

    def resume(self, start: Start) -> Start:
        if not any(start.at):
            return start
        self._check_known()
        expected = max(1, self._workers)
        seeded = start.states is None or ("seeds" in start.states) == bool(self._workers)
        if len(start.at) != expected or start.checksum is not None or not seeded:
            raise LoaderError(
                f"the state is {sum(start.at)} samples into epoch {start.epoch}, read from {len(start.at)} streams (one "
                f"for each worker), and this loader has an iterable dataset with {expected}: use the same dataset and "
                "num_workers as when the state was saved, or save between epochs."
            )
        return start

    def _check_known(self) -> None:
        """With uneven batches each worker's tail makes the ranks' loops shift against each other."""
        if self._workers and self._division.ragged:
            raise LoaderError(
                "the position of an iterable dataset in mid-epoch cannot be known with num_workers="
                f"{self._workers} and even_batches=False: the ranks' loops are at different samples. Use "
                "even_batches=True, drop_last=True or num_workers=0, or save between epochs."
            )
        self._check_again()

    def _check_again(self) -> None:
        """A stream that would come out otherwise has no position."""
        if not self._again:
            raise LoaderError(
                f"the position of {type(self._reader.dataset).__name__} in mid-epoch could not be resumed: it draws random "
                "numbers from a generator that others draw from too while it is read, or whose state outlives an epoch in "
                "persistent workers. Give it a generator of its own, or use LoaderOptions(seed=...), or save between epochs."
            )

    def length(self) -> int:
        """As the dataset says, as if one process read it."""
        return self._division.local_steps(len(self._reader.dataset))


# -- What the ranks read, compared through the store that they share ---------------------------------------------------
# Nobody waits for a rank that does not read, as where rank 0 alone looks at a batch: a collective would.

_PATIENCE = 2.0  # seconds that the first batch of a loader waits for the other ranks' first ones
_PAUSE = 0.005

P = ParamSpec("P")


@final
class StreamComparisons:
    """What the ranks tell each other of one loader: ``name`` is that of no other."""

    def __init__(self, process: Process, name: str, dataset: str) -> None:
        self.process, self.name, self.dataset = process, name, dataset
        self._begun: Counter[tuple[int, ...]] = Counter()

    def begin(self, epoch: int, at: tuple[int, ...]) -> StreamComparison:
        place = (epoch, *at)
        self._begun[place] += 1
        return StreamComparison(
            self, f"{place} {self._begun[place]}", _PATIENCE if self._begun.total() == 1 else 0.0
        )


def _if_reached(
    compare: Callable[Concatenate[StreamComparison, P], None],
) -> Callable[Concatenate[StreamComparison, P], None]:
    """A comparison, which needs the store; without it, as when rank 0 has ended, the ranks compare nothing more.

    LoaderError where the process groups were ended, as by a rank that has found the streams to differ.
    """

    @wraps(compare)
    def call(self: StreamComparison, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if reason := ended():
            raise LoaderError(
                f"the process groups were ended: {reason}; call accel.teardown() to start again"
            )
        if not self.silent:
            try:
                compare(self, *args, **kwargs)
            except (RuntimeError, ValueError):
                self.silent = True

    return call


@final
class StreamComparison:
    """What the ranks read in one iteration."""

    def __init__(self, stream: StreamComparisons, name: str, patience: float) -> None:
        place = stream.process.place
        self._stream, self._rank, self._patience = stream, place.rank, patience
        self._others = [r for r in range(place.world_size) if r != place.rank]
        self._unknown = list(self._others)
        self._name = name
        self.silent = False

    @cached_property
    def _store(self) -> Store:
        return self._stream.process.store("loader", self._stream.name, self._name)

    @_if_reached
    def gave(self, given: int, first: Fingerprint | None) -> None:
        """The loop gets its batch ``given`` now; ``first`` is of the first items of the whole stream.

        LoaderError where another rank read other items first.
        """
        if given == 1:
            self._mine = first
            self._store.set(f"first {self._rank}", json.dumps(first))
        self._ask(self._unknown, self._agrees, self._patience if given == 1 else 0.0)

    def _ask(self, ranks: list[int], is_known: Callable[[int], bool], patience: float) -> None:
        """Asks after each of ``ranks`` until it is known, but not for longer than ``patience`` seconds."""
        until = time.monotonic() + patience
        while ranks:
            ranks[:] = [rank for rank in ranks if not is_known(rank)]
            if time.monotonic() >= until:
                return
            time.sleep(_PAUSE if ranks else 0.0)

    def _agrees(self, rank: int) -> bool:
        if not self._store.check([f"first {rank}"]):
            return False
        theirs = json.loads(self._store.get(f"first {rank}"))
        if (
            self._mine is not None
            and theirs is not None
            and self._mine.differs(Fingerprint(*theirs))
        ):
            raise LoaderError(
                f"rank {self._rank} and rank {rank} read other items first from {self._stream.dataset}: it divides itself over "
                "the ranks, or shuffles differently on each, and dividing it once more would lose most samples. Use "
                "accel.LoaderOptions(shard=False), with which each rank reads its own part, or let it give every rank the same "
                "whole stream"
            )
        return True


# -- Batches that rank 0 reads for all ranks ----------------------------------------------------------------------------

_WHAT: Final = "a batch that rank 0 reads"


@final
class Dispatched:
    """Each rank's items of what rank 0 reads, where ``loader`` gives (tag, a batch for each place); every step is collective.

    Rank 0 reads one step ahead, so that each step tells whether another one follows.
    """

    def __init__(self, process: Process, place: int, loader: Iterable[Any]) -> None:
        self._process, self._place, self._loader = process, place, loader
        self._items: Iterator[Any] | None = None
        self._error: Exception | None = None
        self._next = self._read() if process.place.rank == 0 else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def _read(self) -> Any:
        """Rank 0's next step; None at the end, and where it fails, which is told in its turn."""
        try:
            self._items = iter(self._loader) if self._items is None else self._items
            return next(self._items, None)
        except Exception as error:
            self._error = error
            return None

    def __next__(self) -> Any:
        """This rank's (tag, batch); where rank 0 cannot read, its error there and LoaderError on the others."""
        step, error, messages = self._next, self._error, []
        if step is not None:
            try:
                self._next = self._read()
                tag = step[0]._replace(more=self._next is not None or self._error is not None)
                messages = [packed((tag, batch)) for batch in step[1]]
            except Exception as problem:
                error = LoaderError(
                    f"a batch cannot be sent to the other ranks: {text_of_error(problem)}"
                )
                error.__cause__ = problem
        told = agree(_WHAT, (self._place, text_of_error(error), list(map(len, messages))))
        raise_together(_WHAT, error, [text for _, text, _ in told], LoaderError)
        if not (sizes := told[0][2]):
            raise StopIteration
        received = torch.empty(max(sizes), dtype=torch.uint8, device="cpu")
        padded = [
            torch.nn.functional.pad(message, (0, max(sizes) - len(message))) for message in messages
        ]
        with Waiting(self._process, _WHAT):
            sent = [padded[place] for place, *_ in told] if padded else None
            dist.scatter(received, sent, group=self._process.control, group_src=0)
        return unpacked(received[: sizes[self._place]], received.device)
