"""The one place that reaches into FSDP2's own objects: a module under ``fully_shard``, and the way back."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...errors import BackendError, RankMismatchError
from ...gradients.log import remove_hooks
from ...gradients.patches import around, divided_patches, ignored, vector_patch
from ...precision import here
from ...process import Process
from ...process.control import Waiting, agree, announce
from ...shard import Box
from ...trees import all_tensors, exchange, map_tensors
from ..base.absent import OF_ITSELF, refuse_other_tensor
from ..base.drift import digest_now
from ..base.raw_objects import Snapshot
from .plan import Mesh, cut

_GRAD: Final = operator.attrgetter("grad")
_VERSION: Final = operator.attrgetter("_version")
_IS_ALIAS: Final[Callable[..., bool]] = torch._C._is_alias_of  # type: ignore[attr-defined]


def _owner(tensor: object) -> ShardedModule | None:
    # By equality: DTensor remembers what it has computed, and with it the mesh of an engine that was like this one.
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    return next((module for module in _overflows.users() if mesh in module.meshes), None)


def _overflow(original: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What a GradScaler sees and unscales: torch's own looks along the axes of the first gradient alone."""
    gradients, found, *rest = args
    owner = next(filter(None, map(_owner, gradients)), None)
    if owner is None:
        return original(op, args, kwargs)
    with torch.no_grad():
        op([g.to_local() if isinstance(g, DTensor) else g for g in gradients], found, *rest, **kwargs)
    process, what = owner.process, "torch.amp.GradScaler"
    announce(process, what)
    with Waiting(process, what):
        anywhere = found.to(process.device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=process.group)
        found.copy_(anywhere)
    return None


_overflows: Final = around(
    DTensor._op_dispatcher._custom_op_handlers,
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default,
    _overflow,
)


