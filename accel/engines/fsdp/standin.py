"""What a parameter object is while its shard has its place: a name for it that never computes with wrong values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...deferred import swap
from ...errors import BackendError
from ..base.absent import Absent, name_of

_REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _of_shard(name: str) -> Any:
    return property(lambda held: getattr(held.shard, name), lambda held, value: setattr(held.shard, name, value))


class StandIn(Absent, nn.Parameter):
    """A replaced parameter: ``grad`` and ``requires_grad`` are its shard's; any use of its values raises."""

    shard: nn.Parameter
    kind: type[nn.Parameter]
    grad = _of_shard("grad")
    requires_grad = _of_shard("requires_grad")

    def requires_grad_(self, requires_grad: bool = True) -> StandIn:
        """Freeze or unfreeze the shard."""
        self.shard.requires_grad_(requires_grad)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"a parameter of shape {tuple(self.shape)} whose shard is in use"

    def fetch(self, function: Any) -> None:
        """Raise: they are in the shards alone."""
        raise BackendError(
            f"{name_of(function)} uses a parameter that was taken from the module before accel.setup sharded "
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


class _Freezing:
    """Of a parameter that FSDP2 gathered: freezing it, which the next gathering would undo, freezes the shard too."""

    shard: nn.Parameter

    @property
    def requires_grad(self) -> bool:
        """As any tensor's."""
        return bool(_REQUIRES_GRAD(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Freeze or unfreeze it and its shard."""
        self.shard.requires_grad_(requires_grad)
        torch.Tensor.requires_grad_(self, requires_grad)  # type: ignore[arg-type]
        return self


class Gathered(_Freezing, nn.Parameter):
    """One that every rank has whole then."""


class GatheredPart(_Freezing, DTensor):
    """One that tensor parallelism has cut before."""
