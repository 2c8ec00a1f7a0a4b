"""What the first items of a stream are, in a few bytes that are the same in every process."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch


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


def fingerprint(items: list[Any]) -> Fingerprint:
    """The fingerprint of items of any kind; what is neither a tensor, an array nor plain counts by its type."""
    crcs: dict[bool, int] = {}
    for is_name, content in _leaves(items):
        crcs[is_name] = zlib.crc32(content, crcs.get(is_name, 0))
    return Fingerprint(crcs.get(True), crcs.get(False))


def _leaves(value: Any) -> Iterator[tuple[bool, bytes]]:
    """The leaves of a nested value: whether each names the item, and its content."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(key if isinstance(key, str) else None)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, int | str | bytes):
        yield True, repr(value).encode()
    elif isinstance(value, torch.Tensor):
        yield _counts(value.dtype), repr((tuple(value.shape), _plain(value))).encode()
    elif hasattr(value, "dtype") and hasattr(value, "tolist"):
        yield value.dtype.kind in "iuSU" and value.dtype.itemsize > 1, repr(value.tolist()).encode()
    else:
        yield False, (repr(value) if isinstance(value, float | complex) else type(value).__qualname__).encode()


def _counts(dtype: torch.dtype) -> bool:
    """Whether numbers of this type are labels or tokens; bytes are most often pixels."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype.itemsize > 1


def _plain(tensor: torch.Tensor) -> Any:
    """The values of a tensor, where it has them."""
    return None if tensor.device.type == "meta" or tensor.layout is not torch.strided else tensor.tolist()
