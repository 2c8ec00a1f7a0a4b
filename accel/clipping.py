"""Makes torch's own clipping functions see final gradients.

``torch.nn.utils.clip_grad_norm_``, ``clip_grad_value_`` and ``get_total_norm`` all group their gradients by one helper,
looked up in their module's globals: replacing it there reaches them however a loop imported them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch.nn.utils import clip_grad

_HELPER: Final = "_group_tensors_by_device_and_dtype"


@final
class ClipPatch:
    """The replaced helper; ``before`` gets the gradients that are about to be clipped or measured."""

    def __init__(self, before: Callable[[Sequence[torch.Tensor]], None]) -> None:
        self._before = before
        self._original: Any = None

    def install(self) -> None:
        """Replace the helper; again is no second time."""
        if self._original is not None:
            return
        original = self._original = getattr(clip_grad, _HELPER)

        def grouped(tensors: Sequence[Sequence[torch.Tensor]], *args: Any) -> Any:
            self._before(tensors[0])
            return original(tensors, *args)

        setattr(clip_grad, _HELPER, grouped)

    def remove(self) -> None:
        """Put torch's own back."""
        if self._original is not None:
            setattr(clip_grad, _HELPER, self._original)
            self._original = None
