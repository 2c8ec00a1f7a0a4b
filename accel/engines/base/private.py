"""The private names of torch that accel relies on, each with its reason, and the check that an installed version has them.

Those of one backend's own library are in that backend, and are checked here too.
"""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, Final

from ...errors import BackendError

#: Where names are (``module:`` or ``module:Class.``), which, and what for.
Names = Sequence[tuple[str, str, str]]

_GROUPS: Final = "torch.distributed:ProcessGroup."
_CLIP: Final = "torch.nn.utils.clip_grad:"
_TABLES: Final = "_parameters _modules _buffers _non_persistent_buffers_set"
#: What every backend uses on several ranks.
_COMMON: Final[Names] = (
    ("torch.distributed.distributed_c10d:", "_world.pg_map", "closing every group where a rank is gone"),
    ("torch.distributed.distributed_c10d:", "_get_default_store", "what ranks tell each other outside of collectives"),
    (_GROUPS, "_get_backend _device_types", "which rank is behind"),
    ("torch._C._distributed_c10d:Backend.", "_get_sequence_number_for_group", "which rank is behind"),
    (_GROUPS, "_register_backend _set_group_name _set_group_desc", "groups connected anew where memory ran out"),
    ("torch.autograd:Variable.", "_execution_engine.queue_callback", "the end of a backward"),
    ("torch.autograd:", "_engine_run_backward graph._engine_run_backward", "the begin and the end of each backward"),
    ("torch._C:", "_current_graph_task_id", "whether a backward runs, and which"),
    ("torch._C:", "_functorch.peek_interpreter_stack", "transforms of torch.func around a forward"),
    ("torch._C:", "DisableTorchFunctionSubclass", "parameters whose class looks at their uses"),
    ("torch._C:TensorBase.", "_version", "writes in place"),
    (_CLIP, "_group_tensors_by_device_and_dtype", "final gradients in torch's clipping"),
    (_CLIP, "_get_total_norm _clip_grads_with_norm_", "a norm over all ranks in torch's clipping"),
    ("torch:", "_foreach_norm _foreach_mul_ _foreach_add_ _foreach_copy_", "many gradients at once"),
    ("torch.nn.modules.module:", "_WrappedHook", "whose hook of a module it is"),
    ("torch.utils.checkpoint:", "_checkpoint_without_reentrant_generator", "attention computed again in backward"),
    ("torch._compile:", "_disable_dynamo", "what stays outside of compiled code"),
    ("torch:", "_has_compatible_shallow_copy_type", "whether a conversion keeps the parameter object"),
    ("torch.nn:Module.", _TABLES, "tensors where a module holds them"),
)
_OF_BUCKETS: Final = "torch.distributed:Reducer."
_REDUCER: Final[Names] = (
    (_OF_BUCKETS, "_autograd_hook", "parameters that get no gradient"),
    (_OF_BUCKETS, "_check_reducer_finalized", "whether a reduction came to its end, and what it waits for"),
    (_OF_BUCKETS, "_reset_state", "parameters that count as used"),
)
_STATE: Final = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState."
_CONTEXT: Final = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPStateContext."
_GROUP: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup."
_PARAM: Final = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam."
_FSDP2: Final[Names] = (
    ("torch.distributed.fsdp:FSDPModule.", "_get_fsdp_state", "its state of a module"),
    ("torch.distributed.fsdp:FSDPModule.", "reset_iter_state", "a forward or backward that ended half-way"),
    (_STATE, "_lazy_init _fsdp_param_groups", "its groups before the first forward"),
    (_STATE, "_training_state _pre_forward _post_forward", "methods of the model, computed as a forward"),
    (_STATE, "_register_root_post_backward_final_callback", "the begin of a backward"),
    (_STATE, "_register_pre_backward_hook", "the backward of what a forward returns"),
    (_STATE, "_state_ctx _root_post_backward_final_callback", "the end of a backward"),
    (_CONTEXT, "all_states post_backward_final_callback_queued", "the begin of a backward"),
    (_GROUP, "fsdp_params modules", "its parameters and modules"),
    (_GROUP, "unshard _all_gather_result is_unsharded", "announcing what is gathered"),
    (_GROUP, "post_backward _training_state", "announcing what is reduced"),
    (_GROUP, "is_sharded _to_sharded", "freeing what is gathered"),
    (_GROUP, "_init_mp_dtypes", "parameters that are frozen or unfrozen later"),
    (_GROUP, "mesh_info post_forward_mesh_info", "letting go of process groups"),
    (_PARAM, "sharded_param sharded_state reset_sharded_param", "the shard of a parameter"),
    (_PARAM, "_unsharded_param unsharded_accumulated_grad", "gathered parameters and their gradients"),
    (_PARAM, "all_gather_inputs init_all_gather_outputs", "a first forward in inference mode"),
    (_PARAM, "init_unsharded_param free_unsharded_param", "a first forward in inference mode"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param:", "ShardedState.SHARDED", "whether a parameter is gathered"),
    ("torch.distributed.fsdp._fully_shard._fsdp_common:", "TrainingState.IDLE", "whether a forward or backward runs"),
    ("torch.distributed._composable_state:", "_module_state_mapping", "teardown"),
    ("torch._C:", "_is_alias_of", "weights among what a forward returns"),
    ("torch.distributed.tensor:DTensor.", "_op_dispatcher._custom_op_handlers", "one number, or a row, of a part"),
    ("torch.distributed.tensor:DTensor.", "_local_tensor _spec", "p.data = ... of a shard"),
    ("torch.optim._muon:", "_zeropower_via_newtonschulz", "torch.optim.Muon on shards"),
)
_HOOKS: Final = "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks"
_OF: Final[Mapping[str, Names]] = {
    "ddp": _REDUCER,
    "ddp2": _REDUCER,
    "fsdp": _FSDP2,
    "sharded": (
        ("torch._utils:", "_flatten_dense_tensors _unflatten_dense_tensors", "many gradients in one message"),
        ("torch._C:", "_storage_Use_Count", "weights that something else uses too, which must not move"),
    ),
    "pipeline": (
        ("torch._C:", "_autograd._get_current_graph_task_keep_graph", "retain_graph=True in a stage of another rank"),
        ("torch.nn:Module.", _HOOKS, "hooks that a stage would not call"),
    ),
    "deepspeed": (
        ("torch._C:", "_is_torch_function_enabled", "parameters whose values are on other ranks"),
        ("torch.nn:Module.", _HOOKS, "modules as they were"),
    ),
}
#: The versions of torch with which the tests of a backend were run, the oldest first; "" is of all others.
_RAN: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("2.13.0", "2.14.1", "2.15.0"),
    "pipeline": ("2.13.0", "2.15.0"),
    "horovod": ("2.13.0",),
    "xla": ("2.9.0",),
}
_OLDEST_TORCH: Final = "2.11"


