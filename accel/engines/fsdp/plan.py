"""Tensor parallelism: layers cut over neighbouring ranks as a plan says, by the styles of torch's ``parallelize_module``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from torch import nn

from ...errors import BackendError
from ..base.memory import Footprint, ParameterSize, own_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

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


class Planned:
    """Options with a plan: equal where their texts are, since styles are objects that a repeated notebook cell makes anew."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        wraps = [getattr(options, "wrap", None) for options in (self, other)]  # of which a text has the names only
        return type(other) is type(self) and repr(other) == repr(self) and wraps[0] == wraps[1]

    def __hash__(self) -> int:
        return hash(repr(self))


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
    _check_heads(module, size)
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


def _check_heads(module: nn.Module, size: int) -> None:
    config = getattr(module, "config", None)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % size:
            raise BackendError(
                f"the config of this {type(module).__name__} has {key}={heads}, which do not divide over {size} ranks of tensor "
                "parallelism: choose a size that divides them"
            )


def cut(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> contextlib.ExitStack:
    """Put parts in the places of the planned layers' parameters; what is returned takes away the hooks of the styles. Local."""
    from torch.distributed.tensor.parallel import parallelize_module

    undo, chosen = contextlib.ExitStack(), dict(plan or own_plan(module))
    for name in _tied(module, chosen, refuse=False):
        del chosen[name]
    before = {child: _hooks(child) for child in module.modules()}
    made: dict[int, nn.Parameter] = {}
    for _, child, style in list(_planned(module, chosen)):
        were = dict(child._parameters)
        parallelize_module(child, mesh, _style(style), src_data_rank=None)
        for key, parameter in were.items():
            if parameter is not None and child._parameters[key] is not parameter:
                child._parameters[key] = made.setdefault(id(parameter), child.get_parameter(key))  # tied ones stay tied
    for child, known in before.items():
        added = [(table, key) for table, keys in zip(_tables(child), known, strict=True) for key in table.keys() - keys]
        undo.callback(_remove, child, added)
    return undo


def _tables(child: nn.Module) -> list[dict[int, Any]]:
    return [value for name, value in vars(child).items() if name.startswith("_forward_") and isinstance(value, dict)]


def _hooks(child: nn.Module) -> list[set[int]]:
    return [set(table) for table in _tables(child)]


def _remove(child: nn.Module, added: list[tuple[dict[int, Any], int]]) -> None:
    for table, key in added:
        table.pop(key, None)
    vars(child).pop("_distribute_module_applied", None)


def _matches(name: str, pattern: str) -> bool:
    """Whether a module's name is one that a pattern of a plan stands for, part by part."""
    own, parts = (text.split(".") if text else [] for text in (name, pattern))  # "" is the model itself
    return len(own) == len(parts) and all(map(fnmatch, own, parts))


def _planned(module: nn.Module, plan: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module, Any]]:
    """The modules that the plan names, each with its name and style."""
    for pattern, style in plan.items():
        found = False
        for name, child in module.named_modules():
            if _matches(name, pattern):
                found = True
                yield name, child, style
        if not found:
            raise BackendError(f"the plan's {pattern!r} names no module of this {type(module).__name__}")


def _tied(module: nn.Module, plan: Mapping[str, Any], *, refuse: bool) -> list[str]:
    """The entries of a plan that would cut a tensor in one of its places, and not, or otherwise, in another."""
    cuts: dict[int, dict[str, tuple[str, int | None]]] = {}
    for pattern, style in plan.items():
        for name, child, _ in _planned(module, {pattern: style}):
            for key, parameter in child.named_parameters(recurse=False):
                cuts.setdefault(id(parameter), {})[f"{name}.{key}"] = pattern, _dim(style, child)
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
    made = getattr(parallel, name)(**dict.fromkeys(whole, Replicate()))
    return made  # noqa: RET504


def _dim(style: Any, child: nn.Module) -> int | None:
    """The dimension that a layer's weight is cut along; None where it is not, or nobody knows."""
    return next((dim for (kind, layer), dim in _CUT.items() if kind == _kind(style) and isinstance(child, layer)), None)


def shrunk(footprint: Footprint, plan: Plan, size: int) -> Footprint:
    """A model as each rank of a plan has it, before its parts are divided further."""
    chosen = plan or footprint.plan

    def part(p: ParameterSize) -> ParameterSize:
        for pattern, style in chosen.items():
            if _matches(p.name.rpartition(".")[0], pattern):
                dim = 0 if _kind(style) == "ColwiseParallel" else 1 if _kind(style) == "RowwiseParallel" else None
                if dim is not None and dim < len(p.shape):
                    shape = tuple(n // size if d == dim else n for d, n in enumerate(p.shape))
                    return replace(p, shape=shape, state_bytes=p.state_bytes // size)
        return p

    return replace(footprint, parameters=tuple(map(part, footprint.parameters)))
