"""What the ranks tell each other: small values, on accel's own process group. Whatever all ranks do together is one of these.

``agree(what, value)``          every rank's value; all ranks are at one place, named by ``what``
``raise_together(what, ...)``   after ``agree`` on what went wrong: one rank's failure is everyone's
``require_equal(what, value)``  all ranks are here with one value, or every rank ends with an error
``announce(process, what)``     a collective without names is next; compared only where what came before does not tell it
``Waiting(process, what)``      around such a collective: tells the others where this rank is, and explains a lost connection
``locked``                      of a function: one thread at a time, since the ranks match their calls by their order
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, ParamSpec, TypeGuard, TypeVar, final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import AccelError, RankMismatchError, TimeoutError, described
from . import Process, current, end_groups, ended, local_rank, rank, running
from . import lost as lost
from .packing import gather_framed, to_bytes
from .watchdog import missing_ranks

#: In the texts of gloo's and nccl's errors if another rank is gone. gloo's begin with the path of its source file.
_LOST: Final = ("gloo/transport", "NCCL")

# -- One thread of a process at a time ---------------------------------------------------------------------------------

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=AccelError)


#: A rank's collectives have one order only if one thread at a time makes them.
lock: Final = threading.RLock()
os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]  # the child lacks the thread that held it


def locked(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which one thread at a time is in."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return function(*args, **kwargs)

    return call


# -- Every rank's values -----------------------------------------------------------------------------------------------


@locked
def agree(what: str, value: object, *, timeout: timedelta | None = None) -> list[Any]:
    """Every rank's value, by rank: small ones, pickled, on accel's own group. Collective; other threads wait.

    ``what`` names the place in the program, the same on every rank; ``timeout`` is the process's if None. RankMismatchError on
    every rank where another one is elsewhere, TimeoutError where a rank did not come, AccelError where one ended: no rank
    hangs, the groups end.
    """
    process = current()
    if process.control is None:
        return [value]
    limit = timeout or process.timeout
    return _values(
        what,
        gather_framed(
            _content(what, value), lambda message: _gather(process, what, message, limit)
        ),
    )


def _content(what: str, value: object) -> bytes:
    return pickle.dumps((what, value))


def _values(what: str, contents: list[bytearray]) -> list[Any]:
    messages = [pickle.loads(content) for content in contents]
    if any(theirs != what for theirs, _ in messages):
        places = "; ".join(
            f"rank {rank} is in {theirs!r}" for rank, (theirs, _) in enumerate(messages)
        )
        raise RankMismatchError(f"the ranks are at different points of the program: {places}")
    return [theirs for _, theirs in messages]


def _gather(process: Process, what: str, message: bytes, limit: timedelta) -> list[bytearray]:
    """Every rank's message, which are equally long."""
    process.rounds += 1
    arrivals, patience = process.store(str(process.rounds)), min(timedelta(seconds=1), limit / 4)
    before = process.doing
    process.doing = before or repr(what)
    try:
        work, theirs = process.begin_exchange(message)
        # To say who is missing, the ranks must say that they came; only those that wait for long do.
        late = not _done(work, patience)
        if late:
            arrivals.set(str(process.place.rank), "")
            late = not _done(work, limit - patience)
    except RuntimeError as error:
        with contextlib.suppress(RuntimeError):
            arrivals.set(str(process.place.rank), "")
        if ended() or "imed out" not in str(error):
            raise lost(process.doing, error) from error
        late = True
    finally:
        process.doing = before
    if late:
        raise _too_late(process, what, limit, arrivals, patience)
    return list(map(to_bytes, theirs))


def _too_late(
    process: Process,
    what: str,
    limit: timedelta,
    arrivals: distributed_c10d.Store,
    patience: timedelta,
) -> TimeoutError:
    seconds = f"{limit.total_seconds():g} s"
    end_groups(f"not every rank came to {what!r} within {seconds}")
    # Within its patience a rank that came in the meantime says so.
    missing = missing_ranks(lambda: arrivals, process.place, patience.total_seconds())
    who = (
        f"rank {', '.join(map(str, missing))} did not come" if missing else "some rank did not come"
    )
    return TimeoutError(
        f"rank {process.place.rank} waited {seconds} in {what!r}, but {who}; the process groups were ended so that no "
        "rank hangs. Every rank must make this call: look for a call on one rank only (`if accel.is_main():`), a rank "
        "with fewer steps, or one that needs longer than accel.init(timeout=...)"
    )


def _done(work: Any, span: timedelta) -> bool:
    try:
        work.wait(span)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(span)  # it ended while this rank gave up: well, or with an error of its own
    return True


# -- Collectives without names -----------------------------------------------------------------------------------------


def is_lost(error: BaseException | None) -> TypeGuard[RuntimeError]:
    """Whether an error comes of connections that closed or ran out of time, which say nothing of the cause."""
    if not isinstance(error, RuntimeError):
        return False
    process = running()
    if process is None or process.control is None:
        return bool(ended())
    if isinstance(error, dist.DistError):
        return True
    return any(text in str(error) for text in _LOST)


