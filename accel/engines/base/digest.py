"""Digests of tensors: 64 bits, different if the tensors' bits differ."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from ...trees import inner_tensors
from .absent import as_plain

#: The number of columns of the table in ``sums``.
_WIDTH: Final = 1024
#: 8 bytes are read as two halves, because a difference in the highest bit alone would be lost.
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def digest(tensor: Tensor) -> int | Tensor:
    """Return 64 bits, in a tensor on an accelerator to avoid a wait."""
    # A DTensor has no digest to compare, because each rank has a different shard.
    if hasattr(tensor, "full_tensor"):
        return 0
    # torchao's quantized tensors consist of codes and scales.
    if hasattr(tensor, "__tensor_flatten__"):
        return digest_values(digests(inner_tensors([tensor])))
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    if dense.device.type != "cpu":
        return sums(dense)
    if not dense.nbytes:
        return 0
    data = ctypes.c_char * dense.nbytes
    return _hash(data.from_address(dense.data_ptr()))


@torch.no_grad()
def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return the digests of tensors as numbers."""
    with as_plain():
        values = list(map(digest, tensors))
    # Reading a value waits for the device, so queue all digests first.
    return list(map(int, values))


def digest_values(value: Any) -> int:
    """Return 64 bits, different if the ``repr`` of two objects differs."""
    return _hash(repr(value).encode())


def _hash(data: Any) -> int:
    # Imported late, so that `import accel` imports nothing but torch.
    import xxhash

    return xxhash.xxh3_64_intdigest(data)


def sums(dense: Tensor) -> Tensor:
    """Return weighted sums of integers, exact in any order."""
    device = dense.device
    flat = dense.reshape(-1).view(_INTEGERS[dense.element_size()])
    size = flat.numel() // _WIDTH * _WIDTH
    table, rest = flat[:size].view(-1, _WIDTH), flat[size:]
    rows = table.sum(1, dtype=torch.int64)
    columns = table.sum(0, dtype=torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for salt, part in enumerate((rows, columns, rest.long())):
        numbers = torch.arange(1, len(part) + 1, device=device)
        mixed = numbers * (0x1E3779B97F4A7C15 + 2 * salt)
        # Odd weights, mixed like splitmix64's multipliers.
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        total += (part * (mixed | 1)).sum()
    return total
