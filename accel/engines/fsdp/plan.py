"""How a model is sharded: the mesh, blocks that FSDP2 gathers alone, and layers that are cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import torch
import torch.distributed as dist
from torch import nn

from ...errors import BackendError
from ...process import Process
from ...process.startup import mesh_of
from ..base.activations import Choice, chosen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

# -- the mesh: copies of the model, its shards, and parts of its layers ----------------------------

#: The axes in their order, with the names that they may have in a mesh of the user's.
AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "replicate": ("replicate", "dp_replicate"),
    "shard": ("shard", "dp_shard", "fsdp", "dp"),
    "tensor": ("tensor", "tp"),
}


def check_mesh(options: Any) -> None:
    """Raise BackendError if a mesh contradicts the other options, or has unknown axes."""
    if (mesh := options.mesh) is None:
        return
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise BackendError(
            f"mesh={mesh!r}: expected a torch.distributed.DeviceMesh with mesh_dim_names"
        )
    roles = [role for name in names for role, known in AXES.items() if name in known]
    what = f"mesh with the axes {', '.join(map(repr, names))}: expected"
    if (
        len(roles) < len(names)
        or roles != [role for role in AXES if role in roles]
        or "shard" not in roles
    ):
        raise BackendError(
            f"{what}, in this order, some of 'replicate', 'shard' and 'tensor', with 'shard'"
        )
    if options.plan is not None and "tensor" not in roles:
        raise BackendError(f"{what} one that the plan cuts layers along, named 'tensor'")
    for option in ("replicas", "tensor_parallel"):
        if getattr(options, option) != 1:
            raise BackendError(f"FSDP got both {option} and mesh. Leave {option} out.")


def axes_of(options: Any, world_size: int) -> dict[str, int]:
    """Return the length of each axis. Raise BackendError if the ranks don't fit."""
    if world_size == 1:
        return dict.fromkeys(AXES, 1)
    if options.mesh is None:
        return options.axes(world_size)  # type: ignore[no-any-return]
    if options.mesh.mesh.flatten().tolist() != list(range(world_size)):
        raise BackendError(
            f"{options.mesh!r}: expected one of the ranks 0 to {world_size - 1}, in this order"
        )
    sizes = dict(zip(options.mesh.mesh_dim_names, options.mesh.shape, strict=True))
    return {role: math.prod(sizes.get(name, 1) for name in known) for role, known in AXES.items()}


@final
class Mesh:
    """The mesh of an engine. Collective if accel makes a new one."""

    def __init__(self, options: Any, process: Process) -> None:
        self.sizes = axes_of(options, process.place.world_size)
        self.whole: DeviceMesh = options.mesh
        if options.mesh is None:  # FSDP2 needs an axis to shard along, even if it has one rank
            self.whole = mesh_of(
                process, {role: n for role, n in self.sizes.items() if n > 1 or role == "shard"}
            )
        dims = self.whole.mesh_dim_names
        assert dims is not None
        #: The axes that it has, as the mesh calls them.
        self.names = {
            role: n for n in dims for role, known in AXES.items() if n.partition(" ")[0] in known
        }
        coordinate: Any = self.whole.get_coordinate()
        #: This rank's place along each axis.
        self.place = dict.fromkeys(AXES, 0) | {
            role: coordinate[dims.index(n)] for role, n in self.names.items()
        }

    @property
    def parallel(self) -> bool:
        """True with tensor parallelism."""
        return "tensor" in self.names

    @property
    def data(self) -> DeviceMesh:
        """The ranks that a layer's part is sharded over, with the copies of it."""
        names = tuple(n for role, n in self.names.items() if role != "tensor")
        return self.whole[names] if self.parallel else self.whole

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that split a layer."""
        return self.whole[self.names["tensor"]]

    def copies(self, tensor: Any) -> list[str]:
        """Return the axes along which all ranks have the same of a tensor."""
        placements = getattr(tensor, "placements", ())  # none of a plain tensor
        names = tensor.device_mesh.mesh_dim_names if placements else ()
        sharded = {
            name
            for name, placement in zip(names, placements, strict=True)
            if not placement.is_replicate()
        }
        return [axis for axis in AXES if self.names.get(axis) not in sharded]

    def add(self, flat: torch.Tensor) -> None:
        """Sum over all ranks. Ranks that split a layer don't send: their values are equal."""
        for name in (n for role, n in self.names.items() if role != "tensor"):
            dist.all_reduce(flat, group=self.whole.get_group(name))
        flat *= self.sizes["tensor"]


