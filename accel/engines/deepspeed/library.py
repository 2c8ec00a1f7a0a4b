"""Import DeepSpeed late, quietly, and without unneeded parts."""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from ...gradients.hooks import remove_hooks
from ...gradients.patches import around, replaced
from ...process import running
from ...process.startup import unseen_group
from ..base.raw_objects import Function
from ..base.versions import check_version

#: Python's name mangling prefixes private attributes of two DeepSpeed classes with these.
OF_STAGE3: Final = "_DeepSpeedZeroOptimizer_Stage3__"
OF_COORDINATOR: Final = "_PartitionedParameterCoordinator__"
#: Modules with objects that hold process groups.
_HOMES: Final = ("deepspeed.", "accel.engines.deepspeed.")


def library(name: str = "deepspeed") -> Any:
    """Return a module of DeepSpeed."""
    return importlib.import_module(name)


def accelerator() -> Any:
    """Return DeepSpeed's interface to the device: streams and waiting."""
    return library("deepspeed.accelerator").get_accelerator()


def probe(device: torch.device) -> None:
    """Import DeepSpeed as for an engine, or raise BackendError. Local."""
    with _quietly(device), unseen_group():
        _import()


def _import() -> Any:
    # With 0.19.6 and 0.19.7 the tests of configurations fail.
    check_version("deepspeed", "deepspeed", "0.19.8", "0.19.8")
    # DeepSpeed's Muon uses @torch.compile, which takes longer to import than all the rest.
    with replaced(vars(torch), "compile", lambda *_, **options: lambda function: function):
        library("deepspeed.runtime.zero.muon.muon_optimizer")
    return library()


@contextlib.contextmanager
def _quietly(device: torch.device) -> Iterator[None]:
    """Let DeepSpeed use this device, without logs and warnings."""
    with contextlib.ExitStack() as undo:
        if device.type == "cpu" and "DS_ACCELERATOR" not in os.environ:
            undo.enter_context(replaced(os.environ, "DS_ACCELERATOR", "cpu"))
        # DeepSpeed uses the device of LOCAL_RANK. SLURM doesn't set it, and MPI's must agree.
        for name in {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & {"LOCAL_RANK", *os.environ}:
            undo.enter_context(replaced(os.environ, name, str(device.index or 0)))
        undo.enter_context(replaced(vars(logging.getLogger("DeepSpeed")), "disabled", True))
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def initialize(module: nn.Module, groups: list[Any], config: Any, device: torch.device) -> Any:
    """Let DeepSpeed shard ``groups``. Collective."""
    zero = config["zero_optimization"]
    # DeepSpeed would replace torch.nn.functional.linear permanently, for all models.
    config = {**config, "zero_optimization": {**zero, "memory_efficient_linear": False}}
    with _quietly(device):
        with unseen_group():
            deepspeed = _import()
        _set_groups(dist.group.WORLD)
        process = running()
        if process is not None and forget_groups not in process.releases:
            process.releases.append(forget_groups)
        stand_in = torch.optim.SGD([{"params": group} for group in groups if group], lr=0.0)
        # DeepSpeed's shared-memory op takes a minute to compile and is only used in inference.
        no_ops: dict[str, bool] = collections.defaultdict(bool)
        with replaced(vars(library("deepspeed.ops")), "__compatible_ops__", no_ops):
            if zero["stage"] == 3:
                # Init moves weights to the device one at a time, so the full model needn't fit.
                deepspeed.zero.Init(module=module, config_dict_or_path=config)
            engine, *_ = deepspeed.initialize(
                model=module, optimizer=stand_in, config=config, dist_init_required=False
            )
    # torch warns in every step about functions that DeepSpeed calls.
    renamed = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor`"
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    if zero["stage"] == 3:
        coordinator = library("deepspeed.runtime.zero.partitioned_param_coordinator")
        # This check needs LOCAL_RANK. accel announces gathers, which also compares them.
        coordinator.assert_ints_same_as_other_ranks = lambda ints: None
        if zero.get("memory_efficient_linear", True):
            _efficient_linear.need(engine)
    # accel's own hooks collect gradients, even with several forwards before a backward.
    remove_hooks([engine.module_forward_pre_hook, engine.module_forward_post_hook])
    for name in ("_grad_acc_hooks", "_leaf_module_hooks"):
        remove_hooks(getattr(engine.optimizer, name, []))
    library("deepspeed.utils.debug").debug_clear_module_and_param_names()
    return engine


def end(engine: Any) -> None:
    """Release DeepSpeed's engine. Garbage collection frees it."""
    # destroy() logs its rank, which fails after the process group has ended.
    if library("deepspeed.comm.comm").cdb is not None:
        engine.destroy()
    _efficient_linear.drop(engine)


def _linear(plain: Function, input: Any, weight: Any, bias: Any = None) -> Any:
    """Call DeepSpeed's linear for a weight of stage 3."""
    # torch's linear would keep it gathered until backward. DeepSpeed's can't take nested tensors.
    if not hasattr(weight, "ds_id") or input.is_nested:
        return plain(input, weight, bias)
    efficient = library("deepspeed.runtime.zero.linear").zero3_linear_wrap
    return type(weight).__torch_function__(efficient, (), (input, weight, bias))


_efficient_linear: Final = around(vars(nn.functional), "linear", _linear)


def _set_groups(group: Any) -> None:
    """Let DeepSpeed use this group, instead of a copy with threads."""
    groups = library("deepspeed.utils.groups")
    groups._WORLD_GROUP = group
    # DeepSpeed raises if an earlier model has set this group.
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def forget_groups() -> None:
    """Drop the process groups in DeepSpeed's objects and parameters."""
    # Gloo's threads run until the last reference is gone, and may abort the interpreter's exit.
    _set_groups(None)
    library("deepspeed.comm.comm").cdb = None
    for owner in gc.get_objects():
        kind = type(owner)
        is_own = str(kind.__module__).startswith(_HOMES)
        if not is_own and not issubclass(kind, nn.Parameter):
            continue
        names = getattr(owner, "__dict__", {})
        for name, value in list(names.items()):
            values = value if isinstance(value, list) else [value]
            if any(isinstance(v, dist.ProcessGroup) for v in values):
                names[name] = None