def raise_lost(what: str, error: BaseException | None) -> None:
    """Raise ``lost`` where an error comes of that; the caller raises all others."""
    if is_lost(error):
        raise lost(what, error) from error


@final
class Waiting:
    """Context: this rank is in what needs the others. The hang detector tells where; a lost connection raises accel's error."""

    __slots__ = ("_before", "_process", "_what")

    def __init__(self, process: Process, what: str) -> None:
        self._process, self._what = process, what
        self._before = ""

    def __enter__(self) -> None:
        self._before, self._process.doing = self._process.doing, self._what

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._process.doing = self._before
        raise_lost(self._what, error)


def announce(process: Process, what: str, details: Hashable = None) -> None:
    """Say that a collective of an engine is next: ``what``, and what of it else must be equal on all ranks (``details``).

    Compares where it is not the one that was to be expected; RankMismatchError where another rank is about to do something
    else, AccelError where one ended, or did not come in time.
    """
    event = (what, details)
    if process.order.expects(event):
        return
    usual = process.order.expected
    with Waiting(process, f"front of {what}{f', where {usual[0]} came before' if usual else ''}"):
        try:
            agree(what if details is None else f"{what} {details}", None)
        except RankMismatchError as error:
            end_groups(
                str(error), mismatch=True
            )  # a third rank may be in what these do not come to
            raise
    process.order.learn(event)


# -- All ranks are well, and in the same place with the same value, or every rank ends with an error -------------------


def raise_together(
    what: str,
    own: BaseException | None,
    problems: Sequence[str],
    kind: type[AccelError] = RankMismatchError,
) -> None:
    """Raise where a rank failed: its ``own`` error there, on the others one of ``kind``, which names the rank.

    ``problems`` are all ranks' errors as text, which the ranks agreed on; empty where a rank is well.
    """
    if own is not None:
        try:
            raise own
        finally:
            del own  # with this frame it would live, and all that its frames hold, until garbage is collected
    for number, text in enumerate(problems):
        if text:
            raise _told_of(
                number, kind(f"{what} failed on rank {number}, so on every rank: {text}")
            )


def _told_of(rank: int, error: E) -> E:
    error.failed_rank = rank
    return error


def require_equal(
    what: str, value: Any, explain: Callable[[list[Any]], str] = str, beside: Any = None
) -> list[Any]:
    """Compare ``value`` over the ranks; every rank's ``beside``, which may differ.

    RankMismatchError where another rank has another value, or did not come; the process groups are ended, so that a rank that
    waits elsewhere fails too.
    """
    try:
        told = agree(what, (value, beside))
    except TimeoutError as error:
        raise RankMismatchError(f"{what} did not happen on every rank: {error}") from error
    values = [theirs for theirs, _ in told]
    if any(v != value for v in values):
        message = f"{what}: the ranks differ: {explain(values)}; make the same change on every rank"
        end_groups(message, mismatch=True)
        raise RankMismatchError(message)
    return [theirs for _, theirs in told]


# -- What a loop calls -------------------------------------------------------------------------------------------------


def barrier() -> None:
    """Waits until every rank is here.

    Raises:
        AccelError: a rank did not come in time (TimeoutError), ended, or is at another call (RankMismatchError).
    """
    agree("barrier", None)


def any_rank(flag: bool) -> bool:
    """Whether any rank gives True: a stop that one rank decides on, and all see. Collective.

    Args:
        flag: what this rank says, as ``loss.isnan().item()`` or ``time.time() > end``.

    Raises:
        AccelError: ``flag`` is no bool; or, as in ``barrier``, a rank did not come, ended, or is at another call.
    """
    plain = bool(flag) if type(flag).__name__ in ("bool", "bool_") else None  # numpy's too
    problem = (
        ""
        if plain is not None
        else f"accel.any_rank expects a bool, got {described(flag)}: any_rank(bool(condition))"
    )
    told = agree("any_rank", (plain, problem))
    raise_together(
        "any_rank",
        AccelError(problem) if problem else None,
        [theirs for _, theirs in told],
        AccelError,
    )
    return any(theirs for theirs, _ in told)


@contextlib.contextmanager
def main_first(*, local: bool = False) -> Iterator[None]:
    """Runs the body on rank 0 first, then on the others; with ``local`` on the first rank of each host. Collective.

    Raises:
        AccelError: the body failed on a rank that was first, so it does not run on the others.
    """
    first = (local_rank() if local else rank()) == 0
    problem = ""
    try:
        if first:
            yield
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        problems = agree("main_first", problem)
    for number, text in enumerate(problems):
        if text:
            raise _told_of(
                number,
                AccelError(
                    f"main_first: the body failed on rank {number}, which was first: {text}"
                ),
            )
    if not first:
        yield
