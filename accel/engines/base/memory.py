"""Memory of an engine: predicted from a model's sizes, and measured on what lives."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import OptimizerError
from ...shard import parameters_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on one rank.

    Args:
        parameters: of the model, frozen ones included.
        gradients: as they are when the optimizer steps.
        optimizer_state: once every trainable parameter was stepped; with master copies of parameters.
        buffers: the module's buffers, such as BatchNorm's statistics.
        buckets: memory to communicate with that is kept from step to step.
        transient: about what a step needs for a while beside all that; without activations and an optimizer's temporaries.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    buffers: int = 0
    buckets: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        """What stays from step to step: all but ``transient``."""
        return self.parameters + self.gradients + self.optimizer_state + self.buffers + self.buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSize:
    """One parameter: its whole shape, bytes of an element, whether it gets gradients, and what its optimizer keeps for it."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool = True
    state_bytes: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """The length of the dimension that it is cut along."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, and of its gradient where it has one."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """A model with its optimizers: what they need room for, without needing that room, for predictions of memory."""

    parameters: tuple[ParameterSize, ...]  # in the model's order
    buffers: int = 0  # bytes
    optimizers: tuple[tuple[int, ...], ...] = ()  # for each the indices of its parameters, in the order of its groups
    layers: tuple[tuple[str, int], ...] = ()  # of a plain ``nn.Sequential``: each child's name, and bytes of buffers
    plan: Mapping[str, str] = field(default_factory=dict)  # the model's own for tensor parallelism

    @property
    def trainable(self) -> tuple[ParameterSize, ...]:
        return tuple(p for p in self.parameters if p.trainable)

    @property
    def blocks(self) -> dict[str, list[ParameterSize]]:
        """The parameters by the repeated part of the model that they lie in, as ``layers.3``; "" is outside of any.

        A part that has submodules of its own and a sibling with the same names, or some of them, is repeated; the innermost one
        counts.
        """
        inside: dict[str, set[str]] = {}
        for parameter in self.parameters:
            for prefix, rest in _numbered(parameter.name):
                inside.setdefault(prefix, set()).add(rest)
        beside: dict[str, list[set[str]]] = {}
        for prefix, names in inside.items():
            beside.setdefault(prefix.rpartition(".")[0], []).append(names)
        repeated: set[str] = set()
        for prefix, names in inside.items():
            alike = sum(names <= other or other <= names for other in beside[prefix.rpartition(".")[0]])
            repeated.update([prefix] if alike > 1 and any("." in name for name in names) else ())
        blocks: dict[str, list[ParameterSize]] = {}
        for parameter in self.parameters:
            around = [prefix for prefix, _ in _numbered(parameter.name) if prefix in repeated]
            blocks.setdefault(around[-1] if around else "", []).append(parameter)
        return blocks


def _numbered(name: str) -> Iterator[tuple[str, str]]:
    """The prefixes of a name that end in a number, from short to long, each with what follows."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            yield ".".join(parts[: i + 1]), ".".join(parts[i + 1 :])


def take(
    module: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    named: Mapping[str, torch.Tensor] | None = None,
    shapes: Mapping[str, torch.Size] | None = None,
) -> Footprint:
    """The footprint of a module on any device, also the meta device; nothing is allocated or changed.

    ``named`` is what the optimizers' groups hold (None: the module's parameters), ``shapes`` those of whole parameters, where
    this rank may hold parts. OptimizerError: a group holds something else, or state cannot be told without real tensors.
    """
    named = dict(module.named_parameters()) if named is None else named
    shapes = {name: p.shape for name, p in named.items()} if shapes is None else shapes
    names = {id(p): name for name, p in named.items()}
    place = {name: i for i, name in enumerate(named)}
    state_bytes: Counter[str] = Counter()
    held = []
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        strangers = [tuple(p.shape) for p in parameters if id(p) not in names]
        if strangers:
            raise OptimizerError(
                f"this {type(optimizer).__name__} holds {len(strangers)} tensors that are not parameters of the model "
                f"(the first of shape {strangers[0]}): build it from the parameters of the module that is measured"
            )
        own = [names[id(p)] for p in parameters]
        held.append(tuple(place[name] for name in own))
        for name, size in zip(own, _state_bytes(optimizer, [shapes[name] for name in own]), strict=True):
            state_bytes[name] += size

    def sized(name: str, p: torch.Tensor) -> ParameterSize:
        shape, itemsize = tuple(shapes[name]), p.dtype.itemsize
        trains, state = p.requires_grad, state_bytes[name]
        return ParameterSize(name=name, shape=shape, itemsize=itemsize, trainable=trains, state_bytes=state)

    return Footprint(
        parameters=tuple(sized(name, p) for name, p in named.items()),
        buffers=_buffers(module),
        optimizers=tuple(held),
        layers=tuple((name, _buffers(child)) for name, child in module.named_children()) if is_sequence(module) else (),
        plan=own_plan(module),
    )


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


