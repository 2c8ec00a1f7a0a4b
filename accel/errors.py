"""Every error that accel raises on purpose: an AccelError, and one class of it for each kind of mistake."""

from __future__ import annotations

import builtins
import dataclasses
import difflib
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final


class AccelError(Exception):
    """Base of every error raised on purpose by accel."""

    #: The rank of whose failure this one tells, where that is another one.
    failed_rank: int | None = None


class AlreadySetUpError(AccelError):
    """The model already has a live engine with another backend, precision or options."""


class SharedParametersError(AccelError):
    """A module shares parameters with, or contains, a module that has a live engine."""


class RankMismatchError(AccelError):
    """The ranks disagree: another model, backend, precision, trainable mask or call."""


class OptimizerError(AccelError):
    """The optimizer does not fit the model or the engine."""


class BackendError(AccelError):
    """The backend is unknown, not installed, or cannot do what was asked."""


class DeviceError(AccelError):
    """A device that does not exist, is taken, or was not asked for in a known form."""


class PrecisionError(AccelError):
    """The precision is unknown, or the model or the loop does not honour it."""


class LoaderError(AccelError):
    """The dataloader cannot be distributed as asked."""


class CheckpointError(AccelError):
    """A checkpoint cannot be written, read or trusted."""


class LaunchError(AccelError):
    """Worker processes could not be started, or one of them failed."""


class TimeoutError(AccelError, builtins.TimeoutError):
    """A rank did not arrive at a collective of accel in time."""


# -- What users give ---------------------------------------------------------------------------------------------------


def described(other: object) -> str:
    """What something is, by its class."""
    if other is None:
        return "None"
    kind, what = (other, "the class") if isinstance(other, type) else (type(other), "")
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{what or ('an' if name[0] in 'aeiou' else 'a')} {name}"


def whole_number(value: Any) -> int:
    """The int that a value is, as those of NumPy are; -1 where it is none."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


def refuse_unknown(kind: type, args: Sequence[object], given: Iterable[str], error: type[AccelError]) -> None:
    """Refuse other options than a dataclass of options has, and those without a name."""
    known = [option.name for option in dataclasses.fields(kind)]
    if args:
        raise error(f"{kind.__name__}({args[0]!r}): options go by their names: {', '.join(known)}")
    for name in given:
        if name not in known:
            meant = [one for one in known if name.startswith(f"{one}_")] or difflib.get_close_matches(name, known, 1)
            guess = f"did you mean {meant[0]}?" if meant else f"its options are {', '.join(known)}"
            raise error(f"{kind.__name__}({name}=...): there is no such option; {guess}")


def text_of_error(error: BaseException | None) -> str:
    """An error as the ranks tell each other of it; empty where there is none."""
    return "" if error is None else f"{type(error).__name__}: {error}"


# -- Paths that users name ---------------------------------------------------------------------------------------------

#: Also as a Path has it, which makes one slash of two, and a chain of them: "simplecache::s3://bucket".
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+._-]+):(/|:)")


def is_url(path: str) -> bool:
    """Whether a path is a URL of one store: neither a chain of them, nor what a Path has made of one."""
    return bool(re.match("[A-Za-z][A-Za-z0-9+._-]+://", path))


def refuse_url(path: str, error: type[AccelError]) -> str:
    """The same path; ``error`` where it is a URL, of which the system would make a local directory named ``s3:``."""
    if match := _URL.match(path):
        how = "mount the bucket, or copy what was written there"
        if match[1].lower() == "file":
            how = f"give the path alone, {'/' + path[len(match[0]) :].lstrip('/')!r}"
        if not is_url(path):
            how = "give it as text, as 's3://bucket/run' (a Path loses a slash), and without a chain of caches"
        raise error(
            f"{path} is a URL, and accel reads and writes the file systems of this machine: {how} (a directory that does have "
            f"this name is './{path}')"
        )
    return path
