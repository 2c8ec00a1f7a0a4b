"""What each rank reads of an epoch: pure arithmetic, and the order drawn from the user's sampler.

The arithmetic knows neither samplers nor loaders. An order is drawn as it is read: in one process from the program's
generators, as raw PyTorch does, and else from private ones that (seed, epoch) alone decide, the same on every rank.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.utils.data as torch_data
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from ..process.rng import InPlace, Private, global_generators, is_generator, seed_of


class Share(NamedTuple):
    """One rank's part of a global step: ``size`` positions from ``offset``; those after ``real`` are padding."""

    offset: int
    size: int
    real: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a global step of ``world * batch`` consecutive samples is divided over the ranks."""

    rank: int
    world: int
    batch: int
    even: bool
    drop_last: bool

    @property
    def width(self) -> int:
        return self.world * self.batch

    @property
    def pads(self) -> bool:
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

    def steps(self, remaining: int) -> int:
        return remaining // self.width if self.drop_last else -(-remaining // self.width)

    def local_steps(self, remaining: int) -> int:
        """The batches that this rank gets from ``remaining`` samples."""
        full, tail = divmod(remaining, self.width)
        return full + (not self.drop_last and self.share(tail).size > 0)


def portion(chunk: list[Any], division: Division, head: list[Any]) -> list[Any]:
    """One rank's part of a global step, padded from ``head``."""
    if len(chunk) < division.width and division.drop_last:
        return []
    share = division.share(len(chunk))
    padding = [head[(share.offset + i - len(chunk)) % len(head)] for i in range(share.real, share.size)]
    return chunk[share.offset : share.offset + share.real] + padding


