"""The place that imports DeepSpeed: late, quietly, and without parts that a raw loop doesn't use."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from ...errors import BackendError
from ...gradients.hooks import remove_hooks
from ...gradients.patches import Patch, around, ignored, replaced
from ...process import running
from ...process.startup import unseen_group
from ..base.versions import check_version

#: What torch says, in every step, about functions that DeepSpeed calls.
_renamed: Final = ignored(
    r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor`", FutureWarning
)


def _quiet(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _compile(original: Callable[..., Any], model: Any = None, **options: Any) -> Any:
    """``torch.compile``, which leaves alone what the library's own modules define."""
    if not str(sys._getframe(2).f_globals.get("__name__")).startswith(
        "deepspeed"
    ):  # who has called the patch
        return original(model, **options)
    return model if model is not None else lambda function: function


def _linear(plain: Callable[..., Any], input: Any, weight: Any, bias: Any = None) -> Any:
    """Call DeepSpeed's linear for a weight of stage 3: torch's would keep it gathered until backward."""
    # DeepSpeed's can't compute with nested tensors.
    if not hasattr(weight, "ds_id") or input.is_nested:
        return plain(input, weight, bias)
    efficient = library("deepspeed.runtime.zero.linear").zero3_linear_wrap
    return type(weight).__torch_function__(efficient, (), (input, weight, bias))


#: DeepSpeed alone would replace it in every model, for good.
_efficient: Final = around(vars(nn.functional), "linear", _linear)


def end(engine: Any) -> None:
    """Let go of DeepSpeed's engine. The garbage collector frees its objects."""
    engine.destroy()
    _efficient.drop(engine)


@contextlib.contextmanager
def _numbered(device: torch.device) -> Iterator[None]:
    """Inside, DeepSpeed takes this device, whose number it reads from variables of launchers."""
    with contextlib.ExitStack() as undo:
        for name in {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & {"LOCAL_RANK", *os.environ}:
            undo.enter_context(replaced(os.environ, name, str(device.index or 0)))
        yield


def _compare(original: Callable[..., Any], values: Any) -> Any:
    """Let DeepSpeed compare values over the ranks on this device too."""
    process = running()
    with contextlib.nullcontext() if process is None else _numbered(process.device):
        return original(values)


@functools.cache
def _comparisons() -> list[Patch]:
    table = vars(library("deepspeed.runtime.zero.utils"))
    return [
        around(table, name, _compare)
        for name in ("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0")
    ]


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Import and build without log lines, warnings, and compilation of what is never used."""
    with contextlib.ExitStack() as undo:
        if device.type == "cpu" and "DS_ACCELERATOR" not in os.environ:
            undo.enter_context(replaced(os.environ, "DS_ACCELERATOR", "cpu"))
        undo.enter_context(_numbered(device))
        logger = logging.getLogger("DeepSpeed")
        logger.addFilter(_quiet)
        undo.callback(logger.removeFilter, _quiet)
        undo.enter_context(ignored())
        # Its Muon is decorated by torch.compile, whose import takes longer than all the rest.
        undo.enter_context(around(vars(torch), "compile", _compile))
        yield


#: Python's prefixes of the attributes that these two classes name with two underscores.
OF_STAGE3: Final = "_DeepSpeedZeroOptimizer_Stage3__"
OF_COORDINATOR: Final = "_PartitionedParameterCoordinator__"


def library(name: str = "deepspeed") -> Any:
    """Return a module of DeepSpeed."""
    return importlib.import_module(name)


def accelerator() -> Any:
    """Return DeepSpeed's interface to the device: streams and waiting."""
    return library("deepspeed.accelerator").get_accelerator()


def _import(device: torch.device) -> Any:
    deepspeed = library()
    # With 0.19.6 and 0.19.7 the tests of configurations fail.
    check_version("deepspeed", "deepspeed", "0.19.8", "0.19.8")
    found = accelerator()._name
    if found != device.type:
        raise BackendError(
            f"DeepSpeed runs on {found!r} in this process, but the model is on {device.type!r}. "
            f'Set the environment variable DS_ACCELERATOR="{device.type}".'
        )
    return deepspeed


def probe(device: torch.device) -> None:
    """Import DeepSpeed as for an engine, or raise what is missing. Local."""
    with _undisturbed(device), unseen_group():
        _import(device)


def forget_groups() -> None:
    """Let go of the process groups that DeepSpeed holds, and end its copy of the user's group."""
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    if groups is not None:
        if groups._WORLD_GROUP in distributed_c10d._world.pg_map:
            dist.destroy_process_group(groups._WORLD_GROUP)
        groups._WORLD_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        groups._ALL_TO_ALL_GROUP = {}
    if comm is not None:
        comm.cdb = None


def release_groups(roots: Iterable[Any]) -> None:
    """Drop the process groups that DeepSpeed's objects hold as attributes or in closures.

    Gloo closes its connections, so that waiting peers wake up, only when nothing holds the group.
    """
    todo, seen = list(roots), set()
    while todo:
        owner = todo.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        attributes = getattr(owner, "__dict__", {})
        for name, value in list(attributes.items()):
            if any(
                isinstance(v, dist.ProcessGroup)
                for v in (value if isinstance(value, list) else [value])
            ):
                attributes[name] = None
        cells = [cell.cell_contents for cell in getattr(owner, "__closure__", None) or ()]
        reached = (*attributes.values(), *cells)
        todo += [
            v
            for v in reached
            if isinstance(v, FunctionType) or type(v).__module__.startswith("deepspeed.")
        ]


def without_groups() -> contextlib.AbstractContextManager[None]:
    """Inside, DeepSpeed can log without process groups: it asks for its rank first."""
    comm = vars(library("deepspeed.comm.comm"))
    nobody = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda group=None: -1)
    return replaced(comm, "cdb", nobody) if comm["cdb"] is None else contextlib.nullcontext()


