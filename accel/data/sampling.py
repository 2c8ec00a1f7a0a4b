"""The division of an epoch among ranks, generators, and checksums of samples."""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from itertools import cycle, islice
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

from ..process.packing import bytes_of, is_dense, to_bytes
from ..process.rng import is_generator, seed_of
from ..trees import walk


class Share(NamedTuple):
    """A rank's samples in a global step."""

    offset: int
    #: -1 if unknown. Then ``real`` is 1, or 0 for padding.
    size: int
    #: The number of samples before the padding.
    real: int


#: The share of a batch without padding.
WHOLE: Final = Share(0, -1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The division of ``world * batch`` consecutive samples among the ranks."""

    rank: int
    world: int
    batch: int
    even: bool
    drop_last: bool
    #: True if the samples are the batches of a custom sampler, or aren't batched.
    units: bool = False

    @property
    def width(self) -> int:
        return self.world * self.batch

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

    def rows(self, count: int) -> Share:
        """Return this rank's rows of its batch. A ``count`` of 0 is padding."""
        has_padding = self.even and not self.drop_last and self.world > 1
        if count and not has_padding:
            return WHOLE
        share = self.share(count)
        if self.units or not count:
            return Share(share.offset, -1, share.real)
        return share

    def local_steps(self, remaining: int) -> int:
        """Return the number of this rank's batches in ``remaining`` samples."""
        full, tail = divmod(remaining, self.width)
        return full + (not self.drop_last and self.share(tail).size > 0)


def portion(chunk: list[Any], division: Division, head: list[Any]) -> list[Any]:
    """Return a rank's share of a global step, padded with the epoch's first items."""
    if len(chunk) < division.width and division.drop_last:
        return []
    share = division.share(len(chunk))
    end = share.offset + share.size
    padding = islice(cycle(head), max(0, end - len(chunk)))
    return [*chunk, *padding][share.offset : end]


def has_parts(items: Any) -> bool:
    """True if items can be split, along the first dimension of tensors and arrays."""
    if isinstance(items, torch.Tensor) or type(items).__module__ == "numpy":
        return bool(getattr(items, "shape", ()))
    return isinstance(items, list | tuple | range) and not hasattr(items, "_fields")


def length_of(sized: Any) -> int | None:
    """Return the length of a dataset, sampler or loader, or None."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def mix(*values: Any) -> int:
    """Hash plain values to a seed of 63 bits."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1


def parts_of(sampler: Any) -> list[Any]:
    """Return a sampler, its attributes, and those of samplers among them."""
    parts = [sampler]
    for part in parts:
        if part is sampler or isinstance(part, Sampler):
            for value in getattr(part, "__dict__", {}).values():
                if not any(value is known for known in parts):
                    parts.append(value)
    return parts


def own_generators(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the generators of a loader and of its samplers, by name."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    found: dict[str, Any] = {}
    for part in (loader.generator, *parts_of(sampler)):
        if is_generator(part) and part not in found.values():
            found[f"own {len(found)}"] = part
    return found


def loader_seed(loader: DataLoader[Any], seed: int | None, place: int) -> int:
    """Return the seed of a loader's epochs. ``place`` is its index in ``setup``."""
    if seed is not None:
        return mix(seed, place)
    own = [seed_of(generator) for generator in own_generators(loader).values()]
    # A loader with its own generators draws from nothing else.
    return mix(None, *own) if own else mix(torch.initial_seed(), place)


def on_cpu() -> AbstractContextManager[Any]:
    """Make torch draw on the CPU, even after ``torch.set_default_device``."""
    # Skip the context if possible. Workers inherit it, and every call of torch gets slower.
    is_cpu = torch.get_default_device().type == "cpu"
    return nullcontext() if is_cpu else torch.device("cpu")


def identity(items: Any) -> int:
    """Return a checksum of nested items, the same in every process."""
    # Random augmentation changes floats, so only integers and strings count if there are any.
    checksums = [0, 0]

    def visit(path: str, leaf: Any) -> Any:
        is_text = isinstance(leaf, int | str | bytes)
        dtype, content = str(getattr(leaf, "dtype", "")), b""
        if isinstance(leaf, torch.Tensor) and is_dense(leaf) and leaf.numel():
            content = bytes(to_bytes(bytes_of(leaf, torch.device("cpu"))))
        elif is_text or isinstance(leaf, float):
            content = repr(leaf).encode()
        elif hasattr(leaf, "tobytes") and dtype != "object":  # objects are stored by address
            content = leaf.tobytes()
        # Wide integers are labels or tokens. Bytes are pixels, which augmentation changes.
        is_name = is_text or ("int" in dtype and not dtype.endswith("int8"))
        checksums[is_name] = zlib.crc32(content, checksums[is_name])
        return leaf

    walk(visit, items, "")
    return checksums[True] or checksums[False]


def first_sample(dataset: Any) -> str:
    """Return a checksum of a dataset's first sample, or "" if it isn't in memory."""
    index = 0
    while type(dataset) is Subset and len(dataset):
        dataset, index = dataset.dataset, dataset.indices[index]
    is_in_memory = type(dataset) in (TensorDataset, list, tuple, torch.Tensor)
    return str(identity(dataset[index])) if is_in_memory and length_of(dataset) else ""
