"""What only CUDA devices can show. Each test says how many it needs, and is skipped with that number where there are fewer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


def gpus(needed: int) -> pytest.MarkDecorator:
    """The mark of tests that need so many devices."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < needed, reason=f"needs {needed} CUDA devices, found {found}")


@contextlib.contextmanager
def no_reads() -> Iterator[None]:
    """Inside, torch raises where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
