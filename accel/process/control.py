"""Exchange small values on accel's own process group, and raise errors on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeGuard

import torch.distributed as dist

from ..errors import AccelError, RankMismatchError, text_of_error
from . import Process, current, end_groups, ended, local_rank, rank, world_size
from . import lost as lost
from .packing import gather_values


def agree(what: str, value: object, *, timeout: timedelta | None = None) -> list[Any]:
    """Return every rank's value, by rank. Collective.

    ``what`` names the place in the program. It must be equal on all ranks.
    """
    process = current()
    if process.control is None:
        return [value]
    process.rounds += 1
    with Waiting(process, process.doing or repr(what)):
        messages = gather_values((what, value), process.control, timeout or process.timeout)
    places, values = map(list, zip(*messages, strict=True))
    if places.count(what) < len(places):
        text = "; ".join(f"rank {r} is in {place!r}" for r, place in enumerate(places))
        raise RankMismatchError(f"the ranks are at different points in the program: {text}")
    return values


def is_lost(error: BaseException | None) -> TypeGuard[RuntimeError]:
    """True if a connection was closed, or a collective timed out."""
    # With a single process, NCCL errors come from DataParallel, and no rank is lost.
    if not isinstance(error, RuntimeError) or (world_size() == 1 and not ended()):
        return False
    text = str(error)
    # gloo's errors start with the path of its source file. Work.wait(timeout) raises the other.
    is_gloo = "gloo/transport" in text or "Operation timed out!" in text
    return bool(ended()) or is_gloo or "NCCL" in text or isinstance(error, dist.DistError)


def raise_lost(what: str, error: BaseException | None) -> None:
    """Raise accel's error with the reason if a connection was lost."""
    if is_lost(error):
        raise lost(what, error) from error


class Waiting:
    """A context for collectives. A lost connection raises accel's error."""

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
    """Announce the next collective of an engine. Collective if it wasn't predicted.

    ``details`` must be equal on all ranks, too.
    """
    event = (what, details)
    if process.order.expects(event):
        return
    with Waiting(process, f"the check before {what}"):
        try:
            agree(what if details is None else f"{what} {details}", None)
        except RankMismatchError as error:
            # Other ranks may wait in a collective that these ranks will never join.
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
    """Raise if a rank failed: ``own`` on that rank, and ``kind`` on the other ranks.

    ``problems`` has each rank's error as a string, or an empty string.
    """
    if own is not None:
        raise own
    for number, text in enumerate(problems):
        if text:
            error = kind(f"{what} failed on rank {number}: {text}")
            error.failed_rank = number
            raise error


def require_equal(
    what: str, value: Any, explain: Callable[[list[Any]], str] = str, beside: Any = None
) -> list[Any]:
    """Raise if the ranks' values differ. Return every ``beside``. Collective."""
    values, others = map(list, zip(*agree(what, (value, beside)), strict=True))
    if values.count(value) < len(values):
        # Other ranks may wait in a collective that these ranks will never join.
        message = f"{what}: the ranks differ: {explain(values)}. Make the same change on all ranks."
        end_groups(message, mismatch=True)
        raise RankMismatchError(message)
    return others


# -- functions for training loops ------------------------------------------------------------------


def barrier() -> None:
    """Wait until every rank arrives. Collective."""
    agree("barrier", None)


def any_rank(flag: bool) -> bool:
    """True if the flag is true on any rank. Collective.

    Use it to stop all ranks if a single rank must stop, as in ``any_rank(loss.isnan())``.
    """
    return any(agree("any_rank", bool(flag)))


@contextlib.contextmanager
def main_first(*, local: bool = False) -> Iterator[None]:
    """Run the body on rank 0 first, then on all other ranks. Collective.

    If the body fails on a first rank, the other ranks skip it and raise AccelError.

    Args:
        local: run the body on each node's first rank first.
    """
    is_first = (local_rank() if local else rank()) == 0
    problem = ""
    try:
        if is_first:
            yield
    except BaseException as error:
        problem = text_of_error(error)
        raise
    finally:
        problems = agree("main_first", problem)
    raise_together("main_first", None, problems, AccelError)
    if not is_first:
        yield
