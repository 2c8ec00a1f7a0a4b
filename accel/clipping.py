"""Makes torch's own clipping functions see final gradients.

``torch.nn.utils.clip_grad_norm_``, ``clip_grad_value_`` and ``get_total_norm`` all group their gradients by one helper,
looked up in their module's globals: replacing it there reaches them however a loop imported them. So does the function
that multiplies the gradients of given parameters, which alone is told the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch.nn.utils import clip_grad

_HELPER: Final = "_group_tensors_by_device_and_dtype"
_MULTIPLIER: Final = "_clip_grads_with_norm_"


@final
class ClipPatch:
    """The replaced functions.

    Args:
        before: gets the gradients that are about to be clipped or measured.
        parameters: gets the parameters whose gradients are about to be clipped by a norm.
    """

    def __init__(
        self,
        before: Callable[[Sequence[torch.Tensor]], None],
        parameters: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        self._before = before
        self._parameters = parameters
        self._original: Any = None
        self._multiplier: Any = None

    def install(self) -> None:
        """Replace the helper; again is no second time."""
        if self._original is not None:
            return
        original = self._original = getattr(clip_grad, _HELPER)
        multiplier = self._multiplier = getattr(clip_grad, _MULTIPLIER)

        def grouped(tensors: Sequence[Sequence[torch.Tensor]], *args: Any) -> Any:
            self._before(tensors[0])
            return original(tensors, *args)

        def multiplied(parameters: Any, *args: Any, **kwargs: Any) -> None:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._parameters(parameters)
            multiplier(parameters, *args, **kwargs)

        setattr(clip_grad, _HELPER, grouped)
        setattr(clip_grad, _MULTIPLIER, multiplied)

    def remove(self) -> None:
        """Put torch's own back."""
        if self._original is not None:
            setattr(clip_grad, _HELPER, self._original)
            setattr(clip_grad, _MULTIPLIER, self._multiplier)
            self._original = self._multiplier = None
