"""Gradients that wait unreduced inside FSDP2, where no ``zero_grad`` would see them."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist

from ..errors import BackendError
from ._fsdp_shards import wrap

_KEPT, _DROPPED, _ZEROED, _EDITED = range(4)


@final
class Markers:
    """Stand for unreduced gradients in the shards' ``grad``, full of nan, so that dropping or zeroing them is seen.

    FSDP2 keeps what it did not reduce on the gathered parameter. A loop, an optimizer or a module that drops gradients
    knows only the shard's. So each shard gets a marker there; what was reduced before is kept aside until it goes.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._placed: list[tuple[Any, torch.Tensor, int, torch.Tensor | None]] = []

    def place(self, pending: list[Any]) -> None:
        """Mark the shards of these parameters of FSDP2's."""
        for param in pending:
            shard = param.sharded_param
            local = torch.full_like(shard.to_local(), float("nan"))
            marker, before = wrap(local, shard.shape, shard), shard.grad
            shard.grad = marker
            self._placed.append((param, marker, marker._version, before))

    def take(self, names: dict[int, str]) -> None:
        """Remove the markers; where one was dropped or zeroed, drop what it stood for. Collective for tiny parameters."""
        if not self._placed:
            return
        placed, self._placed = self._placed, []
        verdicts = self._agreed([_verdict(p, m, v) for p, m, v, _ in placed], [p for p, *_ in placed])
        edited = []
        for (param, marker, _, before), verdict in zip(placed, verdicts, strict=True):
            if verdict == _KEPT:
                param.sharded_param.grad = before
                continue
            drop(param)
            if verdict == _ZEROED:
                marker.to_local().zero_()
            elif verdict == _EDITED:
                edited.append(names[id(param.sharded_param)])
        if edited:
            raise BackendError(
                f"the gradient of {', '.join(edited[:5])} was changed by hand while gradients accumulated unreduced "
                "(accel.no_sync), where it is not there yet: change it after the last backward of the accumulation"
            )

    def _agreed(self, verdicts: list[int], params: list[Any]) -> list[int]:
        # A rank with an empty shard cannot see; the first rank's shard is never empty.
        world = dist.get_world_size(self._group)
        if not any(-(-p.sharded_param.shape[0] // world) * (world - 1) >= p.sharded_param.shape[0] for p in params):
            return verdicts
        told = torch.tensor(verdicts, dtype=torch.uint8, device=self._device)
        dist.broadcast(told, 0, group=self._group)
        return [int(v) for v in told.tolist()]


def _verdict(param: Any, marker: torch.Tensor, version: int) -> int:
    grad = param.sharded_param.grad
    if grad is None:
        return _DROPPED
    if grad is not marker:
        return _EDITED
    local = marker.to_local()  # type: ignore[attr-defined]
    if local.numel() == 0 or bool(local.view(-1)[0].isnan()):
        return _KEPT if marker._version == version else _EDITED
    return _EDITED if bool(local.any()) else _ZEROED


def drop(param: Any) -> None:
    """Drop what one of FSDP2's parameters has accumulated."""
    param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None
