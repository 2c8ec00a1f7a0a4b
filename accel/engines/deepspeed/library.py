"""The one place that imports DeepSpeed: late, quietly, and without the parts that a raw loop does not use."""

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
from ...gradients.log import remove_hooks
from ...gradients.patches import Patch, around, ignored, replaced
from ...process import running
from ...process.startup import unseen_group
from ..base.private import require

#: What torch says, in every step, about functions that DeepSpeed calls.
_renamed: Final = ignored(r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor`", FutureWarning)


def _quiet(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _compile(original: Callable[..., Any], model: Any = None, **options: Any) -> Any:
    """``torch.compile``, which leaves alone what the library's own modules define."""
    if not str(sys._getframe(2).f_globals.get("__name__")).startswith("deepspeed"):  # who has called the patch
        return original(model, **options)
    return model if model is not None else lambda function: function


def _linear(plain: Callable[..., Any], input: Any, weight: Any, bias: Any = None) -> Any:
    """The library's, which does not keep a gathered weight until backward, for weights that it divides."""
    divided = hasattr(weight, "ds_id") and not input.is_nested  # which the library's cannot compute with
    return (library("deepspeed.runtime.zero.linear").zero3_linear_wrap if divided else plain)(input, weight, bias)


#: The library alone would replace it in every model, for good.
_efficient: Final = around(vars(nn.functional), "linear", _linear)


def end(engine: Any) -> None:
    """Let go of the library's engine, for whose objects a garbage collection must come."""
    engine.destroy()
    _efficient.drop(engine)


@functools.cache
def _ranges() -> Patch:
    """The library's ranges for profilers of devices, thousands in a step, which mean nothing on a CPU."""
    return replaced(vars(library("deepspeed.utils.nvtx")), "enable_nvtx", False)


@contextlib.contextmanager
def _numbered(device: torch.device) -> Iterator[None]:
    """Inside, the library takes this device: it takes the one whose number the launcher tells, and Open MPI tells it again."""
    with contextlib.ExitStack() as undo:
        for name in {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & {"LOCAL_RANK", *os.environ}:
            undo.enter_context(replaced(os.environ, name, str(device.index or 0)))
        yield


def _compare(original: Callable[..., Any], values: Any) -> Any:
    """What it compares over the ranks lies on that device too."""
    process = running()
    with contextlib.nullcontext() if process is None else _numbered(process.device):
        return original(values)


@functools.cache
def _comparisons() -> list[Patch]:
    table = vars(library("deepspeed.runtime.zero.utils"))
    return [around(table, name, _compare) for name in ("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0")]


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Import and build without log lines, deprecation warnings, and compilation of what is never used."""
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


# -- The private names of the library that this backend relies on ------------------------------------------------------

_ENGINE: Final = "deepspeed.runtime.engine:DeepSpeedEngine."
_ZERO12: Final = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer."
_ZERO3: Final = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3."
_OFFLOAD: Final = "deepspeed.runtime.zero.parameter_offload:"
_COORDINATOR: Final = "deepspeed.runtime.zero.partitioned_param_coordinator:"
_OWN: Final = f"{_COORDINATOR}PartitionedParameterCoordinator."
#: What it puts on a parameter of stage 3.
_PARAMETER: Final = "deepspeed.runtime.zero.partition_parameters:Init."
#: Where Python puts what these two classes call by two underscores.
OF_STAGE3: Final = "_DeepSpeedZeroOptimizer_Stage3__"
OF_COORDINATOR: Final = "_PartitionedParameterCoordinator__"
_PRIVATE: Final = (
    ("deepspeed.accelerator:", "get_accelerator", "which device it runs on"),
    ("deepspeed.utils.nvtx:", "enable_nvtx", "steps without ranges for profilers"),
    ("deepspeed.utils.debug:", "debug_clear_module_and_param_names", "letting go of models"),
    ("deepspeed.utils.groups:", "_WORLD_GROUP _ALL_TO_ALL_GROUP", "letting go of process groups"),
    ("deepspeed.utils.groups:", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "letting go of process groups"),
    ("deepspeed.comm.comm:", "cdb", "letting go of process groups"),
    (_ENGINE, "module_forward_pre_hook module_forward_post_hook", "several forwards before a backward"),
    (_ENGINE, "_broadcast_model", "weights that no rank has to send"),
    (_ENGINE, "destroy", "teardown"),
    (_ZERO12, "round_robin_bit16_groups bit16_groups_flat", "the flat memory, and what lies there"),
    (_ZERO12, "partition_size real_dp_process_group", "this rank's part of it"),
    (_ZERO12, "single_partition_of_fp32_groups", "weights that are stepped elsewhere"),
    (_ZERO12, "_grad_acc_hooks", "which gradients exist"),
    (_ZERO12, "copy_grads_in_partition", "reduced gradients"),
    (_ZERO12, "reduce_independent_p_g_buckets_and_remove_grads reduce_ipg_grads setup_buckets", "its buckets"),
    (_ZERO12, "ipg_buckets overlap_comm extra_large_param_to_reduce params_already_reduced", "its buckets"),
    (_ZERO12, "get_param_id _release_ipg_buffers _clear_previous_reduced_grads", "its buckets"),
    (_ZERO12, "parallel_partitioned_bit16_groups nccl_start_alignment_factor", "the weights after a step"),
    (_ZERO12, "allgather_bucket_size", "the weights after a step"),
    (_ZERO12, "reduction_stream reduce_bucket_size", "memory that it reads while something else runs"),
    ("deepspeed.runtime.utils:", "all_gather_dp_groups", "the weights after a step"),
    (_ZERO3, "_grad_acc_hooks _leaf_module_hooks", "which gradients exist"),
    (_ZERO3, f"{OF_STAGE3}param_id_to_grad_partition", "reduced gradients"),
    (_ZERO3, "grad_partitions_flat_buffer micro_step_id", "reduced gradients"),
    (_ZERO3, f"{OF_STAGE3}reduce_and_partition_ipg_grads ipg_buckets", "its buckets"),
    (_ZERO3, "reduce_independent_p_g_buckets_and_remove_grads reduce_and_partition_stream", "its buckets"),
    (_ZERO3, "offload_optimizer fp32_partitioned_groups_flat", "weights that are stepped elsewhere"),
    (_ZERO3, "parameter_offload persistent_parameters _partition_all_parameters", "gathered weights"),
    (_OFFLOAD, "FWD_MODULE_STACK ZeROOrderedDict._in_forward", "weights that one module reads from another"),
    (_OFFLOAD, "DeepSpeedZeRoOffload.get_param_coordinator", "what gathers weights"),
    (_OFFLOAD, "DeepSpeedZeRoOffload.release_backward_leftovers", "the end of a backward"),
    (_COORDINATOR, "iter_params z3_leaf_module", "the weights of a module"),
    (_OWN, "fetch_sub_module release_sub_module reset_step", "what is gathered, and divided again"),
    (_OWN, "trace_prologue release_and_reset_all", "its hooks on plain tensors"),
    (_OWN, f"{OF_COORDINATOR}params_to_release {OF_COORDINATOR}submodule_order", "letting go of models"),
    (_OWN, "is_invalid_trace _invalidate_trace", "a new start after an exception"),
    (_OWN, f"{OF_COORDINATOR}inflight_param_registry", "weights that one module reads from another"),
    (_OWN, f"{OF_COORDINATOR}active_backward_submodules", "a second backward of one graph"),
    (_OWN, f"{OF_COORDINATOR}release_param", "what is gathered, and divided again"),
    (_OWN, f"{OF_COORDINATOR}allgather_stream", "weights that are gathered after they were written"),
    ("deepspeed.runtime.zero.utils:", "assert_lst_len_same_as_other_ranks get_lst_from_rank0", "where it compares"),
    ("deepspeed.runtime.zero.linear:", "zero3_linear_wrap", "gathered weights"),
    ("deepspeed.runtime.zero:", "register_external_parameter", "weights that one module reads from another"),
    ("deepspeed.runtime.zero.partition_parameters:ZeroParamStatus.", "AVAILABLE INFLIGHT", "what is gathered"),
    (_PARAMETER, "ds_status ds_tensor ds_numel ds_shape ds_id ds_persist item", "what this rank has of a weight"),
    (_PARAMETER, "ds_active_sub_modules ds_zero_partition_world_size", "what this rank has of a weight"),
    (_PARAMETER, "ds_secondary_tensor all_gather all_gather_coalesced partition", "what this rank has of a weight"),
)
#: The version with which this backend's tests were run. With 0.19.6 and 0.19.7 they fail, although these have the names.
_RAN: Final = ("0.19.8",)


def library(name: str = "deepspeed") -> Any:
    """A module of DeepSpeed."""
    return importlib.import_module(name)


def accelerator() -> Any:
    """What the library knows of the devices' kind: streams, and waiting."""
    return library("deepspeed.accelerator").get_accelerator()


def _import(device: torch.device) -> Any:
    deepspeed = library()
    require("backend 'deepspeed'", "deepspeed", _PRIVATE, _RAN)
    found = accelerator()._name
    if found != device.type:
        raise BackendError(
            f"DeepSpeed runs on {found!r} in this process, and the model is on {device.type!r}: set DS_ACCELERATOR, or "
            "choose devices="
        )
    return deepspeed


def probe(device: torch.device) -> None:
    """Import it as for an engine; raises what is missing. Local."""
    with _undisturbed(device), unseen_group():
        _import(device)


def forget_groups() -> None:
    """Let go of the process groups that DeepSpeed holds, where it was imported; its copy of the user's group ends."""
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    if groups is not None:
        if groups._WORLD_GROUP in distributed_c10d._world.pg_map:
            dist.destroy_process_group(groups._WORLD_GROUP)
        groups._WORLD_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        groups._ALL_TO_ALL_GROUP = {}
    if comm is not None:
        comm.cdb = None


def without_groups() -> contextlib.AbstractContextManager[None]:
    """Inside, the library takes its own apart although its process groups may be gone: it asks for its rank before it logs."""
    comm = vars(library("deepspeed.comm.comm"))
    nobody = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda group=None: -1)
    return replaced(comm, "cdb", nobody) if comm["cdb"] is None else contextlib.nullcontext()


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
        inside = (*held.values(), *cells)
        todo += [v for v in inside if isinstance(v, FunctionType) or type(v).__module__.startswith("deepspeed.")]


def _reduce_in(dtype: torch.dtype, optimizer: Any) -> None:
    """Of a dtype that the library's configuration cannot name for the reduction of gradients."""
    (bucket,) = optimizer.ipg_buckets.values()
    if isinstance(bucket.buffer, torch.Tensor):  # at stage 3
        bucket.buffer = bucket.buffer.to(dtype)
    optimizer.ipg_buckets = {dtype: bucket}
    optimizer.communication_data_type = dtype


def initialise(
    module: nn.Module, groups: list[list[nn.Parameter]], config: dict[str, Any], device: torch.device
) -> Any:
    """``deepspeed.initialize`` of ``module``; the library divides ``groups`` and never steps. Collective."""
    with _undisturbed(device):
        with unseen_group():
            deepspeed = _import(device)
        # It keeps process groups for good; those of a process group that ended are of no use.
        if library("deepspeed.utils.groups")._WORLD_GROUP not in (None, *distributed_c10d._world.pg_map):
            forget_groups()
        # One of an earlier model's: it takes it for a mistake.
        library("deepspeed.utils.groups")._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        process = running()
        if process is not None and forget_groups not in process.releases:
            process.releases.append(forget_groups)
        divided = config["zero_optimization"]
        config = {**config, "zero_optimization": {**divided, "memory_efficient_linear": False}}
        stand_in = torch.optim.SGD([{"params": group} for group in groups], lr=0.0)
        # All ranks have rank 0's weights, or wait for their own.
        changed: dict[str, Any] = {"_broadcast_model": lambda engine: None}
        if wide := (double := torch.float64) in {p.dtype for group in groups for p in group}:
            # Its configuration has no name for this: it would keep such gradients in float32.
            changed["get_data_types"] = lambda engine: (double, double)
        kind = type("DeepSpeedEngine", (deepspeed.DeepSpeedEngine,), changed)
        # Its shared-memory op takes a minute to compile and serves only inference.
        ops = replaced(vars(library("deepspeed.ops")), "__compatible_ops__", collections.defaultdict(bool))
        with ops, replaced(vars(deepspeed), kind.__name__, kind):
            if divided["stage"] == 3:  # one weight after the other; else it would bring all of them to the device first
                deepspeed.zero.Init(module=module, config_dict_or_path=config)
            engine = deepspeed.initialize(model=module, optimizer=stand_in, config=config, dist_init_required=False)[0]
    if wide and config.get("communication_data_type") is None:
        _reduce_in(double, engine.optimizer)
    _renamed.need(engine)
    for patch in _comparisons() if divided["stage"] == 3 else ():
        patch.need(engine)
    if divided["stage"] == 3 and divided.get("memory_efficient_linear", True):
        _efficient.need(engine)
    if device.type == "cpu":
        _ranges().need(engine)
    zero, forward = engine.optimizer, [engine.module_forward_pre_hook, engine.module_forward_post_hook]
    for hooks in (forward, zero._grad_acc_hooks, getattr(zero, "_leaf_module_hooks", [])):
        remove_hooks(hooks)
    library("deepspeed.utils.debug").debug_clear_module_and_param_names()
    return engine
