"""A module under ``fully_shard``, and its FSDP2 objects."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch import nn
from torch.distributed import _composable_state, fsdp
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, distribute_tensor

from ...errors import BackendError
from ...gradients.hooks import runs_backward
from ...gradients.patches import Patch, data_patch, muon_patch, replaced, shard_patches
from ...process import Process
from ...process.control import Waiting, announce
from ..base.absent import refuse_second_derivatives
from ..base.raw_objects import Function, Snapshot
from .plan import Mesh, planned_layers, split_layer

#: Patches of torch that are active while a sharded module exists.
_patches: Final[tuple[Patch, ...]] = (*shard_patches(), data_patch(), muon_patch())


@final
class ShardedModule:
    """A module with shards, which FSDP2 gathers block by block."""

    def __init__(self, module: nn.Module, process: Process, options: Any) -> None:
        self.module: Any = module
        self.process = process
        self.mesh = Mesh(options, process)
        self.snapshot = Snapshot(module)
        #: FSDP2's ``FSDPParamGroup`` of each block, and their ``FSDPParam`` objects.
        self.groups: dict[str, Any] = {}
        self.params: list[Any] = []
        self._options = options
        #: The layers of the plan that aren't split yet, and the shards of the others.
        self._planned = planned_layers(module, options.plan) if self.mesh.parallel else {}
        self._split: dict[int, nn.Parameter] = {}
        self._undo = contextlib.ExitStack()
        for patch in _patches:
            patch.need(self)

    def apply(self, block: nn.Module) -> None:
        """Replace a block's parameters by shards. Call it for the root last."""
        options, device = self._options, self.process.device
        for layer in block.modules():
            style = self._planned.pop(layer, None)
            if style is not None:
                ranks = self.mesh.whole[self.mesh.names["tensor"]]
                split_layer(layer, style, ranks, self._split)
        offload = fsdp.OffloadPolicy()
        if options.cpu_offload:
            offload = fsdp.CPUOffloadPolicy(pin_memory=device.type != "cpu")
        full = None if options.param_dtype is None else torch.float32
        precision = fsdp.MixedPrecisionPolicy(
            param_dtype=options.param_dtype,
            reduce_dtype=options.reduce_dtype or full,
            output_dtype=full if block is self.module else None,
        )
        fsdp.fully_shard(
            block,
            mesh=self.mesh.data,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=precision,
            offload_policy=offload,
            # FSDP2 can't shard scalars such as CLIP's logit_scale, or empty parameters.
            ignored_params={p for p in block.parameters() if 0 in (p.dim(), p.numel())},
        )

    def initialize(self, blocks: Mapping[str, Any], label: str, reads: bool) -> None:
        """Prepare training. ``reads`` allocates shards. Collective."""
        if reads:
            # The values of accel.deferred_init(weights=...) are read into the shards.
            device = "cpu" if self._options.cpu_offload else self.process.device
            empty = functools.partial(torch.empty_like, device=device)
            self.module._apply(lambda t: empty(t) if t.is_meta else t)
        for name, block in {"": self.module, **blocks}.items():
            state = block._get_fsdp_state()
            if not name:
                self._root = state
                state._lazy_init()
            for group in state._fsdp_param_groups:
                self.groups[name] = group
                self.params += group.fsdp_params
            # Allocate now. Tensors that an evaluation in inference mode allocates can't be trained.
            block.unshard()
            block.reshard()
        # FSDP2 wraps an attribute by its name, so set one and take back the wrapper.
        self.module.accel_call = lambda call, /, *args, **kwargs: call(*args, **kwargs)
        fsdp.register_fsdp_forward_method(self.module, "accel_call")
        self._call: Function = vars(self.module).pop("accel_call")
        inside = {self.module}
        for block in blocks.values():
            inside.update(block.modules())
        for child in self.module.modules():
            # A loop may call model.encoder(x), with weights that the root gathers.
            if child not in inside and dict(child.named_parameters(recurse=False)):
                forward = functools.partial(self.compute, child.forward)
                self._undo.enter_context(replaced(vars(child), "forward", forward))
        self.snapshot.changed()
        for name, group in self.groups.items():
            _announce(group, name, self.process, label)
        for param in self.params:
            names = vars(param.sharded_param)
            # Autograd never reaches the shard, so a user's hook on it would never run.
            names["register_hook"] = param.unsharded_param.register_hook
            # A weak reference, so that an optimizer doesn't keep a deleted model alive.
            names["set_data"] = functools.partial(_set_data, weakref.ref(param))

    # -- training ----------------------------------------------------------------------------------

    def compute(self, method: Function, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method with the root's parameters gathered."""
        if self._root._training_state is not TrainingState.IDLE:
            return method(*args, **kwargs)
        return self._call(method, *args, **kwargs)

    def reshard(self) -> None:
        """Free gathered parameters, unless a backward needs them."""
        for group in self.groups.values():
            if not group.is_sharded and not runs_backward():
                group.reshard()

    def interrupted(self) -> bool:
        """True if a backward ended before FSDP2's last callback."""
        context = self._root._state_ctx
        return context.post_backward_final_callback_queued and not runs_backward()

    def reset(self) -> None:
        """Clear FSDP2's state after an exception in a pass."""
        # Activation checkpointing stops its recomputation with an exception, which is no failure.
        if not runs_backward():
            for param in self.params:
                param.unsharded_param.grad = None
            self.module.reset_iter_state()

    # -- the end -----------------------------------------------------------------------------------

    def undo(self) -> None:
        """Make the modules plain again. The caller replaces the shards."""
        for patch in _patches:
            patch.drop(self)
        self._undo.close()
        self.snapshot.restore()
        for child in self.module.modules():
            _composable_state._module_state_mapping.pop(child, None)


def _set_data(reference: Callable[[], Any], value: Any) -> None:
    """Set a shard to a full tensor or an equally sharded DTensor.

    EMA recipes write ``p.data = ema_p`` before an evaluation. FSDP2 alone
    would ignore it.
    """
    param = reference()
    shard = param.sharded_param
    mesh, placements = shard.device_mesh, shard.placements
    if not isinstance(value, DTensor):
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    if value.shape != shard.shape or value.placements != placements:
        raise BackendError(
            f"p.data = ... needs a full tensor of shape {tuple(shard.shape)}. "
            "Use one, or call model.load_state_dict()."
        )
    shard._local_tensor = value.to_local().detach()
    param.reset_sharded_param()


def _announce(group: Any, name: str, process: Process, label: str) -> None:
    """Announce a block's collectives. Ranks may differ in their order."""
    name = f"{name or 'the parameters outside of all blocks'} ({label})"
    gathering, reducing = f"the gathering of {name}", f"the reduction of {name}"
    in_gathering, in_reducing = Waiting(process, gathering), Waiting(process, reducing)
    unshard, pre_backward = group.unshard, group.pre_backward
    post_backward = group.post_backward

    def gather(*args: Any, **kwargs: Any) -> Any:
        if group._all_gather_result is None and not group.is_unsharded:
            announce(process, gathering)
        with in_gathering:
            return unshard(*args, **kwargs)

    def begin_backward(*args: Any) -> Any:
        # WGAN-GP calls torch.autograd.grad(create_graph=True), which FSDP2 can't differentiate.
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        return pre_backward(*args)

    def reduce(*args: Any) -> Any:
        params = enumerate(group.fsdp_params)
        trained = tuple(i for i, p in params if p.unsharded_param.grad is not None)
        if trained:
            announce(process, reducing, trained)
        with in_reducing:
            return post_backward(*args)

    group.unshard, group.pre_backward, group.post_backward = gather, begin_backward, reduce