def _whole(what: str, tensors: Sequence[DTensor], own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All of each divided tensor; ``own`` are this rank's, and are to be every rank's. Collective."""
    process = next(owner for owner in map(_owner, tensors) if owner is not None).process
    if own:
        require_same(what, own)
    else:
        announce(process, what)
    with Waiting(process, what):
        return [cast(DTensor, t.detach()).full_tensor() for t in tensors]


def require_same(what: str, values: Sequence[torch.Tensor]) -> None:
    """Refuse (RankMismatchError) values of which each rank would write a part, and that are not the same on all. Collective."""
    told = agree(what, [digest_now(value) for value in values])
    if any(theirs != told[0] for theirs in told):
        other = next(rank for rank, theirs in enumerate(told) if theirs != told[0])
        raise RankMismatchError(
            f"{what}: rank {other} writes other values than rank 0, and each rank would write its part of its own: compute them "
            "alike on all ranks, or take rank 0's (accel.broadcast(values)), of gradients the mean (accel.all_reduce(g, 'mean'))"
        )


def _refuse_vector(parameter: torch.Tensor) -> None:
    """What ``parameters_to_vector`` cannot flatten, or only by way of an order of the elements that is not the whole's."""
    if not isinstance(parameter, DTensor) or not _owner(parameter):
        return
    axes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    cut = [(placement, size) for placement, size in axes if not placement.is_replicate() and size > 1]
    if len(cut) > 1 or any(not p.is_shard(0) or parameter.shape[0] % size for p, size in cut):
        raise BackendError(
            f"torch.nn.utils.parameters_to_vector of a parameter of shape {tuple(parameter.shape)}, whose parts cannot be "
            "flattened: write, on every rank, full = accel.full_state_dict(model) and torch.cat([full[name].reshape(-1) for "
            "name, _ in model.named_parameters()]); vector_to_parameters takes such a vector"
        )


_patches: Final = (
    *divided_patches(lambda tensor: "fsdp" if _owner(tensor) else "", _whole),
    vector_patch(_refuse_vector),
    _overflows,
    ignored("FSDP2-wrapped module .* returned a view tensor"),  # which `watch_forward` sees to
)

# -- What FSDP2 gathers and reduces, announced before it does so -------------------------------------------------------

_LOST: Final = (
    "where weights are gathered, so that the change would be lost: write in the loop, on every rank, in place to "
    "model.parameters() or by load_state_dict(full) of the model's handle, or before accel.setup; or use a backend that keeps "
    "parameters whole"
)


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
        came = tuple(i for i, p in enumerate(group.fsdp_params) if has_gradient(p)) if group.reduce_grads else ()
        if not came:
            return post_backward(*args)
        announce(process, reducing, came)
        with in_reduce:
            return post_backward(*args)

    group.unshard, group.post_backward = gather, reduce


@final
class _Wholes:
    """Refuses what is written to one group's gathered parameters, in a forward or after it, which is lost when they are freed.

    While they are freed, their shards answer for them.
    """

    def __init__(self, group: Any, label: str) -> None:
        self._group, self._label = group, label
        self.wholes: list[Any] = [p._unsharded_param for p in group.fsdp_params]
        self._versions: list[int] = []
        self._aliases: list[tuple[torch.Tensor, torch.Tensor]] = []
        for whole in self.wholes:
            whole.aliases = self._aliases
        self._to_sharded, self._to_unsharded = group._to_sharded, group._to_unsharded
        group._to_sharded, group._to_unsharded = self.free, self._gather

    def note(self) -> None:
        """What was written until now is known."""
        self._versions = list(map(_VERSION, self.wholes))
        self._aliases.clear()

    def refuse(self, where: str) -> None:
        """Free the group where something was written since the last note, and raise."""
        if self._written():
            self.free(where)

    def _written(self) -> list[Any]:
        if list(map(_VERSION, self.wholes)) == self._versions and not self._aliases:  # a usual forward
            return []
        changed = [w for w, before in zip(self.wholes, self._versions, strict=True) if w._version != before]
        return changed + [whole for whole, alias in self._aliases if alias._version]

    def _gather(self) -> None:
        if not self._group.is_unsharded:
            self._to_unsharded()
            for whole in self.wholes:
                whole.__class__ = whole.gathered
            self.note()

    def free(self, where: str = "between a forward and its backward") -> None:
        changed = [] if self._group.is_sharded else self._written()  # a step counts as a write to those that are freed
        self.note()
        self._to_sharded()
        for whole in self.wholes:
            whole.__class__ = whole.freed
        if changed:
            written = [p for p in self._group.fsdp_params if any(p._unsharded_param is whole for whole in changed)]
            names = ", ".join(p._param_fqn or p._module_info.param_name for p in written[:5])
            raise BackendError(f"{names} of {self._label} changed {where}, {_LOST}")


def watch_forward(state: Any, group: Any, label: str, given: dict[Any, Any]) -> None:
    """Refuse what is written to one group's gathered parameters, and let what a forward returns outlive these: weights are
    copied, and the backward gathers them again from wherever it comes. ``given`` is, by group, what the forwards that run were
    given.
    """
    pre_forward, post_forward = group.pre_forward, group.post_forward
    writes = _Wholes(group, label)
    wholes, reached = writes.wholes, list[torch.Tensor]()

    def enter(*args: Any) -> Any:
        if not group.is_sharded:
            writes.refuse("between a forward and its backward")
        given[group] = entered = pre_forward(*args)
        writes.note()
        return entered

    def outlive(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        # What ``detach()`` and ``data`` give has no base, and is freed with the weight all the same.
        if base.grad_fn is None and any(_IS_ALIAS(here(base), here(whole)) for whole in wholes):
            return tensor.clone()
        if base is not tensor and not _among(base, given.get(group)):  # where a write to the view would come in between
            reached.append(base)
        return tensor

    def outlive_inside(tensor: torch.Tensor) -> torch.Tensor:
        reached.append(outlive(tensor))  # FSDP2 looks into containers alone
        return reached[-1]

    def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
        writes.refuse("in a forward or method of the model")
        output = exchange(outlive, output, outlive_inside)
        state._register_pre_backward_hook(reached)
        given.pop(group, None)
        reached.clear()
        return post_forward(module, inputs, output)

    group.pre_forward, group.post_forward = enter, leave


def _among(base: torch.Tensor, values: Any) -> bool:
    """Whether it is one of the tensors in nested values, or one of them is a view of it."""
    return any(base is tensor or base is tensor._base for _, tensor in all_tensors(values, objects=True))


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
        self.process = process
        self._options = options
        self._hooks: list[Any] = []
        self._inside: set[int] = set()
        self._given: dict[Any, Any] = {}
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
                reduce_dtype=options.reduce_dtype,
                output_dtype=torch.float32 if whole else None,
            )
            fully_shard(
                child,
                mesh=self.mesh.data,
                reshard_after_forward=None if options.reshard_after_forward else False,
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
        """Take over. Gathered parameters get the class that keeps them and their shards alike."""
        names = {id(m): n or "the parameters outside of all blocks" for n, m in self.module.named_modules()}
        for group in self.groups:
            watch(self.process, group, names[id(group.modules[0])], label)
        for state in self.context.all_states:
            for group in state._fsdp_param_groups:
                watch_forward(state, group, label, self._given)
            _tell(state, self.context, before, after)
        for child in self.module.modules():
            own = id(child) not in self._inside and child is not self.module
            if own and any(True for _ in child.parameters(recurse=False)):
                self._hooks += _enter_by(child, self.root)
        for whole, shard in self.gathered():
            marked: Any = whole
            marked.__class__ = GatheredPart if isinstance(whole, DTensor) else Gathered
            marked.shard = shard
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

    def exposed_gradients(self) -> bool:
        """Whether a shard has a gradient while its parameter is gathered."""
        return any(p.sharded_param.grad is not None for g in self.groups if not g.is_sharded for p in g.fsdp_params)

    def compute(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that computes with the root's parameters, as a forward."""
        if self.root._training_state is not TrainingState.IDLE:
            return fn(*args, **kwargs)
        args, kwargs = self.root._pre_forward(self.module, args, kwargs)
        return self.root._post_forward(self.module, args, fn(*args, **kwargs))

    def pending(self) -> list[Any]:
        """FSDP2's parameters with gradients that were not reduced."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._options.reduce_dtype is not None:
                return list(filter(has_gradient, self.params))
            # FSDP2 keeps nothing aside in another dtype: this touches each gathered parameter, and no other object.
            return [p for p, grad in zip(self.params, map(_GRAD, self._wholes), strict=True) if grad is not None]

    def reduce(self, synchronised: bool) -> None:
        self.module.set_requires_gradient_sync(True)
        self.context.is_last_backward = True
        self.context.manual_backward_finalization_active = False  # torch 2.15 would know it from a backward that runs
        for group in self.groups:
            group._training_state = TrainingState.IDLE
        self.root._root_post_backward_final_callback()
        self.module.set_requires_gradient_sync(synchronised)

    def reset(self) -> None:
        """Forget a forward or backward that ended half-way."""
        if torch._C._current_graph_task_id() == -1:  # inside a backward it is activation checkpointing that ends early
            self.module.reset_iter_state()
            for param in self.params:  # it asks groups, of which an interrupt may have left some parameters gathered
                if param.sharded_state is not ShardedState.SHARDED:
                    param.to_sharded()
                    param._unsharded_param.__class__ = param._unsharded_param.freed
            self._given.clear()

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


_REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class _OfShard:
    """Of a parameter that FSDP2 gathered: freezing it, which the next gathering would undo, freezes the shard too.

    ``p.data`` is noted, since a write through it moves no version but its own.
    """

    #: The class while it is gathered, and while it is freed.
    gathered: ClassVar[type[Any]]
    freed: ClassVar[type[Any]]
    shard: nn.Parameter | None = None  # none of what a compiler makes of it
    #: What reading ``p.data`` gave in a forward, of all parameters that are gathered with this one.
    aliases: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def data(self) -> torch.Tensor:
        alias: torch.Tensor = super().data  # type: ignore[misc]
        if self.aliases is not None and not alias.is_inference():
            self.aliases.append((self, alias))  # type: ignore[arg-type]
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        mine: torch.Tensor = super().data  # type: ignore[misc]
        if isinstance(value, DTensor) or value.data_ptr() != mine.data_ptr():
            raise BackendError(f"p.data = ... of a parameter of shape {tuple(mine.shape)}, {_LOST}")

    @property
    def requires_grad(self) -> bool:
        return bool(_REQUIRES_GRAD(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if self.shard is not None:
            self.shard.requires_grad_(requires_grad)
        torch.Tensor.requires_grad_(self, requires_grad)  # type: ignore[arg-type]
        return self


class _Freed(_OfShard):
    """While it is freed, for a loop that holds it since it was gathered: its shard is used but for autograd and its memory."""

    @property
    def data(self) -> torch.Tensor:
        assert self.shard is not None
        return self.shard.data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        assert self.shard is not None
        self.shard.data = value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in OF_ITSELF:
            args, kwargs = (map_tensors(_that_lives, given, others=True) for given in (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _that_lives(tensor: Any) -> Any:
    return tensor.shard if isinstance(tensor, _Freed) else tensor


class FreedWhole(_Freed, nn.Parameter):
    """One that every rank has whole while it is gathered."""


class FreedPart(_Freed, DTensor):
    """One that tensor parallelism has cut before."""


class Gathered(_OfShard, nn.Parameter):
    """One that every rank has whole then."""


class GatheredPart(_OfShard, DTensor):
    """One that tensor parallelism has cut before."""

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        made: Any = DTensor.__tensor_unflatten__(*args)
        made.__class__ = GatheredPart  # which compiled code expects again where it was traced with one
        return made


for _pair in ((Gathered, FreedWhole), (GatheredPart, FreedPart)):
    for _kind in _pair:
        _kind.gathered, _kind.freed = _pair


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
