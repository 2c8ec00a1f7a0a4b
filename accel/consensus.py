"""All ranks are in the same place with the same value, or every rank ends with an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .control import agree
from .errors import RankMismatchError, TimeoutError
from .process import end_groups


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
