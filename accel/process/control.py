"""Small values that the ranks exchange on accel's own process group, and errors on every rank."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, ParamSpec, TypeGuard, TypeVar

import torch.distributed as dist

from ..errors import AccelError, RankMismatchError, TimeoutError
from . import Process, current, end_groups, ended, local_rank, rank, running
from . import lost as lost
from .packing import gather_values

P = ParamSpec("P")
T = TypeVar("T")

# Errors of gloo begin with the path of its source file. The last text is from Work.wait(timeout).
_LOST: Final = ("gloo/transport", "NCCL", "Operation timed out!")

# Ranks match their collectives by order, so a rank must call them from one thread at a time.
lock: Final = threading.RLock()
# A forked child doesn't have the thread that held the lock.
os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]


def locked(function: Callable[P, T]) -> Callable[P, T]:
    """Let one thread at a time call the function."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return function(*args, **kwargs)

    return call


# -- every rank's value ----------------------------------------------------------------------------


@locked
def agree(what: str, value: object, *, timeout: timedelta | None = None) -> list[Any]:
    """Return every rank's value, by rank. Collective.

    Args:
        what: names the place in the program. It must be the same on every rank.
        value: a small object that can be pickled.
        timeout: how long to wait for the other ranks. None: the timeout of the process.

    Raises:
        RankMismatchError: a rank is at a different place. Raised on every rank.
        TimeoutError: a rank doesn't come in time. The process groups are ended.
        AccelError: a rank has ended. The process groups are ended.
    """
    process = current()
    if process.control is None:
        return [value]
    process.rounds += 1
    with Waiting(process, process.doing or repr(what)):
        messages = gather_values((what, value), process.control, timeout or process.timeout)
    if any(place != what for place, _ in messages):
        places = "; ".join(f"rank {r} is in {place!r}" for r, (place, _) in enumerate(messages))
        raise RankMismatchError(f"the ranks are at different points of the program: {places}")
    return [value for _, value in messages]


# -- collectives of the engines --------------------------------------------------------------------


def is_lost(error: BaseException | None) -> TypeGuard[RuntimeError]:
    """True if an error comes from a connection that closed or timed out."""
    if not isinstance(error, RuntimeError):
        return False
    process = running()
    if process is None or process.control is None:
        return bool(ended())
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST)


def raise_lost(what: str, error: BaseException | None) -> None:
    """Raise accel's error with the reason if a connection was lost. Otherwise do nothing."""
    if is_lost(error):
        raise lost(what, error) from error


class Waiting:
    """A context in which this rank needs the other ranks.

    The watchdog tells the others where this rank is. A lost connection raises accel's error.
    """

    def __init__(self, process: Process, what: str) -> None:
        self._process, self._what = process, what

    def __enter__(self) -> None:
        self._before, self._process.doing = self._process.doing, self._what

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            raise_lost(self._what, error)
        finally:
            self._process.doing = self._before


def announce(process: Process, what: str, details: Hashable = None) -> None:
    """Announce the next collective of an engine. Compare it over the ranks if it isn't predicted.

    Args:
        details: values that must be equal on all ranks, too.

    Raises:
        RankMismatchError: a rank is about to do something else. The process groups are ended.
        AccelError: a rank has ended or doesn't come in time.
    """
    event = (what, details)
    if process.order.expects(event):
        return
    usual = process.order.expected
    place = f"front of {what}"
    if usual is not None:
        place += f", after which {usual[0]} came before"
    with Waiting(process, place):
        try:
            agree(what if details is None else f"{what} {details}", None)
        except RankMismatchError as error:
            # A third rank may wait in a collective that these ranks don't come to.
            end_groups(str(error), mismatch=True)
            raise
    process.order.learn(event)


# -- errors on every rank --------------------------------------------------------------------------


def raise_together(
    what: str,
    own: BaseException | None,
    problems: Sequence[str],
    kind: type[AccelError] = RankMismatchError,
) -> None:
    """Raise if a rank failed: its own error there, and ``kind`` on the other ranks.

    Args:
        problems: all ranks' errors as texts, which the ranks have exchanged. Empty: no error.
    """
    if own is not None:
        try:
            raise own
        finally:
            del own  # this frame would keep it alive, and with it all the frames of its traceback
    for number, text in enumerate(problems):
        if text:
            error = kind(f"{what} failed on rank {number}, so on every rank: {text}")
            error.failed_rank = number
            raise error


def require_equal(
    what: str, value: Any, explain: Callable[[list[Any]], str] = str, beside: Any = None
) -> list[Any]:
    """Compare ``value`` over the ranks. Return every rank's ``beside``, which may differ.

    Raises:
        RankMismatchError: the values differ, or a rank doesn't come. The process groups are ended,
            so that ranks that wait elsewhere raise too.
    """
    try:
        pairs = agree(what, (value, beside))
    except TimeoutError as error:
        raise RankMismatchError(f"{what} did not happen on every rank: {error}") from error
    values = [other for other, _ in pairs]
    if any(other != value for other in values):
        message = f"{what}: the ranks differ: {explain(values)}; make the same change on every rank"
        end_groups(message, mismatch=True)
        raise RankMismatchError(message)
    return [other for _, other in pairs]


# -- functions for training loops ------------------------------------------------------------------


def barrier() -> None:
    """Wait until every rank is here. Collective.

    Raises:
        AccelError: a rank doesn't come in time (TimeoutError), has ended, or is in a different call
            (RankMismatchError).
    """
    agree("barrier", None)


def any_rank(flag: bool) -> bool:
    """True if the flag is true on any rank. Collective.

    Use it if one rank decides to stop, and all must.

    Args:
        flag: this rank's flag, such as ``loss.isnan()`` or ``time.time() > end``.

    Raises:
        AccelError: a rank doesn't come, as in ``barrier``.
    """
    return any(agree("any_rank", bool(flag)))


@contextlib.contextmanager
def main_first(*, local: bool = False) -> Iterator[None]:
    """Run the body on rank 0 first, then on all other ranks. Collective.

    Args:
        local: run it on the first rank of each node first.

    Raises:
        AccelError: the body failed on a rank that was first. It doesn't run on the others.
    """
    is_first = (local_rank() if local else rank()) == 0
    problem = ""
    try:
        if is_first:
            yield
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        problems = agree("main_first", problem)
    raise_together("main_first", None, problems, AccelError)
    if not is_first:
        yield
