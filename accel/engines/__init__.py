"""The backends by name. Each file or folder of this package is one, except ``base``."""

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
from .base.holdings import Holdings as Holdings
from .base.options import Options as Options
from .base.versions import check_torch as check_torch

#: Classes of other libraries that distribute the module they wrap.
FOREIGN: Final = frozenset(
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
    """Return why ranks have different values of a parameter, or None if no other library sharded it."""
    if hasattr(parameter, "full_tensor"):
        return "is a DTensor. Call accel.setup instead of fully_shard or parallelize_module."
    if hasattr(parameter, "ds_id"):
        return "was divided by deepspeed.zero.Init. Build the model outside of it."
    # DeepSpeed-MoE marks experts, and puts the same ones on every rank if ep_size is 1.
    if (
        getattr(parameter, "allreduce", True) is False
        and getattr(parameter, "group_name", "") != "ep_size_1"
    ):
        return "is an expert's, and other ranks have different experts. Use ep_size=1."
    return None


@final
class _Engines(UserDict[str, type[Engine]]):
    """Engines by name. Reading an item imports its file."""

    def __getitem__(self, name: str) -> type[Engine]:
        engine = super().__getitem__(name)
        if engine is Engine:
            module = importlib.import_module(f"{__name__}.{name}")
            classes = [
                v
                for v in vars(module).values()
                if isinstance(v, type) and v.__module__ == module.__name__
            ]
            engine = self[name] = next(
                c for c in classes if issubclass(c, Engine) and "name" in vars(c)
            )
        return engine


_files = [info.name for info in pkgutil.iter_modules(__path__)]
#: ``Engine`` itself stands for a file that wasn't imported yet.
_unread: dict[str, Any] = {
    name: Engine for name in _files if name != "base" and not name.startswith("_")
}
ENGINES: Final = _Engines(_unread)

# -- option classes -----------------------------------------------------------------------------------------------------


def option_class(name: str) -> type[Options] | None:
    """Return an option class by its name, such as "DeepSpeed", or None."""
    for engine_name in ENGINES:
        if engine_name.replace("_", "") == name.lower():
            kind = ENGINES[engine_name].options_type
            return kind if kind.__name__ == name else None
    return None


def option_names() -> list[str]:
    """Return the names of all option classes. Imports all engines."""
    return sorted(engine.options_type.__name__ for engine in ENGINES.values())


def engine_of(options: Options) -> type[Engine]:
    """Return the engine of an options object."""
    kind = type(options)
    # Importing one engine is enough if its options have the usual name.
    likely = [name for name in ENGINES if name.replace("_", "") == kind.__name__.lower()]
    return next(ENGINES[name] for name in [*likely, *ENGINES] if ENGINES[name].options_type is kind)


# -- backend=... --------------------------------------------------------------------------------------------------------


def resolve(backend: object) -> tuple[type[Engine], Any]:
    """Return the engine and options for an options object, or for a text such as "fsdp:replicas=2".

    Raises:
        BackendError: the backend or option doesn't exist, or a package isn't installed.
    """
    if isinstance(backend, Options):
        engine, options = engine_of(backend), backend
    elif isinstance(backend, str) and (name := backend.partition(":")[0]) in ENGINES:
        engine, options = ENGINES[name], _parse(ENGINES[name].options_type, backend)
    else:
        raise _unknown(backend)
    for module, package in engine.requires.items():
        if importlib.util.find_spec(module) is None:
            raise BackendError(
                f"backend {engine.name!r} needs {module}, which is not installed: pip install '{package}'"
            )
    return engine, options


def _parse(kind: type[Options], text: str) -> Options:
    """Return the options of "name:option=value,option=value"."""
    types = {option.name: str(option.type) for option in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for item in _split(text.partition(":")[2]):
        name, separator, value = item.partition("=")
        if not separator:  # deepspeed:3
            name, value = kind.leading, item
        if not name or name in values:
            raise BackendError(
                f"backend={text!r} can't be read at {item!r}. Write name:option=value,option=value."
            )
        values[name] = _value(value, is_dtype="dtype" in types.get(name, ""))
    return kind(**values)


def _split(text: str) -> list[str]:
    """Split at commas that are not in brackets."""
    items, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return [item.strip() for item in items if item.strip()]


def _value(text: str, is_dtype: bool) -> Any:
    """Return the Python value of a text, or the text itself, such as "bf16"."""
    if is_dtype and (dtype := dtype_of(text)) is not None:
        return dtype
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    return text


def _unknown(backend: object) -> BackendError:
    if str(backend) in ("gloo", "mpi", "nccl", "ucc"):
        return BackendError(
            f"{backend!r} is a backend of torch.distributed. Use accel.init(process_group={backend!r})."
        )
    if isinstance(backend, type) and issubclass(backend, Options):
        return BackendError(
            f"backend={backend.__name__} is a class. Use accel.{backend.__name__}()."
        )
    if isinstance(backend, str) and "(" in backend:
        return BackendError(
            f"backend={backend!r} can't be read. Write name:option=value,option=value."
        )
    matches = difflib.get_close_matches(str(backend).partition(":")[0].lower(), ENGINES, 1)
    hint = f" (did you mean {matches[0]!r}?)" if matches else ""
    names = ", ".join(map(repr, ENGINES))
    return BackendError(
        f"unknown backend {backend!r}{hint}. Use 'auto', an options object or one of {names}."
    )


def default(process: Process) -> str:
    """Return the backend for ``backend="auto"``."""
    if process.device.type in ("tpu", "xla"):
        return "xla"
    if process.place.world_size > 1:
        return "ddp"
    return "dp" if len(process.devices) > 1 and _in_notebook() else "single"


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
