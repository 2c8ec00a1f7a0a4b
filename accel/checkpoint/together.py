"""Steps that all ranks take, of which one's failure is everyone's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..control import agree
from ..errors import AccelError, CheckpointError
from ..process import rank

T = TypeVar("T")
M = TypeVar("M")


def together(what: str, act: Callable[[], tuple[T, M]]) -> tuple[T, list[M]]:
    """Run ``act`` on every rank, and go on only if it succeeded on all. Collective.

    Args:
        what: names the step, the same on every rank.
        act: local; returns what this rank keeps, and what it tells the others.

    Returns:
        What this rank keeps, and what every rank told.

    Raises:
        CheckpointError: it failed here, or on another rank, which is named.
    """
    problem: AccelError | None = None
    cause: Exception | None = None
    answer: tuple[T, M] | None = None
    try:
        answer = act()
    except AccelError as error:
        problem = error
    except Exception as error:
        problem, cause = CheckpointError(f"{what}: {explain(error)}"), error
    replies = agree(what, (str(problem) if problem else "", answer[1] if answer else None))
    if problem is not None:
        raise problem from cause
    for number, (text, _) in enumerate(replies):
        if text:
            raise CheckpointError(f"{what} failed on rank {number}, so on every rank: {text}")
    assert answer is not None
    return answer[0], [told for _, told in replies]


def explain(error: BaseException) -> str:
    """An error of the system or of the user's code, as a part of a sentence."""
    if isinstance(error, AccelError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"


def here() -> str:
    """This rank, for messages."""
    return f"rank {rank()}"
