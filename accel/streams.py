"""The feed of an iterable dataset: every rank reads the whole stream in chunks of a global step and keeps its part.

It works inside worker processes, each with its copy of the dataset; what a batch is made of travels with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .errors import LoaderError
from .feeds import Feed, Position, Shape, Start, kept_of
from .fingerprints import Fingerprint, fingerprint
from .sampling import Generators, InPlace, Plan, Private, deal, global_generators, mix, notify


class Tag(NamedTuple):
    """What a batch is made of.

    ``stream`` is its worker, ``position`` that after it there, ``samples`` are those of its global step. ``again`` says
    whether the stream would come out the same once more, ``first`` what its first items are.
    """

    stream: int
    position: int
    samples: int
    again: bool = True
    first: Fingerprint | None = None


@final
class _Reader:
    """Reads a stream. ``control`` (in place, epoch, seed, samples to skip) is shared with workers that outlive an epoch."""

    def __init__(self, dataset: Any, plan: Plan, control: torch.Tensor) -> None:
        self.dataset = dataset
        self.plan = plan
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
            self._source = iter(self.dataset)
        return self._deal(stream, skips[stream])

    def _open(self, in_place: bool, epoch: int, seed: int, stream: int, worker: bool) -> Private | InPlace:
        """In one process the stream draws from the program's generators, as in raw PyTorch.

        Over several ranks it has generators of its own, apart from the loop's: every rank must see the same stream.
        """
        generators = Generators(global_generators())
        if not in_place:
            notify(self.dataset, epoch)
            return Private(generators, generators.seeded(mix(seed, stream)))
        if self.states and not worker:
            return Private(generators, self.states)
        rng = InPlace(generators)
        self.states = rng.states
        return rng

    def _deal(self, stream: int, skipped: int) -> Iterator[Any]:
        self.tag = Tag(stream, skipped, 0)
        head, first = self._skip(skipped), None
        if self.settles and self.states and isinstance(self._rng, Private):
            self._rng = self._rng.settled(self.states, ())
        for mine, chunk in deal(self._read, self.plan, head):
            first = fingerprint(chunk) if first is None and self.plan.world > 1 else first
            self.tag = Tag(stream, self.tag.position + len(chunk), len(chunk), self._again(), first)
            yield from mine

    def _again(self) -> bool:
        """Whether what was read can be read again; workers that outlive an epoch have generators in a state that nobody knows."""
        if isinstance(self._rng, Private):
            return True
        return self._rng.again and not (self._epochs > 1 and self._rng.drew and get_worker_info() is not None)

    def _read(self, count: int) -> list[Any]:
        """The next items of the stream, at most ``count``."""
        with self._rng:
            return list(islice(self._source, count))

    def _skip(self, count: int) -> list[Any]:
        """Reads and drops ``count`` items, all but the first ones: those that padding may need."""
        head = self._read(min(count, self.plan.world - 1))
        with self._rng:
            read = len(head) + sum(1 for _ in islice(self._source, count - len(head)))
        if read < count:
            raise LoaderError(
                f"{type(self.dataset).__name__} ended after {read} items where the saved position is {count} items into "
                "it: expected the same dataset, giving the same stream, as when the state was saved."
            )
        return head


@final
class _View(IterableDataset[Any]):
    """One rank's part of an iterable dataset; its attributes are those of the user's dataset, as in get_worker_info()."""

    def __init__(self, reader: _Reader) -> None:
        vars(self)["_accel_reader"] = reader

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self)["_accel_reader"])

    def __len__(self) -> int:
        return len(vars(self)["_accel_reader"].dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_accel_reader"].dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_accel_reader"].dataset, name, value)


@final
class _Tagging:
    """The user's collate function, with the reader's tag beside each batch."""

    def __init__(self, collate: Callable[[Any], Any], reader: _Reader) -> None:
        self.collate = collate
        self.reader = reader

    def __call__(self, items: Any) -> tuple[Tag, Any]:
        return self.reader.tag, self.collate(items)


@final
class Stream(Feed):
    """Stands in for the dataset of an iterable loader."""

    def __init__(self, loader: DataLoader[Any], shape: Shape, plan: Plan) -> None:
        self._plan = plan
        self._units = shape.units
        self._workers = loader.num_workers
        # What a loader with workers seeds them from; the stream is drawn again where they get the same seeds.
        self._seeding = Generators({"seeds": loader.generator or torch.default_generator})
        self._control = torch.zeros(3 + max(1, self._workers), dtype=torch.int64)
        if self._workers:
            self._control.share_memory_()
        self._reader = _Reader(loader.dataset, plan, self._control)
        self.tag = Tag(0, 0, 0)
        self._again = True

    def install(self, loader: DataLoader[Any]) -> None:
        """Its dataset reads this rank's part, and its batches carry their tags."""
        vars(loader)["dataset"] = _View(self._reader)
        loader.collate_fn = _Tagging(loader.collate_fn, self._reader)

    def begin(self, start: Start, in_place: bool) -> None:
        """Tells the readers, in this process or in workers that live on."""
        self._at = list(start.at) or [0] * max(1, self._workers)
        seed = 0 if start.seed is None else mix(start.seed, start.epoch)
        self._control.copy_(torch.tensor([start.seed is None, start.epoch, seed, *self._at]))
        self._reader.states, self._reader.settles = start.states or {}, in_place
        self._seeds = self._seeding.states()
        self.start, self.given, self._closed, self._again = start, 0, False, True

    def take(self, item: Any) -> Any:
        """Counts one batch; its tag says of which stream."""
        self.tag, batch = item
        self.given += 1
        self._again = self._again and self.tag.again
        if self._plan.world > 1:
            self._check_again()  # the other ranks may read another stream
        self._at[self.tag.stream] = self.tag.position
        self.kept = kept_of(self._plan, self._units, self.tag.samples)
        return batch

    def close(self) -> None:
        """How much there was is known now."""
        self._closed = True

    def complete(self) -> bool:
        """Known at the end only; a rank without a share in the last batch still had an epoch."""
        return self._closed and (self._plan.pads or self._reader.tag.position == sum(self.start.at))

    def position(self) -> Position:
        """In the stream of each worker."""
        if self.given:
            self._check_known()
        states = self.start.states
        if self.start.in_place and self.given:
            states = self._seeds if self._workers else self._reader.states
        return Position(tuple(self._at), None, states)

    def resume(self, start: Start) -> Start:
        """The items are skipped when the epoch starts."""
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
        if self._workers and self._plan.ragged:
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
        return self._plan.local_steps(len(self._reader.dataset))
