"""Steps of all ranks, of which one's failure is everyone's; what a message says of a failure, and a person sees of progress."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pickle import PickleError
from typing import Any, Final, TypeVar, final

from ..errors import AccelError, CheckpointError
from ..process import rank, running, world_size
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
    what: str, look: Callable[[], tuple[Mapping[str, object], Hashable]], act: Callable[[int, int], T]
) -> T:
    """Run ``look``, then ``act`` on every rank if accel runs over several, else here, without a process group.

    ``look`` gives the arguments, which are to be the same on all ranks, and something else: ``act`` is given this rank's number
    among those for which that is the same, and how many they are.
    """
    process = running()
    if process is not None and process.place.world_size > 1:
        (_, mine), told = exchange(f"{what} (the beginning)", lambda: (look(),) * 2)
        check_arguments(what, [arguments for arguments, _ in told])
        alike = [number for number, (_, theirs) in enumerate(told) if theirs == mine]
        return on_every_rank(what, lambda: act(alike.index(process.place.rank), len(alike)))
    try:
        look()
        return act(0, 1)
    except OSError as error:
        raise CheckpointError(f"{what}: {explain(error)}") from error


def beside_others() -> str:
    """What an error of something that is there already says where other processes of the job may be at the same work."""
    if running() is not None or world_size() == 1:
        return ""
    alone = "accel does not run yet, so that each process that comes here does this alone"
    return f" ({alone}: accel.init() above it lets them do it together)"


def on_any_rank(what: str, here: bool) -> bool:
    """Whether something holds on any of the ranks, if accel runs over several, else whether it holds here. Collective."""
    process = running()
    if process is None or process.place.world_size == 1:
        return here
    return any(exchange(what, lambda: (None, here))[1])


def check_flags(**flags: object) -> None:
    """Refuse options that are to be True or False, and are neither: a text would count as True."""
    for name, value in flags.items():
        if type(value) is not bool:
            raise CheckpointError(f"{name}={value!r}: expected True or False")


def check_arguments(what: str, told: Sequence[Mapping[str, object]]) -> None:
    """Refuse that the ranks call ``what`` with other arguments, by their names."""
    for name in told[0]:
        check_options(what, name, [arguments[name] for arguments in told])


def check_options(what: str, names: str, told: Sequence[object]) -> None:
    """Refuse that the ranks give ``what`` other options, ``names``."""
    be = "are" if " and " in names else "is"
    for number, options in enumerate(told):
        if options != told[0]:
            raise CheckpointError(
                f"{what}: {names} {be} {told[0]} on rank 0, and {options} on rank {number}; give every rank the same"
            )


def explain(error: BaseException) -> str:
    """An error of the system or of the user's code, as a part of a sentence."""
    if isinstance(error, AccelError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        full = error.errno == errno.ENOSPC and str(error.filename).startswith("/dev/shm/")
        advice = _SHARED_MEMORY if full else _ADVICE.get(error.errno or 0)
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}{f'; {advice}' if advice else ''}"
    return f"{type(error).__name__}: {error}"


_SHARED_MEMORY: Final = (
    "save to disk, or give shared memory room for two checkpoints (docker: --shm-size); what runs left there whose directory was "
    f"removed is in /dev/shm/accel-{os.geteuid()}, until you remove it"
)
_ADVICE: Final = {
    errno.ENOSPC: "free space on that file system, or choose a directory on another one",
    errno.EDQUOT: "this user's quota there is used up: remove files, or choose a directory on another file system",
    errno.EFBIG: "files there cannot be so large (ulimit -f, or the file system's own limit): choose another directory",
    errno.EROFS: "that file system cannot be written to: choose a directory on another one",
    errno.EEXIST: "that is no directory: choose another name",
    errno.ENOTDIR: "a part of this path is a file: choose another directory",
    errno.EACCES: "this user may not do that: change the permissions, or choose another directory",
    errno.EPERM: "this user may not do that: change the permissions, or choose another directory",
    errno.EIO: "the disk or its server failed, of which the system's log tells more: choose another file system",
    errno.ESTALE: "the server of that file system has lost the file: mount it again, or choose another one",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "this process has too many open files: raise ulimit -n",
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


@final
class DamageError(CheckpointError):
    """Bytes in a file are not those that were saved."""


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


# -- What a person sees: a bar while long work goes on, on a terminal or in a notebook, and a line in the log at its end -

#: Hears how many more bytes are done.
Progress = Callable[[int], Any]
_DELAY: Final = 2.0  # seconds; what is done by then has no bar


@contextlib.contextmanager
def progress_bar(what: str, total: int | None = None, *, shown: bool = True) -> Iterator[Progress]:
    """Context: shows how many of ``total`` bytes rank 0 has done, where somebody may watch and tqdm is installed."""
    if not (shown and rank() == 0 and os.environ.get("ACCEL_QUIET", "") in ("", "0") and _is_watched()):
        yield lambda nbytes: None
        return
    try:
        with warnings.catch_warnings():  # of a notebook without widgets, where the bar is one of text
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    except ImportError:
        yield lambda nbytes: None
        return
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False, delay=_DELAY) as bar:
        yield bar.update


def _is_watched() -> bool:
    """Whether somebody may look at standard error, which a program may have closed, or replaced by what has only ``write``."""
    with contextlib.suppress(AttributeError, TypeError, ValueError, OSError):
        return hasattr(sys, "ps1") or bool(sys.stderr.isatty())  # ps1: as in a notebook
    return False


def log_end(directory: str, done: str, nbytes: int, begin: float) -> None:
    """Say what was done to a checkpoint since ``begin``, by ``time.monotonic``; on rank 0."""
    if rank() == 0:
        seconds = time.monotonic() - begin
        rate = nbytes / max(seconds, 1e-9) / 1e6
        logger.info("%s: %s, %.1f MB in %.2f s (%.0f MB/s)", directory, done, nbytes / 1e6, seconds, rate)
