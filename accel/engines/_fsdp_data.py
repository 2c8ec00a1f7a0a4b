"""``p.data = values`` of a shard: DTensor keeps the values in its outer shell, where nothing computes with them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor

from ..errors import BackendError

_T: Any = torch.Tensor
_DATA: Final[Any] = _T.data
_params: Final[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()


def watch(owner: object, params: Iterable[Any]) -> None:
    """From now on these parameters of FSDP2's take such values, while ``owner`` lives or until ``release``."""
    _params.update((id(param.sharded_param), param) for param in params)
    shards: Any = DTensor
    shards.data = _PROPERTY
    weakref.finalize(owner, release, ()).atexit = False


def release(params: Iterable[Any]) -> None:
    """Undo ``watch``."""
    for param in params:
        _params.pop(id(param.sharded_param), None)
    if not list(_params.values()) and vars(DTensor).get("data") is _PROPERTY:
        del DTensor.data  # torch.Tensor's own again


def _set(tensor: Any, value: Any) -> None:
    param = _params.get(id(tensor))
    if param is None or param.sharded_param is not tensor:
        _DATA.__set__(tensor, value)
        return
    if not isinstance(value, DTensor) or value._spec != tensor._spec or value.dtype is not tensor.dtype:
        raise BackendError(
            f"p.data = ... of a parameter of shape {tuple(tensor.shape)} that is divided over the ranks: expected a DTensor of "
            "the same shape, dtype and placements, as p.data.clone() is, found a "
            f"{type(value).__name__} of {tuple(value.shape)} and {value.dtype}; set whole weights by load_state_dict(full) of "
            "the model's handle"
        )
    if param.sharded_state is not ShardedState.SHARDED:
        raise BackendError("p.data = ... between a forward and its backward: set weights after the backward")
    tensor._local_tensor = value._local_tensor.detach()
    param.reset_sharded_param()


_PROPERTY: Final = property(lambda tensor: _DATA.__get__(tensor), _set)
