"""Hears of the uses of ``tensor.data``, by which a program changes weights without a trace.

What autograd's version counters would show, ``p.data.mul_(2)`` hides from them. ``torch.Tensor`` inherits the attribute from
a class in C++: one of its own, on the Python class, is found first, and leaves nothing behind when it is deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import torch

_DATA: Final[Any] = torch.Tensor.data


@final
class DataPatch:
    """The attribute in its place.

    Args:
        listener: hears of each use: the tensor, and what reading gave, or None before it is set.
        take: is given a tensor and the value to set first, and says whether it has taken it.
    """

    def __init__(
        self,
        listener: Callable[[torch.Tensor, torch.Tensor | None], None],
        take: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> None:
        self._listener = listener
        self._take = take
        self._own: property | None = None

    def install(self) -> None:
        """Put it there; again is no second time, and what another library has put there stays."""
        if self._own is not None or "data" in vars(torch.Tensor):
            return
        listener, take = self._listener, self._take

        def get(tensor: torch.Tensor) -> torch.Tensor:
            alias: torch.Tensor = _DATA.__get__(tensor)
            listener(tensor, alias)
            return alias

        def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
            # Conversions that change nothing (`model.to(device)`) put back what they have read.
            changed = not (_plain(value) and _plain(tensor) and value.data_ptr() == tensor.data_ptr())
            if changed:
                listener(tensor, None)
            if not take(tensor, value):
                _DATA.__set__(tensor, value)

        self._own = property(get, put, doc=_DATA.__doc__)
        torch.Tensor.data = self._own  # type: ignore[assignment]

    def remove(self) -> None:
        """Take it away, unless another library has put its own in its place."""
        if self._own is not None and vars(torch.Tensor).get("data") is self._own:
            del torch.Tensor.data
        self._own = None


def _plain(tensor: object) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)
