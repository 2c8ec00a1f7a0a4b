from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed import close_all

# They are no part of a run on a machine without a GPU; `make test-gpu` fails there, finding no test.
collect_ignore = [] if torch.cuda.is_available() else ["gpu"]


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    yield
    close_all()
