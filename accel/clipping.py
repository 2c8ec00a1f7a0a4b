"""Makes torch's own clipping functions see final gradients.

``torch.nn.utils.clip_grad_norm_``, ``clip_grad_value_`` and ``get_total_norm`` all group their gradients by one helper,
looked up in their module's globals: replacing it there reaches them however a loop imported them. So is the norm that
``clip_grad_norm_`` clips by, which adds up over the ranks where gradients lie on one rank each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, final

import torch
from torch.nn.utils import clip_grad

_HELPER: Final = "_group_tensors_by_device_and_dtype"
_NORM: Final = "_get_total_norm"


#: From gradients, and the order and value of their norm here, the norm over the ranks; None where it is this one.
TotalNorm = Callable[[Sequence[torch.Tensor], float], torch.Tensor | None]


@final
class ClipPatch:
    """The replaced helpers.

    Args:
        before: gets the gradients that are about to be clipped or measured.
        total_norm: gets the gradients that ``clip_grad_norm_`` measures.
        refuse_local: hears that gradients are measured by a call that ``total_norm`` cannot answer.
    """

    def __init__(
        self,
        before: Callable[[Sequence[torch.Tensor]], None],
        total_norm: TotalNorm,
        refuse_local: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        self._before = before
        self._total_norm = total_norm
        self._refuse_local = refuse_local
        self._inside = False
        self._originals: dict[str, Any] = {}

    def install(self) -> None:
        """Replace the helpers; again is no second time."""
        if self._originals:
            return
        self._originals = {name: getattr(clip_grad, name) for name in (_HELPER, _NORM)}
        for name, patched in ((_HELPER, self._grouped), (_NORM, self._norm)):
            setattr(clip_grad, name, patched)

    def _grouped(self, tensors: Sequence[Sequence[torch.Tensor]], *args: Any) -> Any:
        if not self._inside and sys._getframe(1).f_code.co_name == _NORM:
            self._refuse_local(tensors[0])
        self._before(tensors[0])
        return self._originals[_HELPER](tensors, *args)

    def _norm(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self._inside = True
        try:
            total = self._total_norm(gradients, float(norm_type))
            if total is None:
                own: torch.Tensor = self._originals[_NORM](gradients, norm_type, error_if_nonfinite, foreach)
                return own
        finally:
            self._inside = False
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped"
            )
        return total

    def remove(self) -> None:
        """Put torch's own back."""
        for name, original in self._originals.items():
            setattr(clip_grad, name, original)
        self._originals = {}
