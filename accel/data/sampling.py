"""Which samples each rank gets: the division of an epoch, its order, and checksums of samples."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
import torch.utils.data as torch_data
from torch.utils.data import DataLoader, Sampler

from ..process.packing import bytes_of, is_dense, to_bytes
from ..process.rng import global_generators, is_generator, seed_of
from ..trees import walk

# -- Division --------------------------------------------------------------------------------------


class Share(NamedTuple):
    """A rank's ``size`` samples of a global step from ``offset``, ``real`` before padding."""

    offset: int
    size: int
    real: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The division of global steps of ``world * batch`` consecutive samples over the ranks."""

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
        """True if the ranks may get different numbers of samples."""
        return not self.even and not self.drop_last and self.world > 1

    def share(self, count: int) -> Share:
        """Return this rank's share of a global step of ``count`` samples."""
        if self.even:
            size = -(-count // self.world)
            offset = self.rank * size
            return Share(offset, size, min(max(count - offset, 0), size))
        size, extra = divmod(count, self.world)
        offset = self.rank * size + min(self.rank, extra)
        size += self.rank < extra
        return Share(offset, size, size)

    def local_steps(self, remaining: int) -> int:
        """Return the number of batches that this rank gets from ``remaining`` samples."""
        full, tail = divmod(remaining, self.width)
        return full + (not self.drop_last and self.share(tail).size > 0)


def portion(chunk: list[Any], division: Division, head: list[Any]) -> list[Any]:
    """Return one rank's share of a global step, padded from ``head``."""
    if len(chunk) < division.width and division.drop_last:
        return []
    share = division.share(len(chunk))
    padding = [
        head[(share.offset + i - len(chunk)) % len(head)] for i in range(share.real, share.size)
    ]
    return chunk[share.offset : share.offset + share.real] + padding


def divide(
    read: Callable[[int], list[Any]], division: Division, head: list[Any]
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield this rank's share and all items of each global step.

    ``read(count)`` returns fewer items only at the end. ``head`` holds the first items of the
    epoch, at most ``division.world - 1``, which are the padding.
    """
    while chunk := read(division.width):
        head += chunk[: division.world - 1 - len(head)]
        yield portion(chunk, division, head), chunk


def has_parts(items: Any) -> bool:
    """True if items can be cut, tensors and arrays along their first dimension."""
    if isinstance(items, torch.Tensor) or type(items).__module__ == "numpy":
        return bool(getattr(items, "shape", ()))
    return isinstance(items, list | tuple | range) and not hasattr(items, "_fields")


# -- Order -----------------------------------------------------------------------------------------

_BLOCK: Final = 1 << 16
#: Torch's samplers that draw from torch's global generator or their own, and from no others.
_TORCHS: Final = (
    torch_data.RandomSampler,
    torch_data.SubsetRandomSampler,
    torch_data.WeightedRandomSampler,
)
_FIXED: Final = (torch_data.SequentialSampler, range, list, tuple)


def mix(*values: Any) -> int:
    """Return a seed of 63 bits that depends on all of the plain values."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1


def parts_of(sampler: Any) -> list[Any]:
    """Return a sampler, its attributes, and those of the samplers among them."""
    parts: dict[int, Any] = {}
    todo = [sampler]
    while todo:
        part = todo.pop()
        if id(part) not in parts:
            parts[id(part)] = part
            if part is sampler or isinstance(part, Sampler):
                todo += getattr(part, "__dict__", {}).values()
    return list(parts.values())


def set_epoch(thing: Any, epoch: int) -> None:
    """Pass the epoch to a sampler or dataset that has ``set_epoch``."""
    if callable(getattr(thing, "set_epoch", None)):
        thing.set_epoch(epoch)


def own_generators(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the generators of a loader and of its samplers, by name."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    candidates = (loader.generator, *parts_of(sampler))
    generators = {id(part): part for part in candidates if is_generator(part)}
    return {f"own {number}": part for number, part in enumerate(generators.values())}


def drawn_from(sampler: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generators that a sampler may draw from: the global ones and ``own``."""
    # Saving and restoring all global generators takes 0.2 ms for each batch, torch's alone 10 us.
    if type(sampler) in _FIXED:
        return dict(own)
    if type(sampler) in _TORCHS:
        uses_global = sampler.generator is None
        return {"torch": torch.default_generator, **own} if uses_global else dict(own)
    return {**global_generators(), **own}


def loader_seed(loader: DataLoader[Any], seed: int | None, place: int) -> int:
    """Return the seed of a loader's orders. ``place`` is the loader's number in its ``setup``."""
    if seed is not None:
        return mix(seed, place)
    own = [seed_of(generator) for generator in own_generators(loader).values()]
    # A loader with a generator draws from that alone.
    return mix(None, *own) if own else mix(torch.initial_seed(), place)


def on_cpu() -> AbstractContextManager[Any]:
    """Return a context in which torch draws on the CPU, also after ``set_default_device``."""
    # Workers that start inside a device context stay in it, and each call of torch gets slower.
    is_cpu = torch.get_default_device().type == "cpu"
    return nullcontext() if is_cpu else torch.device("cpu")


class SampleOrder:
    """The items of one epoch of a sampler, drawn inside ``context`` as they are needed."""

    def __init__(self, sampler: Any, context: Any) -> None:
        self.context = context
        #: The first items that ``skip`` dropped, for padding.
        self.head: list[Any] = []
        self.ended = False
        with context, on_cpu():
            self._items = iter(sampler)

    def read(self, count: int) -> list[Any]:
        """Return the next ``count`` items, or fewer at the end."""
        with self.context, on_cpu():
            items = list(islice(self._items, count))
        self.ended = len(items) < count
        return items

    def skip(self, count: int, head: int) -> tuple[int, int]:
        """Drop ``count`` items, and return how many there were and their checksum.

        ``self.head`` keeps the first ``head`` items.
        """
        skipped = crc = 0
        while block := self.read(min(_BLOCK, count - skipped)):
            self.head += block[: head - len(self.head)]
            skipped += len(block)
            crc = digest(block, crc)
        return skipped, crc


# -- Checksums -------------------------------------------------------------------------------------


def digest(items: Sequence[Any], crc: int = 0) -> int:
    """Return the checksum of a sampler's items, after items with the checksum ``crc``."""
    with suppress(TypeError, OverflowError):
        return zlib.crc32(array("q", items), crc)
    for item in items:
        # A batch sampler gives lists of indices.
        numbers = item if isinstance(item, list | tuple) else [item]
        try:
            content = array("q", numbers).tobytes()
        except (TypeError, OverflowError):
            content = repr(item).encode()
        crc = zlib.crc32(content, crc)
    return crc


def fingerprint(items: Any, aside: list[torch.Tensor] | None = None) -> tuple[int, int]:
    """Return checksums of the integers and texts in nested items, and of all other values.

    They are equal in every process for equal items, and 0 if there are no such values. If ``aside``
    is a list, tensors are appended to it, and only their dtypes and shapes count here.
    """
    checksums = [0, 0]

    def visit(path: str, leaf: Any) -> Any:
        is_number, content = _content(leaf, aside)
        checksums[is_number] = zlib.crc32(content, checksums[is_number])
        return leaf

    walk(visit, items, "", _is_names)
    return checksums[0], checksums[1]


def identity(items: Any) -> int:
    """Return a checksum that tells items apart, if possible without the augmented numbers."""
    names, numbers = fingerprint(items)
    return names or numbers


def _is_names(value: Any) -> bool:
    names = isinstance(value, list | tuple) and len(value) > 0
    return names and all(isinstance(item, int | str | bytes) for item in value)


def _content(leaf: Any, aside: list[torch.Tensor] | None) -> tuple[bool, bytes]:
    """Return True if a leaf is a number that random augmentation changes, and its content."""
    if isinstance(leaf, torch.Tensor):
        header = f"{leaf.dtype} {leaf.layout} {tuple(leaf.shape)}".encode()
        is_float = leaf.dtype.is_floating_point or leaf.dtype.is_complex
        has_values = is_dense(leaf) and leaf.numel() > 0
        if aside is not None:
            aside += [leaf] if is_dense(leaf) else []
            return False, header
        content = to_bytes(bytes_of(leaf, torch.device("cpu"))) if has_values else b""
        # Integers are labels or tokens, but bytes are pixels.
        return is_float or leaf.dtype.itemsize == 1, header + content
    if hasattr(leaf, "dtype") and hasattr(leaf, "tobytes") and leaf.dtype.kind != "O":
        is_name = leaf.dtype.kind in "iuSU" and leaf.dtype.itemsize > 1
        return not is_name, f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes()
    if isinstance(leaf, int | str | bytes | range) or _is_names(leaf):
        return False, repr(leaf).encode()
    is_number = isinstance(leaf, float | complex)
    return True, (repr(leaf) if is_number else type(leaf).__qualname__).encode()


def first_sample(dataset: Any) -> str:
    """Return a checksum of the first sample of a dataset in memory, or "" for all others."""
    index = 0
    try:
        while type(dataset) is torch_data.Subset and len(dataset):
            dataset, index = dataset.dataset, dataset.indices[index]
        is_in_memory = type(dataset) in (torch_data.TensorDataset, list, tuple, torch.Tensor)
        return str(fingerprint(dataset[index])) if is_in_memory and len(dataset) else ""
    except Exception:
        # Iterating raises the error of a sample that can't be read.
        return ""
