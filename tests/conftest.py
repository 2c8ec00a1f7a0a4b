from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed import close_all


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    yield
    close_all()
