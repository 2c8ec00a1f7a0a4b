"""What each rank reads of an epoch: pure arithmetic, and the order drawn from the user's sampler.

The arithmetic knows neither samplers nor loaders. An order is drawn under generators that (seed, epoch) alone decide,
so that it is the same on every rank and at every world size.
"""

from __future__ import annotations

import random
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from .errors import LoaderError


class Share(NamedTuple):
    """One rank's part of a global step: ``size`` positions from ``offset``; those after ``real`` are padding."""

    offset: int
    size: int
    real: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a global step of ``world * batch`` consecutive samples is divided over the ranks."""

    rank: int
    world: int
    batch: int
    even: bool
    drop_last: bool

    @property
    def width(self) -> int:
        """The samples of a full global step."""
        return self.world * self.batch

    @property
    def pads(self) -> bool:
        """Whether a last batch may hold padding."""
        return self.even and not self.drop_last and self.world > 1

    @property
    def ragged(self) -> bool:
        """Whether the ranks may get different numbers of samples."""
        return not self.even and not self.drop_last and self.world > 1

    def share(self, count: int) -> Share:
        """This rank's part of a global step of ``count`` samples."""
        if self.even:
            size = -(-count // self.world)
            offset = self.rank * size
            return Share(offset, size, min(max(count - offset, 0), size))
        size, extra = divmod(count, self.world)
        offset = self.rank * size + min(self.rank, extra)
        size += self.rank < extra
        return Share(offset, size, size)

    def steps(self, remaining: int) -> tuple[int, int]:
        """The full global steps in ``remaining`` samples, and the samples of the last, incomplete one."""
        full, tail = divmod(remaining, self.width)
        return full, 0 if self.drop_last else tail

    def global_steps(self, remaining: int) -> int:
        """The global steps in ``remaining`` samples."""
        full, tail = self.steps(remaining)
        return full + bool(tail)

    def local_steps(self, remaining: int) -> int:
        """The batches that this rank gets from ``remaining`` samples."""
        full, tail = self.steps(remaining)
        return full + bool(self.share(tail).size)


def batches(order: Sequence[Any], start: int, plan: Plan) -> Iterator[list[Any]]:
    """This rank's batches of ``order`` from position ``start``; padding wraps to the start of the order."""
    full, tail = plan.steps(len(order) - start)
    end = start + full * plan.width
    for at in range(start + plan.rank * plan.batch, end, plan.width):
        yield list(order[at : at + plan.batch])
    share = plan.share(tail)
    if share.size:
        yield [order[(end + share.offset + i) % len(order)] for i in range(share.size)]


def mix(*numbers: int) -> int:
    """A seed of 63 bits that all of the numbers decide."""
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=8).digest(), "big") >> 1


class _Access(NamedTuple):
    """How a random generator of torch, random or numpy is read, put back and seeded."""

    get: Callable[[], Any]
    put: Callable[[Any], object]
    seed: Callable[[int], object]


def _access(generator: Any) -> _Access:
    """The access to a generator object, or to the modules ``random`` and ``numpy.random``."""
    if isinstance(generator, torch.Generator):
        return _Access(generator.get_state, generator.set_state, generator.manual_seed)
    if hasattr(generator, "getstate"):
        return _Access(generator.getstate, generator.setstate, generator.seed)
    if hasattr(generator, "get_state"):
        return _Access(generator.get_state, generator.set_state, lambda seed: generator.seed(seed % 2**32))
    bits = generator.bit_generator
    return _Access(
        lambda: bits.state,
        lambda state: setattr(bits, "state", state),
        lambda seed: setattr(bits, "state", type(bits)(seed).state),
    )


def _globals() -> list[_Access]:
    """The global CPU generators; torch.manual_seed would reseed the devices too."""
    numpy = sys.modules.get("numpy")
    return [_access(g) for g in (torch.default_generator, random, *([numpy.random] if numpy else []))]


@contextmanager
def _seeded(seed: int, *own: Any) -> Iterator[None]:
    """The global generators, and ``own`` ones, are seeded inside and as before outside."""
    with ExitStack() as stack:
        for access in (*_globals(), *map(_access, own)):
            stack.callback(access.put, access.get())
            access.seed(seed)
        yield


class Rng:
    """The global generators of one stream: in place inside ``with``, put away outside."""

    def __init__(self, seed: int) -> None:
        self._all = _globals()
        with _seeded(seed):
            self._inner = [access.get() for access in self._all]

    def _swap(self, states: list[Any]) -> list[Any]:
        """Puts the states in place, returns what was there."""
        before = [access.get() for access in self._all]
        for access, state in zip(self._all, states, strict=True):
            access.put(state)
        return before

    def __enter__(self) -> None:
        self._outer = self._swap(self._inner)

    def __exit__(self, *_: object) -> None:
        self._inner = self._swap(self._outer)


def parts(sampler: Any) -> list[Any]:
    """A sampler of any class and, recursively, the attributes of it and of the samplers in it."""
    found: dict[int, Any] = {}
    todo = [sampler]
    while todo:
        value = todo.pop()
        if id(value) not in found:
            found[id(value)] = value
            if value is sampler or isinstance(value, Sampler):
                todo += getattr(value, "__dict__", {}).values()
    return list(found.values())


def _is_generator(value: Any) -> bool:
    """Whether a sampler's attribute is a random generator of its own."""
    if isinstance(value, torch.Generator | random.Random):
        return True
    return type(value).__module__.startswith("numpy.random") and hasattr(value, "random")


def notify(thing: Any, epoch: int) -> None:
    """Tells the epoch to a sampler or dataset that has ``set_epoch``."""
    if callable(getattr(thing, "set_epoch", None)):
        thing.set_epoch(epoch)


def pack(item: Any) -> Any:
    """A list of integers as an array of 8 bytes each; anything else as it is."""
    try:
        return array("q", item) if isinstance(item, list) else item
    except (TypeError, OverflowError):
        return item


def unpack(item: Any) -> Any:
    """An item of an order as the sampler gave it."""
    return list(item) if isinstance(item, array) else item


def _permutation(sampler: RandomSampler) -> array[int]:
    """What a RandomSampler without replacement draws, without a Python object for each index."""
    order = array("q", bytes(8 * len(sampler)))
    torch.randperm(len(order), generator=sampler.generator, out=torch.frombuffer(order, dtype=torch.int64))
    return order


def draw(sampler: Any, nested: bool, seed: int, epoch: int) -> Sequence[Any]:
    """The order of one epoch: what ``sampler`` yields; ``nested`` when its items may be lists of indices."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    inside = parts(sampler)
    for part in inside:
        if part is sampler or isinstance(part, Sampler):
            notify(part, epoch)
    with _seeded(mix(seed, epoch), *filter(_is_generator, inside)):
        if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
            return _permutation(sampler)
        # An estimated __len__ is common, an endless sampler with one too.
        limit = 2 * len(sampler) + 1024
        items = list(islice(map(pack, sampler) if nested else sampler, limit + 1))
    if len(items) > limit:
        raise LoaderError(
            f"{type(sampler).__name__} does not end: it has __len__ {len(sampler)} and yields more than {limit} items. "
            "accel draws the order of a whole epoch: end __iter__ after one epoch, or use LoaderOptions(shard=False)."
        )
    order: Sequence[Any] = pack(items)
    return order


def digest(order: Sequence[Any]) -> int:
    """A checksum of an order."""
    crc = 0
    for part in order if isinstance(order, list) else [order]:
        crc = zlib.crc32(part if isinstance(part, array) else repr(part).encode(), crc)
    return crc