def is_sequence(module: nn.Module) -> bool:
    """Whether the module calls its children one after the other, and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _buffers(module: nn.Module) -> int:
    return sum(b.nbytes for b in module.buffers())


# -- the state that an optimizer will have ----------------------------------------------------------------------------


@final
class _ScalarsOfNothing(TorchDispatchMode):
    """Gives 1 where an optimizer asks a tensor without data for its value: sizes do not depend on it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def _state_bytes(optimizer: Optimizer, shapes: Sequence[Sequence[int]]) -> list[int]:
    """Bytes of state per parameter after a step, found by stepping a copy of the optimizer on the meta device."""
    stand_in, parameters = _stand_in(optimizer, shapes)
    # The class's own step: not what a scheduler put before it, and without the hooks that registered optimizers have.
    step = type(optimizer).step
    try:
        with torch.no_grad(), _ScalarsOfNothing():
            getattr(step, "__wrapped__", step)(stand_in)
    except Exception as error:
        raise OptimizerError(
            f"the memory of {type(optimizer).__name__} cannot be told without real tensors: its step on the meta device "
            f"raised {type(error).__name__}: {error}"
        ) from error
    return [sum(_tensor_bytes(value) for value in stand_in.state.get(p, {}).values()) for p in parameters]


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _stand_in(optimizer: Optimizer, shapes: Sequence[Sequence[int]]) -> tuple[Optimizer, list[nn.Parameter]]:
    """A copy of the optimizer over meta parameters with gradients, and these parameters; it shares nothing with the original."""
    memo: dict[int, Any] = {}
    parameters = []
    for parameter, shape in zip(parameters_of(optimizer), shapes, strict=True):
        other = nn.Parameter(torch.empty(tuple(shape), dtype=parameter.dtype, device="meta"), requires_grad=False)
        if parameter.requires_grad:
            other.requires_grad_()
            other.grad = torch.empty_like(other)
        memo[id(parameter)] = other
        parameters.append(other)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                memo[id(value)] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    # Without what stands in the place of its methods, and knows the original.
    kept = [k for k in vars(optimizer) if not k.startswith(("_optimizer_", "__"))]
    copied = {k: vars(optimizer)[k] for k in kept if k not in ("step", "zero_grad", "state_dict")}
    stand_in = type(optimizer).__new__(type(optimizer))
    try:
        stand_in.__dict__.update(copy.deepcopy(copied, memo))
    except Exception as error:
        raise OptimizerError(
            f"the memory of {type(optimizer).__name__} cannot be told: it cannot be copied "
            f"({type(error).__name__}: {error})"
        ) from error
    for kind in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre"):
        setattr(stand_in, f"_optimizer_{kind}_hooks", {})
    for group in stand_in.param_groups:
        # Ways to compute the same that exist for some devices only.
        group.update({key: False for key in ("foreach", "fused", "capturable", "differentiable") if key in group})
    return stand_in, parameters


# -- units ------------------------------------------------------------------------------------------------------------


UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def human(nbytes: float) -> str:
    """Bytes in binary units with three digits: ``1.50 GiB``."""
    return _scaled(nbytes, 1024, UNITS)


def count(number: float) -> str:
    """A number of parameters in thousands, millions or billions: ``70.6 B``."""
    return _scaled(number, 1000, ("", "k", "M", "B", "T"))


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while number >= base - 0.5 and power < len(units) - 1:
        number, power = number / base, power + 1
    digits = 0 if power == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {units[power]}".rstrip()


# -- predictions: pure functions of sizes, by rank --------------------------------------------------------------------


def whole(footprint: Footprint, world_size: int, buckets: int = 0) -> tuple[MemoryUse, ...]:
    """Everything on every rank, and ``buckets`` beside it."""
    return (_use(footprint, footprint.parameters, buckets=buckets),) * world_size


