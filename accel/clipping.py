"""Makes torch's own clipping functions see final gradients.

``torch.nn.utils.clip_grad_norm_``, ``clip_grad_value_`` and ``get_total_norm`` use helpers that they look up in their
module's globals: replacing those reaches them however a loop imported them. One groups gradients, and is where they
become final; one measures the norm to clip by, which adds up over the ranks where gradients lie on one rank each; one
multiplies the gradients of given parameters, and alone is told the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Final, Protocol, final

import torch
from torch.nn.utils import clip_grad

from .patches import Patch

_GROUP: Final = "_group_tensors_by_device_and_dtype"
_NORM: Final = "_get_total_norm"
_MULTIPLY: Final = "_clip_grads_with_norm_"


class ClipListener(Protocol):
    """What hears of clipping."""

    def before_clipping(self, gradients: Sequence[torch.Tensor]) -> None:
        """These gradients are about to be clipped or measured."""

    def before_multiplying(self, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of these parameters are about to be clipped by a norm."""

    def total_norm(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], norm_type: float
    ) -> torch.Tensor | None:
        """The norm over the ranks that ``clip_grad_norm_`` needs; None where it is that of ``gradients``."""

    def before_local_norm(self, gradients: Sequence[torch.Tensor]) -> None:
        """These gradients are about to be measured by a call that ``total_norm`` cannot answer."""


@final
class ClipPatch:
    """The replaced helpers; ``listener`` hears of their calls."""

    def __init__(self, listener: ClipListener) -> None:
        self._listener = listener
        self._inside = False
        acts: dict[str, Callable[..., Any]] = {_GROUP: self._group, _NORM: self._norm, _MULTIPLY: self._multiply}
        self._patches = [Patch(vars(clip_grad), name, act) for name, act in acts.items()]

    def install(self) -> None:
        """Replace the helpers; again is no second time."""
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        """Put torch's own back."""
        for patch in self._patches:
            patch.remove()

    def _group(self, original: Callable[..., Any], tensors: Sequence[Sequence[torch.Tensor]], *args: Any) -> Any:
        if not self._inside and sys._getframe(2).f_code.co_name == _NORM:  # who has called the patch
            self._listener.before_local_norm(tensors[0])
        self._listener.before_clipping(tensors[0])
        return original(tensors, *args)

    def _norm(
        self,
        original: Callable[..., torch.Tensor],
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self._inside = True
        try:
            total = self._listener.total_norm(_clipped(sys._getframe(2)), gradients, float(norm_type))
            if total is None:
                return original(gradients, norm_type, error_if_nonfinite, foreach)
        finally:
            self._inside = False
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped"
            )
        return total

    def _multiply(self, original: Callable[..., None], parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._listener.before_multiplying(parameters)
        original(parameters, *args, **kwargs)


def _clipped(caller: FrameType) -> list[torch.Tensor]:
    """What ``clip_grad_norm_`` was given: its helper sees gradients only, of which a rank may have none."""
    return list(caller.f_locals["parameters"]) if caller.f_code.co_name == "clip_grad_norm_" else []
