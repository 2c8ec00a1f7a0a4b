"""The backends: every module of this package is one, named as its file; but ``base``, and what has an underscore."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from typing import Any

from ..errors import BackendError
from ..process import Process
from .base import Context as Context
from .base import Engine as Engine
from .base import Options as Options

#: Wrappers that are engines in their own right: a module inside one is already distributed by someone else.
FOREIGN = frozenset(
    {
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "torch.nn.parallel.data_parallel.DataParallel",
        "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule",
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
        "fairscale.nn.data_parallel.sharded_ddp.ShardedDataParallel",
        "fairscale.nn.data_parallel.fully_sharded_data_parallel.FullyShardedDataParallel",
        "deepspeed.runtime.engine.DeepSpeedEngine",
        "lightning.fabric.wrappers._FabricModule",
        "lightning_fabric.wrappers._FabricModule",
    }
)


def _find() -> dict[str, type[Engine]]:
    found = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name == "base" or info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        found[info.name] = next(
            v
            for v in vars(module).values()
            if isinstance(v, type) and issubclass(v, Engine) and v.__module__ == module.__name__
        )
    return found


ENGINES: dict[str, type[Engine]] = _find()
OPTIONS: dict[str, type[Options]] = {e.options_type.__name__: e.options_type for e in ENGINES.values()}

#: The backend that the others are compared with: one model on all ranks, and nothing divided.
BASELINE = ENGINES["ddp"]


def resolve(backend: object) -> tuple[type[Engine], Any]:
    """The engine class and options that a ``backend=`` value asks for.

    Raises:
        BackendError: no such backend (lists the known ones), or a package that it needs is missing (says what to install).
    """
    if isinstance(backend, Options):
        engine, options = next(e for e in ENGINES.values() if e.options_type is type(backend)), backend
    elif isinstance(backend, str) and backend in ENGINES:
        engine, options = ENGINES[backend], ENGINES[backend].options_type()
    else:
        raise BackendError(
            f"unknown backend {backend!r}; expected 'auto', one of {', '.join(map(repr, ENGINES))}, "
            f"or options: {', '.join(f'accel.{name}(...)' for name in OPTIONS)}"
        )
    for module, package in engine.requires.items():
        if importlib.util.find_spec(module) is None:
            raise BackendError(
                f"backend {engine.name!r} needs {module}, which is not installed: pip install '{package}'{engine.hint}"
            )
    return engine, options


def default(process: Process) -> str:
    """The backend of ``backend="auto"``."""
    if process.device.type in ("tpu", "xla"):
        return "xla"
    if process.place.world_size > 1:
        return "ddp"
    return "dp" if len(process.devices) > 1 and _in_notebook() else "single"


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
