"""The one place that reaches into FSDP2's own objects: a module under ``fully_shard``, and the way back."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast, final

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...errors import BackendError, RankMismatchError
from ...gradients.log import remove_hooks
from ...gradients.patches import Patch, data_patch, ignored, shard_patches
from ...precision import here
from ...process import Process
from ...process.control import Waiting, agree, announce
from ...shard import Box
from ...trees import exchange
from ..base.absent import refuse_other_tensor
from ..base.digest import digests
from ..base.raw_objects import Snapshot
from .plan import Mesh, cut


def _owner(tensor: object) -> ShardedModule | None:
    # By equality: DTensor remembers what it has computed, and with it the mesh of an engine that was like this one.
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    return next((module for module in _patches[0].users() if mesh in module.meshes), None)


def _gather(what: str, shards: Sequence[DTensor]) -> list[torch.Tensor]:
    """Return the full tensors of shards. Collective."""
    process = next(owner for owner in map(_owner, shards) if owner is not None).process
    announce(process, what)
    with Waiting(process, what):
        return [cast(DTensor, shard.detach()).full_tensor() for shard in shards]


def require_same(what: str, values: Sequence[torch.Tensor]) -> None:
    """Refuse (RankMismatchError) values of which each rank would write a part, and that are not the same on all. Collective."""
    told = agree(what, digests(values))
    if any(theirs != told[0] for theirs in told):
        other = next(rank for rank, theirs in enumerate(told) if theirs != told[0])
        raise RankMismatchError(
            f"{what}: rank {other} writes other values than rank 0, and each rank would write its part of its own: compute them "
            "alike on all ranks, or take rank 0's (accel.broadcast(values)), of gradients the mean (accel.all_reduce(g, 'mean'))"
        )


def _set_data(tensor: Any, value: torch.Tensor) -> bool:
    return any(module.set_data(tensor, value) for module in _patches[0].users())


_patches: Final[tuple[Patch, ...]] = (
    *shard_patches(lambda tensor: "fsdp" if _owner(tensor) else "", _gather),
    data_patch(_set_data),
    ignored("FSDP2-wrapped module .* returned a view tensor"),  # which `watch_forward` sees to
)

# -- What FSDP2 gathers and reduces, announced before it does so -------------------------------------------------------


def watch(process: Process, group: Any, name: str, label: str) -> None:
    """Announce what one group of FSDP2's parameters gathers and reduces; ``name`` is its module's."""
    unshard, post_backward = group.unshard, group.post_backward
    gathering, reducing = (f"the {verb} of {name} ({label})" for verb in ("gathering", "reduction"))
    in_gather, in_reduce = Waiting(process, gathering), Waiting(process, reducing)
    infos = [(p, p._module_info) for p in group.fsdp_params]
    places = [(i.module._parameters, i.param_name, p, p.sharded_param.dtype) for p, i in infos]

    def gather(*args: Any, **kwargs: Any) -> Any:
        for table, key, p, dtype in places:
            if (found := table.get(key)) is not p.sharded_param and found is not p._unsharded_param:
                refuse_other_tensor(p._param_fqn or key, "FSDP2")
            if p.sharded_param.dtype is not dtype:
                raise BackendError(
                    f"{p._param_fqn or key} of {label} is {p.sharded_param.dtype} and was {dtype} in accel.setup: call "
                    "raw = accel.teardown(model), convert it, and set it up again"
                )
        if group._all_gather_result is not None or group.is_unsharded:
            return unshard(*args, **kwargs)
        announce(process, gathering)
        with in_gather:
            return unshard(*args, **kwargs)

    def reduce(*args: Any) -> Any:
        came = tuple(i for i, p in enumerate(group.fsdp_params) if has_gradient(p))
        if not came:
            return post_backward(*args)
        announce(process, reducing, came)
        with in_reduce:
            return post_backward(*args)

    group.unshard, group.post_backward = gather, reduce


_is_alias: Final[Callable[..., bool]] = torch._C._is_alias_of  # type: ignore[attr-defined]


def watch_forward(state: Any, group: Any) -> None:
    """Gather the weights of a group for a backward that begins in any tensor that its forward returned.

    FSDP2 looks into containers only. A dataclass may hold tensors too, and a view that is written to (``x += y``) gets a new
    graph, so its base has to tell. Weights are copied: FSDP2 frees their memory, and using them would crash the process.
    """
    post_forward = group.post_forward
    weights = [param._unsharded_param for param in group.fsdp_params]

    def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
        reached: list[torch.Tensor] = []

        def outlive(tensor: torch.Tensor) -> torch.Tensor:
            base = tensor if tensor._base is None else tensor._base
            if base.grad_fn is None and any(_is_alias(here(base), here(weight)) for weight in weights):
                return tensor.clone()
            if base is not tensor:
                reached.append(base)
            return tensor

        def outlive_in_object(tensor: torch.Tensor) -> torch.Tensor:
            reached.append(outlive(tensor))
            return reached[-1]

        output = exchange(outlive, output, outlive_in_object)
        state._register_pre_backward_hook(reached)
        return post_forward(module, inputs, output)

    group.post_forward = leave


def has_gradient(param: Any) -> bool:
    """Whether one of FSDP2's parameters has a gradient that was not reduced."""
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None


