"""The backends: each entry of this package, a file or a folder, is one, named as it; but what serves all of them."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import importlib.util
import pkgutil
import sys
from collections import UserDict
from typing import Any, Final, final

from torch import nn

from ..errors import BackendError
from ..precision import dtype_of
from ..process import Process
from .base.engine import Context as Context
from .base.engine import Engine as Engine
from .base.engine import Options as Options
from .base.holdings import Holdings as Holdings
from .base.versions import check_torch as check_torch

#: Wrappers that are engines in their own right: a module inside one is already distributed by someone else.
FOREIGN = frozenset(
    {
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "torch.nn.parallel.data_parallel.DataParallel",
        "torch.distributed.fsdp.FSDPModule",
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
        "fairscale.nn.data_parallel.sharded_ddp.ShardedDataParallel",
        "fairscale.nn.data_parallel.fully_sharded_data_parallel.FullyShardedDataParallel",
        "deepspeed.runtime.engine.DeepSpeedEngine",
        "lightning.fabric.wrappers._FabricModule",
        "lightning_fabric.wrappers._FabricModule",
    }
)


def foreign_part(parameter: nn.Parameter) -> str | None:
    """What another library has made of a parameter of which each rank has other values than the next; None if none has."""
    if hasattr(parameter, "full_tensor"):
        return "is a DTensor, of which each rank has a part: give accel.setup the model before fully_shard or parallelize_module"
    if hasattr(parameter, "ds_id"):
        return "was divided by deepspeed.zero.Init: build the model outside of it, or inside accel.deferred_init()"
    if getattr(parameter, "allreduce", True) is False and getattr(parameter, "group_name", "") != "ep_size_1":
        return "is an expert's, and other ranks have other experts: accel needs all of them on every rank (ep_size=1)"
    return None


@final
class _Engines(UserDict[str, type[Engine]]):
    """The engines by name. A file of this package is imported when its engine is first asked for."""

    def __getitem__(self, name: str) -> type[Engine]:
        if (engine := super().__getitem__(name)) is Engine:  # not yet
            module = importlib.import_module(f"{__name__}.{name}")
            own = (v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__)
            engine = self[name] = next(v for v in own if issubclass(v, Engine) and "name" in vars(v))
        return engine


_names = (info.name for info in pkgutil.iter_modules(__path__))
_none: dict[str, Any] = {name: Engine for name in _names if name != "base" and not name.startswith("_")}
ENGINES: Final = _Engines(_none)

#: The backend that the others are compared with: one model on all ranks, and nothing divided.
BASELINE: Final = "ddp"


def option_class(name: str) -> type[Options] | None:
    """A backend's option class by its name, which is the backend's in capitals as people write it; None without one."""
    engine = _likely(name)
    return engine.options_type if engine is not None and engine.options_type.__name__ == name else None


def _likely(name: str) -> type[Engine] | None:
    """The engine that has options of this name, if one has."""
    return ENGINES.get(next((own for own in ENGINES if own.replace("_", "") == name.lower()), ""))


def option_names() -> list[str]:
    """The names of all option classes; imports every engine."""
    return sorted(engine.options_type.__name__ for engine in ENGINES.values())


def engine_of(options: Options) -> type[Engine]:
    """The engine that has such options."""
    likely = _likely(type(options).__name__)
    if likely is not None and likely.options_type is type(options):
        return likely
    return next(engine for engine in ENGINES.values() if engine.options_type is type(options))


def resolve(backend: object) -> tuple[type[Engine], Any]:
    """The engine class and options that a ``backend=`` value asks for: options, or a text such as ``"fsdp:replicas=2"``.

    BackendError where there is no such backend (it lists the known ones) or option, or a package is missing (what to install).
    """
    if isinstance(backend, Options):
        engine, options = engine_of(backend), backend
    elif isinstance(backend, str) and (name := backend.partition(":")[0]) in ENGINES:
        engine, options = ENGINES[name], _options(ENGINES[name].options_type, backend)
    else:
        raise _unknown(backend)
    for module, package in engine.requires.items():
        if importlib.util.find_spec(module) is None:
            raise BackendError(
                f"backend {engine.name!r} needs {module}, which is not installed: pip install '{package}' (docs/installation.md)"
            )
    return engine, options


def _options(kind: type[Options], text: str) -> Options:
    """Those of ``"name:option=value,option=value"``; a value without a name is for the ``leading`` option."""
    kinds = {option.name: str(option.type) for option in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for item in filter(None, _items(text.partition(":")[2])):
        name, named, value = item.partition("=")
        if not named and not kind.leading:
            raise BackendError(f"backend {text!r}: {item!r} names no option; expected name=value")
        name, value = (name.strip(), value) if named else (kind.leading, item)
        if name in values:
            raise BackendError(f"backend {text!r}: {name} is there twice")
        values[name] = _plain(value.strip(), "dtype" in kinds.get(name, ""))
    return kind(**values)


def _items(text: str) -> list[str]:
    """What stands between commas that are in no brackets."""
    items, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += char
    return [item.strip() for item in items]


def _plain(text: str, is_dtype: bool) -> Any:
    """The value that a text means, or the text itself."""
    if is_dtype and (dtype := dtype_of(text)) is not None:
        return dtype
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    return text


def _unknown(backend: object) -> BackendError:
    if isinstance(backend, type) and issubclass(backend, Options):
        return BackendError(f"backend={backend.__name__} is the class of its options: accel.{backend.__name__}()")
    if str(backend) in ("gloo", "mpi", "nccl", "ucc"):
        return BackendError(
            f"{backend!r} is no backend of accel but a process group: accel.init(process_group={backend!r})"
        )
    if isinstance(backend, str) and backend.partition("(")[0] in ENGINES:
        return BackendError(f"backend {backend!r}: options in a text follow a colon, as name:option=value,option=value")
    meant = difflib.get_close_matches(str(backend).partition(":")[0].lower(), ENGINES, 1)
    return BackendError(
        f"unknown backend {backend!r}{f' (did you mean {meant[0]!r}?)' if meant else ''}; expected 'auto', one of "
        f"{', '.join(map(repr, ENGINES))}, or options: {', '.join(f'accel.{name}(...)' for name in option_names())}"
    )


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
