"""What the ranks tell each other: small values, on accel's own process group."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import AccelError, RankMismatchError, TimeoutError
from . import Process, current, end_groups, ended, local_rank, mismatched, rank, reason_of, running
from .startup import to_bytes, to_tensor
from .turns import in_turn, thread_name, turn

_BLOCK = 1024  # bytes that every exchange sends; a longer value takes a second round
#: What gloo and nccl say where another rank is gone.
_LOST: Final = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "timeout caused pair closure",
    "NCCL",
)


@in_turn
def agree(what: str, value: object, *, timeout: timedelta | None = None) -> list[Any]:
    """Gathers a small value of every rank, on accel's own group. Collective; other threads wait for their turn.

    Args:
        what: Names this meeting, the same on every rank.
        value: What this rank tells; it is pickled.
        timeout: How long to wait for the other ranks; the process's timeout if None.

    Returns:
        The values of all ranks, by rank.

    Raises:
        RankMismatchError: another rank is at another meeting, or at this one in another thread; or threads of one name,
            which the ranks cannot tell apart, come at once; on every rank.
        TimeoutError: a rank did not come; the process groups are ended, so that no rank hangs.
        AccelError: a rank ended while this one waited; the process groups are ended.
    """
    process = current()
    if process.control is None:
        return [value]
    framed = _framed(what, value)
    limit = timeout or process.timeout
    blocks = _gather(process, what, framed[:_BLOCK].ljust(_BLOCK, b"\0"), limit)
    longest = 8 + max(int.from_bytes(block[:8], "little") for block in blocks)
    if longest > _BLOCK:
        blocks = _gather(process, what, framed.ljust(longest, b"\0"), limit)
    return _values(what, blocks)


@in_turn
def agree_later(what: str, value: object) -> Callable[[], list[Any]]:
    """``agree`` in two halves: this one sends, and what it returns waits for the others. Each is for all ranks, in one order.

    Args:
        what: names this meeting, the same on every rank.
        value: a short one.

    Returns:
        What gives the values of all ranks, by rank; none where a rank has ended, which the next who needs it will say.

    Raises:
        RankMismatchError: another rank is at another meeting; from the second half.
    """
    process, framed = current(), _framed(what, value)
    assert len(framed) <= _BLOCK, "longer than one round"
    process.rounds += 1
    mine = to_tensor(framed.ljust(_BLOCK, b"\0"))
    theirs = [torch.empty_like(mine) for _ in range(process.place.world_size)]
    try:
        work = dist.all_gather(theirs, mine, group=process.control, async_op=True)
    except RuntimeError:
        return list

    def answers() -> list[Any]:
        try:
            if not _done(work, process.timeout):
                return []
        except RuntimeError:
            return []
        blocks = [to_bytes(tensor) for tensor in theirs]
        if any(int.from_bytes(block[:8], "little") + 8 > _BLOCK for block in blocks):
            raise RankMismatchError(f"the ranks are at different points of the program: not all are in {what!r}")
        return _values(what, blocks)

    return answers


def _framed(what: str, value: object) -> bytes:
    payload = pickle.dumps(((what, thread_name()), turn.crowded(), value))
    return len(payload).to_bytes(8, "little") + payload


def _values(what: str, blocks: list[bytearray]) -> list[Any]:
    place = (what, thread_name())
    messages = [pickle.loads(block[8:]) for block in blocks]
    if any(theirs != place for theirs, _, _ in messages):
        places = "; ".join(f"rank {n} is in {_place(*theirs)}" for n, (theirs, _, _) in enumerate(messages))
        advice = (
            "; over several ranks make all calls of accel in the thread that trains (accel.save(..., wait=False) writes in the "
            "background by itself)"
        )
        threads = any(thread for (_, thread), _, _ in messages)
        raise RankMismatchError(
            f"the ranks are at different points of the program: {places}{advice if threads else ''}"
        )
    if alike := [f"{name} of rank {number}" for number, (_, name, _) in enumerate(messages) if name]:
        raise RankMismatchError(
            f"several threads of one name call accel at once ({', '.join(alike)}), so that the ranks cannot tell whose call is "
            "whose: make such calls in one thread, one after the other, or give the threads names "
            "(threading.Thread(name=...)) that are the same on every rank"
        )
    return [theirs for _, _, theirs in messages]


def _place(what: str, thread: str) -> str:
    return f"{what!r} in the thread {thread}" if thread else repr(what)


def _gather(process: Process, what: str, block: bytes, limit: timedelta) -> list[bytearray]:
    """Every rank's block, which are equally long."""
    process.rounds += 1
    before = process.doing
    process.doing = before or repr(what)
    try:
        blocks = _exchange(process, what, block, limit)
        process.meet()
        return blocks
    finally:
        process.doing = before


