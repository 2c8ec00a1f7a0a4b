"""The tested versions of torch, DeepSpeed and fairscale."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from typing import Final

from ...errors import BackendError

logger = logging.getLogger("accel")

#: The oldest and the newest tested version of torch by backend, "" for all others.
_TORCH: Final = {"": ("2.11", "2.15"), "horovod": ("2.11", "2.13"), "xla": ("2.9", "2.9")}
_TOO_NEW: Final = "backend=%r was tested with %s up to %s, but %s is installed"


def check_torch(backend: str) -> None:
    """Check the installed version of torch for a backend."""
    check_version(backend, "torch", *_TORCH.get(backend, _TORCH[""]))


@functools.cache
def check_version(backend: str, package: str, oldest: str, newest: str) -> None:
    """Raise BackendError for an older package. Warn for a newer package."""
    version = importlib.metadata.version(package)
    if _numbers(version) < _numbers(oldest):
        raise BackendError(
            f"backend={backend!r} needs {package} {oldest} or newer, "
            f"but {version} is installed. Run "
            f"pip install '{package}>={oldest}'."
        )
    tested = _numbers(newest)
    # 2.13.1 is not newer than 2.13.
    if _numbers(version)[: len(tested)] > tested:
        logger.warning(_TOO_NEW, backend, package, newest, version)


def _numbers(version: str) -> list[int]:
    public = version.partition("+")[0]
    return list(map(int, re.findall(r"\d+", public)))
