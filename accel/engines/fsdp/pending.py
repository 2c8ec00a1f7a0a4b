"""Gradients that wait unreduced inside FSDP2, where no ``zero_grad`` would see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ...errors import BackendError
from ...gradients.log import GradientLog
from ...process.control import agree, announce
from ..base.gradients import broken_backward
from .shards import here, wrap

if TYPE_CHECKING:
    from .conversion import Conversion

_KEPT, _DROPPED, _ZEROED, _EDITED = range(4)


@final
class Markers:
    """Stand for unreduced gradients in the shards' ``grad``, full of nan, so that dropping or zeroing them is seen.

    FSDP2 keeps what it did not reduce on the gathered parameter. A loop, an optimizer or a module that drops gradients
    knows only the shard's. So each shard gets a marker there; what was reduced before is kept aside until it goes.
    """

    def __init__(self, world: int, label: str) -> None:
        self._world = world
        self._label = label
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
                here(marker).zero_()
            elif verdict == _EDITED:
                edited.append(names[id(param.sharded_param)])
        if edited:
            raise BackendError(
                f"the gradient of {', '.join(edited[:5])} was changed by hand while gradients accumulated unreduced "
                "(accel.no_sync), where it is not there yet: change it after the last backward of the accumulation"
            )

    def _agreed(self, verdicts: list[int], params: list[Any]) -> list[int]:
        # A rank with an empty shard cannot see; the first rank's shard is never empty.
        world = self._world
        if not any(-(-p.sharded_param.shape[0] // world) * (world - 1) >= p.sharded_param.shape[0] for p in params):
            return verdicts
        told: list[int] = agree(f"the gradients that were dropped ({self._label})", verdicts)[0]
        return told


def _verdict(param: Any, marker: torch.Tensor, version: int) -> int:
    grad = param.sharded_param.grad
    if grad is None:
        return _DROPPED
    if grad is not marker:
        return _EDITED
    local = here(marker)
    if local.numel() == 0 or bool(local.view(-1)[0].isnan()):
        return _KEPT if marker._version == version else _EDITED
    return _EDITED if bool(local.any()) else _ZEROED


def drop(param: Any) -> None:
    """Drop what one of FSDP2's parameters has accumulated."""
    param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


@final
class Backwards:
    """What happens around each backward pass of a sharded module, and after one that an exception ended.

    Args:
        parts: the module's shards.
        names: of the shards, by identity.
        log: told of every backward where the loss must be scaled, else None.
    """

    def __init__(self, parts: Conversion, names: dict[int, str], log: GradientLog | None) -> None:
        self._parts = parts
        self._names = names
        self._log = log
        self._markers = Markers(parts.process.place.world_size, parts.label)
        self._broken = False
        self._refused = False

    def begin(self) -> None:
        """Hear that a backward reached FSDP2."""
        self._refused = True  # until all is well
        if torch.is_grad_enabled():
            raise BackendError(
                "this backend frees parameters in backward, so that a graph of the backward itself (create_graph=True) cannot "
                "be differentiated: for gradient penalties choose a backend that keeps parameters whole"
            )
        if self._broken and self._any_gradient():
            self.refuse_broken()
        self.take_markers()
        if self._log is not None:
            self._log.entries.append(None)
        self._broken = self._refused = False

    def end(self) -> None:
        """Hear that it ended."""
        if pending := self._parts.sharded.pending():
            self._markers.place(pending)
        elif self._parts.scalars_pending():
            announce(self._parts.process, "the reduction of scalars")
            self._parts.average_scalars()

    def take_markers(self) -> None:
        """Let the shards' ``grad`` be what it says."""
        self._markers.take(self._names)

    def notice_exception(self) -> None:
        """Clear away what a backward left that did not come to its end. Local."""
        if self._parts.sharded.broken() or (self._refused and torch._C._current_graph_task_id() == -1):
            self._parts.drop_pending()
            self._parts.sharded.reset()
            self._broken, self._refused = True, False

    def refuse_broken(self) -> None:
        """Refuse gradients that such a backward left.

        Raises:
            BackendError: says what to do.
        """
        if self._broken:
            raise broken_backward()

    def _any_gradient(self) -> bool:
        # Zeros are dropped gradients too.
        return any(bool(here(p.grad).any()) for p in self._parts.known_shards() if p.grad is not None)