# -- the modules that FSDP2 gathers alone, and those that it cannot shard --------------------------


def blocks(module: nn.Module, wrap: Choice) -> list[tuple[str, nn.Module]]:
    """Return the submodules that are gathered alone, inner ones first."""
    found = {n: m for n, m in chosen(module, wrap) if any(True for _ in m.parameters())}
    owners, before = _owners(module), None
    while before != found.keys():
        before = set(found)
        for places in owners.values():  # a tied parameter must lie in one group
            groups = {_group(module, path, found) for path in places}
            for name in groups - {""} if len(groups) > 1 else ():
                del found[name]
    return list(reversed(found.items()))


def _owners(module: nn.Module) -> dict[int, list[str]]:
    """Return the names of the modules that hold each parameter, by its identity."""
    found: dict[int, list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for parameter in child.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(path)
    return found


def _group(module: nn.Module, path: str, groups: dict[str, nn.Module]) -> str:
    """Return the name of the innermost group at or above ``path``, "" for the whole module."""
    names = {id(child): name for name, child in groups.items()}
    while path:
        if (name := names.get(id(module.get_submodule(path)))) is not None:
            return name
        path = path.rpartition(".")[0]
    return ""


def check_module(module: nn.Module) -> None:
    """Raise BackendError if something of the module would be lost without an error."""
    embeddings = [
        (n, m) for n, m in module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
    ]
    if limited := [name for name, embedding in embeddings if embedding.max_norm is not None]:
        raise BackendError(
            f"{limited[0]} has max_norm, which writes to its weight in forward, and FSDP2 would drop these writes. "
            'Leave max_norm out, or use backend="ddp".'
        )
    if hooked := [
        n
        for n, p in module.named_parameters()
        if p._backward_hooks or p._post_accumulate_grad_hooks
    ]:
        raise BackendError(
            f"{hooked[0]} has gradient hooks, which its shard would not have. "
            "Register them after accel.setup, on model.parameters()."
        )


# -- tensor parallelism: layers that neighbouring ranks split, by torch's parallelize_module -------

#: Styles of torch, or their names in transformers, by the names of modules.
Plan: TypeAlias = "Mapping[str, ParallelStyle | str] | None"

#: Names in plans of transformers: torch's class, and layouts that are whole instead of cut.
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
#: The dimension of its weight that a style cuts, by the style's class and the layer's.
_DIMS: Final[Mapping[tuple[str, type], int]] = {
    ("ColwiseParallel", nn.Linear): 0,
    ("ColwiseParallel", nn.Embedding): 1,
    ("RowwiseParallel", nn.Linear): 1,
    ("RowwiseParallel", nn.Embedding): 0,
}


@dataclass(frozen=True, slots=True)
class _Cut:
    """A layer that a plan names. ``dim`` is None if its weight isn't cut."""

    name: str
    layer: nn.Module
    style: Any
    dim: int | None


def check_plan(plan: Any) -> None:
    """Raise BackendError if ``plan`` isn't a plan."""
    if plan is None:
        return
    if not isinstance(plan, Mapping) or not plan:
        raise BackendError(
            f'plan={plan!r}: expected styles by names of modules, such as {{"layers.*.up": ColwiseParallel()}}'
        )
    for name, style in plan.items():
        if isinstance(style, str) and style not in _STYLES:
            raise BackendError(
                f"plan[{name!r}] is {style!r}: expected a style, or one of {', '.join(map(repr, _STYLES))}"
            )


def text_of(plan: Plan) -> str:
    """Return a plan as text. Styles with the same settings have the same text on all ranks."""
    styles = {} if plan is None else plan
    without_repr = [
        name for name, style in styles.items() if type(style).__repr__ is object.__repr__
    ]
    texts = {
        name: f"{type(styles[name]).__qualname__}({vars(styles[name])})" for name in without_repr
    }
    return str({**styles, **texts} or None)


def check_cut(module: nn.Module, plan: Plan, size: int) -> None:
    """Raise BackendError if ``size`` ranks can't split the layers of the plan evenly."""
    cuts = _cuts(module, plan)
    if not cuts:
        raise BackendError(
            f"tensor parallelism needs a plan, and this {type(module).__name__} has none of its own (tp_plan): pass "
            'plan={"layers.*.up": ColwiseParallel(), ...}'
        )
    for planned in cuts:
        weight, dim = planned.layer._parameters.get("weight"), planned.dim
        if dim is not None and weight is not None and weight.shape[dim] % size:
            raise BackendError(
                f"{planned.name} ({type(planned.layer).__name__} of {tuple(weight.shape)}) does not divide into {size} equal "
                f"parts along dim {dim}. Leave it out of the plan, or choose another size."
            )


def cut(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Replace the parameters of planned layers by this rank's parts. Local."""
    from torch.distributed.tensor.parallel import parallelize_module

    parts: dict[int, nn.Parameter] = {}
    for planned in _cuts(module, plan):
        layer = planned.layer
        parameters, buffers = dict(layer._parameters), dict(layer._buffers)
        parallelize_module(layer, mesh, _style(planned.style), src_data_rank=None)
        layer._buffers.update(buffers)  # torch makes DTensors of them, which can't be broadcast
        for key, parameter in parameters.items():
            if (
                parameter is not None and layer._parameters[key] is not parameter
            ):  # tied parameters stay tied
                layer._parameters[key] = parts.setdefault(id(parameter), layer.get_parameter(key))


def cut_dims(module: nn.Module, plan: Plan) -> dict[str, int]:
    """Return the dimension along which each parameter of a planned layer is cut, by name."""
    dims = {}
    for planned in _cuts(module, plan):
        if planned.dim is not None:
            dims[f"{planned.name}.weight"] = planned.dim
            if planned.dim == 0 and isinstance(planned.layer, nn.Linear):
                dims[f"{planned.name}.bias"] = 0
    return dims


def _cuts(module: nn.Module, plan: Plan) -> list[_Cut]:
    """Return the layers that a plan names. Tied layers of the model's own plan are left out."""
    modules, cuts = dict(module.named_modules()), dict[str, _Cut]()
    for pattern, style in (plan or _own_plan(module)).items():
        matching = [name for name in modules if _matches(name, pattern)]
        if not matching:
            raise BackendError(
                f"the plan's {pattern!r} names no module of this {type(module).__name__}"
            )
        for name in matching:
            kind = _STYLES[style][0] if isinstance(style, str) else type(style).__name__
            dims = [
                d
                for (s, layer), d in _DIMS.items()
                if s == kind and isinstance(modules[name], layer)
            ]
            cuts[name] = _Cut(name, modules[name], style, next(iter(dims), None))
    found: dict[int, set[int | None]] = {}
    for name, child in modules.items():
        for parameter in child.parameters(recurse=False):
            found.setdefault(id(parameter), set()).add(cuts[name].dim if name in cuts else None)
    tied = [
        n
        for n, c in cuts.items()
        if any(len(found[id(p)]) > 1 for p in c.layer.parameters(recurse=False))
    ]
    if tied and plan:
        raise BackendError(
            f"{tied[0]} is tied to another layer, and the plan cuts them differently. Name both, or none."
        )
    return [planned for name, planned in cuts.items() if name not in tied]


def _own_plan(module: nn.Module) -> dict[str, str]:
    """Return the ``tp_plan`` of a model of transformers, which may be inside of ``module``."""
    for prefix, child in module.named_modules():
        plan: Any = getattr(child, "tp_plan", None) or getattr(child, "_tp_plan", None)
        if isinstance(plan, Mapping):
            check_plan(dict(plan) or None)
            return {f"{prefix}.{name}" if prefix else name: style for name, style in plan.items()}
    return {}


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch, names, patterns))


def _style(style: Any) -> ParallelStyle:
    from torch.distributed.tensor import Replicate, parallel

    if not isinstance(style, str):
        return style  # type: ignore[no-any-return]
    name, whole = _STYLES[style]
    if (
        name == "SequenceParallel"
    ):  # a norm looks along the last dimension only, so any other may be cut
        return parallel.SequenceParallel(sequence_dim=0, use_local_output=True)
    return getattr(parallel, name)(**dict.fromkeys(whole, Replicate()))  # type: ignore[no-any-return]
