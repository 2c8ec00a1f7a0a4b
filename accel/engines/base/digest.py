"""Digests of tensors: 64 bits that differ if the values differ, so that ranks can compare tensors without sending them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Final

import torch

#: The table of ``sums`` has so many columns.
_WIDTH: Final = 1024
#: Eight bytes are read as two halves: multiplied by a sum of two odd weights, a difference in the highest bit would be lost.
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def digest(tensor: torch.Tensor) -> int | torch.Tensor:
    """Return 64 bits that differ if the bits of two tensors differ. On an accelerator they are a tensor, so nothing waits."""
    if hasattr(tensor, "full_tensor"):  # each rank has a different shard of a DTensor
        return digest_bytes(b"")
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return digest_bytes(repr([int(digest(getattr(tensor, name))) for name in names]).encode())
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    if dense.device.type != "cpu":
        return sums(dense)
    return digest_bytes((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr())) if dense.nbytes else 0


@torch.no_grad()
def digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the digests of tensors as numbers. It waits for a device once."""
    with torch._C.DisableTorchFunctionSubclass():
        values = list(map(digest, tensors))
    remote = [value for value in values if isinstance(value, torch.Tensor)]
    if not remote:
        return [int(value) for value in values]
    numbers = iter(torch.stack([value.to(remote[0].device) for value in remote]).tolist())
    return [next(numbers) if isinstance(value, torch.Tensor) else value for value in values]


def digest_bytes(data: Any) -> int:
    """Return 64 bits that differ if the bytes of two objects differ."""
    import xxhash  # when the first guard needs it

    return xxhash.xxh3_64_intdigest(data)


def sums(dense: torch.Tensor) -> torch.Tensor:
    """Return a digest from weighted integer sums of rows and columns, which don't depend on the order of additions.

    It differs if one element changes, or if two elements are swapped.
    """
    flat = dense.reshape(-1).view(_INTEGERS[dense.element_size()])
    whole = flat.numel() // _WIDTH * _WIDTH
    table, rest = flat[:whole].view(-1, _WIDTH), flat[whole:].to(torch.int64)
    rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for salt, values in enumerate((rows, columns, rest)):
        total = total + (values * _weights(len(values), values.device, salt)).sum()
    return total


def _weights(length: int, device: torch.device, salt: int) -> torch.Tensor:
    """Return odd numbers, mixed like splitmix64's multipliers."""
    mixed = torch.arange(1, length + 1, dtype=torch.int64, device=device) * (0x1E3779B97F4A7C15 + 2 * salt)
    return ((mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9) | 1
