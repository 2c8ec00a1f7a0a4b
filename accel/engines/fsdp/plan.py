"""How a model is sharded: the mesh, the blocks that FSDP2 gathers one by one, and split layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from torch import nn

from ...errors import BackendError
from ...process import Process
from ...process.startup import mesh_of
from ..base.activations import Choice, chosen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

# -- the mesh --------------------------------------------------------------------------------------

#: The axes in their order, with the names that a mesh of the user may give them.
AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "replicate": ("replicate", "dp_replicate"),
    "shard": ("shard", "dp_shard", "fsdp", "dp"),
    "tensor": ("tensor", "tp"),
}


def axis_of(dimension: str) -> str | None:
    """Return the axis that a dimension of a mesh stands for."""
    # After a second start of the process group, accel's own are named "shard (start 2)".
    name = dimension.partition(" ")[0]
    return next((axis for axis, names in AXES.items() if name in names), None)


def axes_in(mesh: Any) -> list[str | None]:
    """Return the axes of a mesh, in its order. Empty if it is no mesh with named dimensions."""
    return [axis_of(name) for name in getattr(mesh, "mesh_dim_names", None) or ()]


def is_mesh(mesh: Any) -> bool:
    """True if a mesh has some of the axes in their order, at least "shard"."""
    axes = axes_in(mesh)
    return "shard" in axes and axes == [axis for axis in AXES if axis in axes]


def axes_of(options: Any, world_size: int) -> dict[str, int]:
    """Return the length of each axis. Raise BackendError if the ranks don't fit."""
    sizes = dict.fromkeys(AXES, 1)
    if world_size == 1:
        return sizes
    mesh = options.mesh
    if mesh is not None:
        if mesh.mesh.flatten().tolist() != list(range(world_size)):
            raise BackendError(
                f"{mesh} doesn't have the ranks 0 to {world_size - 1} in this order. "
                "Use torch.distributed.init_device_mesh."
            )
        return sizes | dict(zip(axes_in(mesh), mesh.shape, strict=True))
    fixed = options.replicas * options.tensor_parallel
    if world_size % fixed:
        raise BackendError(
            f"FSDP(replicas={options.replicas}, tensor_parallel={options.tensor_parallel}) "
            f"needs a multiple of {fixed} processes, and there are {world_size}."
        )
    lengths = options.replicas, world_size // fixed, options.tensor_parallel
    return dict(zip(AXES, lengths, strict=True))


@final
class Mesh:
    """The mesh of an engine. Collective if accel makes a new one."""

    def __init__(self, options: Any, process: Process) -> None:
        self.sizes = axes_of(options, process.place.world_size)
        self.whole: DeviceMesh = options.mesh
        if options.mesh is None:
            # FSDP2 needs an axis to shard along, even if it has one rank.
            axes = {axis: n for axis, n in self.sizes.items() if n > 1 or axis == "shard"}
            self.whole = mesh_of(process, axes)
        else:
            groups = process.given_groups
            groups += [group for group in self.whole.get_all_groups() if group not in groups]
        #: The dimension of the mesh for each of its axes.
        self.names = dict(zip(axes_in(self.whole), self.whole.mesh_dim_names or (), strict=True))
        #: This rank's place along each axis.
        self.place = dict.fromkeys(AXES, 0)
        self.place.update(zip(self.names, self.whole.get_coordinate() or (), strict=True))
        #: True with tensor parallelism.
        self.parallel = "tensor" in self.names
        #: The ranks over which a split layer is sharded and replicated.
        self.data = self.whole
        if self.parallel:
            others = [name for axis, name in self.names.items() if axis != "tensor"]
            self.data = self.whole[tuple(others)]

    def copies(self, tensor: Any) -> list[str]:
        """Return the axes along which all ranks hold the same values of a tensor."""
        placements = getattr(tensor, "placements", ())  # a plain tensor is replicated
        dimensions = tensor.device_mesh.mesh_dim_names if placements else ()
        pairs = zip(dimensions, placements, strict=True)
        sharded = {name for name, placement in pairs if not placement.is_replicate()}
        return [axis for axis in AXES if self.names.get(axis) not in sharded]


# -- blocks, and modules that can't be sharded -----------------------------------------------------


def blocks(module: nn.Module, wrap: Choice) -> list[tuple[str, nn.Module]]:
    """Return the submodules that are gathered one by one, inner ones first."""
    uses = _uses(module)
    found: list[tuple[str, nn.Module]] = []
    for name, block in chosen(module, wrap):
        inside = _uses(block)
        # FSDP2 gathers a tied parameter in one place, which must contain all of its uses.
        if inside and all(uses[key] == count for key, count in inside.items()):
            found.insert(0, (name, block))
    return found


