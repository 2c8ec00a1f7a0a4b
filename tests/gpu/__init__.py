"""What only CUDA devices can show. Each test says how many it needs, and is skipped with that number where there are fewer."""

from __future__ import annotations

import pytest
import torch


def gpus(needed: int) -> pytest.MarkDecorator:
    """The mark of tests that need so many devices."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < needed, reason=f"needs {needed} CUDA devices, found {found}")