def drop(param: Any) -> None:
    """Drop such a gradient."""
    param._unsharded_param.grad = None
    if param.unsharded_accumulated_grad is not None:  # aside in another dtype, as before torch 2.15
        param.unsharded_accumulated_grad = None


def wrap(local: torch.Tensor, shape: torch.Size | tuple[int, ...], like: DTensor) -> DTensor:
    """A local tensor as this rank's shard of a tensor of ``shape``."""
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def place_of(spec: DTensorSpec) -> tuple[int, Box]:
    """The first row of this rank's part, and the box that it has rows of: what tensor parallelism has left of the tensor."""
    sizes, starts = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    if sizes[1:] == tuple(spec.shape[1:]):
        return starts[0], ()
    ends = (a + n for a, n in zip(starts[1:], sizes[1:], strict=True))
    return starts[0], ((0, spec.shape[0]), *zip(starts[1:], ends, strict=True))


@final
class ShardedModule:
    """A module whose parameters are shards, gathered block by block while forward and backward need them."""

    def __init__(self, module: nn.Module, process: Process, options: Any) -> None:
        self.module: Any = module
        self.mesh = Mesh(options, process)
        #: Those of the shards, which may lie along all axes or not along that of tensor parallelism.
        self.meshes: set[DeviceMesh] = set()
        self.groups: list[Any] = []
        self.params: list[Any] = []
        self._wholes: list[nn.Parameter] = []
        self._by_shard: dict[int, Any] = {}
        self.process = process
        self._options = options
        self._hooks: list[Any] = []
        self._inside: set[int] = set()
        self.snapshot = Snapshot(module)
        self.context: Any = None

    def apply(self, blocks: Sequence[nn.Module]) -> None:
        """Put shards in the parameters' places, but for what cannot be cut. ``blocks`` are gathered as one, inner ones first."""
        options = self._options
        if self.mesh.parallel:
            cut(self.module, self.mesh.tensor, options.plan)
        for patch in _patches:
            patch.need(self)
        pins = self.process.device.type != "cpu"
        offload = CPUOffloadPolicy(pin_memory=pins) if options.cpu_offload else OffloadPolicy()
        whole_ones = set(kept_whole(self.module))
        self._inside = {id(m) for child in blocks for m in child.modules()}
        for child in [*blocks, self.module]:
            whole = child is self.module and options.param_dtype is not None
            policy = MixedPrecisionPolicy(
                param_dtype=options.param_dtype,
                reduce_dtype=options.reduce_dtype or (torch.float32 if options.param_dtype is not None else None),
                output_dtype=torch.float32 if whole else None,
            )
            fully_shard(
                child,
                mesh=self.mesh.data,
                reshard_after_forward=options.reshard_after_forward,
                mp_policy=policy,
                offload_policy=offload,
                ignored_params=whole_ones,
            )

    def initialize(self) -> None:
        """Let FSDP2 find its groups, now that shards have memory; nothing of it fails after this."""
        self.root = self.module._get_fsdp_state()
        self.root._lazy_init()
        self.context = self.root._state_ctx
        self.groups = [g for s in self.context.all_states for g in s._fsdp_param_groups]
        self.params = [p for g in self.groups for p in g.fsdp_params]
        for param in self.params:
            _prepare(param, self.mesh.sizes["shard"], self.process.device)
            self._wholes.append(param._unsharded_param)
        self.meshes = {param.sharded_param.device_mesh for param in self.params}
        self.snapshot.changed()

    def begin(self, label: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Take over."""
        self._by_shard = {id(param.sharded_param): param for param in self.params}
        names = {id(m): n or "the parameters outside of all blocks" for n, m in self.module.named_modules()}
        for group in self.groups:
            watch(self.process, group, names[id(group.modules[0])], label)
        for state in self.context.all_states:
            for group in state._fsdp_param_groups:
                watch_forward(state, group)
            _tell(state, self.context, before, after)
        for child in self.module.modules():
            own = id(child) not in self._inside and child is not self.module
            if own and any(True for _ in child.parameters(recurse=False)):
                self._hooks += _enter_by(child, self.root)
        for whole, shard in self.gathered():
            # Autograd never comes to the shard: a hook there would wait for ever.
            vars(shard)["register_hook"] = functools.partial(_register_hook, weakref.ref(whole))

    def gathered(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter as it is while it is gathered, with its shard."""
        return ((param._unsharded_param, param.sharded_param) for param in self.params)

    def reshard(self) -> None:
        """Free what is gathered: the next use gathers again. Local."""
        for group in self.groups:
            if not group.is_sharded:
                group._to_sharded()

    def compute(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that computes with the root's parameters, as a forward."""
        if self.root._training_state is not TrainingState.IDLE:
            return fn(*args, **kwargs)
        args, kwargs = self.root._pre_forward(self.module, args, kwargs)
        return self.root._post_forward(self.module, args, fn(*args, **kwargs))

    def reset(self) -> None:
        """Forget a forward or backward that ended half-way."""
        if torch._C._current_graph_task_id() == -1:  # inside a backward it is activation checkpointing that ends early
            self.module.reset_iter_state()
            for param in self.params:  # it asks groups, of which an interrupt may have left some parameters gathered
                if param.sharded_state is not ShardedState.SHARDED:
                    param.to_sharded()

    def set_data(self, tensor: Any, value: torch.Tensor) -> bool:
        """Set the values of a shard, from full values that are the same on every rank or from a DTensor that is sharded alike.

        Return False if the tensor is no shard of this module. Collective for full values.
        """
        param = self._by_shard.get(id(tensor))
        if param is None or param.sharded_param is not tensor:
            return False
        shape = tuple(tensor.shape)
        if not isinstance(value, DTensor) and value.shape == tensor.shape and value.dtype is tensor.dtype:
            require_same(f"p.data = ... of a parameter of shape {shape}", [value])
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        if not isinstance(value, DTensor) or value._spec != tensor._spec or value.dtype is not tensor.dtype:
            raise BackendError(
                f"p.data = ... of a sharded parameter of shape {shape} and {tensor.dtype} got a {type(value).__name__} of "
                f"{tuple(value.shape)} and {value.dtype}. Use load_state_dict(full) of the model's handle."
            )
        if param.sharded_state is not ShardedState.SHARDED:
            raise BackendError("p.data = ... between a forward and its backward. Set weights after the backward.")
        tensor._local_tensor = value._local_tensor.detach()
        param.reset_sharded_param()
        return True

    def let_go(self) -> None:
        """Drop the process groups. Local."""
        for group in self.groups:
            for info in (group.mesh_info, group.post_forward_mesh_info):
                if info is not None:
                    info.shard_process_group = info.replicate_process_group = None

    def undo(self) -> None:
        """Make the modules plain again; whoever calls puts parameters in the shards' places. Local."""
        for patch in _patches:
            patch.drop(self)
        remove_hooks(self._hooks)
        for state in [] if self.context is None else self.context.all_states:
            for name in ("_register_root_post_backward_final_callback", "_root_post_backward_final_callback"):
                vars(state).pop(name, None)
        self.snapshot.restore()
        for child in self.module.modules():
            _composable_state._module_state_mapping.pop(child, None)


def kept_whole(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that cannot be cut, which every rank has: scalars, and those without elements."""
    return [p for p in module.parameters() if not p.dim() or not p.numel()]


def _prepare(param: Any, world_size: int, device: torch.device) -> None:
    """Make the tensors that a parameter is gathered into: a first forward in inference mode would make them useless."""
    inputs = param.all_gather_inputs
    param.init_all_gather_outputs([t.numel() for t in inputs], [t.dtype for t in inputs], world_size, device)
    param.init_unsharded_param()
    param.free_unsharded_param()


def _tell(state: Any, context: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` where a backward reaches FSDP2 first and ``after`` at its end."""
    register, finish = state._register_root_post_backward_final_callback, state._root_post_backward_final_callback

    def begin() -> None:
        if not context.post_backward_final_callback_queued:
            before()
        register()

    def end() -> None:
        for group in (g for other in context.all_states for g in other._fsdp_param_groups):
            # Gathered once more since it was reduced, as by a second reentrant checkpoint of the same block.
            if not group.is_sharded and group._training_state is TrainingState.POST_BACKWARD:
                group._training_state = TrainingState.IDLE
        finish()
        after()

    state._register_root_post_backward_final_callback = begin
    state._root_post_backward_final_callback = end


def _enter_by(child: nn.Module, root: Any) -> list[Any]:
    """Gather the root's parameters when a submodule of it is called by itself."""
    entered: list[nn.Module] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if root._training_state is not TrainingState.IDLE:
            return None
        args, kwargs = root._pre_forward(module, args, kwargs)
        entered.append(module)
        return args, kwargs

    def leave(module: nn.Module, args: Any, out: Any) -> Any:
        if not entered:
            return None
        entered.clear()
        return root._post_forward(module, args, out)

    return [child.register_forward_pre_hook(enter, prepend=True, with_kwargs=True), child.register_forward_hook(leave)]


def _register_hook(reference: weakref.ref[nn.Parameter], hook: Callable[..., Any]) -> Any:
    """As any tensor's: the hook gets this rank's own gradient, whole, before it is reduced."""
    whole = reference()
    assert whole is not None  # as long as the shard
    return whole.register_hook(hook)
