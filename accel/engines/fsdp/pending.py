"""Gradients that wait unreduced inside FSDP2, where no ``zero_grad`` would see them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch

from ...errors import BackendError
from ...gradients.log import GradientLog
from ...precision import here
from ...process.control import agree, announce
from ..base.absent import refuse_second_derivatives
from ..base.gradients import Interruption
from .module import drop, wrap

if TYPE_CHECKING:
    from .conversion import Conversion

_KEPT, _DROPPED, _ZEROED, _EDITED = range(4)
#: FSDP2's parameter, its shard's marker with the writes that it has had, and the gradient that was there before.
_Marker: TypeAlias = tuple[Any, torch.Tensor, int, torch.Tensor | None]


@final
class Unreduced:
    """What FSDP2 keeps of one parameter's unreduced gradients in the dtype that they will be reduced in."""

    def __init__(self, param: Any) -> None:
        self._param = param

    @property
    def grad(self) -> torch.Tensor | None:
        """Their sum."""
        return self._param.unsharded_accumulated_grad  # type: ignore[no-any-return]


@final
class Backwards:
    """What happens around each backward pass of a sharded module, and after one that an exception ended.

    FSDP2 keeps what it did not reduce on the gathered parameter. A loop, an optimizer or a module that drops gradients
    knows only the shard's. So each shard gets a marker there, full of nan, so that dropping or zeroing it is seen; what was
    reduced before is kept aside until the marker goes.

    Args:
        parts: the module's shards.
        names: of the shards, by identity.
        log: told of every backward where the loss must be scaled, else None.
    """

    def __init__(self, parts: Conversion, names: dict[int, str], log: GradientLog | None) -> None:
        self._parts = parts
        self._names = names
        self._log = log
        self._markers: list[_Marker] = []
        self.interruption = Interruption()

    def begin(self) -> None:
        """Hear that a backward reached FSDP2."""
        self.interruption.running.add(torch._C._current_graph_task_id())
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        if self.interruption.incomplete:
            grads = [here(p.grad) for p in self._parts.known_shards() if p.grad is not None]
            if any(bool(grad.any()) for grad in grads):  # zeros are dropped gradients too
                self.interruption.refuse()
        self.take_markers()
        if self._log is not None:
            self._log.entries.append(None)
        self.interruption.incomplete = False

    def end(self) -> None:
        """Hear that it ended."""
        self.interruption.running.clear()
        for param in (pending := self._parts.sharded.pending()):
            shard = param.sharded_param
            marker = wrap(torch.full_like(shard.to_local(), float("nan")), shard.shape, shard)
            self._markers.append((param, marker, _writes(marker), shard.grad))
            shard.grad = marker
        if not pending and self._parts.scalar_log.entries:
            announce(self._parts.process, "the reduction of scalars")
            self._parts.average_scalars()
        self._parts.had_backward = True

    def take_markers(self) -> None:
        """Let the shards' ``grad`` be what it says: where a marker was dropped or zeroed, drop what it stood for.

        Collective for tiny parameters.
        """
        if not self._markers:
            return
        placed, self._markers = self._markers, []
        edited = []
        for (param, marker, _, before), verdict in zip(placed, self._verdicts(placed), strict=True):
            if verdict == _KEPT:
                param.sharded_param.grad = before
                continue
            drop(param)
            if verdict == _ZEROED:
                here(marker).zero_()
            elif verdict == _EDITED:
                edited.append(self._names[id(param.sharded_param)])
        if edited:
            raise BackendError(
                f"the gradient of {', '.join(edited[:5])} was changed by hand while gradients accumulated unreduced "
                "(accel.no_sync), where it is not there yet: change it after the last backward of the accumulation"
            )

    def unreduced(self) -> Iterator[Unreduced]:
        """What holds gradients beside parameters."""
        return map(Unreduced, self._parts.sharded.params)

    @contextlib.contextmanager
    def uncovered(self) -> Iterator[None]:
        """Inside, each shard's ``grad`` is what was reduced before, and no marker. Local."""
        covered = [(p.sharded_param, marker, before) for p, marker, _, before in self._markers]
        covered = [one for one in covered if one[0].grad is one[1]]
        for shard, _, before in covered:
            shard.grad = before
        try:
            yield
        finally:
            for shard, marker, _ in covered:
                shard.grad = marker

    def _verdicts(self, placed: list[_Marker]) -> list[int]:
        verdicts = _judge(placed)
        # A rank with an empty shard cannot see; the first rank's shard is never empty.
        world = self._parts.sharded.mesh.sizes["shard"]
        lengths = [param._orig_size[0] for param, *_ in placed]  # of what it divides, which is one part of a layer
        if not any(-(-length // world) * (world - 1) >= length for length in lengths):
            return verdicts
        told: list[int] = agree(f"the gradients that were dropped ({self._parts.label})", verdicts)[0]
        return told

    def notice_exception(self) -> None:
        """Clear away what a backward left that did not come to its end. Local."""
        if self.interruption.notice():
            self._parts.drop_pending()
            self._parts.sharded.reset()
            self.interruption.stale = False


def _writes(marker: torch.Tensor) -> int:
    """Writes in place, to it or to what of it lies here; ``torch._foreach_zero_`` is none, nor a write through ``data``."""
    return marker._version + here(marker)._version


def _judge(placed: Sequence[_Marker]) -> list[int]:
    """What became of each marker: for all of them one read of the device, and one more where some hold other values."""
    grads = [param.sharded_param.grad for param, *_ in placed]
    verdicts = [
        _DROPPED if grad is None else _KEPT if grad is marker else _EDITED
        for grad, (_, marker, *_) in zip(grads, placed, strict=True)
    ]
    there = [number for number, verdict in enumerate(verdicts) if verdict == _KEPT]
    values = {number: here(placed[number][1]).view(-1) for number in there}
    full = [number for number in there if len(values[number])]
    filled = _read([values[number][:1] for number in full], torch.isnan)
    other = [number for number, nan in zip(full, filled, strict=True) if not nan]
    edited = _read([values[number].any()[None] for number in other], torch.Tensor.bool)
    for number in there:
        _, marker, writes, _ = placed[number]
        verdicts[number] = _KEPT if _writes(marker) == writes else _EDITED
    for number, found in zip(other, edited, strict=True):
        verdicts[number] = _EDITED if found else _ZEROED
    return verdicts


def _read(values: Sequence[torch.Tensor], ask: Callable[[torch.Tensor], torch.Tensor]) -> list[bool]:
    """What is said of each of these tensors of one element, in one read."""
    return ask(torch.cat(list(values))).tolist() if values else []
