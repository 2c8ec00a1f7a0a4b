"""What each rank reads of an epoch: pure arithmetic, the order drawn from the user's sampler, and what tells items apart.

The arithmetic knows neither samplers nor loaders. An order is drawn as it is read: in one process from the program's
generators, as raw PyTorch does, and else from private ones that (seed, epoch) alone decide, the same on every rank.
"""

from __future__ import annotations

import copy
import os
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import torch
import torch.utils.data as torch_data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from ..process.packing import is_dense, packed, to_bytes
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
    padding = [
        head[(share.offset + i - len(chunk)) % len(head)] for i in range(share.real, share.size)
    ]
    return chunk[share.offset : share.offset + share.real] + padding


def has_parts(items: Any) -> bool:
    """Whether items can be cut into parts, tensors and arrays by their first dimension."""
    if isinstance(items, torch.Tensor) or type(items).__module__ == "numpy":
        return bool(getattr(items, "shape", ()))
    return isinstance(items, list | tuple | range) and not hasattr(items, "_fields")


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


def copied(sampler: Any) -> Any:
    """A sampler to be read in the place of the user's: what it counts or takes from its containers stays the copy's own."""
    copies = {
        id(part): copy.copy(part)
        for part in parts(sampler)
        if part is sampler or isinstance(part, Sampler)
    }
    for one in copies.values():
        for name, value in getattr(one, "__dict__", {}).items():
            if type(value) in (list, dict, set, deque):
                vars(one)[name] = value.copy()
            elif id(value) in copies:
                vars(one)[name] = copies[id(value)]
    return copies[id(sampler)]


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
    if type(sampler) in _FIXED:
        return dict(own)
    if type(sampler) in TORCHS:
        return (
            dict(own)
            if sampler.generator is not None
            else {"torch": torch.default_generator, **own}
        )
    return {**global_generators(), **own}


#: Those of torch's that draw with their first item alone from generators that others know, where they have none of their own.
TORCHS = (RandomSampler, torch_data.SubsetRandomSampler, torch_data.WeightedRandomSampler)
_FIXED = (SequentialSampler, range, list, tuple)


def draws_alone(sampler: Any) -> bool:
    """Whether nothing that a loop does can change what a sampler gives next, so that it may be read ahead of the loop."""
    if type(sampler) is BatchSampler:
        return draws_alone(sampler.sampler)
    return type(sampler) in (*TORCHS, *_FIXED)


def loader_seed(loader: DataLoader[Any], seed: int | None, place: int) -> int:
    """The seed of a loader's orders, the same in each setup of the same loader; None is the seed of this process's torch.

    Without a seed a sampler with a ``generator`` draws from that alone, as torch's do, though the user may not have given it one
    (torchdata's make their own); other loaders of one setup differ by their place in it.
    """
    if seed is not None:
        return mix(seed, place)
    batcher = loader.batch_sampler
    sampler = loader.sampler if batcher is None or type(batcher) is BatchSampler else batcher
    own = [seed_of(generator) for generator in own_generators(loader).values()]
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        return mix(None, *own)
    return mix(torch.initial_seed(), place, *own)


_BLOCK = 1 << 16


def _blocks(sampler: RandomSampler) -> Iterator[Sequence[int]]:
    """What ``iter(sampler)`` gives, in blocks that need no Python object for each index."""
    n, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(
            int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        )
    if sampler.replacement:
        for at in range(0, sampler.num_samples, _BLOCK):
            block = array("q", bytes(8 * min(_BLOCK, sampler.num_samples - at)))
            out = torch.frombuffer(block, dtype=torch.int64)
            torch.randint(n, (len(block),), generator=generator, out=out, device="cpu")
            yield block
        return
    whole, rest = divmod(sampler.num_samples, n)
    for size in chain(repeat(n, whole), (rest,)):
        order = array("q", bytes(8 * n))
        torch.randperm(
            n, generator=generator, out=torch.frombuffer(order, dtype=torch.int64), device="cpu"
        )
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
        alone = type(sampler) is RandomSampler and (
            ahead or (isinstance(rng, Private) and sampler.generator is None)
        )
        self._drawn = _blocks(sampler) if alone else None
        if self._drawn is None:
            with rng:
                self._items = iter(sampler)

    def _draw(self, wanted: int) -> Sequence[Any]:
        """The next items, ``wanted`` or another number of them; none at the end."""
        with self.rng:
            found = (
                list(islice(self._items, wanted)) if self._drawn is None else next(self._drawn, ())
            )
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
            block = self.read(min(len(self._waiting), count - found)) or self._draw(
                min(_BLOCK, count - found)
            )
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


