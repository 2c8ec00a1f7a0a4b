"""Shards along the first dimension: what FSDP2's DTensors are made of, to and from whole tensors."""

from __future__ import annotations

from typing import final

import torch
from torch.distributed.tensor import DTensor

from ...shard import Shard


def rows(length: int, world: int, rank: int) -> tuple[int, int]:
    """The first row of a rank's shard and the row behind its last one; every shard but the last ones is of equal length."""
    each = -(-length // world)
    return min(rank * each, length), min((rank + 1) * each, length)


def here(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a whole tensor, placed as ``like``."""
    assert isinstance(like, DTensor)
    first, end = rows(full.shape[0], like.device_mesh.size(), like.device_mesh.get_local_rank())
    local = full.detach()[first:end].to(like.to_local().device, copy=True, memory_format=torch.contiguous_format)
    return wrap(local, full.shape, like)


def cut_if_fits(value: torch.Tensor, like: object) -> torch.Tensor:
    """As ``cut``; what is cut already, or has another shape than the shards' whole, is left as it is."""
    fits = isinstance(like, DTensor) and not isinstance(value, DTensor) and value.shape == like.shape
    return cut(value, like) if fits and isinstance(like, DTensor) else value


def wrap(local: torch.Tensor, shape: torch.Size | tuple[int, ...], like: DTensor) -> DTensor:
    """A local tensor as this rank's shard of a tensor of ``shape``."""
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def new(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a tensor in the state of a parameter, cut as that is where it has its shape."""
    if isinstance(parameter, DTensor) and shape == tuple(parameter.shape):
        return wrap(torch.empty_like(parameter.to_local(), dtype=dtype), shape, parameter)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


@final
class LocalShards:
    """Makes the shards of tensors of one model, each mesh being asked once for this rank's place in it."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}

    @torch.no_grad()  # then a DTensor gives its local tensor as it is, without a node of autograd
    def __call__(self, name: str, value: torch.Tensor) -> Shard | None:
        """The range of a tensor's elements that lies here; None where nothing does."""
        shape = tuple(value.shape)
        if not isinstance(value, DTensor):
            return Shard(name, shape, 0, value.detach())
        mesh = value.device_mesh
        if id(mesh) not in self._places:
            self._places[id(mesh)] = mesh.size(), mesh.get_local_rank()
        first, end = rows(shape[0], *self._places[id(mesh)])
        if first == end:
            return None
        local = value.to_local().detach()
        return Shard(name, shape, first * (local.numel() // (end - first)), local)
