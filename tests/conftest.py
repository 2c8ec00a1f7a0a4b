from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator

import pytest

import accel
from tests.distributed import close_all, freeze_modules

with contextlib.suppress(ImportError):  # not in the environments of the packages that need one of their own
    from hypothesis import HealthCheck, settings

    # The same examples each time, and no limit of time, which a busy machine misses; random ones are for longer searches.
    steady = "ACCEL_TEST_FUZZ" not in os.environ
    settings.register_profile("steady", deadline=None, derandomize=steady, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("steady")


def pytest_collection_finish() -> None:
    """Engines collect garbage where they end: not what the first optimizer would import."""
    importlib.import_module("torch._dynamo")


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    """A test leaves no engine in this process."""
    freeze_modules()
    yield
    accel.teardown()