def owners(footprint: Footprint, world_size: int) -> tuple[MemoryUse, ...]:
    """All parameters on every rank; gradients and state of a parameter on the one rank that owns it.

    One optimizer after the other deals its parameters out whole, trainable ones first, from large to small, each to the
    rank that has least so far. A gradient that no optimizer steps stays everywhere. Until a step's reduction all
    gradients are there, and those of one owner once more.
    """
    owned: list[list[ParameterSize]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    dealt: set[int] = set()
    for indices in footprint.optimizers:
        new = [i for i in dict.fromkeys(indices) if i not in dealt]
        dealt.update(new)
        parameters = sorted((footprint.parameters[i] for i in new), key=lambda p: (not p.trainable, -p.numel))
        for parameter in parameters:
            rank = loads.index(min(loads))
            owned[rank].append(parameter)
            loads[rank] += parameter.numel
    rest = [p for i, p in enumerate(footprint.parameters) if i not in dealt]
    uses = [_use(footprint, [*mine, *rest]) for mine in owned]
    gradients = _gradients(footprint.parameters)
    piece = max(use.gradients for use in uses) if world_size > 1 else 0
    return tuple(replace(use, transient=gradients - use.gradients + piece) for use in uses)


def even_shards(footprint: Footprint, world_size: int) -> tuple[MemoryUse, ...]:
    """Every parameter, gradient and state cut along the first dimension into equal pieces, the last of them padded.

    In backward a block and the next one are there whole, with a block's gradients until they are reduced; and so is
    from first to last what lies in no block.
    """

    def padded(parameters: Iterable[ParameterSize]) -> int:
        return sum(_share(p.rows, world_size) * (p.nbytes // max(p.rows, 1)) for p in parameters)

    def state(p: ParameterSize, rank: int) -> int:
        rows = _share(p.rows, world_size)
        return p.state_bytes * min(max(p.rows - rank * rows, 0), rows) // max(p.rows, 1)

    blocks = dict(footprint.blocks)
    rest = blocks.pop("", [])
    gathered = sum(p.nbytes for p in rest) + _gradients(rest)
    gathered += max((2 * sum(p.nbytes for p in block) + _gradients(block) for block in blocks.values()), default=0)
    use = MemoryUse(
        parameters=padded(footprint.parameters),
        gradients=padded(footprint.trainable),
        buffers=footprint.buffers,
        transient=gathered if world_size > 1 else 0,
    )
    stateful = [p for p in footprint.parameters if p.state_bytes]
    return tuple(replace(use, optimizer_state=sum(state(p, rank) for p in stateful)) for rank in range(world_size))


def zero(
    footprint: Footprint, world_size: int, stage: int, *, masters: bool = False, whole_below: int = 0, bucket: int = 0
) -> tuple[MemoryUse, ...]:
    """The stages of ZeRO (Rajbhandari et al., arXiv 1910.02054): 1 cuts optimizer state, 2 gradients too, 3 parameters too.

    Once they are reduced, stage 1 as well keeps only the gradients of what a rank steps. With ``masters`` the optimizer steps
    fp32 copies, which count as its fp32 state, of parameters and gradients of two bytes. At stage 3 parameters of at most
    ``whole_below`` elements are whole on every rank, beside the parts, and memory to reduce ``bucket`` elements in is kept.
    """
    if world_size == 1:
        return whole(footprint, 1)
    sizes = {p.name: p.numel * (2 if masters else p.itemsize) for p in footprint.parameters}
    stepped = {index for indices in footprint.optimizers for index in indices}
    gradients = sum(sizes[p.name] for p in footprint.trainable)
    state = sum(p.state_bytes for p in footprint.parameters)
    if masters:
        copied = [p for i, p in enumerate(footprint.parameters) if i in stepped and p.trainable]
        state = sum(4 * p.numel + p.state_bytes * 4 // p.itemsize for p in copied)
    block = max((sum(sizes[p.name] for p in block) for block in footprint.blocks.values()), default=0)
    kept = sum(sizes[p.name] for p in footprint.parameters if p.numel <= whole_below) if stage == 3 else 0
    numel = sum(p.numel for p in footprint.parameters)
    itemsize = max((2 if masters else p.itemsize for p in footprint.parameters), default=0)
    buckets = min(bucket, numel + numel % 2) * itemsize
    # Stage 1 keeps all gradients until they are reduced, 2 a block's; 3 has a block's parameters too.
    transient = {1: gradients + buckets, 2: block + buckets, 3: 2 * block}[stage]
    use = MemoryUse(
        parameters=_share(sum(sizes.values()), world_size if stage == 3 else 1) + kept,
        gradients=_share(gradients, world_size),
        optimizer_state=_share(state, world_size),
        buffers=footprint.buffers,
        buckets=buckets if stage == 3 else 0,
        transient=transient,
    )
    return (use,) * world_size


def layers(footprint: Footprint) -> list[list[ParameterSize]]:
    """The parameters of each layer of a Sequential."""
    children: dict[str, list[ParameterSize]] = {name: [] for name, _ in footprint.layers}
    for parameter in footprint.parameters:
        children[parameter.name.partition(".")[0]].append(parameter)
    return list(children.values())


def stages(footprint: Footprint, counts: Sequence[int]) -> tuple[MemoryUse, ...]:
    """On each rank the next ``counts[rank]`` of the layers, and nothing of the others."""
    rest = iter(zip(layers(footprint), footprint.layers, strict=True))
    uses = []
    for count in counts:
        taken = list(itertools.islice(rest, count))
        mine = [p for parameters, _ in taken for p in parameters]
        buffers = sum(nbytes for _, (_, nbytes) in taken)
        uses.append(replace(_use(footprint, mine), parameters=sum(p.nbytes for p in mine), buffers=buffers))
    return tuple(uses)


def _use(footprint: Footprint, mine: Iterable[ParameterSize], buckets: int = 0) -> MemoryUse:
    mine = list(mine)
    return MemoryUse(
        parameters=sum(p.nbytes for p in footprint.parameters),
        gradients=_gradients(mine),
        optimizer_state=sum(p.state_bytes for p in mine),
        buffers=footprint.buffers,
        buckets=buckets,
    )


def _gradients(parameters: Iterable[ParameterSize]) -> int:
    return sum(p.nbytes for p in parameters if p.trainable)


def _share(total: int, parts: int) -> int:
    return -(-total // parts)