def _uses(module: nn.Module) -> Counter[int]:
    """Return the number of places of each parameter, by its identity."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def check_module(module: nn.Module) -> None:
    """Raise BackendError if something of the module would be lost without an error."""
    for name, child in module.named_modules():
        is_embedding = isinstance(child, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and child.max_norm is not None:
            raise BackendError(
                f"{name} has max_norm, but FSDP2 drops what forward writes to a weight. "
                'Leave max_norm out, or use backend="ddp".'
            )
    for name, p in module.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise BackendError(
                f"{name} has gradient hooks, which its shard wouldn't have. "
                "Register them after accel.setup, on model.parameters()."
            )


# -- tensor parallelism: layers that neighboring ranks split ---------------------------------------

#: Styles of torch, or their names in transformers, by the names of modules.
Plan: TypeAlias = "Mapping[str, ParallelStyle | str] | None"

#: Names in plans of transformers: torch's class, and layouts that are full instead of split.
_STYLES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "colwise": ("ColwiseParallel", ()),
    "colwise_rep": ("ColwiseParallel", ("output_layouts",)),
    "colwise_gather_output": ("ColwiseParallel", ("output_layouts",)),
    "rowwise": ("RowwiseParallel", ()),
    "rowwise_rep": ("RowwiseParallel", ("input_layouts",)),
    "rowwise_split_input": ("RowwiseParallel", ("input_layouts",)),
    "embedding_rowwise": ("RowwiseParallel", ("input_layouts",)),
    "replicated_with_grad_allreduce": ("SequenceParallel", ()),
}
#: The dimension of its weight that a style splits, by the layer's class.
_DIMS: Final[Mapping[type, Mapping[str, int]]] = {
    nn.Linear: {"ColwiseParallel": 0, "RowwiseParallel": 1},
    nn.Embedding: {"ColwiseParallel": 1, "RowwiseParallel": 0},
}


def is_plan(plan: Any) -> bool:
    """True if it maps names to styles that accel supports."""
    if not isinstance(plan, Mapping) or not plan:
        return False
    return all(style in _STYLES for style in plan.values() if isinstance(style, str))


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """A layer that a plan names. ``dim`` is None if its weight isn't split."""

    layer: nn.Module
    style: Any
    dim: int | None


def planned_layers(module: nn.Module, plan: Plan) -> dict[str, PlannedLayer]:
    """Return the layers that a plan, or else the model's own, names."""
    modules, layers = dict(module.named_modules()), dict[str, PlannedLayer]()
    for pattern, style in (plan or _own_plan(module)).items():
        matching = [name for name in modules if _matches(name, pattern)]
        if not matching:
            raise BackendError(
                f"The plan's {pattern!r} names no module of this {type(module).__name__}. "
                "Use names from model.named_modules()."
            )
        kind = _STYLES[style][0] if isinstance(style, str) else type(style).__name__
        for name in matching:
            layer = modules[name]
            dims = [dims for cls, dims in _DIMS.items() if isinstance(layer, cls)]
            layers[name] = PlannedLayer(layer, style, dims[0].get(kind) if dims else None)
    # A head that is tied to an embedding which isn't split, or otherwise, stays as it is.
    tied = defaultdict[int, set[int | None]](set)
    for name, child in modules.items():
        for parameter in child.parameters(recurse=False):
            tied[id(parameter)].add(layers[name].dim if name in layers else None)
    return {
        name: planned
        for name, planned in layers.items()
        if all(len(tied[id(p)]) == 1 for p in planned.layer.parameters(recurse=False))
    }


def _own_plan(module: nn.Module) -> dict[str, str]:
    """Return the ``tp_plan`` of a transformers model, which may be inside of ``module``."""
    for prefix, child in module.named_modules():
        plan: Any = getattr(child, "tp_plan", None) or getattr(child, "_tp_plan", None)
        if is_plan(plan):
            return {f"{prefix}.{name}" if prefix else name: style for name, style in plan.items()}
    return {}


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch, names, patterns))


def check_plan(module: nn.Module, plan: Plan, size: int) -> None:
    """Raise BackendError if ``size`` ranks can't split the layers of the plan evenly."""
    layers = planned_layers(module, plan)
    if not layers:
        raise BackendError(
            f"{type(module).__name__} has no tp_plan that accel supports. "
            'Pass plan={"layers.*.up": ColwiseParallel(), ...}.'
        )
    for name, planned in layers.items():
        if planned.dim is None:
            continue
        weight: Any = planned.layer.weight
        if weight.shape[planned.dim] % size:
            raise BackendError(
                f"{name} of shape {tuple(weight.shape)} doesn't divide into {size} equal shards "
                f"along dim {planned.dim}. Leave it out of the plan."
            )


def split_dims(module: nn.Module, plan: Plan) -> dict[str, int]:
    """Return the dimension along which each parameter of a planned layer is split, by name."""
    dims: dict[str, int] = {}
    for name, planned in planned_layers(module, plan).items():
        if planned.dim is not None:
            dims[f"{name}.weight"] = planned.dim
            if planned.dim == 0 and isinstance(planned.layer, nn.Linear):
                dims[f"{name}.bias"] = 0
    return dims


def split_layers(module: nn.Module, mesh: Mesh, plan: Plan) -> None:
    """Replace the parameters of planned layers by this rank's shards. Local."""
    from torch.distributed.tensor.parallel import parallelize_module

    ranks = mesh.whole[mesh.names["tensor"]]
    shards: dict[int, nn.Parameter] = {}
    for planned in planned_layers(module, plan).values():
        layer = planned.layer
        parameters, buffers = dict(layer.named_parameters(recurse=False)), dict(layer._buffers)
        parallelize_module(layer, ranks, _style(planned.style), src_data_rank=None)
        layer._buffers.update(buffers)  # torch makes DTensors of them, which can't be broadcast
        for name, parameter in parameters.items():
            shard = layer.get_parameter(name)
            if shard is not parameter:  # tied layers share one shard
                layer._parameters[name] = shards.setdefault(id(parameter), shard)


def _style(style: Any) -> ParallelStyle:
    from torch.distributed.tensor import Replicate, parallel

    if not isinstance(style, str):
        return style  # type: ignore[no-any-return]
    name, full = _STYLES[style]
    if name == "SequenceParallel":
        # Norms over the heads look along the last dimension only, so any other may be split.
        return parallel.SequenceParallel(sequence_dim=0, use_local_output=True)
    return getattr(parallel, name)(**dict.fromkeys(full, Replicate()))  # type: ignore[no-any-return]
