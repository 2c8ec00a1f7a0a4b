"""The backends that tests run over: every one that is found, with its default options and with its variants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import nn

import accel
from accel.engines import ENGINES, Engine, resolve
from accel.process import current
from tests.distributed import run

#: Names, and options where an engine lists variants.
BACKENDS: list[Any] = [option for name, engine in ENGINES.items() for option in (name, *engine.options_type.variants)]

#: Options with which training differs from one process. They are tested for agreement between ranks only.
APPROXIMATE: list[Any] = [options for engine in ENGINES.values() for options in engine.options_type.approximate]


def engine_of(backend: Any) -> type[Engine]:
    """The engine's class, whether or not its package is installed."""
    return next(e for e in ENGINES.values() if backend == e.name or type(backend) is e.options_type)


def _reason(backend: Any, build: Callable[[], nn.Module]) -> str:
    try:
        engine, options = resolve(backend)
        engine.check(build(), options, current())
    except accel.BackendError as error:
        return str(error)
    return ""


def small() -> nn.Module:
    """A module that every backend takes."""
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))


@functools.cache
def refused(backend: Any, world: int = 1, build: Callable[[], nn.Module] = small) -> str:
    """Why the backend cannot take such a module here, if so."""
    return run(world, _reason, backend, build)[0]


def deepspeed_alone(**arguments: Any) -> Any:
    """``deepspeed.initialize``, without its op for shared memory: that takes a minute to compile and serves only inference."""
    import deepspeed

    with mock.patch.object(deepspeed.ops, "__compatible_ops__", {}):
        return deepspeed.initialize(**arguments)


def need(backend: Any, world: int = 1, build: Callable[[], nn.Module] = small) -> None:
    """Skip the test where the backend's package or device is missing, or where it does not take such a module."""
    if reason := refused(backend, world, build):
        pytest.skip(reason)


def replica_of(backend: Any) -> tuple[int, int]:
    """This rank's data-parallel place, and how many there are; in a worker process."""
    engine, options = resolve(backend)
    return engine.replica(options, current())
