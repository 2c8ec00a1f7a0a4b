"""A module under torch's ``fully_shard``. Only this file reaches into FSDP2's own objects."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor, distribute_tensor

from ...errors import BackendError
from ...gradients.hooks import remove_hooks
from ...gradients.patches import Patch, data_patch, ignored, shard_patches
from ...process import Process
from ...process.control import Waiting, announce
from ...trees import all_tensors
from ..base.absent import refuse_other_tensor
from ..base.raw_objects import Snapshot
from .plan import Mesh, cut

# -- patches of torch while a sharded module lives -------------------------------------------------


def _owner(tensor: object) -> ShardedModule | None:
    # By value: DTensor caches results together with the equal mesh of an earlier engine.
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    return next((module for module in _patches[0].users() if mesh in module.meshes), None)


def _set_data(tensor: Any, value: torch.Tensor) -> bool:
    return any(module.set_data(tensor, value) for module in _patches[0].users())


_patches: Final[tuple[Patch, ...]] = (
    *shard_patches(lambda tensor: "fsdp" if _owner(tensor) else ""),
    data_patch(_set_data),
    ignored(
        "FSDP2-wrapped module .* returned a view tensor"
    ),  # `_watch_group` registers hooks for these
)


@final
class ShardedModule:
    """A module whose parameters are shards, which are gathered block by block."""

    def __init__(self, module: nn.Module, process: Process, options: Any) -> None:
        self.module: Any = module
        self.process = process
        self.mesh = Mesh(options, process)
        #: Of the shards. With tensor parallelism, shards of uncut layers lie on fewer axes.
        self.meshes: set[DeviceMesh] = set()
        #: FSDP2's own: ``FSDPState``, ``FSDPParamGroup`` and ``FSDPParam`` objects.
        self.states: list[Any] = []
        self.groups: list[Any] = []
        self.params: list[Any] = []
        self.snapshot = Snapshot(module)
        self._by_shard: dict[int, Any] = {}
        self._options = options
        self._hooks: list[Any] = []

    # -- setup -------------------------------------------------------------------------------------

    def apply(self, blocks: Sequence[nn.Module]) -> None:
        """Replace parameters by shards. Each of ``blocks``, inner ones first, is gathered alone."""
        options = self._options
        if self.mesh.parallel:
            cut(self.module, self.mesh.tensor, options.plan)
        for patch in _patches:
            patch.need(self)
        pins = self.process.device.type != "cpu"
        offload = CPUOffloadPolicy(pin_memory=pins) if options.cpu_offload else OffloadPolicy()
        mixed = options.param_dtype is not None
        for child in [*blocks, self.module]:
            precision = MixedPrecisionPolicy(
                param_dtype=options.param_dtype,
                reduce_dtype=options.reduce_dtype or (torch.float32 if mixed else None),
                output_dtype=torch.float32 if mixed and child is self.module else None,
            )
            fully_shard(
                child,
                mesh=self.mesh.data,
                reshard_after_forward=options.reshard_after_forward,
                mp_policy=precision,
                offload_policy=offload,
                ignored_params=set(unsharded(self.module)),
            )

    def initialize(self) -> None:
        """Let FSDP2 build its groups, once the shards have memory."""
        self.root = self.module._get_fsdp_state()
        self.root._lazy_init()
        self.states = self.root._state_ctx.all_states
        self.groups = [group for state in self.states for group in state._fsdp_param_groups]
        self.params = [param for group in self.groups for param in group.fsdp_params]
        for param in self.params:
            _prepare(param, self.mesh.sizes["shard"], self.process.device)
        self.meshes = {param.sharded_param.device_mesh for param in self.params}
        self._by_shard = {id(param.sharded_param): param for param in self.params}
        self.snapshot.changed()

    def watch(
        self, label: str, begin_backward: Callable[[], None], end_backward: Callable[[], None]
    ) -> None:
        """Announce what FSDP2 gathers and reduces, and call functions around each backward."""
        names = {
            id(m): n or "the parameters outside of all blocks"
            for n, m in self.module.named_modules()
        }
        inside: set[int] = set()
        for state in self.states:
            _watch_backward(state, self.root._state_ctx, begin_backward, end_backward)
            for group in state._fsdp_param_groups:
                _watch_group(state, group, self.process, names[id(group.modules[0])], label)
                if state is not self.root:
                    inside.update(id(child) for block in group.modules for child in block.modules())
        for child in self.module.modules():
            outside = id(child) not in inside and child is not self.module
            if outside and any(True for _ in child.parameters(recurse=False)):
                self._hooks += _enter_by(child, self.root)
        for gathered, shard in self.gathered():
            # Autograd never reaches the shard, so a hook of the user's there would never run.
            vars(shard)["register_hook"] = functools.partial(_register_hook, weakref.ref(gathered))

    def gathered(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield the parameter that stands in graphs, and its shard."""
        return ((param._unsharded_param, param.sharded_param) for param in self.params)

    # -- training ----------------------------------------------------------------------------------

    def compute(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method as if it were the root's forward, so that its parameters are gathered."""
        if self.root._training_state is not TrainingState.IDLE:
            return method(*args, **kwargs)
        args, kwargs = self.root._pre_forward(self.module, args, kwargs)
        return self.root._post_forward(self.module, args, method(*args, **kwargs))

    def reshard(self) -> None:
        """Free what is gathered. The next use gathers it again."""
        for group in self.groups:
            if not group.is_sharded:
                group._to_sharded()

    def reset(self) -> None:
        """Clear what an exception in a forward or backward left."""
        if torch._C._current_graph_task_id() != -1:
            return  # checkpointing ends its second forward by an exception
        self.module.reset_iter_state()
        for param in self.params:  # Ctrl-C can leave a group partly gathered
            if param.sharded_state is not ShardedState.SHARDED:
                param.to_sharded()

    def drop_unreduced(self) -> None:
        """Drop the gradients that a backward left unreduced."""
        for param in self.params:
            param._unsharded_param.grad = None
            if param.unsharded_accumulated_grad is not None:  # apart before torch 2.15
                param.unsharded_accumulated_grad = None

    def set_data(self, tensor: Any, value: Any) -> bool:
        """Set a shard from full values or an equally sharded DTensor. False if it isn't our shard.

        EMA recipes write ``p.data = ema_p`` before an evaluation, which FSDP2 alone would ignore.
        """
        param = self._by_shard.get(id(tensor))
        if param is None or param.sharded_param is not tensor:
            return False
        if not isinstance(value, DTensor) and value.shape == tensor.shape:
            value = distribute_tensor(
                value, tensor.device_mesh, tensor.placements, src_data_rank=None
            )
        if getattr(value, "_spec", None) != tensor._spec or value.dtype is not tensor.dtype:
            raise BackendError(
                f"p.data = ... of a sharded parameter of shape {tuple(tensor.shape)} got a tensor of another shape, dtype or "
                "sharding. Use load_state_dict() of the model's handle."
            )
        tensor._local_tensor = value._local_tensor.detach()
        param.reset_sharded_param()
        return True

    # -- the end -----------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Drop the process groups."""
        for group in self.groups:
            for info in (group.mesh_info, group.post_forward_mesh_info):
                if info is not None:
                    info.shard_process_group = info.replicate_process_group = None

    def undo(self) -> None:
        """Make the modules plain again. The caller puts parameters in the shards' places."""
        for patch in _patches:
            patch.drop(self)
        remove_hooks(self._hooks)
        for state in self.states:
            for name in (
                "_register_root_post_backward_final_callback",
                "_root_post_backward_final_callback",
            ):
                vars(state).pop(name, None)
        self.snapshot.restore()
        for child in self.module.modules():
            _composable_state._module_state_mapping.pop(child, None)


def unsharded(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that every rank keeps whole: scalars, and those without elements."""
    return [p for p in module.parameters() if not p.dim() or not p.numel()]


def _prepare(param: Any, world_size: int, device: torch.device) -> None:
    """Make the gathered tensors now: those made in inference mode could not be trained."""
    inputs = param.all_gather_inputs
    param.init_all_gather_outputs(
        [t.numel() for t in inputs], [t.dtype for t in inputs], world_size, device
    )
    param.init_unsharded_param()
    param.free_unsharded_param()


def _watch_group(state: Any, group: Any, process: Process, name: str, label: str) -> None:
    """Announce what a group gathers, because ranks that use different blocks would mix weights."""
    unshard, post_forward, post_backward = group.unshard, group.post_forward, group.post_backward
    gathering, reducing = (f"the {verb} of {name} ({label})" for verb in ("gathering", "reduction"))
    in_gathering, in_reducing = Waiting(process, gathering), Waiting(process, reducing)
    weights = {id(param._unsharded_param) for param in group.fsdp_params}
    places = [
        (p._module_info.module._parameters, p._module_info.param_name, p) for p in group.fsdp_params
    ]

    def gather(*args: Any, **kwargs: Any) -> Any:
        for parameters, key, param in places:
            if (
                tensor := parameters.get(key)
            ) is not param.sharded_param and tensor is not param._unsharded_param:
                refuse_other_tensor(param._param_fqn or key, "FSDP2")
        if group._all_gather_result is not None or group.is_unsharded:
            return unshard(*args, **kwargs)
        announce(process, gathering)
        with in_gathering:
            return unshard(*args, **kwargs)

    def register_hooks(module: nn.Module, inputs: Any, output: Any) -> Any:
        # FSDP2 gathers for a backward in hooks on the output, which older versions don't look for
        # in dataclasses. After `x += y` on a view only the hooks of its base would run.
        if torch.is_grad_enabled():
            tensors = [t if t._base is None else t._base for _, t in all_tensors(output)]
            if any(id(tensor) in weights for tensor in tensors):  # using it would crash the process
                raise BackendError(
                    f"{name} returns a weight, which is freed after the forward. Return weight.clone()."
                )
            state._register_pre_backward_hook(tensors)
        return post_forward(module, inputs, output)

    def reduce(*args: Any) -> Any:
        having = tuple(i for i, p in enumerate(group.fsdp_params) if _has_gradient(p))
        if not having:
            return post_backward(*args)
        announce(process, reducing, having)
        with in_reducing:
            return post_backward(*args)

    group.unshard, group.post_forward, group.post_backward = gather, register_hooks, reduce


def _has_gradient(param: Any) -> bool:
    """True if a gradient of a parameter waits to be reduced."""
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None


def _watch_backward(
    state: Any, context: Any, begin: Callable[[], None], end: Callable[[], None]
) -> None:
    """Call ``begin`` when a backward first reaches FSDP2, and ``end`` at its end."""
    register, finish = (
        state._register_root_post_backward_final_callback,
        state._root_post_backward_final_callback,
    )

    def begin_backward() -> None:
        if not context.post_backward_final_callback_queued:
            begin()
        register()

    def end_backward() -> None:
        for group in (group for other in context.all_states for group in other._fsdp_param_groups):
            # A second reentrant checkpoint of a block gathers it once more after its reduction.
            if not group.is_sharded and group._training_state is TrainingState.POST_BACKWARD:
                group._training_state = TrainingState.IDLE
        finish()
        end()

    state._register_root_post_backward_final_callback = begin_backward
    state._root_post_backward_final_callback = end_backward


def _enter_by(child: nn.Module, root: Any) -> list[Any]:
    """Gather the root's parameters if ``model.encoder(x)`` calls a submodule by itself."""
    entered: list[nn.Module] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if root._training_state is not TrainingState.IDLE:
            return None
        args, kwargs = root._pre_forward(module, args, kwargs)
        entered.append(module)
        return args, kwargs

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if not entered:
            return None
        entered.clear()
        return root._post_forward(module, args, output)

    return [
        child.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        child.register_forward_hook(leave),
    ]


def _register_hook(reference: weakref.ref[nn.Parameter], hook: Callable[..., Any]) -> Any:
    """Register a hook of the user's for this rank's own full gradient, before it is reduced."""
    gathered = reference()
    assert gathered is not None  # it lives as long as the shard
    return gathered.register_hook(hook)
