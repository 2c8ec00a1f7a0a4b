"""Steps that fail on all ranks if they fail on one, and texts of errors."""

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

#: Takes the name of a step and this rank's value. Returns every rank's value.
Gather = Callable[[str, object], list[Any]]
ARGUMENTS: Final = (
    "{name}={first!r} on rank 0 and {name}={other!r} on rank {rank}. "
    "Pass the same {name} on every rank."
)
_GROUP: Final = "accel background"


def exchange(
    step: str, act: Callable[[], tuple[T, M]], gather: Gather = agree
) -> tuple[T, list[M]]:
    """Run ``act``. Return its value, and the messages of all ranks. Collective.

    ``act`` returns a value for this rank and a message to all ranks. If it raises on a rank,
    all ranks raise an error. ``step`` is a name for errors.
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
    """Run ``act`` and return its value, like ``exchange`` without messages. Collective."""
    return exchange(step, lambda: (act(), None), gather)[0]


def on_running_ranks(function: str, act: Callable[[int, int], None]) -> None:
    """Run ``act(rank, world_size)``. Collective if accel is initialized."""
    if running() is None:
        on_every_rank(function, lambda: act(0, 1), lambda step, value: [value])
    else:
        on_every_rank(function, lambda: act(rank(), world_size()))


def check_equal(messages: Sequence[Any], texts: Mapping[str, str]) -> None:
    """Raise if a dict attribute differs between ranks. Its text gets the difference."""
    for attribute, text in texts.items():
        firsts = getattr(messages[0], attribute)
        for number, message in enumerate(messages):
            # Keys are not compared: a directory may have different names on different nodes.
            others = getattr(message, attribute).values()
            for (name, first), other in zip(firsts.items(), others, strict=True):
                if other != first:
                    values = {"name": name, "first": first, "other": other}
                    raise CheckpointError(text.format(rank=number, **values))


def digest(value: Any) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause garbage collection, which would scan all objects repeatedly."""
    was_on = gc.isenabled()  # it doubled the time to save 3,000 tensors
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def background_gather(process: Process) -> Gather:
    """Return a gather for a thread, on a separate process group. Collective."""
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
            # With CheckpointError the save would remove its file. But rank 0 may still commit.
            raise AccelError(f"{step}: {reason_of(error)}") from error

    return gather


def explain(error: BaseException) -> str:
    """Return the text of an error, without the class of AccelError and OSError."""
    if isinstance(error, AccelError):
        return str(error)
    if not isinstance(error, OSError) or not error.strerror:
        return f"{type(error).__name__}: {error}"
    text = error.strerror
    if error.filename:
        text += f": {error.filename}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += ". Free space there, or choose a different file system."
    return text


@contextlib.contextmanager
def parsing(problem: str) -> Iterator[None]:
    """Raise CheckpointError with ``problem`` if the code fails on unknown data."""
    try:
        yield
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{problem} ({type(error).__name__}: {error})") from error


def log_end(directory: str, done: str, nbytes: int, begin: float) -> None:
    """Log the end of a call on rank 0. ``begin`` is its start, by ``time.monotonic``."""
    if rank() == 0:
        megabytes, seconds = nbytes / 1e6, time.monotonic() - begin
        text = "%s: %s, %.1f MB in %.2f s (%.0f MB/s)"
        logger.info(text, directory, done, megabytes, seconds, megabytes / seconds)
