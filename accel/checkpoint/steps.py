"""Steps of all ranks, where the failure of one rank is the failure of all, and texts of errors."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch.distributed as dist

from ..errors import AccelError, CheckpointError
from ..process import Process, rank, reason_of, running, world_size
from ..process.control import agree, raise_together
from ..process.packing import gather_values

logger = logging.getLogger("accel")

T = TypeVar("T")
M = TypeVar("M")

#: Gives every rank's value of a step.
Gather = Callable[[str, object], list[Any]]
ARGUMENTS: Final = (
    "{name}={first!r} on rank 0 and {name}={other!r} on rank {rank}. "
    "Pass the same {name} on every rank."
)
_GROUP: Final = "accel background"


def exchange(
    step: str, act: Callable[[], tuple[T, M]], gather: Gather = agree
) -> tuple[T, list[M]]:
    """Return ``act()`` of this rank, and the messages of all ranks. Collective.

    ``act`` returns a value for this rank and a message to the others. If it fails on a rank,
    CheckpointError is raised on every rank. ``step`` names it in errors.
    """
    problem: AccelError | None = None
    answer: Any = (None, None)
    try:
        # A rank that raises here must still answer, because the others wait for it.
        answer = act()
    except AccelError as error:
        problem = error
    except Exception as error:
        problem = CheckpointError(f"{step}: {explain(error)}")
        problem.__cause__ = error
    replies = gather(step, (str(problem or ""), answer[1]))
    problems, messages = zip(*replies, strict=True)
    raise_together(step, problem, problems, CheckpointError)
    return answer[0], list(messages)


def on_every_rank(step: str, act: Callable[[], T], gather: Gather = agree) -> T:
    """Return ``act()`` of this rank, like ``exchange`` without a message. Collective."""
    return exchange(step, lambda: (act(), None), gather)[0]


def on_running_ranks(function: str, act: Callable[[int, int], None]) -> None:
    """Run ``act`` with the rank and the world size, on all ranks if accel runs on several."""
    if running() is None:
        on_every_rank(function, lambda: act(0, 1), lambda step, value: [value])
    else:
        on_every_rank(function, lambda: act(rank(), world_size()))


def check_equal(messages: Sequence[Any], texts: Mapping[str, str]) -> None:
    """Raise if an attribute, a dict, differs on a rank. Its text gets the first difference."""
    for attribute, text in texts.items():
        firsts = getattr(messages[0], attribute)
        for number, message in enumerate(messages):
            # The directories of ranks on several nodes may have different names.
            others = getattr(message, attribute).values()
            for (name, first), other in zip(firsts.items(), others, strict=True):
                if other != first:
                    values = {"name": name, "first": first, "other": other}
                    raise CheckpointError(text.format(rank=number, **values))


def digest(value: Any) -> str:
    """Return a short name of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause garbage collection, which looks through all objects of the program again and again."""
    was_on = gc.isenabled()  # a save of 3,000 tensors took twice the time
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# -- exchanges in a thread, while the main thread trains -------------------------------------------


def background_gather(process: Process) -> Gather:
    """Return a gather for a thread, on a process group of its own. Collective."""
    if process.control is None:
        return lambda step, value: [value]
    for group in process.subgroups:
        if group.group_desc == _GROUP:
            break
    else:
        group = dist.new_group(timeout=process.timeout, backend="gloo", group_desc=_GROUP)
        process.subgroups.append(group)

    def gather(step: str, value: object) -> list[Any]:
        try:
            return gather_values(value, group, process.timeout)
        except RuntimeError as error:
            # No CheckpointError: rank 0 may have got all answers, and commit.
            raise AccelError(f"{step}: {reason_of(error)}") from error

    return gather


def explain(error: BaseException) -> str:
    """Return an error as a part of a sentence."""
    if isinstance(error, AccelError):
        return str(error)
    if not isinstance(error, OSError) or not error.strerror:
        return f"{type(error).__name__}: {error}"
    text = error.strerror
    if error.filename:
        text += f": {error.filename}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += "; free space on that file system, or choose a directory on another one"
    return text


@contextlib.contextmanager
def parsing(problem: str) -> Iterator[None]:
    """Raise CheckpointError with ``problem`` if code does not expect the data."""
    try:
        yield
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{problem} ({type(error).__name__}: {error})") from error


def log_end(directory: str, done: str, nbytes: int, begin: float) -> None:
    """Log the end of a call on rank 0. ``begin`` is its begin, by ``time.monotonic``."""
    if rank() == 0:
        megabytes, seconds = nbytes / 1e6, time.monotonic() - begin
        text = "%s: %s, %.1f MB in %.2f s (%.0f MB/s)"
        logger.info(text, directory, done, megabytes, seconds, megabytes / seconds)
