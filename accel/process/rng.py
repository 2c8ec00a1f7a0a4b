"""Random number generators."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any, final

import torch

from ..errors import AccelError
from . import device, rank


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
    _seed((n + rank()) % 2**32 if per_rank else n)


def _seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(number)


@final
class RngState:
    """The random generators of this process: Python's, torch's on the CPU and the rank's device, NumPy's where it is in use."""

    def state_dict(self) -> dict[str, Any]:
        """Their state now."""
        numpy, place = sys.modules.get("numpy"), device()
        return {
            "python": random.getstate(),
            "numpy": None if numpy is None else numpy.random.get_state(),
            "torch": torch.get_rng_state(),
            "device": None if place.type == "cpu" else torch.get_device_module(place).get_rng_state(place).cpu(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Bring them to a saved state; those that it does not have stay as they are."""
        place = device()
        random.setstate(state_dict["python"])
        torch.set_rng_state(state_dict["torch"])
        if state_dict["numpy"] is not None:
            import numpy

            numpy.random.set_state(state_dict["numpy"])
        if state_dict["device"] is not None and place.type != "cpu":
            torch.get_device_module(place).set_rng_state(state_dict["device"], place)

    def diverge(self, number: int) -> None:
        """Seed them from their state and ``number``, so that two processes with one state draw different numbers."""
        content = bytes(torch.get_rng_state().tolist()) + str(number).encode()
        _seed(int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "big"))


def rng_state() -> RngState:
    """The random generators as something that ``save`` stores, for each rank its own, and ``load`` brings back.

    Use it as ``{"model": model, ..., "rng": accel.rng_state()}`` in both. What is stored is the state when ``save`` is called.
    A rank that the saving job did not have gets numbers that no other rank draws.
    """
    return RngState()
