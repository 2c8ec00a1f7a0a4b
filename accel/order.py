"""Whether all ranks do the same collectives in the same order: they carry no names, so that they would be mixed up."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, TypeAlias, final

#: What is done, by name, and what else must be equal on all ranks.
Event: TypeAlias = tuple[str, Hashable]
_MOST: Final = 10_000


@final
class Order:
    """What this rank does with all others, one event after the other, and what it expects to come next.

    The expectation follows from the events before alone. So ranks with equal events expect the same, and an event that
    was expected needs no comparison: if another rank does something else instead, that one did not expect it, and
    compares before it does it. What is not expected is compared once and learned, so that a program that repeats itself
    compares nothing, and yet no collective meets another one's.
    """

    def __init__(self) -> None:
        #: What came after an event, and after it had come a number of times since the last ``restart``.
        self._after: dict[Event | None, Event] = {}
        self._after_number: dict[tuple[Event | None, int], Event] = {}
        self._numbers: dict[Event, int] = {}
        self._last: tuple[Event | None, int] = (None, 0)

    @property
    def expected(self) -> Event | None:
        """What comes next, as far as the events before tell."""
        return self._after_number.get(self._last) or self._after.get(self._last[0])

    def expects(self, event: Event) -> bool:
        """Whether this comes next; if so, it is noted."""
        if self.expected != event:
            return False
        self._note(event)
        return True

    def learn(self, event: Event) -> None:
        """Note what was not expected; all ranks have it."""
        if len(self._after_number) > _MOST or len(self._after) > _MOST:
            self._after_number.clear()
            self._after.clear()
        self._after_number[self._last] = self._after[self._last[0]] = event
        self._note(event)

    def restart(self) -> None:
        """Begin to count anew: what follows an event may depend on how often it came since, as a step on its backwards."""
        self._numbers.clear()

    def _note(self, event: Event) -> None:
        number = self._numbers.get(event, 0) + 1
        self._numbers[event] = number
        self._last = (event, number)
