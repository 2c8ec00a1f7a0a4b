"""accel's errors, and helpers for messages and arguments."""

from __future__ import annotations

import builtins
import operator
import re
from typing import Any


class AccelError(Exception):
    """Base class of accel's errors."""

    #: The rank that failed, or None if it is this rank.
    failed_rank: int | None = None


class AlreadySetUpError(AccelError):
    """The model or dataloader is already set up with different options."""


class SharedParametersError(AccelError):
    """A module shares parameters with a module of an earlier ``setup``."""


class RankMismatchError(AccelError):
    """The ranks have different models or arguments, or make different calls."""


class OptimizerError(AccelError):
    """The optimizer doesn't fit the model or the backend."""


class BackendError(AccelError):
    """The backend is unknown or not installed, or doesn't support the call."""


class DeviceError(AccelError):
    """A device doesn't exist or is in use, or ``devices`` is invalid."""


class PrecisionError(AccelError):
    """The precision is unknown, or the model or the loop doesn't fit it."""


class LoaderError(AccelError):
    """The dataloader can't be distributed this way."""


class CheckpointError(AccelError):
    """A checkpoint can't be written, read or trusted."""


class LaunchError(AccelError):
    """Worker processes could not be started, or failed."""


class TimeoutError(AccelError, builtins.TimeoutError):
    """A rank did not reach a collective in time."""


# -- Helpers for messages and arguments ------------------------------------------------------------


def described(value: object) -> str:
    """Return a value's class for a message, such as "a torch.nn.Linear"."""
    if value is None:
        return "None"
    kind = value if isinstance(value, type) else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    article = "an" if name[0] in "aeiou" else "a"
    return f"{'the class' if kind is value else article} {name}"


def whole_number(value: Any) -> int:
    """Return a Python or NumPy integer as an int, or -1 for other values."""
    try:
        # operator.index(True) is 1, but accumulate(loader, True) is a mistake.
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


def text_of_error(error: BaseException | None) -> str:
    """Return an error's text for the other ranks, empty for None."""
    return "" if error is None else f"{type(error).__name__}: {error}"


# -- Paths -----------------------------------------------------------------------------------------


def is_url(path: str) -> bool:
    """True if a path is a URL with both slashes."""
    return bool(re.match("[A-Za-z][A-Za-z0-9+._-]+://", path))


def refuse_url(path: str, error: type[AccelError]) -> str:
    """Return a path, or raise ``error`` if it is a URL."""
    # Path("s3://bucket") loses a slash, and fsspec has chains such as "simplecache::s3://bucket".
    if re.match("[A-Za-z][A-Za-z0-9+._-]+:[/:]", path):
        raise error(
            f"{path} can't be used as a local path. Pass a URL as a string "
            "such as 's3://bucket/run', or a path on this machine."
        )
    return path