def check_torch(backend: str) -> None:
    """Refuse a torch without the names that a backend relies on, when it is first used."""
    ran = _RAN.get(backend, _RAN[""])
    oldest = min(_OLDEST_TORCH, ran[0], key=_numbers)
    require(f"backend {backend!r}", "torch", (*_COMMON, *_OF.get(backend, ())), ran, oldest)


def require(user: str, package: str, names: Names, ran: tuple[str, ...], oldest: str = "") -> None:
    """Refuse (BackendError) a package without some of its private names, on which ``user`` relies, or older than ``oldest``.

    ``ran`` are the versions that are known to work, the oldest first; that one is meant without ``oldest``.
    """
    version, problem = _version(package), ""
    if missing := [
        f"{o}{n} ({reason})" for o, names_of, reason in names for n in names_of.split() if not _found(o + n)
    ]:
        problem = f"relies on parts of {package} that {package} {version} does not have: {', '.join(missing[:5])}"
        problem += ", ..." if len(missing) > 5 else ""
    elif _numbers(version) < _numbers(oldest or ran[0]):
        problem = f"is not known to be right with {package} {version}"
    if problem:
        raise BackendError(
            f"{user} {problem}; it was run with {package} {' and '.join(ran)}: install one of these, or choose another backend"
        )


@functools.cache
def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


@functools.cache
def _found(name: str) -> bool:
    """Whether there is ``module:attribute.attribute``."""
    module, _, path = name.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return False
    for part in path.split("."):
        if not hasattr(owner, part):
            return isinstance(owner, type) and _of_instances(owner, part)
        owner = getattr(owner, part)
    return True


def _of_instances(owner: type[Any], name: str) -> bool:
    """Whether a class declares an attribute of its objects, or its methods set one."""
    if any(name in vars(base).get("__annotations__", ()) for base in owner.__mro__):
        return True
    codes = (f.__code__ for base in owner.__mro__ for f in vars(base).values() if isinstance(f, FunctionType))
    using = (dis.get_instructions(code) for code in codes if name in code.co_names)
    return any(i.opname == "STORE_ATTR" and i.argval == name for instructions in using for i in instructions)
