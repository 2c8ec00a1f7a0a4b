"""One thread of a process at a time in what all ranks do together, and in what threads would share.

The ranks match their calls by their order, which threads do not have: each call that takes several exchanges is made in one
turn, and the ranks tell each other which thread is at it.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar, final

P = ParamSpec("P")
T = TypeVar("T")


def thread_name() -> str:
    """This thread as all ranks would name it: empty for the main one, and without the numbers that Python gives."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    return f"{type(thread).__qualname__} {re.sub(r'[0-9]+', '', thread.name)!r}"


@final
class Turn:
    """A context that one thread has at a time; a thread that has it enters again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._name = ""
        self._waited = False
        self._waiting: list[str] = []

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            name = thread_name()
            waited = name == self._name
            self._waiting.append(name)
            self._lock.acquire()
            self._waiting.remove(name)
            self._waited = waited
        if not self._depth:
            self._name = thread_name()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._waited = False
        self._lock.release()

    def crowded(self) -> str:
        """The name of the thread that has the turn, if another one of that name waits for it, or had it before."""
        return self._name if self._waited or self._name in self._waiting else ""

    def forget(self) -> None:
        """In a forked process, which does not have the thread that had it."""
        self.__init__()


turn: Final = Turn()
os.register_at_fork(after_in_child=turn.forget)


def in_turn(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which one thread at a time is in."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with turn:
            return function(*args, **kwargs)

    return call
