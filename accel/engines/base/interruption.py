"""An account of backwards that raised, for backends whose own hooks notice the begin and the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import final

import torch

from ...errors import BackendError


@final
class Interruption:
    """What follows where an exception ended a backward or a reduction: what it left is cleared, its gradients are refused. Local.

    Attributes:
        running: by autograd's numbers, the backwards that have begun and not ended; the backend adds and removes them.
        incomplete: there may be gradients of one that will not end; until the backend knows that they were dropped.
        stale: what one left half-way, or a forward did, is still in the library; until the backend has cleared it.
        cut: a backward or a reduction did, so that nothing can be reduced before that.
    """

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.incomplete = self.stale = self.cut = False

    def notice(self) -> bool:
        """Whether there is something to clear; never while a backward runs."""
        if torch._C._current_graph_task_id() != -1:
            return False
        if self.running:
            self.running.clear()
            self.incomplete = self.stale = self.cut = True
        return self.stale

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Around a reduction of what backwards left: one that does not end has made some gradients final, and others not."""
        before, self.stale, self.cut, self.incomplete = self.stale, True, True, True
        yield
        self.stale, self.cut, self.incomplete = before, False, False

    def refuse(self) -> None:
        """Refuse (BackendError) gradients that are incomplete."""
        if self.incomplete:
            raise BackendError(
                "an exception ended a backward, a reduction of its gradients, or a forward after one, so that gradients are "
                "incomplete: call zero_grad(), then the model's handle, and backward again"
            )
