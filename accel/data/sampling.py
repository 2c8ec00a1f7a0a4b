"""What each rank reads of an epoch: pure arithmetic, and the order drawn from the user's sampler.

The arithmetic knows neither samplers nor loaders. An order is drawn as it is read: in one process from the program's
generators, as raw PyTorch does, and else from private ones that (seed, epoch) alone decide, the same on every rank.
"""

from __future__ import annotations

import random
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


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


def divide(
    read: Callable[[int], list[Any]], division: Division, head: list[Any]
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Each global step of what ``read`` gives: this rank's items, and those of all ranks.

    Args:
        read: gives the next items, at most as many as it is asked for; fewer only at the end.
        division: who gets what.
        head: the first items of the order that come before what is read, at most ``division.world - 1``: padding takes them.
    """
    while chunk := read(division.width):
        head += chunk[: division.world - 1 - len(head)]
        if len(chunk) < division.width and division.drop_last:
            yield [], chunk
            continue
        share = division.share(len(chunk))
        padding = [head[(share.offset + i - len(chunk)) % len(head)] for i in range(share.real, share.size)]
        yield chunk[share.offset : share.offset + share.real] + padding, chunk


def mix(*values: Any) -> int:
    """A seed of 63 bits that all of the plain values decide."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1


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


class Generators:
    """Random generators by name, which are read, put back and seeded together."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._all = {name: _access(generator) for name, generator in named.items()}

    def states(self) -> dict[str, Any]:
        """Their states now."""
        return {name: access.get() for name, access in self._all.items()}

    def put(self, states: Mapping[str, Any]) -> None:
        """Brings those that ``states`` names, and that are here, to their states."""
        for name in states.keys() & self._all.keys():
            self._all[name].put(states[name])

    def seeded(self, seed: int) -> dict[str, Any]:
        """What their states would be after seeding."""
        before = self.states()
        try:
            for access in self._all.values():
                access.seed(seed)
            return self.states()
        finally:
            self.put(before)


def global_generators() -> dict[str, Any]:
    """The global CPU generators; those of other devices are the model's."""
    numpy = sys.modules.get("numpy")
    return {"torch": torch.default_generator, "python": random, **({"numpy": numpy.random} if numpy else {})}


class Private:
    """Generators at states of their own inside ``with``, which go on there; put away outside."""

    again: bool = True  # what they give can be drawn again

    def __init__(self, generators: Generators, states: Mapping[str, Any]) -> None:
        self._generators = generators
        self.states = dict(states)

    def __enter__(self) -> None:
        outer = self._generators.states()
        self._outer = {name: outer[name] for name in self.states if name in outer}
        self._generators.put(self.states)

    def __exit__(self, *_: object) -> None:
        inner = self._generators.states()
        self.states = {name: inner[name] for name in self._outer}
        self._generators.put(self._outer)

    def settled(self, began: Mapping[str, Any], own: Iterable[str]) -> Private | InPlace:
        """How a program that resumes goes on reading what began at some states: in place, where its generators are here.

        They are where the program brought them back too (``rng_state``). ``own`` ones are the loader's, and brought here.
        """
        mine = set(own)
        self._generators.put({name: state for name, state in self.states.items() if name in mine})
        now = self._generators.states()
        if all(_same(state, now[name]) for name, state in self.states.items()):
            return InPlace(self._generators, began)
        self.states = {name: state for name, state in self.states.items() if name not in mine}
        return self


class InPlace:
    """Reading inside ``with`` from generators that others may use too, as raw PyTorch does.

    What was read can be drawn again from ``states``, where reading began, as long as nobody else drew in between from a
    generator that reading draws from later.

    Args:
        generators: those that reading may draw from.
        began: the states where it began, if that was before.
        once: nothing is drawn after the first time, so that there is nothing to watch.
    """

    def __init__(self, generators: Generators, began: Mapping[str, Any] | None = None, *, once: bool = False) -> None:
        self._generators, self._once = generators, once
        self._last = generators.states()
        self.states = dict(began or self._last)
        self.drew = set(began or ())
        self._moved: set[str] = set()
        self.again = True

    def __enter__(self) -> None:
        if self._once and self.drew:
            return
        self._before = self._generators.states()
        self._moved |= _changed(self._last, self._before) & self.drew
        # What did not draw yet begins here.
        self.states.update((name, state) for name, state in self._before.items() if name not in self.drew)

    def __exit__(self, *_: object) -> None:
        if self._once and self.drew:
            return
        self._last = self._generators.states()
        drawn = _changed(self._before, self._last)
        self.drew |= drawn
        self.again = self.again and not drawn & self._moved


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    return {name for name, state in before.items() if not _same(state, after[name])}


def _same(one: Any, other: Any) -> bool:
    """Whether two states of a generator are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and any(hasattr(value, "tobytes") for value in one):
        return all(map(_same, one, other))
    return bool((one == other).all()) if hasattr(one, "tobytes") else bool(one == other)


def to_plain(state: Any) -> Any:
    """A generator's state as what JSON holds."""
    if isinstance(state, torch.Tensor):
        return {"bytes": bytes(state.tolist()).hex()}
    if isinstance(state, dict):
        return {name: to_plain(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [to_plain(value) for value in state]
    return state.tolist() if hasattr(state, "tolist") else state


def from_plain(state: Any) -> Any:
    """The generator's state that ``to_plain`` was given, or its equal."""
    if isinstance(state, dict):
        if state.keys() == {"bytes"}:
            return torch.frombuffer(bytearray.fromhex(state["bytes"]), dtype=torch.uint8)
        return {name: from_plain(value) for name, value in state.items()}
    return tuple(map(from_plain, state)) if isinstance(state, list | tuple) else state


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


def _own(loader_generator: Any, sampler: Any) -> dict[str, Any]:
    """The generators that belong to a loader alone: its own, and those among its sampler's attributes."""
    found = {id(value): value for value in (loader_generator, *parts(sampler)) if _is_generator(value)}
    return {f"own {i}": value for i, value in enumerate(found.values())}


def own_generators(loader: DataLoader[Any]) -> dict[str, Any]:
    """The generators that belong to a loader alone: its own, and those among its samplers' attributes."""
    return _own(loader.generator, loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def drawn_from(sampler: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """The generators that a sampler may draw from: the global ones, but for torch's own samplers, and ``own``."""
    if type(sampler) in (SequentialSampler, range, list, tuple):
        return dict(own)
    if type(sampler) in _TORCHS:
        return dict(own) if sampler.generator is not None else {"torch": torch.default_generator, **own}
    return {**global_generators(), **own}


_TORCHS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def draws_once(sampler: Any) -> bool:
    """Whether a sampler draws with its first item alone from generators that others know."""
    return type(sampler) in _TORCHS and sampler.generator is None


def loader_seed(loader: DataLoader[Any], seed: int | None, place: int) -> int:
    """The seed of a loader's orders, the same in each setup of the same loader.

    A sampler with a ``generator`` draws from that alone, as torch's do; other loaders of one setup differ by their place.

    Args:
        loader: the user's loader.
        seed: what the user asked for; None is that of this process's torch.
        place: the loader's place among those of its setup.
    """
    batcher = loader.batch_sampler
    sampler = loader.sampler if batcher is None or type(batcher) is BatchSampler else batcher
    own = [_identity(generator) for generator in own_generators(loader).values()]
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        return mix(seed, *own)
    return mix(torch.initial_seed() if seed is None else seed, place, *own)


def _identity(generator: Any) -> Any:
    """What a generator was seeded with; torch's tell, of others it is their state."""
    return generator.initial_seed() if isinstance(generator, torch.Generator) else to_plain(_access(generator).get())


_BLOCK = 1 << 16


def _blocks(sampler: RandomSampler) -> Iterator[Sequence[int]]:
    """What ``iter(sampler)`` gives, in blocks that need no Python object for each index."""
    n, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    if sampler.replacement:
        for at in range(0, sampler.num_samples, _BLOCK):
            block = array("q", bytes(8 * min(_BLOCK, sampler.num_samples - at)))
            torch.randint(n, (len(block),), generator=generator, out=torch.frombuffer(block, dtype=torch.int64))
            yield block
        return
    whole, rest = divmod(sampler.num_samples, n)
    for size in (*[n] * whole, rest):
        order = array("q", bytes(8 * n))
        torch.randperm(n, generator=generator, out=torch.frombuffer(order, dtype=torch.int64))
        yield from (order[at : min(at + _BLOCK, size)] for at in range(0, size, _BLOCK))


class SampleOrder:
    """The items of one epoch's order, drawn from a sampler as they are asked for.

    Args:
        sampler: any iterable.
        rng: the context in which it is read.
        ahead: read in growing blocks, which is quicker where ``rng`` is private; else exactly what is asked for.
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
        """Whether it is known that there are no further items."""
        return self._ended and not self._waiting

    def read(self, count: int) -> list[Any]:
        """The next items, at most ``count``; fewer at the end only."""
        return [self._waiting.popleft() for _ in range(self.peek(count))]

    def skip(self, count: int, head: int) -> tuple[int, int]:
        """Draws and drops the first ``count`` items, all but ``head`` of them; returns how many there were, and their digest."""
        found = crc = 0
        while found < count and not self._ended:
            block = self._draw(min(_BLOCK, count - found))
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
