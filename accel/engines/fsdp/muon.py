"""Muon on shards: what it orthogonalises is the whole matrix of a momentum, of which each rank has rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ...errors import OptimizerError
from ...gradients.patches import Patch

_NAME: Final = "_zeropower_via_newtonschulz"
_attached: Final[weakref.WeakSet[Optimizer]] = weakref.WeakSet()


def attach(optimizer: Optimizer) -> None:
    """From now on every rank computes with the whole matrix, one at a time, and keeps its rows; for ``torch.optim.Muon``.

    DTensor would cut the products up, whose sums round otherwise in bfloat16, and cannot where a rank has no row.

    Raises:
        OptimizerError: this version of torch computes it in another way.
    """
    if _patch is None:
        raise OptimizerError(
            f"{type(optimizer).__name__} on sharded parameters needs torch.optim._muon.{_NAME}, which torch "
            f"{torch.__version__} does not have (2.13 has it): use backend='ddp'"
        )
    _attached.add(optimizer)
    weakref.finalize(optimizer, _prune).atexit = False
    _patch.install()


def detach(optimizer: Optimizer) -> None:
    """Undo ``attach``."""
    _attached.discard(optimizer)
    _prune()


def _prune() -> None:
    if not list(_attached) and _patch is not None:
        _patch.remove()


def _orthogonalise(original: Callable[..., torch.Tensor], update: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(update, DTensor):
        return original(update, *args, **kwargs)
    whole = original(update.full_tensor(), *args, **kwargs)
    return distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)


def _found() -> Patch | None:
    module: Any = getattr(torch.optim, "_muon", None)
    return Patch(vars(module), _NAME, _orthogonalise) if hasattr(module, _NAME) else None


_patch: Final = _found()
