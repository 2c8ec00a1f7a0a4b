"""Runs a function in fresh processes, as the only one or as the ranks of a gloo group."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

from tests.distributed import outcomes

from .section import Data, brief

LIMIT_SECONDS = 3600.0


def _call(world: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    else:
        # Accelerate takes them for a group.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    return fn(*args)


def run(world: int, fn: Callable[..., Any], *args: Any, seconds: float = LIMIT_SECONDS) -> list[Any]:
    """Return the results of ``fn(*args)`` on each rank. ``fn`` is at the top level of a module.

    Raises:
        RuntimeError: a rank failed (with its traceback), died or was late.
    """
    try:
        results = outcomes(world, _call, world, fn, args, timeout=seconds, breaks=True)
    except AssertionError as error:
        raise RuntimeError(str(error)) from None
    for result in results:
        if result.error:
            raise RuntimeError(result.trace or result.message)
    return [result.value for result in results]


def attempt(data: Data, name: str, world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function as `run` does. If it fails, note that in the section's figures and return nothing."""
    try:
        return run(world, fn, *args)
    except RuntimeError as error:
        data["failed"][name] = brief(str(error))
        return []


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for files of a benchmark, in ``ACCEL_BENCH_DIR`` if it is set."""
    return tempfile.TemporaryDirectory(prefix="accel-bench-", dir=os.environ.get("ACCEL_BENCH_DIR"))
