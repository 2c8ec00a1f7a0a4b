"""Backward passes that raised, for backends whose libraries keep state between backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import final

import torch

from ...errors import BackendError


@final
class Interruption:
    """Remembers that an exception ended a backward or a reduction. All methods are local.

    Attributes:
        running: autograd's numbers of the backwards that run. The backend adds and removes them.
        incomplete: gradients are incomplete, until the backend drops them.
        stale: the library keeps the state of a call that raised, until the backend clears it.
        cut: that call was a backward or a reduction, so the state is cleared before a reduction.
    """

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.incomplete = self.stale = self.cut = False

    def notice(self) -> bool:
        """Look for interrupted backwards, and return ``stale``. False while a backward runs."""
        if torch._C._current_graph_task_id() != -1:
            return False
        if self.running:
            self.running.clear()
            self.incomplete = self.stale = self.cut = True
        return self.stale

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Mark gradients as incomplete if the reduction inside raises."""
        before, self.stale, self.cut, self.incomplete = self.stale, True, True, True
        yield
        self.stale, self.cut, self.incomplete = before, False, False

    def refuse(self) -> None:
        """Raise BackendError if gradients are incomplete."""
        if self.incomplete:
            raise BackendError(
                "The gradients are incomplete, because an exception ended a backward. "
                "Call optimizer.zero_grad(), then run forward and backward again."
            )