def initialise(
    module: nn.Module,
    groups: list[list[nn.Parameter]],
    config: dict[str, Any],
    device: torch.device,
) -> Any:
    """Call ``deepspeed.initialize``, which shards ``groups``. Its own optimizer never steps. Collective."""
    with _undisturbed(device):
        with unseen_group():
            deepspeed = _import(device)
        # It keeps process groups for good, also those of a process group that ended.
        if library("deepspeed.utils.groups")._WORLD_GROUP not in (
            None,
            *distributed_c10d._world.pg_map,
        ):
            forget_groups()
        # It raises if an earlier model has set one.
        library("deepspeed.utils.groups")._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        process = running()
        if process is not None and forget_groups not in process.releases:
            process.releases.append(forget_groups)
        divided = config["zero_optimization"]
        config = {**config, "zero_optimization": {**divided, "memory_efficient_linear": False}}
        stand_in = torch.optim.SGD([{"params": group} for group in groups], lr=0.0)
        # All ranks have rank 0's weights, or wait for their own.
        kind = type(
            "DeepSpeedEngine",
            (deepspeed.DeepSpeedEngine,),
            {"_broadcast_model": lambda engine: None},
        )
        # Its shared-memory op takes a minute to compile and serves only inference.
        ops = replaced(
            vars(library("deepspeed.ops")), "__compatible_ops__", collections.defaultdict(bool)
        )
        with ops, replaced(vars(deepspeed), kind.__name__, kind):
            if divided["stage"] == 3:
                # One weight after the other, or else it would bring all of them to the device first.
                deepspeed.zero.Init(module=module, config_dict_or_path=config)
            engine = deepspeed.initialize(
                model=module, optimizer=stand_in, config=config, dist_init_required=False
            )[0]
    _renamed.need(engine)
    for patch in _comparisons() if divided["stage"] == 3 else ():
        patch.need(engine)
    if divided["stage"] == 3 and divided.get("memory_efficient_linear", True):
        _efficient.need(engine)
    zero, forward = (
        engine.optimizer,
        [engine.module_forward_pre_hook, engine.module_forward_post_hook],
    )
    for hooks in (forward, zero._grad_acc_hooks, getattr(zero, "_leaf_module_hooks", [])):
        remove_hooks(hooks)
    library("deepspeed.utils.debug").debug_clear_module_and_param_names()
    return engine