def _exchange(process: Process, what: str, block: bytes, limit: timedelta) -> list[bytearray]:
    arrivals = process.store(str(process.rounds))
    mine = to_tensor(block)
    theirs = [torch.empty_like(mine) for _ in range(process.place.world_size)]
    patience = min(timedelta(seconds=1), limit / 4)
    try:
        work = dist.all_gather(theirs, mine, group=process.control, async_op=True)
        # To say who is missing, the ranks must say that they came; only those that wait for long do.
        late = not _done(work, patience)
        if late:
            arrivals.set(str(process.place.rank), "")
            late = not _done(work, limit - patience)
    except RuntimeError as error:
        arrivals.set(str(process.place.rank), "")
        if ended() or "imed out" not in str(error):
            raise lost(process.doing, error) from error
        late = True
    if late:
        raise _too_late(process, what, limit, arrivals, patience)
    return [to_bytes(tensor) for tensor in theirs]


def _done(work: Any, span: timedelta) -> bool:
    try:
        work.wait(span)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(span)  # it ended while this rank gave up: well, or with an error of its own
    return True


def lost(what: str, error: RuntimeError) -> AccelError:
    """The error of a collective that another rank's end broke; ends the groups."""
    reason = reason_of(error)
    end_groups(reason)
    kind = RankMismatchError if mismatched() else AccelError
    return kind(f"rank {rank()} cannot go on in {what}: {reason}")


def is_lost(error: BaseException | None) -> bool:
    """Whether an error comes of connections that closed or ran out of time, which say nothing of the cause."""
    if not isinstance(error, RuntimeError):
        return False
    process = running()
    if process is None or process.control is None:
        return bool(ended())
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST)


@final
class Waiting:
    """Context: this rank is in what needs the others. The watch tells where; a lost connection raises accel's error.

    Args:
        process: of this rank.
        what: where it is, for messages.
    """

    __slots__ = ("_before", "_process", "_what")

    def __init__(self, process: Process, what: str) -> None:
        self._process, self._what = process, what
        self._before = ""

    def __enter__(self) -> None:
        self._before, self._process.doing = self._process.doing, self._what

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._process.doing = self._before
        if isinstance(error, RuntimeError) and is_lost(error):
            raise lost(self._what, error) from error


def announce(process: Process, what: str, details: Hashable = None) -> None:
    """Say that a collective of an engine is next. Compares where it is not the one that was to be expected.

    Args:
        process: of this rank.
        what: names it, the same on every rank.
        details: what else must be equal on all ranks.

    Raises:
        RankMismatchError: another rank is about to do something else.
        AccelError: a rank ended, or did not come in time.
    """
    event = (what, details)
    if process.order.expects(event):
        return
    usual = process.order.expected
    with Waiting(process, f"front of {what}{f', where {usual[0]} came before' if usual else ''}"):
        try:
            agree(what if details is None else f"{what} {details}", None)
        except RankMismatchError as error:
            end_groups(str(error), mismatch=True)  # a third rank may be in what these do not come to
            raise
    process.order.learn(event)


def _too_late(
    process: Process, what: str, limit: timedelta, arrivals: distributed_c10d.Store, patience: timedelta
) -> TimeoutError:
    seconds = f"{limit.total_seconds():g} s"
    end_groups(f"not every rank came to {what!r} within {seconds}")
    time.sleep(patience.total_seconds())  # the ranks that came in the meantime say so now
    missing: list[str] = []

    def look() -> None:
        with contextlib.suppress(RuntimeError):
            missing.extend(str(r) for r in range(process.place.world_size) if not arrivals.check([str(r)]))

    # The store may be on a host that is gone.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(5)
    who = f"rank {', '.join(missing)} did not come" if missing else "some rank did not come"
    return TimeoutError(
        f"rank {process.place.rank} waited {seconds} in {what!r}, but {who}; the process groups were ended so that no "
        "rank hangs. Every rank must make this call: look for a call on one rank only (`if accel.is_main():`), a rank "
        "with fewer steps, or one that needs longer than accel.init(timeout=...)"
    )


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
    if not isinstance(flag, bool):
        raise AccelError(f"accel.any_rank expects a bool, got a {type(flag).__name__}: any_rank(bool(condition))")
    return any(agree("any_rank", flag))


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
            raise AccelError(f"main_first: the body failed on rank {number}, which was first: {text}")
    if not first:
        yield


# -- All ranks are in the same place with the same value, or every rank ends with an error -----------------------------


def require_equal(what: str, value: Any, explain: Callable[[list[Any]], str] = str) -> None:
    """Compare ``value`` over the ranks.

    Raises:
        RankMismatchError: another rank has another value, or did not come; the process groups are ended, so that
            a rank that waits elsewhere fails too.
    """
    try:
        values = agree(what, value)
    except TimeoutError as error:
        raise RankMismatchError(f"{what} did not happen on every rank: {error}") from error
    if any(v != value for v in values):
        message = f"{what}: the ranks differ: {explain(values)}; make the same change on every rank"
        end_groups(message, mismatch=True)
        raise RankMismatchError(message)
