"""One number read, or a row cut, from what is divided: DTensor would give this rank's part, or a copy, and say nothing."""

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
#: Views that cut, and where their arguments say along which dimensions, with the defaults.
_CUTS: Final[Mapping[Any, Mapping[int, int]]] = {
    torch.ops.aten.select.int: {1: 0},
    torch.ops.aten.slice.Tensor: {1: 0},
    torch.ops.aten.split.Tensor: {2: 0},
    torch.ops.aten.split_with_sizes.default: {2: 0},
    torch.ops.aten.diagonal.default: {2: 0, 3: 1},
}
_meshes: Final[weakref.WeakValueDictionary[int, DeviceMesh]] = weakref.WeakValueDictionary()


def guard(mesh: DeviceMesh) -> None:
    """From now on these raise for a part on ``mesh``: ``item()``, ``float()`` and the like, and cuts that could be written to."""
    _meshes[id(mesh)] = mesh
    for patch in _patches:
        patch.install()


def release(mesh: DeviceMesh) -> None:
    """Undo ``guard``."""
    _meshes.pop(id(mesh), None)
    if not _meshes:
        for patch in _patches:
            patch.remove()


def _of_this_rank(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What DTensor does by itself."""
    return op(args[0].to_local(), *args[1:], **kwargs)


def _number(original: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor = args[0]
    if all(placement.is_replicate() for placement in tensor.placements) or not _ours(tensor):
        return original(op, args, kwargs)
    raise BackendError(
        "one number (item(), float(), bool(), ...) of a tensor that backend 'fsdp' divides over the ranks "
        f"({', '.join(map(str, tensor.placements))}): on this rank it would be that of a part. Call tensor.full_tensor() on "
        "every rank first"
    )


def _ours(tensor: DTensor) -> bool:
    # By equality: DTensor remembers what it has computed, and with it the mesh of an engine that was like this one.
    return tensor.device_mesh in _meshes.values()


def _as_without(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What DTensor does where no function is registered: nothing else calls it."""
    own = _handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        _handlers[op] = own


def _cut(original: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Along a divided dimension a view is a copy, gathered from all ranks: what is written to it would be lost."""
    tensor = args[0]
    # Autograd refuses writes to a view of what requires gradients, and makes views of its own in backward.
    safe = (torch.is_grad_enabled() and tensor.requires_grad) or torch._C._current_graph_task_id() != -1
    if safe or not _along_divided(op, args) or not _ours(tensor):
        return original(op, args, kwargs)
    raise BackendError(
        f"an index, a slice or a split of a tensor of shape {tuple(tensor.shape)} that backend 'fsdp' divides over the ranks "
        f"({', '.join(map(str, tensor.placements))}): it would be a copy, so that writes to it are lost, which all ranks must "
        "make together. To read, index tensor.full_tensor(), called on every rank; to write, change "
        "full = accel.full_state_dict(model), then model.load_state_dict(full), on every rank"
    )


def _along_divided(op: Any, args: tuple[Any, ...]) -> bool:
    tensor = args[0]
    dims = [(args[at] if at < len(args) else default) % tensor.ndim for at, default in _CUTS[op].items()]
    if op is torch.ops.aten.slice.Tensor:
        defaults: tuple[Any, ...] = (None, None, 1)
        start, end, step = args[2:] + defaults[len(args) - 2 :]
        if not start and (end is None or end >= tensor.shape[dims[0]]) and step == 1:
            return False  # all of it
    return any(placement.is_shard(dim) for placement in tensor.placements for dim in dims)


_handlers: Any = DTensor._op_dispatcher._custom_op_handlers
_patches: Final = (
    Patch(_handlers, _NUMBER, _number, _of_this_rank),
    *(Patch(_handlers, op, _cut, _as_without) for op in _CUTS),
)
