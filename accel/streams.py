"""The feed of an iterable dataset: every rank reads the whole stream in chunks of a global step and keeps its part.

It works inside worker processes, each with its copy of the dataset; what a batch is made of travels with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .errors import LoaderError
from .feeds import Feed, Position, Shape, Start, kept_of
from .sampling import Plan, Rng, mix, notify


class _Tag(NamedTuple):
    """What a batch is made of: its stream, the position after it there, and the samples of its global step."""

    stream: int
    position: int
    samples: int


@final
class _Reader:
    """Reads a stream. ``control`` (epoch, seed, samples to skip) is shared with workers that outlive an epoch."""

    def __init__(self, dataset: Any, plan: Plan, control: torch.Tensor) -> None:
        self.dataset = dataset
        self.plan = plan
        self.control = control
        self.tag = _Tag(0, 0, 0)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        stream = info.id if info else 0
        epoch, seed, *skips = self.control.tolist()
        notify(self.dataset, epoch)
        # One seed for all ranks, apart from the loop's generators: every rank must see the same stream.
        self._rng = Rng(mix(seed, stream))
        with self._rng:
            self._source = iter(self.dataset)
        self.tag = _Tag(stream, skips[stream], 0)
        head = self._skip(skips[stream])
        while chunk := self._read(self.plan.width):
            count = len(chunk)
            self.tag = _Tag(stream, self.tag.position + count, count)
            head += chunk[: self.plan.world - 1 - len(head)]
            if count == self.plan.width or not self.plan.drop_last:
                share = self.plan.share(count)
                yield from chunk[share.offset : share.offset + share.real]
                for i in range(share.real, share.size):
                    yield head[(share.offset + i - count) % len(head)]

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

    def __call__(self, items: Any) -> tuple[_Tag, Any]:
        return self.reader.tag, self.collate(items)


@final
class Stream(Feed):
    """Stands in for the dataset of an iterable loader."""

    def __init__(self, loader: DataLoader[Any], shape: Shape, plan: Plan) -> None:
        self._plan = plan
        self._units = shape.units
        self._workers = loader.num_workers
        self._control = torch.zeros(2 + max(1, self._workers), dtype=torch.int64)
        if self._workers:
            self._control.share_memory_()
        self._reader = _Reader(loader.dataset, plan, self._control)

    def install(self, loader: DataLoader[Any]) -> None:
        """Its dataset reads this rank's part, and its batches carry their tags."""
        vars(loader)["dataset"] = _View(self._reader)
        loader.collate_fn = _Tagging(loader.collate_fn, self._reader)

    def begin(self, seed: int, start: Start) -> None:
        """Tells the readers, in this process or in workers that live on."""
        self._at = list(start.at) or [0] * max(1, self._workers)
        self._control.copy_(torch.tensor([start.epoch, mix(seed, start.epoch), *self._at]))
        self.start, self.given, self._closed = start, 0, False

    def take(self, item: Any) -> Any:
        """Counts one batch; its tag says of which stream."""
        tag, batch = item
        self.given += 1
        self._at[tag.stream] = tag.position
        self.kept = kept_of(self._plan, self._units, tag.samples)
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
        return Position(tuple(self._at), None)

    def resume(self, seed: int, epoch: int, position: Position) -> Start:
        """The items are skipped when the epoch starts."""
        if not any(position.at):
            return Start(epoch)
        self._check_known()
        expected = max(1, self._workers)
        if len(position.at) != expected or position.checksum is not None:
            raise LoaderError(
                f"the state is {sum(position.at)} samples into epoch {epoch}, read from {len(position.at)} streams (one "
                f"for each worker), and this loader has an iterable dataset with {expected}: use the same dataset and "
                "num_workers as when the state was saved, or save between epochs."
            )
        return Start(epoch, position.at)

    def _check_known(self) -> None:
        """With uneven batches each worker's tail makes the ranks' loops shift against each other."""
        if self._workers and self._plan.ragged:
            raise LoaderError(
                "the position of an iterable dataset in mid-epoch cannot be known with num_workers="
                f"{self._workers} and even_batches=False: the ranks' loops are at different samples. Use "
                "even_batches=True, drop_last=True or num_workers=0, or save between epochs."
            )

    def length(self) -> int:
        """As the dataset says, as if one process read it."""
        return self._plan.local_steps(len(self._reader.dataset))
