"""Digests of tensors: 64 bits that differ if the bits of two tensors differ."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Final

import torch

#: The number of columns of the table in ``sums``.
_WIDTH: Final = 1024
#: 8 bytes are read as two halves, because a difference in the highest bit alone would be lost.
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def digest(tensor: torch.Tensor) -> int | torch.Tensor:
    """Return 64 bits, a tensor on an accelerator, so that nothing waits for the device."""
    if hasattr(tensor, "full_tensor"):  # each rank has a different shard of a DTensor
        return 0
    if hasattr(tensor, "__tensor_flatten__"):  # torchao's quantized tensors
        names, _ = tensor.__tensor_flatten__()
        return digest_values([int(digest(getattr(tensor, name))) for name in names])
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    if dense.device.type != "cpu":
        return sums(dense)
    size = dense.nbytes
    return _hash((ctypes.c_char * size).from_address(dense.data_ptr())) if size else 0


@torch.no_grad()
def digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the digests of tensors as numbers, with one read from the device."""
    with torch._C.DisableTorchFunctionSubclass():
        values = [digest(tensor) for tensor in tensors]
    on_device = [value for value in values if isinstance(value, torch.Tensor)]
    numbers = iter(torch.stack(on_device).tolist() if on_device else [])
    return [next(numbers) if isinstance(value, torch.Tensor) else value for value in values]


def digest_values(value: Any) -> int:
    """Return 64 bits that differ if the ``repr`` of two objects differs."""
    return _hash(repr(value).encode())


def _hash(data: Any) -> int:
    import xxhash  # imported late, so that `import accel` imports nothing but torch

    return xxhash.xxh3_64_intdigest(data)


def sums(dense: torch.Tensor) -> torch.Tensor:
    """Return weighted sums of rows and columns: integers, so the order of additions is free."""
    flat = dense.reshape(-1).view(_INTEGERS[dense.element_size()])
    size = flat.numel() // _WIDTH * _WIDTH
    table, rest = flat[:size].view(-1, _WIDTH), flat[size:].to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    parts = (table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64), rest)
    for salt, part in enumerate(parts):
        numbers = torch.arange(1, len(part) + 1, dtype=torch.int64, device=flat.device)
        mixed = numbers * (0x1E3779B97F4A7C15 + 2 * salt)
        # Odd weights, mixed like splitmix64's multipliers.
        total += (part * (((mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9) | 1)).sum()
    return total
