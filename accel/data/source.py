"""The items of one epoch of a sampler or an iterable dataset, from a position on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from ..errors import LoaderError
from ..process.rng import Generators, Private, global_generators
from .sampling import Division, divide, mix, on_cpu, parts_of, set_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A snapshot of the generators at the start of an epoch, and the number of samples given.

    The snapshot is the ``seed`` that all epochs share, or ``states``. If both are None, the epoch
    draws in place, from the program's generators as in raw PyTorch.
    """

    epoch: int
    seed: int | None = None
    states: Mapping[str, Any] | None = None
    #: The samples that all ranks were given, for each worker of an iterable dataset.
    at: tuple[int, ...] = ()
    #: The checksum of a sampler's samples. None after ``loader.skip``.
    checksum: int | None = None
    #: The states of a loader or of its workers' datasets, if they keep their own position.
    own: Any = None

    @property
    def in_place(self) -> bool:
        return self.seed is None and self.states is None

    @property
    def count(self) -> int:
        return sum(self.at)

    @property
    def epoch_seed(self) -> int | None:
        return None if self.seed is None else mix(self.seed, self.epoch)

    def tag(self, stream: int) -> Tag:
        """Return the position in the stream of a worker."""
        own = self.own[stream] if isinstance(self.own, list) else self.own
        return Tag(stream, self.at[stream] if self.count else 0, state=own)


@dataclass(frozen=True, slots=True)
class Tag:
    """The origin of a batch. It travels with the batch, because loaders read ahead."""

    #: The number of the worker, and of the samples that were read from its stream.
    stream: int = 0
    position: int = 0
    #: The number of samples in the global step, 0 for padding.
    samples: int = 0
    #: The checksum of a sampler's samples, or of the first items of a stream.
    checksum: int = 0
    #: The state of a loader or dataset that keeps its own position.
    state: Any = None
    #: True if another batch follows, None if unknown.
    more: bool | None = None


class Source:
    """The items of a sampler or dataset in one epoch, and this rank's shares of them.

    Args:
        own: generators that it may draw from besides the global ones.
        checksum: adds items to a checksum. None: no checksum.
        stateful: keep the state of the dataset after each global step.
    """

    def __init__(
        self,
        items: Any,
        division: Division,
        own: Mapping[str, Any] | None = None,
        checksum: Callable[[list[Any], int], int] | None = None,
        stateful: bool = False,
    ) -> None:
        self.items = items
        self.division = division
        self.tag = Tag()
        #: The snapshot of the generators.
        self.states: Mapping[str, Any] | None = None
        #: The first items of the epoch, for padding.
        self.head: list[Any] = []
        self._own = dict(own or {})
        self._checksum = checksum
        self._stateful = stateful
        self._order: Iterator[Any] = iter(())

    def open(self, start: Position, seed: int | None, tag: Tag, *, block: int = 0) -> None:
        """Begin an epoch at the position ``tag``. Its items are drawn from a snapshot or a seed.

        Args:
            block: the items to draw at once. 0 draws those after the position in place.
        """
        generators = Generators({**global_generators(), **self._own})
        context: Any = nullcontext()
        self.states = start.states
        if seed is not None:
            for part in parts_of(self.items):
                if part is self.items or isinstance(part, Sampler):
                    set_epoch(part, start.epoch)
            context = Private(generators, generators.seeded(seed))
        elif start.states is not None:
            context = Private(generators, start.states)
        else:
            self.states = generators.states()
        with context, on_cpu():
            if tag.state is not None:
                self.items.load_state_dict(tag.state)
            items = iter(self.items)
            self._skip(items, tag, start.checksum)
        if not block and start.states is not None:
            # rng_state() has restored the global generators, so the rest is drawn in place.
            Generators(self._own).put(context.states)
        context = context if block else nullcontext()
        self._order = _drawn(items, context, max(block, self.division.width))

    def _skip(self, items: Iterator[Any], tag: Tag, expected: int | None) -> None:
        """Drop the items before a position, and keep the first ones for padding."""
        count = tag.position if tag.state is None else 0
        head: list[Any] = []
        skipped = checksum = 0
        width = self.division.width
        while block := list(islice(items, min(width, count - skipped))):
            head += block[: self.division.world - 1 - len(head)]
            skipped += len(block)
            checksum = self._checksum(block, checksum) if self._checksum else 0
        is_same = skipped == count and checksum == expected
        if expected is None:
            # loader.skip() counts full steps, but the last step may have fewer items.
            is_same = count - width < skipped
        if count and not is_same:
            raise LoaderError(
                f"The {type(self.items).__name__} draws a different or shorter order than in the "
                "saved epoch. Use the same dataset and sampler, or leave the loader out."
            )
        self.head = head
        self.tag = replace(tag, position=tag.position - count + skipped, checksum=checksum)

    def shares(self) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yield this rank's share and all items of each global step, and keep their ``tag``."""
        order = self._order
        steps = divide(lambda count: list(islice(order, count)), self.division, self.head)
        for share, items in steps:
            checksum = self._checksum(items, self.tag.checksum) if self._checksum else 0
            state = self.items.state_dict() if self._stateful else None
            position = self.tag.position + len(items)
            self.tag = Tag(self.tag.stream, position, len(items), checksum, state)
            yield share, items


def _drawn(items: Iterator[Any], context: AbstractContextManager[Any], block: int) -> Iterator[Any]:
    """Yield items that are drawn inside a context, in blocks because it takes 0.2 ms to enter."""
    while True:
        with context, on_cpu():
            drawn = list(islice(items, block))
        if not drawn:
            return
        yield from drawn
