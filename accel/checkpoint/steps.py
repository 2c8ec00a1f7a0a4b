"""Steps of all ranks, of which one's failure is everyone's, and what a message says of a failure."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pickle import PickleError
from typing import Final, TypeVar

from ..errors import AccelError, CheckpointError
from ..process import rank, running
from ..process.control import agree, raise_together

logger = logging.getLogger("accel")

T = TypeVar("T")
M = TypeVar("M")


def exchange(what: str, act: Callable[[], tuple[T, M]]) -> tuple[T, list[M]]:
    """Run ``act``, a local step that ``what`` names, on every rank, and go on only if it succeeded on all. Collective.

    ``act`` returns what this rank keeps, and what it tells the others; returned are the one, and what every rank told.
    CheckpointError where it failed here, or on another rank, which is named.
    """
    problem: AccelError | None = None
    answer: tuple[T, M] | None = None
    try:
        answer = act()
    except AccelError as error:
        problem = error
    except Exception as error:
        problem = CheckpointError(f"{what}: {explain(error)}")
        problem.__cause__ = error
    replies = agree(what, (str(problem) if problem else "", answer[1] if answer else None))
    raise_together(what, problem, [text for text, _ in replies], CheckpointError)
    assert answer is not None
    return answer[0], [told for _, told in replies]


def on_every_rank(what: str, act: Callable[[], T]) -> T:
    """``exchange`` of nothing: run ``act`` on every rank, and go on only if it succeeded on all. Collective."""
    return exchange(what, lambda: (act(), None))[0]


def on_running_ranks(
    what: str, look: Callable[[], Mapping[str, object]], act: Callable[[int, int], T]
) -> T:
    """Run ``look``, then ``act`` on every rank if accel runs over several, else here, without a process group.

    ``look`` gives the arguments, which are to be the same on all ranks; ``act`` is given the rank and the world size.
    """
    process = running()
    if process is not None and process.place.world_size > 1:
        _, told = exchange(f"{what} (the beginning)", lambda: (None, look()))
        check_arguments(what, told)
        return on_every_rank(what, lambda: act(process.place.rank, process.place.world_size))
    try:
        look()
        return act(0, 1)
    except OSError as error:
        raise CheckpointError(f"{what}: {explain(error)}") from error


def check_arguments(what: str, told: Sequence[Mapping[str, object]]) -> None:
    """Raise if the ranks call ``what`` with different arguments, which ``told`` has by name for each rank."""
    for number, arguments in enumerate(told):
        for name, value in arguments.items():
            if value != (first := told[0][name]):
                raise CheckpointError(
                    f"{what}() got {name}={first!r} on rank 0 and {name}={value!r} on rank {number}. Pass the same {name} on "
                    "every rank."
                )


def explain(error: BaseException) -> str:
    """An error of the system or of the user's code, as a part of a sentence."""
    if isinstance(error, AccelError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        advice = _ADVICE.get(error.errno or 0)
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}{f'; {advice}' if advice else ''}"
    return f"{type(error).__name__}: {error}"


_ADVICE: Final = {
    errno.ENOSPC: "free space on that file system, or choose a directory on another one",
    errno.EDQUOT: "this user's quota there is used up: remove files, or choose a directory on another file system",
}


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context: errors of the system name this path, where they name none (writing to an open file, say)."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


#: What code raises that is given other data than it expects.
MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    PickleError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


@contextlib.contextmanager
def parsing(what: str) -> Iterator[None]:
    """Context: where data is not as the code in it expects, a CheckpointError says that it is ``what``, and why."""
    try:
        yield
    except MALFORMED as error:
        raise CheckpointError(f"{what} ({type(error).__name__}: {error})") from error


def log_end(directory: str, done: str, nbytes: int, begin: float) -> None:
    """Say what was done to a checkpoint since ``begin``, by ``time.monotonic``; on rank 0."""
    if rank() == 0:
        seconds = time.monotonic() - begin
        rate = nbytes / max(seconds, 1e-9) / 1e6
        logger.info(
            "%s: %s, %.1f MB in %.2f s (%.0f MB/s)", directory, done, nbytes / 1e6, seconds, rate
        )
