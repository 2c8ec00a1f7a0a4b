"""Tensors in files, for offload to NVMe: ordinary memory of the host, which the kernel writes out and reads again.

DeepSpeed's op ``async_io`` reads what its own optimizers are about to step into buffers, and there are no tensors between steps.
A raw loop's optimizer and its state may be looked at, saved and changed at any time, so that they are tensors at any time here.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from ...errors import BackendError
from ...gradients.patches import around

#: Bytes below which a tensor stays in memory, as in DeepSpeed.
_LEAST: Final = 2**20
_PREFIX: Final = "accel-offload-"


def room(tensor: torch.Tensor, folder: str | None) -> torch.Tensor:
    """As much memory as a tensor has, in a file without a name; the tensor itself where it is small, is there, or need not be."""
    size = tensor.numel() * tensor.element_size()
    if folder is None or size < _LEAST or _PREFIX in (tensor.untyped_storage().filename or ""):
        return tensor
    try:
        with tempfile.NamedTemporaryFile(prefix=_PREFIX, dir=folder) as file:
            # A write to memory for which the disk has no room later would end the process without a word.
            os.posix_fallocate(file.fileno(), 0, size)
            found = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    except (OSError, RuntimeError) as error:
        raise BackendError(f"offload of {size} bytes to 'nvme_path' {folder!r}: {error}") from error
    return found.view(tensor.shape)


def stored(tensor: torch.Tensor, folder: str | None) -> torch.Tensor:
    """The same values, in a file where they are many."""
    found = room(tensor, folder)
    return tensor if found is tensor else found.copy_(tensor)


def check(folder: str) -> None:
    """Refuse (BackendError) a folder in which nothing can be written."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BackendError(
            f"DeepSpeed configuration: 'nvme_path' is {folder!r}, but nothing can be written: {error}"
        ) from error


def new_state(weights: Iterable[torch.Tensor], folder: str) -> contextlib.AbstractContextManager[None]:
    """Inside, what an optimizer makes like one of its weights is in a file: all of its state at once may be more than memory."""
    stepped = {id(tensor) for tensor in weights}

    def zeros_like(plain: Callable[..., Any], like: Any, *args: Any, **options: Any) -> Any:
        made = plain(like, *args, **options)
        return room(made, folder) if id(like) in stepped else made

    return around(vars(torch), "zeros_like", zeros_like)


def store_state(states: Iterable[dict[str, Any]], folder: str) -> None:
    """What an optimizer has made or replaced otherwise."""
    for state in states:
        state.update({k: stored(v, folder) for k, v in state.items() if isinstance(v, torch.Tensor)})
