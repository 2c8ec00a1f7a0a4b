"""Whether all ranks gather and reduce the same things: a library's collectives carry no names, so that they would be mixed up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, final

import torch

#: What is compared, its value, and what explains a difference.
Compare: TypeAlias = Callable[[str, object, Callable[[list[Any]], str]], None]


@final
class Order:
    """What each forward and backward gathers and reduces, compared over the ranks where it is not as before.

    Each rank compares what differs from the last pass of the same kind. So a model that always does the same
    costs one comparison; a rank that does something else compares while the others may not come, which ends in an error.
    """

    def __init__(self) -> None:
        self._now: list[object] = []
        self._last: dict[str, tuple[object, ...]] = {}
        self._passes = 0
        self._changed = False

    def note(self, event: object) -> None:
        """Hear what is gathered or reduced: numbers, so that all ranks hash them alike. Local."""
        self._now.append(event)

    def close(self, kind: str) -> None:
        """End a pass; what comes next is another. Local."""
        done = tuple(self._now)
        self._now.clear()
        if done:
            self._changed = self._changed or self._last.get(kind) != done
            self._last[kind] = done
            self._passes = hash((self._passes, done))

    def end_forward(self, compare: Compare) -> None:
        """End a forward; without gradients it is checked here, since no step will. Collective where it changed."""
        if torch._C._current_graph_task_id() == -1:  # else a part of a backward that computes it again
            grad = torch.is_grad_enabled()
            self.close("forward" if grad else "evaluation")
            if not grad:
                self.check(compare)

    def drop(self) -> None:
        """Forget a pass that an exception ended. Local."""
        self._now.clear()

    def check(self, compare: Compare) -> None:
        """Compare the passes since the last check by ``compare(what, value, explain)``, where one was not as before.

        Raises:
            RankMismatchError: another rank used other parameters, or used them in another order.
        """
        passes, self._passes = self._passes, 0
        if self._changed:
            self._changed = False
            compare(
                "the parameters in use",
                passes,
                lambda _: "a forward or backward used other parameters, or in another order, and so got wrong values",
            )