# -- What items are, in a few bytes that are the same in every process -------------------------------------------------


class Fingerprint(NamedTuple):
    """Checksums of what names an item (integers, text), and of its other numbers; None where there are none.

    Two readers of one sample have the same names, also where each adds noise of its own to the other numbers.
    """

    names: int | None
    numbers: int | None

    def differs(self, other: Fingerprint) -> bool:
        """Whether these are other items, as far as that can be told."""
        if self.names is None and other.names is None:
            return self.numbers != other.numbers
        return self.names != other.names


def fingerprint(items: Any, aside: list[torch.Tensor] | None = None) -> Fingerprint:
    """The fingerprint of items of any kind; what is neither a tensor, an array nor plain counts by its type.

    Where there is an ``aside``, tensors count by their types and shapes, and those that have values go there.
    """
    crcs: dict[bool, int] = {}
    for is_name, content in _leaves(items, aside):
        crcs[is_name] = zlib.crc32(content, crcs.get(is_name, 0))
    return Fingerprint(crcs.get(True), crcs.get(False))


_NAMES: Any = int | str | bytes | os.PathLike


def _leaves(value: Any, aside: list[torch.Tensor] | None) -> Iterator[tuple[bool, bytes]]:
    """The leaves of a nested value: whether each names the item, and its content."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(key if isinstance(key, str) else None, aside)
            yield from _leaves(item, aside)
    elif isinstance(value, list | tuple) and not (
        value and all(isinstance(item, _NAMES) for item in value)
    ):
        for item in value:
            yield from _leaves(item, aside)
    elif isinstance(value, _NAMES | list | tuple | range):
        yield True, repr(value).encode()
    elif isinstance(value, torch.Tensor):
        # Numbers of these types are labels or tokens; bytes are most often pixels.
        names = (
            not value.dtype.is_floating_point
            and not value.dtype.is_complex
            and value.dtype.itemsize > 1
        )
        if aside is not None:
            aside += [value] if is_dense(value) else []
            yield True, f"{value.dtype} {value.layout} {tuple(value.shape)}".encode()
        else:
            yield (
                names,
                repr((tuple(value.shape), value.tolist() if is_dense(value) else None)).encode(),
            )
    elif hasattr(value, "dtype") and hasattr(value, "tolist"):
        if value.dtype.kind == "O":
            yield from _leaves(value.tolist(), aside)
            return
        content = value.tobytes() if hasattr(value, "tobytes") else repr(value.tolist()).encode()
        names = value.dtype.kind in "iuSU" and value.dtype.itemsize > 1
        yield names, f"{value.dtype} {value.shape}".encode() + content
    else:
        yield (
            False,
            (
                repr(value) if isinstance(value, float | complex) else type(value).__qualname__
            ).encode(),
        )


def first_sample(dataset: Any) -> str:
    """What tells a dataset's first sample, where reading it does nothing else: where the samples lie in memory."""
    index, tensors = 0, list[torch.Tensor]()
    try:
        while type(dataset) is Subset and len(dataset):
            dataset, index = dataset.dataset, dataset.indices[index]
        if type(dataset) not in (TensorDataset, list, tuple, torch.Tensor) or not len(dataset):
            return ""
        return f"{fingerprint(dataset[index], tensors)} {zlib.crc32(to_bytes(packed(tensors)))}"
    except Exception:  # the loop is told of a sample that cannot be read, once it asks
        return ""
