"""Dtypes by their names in a checkpoint, tensors as bytes, and which tensors have no others."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

from ..errors import CheckpointError

#: As safetensors names them. Where it has no name for a dtype, the file's entry has another one: see ``STORED``.
BY_NAME: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in BY_NAME.items()}
#: A record that claims more is refused.
MAX_DIMS: Final = 64
#: The dtype of a file's entry, and how many of it make one element.
STORED: Final[dict[str, tuple[str, int]]] = {**{n: (n, 1) for n in BY_NAME}, "C64": ("F32", 2), "C128": ("F64", 2)}


def element_bytes(name: str) -> int:
    """The size of one element."""
    return BY_NAME[name].itemsize


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; the tensor lives as long as they are in use."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor
    return memoryview(array).cast("B")


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory does not hold its values as they are: they are conjugated, negated, or all zero."""
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


def resolve(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory as they are; ``tensor`` itself where they lie so."""
    return (tensor.clone() if tensor._is_zerotensor() else tensor).resolve_conj().resolve_neg()


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the bytes of a contiguous CPU tensor."""
    return bytes(memory(resolve(tensor)))


def from_bytes(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of these bytes."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    memory(tensor)[:] = content
    return tensor


def check_tensor(value: torch.Tensor, path: str) -> None:
    """Refuse a tensor whose bytes are not all there is to it.

    Raises:
        CheckpointError: names its path.
    """
    problem = ""
    if value.layout is not torch.strided or value.is_nested:
        problem = f"of layout {'nested' if value.is_nested else value.layout}"
    elif value.dtype not in NAMES:
        problem = f"of dtype {value.dtype}"
    elif value.device.type == "meta":
        problem = "on the meta device"
    elif value.dim() > MAX_DIMS:
        problem = f"of {value.dim()} dimensions"
    elif type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        problem = f"of class {type(value).__name__}"
    if problem:
        raise CheckpointError(f"{path}: a tensor {problem} cannot be stored; store a plain dense tensor")
