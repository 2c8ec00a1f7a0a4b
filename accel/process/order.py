"""Predict an engine's next collective, to compare only unexpected ones."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias, final

#: The name of a collective, and details that must be equal on all ranks.
Event: TypeAlias = tuple[str, Hashable]


@final
class Order:
    """The sequence of this rank's collectives, and a prediction of the next.

    Ranks with the same history predict the same event. A predicted event needs no comparison,
    because a rank with a different event compares first.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all predictions, because the ranks may have different histories."""
        self._next: dict[Event | None, Event] = {}
        # The next event, by the last event and its number of occurrences since the restart.
        self._next_by_count: dict[tuple[Event | None, int], Event] = {}
        self._counts: dict[Event, int] = {}
        self._last: tuple[Event | None, int] = (None, 0)

    def expects(self, event: Event) -> bool:
        """True if the event was predicted. Counts it if so."""
        predicted = self._next_by_count.get(self._last) or self._next.get(self._last[0])
        if predicted != event:
            return False
        self._count(event)
        return True

    def learn(self, event: Event) -> None:
        """Learn an unexpected event, after the comparison with all ranks."""
        self._next_by_count[self._last] = self._next[self._last[0]] = event
        self._count(event)

    def restart(self) -> None:
        """Reset the counts."""
        # A step is predicted by the number of backwards since the last step.
        self._counts.clear()

    def _count(self, event: Event) -> None:
        count = self._counts.get(event, 0) + 1
        self._counts[event] = count
        self._last = (event, count)
