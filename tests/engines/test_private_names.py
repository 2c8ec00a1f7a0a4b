"""The private names of torch, DeepSpeed and fairscale that accel relies on, each with its reason.

A new version of a library fails here, by the name that it no longer has.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

import accel
from accel.engines.base.versions import check_version
from accel.engines.deepspeed.library import OF_COORDINATOR, OF_STAGE3

#: ``module:`` or ``module:Class.``, names in it, and what accel uses them for.
Names = Sequence[tuple[str, str, str]]

_GROUPS: Final = "torch.distributed:ProcessGroup."
_TABLES: Final = "_parameters _modules _buffers _non_persistent_buffers_set"
#: What every backend uses on several ranks.
_COMMON: Final[Names] = (
    ("torch.distributed.distributed_c10d:", "_world.pg_map", "closing every group where a rank is gone"),
    ("torch.distributed.distributed_c10d:", "_get_default_store", "what ranks tell each other outside of collectives"),
    (_GROUPS, "_get_backend _device_types", "which rank is behind"),
    ("torch.autograd:Variable.", "_execution_engine.queue_callback", "the end of a backward"),
    ("torch.autograd:", "_engine_run_backward graph._engine_run_backward", "the begin and the end of each backward"),
    ("torch._C:", "_current_graph_task_id", "whether a backward runs, and which"),
    ("torch._C:", "DisableTorchFunctionSubclass", "parameters whose class looks at their uses"),
    ("torch._C:TensorBase.", "_version", "writes in place"),
    ("torch.nn:Module.", "_apply", "memory for deferred parameters of FSDP2"),
    ("torch:", "_foreach_norm _foreach_mul_ _foreach_copy_", "many gradients at once"),
    ("torch._compile:", "_disable_dynamo", "what stays outside of compiled code"),
    ("torch:", "_has_compatible_shallow_copy_type", "whether a conversion keeps the parameter object"),
    ("torch.nn:Module.", _TABLES, "tensors where a module holds them"),
    ("torch.nn:Module.", "_load_state_dict_post_hooks _compiled_call_impl", "loading a full state, compiled models"),
    ("torch.nn.modules.batchnorm:", "_BatchNorm", "BatchNorm of any dimension"),
    ("torch.distributed.distributed_c10d:", "_abort_process_group", "ending groups if a rank is gone"),
    ("torch:Tensor.", "_base _post_accumulate_grad_hooks", "views, hooks"),
    ("torch:UntypedStorage.", "_cdata", "which storage was written"),
    ("torch._ops:OpOverload.", "_schema", "operators that write"),
    ("torch.distributed:", "_broadcast_coalesced", "rank 0's tensors in few messages, as DDP sends its weights"),
    ("torch.optim:", "_muon", "torch.optim.Muon on shards"),
)
_OF_BUCKETS: Final = "torch.distributed:Reducer."
_REDUCER: Final[Names] = (
    (_OF_BUCKETS, "_autograd_hook", "parameters that get no gradient"),
    (_OF_BUCKETS, "_check_reducer_finalized", "whether a reduction came to its end, and what it waits for"),
)
_STATE: Final = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState."
_CONTEXT: Final = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPStateContext."
_GROUP: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup."
_PARAM: Final = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam."
_FSDP2: Final[Names] = (
    ("torch.distributed.fsdp:FSDPModule.", "_get_fsdp_state", "its state of a module"),
    ("torch.distributed.fsdp:FSDPModule.", "reset_iter_state", "a forward or backward that ended half-way"),
    (_STATE, "_lazy_init _fsdp_param_groups", "its groups before the first forward"),
    (_STATE, "_training_state", "methods of the model, computed as a forward"),
    (_STATE, "_state_ctx", "whether an exception ended a backward"),
    (_CONTEXT, "post_backward_final_callback_queued", "whether an exception ended a backward"),
    (_GROUP, "fsdp_params", "its parameters"),
    (_GROUP, "unshard _all_gather_result is_unsharded", "announcing what is gathered"),
    (_GROUP, "pre_backward post_backward", "announcing what is reduced"),
    (_GROUP, "is_sharded reshard", "freeing what is gathered"),
    (_GROUP, "_init_mp_dtypes", "parameters that are frozen or unfrozen later"),
    (_GROUP, "mesh_info", "letting go of process groups"),
    (_PARAM, "sharded_param reset_sharded_param", "the shard of a parameter"),
    (_PARAM, "unsharded_param", "gathered parameters and their gradients"),
    ("torch.distributed.fsdp._fully_shard._fsdp_common:", "TrainingState.IDLE", "whether a forward or backward runs"),
    ("torch.distributed._composable_state:", "_module_state_mapping", "teardown"),
    ("torch.distributed.tensor:DTensor.", "_op_dispatcher._custom_op_handlers", "one number, or a row, of a shard"),
    ("torch.distributed.tensor:DTensor.", "_local_tensor _spec", "p.data = ... of a shard"),
    ("torch.optim._muon:", "_zeropower_via_newtonschulz", "torch.optim.Muon on shards"),
)
_HOOKS: Final = "_forward_hooks _forward_pre_hooks _backward_hooks"
_OF: dict[str, Names] = {
    "ddp": _REDUCER,
    "ddp2": _REDUCER,
    "fsdp": _FSDP2,
    "sharded": (("torch._utils:", "_unflatten_dense_tensors", "many gradients in one message"),),
    "deepspeed": (("torch.nn:Module.", _HOOKS, "modules as they were"),),
}
_ENGINE: Final = "deepspeed.runtime.engine:DeepSpeedEngine."
_ZERO12: Final = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer."
_ZERO3: Final = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3."
_OFFLOAD: Final = "deepspeed.runtime.zero.parameter_offload:"
_COORDINATOR: Final = "deepspeed.runtime.zero.partitioned_param_coordinator:"
_OWN: Final = f"{_COORDINATOR}PartitionedParameterCoordinator."
#: What it puts on a parameter of stage 3.
_PARAMETER: Final = "deepspeed.runtime.zero.partition_parameters:Init."
DEEPSPEED: Names = (
    ("deepspeed.accelerator:", "get_accelerator", "which device it runs on"),
    ("deepspeed.utils.debug:", "debug_clear_module_and_param_names", "letting go of models"),
    ("deepspeed.utils.groups:", "_WORLD_GROUP", "letting go of process groups"),
    ("deepspeed.utils.groups:", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "letting go of process groups"),
    (_ZERO12, "_hp_mapping", "letting go of parameters"),
    ("deepspeed.comm.comm:", "cdb", "letting go of process groups"),
    (_ENGINE, "module_forward_pre_hook module_forward_post_hook", "several forwards before a backward"),
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
    (_ZERO3, "grad_partitions_flat_buffer partition_grads", "reduced gradients"),
    (_ZERO3, f"{OF_STAGE3}reduce_and_partition_ipg_grads ipg_buckets", "its buckets"),
    (_ZERO3, "reduce_independent_p_g_buckets_and_remove_grads reduce_and_partition_stream", "its buckets"),
    (_ZERO3, "offload_optimizer fp32_partitioned_groups_flat", "weights that are stepped elsewhere"),
    (_ZERO3, "parameter_offload persistent_parameters", "gathered weights"),
    (_OFFLOAD, "FWD_MODULE_STACK", "weights that one module reads from another"),
    (_OFFLOAD, "DeepSpeedZeRoOffload.get_param_coordinator", "what gathers weights"),
    (_OFFLOAD, "DeepSpeedZeRoOffload.release_backward_leftovers", "the end of a backward"),
    (_OFFLOAD, "DeepSpeedZeRoOffload.pre_sub_module_forward_function", "what is gathered"),
    (_OFFLOAD, "DeepSpeedZeRoOffload.pre_sub_module_backward_function", "what is gathered"),
    (_OFFLOAD, "DeepSpeedZeRoOffload.post_sub_module_forward_function", "its hooks on plain tensors"),
    (_OFFLOAD, "DeepSpeedZeRoOffload.post_sub_module_backward_function", "its hooks on plain tensors"),
    (_OWN, "reset_step", "the start of a forward"),
    (_OWN, f"{OF_COORDINATOR}params_to_release", "letting go of models"),
    (_OWN, "is_invalid_trace _invalidate_trace", "a new start after an exception"),
    (_OWN, f"{OF_COORDINATOR}allgather_stream", "weights that are gathered after they were written"),
    (_COORDINATOR, "assert_ints_same_as_other_ranks", "a comparison that accel makes itself"),
    ("deepspeed.runtime.zero.linear:", "zero3_linear_wrap", "gathered weights"),
    ("deepspeed.runtime.zero:", "register_external_parameter", "weights that one module reads from another"),
    (
        "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus.",
        "AVAILABLE INFLIGHT NOT_AVAILABLE",
        "what is gathered",
    ),
    ("deepspeed.runtime.zero.partition_parameters:", "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR", "what is gathered"),
    (_PARAMETER, "ds_status ds_tensor ds_numel ds_shape ds_id ds_persist item", "what this rank has of a weight"),
    (_PARAMETER, "ds_active_sub_modules ds_zero_partition_rank", "what this rank has of a weight"),
    (_PARAMETER, "ds_secondary_tensor all_gather all_gather_coalesced partition", "what this rank has of a weight"),
)
FAIRSCALE: Names = (
    ("fairscale.optim.oss:OSS.", "_param_to_rank", "which rank owns which parameter"),
    ("fairscale.optim.oss:OSS.", "refresh_trainable buckets", "weights in flat buffers"),
    ("fairscale.optim.oss:OSS.", "_broadcast_params _default_device", "the owners' weights on all ranks"),
    ("fairscale.nn.misc:ParamBucket.", "buffer", "weights in flat buffers"),
)
#: Names that no row can look up: of Python, operators, NCCL, fsspec, and marks of torch's schedulers and DeepSpeed.
_PYTHON: Final = {"_at_fork_reinit", "_current_frames", "_exit", "_getframe", "_register_atexit", "_replace"}
_OPERATORS: Final = {"_C", "_foreach_lerp_", "_local_scalar_dense"}
_MARKS: Final = {"_opt_called", "_external_params", "_metadata"}
_OTHERS: Final = {"_group_start", "_group_end", "_get_kwargs_from_urls", "_strip_protocol"}
ELSEWHERE: Final = _PYTHON | _OPERATORS | _MARKS | _OTHERS
ALL: Final = [*_COMMON, *(row for rows in _OF.values() for row in rows), *DEEPSPEED, *FAIRSCALE]
PACKAGE: Final = Path(accel.__file__).parent


def has(path: str) -> bool:
    """True if ``module:attribute.attribute`` exists, or the class assigns such an attribute to its objects."""
    module, _, attributes = path.partition(":")
    owner: Any = importlib.import_module(module)
    for name in attributes.split("."):
        if not hasattr(owner, name):
            plain = re.sub(r"^_\w+__", "__", name)
            return inspect.isclass(owner) and any(
                re.search(rf"\b(self|param)\.{plain}\b|^    {plain}:", inspect.getsource(base), re.MULTILINE)
                for base in owner.__mro__
                if base.__module__ not in ("builtins", "pybind11_builtins")
            )
        owner = getattr(owner, name)
    return True


def rows(package: str) -> Iterator[tuple[str, str]]:
    for owner, names, reason in ALL:
        if owner.startswith(package):
            yield from ((owner + name, reason) for name in names.split())


@pytest.mark.parametrize("package", ["torch", "deepspeed", "fairscale"])
def test_the_installed_version_has_the_names(package: str) -> None:
    pytest.importorskip(package)
    missing = [f"{path} ({reason})" for path, reason in rows(package) if not has(path)]
    assert not missing, f"{package} {importlib.metadata.version(package)} lacks them"


def sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]


def test_no_entry_is_stale() -> None:
    text = "\n".join(sources())
    names = {path.rpartition(":")[2].rpartition(".")[2] for path, _ in rows("")}
    plain = {re.sub(rf"^({OF_STAGE3}|{OF_COORDINATOR})", "", name) for name in names}
    assert {name for name in plain if name not in text} == set()


def private_attributes() -> set[str]:
    """Return the names with one underscore that accel reads from other objects and doesn't define itself."""
    defined, used = set[str](), set[str]()
    for node in (node for source in sources() for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (defined if own else used).add(node.attr)
    return {name for name in used - defined if re.match(r"_[^_]", name)}


def test_the_list_is_complete() -> None:
    listed = {part for path, _ in rows("") for part in path.rpartition(":")[2].split(".")}
    assert private_attributes() - listed - ELSEWHERE == set()


def test_versions_outside_of_the_tested_range(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.13.1+cpu")
    check_version("some", "torch", "2.11", "2.13")
    assert not caplog.messages
    with pytest.raises(accel.BackendError, match="'some' needs torch 2.14 or newer, but 2.13.1"):
        check_version("some", "torch", "2.14", "2.15")
    for _ in range(2):
        check_version("some", "torch", "2.11", "2.12")
    assert caplog.messages == ["backend='some' was tested with torch up to 2.12, but 2.13.1+cpu is installed"]
