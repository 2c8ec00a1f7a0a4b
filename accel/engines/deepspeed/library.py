"""The one place that imports DeepSpeed: late, quietly, and without the parts that a raw loop does not use."""

from __future__ import annotations

import collections
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from ...errors import BackendError
from ...gradients.patches import around, ignored, replaced
from ...process import running
from ...process.startup import unseen_group

#: What torch says, in every step, about functions that DeepSpeed calls.
_renamed: Final = ignored(r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor`", FutureWarning)


def _quiet(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _compile(original: Callable[..., Any], model: Any = None, **options: Any) -> Any:
    """``torch.compile``, which leaves alone what the library's own modules define."""
    if not str(sys._getframe(2).f_globals.get("__name__")).startswith("deepspeed"):  # who has called the patch
        return original(model, **options)
    return model if model is not None else lambda function: function


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Import and build without log lines, deprecation warnings, and compilation of what is never used."""
    with contextlib.ExitStack() as undo:
        if device.type == "cpu" and "DS_ACCELERATOR" not in os.environ:
            undo.enter_context(replaced(os.environ, "DS_ACCELERATOR", "cpu"))
        logger = logging.getLogger("DeepSpeed")
        logger.addFilter(_quiet)
        undo.callback(logger.removeFilter, _quiet)
        undo.enter_context(ignored())
        # Its Muon is decorated by torch.compile, whose import takes longer than all the rest.
        undo.enter_context(around(vars(torch), "compile", _compile))
        yield


def library(name: str = "deepspeed") -> Any:
    """A module of DeepSpeed."""
    return importlib.import_module(name)


def _import(device: torch.device) -> Any:
    deepspeed = library()
    found = library("deepspeed.accelerator").get_accelerator()._name
    if found != device.type:
        raise BackendError(
            f"DeepSpeed runs on {found!r} in this process, and the model is on {device.type!r}: set DS_ACCELERATOR, or "
            "choose devices="
        )
    return deepspeed


def _forget_old_groups() -> None:
    """DeepSpeed keeps process groups for good; those of a process group that ended are of no use."""
    groups = library("deepspeed.utils.groups")
    known = groups._WORLD_GROUP
    if known is not None and known not in distributed_c10d._world.pg_map:
        forget_groups()


def forget_groups() -> None:
    """Let go of the process groups that DeepSpeed holds, where it was imported."""
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    if groups is not None:
        groups._WORLD_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        groups._ALL_TO_ALL_GROUP = {}
    if comm is not None:
        comm.cdb = None


class _NoBackend:
    """Answers for the library's communication once its process groups are gone: it asks for its rank before it logs."""

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: object = None) -> int:
        return -1


def without_groups() -> contextlib.AbstractContextManager[None]:
    """Inside, the library takes its own apart although its process groups may be gone."""
    comm = vars(library("deepspeed.comm.comm"))
    return replaced(comm, "cdb", _NoBackend()) if comm["cdb"] is None else contextlib.nullcontext()


def release_groups(roots: Iterable[Any]) -> None:
    """Drop the process groups that the library's objects hold: as attributes, and in the closures of what they call."""
    todo, seen = list(roots), set()
    while todo:
        owner = todo.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        held = getattr(owner, "__dict__", {})
        for name, value in list(held.items()):
            if any(isinstance(v, dist.ProcessGroup) for v in (value if isinstance(value, list) else [value])):
                held[name] = None
        cells = [cell.cell_contents for cell in getattr(owner, "__closure__", None) or ()]
        todo += [v for v in (*held.values(), *cells) if isinstance(v, FunctionType) or _is_of_library(v)]


def _is_of_library(value: object) -> bool:
    return type(value).__module__.startswith("deepspeed.")


def initialise(
    module: nn.Module, groups: list[list[nn.Parameter]], config: dict[str, Any], device: torch.device
) -> Any:
    """``deepspeed.initialize`` of ``module``; the library divides ``groups`` and never steps. Collective."""
    with _undisturbed(device):
        with unseen_group():
            deepspeed = _import(device)
        _forget_old_groups()
        process = running()
        if process is not None and forget_groups not in process.releases:
            process.releases.append(forget_groups)
        stand_in = torch.optim.SGD([{"params": group} for group in groups], lr=0.0)
        # Its shared-memory op takes a minute to compile and serves only inference.
        with replaced(vars(library("deepspeed.ops")), "__compatible_ops__", collections.defaultdict(bool)):
            engine = deepspeed.initialize(model=module, optimizer=stand_in, config=config, dist_init_required=False)[0]
    _renamed.need(engine)
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        hook.remove()
    library("deepspeed.utils.debug").debug_clear_module_and_param_names()
    return engine


# -- What a module was before a library changed it, beside its values --------------------------------------------------

_HOOKS: Final = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
#: Attributes that the library adds while it runs.
_LATER: Final = ("ds_", "applied_pre_backward_ref_cnt")


def _hooks(module: nn.Module) -> dict[str, set[int]]:
    return {name: set(getattr(module, name)) for name in _HOOKS}


@final
class Snapshot:
    """The attributes and hooks of a module, its children and its parameters; holds no tensor's values."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[int, tuple[set[str], Any]] = {id(m): (set(vars(m)), _hooks(m)) for m in module.modules()}
        self._before.update((id(p), (set(vars(p)), None)) for p in module.parameters())
        self._containers = [(m, type(m._parameters)) for m in module.modules()]
        self._added: list[tuple[Any, set[str], dict[str, set[int]]]] = []

    def changed(self) -> None:
        """Call it when the library has made its changes: later ones are the user's."""
        for module in self._module.modules():
            names, hooks = self._before[id(module)]
            now = _hooks(module)
            self._added.append((module, set(vars(module)) - names, {k: now[k] - hooks[k] for k in now}))
        for parameter in self._module.parameters():
            self._added.append((parameter, set(vars(parameter)) - self._before[id(parameter)][0], {}))

    def hooks(self, name: str) -> list[Any]:
        """The library's hooks of the root module."""
        keys = next((added[name] for owner, _, added in self._added if owner is self._module), set())
        return [hook for key, hook in getattr(self._module, name).items() if key in keys]

    def change_hooks(self, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let the library's hooks of all modules be others."""
        for owner, _, hooks in self._added:
            for key in hooks.get(name, ()):
                kept = getattr(owner, name)
                if key in kept:  # one of the library's own may be removed again
                    kept[key] = change(kept[key])

    def restore(self) -> None:
        """Undo the library's changes."""
        for module, container in self._containers:
            if type(module._parameters) is not container:
                vars(module)["_parameters"] = container(module._parameters.items())
        for owner, names, hooks in self._added:
            for name in names | {n for n in vars(owner) if n.startswith(_LATER)}:
                vars(owner).pop(name, None)
            for name, keys in hooks.items():
                for key in keys:
                    getattr(owner, name).pop(key, None)
        self._added.clear()
