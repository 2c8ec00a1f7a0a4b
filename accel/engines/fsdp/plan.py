"""How a model will be divided: the mesh of the ranks, what FSDP2 gathers as one, and layers cut as a plan says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import torch
import torch.distributed as dist
from torch import nn

from ...errors import BackendError
from ...process import Process
from ...process.startup import mesh_of
from ..base.activations import Choice, chosen, is_container

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

# -- the ranks as a mesh: copies of the model, its shards, and parts of its layers --------------------------------------

#: The axes in their order, and the names that they may have in a mesh of the user's.
AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "replicate": ("replicate", "dp_replicate"),
    "shard": ("shard", "dp_shard", "fsdp", "dp"),
    "tensor": ("tensor", "tp"),
}


def check_mesh(options: Any) -> None:
    """Refuse (BackendError) a mesh that says something else than the other options, or nothing that is known."""
    if (mesh := options.mesh) is None:
        return
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise BackendError(f"mesh={mesh!r}: expected a torch.distributed.DeviceMesh with mesh_dim_names")
    roles = [role for name in names for role, known in AXES.items() if name in known]
    what = f"mesh with the axes {', '.join(map(repr, names))}: expected"
    if len(roles) < len(names) or len(set(roles)) < len(roles) or roles != sorted(roles, key=list(AXES).index):
        some = "; ".join(f"{role!r} (or {', '.join(map(repr, known[1:]))})" for role, known in AXES.items())
        raise BackendError(f"{what}, in this order, some of {some}")
    if "shard" not in roles:
        raise BackendError(f"{what} one to divide along, named 'shard'")
    if options.plan is not None and "tensor" not in roles:
        raise BackendError(f"{what} one that the plan cuts layers along, named 'tensor'")
    for option, role in (("replicas", "replicate"), ("tensor_parallel", "tensor")):
        if getattr(options, option) != 1:
            raise BackendError(f"{option} and mesh exclude each other: the mesh's axis {role!r} says it")


def axes_of(options: Any, world_size: int) -> dict[str, int]:
    """The length of each axis, 1 in one process; BackendError where the processes do not divide so."""
    if world_size == 1:
        return dict.fromkeys(AXES, 1)
    if options.mesh is not None:
        sizes = dict(zip(options.mesh.mesh_dim_names, options.mesh.shape, strict=True))
        found = {role: math.prod(sizes.get(name, 1) for name in known) for role, known in AXES.items()}
        if options.mesh.mesh.flatten().tolist() != list(range(world_size)):
            raise BackendError(
                f"{options.mesh!r}: expected one of the ranks 0 to {world_size - 1}, in this order, as init_device_mesh makes it"
            )
        return found
    return options.axes(world_size)  # type: ignore[no-any-return]


@final
class Mesh:
    """The mesh of an engine, made by accel or given by the user. Collective where it is a new one."""

    def __init__(self, options: Any, process: Process) -> None:
        self.sizes = axes_of(options, process.place.world_size)
        self.whole: DeviceMesh = options.mesh
        if options.mesh is None:
            # What has one rank is no axis, but that along which FSDP2 divides.
            self.whole = mesh_of(process, {role: n for role, n in self.sizes.items() if n > 1 or role == "shard"})
        else:
            process.given_groups += [g for g in self.whole.get_all_groups() if g not in process.given_groups]
        names = self.whole.mesh_dim_names
        assert names is not None
        #: Of the axes that it has, as it calls them.
        self.names = {role: n for n in names for role, known in AXES.items() if n.partition(" ")[0] in known}
        place: Any = self.whole.get_coordinate()
        #: This rank's place along each axis.
        self.place = {role: place[names.index(self.names[role])] if role in self.names else 0 for role in AXES}

    def copies(self, tensor: Any) -> list[str]:
        """The axes along which all ranks have the same of a tensor."""
        placements = getattr(tensor, "placements", ())  # none of a plain one
        names = tensor.device_mesh.mesh_dim_names if placements else ()
        divided = {name for name, placement in zip(names, placements, strict=True) if not placement.is_replicate()}
        return [axis for axis in AXES if self.names.get(axis) not in divided]

    def add(self, flat: torch.Tensor) -> None:
        """Sum over all ranks what those with parts of a layer have alike: a mean of theirs would hide that they do not."""
        for name in (n for role, n in self.names.items() if role != "tensor"):
            dist.all_reduce(flat, group=self.whole.get_group(name))
        flat *= self.sizes["tensor"]

    @property
    def data(self) -> DeviceMesh:
        """That of the ranks that a layer's part is divided over, with the copies of it."""
        names = tuple(n for role, n in self.names.items() if role != "tensor")
        return self.whole[names] if self.parallel else self.whole

    @property
    def tensor(self) -> DeviceMesh:
        return self.whole[self.names["tensor"]]

    @property
    def parallel(self) -> bool:
        return "tensor" in self.names


