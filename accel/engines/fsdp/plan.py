"""The mesh of a sharded model, its blocks, and tensor parallelism."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from torch import Tensor, nn

from ...errors import BackendError
from ...process import Process
from ...process.startup import mesh_of
from ...shard import Box, flattened
from ..base.activations import Choice, chosen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ParallelStyle

# -- the mesh --------------------------------------------------------------------------------------

#: The axes in their order: copies of the model, its shards, and shards of its layers.
AXES: Final = ("replicate", "shard", "tensor")


def axes_of(options: Any, world_size: int) -> dict[str, int]:
    """Return the length of each axis, or raise BackendError."""
    if world_size == 1:
        return dict.fromkeys(AXES, 1)
    copies, tensor = options.replicas, options.tensor_parallel
    shards, rest = divmod(world_size, copies * tensor)
    if rest:
        raise BackendError(
            f"FSDP(replicas={copies}, tensor_parallel={tensor}) can't use {world_size} "
            f"processes. Start a multiple of {copies * tensor} processes."
        )
    return {"replicate": copies, "shard": shards, "tensor": tensor}


@final
class Mesh:
    """The mesh of an engine. Collective if accel has no equal mesh yet."""

    def __init__(self, options: Any, process: Process) -> None:
        self.sizes = axes_of(options, process.place.world_size)
        # FSDP2 needs an axis to shard along, even if its length is 1.
        axes = {axis: n for axis, n in self.sizes.items() if n > 1 or axis == "shard"}
        self.whole = mesh_of(process, axes)
        #: The name of each axis in the mesh. After a second start, for example "shard (start 2)".
        self.names = dict(zip(axes, self.whole.mesh_dim_names or (), strict=True))
        #: This rank's place along each axis.
        self.place = dict.fromkeys(AXES, 0)
        self.place.update(zip(axes, self.whole.get_coordinate() or (), strict=True))
        #: True with tensor parallelism.
        self.parallel = "tensor" in axes
        #: The submesh for ``fully_shard``: all axes except "tensor".
        self.data = self.whole[tuple(self.names[axis] for axis in axes if axis != "tensor")]

    def copies(self, tensor: Any) -> list[str]:
        """Return the axes along which a tensor is replicated."""
        placements = getattr(tensor, "placements", ())
        names = tensor.device_mesh.mesh_dim_names if placements else ()
        pairs = zip(names, placements, strict=True)
        sharded = {name for name, kind in pairs if not kind.is_replicate()}
        return [axis for axis in AXES if self.names.get(axis) not in sharded]

    def region_of(self, tensor: DTensor, local: Tensor) -> Box:
        """Return the elements in this rank's nonempty shard."""
        shape = tuple(tensor.shape)
        if not self.parallel:
            rows = -(-shape[0] // self.sizes["shard"])
            row_size = local.numel() // local.shape[0]
            start = self.place["shard"] * rows * row_size
            return ((start, start + local.numel()),)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = tensor.device_mesh, tensor.placements
        sizes, starts = compute_local_shape_and_global_offset(shape, mesh, placements)
        box = tuple(zip(starts, map(operator.add, starts, sizes), strict=True))
        return flattened(box, shape) or box


# -- blocks, and modules that can't be sharded -----------------------------------------------------


def blocks(module: nn.Module, wrap: Choice) -> list[tuple[str, nn.Module]]:
    """Return submodules to gather separately, inner modules first."""
    uses = _uses(module)
    found: list[tuple[str, nn.Module]] = []
    for name, block in chosen(module, wrap):
        inside = _uses(block)
        # FSDP2 gathers a tied parameter in one block, which must contain all of its uses.
        if inside and inside.keys().isdisjoint(uses - inside):
            found.insert(0, (name, block))
    return found


def _uses(module: nn.Module) -> Counter[int]:
    """Return the number of uses of each parameter, by its ``id``."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def check_module(module: nn.Module) -> None:
    """Raise BackendError for hooks that shards would lose."""
    for name, p in module.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise BackendError(
                f"{name} has gradient hooks, which its shard wouldn't have. "
                "Register them after accel.setup, on model.parameters()."
            )


# -- tensor parallelism: layers that neighboring ranks split ---------------------------------------

#: Styles of torch by the names of modules.
Plan: TypeAlias = "Mapping[str, ParallelStyle]"


def planned_layers(module: nn.Module, plan: Plan) -> dict[nn.Module, ParallelStyle]:
    """Return the style of each layer in a plan."""
    modules = dict(module.named_modules())
    layers: dict[nn.Module, ParallelStyle] = {}
    for pattern, style in plan.items():
        expression = re.escape(pattern).replace(r"\*", "[^.]+")
        matching = list(filter(re.compile(expression).fullmatch, modules))
        if not matching:
            raise BackendError(
                f"The plan's {pattern!r} names no module of this "
                f"{type(module).__name__}. Use a name from model.named_modules()."
            )
        layers.update(dict.fromkeys(map(modules.__getitem__, matching), style))
    others = set(modules.values()) - layers.keys()
    full = {p for child in others for p in child.parameters(recurse=False)}
    for layer in list(layers):
        # A head stays full if it is tied to an embedding that isn't in the plan.
        if not full.isdisjoint(layer.parameters(recurse=False)):
            del layers[layer]
    return layers


def split_layer(
    layer: nn.Module, style: ParallelStyle, ranks: DeviceMesh, shards: dict[int, nn.Parameter]
) -> None:
    """Replace parameters by ``shards``, which tied layers share. Local."""
    from torch.distributed.tensor.parallel import parallelize_module

    parameters = dict(layer.named_parameters(recurse=False))
    buffers = dict(layer.named_buffers(recurse=False))
    parallelize_module(layer, ranks, style, src_data_rank=None)
    # torch turns buffers into DTensors, which can't be broadcast.
    for name, buffer in buffers.items():
        setattr(layer, name, buffer)
    for name, p in parameters.items():
        shard: Any = layer.get_parameter(name)
        if shard is p:
            continue
        for placement in shard.placements:
            if placement.is_shard() and shard.shape[placement.dim] % ranks.size():
                raise BackendError(
                    f"{name} of shape {tuple(shard.shape)} in a planned "
                    f"{type(layer).__name__} can't be split evenly over {ranks.size()} ranks "
                    f"along dim {placement.dim}. "
                    "Leave this layer out of the plan."
                )
        layer.register_parameter(name, shards.setdefault(id(p), shard))
