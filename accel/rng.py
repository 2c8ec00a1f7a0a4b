"""Random number generators."""

from __future__ import annotations

import contextlib
import random

import torch

from .errors import AccelError
from .process import rank


def seed(n: int, *, per_rank: bool = False) -> None:
    """Seeds Python, NumPy where it is installed, and torch on all devices.

    Args:
        n: From 0 to 2**32 - 1.
        per_rank: Gives each rank numbers of its own, from ``n`` plus its rank.

    Raises:
        AccelError: ``n`` is not such a number.
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**32:
        raise AccelError(f"seed({n!r}): expected an integer from 0 to 2**32 - 1")
    number = (n + rank()) % 2**32 if per_rank else n
    random.seed(number)
    torch.manual_seed(number)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(number)
