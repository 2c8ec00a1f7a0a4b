"""One number read from what is divided: DTensor would give this rank's part of it, and say nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import BackendError
from ..patches import Patch

_NUMBER: Final = torch.ops.aten._local_scalar_dense.default
_meshes: Final[weakref.WeakValueDictionary[int, DeviceMesh]] = weakref.WeakValueDictionary()


def guard(mesh: DeviceMesh) -> None:
    """From now on ``item()``, ``float()``, ``bool()`` and the like of a part on ``mesh`` raise."""
    _meshes[id(mesh)] = mesh
    _patch.install()


def release(mesh: DeviceMesh) -> None:
    """Undo ``guard``."""
    _meshes.pop(id(mesh), None)
    if not _meshes:
        _patch.remove()


def _of_this_rank(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What DTensor does by itself."""
    return op(args[0].to_local(), *args[1:], **kwargs)


def _number(original: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor = args[0]
    whole = all(placement.is_replicate() for placement in tensor.placements)
    # By equality: DTensor remembers what it has computed, and with it the mesh of an engine that was like this one.
    if whole or tensor.device_mesh not in _meshes.values():
        return original(op, args, kwargs)
    raise BackendError(
        "one number (item(), float(), bool(), ...) of a tensor that backend 'fsdp' divides over the ranks "
        f"({', '.join(map(str, tensor.placements))}): on this rank it would be that of a part. Call tensor.full_tensor() on "
        "every rank first"
    )


_handlers: Any = DTensor._op_dispatcher._custom_op_handlers
_patch: Final = Patch(_handlers, _NUMBER, _number, _of_this_rank)
