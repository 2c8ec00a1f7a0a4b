"""What a parameter object is while its shard has its place: a name for it that never computes with wrong values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...deferred import swap
from ...errors import BackendError

_T: Any = torch.Tensor
_REQUIRES_GRAD: Any = _T.requires_grad.__get__
_PLAIN = frozenset(
    f
    for f in [
        *(getattr(_T, n).__get__ for n in ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "is_meta")),
        *(getattr(_T, n).__get__ for n in ("is_sparse", "is_cuda", "itemsize", "nbytes")),
        *(getattr(_T, n) for n in ("size", "dim", "numel", "is_floating_point", "is_complex", "element_size")),
        *(getattr(_T, n) for n in ("__hash__", "ndimension", "nelement", "__len__", "is_contiguous", "stride")),
    ]
)


class StandIn(nn.Parameter):
    """A replaced parameter: ``grad`` and ``requires_grad`` are its shard's; any use of its values raises."""

    shard: nn.Parameter
    kind: type[nn.Parameter]

    @property
    def grad(self) -> torch.Tensor | None:
        """The shard's gradient."""
        return self.shard.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.shard.grad = value

    @property
    def requires_grad(self) -> bool:
        """Whether the shard is trainable."""
        return self.shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.shard.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> StandIn:
        """Freeze or unfreeze the shard."""
        self.shard.requires_grad_(requires_grad)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"a parameter of shape {tuple(self.shape)} whose shard is in use"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Shape, dtype and the like; nothing else."""
        if func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise BackendError(
            f"{getattr(func, '__name__', func)} uses a parameter that was taken from the module before accel.setup sharded "
            "it, and whose values are not here: take it from model.parameters(), give its optimizer to accel.setup, "
            "or call accel.teardown(model) first"
        )


def put(old: nn.Parameter, shard: nn.Parameter) -> None:
    """Make ``old`` a stand-in of its shard, and free its values."""
    kind = type(old)
    old.grad = None
    old.requires_grad_(False)
    blank = float("nan") if old.is_floating_point() or old.is_complex() else 0
    old.data = torch.full((), blank, dtype=old.dtype, device=old.device).expand(old.shape)
    stand_in: Any = old
    stand_in.__class__ = StandIn
    stand_in.shard, stand_in.kind = shard, kind


def take(old: nn.Parameter, full: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Make a stand-in the parameter again that it was, with these values."""
    stand_in: Any = old
    trainable = stand_in.shard.requires_grad
    stand_in.__class__ = stand_in.kind
    del stand_in.shard, stand_in.kind
    if old.is_meta:
        swap(old, nn.Parameter(full, requires_grad=False))
    else:
        old.data = full
    old.grad = grad
    old.requires_grad_(trainable)


class Gathered(nn.Parameter):
    """A parameter that FSDP2 gathered: freezing it, which the next gathering would undo, freezes the shard too."""

    shard: nn.Parameter

    @property
    def requires_grad(self) -> bool:
        """As any tensor's."""
        return bool(_REQUIRES_GRAD(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Gathered:
        """Freeze or unfreeze it and its shard."""
        self.shard.requires_grad_(requires_grad)
        super().requires_grad_(requires_grad)
        return self