def divide(
    read: Callable[[int], list[Any]], division: Division, head: list[Any]
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Each global step of what ``read`` gives, which has fewer items than asked for only at the end: this rank's, and all.

    ``head`` is of the items that come before what is read the first ``division.world - 1`` at most: padding takes them.
    """
    while chunk := read(division.width):
        head += chunk[: division.world - 1 - len(head)]
        yield portion(chunk, division, head), chunk


def mix(*values: Any) -> int:
    """A seed of 63 bits that all of the plain values decide."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1


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


def notify(thing: Any, epoch: int) -> None:
    """Tells the epoch to a sampler or dataset that has ``set_epoch``."""
    if callable(getattr(thing, "set_epoch", None)):
        thing.set_epoch(epoch)


def own_generators(loader: DataLoader[Any]) -> dict[str, Any]:
    """The generators that belong to a loader alone: its own, and those among its samplers' attributes."""
    samplers = parts(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    found = {id(value): value for value in (loader.generator, *samplers) if is_generator(value)}
    return {f"own {i}": value for i, value in enumerate(found.values())}


def drawn_from(sampler: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """The generators that a sampler may draw from: the global ones, but for torch's own samplers, and ``own``."""
    if type(sampler) in (SequentialSampler, range, list, tuple):
        return dict(own)
    if type(sampler) in TORCHS:
        return dict(own) if sampler.generator is not None else {"torch": torch.default_generator, **own}
    return {**global_generators(), **own}


#: Those of torch's that draw with their first item alone from generators that others know, where they have none of their own.
TORCHS = (RandomSampler, torch_data.SubsetRandomSampler, torch_data.WeightedRandomSampler)


def loader_seed(loader: DataLoader[Any], seed: int | None, place: int) -> int:
    """The seed of a loader's orders, the same in each setup of the same loader; None is the seed of this process's torch.

    A sampler with a ``generator`` draws from that alone, as torch's do; other loaders of one setup differ by their place in it.
    """
    batcher = loader.batch_sampler
    sampler = loader.sampler if batcher is None or type(batcher) is BatchSampler else batcher
    own = [seed_of(generator) for generator in own_generators(loader).values()]
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        return mix(seed, *own)
    return mix(torch.initial_seed() if seed is None else seed, place, *own)


_BLOCK = 1 << 16


def _blocks(sampler: RandomSampler) -> Iterator[Sequence[int]]:
    """What ``iter(sampler)`` gives, in blocks that need no Python object for each index."""
    n, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()))
    if sampler.replacement:
        for at in range(0, sampler.num_samples, _BLOCK):
            block = array("q", bytes(8 * min(_BLOCK, sampler.num_samples - at)))
            out = torch.frombuffer(block, dtype=torch.int64)
            torch.randint(n, (len(block),), generator=generator, out=out, device="cpu")
            yield block
        return
    whole, rest = divmod(sampler.num_samples, n)
    for size in (*[n] * whole, rest):
        order = array("q", bytes(8 * n))
        torch.randperm(n, generator=generator, out=torch.frombuffer(order, dtype=torch.int64), device="cpu")
        yield from (order[at : min(at + _BLOCK, size)] for at in range(0, size, _BLOCK))


class SampleOrder:
    """The items of one epoch's order, drawn from a sampler (any iterable) in the context ``rng`` as they are asked for.

    ``ahead``: read in growing blocks, which is quicker where ``rng`` is private; else exactly what is asked for.
    """

    def __init__(self, sampler: Any, rng: Private | InPlace, *, ahead: bool) -> None:
        self.rng = rng
        #: The first items that were skipped, which padding may take.
        self.head: list[Any] = []
        self._block = 1 if ahead else 0
        self._waiting: deque[Any] = deque()
        self._ended = False
        alone = type(sampler) is RandomSampler and (ahead or (isinstance(rng, Private) and sampler.generator is None))
        self._drawn = _blocks(sampler) if alone else None
        if self._drawn is None:
            with rng:
                self._items = iter(sampler)

    def _draw(self, wanted: int) -> Sequence[Any]:
        """The next items, ``wanted`` or another number of them; none at the end."""
        with self.rng:
            found = list(islice(self._items, wanted)) if self._drawn is None else next(self._drawn, ())
        self._ended = len(found) < wanted if self._drawn is None else not found
        return found

    def peek(self, count: int) -> int:
        """How many of the next ``count`` items there are."""
        while len(self._waiting) < count and not self._ended:
            wanted = max(count - len(self._waiting), self._block)
            self._block = min(2 * self._block, _BLOCK)
            self._waiting += self._draw(wanted)
        return min(count, len(self._waiting))

    @property
    def ended(self) -> bool:
        return self._ended and not self._waiting

    def read(self, count: int) -> list[Any]:
        """The next items, at most ``count``; fewer at the end only."""
        return [self._waiting.popleft() for _ in range(self.peek(count))]

    def skip(self, count: int, head: int, crc: int = 0) -> tuple[int, int]:
        """Draws and drops the next ``count`` items, and keeps the first ``head`` of all; how many, and their digest."""
        found = 0
        while found < count and not self.ended:
            block = self.read(min(len(self._waiting), count - found)) or self._draw(min(_BLOCK, count - found))
            self._waiting += block[count - found :]
            block = block[: count - found]
            self.head += block[: head - len(self.head)]
            found, crc = found + len(block), digest(block, crc)
        return found, crc


def digest(items: Sequence[Any], crc: int = 0) -> int:
    """A checksum of items of an order, after those whose checksum is ``crc``."""
    with suppress(TypeError, OverflowError):
        return zlib.crc32(items if isinstance(items, array) else array("q", items), crc)
    for item in items:
        crc = zlib.crc32(_bytes(item), crc)
    return crc


def _bytes(item: Any) -> bytes:
    """An item of an order as bytes; integers as ``digest`` takes many of them."""
    for numbers in (item if isinstance(item, list | tuple) else ()), (item,):
        with suppress(TypeError, OverflowError):
            if numbers:
                return array("q", numbers).tobytes()
    return repr(item).encode()
