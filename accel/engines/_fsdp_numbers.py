"""One number read from what is divided: DTensor would give this rank's part of it, and say nothing."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import BackendError

_NUMBER: Final = torch.ops.aten._local_scalar_dense.default
_meshes: Final[weakref.WeakValueDictionary[int, DeviceMesh]] = weakref.WeakValueDictionary()


def guard(mesh: DeviceMesh) -> None:
    """From now on ``item()``, ``float()``, ``bool()`` and the like of a part on ``mesh`` raise."""
    _meshes[id(mesh)] = mesh
    _handlers().setdefault(_NUMBER, _number)


def release(mesh: DeviceMesh) -> None:
    """Undo ``guard``."""
    _meshes.pop(id(mesh), None)
    if not _meshes and _handlers().get(_NUMBER) is _number:
        del _handlers()[_NUMBER]


def _handlers() -> dict[Any, Any]:
    found: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return found


def _number(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor = args[0]
    whole = all(placement.is_replicate() for placement in tensor.placements)
    if whole or _meshes.get(id(tensor.device_mesh)) is not tensor.device_mesh:
        return op(tensor.to_local(), *args[1:], **kwargs)
    raise BackendError(
        "one number (item(), float(), bool(), ...) of a tensor that backend 'fsdp' divides over the ranks "
        f"({', '.join(map(str, tensor.placements))}): on this rank it would be that of a part. Call tensor.full_tensor() on "
        "every rank first"
    )
