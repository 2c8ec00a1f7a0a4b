"""Backends by name. Every public module but ``base`` is one."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import importlib.util
import pkgutil
import re
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

#: Classes of torch, fairscale, DeepSpeed and Fabric that distribute the module they wrap.
_WRAPPERS: Final = re.compile(
    r"(torch|fairscale|deepspeed|lightning\w*)\..*\."
    r"(DistributedDataParallel|DataParallel|FSDPModule|FullyShardedDataParallel"
    r"|ShardedDataParallel|DeepSpeedEngine|_FabricModule)"
)


def refuse_foreign(module: nn.Module) -> None:
    """Raise BackendError if a library already distributes the module."""
    for name, child in module.named_modules():
        for kind in type(child).__mro__:
            if _WRAPPERS.fullmatch(f"{kind.__module__}.{kind.__qualname__}"):
                raise BackendError(
                    f"{name or 'The model'} is already wrapped by {kind.__name__}. "
                    "Pass the unwrapped module."
                )
    for name, p in module.named_parameters():
        # DeepSpeed-MoE sets allreduce=False on experts. Only with ep_size=1 are they replicated.
        is_expert = getattr(p, "allreduce", True) is False
        if is_expert and getattr(p, "group_name", "") != "ep_size_1":
            raise BackendError(f"Ranks have different experts in {name}. Use ep_size=1.")
        if hasattr(p, "full_tensor") or hasattr(p, "ds_id"):
            raise BackendError(
                f"{name} is already sharded ({type(p).__name__}). "
                "Call accel.setup on the plain model."
            )


@final
class _Engines(UserDict[str, type[Engine]]):
    """Engines by name. Reading an item imports its module."""

    def __getitem__(self, name: str) -> type[Engine]:
        engine = super().__getitem__(name)
        if engine is _not_imported:
            module = importlib.import_module(f"{__name__}.{name}")
            for kind in vars(module).values():
                is_own = isinstance(kind, type) and kind.__module__ == module.__name__
                if is_own and issubclass(kind, Engine) and "name" in vars(kind):
                    engine = self[name] = kind
        return engine


_not_imported: Any = Engine
ENGINES: Final = _Engines()
for _file in pkgutil.iter_modules(__path__):
    if _file.name != "base" and not _file.name.startswith("_"):
        ENGINES[_file.name] = _not_imported


# -- option classes --------------------------------------------------------------------------------


def option_class(name: str) -> type[Options] | None:
    """Return an option class by its name, such as "DeepSpeed", or None."""
    kind = ENGINES[name.lower()].options_type if name.lower() in ENGINES else None
    return kind if kind is not None and kind.__name__ == name else None


def option_names() -> list[str]:
    """Return the names of all option classes. Imports all engines."""
    return sorted(engine.options_type.__name__ for engine in ENGINES.values())


def engine_of(options: Options) -> type[Engine]:
    """Return the engine for an options object."""
    name = type(options).__name__.lower()
    if name in ENGINES:
        return ENGINES[name]
    # A test or another package may have added an engine under any name.
    kinds = {engine.options_type: engine for engine in ENGINES.values()}
    return kinds[type(options)]


# -- backend=... -----------------------------------------------------------------------------------


def resolve(backend: object) -> tuple[type[Engine], Any]:
    """Return the engine and options for an object or "fsdp:replicas=2"."""
    name = backend.partition(":")[0] if isinstance(backend, str) else ""
    if isinstance(backend, Options):
        engine, options = engine_of(backend), backend
    elif name in ENGINES:
        engine = ENGINES[name]
        options = _parse(engine.options_type, str(backend))
    else:
        raise _unknown(backend)
    for module, package in engine.requires.items():
        if importlib.util.find_spec(module) is None:
            raise BackendError(
                f"Backend {engine.name!r} needs {module}, which is not installed. "
                f"Run pip install '{package}'."
            )
    return engine, options


def _parse(kind: type[Options], text: str) -> Options:
    """Return the options in "name:option=value,option=value"."""
    types = {option.name: str(option.type) for option in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    # Commas in brackets don't separate options.
    items = re.findall(r"(?:\[[^]]*\]|\([^)]*\)|[^,])+", text.partition(":")[2])
    for item in map(str.strip, items):
        name, separator, value = item.partition("=")
        # In ACCEL_BACKEND=deepspeed:3, the value has no name and sets the leading option.
        if not separator:
            name, value = kind.leading, item
        if name not in types or name in values:
            raise BackendError(
                f"backend={text!r} can't be read at {item!r}. Write "
                f"name:option=value with the options {', '.join(types)}."
            )
        values[name] = _value(value, is_dtype="dtype" in types[name])
    return kind(**values)


def _value(text: str, is_dtype: bool) -> Any:
    """Return the Python value of a text, or the text if it is a word."""
    dtype = dtype_of(text) if is_dtype else None
    if dtype is not None:
        return dtype
    with contextlib.suppress(ValueError, SyntaxError):
        is_word = text in ("true", "false", "none")
        return ast.literal_eval(text.capitalize() if is_word else text)
    return text


def _unknown(backend: object) -> BackendError:
    advice = f"Use 'auto', an options object or one of {', '.join(map(repr, ENGINES))}."
    word, *_ = re.split(r"\W", f"{backend}".lower())
    matches = difflib.get_close_matches(word, ENGINES, 1)
    if str(backend) in ("gloo", "mpi", "nccl", "ucc"):
        advice = f"Use accel.init(process_group={backend!r})."
    elif isinstance(backend, type) and issubclass(backend, Options):
        advice = f"Use an object, accel.{backend.__name__}()."
    elif matches:
        advice = f"Did you mean {matches[0]!r}?"
    return BackendError(f"Unknown backend {backend!r}. {advice}")


def default(process: Process) -> str:
    """Return the backend for ``backend="auto"``."""
    if process.device.type in ("tpu", "xla"):
        return "xla"
    if process.place.world_size > 1:
        return "ddp"
    ipython = sys.modules.get("IPython")
    shell = type(ipython.get_ipython()).__name__ if ipython is not None else ""
    in_notebook = shell == "ZMQInteractiveShell"
    return "dp" if len(process.devices) > 1 and in_notebook else "single"
