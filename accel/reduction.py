"""What the gradient log says about a reducer that averages once for each armed backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from .gradients import GradientLog


@final
class Reduction:
    """Tells reduced gradients from local ones.

    A forward *arms* the reducer. The next gradient of each expected parameter then completes one reduction; whatever
    comes before, after or without it is local until something averages it. Averaging again is harmless: what is
    already equal on all ranks stays as it is.

    Args:
        log: the gradients that came.
        noted: the end of a reduction is noted in the log (as None) instead of being told by counting.
    """

    def __init__(self, log: GradientLog, noted: bool) -> None:
        self.log = log
        self.noted = noted
        self.armed = False
        #: All existing gradients are known to be final.
        self.settled = False
        self._stepped: set[int] = set()
        self._stepping: int | None = None
        self._expected: frozenset[int] = frozenset()
        self._open_since = -1
        #: Had no gradient when the reduction was completed without them: a later backward must bring one.
        self._awaited: frozenset[int] = frozenset()

    def reset(self, expected: Iterable[int]) -> None:
        """A new reducer, of these parameters."""
        self.armed = False
        self._expected, self._awaited = frozenset(expected), frozenset()

    def arm(self) -> None:
        """A synchronised forward: the next backward will be reduced, with all that was accumulated before it."""
        self.settled = False
        self._awaited = frozenset()
        if self.log.entries or self.log.pending:
            local = self.local()
            self.settled = bool(self.log.entries) and not local
            self.log.fold(pending=local)
        self.armed = True

    def opened(self, graph: bool) -> None:
        """Note a forward, and whether it made a graph."""
        self._open_since = len(self.log.entries) if graph else -1

    @property
    def graph_open(self) -> bool:
        """Whether a graph still waits for its backward, as far as is known."""
        return len(self.log.entries) == self._open_since

    def started(self) -> bool:
        """Whether the armed backward has begun."""
        return self.armed and bool(self.log.entries)

    def complete(self) -> bool:
        """Whether the armed reduction has run."""
        entries = self.log.entries
        return None in entries if self.noted else (self._awaited or self._expected).issubset(entries)

    def exact(self) -> bool:
        """Whether each expected gradient came once after the reducer was armed, and nothing else: the usual step."""
        entries = self.log.entries
        return (
            self.armed
            and not self.noted
            and len(entries) == len(self._expected)
            and self._expected.issuperset(entries)
            and bool(entries)
        )

    def local(self) -> bool:
        """Whether a gradient came that no reduction since has covered."""
        entries = self.log.entries
        if not self.armed or not entries:
            return bool(entries) or self.log.pending
        if self.noted:
            return entries[-1] is not None
        return len(entries) != len(self._expected) or not self.complete()

    def missing(self) -> list[int]:
        """The expected parameters that got no gradient."""
        return sorted((self._awaited or self._expected).difference(self.log.entries))

    def unfinished(self) -> bool:
        """Whether a reduction began that is not known to have all its gradients, of its own backward or of a later one."""
        return self.started() or bool(self._awaited)

    def completed(self) -> None:
        """The armed reduction was completed without the missing gradients: all others are final."""
        self._awaited = frozenset() if self.noted else self._expected.difference(self.log.entries)
        self.armed, self.settled = False, True
        self.log.fold(pending=False)

    def stepping(self, optimizer_id: int) -> None:
        """Note a step: the same optimizer's second one without a gradient in between steps with gradients of unknown origin."""
        if not self.log.entries and optimizer_id in self._stepped:
            self.settled = False
        self._stepped.add(optimizer_id)
        self._stepping = optimizer_id

    def changed(self) -> list[int]:
        """The parameters that were frozen, or got another dtype, between their forward and backward."""
        return [~i for i in self.log.entries if i is not None and i < 0]

    def finish(self) -> None:
        """Every gradient is final now."""
        if self.log.entries:
            self.armed = False
            self._stepped.intersection_update({self._stepping})
        self._stepping = None
        self._awaited = frozenset()
        self.log.fold(pending=False)
        self.settled = True