# -- which modules FSDP2 gathers as one, and what it cannot shard -------------------------------------------------------


def blocks(module: nn.Module, wrap: Choice) -> list[tuple[str, nn.Module]]:
    """The submodules that become groups of their own, inner ones first; ``module`` itself takes what is left."""
    found = {n: m for n, m in chosen(module, wrap) if any(True for _ in m.parameters())}
    everything, before = owners(module), None
    while before != found.keys():
        before = set(found)
        for places in everything.values():  # a tied parameter must lie in one group
            groups = {_group(module, path, found) for path in places}
            for name in groups - {""} if len(groups) > 1 else ():
                del found[name]
    return list(reversed(found.items()))


def owners(module: nn.Module) -> dict[int, list[str]]:
    """By the identity of each parameter, the names of the modules that have it."""
    found: dict[int, list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for parameter in child.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(path)
    return found


def _group(module: nn.Module, path: str, chosen: dict[str, nn.Module]) -> str:
    """The name of the innermost chosen module at or above ``path``; "" is the whole."""
    names = {id(child): name for name, child in chosen.items()}
    while path:
        if (name := names.get(id(module.get_submodule(path)))) is not None:
            return name
        path = path.rpartition(".")[0]
    return ""


def check_module(module: nn.Module, options: Any) -> None:
    """Refuse (BackendError) what would be lost or fail later."""
    groups = dict(blocks(module, options.wrap))
    if empty := [n for n, m in groups.items() if is_container(m) and options.wrap is not None]:
        raise BackendError(f"FSDP(wrap=...) chose {', '.join(empty[:5])}, which has no forward: choose its children")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and is_container(module):
        raise BackendError(
            f"a {type(module).__name__} has no forward, where its weights would be gathered: give accel.setup a module with "
            "one, which calls these children, or choose backend='ddp'"
        )
    embeddings = [n for n, m in module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if limited := [n for n in embeddings if module.get_submodule(n).max_norm is not None]:
        raise BackendError(
            f"{', '.join(limited[:5])} has max_norm, which writes to its weight in forward. FSDP2 would drop these writes: "
            "leave max_norm out, or use backend='ddp'."
        )
    if hooked := [n for n, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]:
        raise BackendError(
            f"{', '.join(hooked[:5])} has gradient hooks, which would be lost when its shard takes its place: "
            "register hooks after accel.setup, on model.parameters()"
        )
    dtypes: dict[str, dict[Any, str]] = {}
    named = {id(p): (n, p) for n, p in module.named_parameters()}
    for identity, places in owners(module).items():
        name, parameter = named[identity]
        if parameter.requires_grad and parameter.dim() and parameter.numel():
            dtypes.setdefault(_group(module, places[0], groups), {}).setdefault(parameter.dtype, name)
    for found in dtypes.values():
        if len(found) > 1:
            listed = ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in found.items())
            raise BackendError(
                f"trainable parameters of one group have different dtypes: {listed}; convert the model first"
            )


# -- tensor parallelism: layers cut over neighbouring ranks, by the styles of torch's parallelize_module ----------------

#: A style of torch, or its name in the plans of transformers, by the modules' names, with ``*`` for a part of a name.
Plan: TypeAlias = "Mapping[str, ParallelStyle | str] | None"

#: What the names mean: the class, and whether input and output are whole on every rank where the class has them cut.
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
#: By the style's class, whether of a Linear or of an Embedding, the dimension that its weight is cut along.
_CUT: Final[Mapping[tuple[str, type], int]] = {
    ("ColwiseParallel", nn.Linear): 0,
    ("ColwiseParallel", nn.Embedding): 1,
    ("RowwiseParallel", nn.Linear): 1,
    ("RowwiseParallel", nn.Embedding): 0,
}


def check_plan(plan: Any) -> None:
    """Refuse (BackendError) what is no plan."""
    if plan is None:
        return
    if not isinstance(plan, Mapping) or not plan or not all(isinstance(name, str) for name in plan):
        raise BackendError(
            f"plan={plan!r}: expected styles of torch.distributed.tensor.parallel by the names of modules, such as "
            '{"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}'
        )
    for name, style in plan.items():
        if _kind(style) is None:
            known = f"expected a style of torch.distributed.tensor.parallel, or one of {', '.join(map(repr, _STYLES))}"
            raise BackendError(f"plan[{name!r}] is {style!r}: {known}")


def own_plan(module: nn.Module) -> dict[str, str]:
    """The plan for tensor parallelism of a model of transformers, which may be inside: styles by names of modules; else none."""
    for prefix, child in module.named_modules():
        if "_tp_plan" in vars(child) or hasattr(type(child), "tp_plan") or hasattr(type(child), "_tp_plan"):
            own: Any = child
            found = dict(getattr(own, "tp_plan", None) or own._tp_plan or {})
            return _with_adapters(module, {f"{prefix}.{name}" if prefix else name: s for name, s in found.items()})
    return {}


def _with_adapters(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan as it is where peft has put its own layers into the places of planned ones.

    Of an adapter's two matrices, one is cut as its layer is: the second by columns, the first by rows. The other one is whole.
    """
    names, found = dict(module.named_modules()), dict[str, str]()
    for pattern, style in plan.items():
        planned = [name for name in names if matches(name, pattern)]
        if not any(f"{name}.{part}" in names for name in planned for part in ("base_layer", "original_module")):
            found[pattern] = style
            continue
        matrix = "lora_B" if "colwise" in style else "lora_A"
        for name in planned:
            parts = (f"{name}.base_layer", f"{name}.{matrix}.*", f"{name}.original_module", f"{name}.modules_to_save.*")
            mine = [other for other in names if any(matches(other, part) for part in parts)]
            found |= dict.fromkeys(mine or [name], style)
    return found


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name is one that a pattern of a plan stands for, part by part."""
    own, parts = (text.split(".") if text else [] for text in (name, pattern))  # "" is the model itself
    return len(own) == len(parts) and all(map(fnmatch, own, parts))


def text_of(plan: Plan) -> str:
    """A plan as text, the same on all ranks for styles of the same settings."""

    def style_text(style: Any) -> str:
        own = isinstance(style, str) or "__repr__" in {name for kind in type(style).__mro__[:-1] for name in vars(kind)}
        return repr(style) if own else f"{type(style).__qualname__}({vars(style)})"

    return "None" if plan is None else f"{{{', '.join(f'{name!r}: {style_text(s)}' for name, s in plan.items())}}}"


def check_cut(module: nn.Module, plan: Plan, size: int) -> None:
    """Refuse (BackendError) a plan that does not fit the module, or layers that ``size`` ranks cannot have equal parts of."""
    chosen = plan or own_plan(module)
    if not chosen:
        raise BackendError(
            f"tensor parallelism needs a plan, and this {type(module).__name__} has none of its own (tp_plan): pass plan={{...}} "
            "with styles of torch.distributed.tensor.parallel by the names of modules"
        )
    check_plan(chosen)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(getattr(module, "config", None), key, None)
        if isinstance(heads, int) and heads % size:
            raise BackendError(
                f"the config of this {type(module).__name__} has {key}={heads}, which do not divide over {size} ranks of tensor "
                "parallelism: choose a size that divides them"
            )
    for name, child, style in _planned(module, chosen):
        dim = _dim(style, child)
        weight = child._parameters.get("weight")
        if dim is not None and weight is None:
            raise BackendError(
                f"{name} computes its weight from others (weight_norm, spectral_norm), which a plan cannot cut: leave it out"
            )
        shape = () if dim is None or weight is None else tuple(weight.shape)
        if dim is not None and shape[dim] % size:
            raise BackendError(
                f"{name} ({type(child).__name__} of {shape}) does not divide into {size} equal parts along "
                f"dim {dim}: leave it out of the plan, or choose another size"
            )
        if dim is None and _kind(style) in ("ColwiseParallel", "RowwiseParallel"):
            raise BackendError(
                f"{name} is a {type(child).__name__}, and {_kind(style)} cuts a Linear or an Embedding: leave it out of the plan"
            )
    _tied(module, chosen, refuse=plan is not None)


def cut(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Put parts in the places of the planned layers' parameters, whose hooks the styles add. Local."""
    from torch.distributed.tensor.parallel import parallelize_module

    chosen = dict(plan or own_plan(module))
    for name in _tied(module, chosen, refuse=False):
        del chosen[name]
    made: dict[int, nn.Parameter] = {}
    for _, child, style in list(_planned(module, chosen)):
        were, buffers = dict(child._parameters), dict(child._buffers)
        parallelize_module(child, mesh, _style(style), src_data_rank=None)
        child._buffers.update(buffers)  # of which torch makes DTensors, which no broadcast takes
        for key, parameter in were.items():
            if parameter is not None and child._parameters[key] is not parameter:
                child._parameters[key] = made.setdefault(id(parameter), child.get_parameter(key))  # tied ones stay tied


def _planned(module: nn.Module, plan: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the modules that the plan names, each with its name and style."""
    for pattern, style in plan.items():
        found = [(name, child, style) for name, child in module.named_modules() if matches(name, pattern)]
        if not found:
            raise BackendError(f"the plan's {pattern!r} names no module of this {type(module).__name__}")
        yield from found


def _tied(module: nn.Module, plan: Mapping[str, Any], *, refuse: bool) -> list[str]:
    """The entries of a plan that would cut a tensor in one of its places, and not, or otherwise, in another."""
    cuts: dict[int, dict[str, tuple[str, int | None]]] = {}
    for pattern, style in plan.items():
        for name, child, _ in _planned(module, {pattern: style}):
            for key, parameter in child.named_parameters(recurse=False):
                cuts.setdefault(id(parameter), {})[f"{name}.{key}".lstrip(".")] = pattern, _dim(style, child)
    found: list[str] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        its = cuts.get(id(parameter), {})
        if its and (name not in its or len({dim for _, dim in its.values()}) > 1):
            if refuse:
                raise BackendError(
                    f"{name} is tied to {', '.join(n for n in its if n != name) or name}, and the plan cuts them differently: "
                    "name both, so that they are cut along one dimension, or none"
                )
            found += [pattern for pattern, _ in its.values()]
    return list(dict.fromkeys(found))


def _kind(style: object) -> str | None:
    """The name of a style's class; None where it is no style."""
    if isinstance(style, str):
        return _STYLES[style][0] if style in _STYLES else None
    names = [kind.__name__ for kind in type(style).__mro__]
    return names[0] if "ParallelStyle" in names else None


def _style(style: Any) -> ParallelStyle:
    from torch.distributed.tensor import Replicate, parallel

    if not isinstance(style, str):
        made: ParallelStyle = style
        return made
    name, whole = _STYLES[style]
    if name == "SequenceParallel":
        # A norm looks along the last dimension alone, and any other may be the one that is cut.
        return parallel.SequenceParallel(sequence_dim=0, use_local_output=True)
    made = getattr(parallel, name)(**dict.fromkeys(whole, Replicate()))
    return made  # noqa: RET504


def _dim(style: Any, child: nn.Module) -> int | None:
    """The dimension that a layer's weight is cut along; None where it is not, or nobody knows."""
    return next((dim for (kind, layer), dim in _CUT.items() if kind == _kind(style) and isinstance(child, layer)), None)


def cut_dims(module: nn.Module, plan: Plan) -> dict[str, int]:
    """Return the dimension along which each parameter of a planned layer is cut, by name.

    BackendError: the plan names a module that doesn't exist.
    """
    chosen = dict(plan or own_plan(module))
    for name in _tied(module, chosen, refuse=False):
        del chosen[name]
    dims = {}
    for name, child, style in _planned(module, chosen):
        dim = _dim(style, child)
        if dim is not None:
            dims[f"{name}.weight"] = dim
            if dim == 0 and isinstance(child, nn.Linear):
                dims[f"{name}.bias"] = 0
    return dims
