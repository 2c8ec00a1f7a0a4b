from __future__ import annotations

from collections.abc import Iterator

import pytest

import accel


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    """Tests in this process leave no engine and no process behind."""
    yield
    accel.teardown()
