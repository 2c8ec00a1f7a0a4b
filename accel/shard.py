"""Where parts of tensors lie, and the state of models and optimizers on this rank: what a checkpoint writes, and fills."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from operator import itemgetter
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .errors import CheckpointError
from .trees import map_tensors

_EXTRA: Final = "_extra_state"

# -- boxes in tensors, and the grids that they make: where parts of a tensor lie that is cut along several dimensions --

#: (begin, end) in each dimension; () is all of a tensor.
Box = tuple[tuple[int, int], ...]
#: Where each dimension of a tensor is cut, increasing; () is nowhere.
Cuts = tuple[tuple[int, ...], ...]


def shape_of(box: Box) -> tuple[int, ...]:
    """Its sizes."""
    return tuple(end - begin for begin, end in box)


def in_box(box: Box, other: Box) -> tuple[slice, ...]:
    """What two boxes have in common, as it is indexed in the other one."""
    return tuple(slice(max(a, c) - c, min(b, d) - c) for (a, b), (c, d) in zip(box, other, strict=True))


def divided(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Elements ``start`` to ``stop`` of a box in row-major order, as few boxes, in order."""
    if not box and start < stop:
        yield box
        return
    while start < stop:
        row = math.prod(shape_of(box[1:]))
        line, within = divmod(start, row)
        rows = 0 if within else (stop - start) // row
        count = rows * row or min(stop - start, row - within)
        side = box[0][0] + line, box[0][0] + line + max(rows, 1)
        yield from ((side, *rest) for rest in ([box[1:]] if rows else divided(box[1:], within, within + count)))
        start += count


@final
class Grid:
    """A tensor that is cut into blocks, at the same places everywhere.

    Its line is all elements: block after block in row-major order, and so within each; of a tensor that is not cut, as they are.
    """

    def __init__(self, shape: tuple[int, ...], cuts: Cuts = ()) -> None:
        self.shape, self.cuts = shape, cuts
        self.whole: Box = tuple((0, n) for n in shape)
        self._sides = [list(pairwise((0, *at, n))) for n, at in zip(shape, cuts or [()] * len(shape), strict=True)]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], boxes: Collection[Box]) -> Grid:
        """That of a tensor's parts; CheckpointError where they overlap, leave a hole, or are no grid."""
        if not any(boxes):
            return cls(shape)
        found = {box or cls(shape).whole for box in boxes}
        grid = cls(shape, tuple(tuple(sorted({box[d][0] for box in found} - {0})) for d in range(len(shape))))
        if len(found) != math.prod(map(len, grid._sides)) or found != set(grid.blocks(grid.whole)):
            raise CheckpointError(f"the parts of {name} {list(shape)} overlap or leave a hole: {sorted(found)[:4]}")
        return grid

    def first(self, block: Box) -> int:
        """The first element of a block on the line."""
        sides = enumerate(block)
        return sum(math.prod(shape_of(block[:d])) * begin * math.prod(self.shape[d + 1 :]) for d, (begin, _) in sides)

    def block(self, element: int) -> Box:
        """The block that an element of the line is in."""
        block: Box = ()
        for d, sides in enumerate(self._sides):
            row = math.prod(shape_of(block)) * math.prod(self.shape[d + 1 :])
            side = sides[bisect_right(sides, element // row, key=itemgetter(0)) - 1]
            block, element = (*block, side), element - side[0] * row
        return block

    def blocks(self, box: Box) -> Iterator[Box]:
        """Those that have something of a box."""
        sides = zip(self._sides, box, strict=True)
        return product(*([side for side in own if side[0] < end and begin < side[1]] for own, (begin, end) in sides))

    def put(self, values: torch.Tensor, start: int, whole: torch.Tensor) -> None:
        """Copy elements of the line, from ``start`` on, to where they belong in the tensor."""
        at = 0
        while at < len(values):
            block = self.block(start + at)
            within = start + at - self.first(block)
            for box in divided(block, within, min(within + len(values) - at, math.prod(shape_of(block)))):
                part = whole[tuple(slice(*side) for side in box)]
                part.copy_(values[at : at + part.numel()].view(part.shape))
                at += part.numel()


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All in its groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


# -- what lies on this rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous range of the elements of a tensor, or of a box in it, in row-major order: in the memory that holds it here.

    The boxes of one tensor are a grid: each dimension is cut at the same places everywhere. Several ranks may have one of them,
    or ranges of it. Where the elements of a box are a range of the tensor, as the rows of a matrix are, it becomes that:
    ``start`` moves, and ``box`` is ().
    """

    name: str  # of the tensor; an optimizer's state of a parameter is ``"<parameter>/<key>"``
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # the first element of the range, in the box
    tensor: torch.Tensor  # the range, of any shape; writing to it changes the state itself
    box: Box = ()

    def __post_init__(self) -> None:
        if not self.box:
            return
        # By the dimensions that are cut, so that all boxes of a grid become ranges, or none.
        rows = next((d for d, n in enumerate(self.shape) if n != 1), 0)
        sides = enumerate(zip(self.box, self.shape, strict=True))
        if all(side == (0, n) for d, (side, n) in sides if d != rows):
            object.__setattr__(self, "start", self.start + self.box[rows][0] * math.prod(self.shape[rows + 1 :]))
            object.__setattr__(self, "box", ())

    def fill(self, whole: torch.Tensor) -> None:
        box = whole.detach()[tuple(slice(*side) for side in self.box)]
        own = box.reshape(-1)[self.start : self.start + self.tensor.numel()]
        self.tensor.copy_(own.view(self.tensor.shape))


#: Shape and dtype of every tensor that a checkpoint holds, by name.
Manifest = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def whole(name: str, tensor: torch.Tensor) -> Shard:
    """The shard of a tensor that lies on this rank as a whole."""
    return Shard(name, tuple(tensor.shape), 0, tensor.detach())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements may lie in one place, as in an expanded tensor."""
    if tensor.is_contiguous():
        return False
    reach = 0  # of the dimensions so far, which the next one must step over
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers in the order of ``state_dict``; what is tied comes under each of its names."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        passing = part._non_persistent_buffers_set
        tensors = chain(part._parameters.items(), (item for item in part._buffers.items() if item[0] not in passing))
        for name, tensor in tensors:
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def tensor_names(module: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter and persistent buffer, in the order of ``state_dict``, by ``id``."""
    found: dict[int, list[str]] = {}
    for name, tensor in named_tensors(module):
        found.setdefault(id(tensor), []).append(name)
    return found


@dataclass(frozen=True, slots=True)
class StateEntry:
    """An optimizer's state of one parameter, as far as this rank keeps it: by key, empty where there is none yet.

    ``name`` and ``shape`` are the whole parameter's, ``parameter`` is it, or the part of it that lies on this rank.
    """

    name: str
    shape: tuple[int, ...]
    parameter: torch.Tensor
    state: Mapping[Any, Any]


def module_shards(module: nn.Module, make: Callable[[str, torch.Tensor], Shard | None]) -> list[Shard]:
    """Parameters and persistent buffers under the names of ``state_dict``; what is tied has the first of its names.

    CheckpointError where ``state_dict`` makes entries of its own, which could not be filled in place.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    own = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}
    for name, value in _state_dict(module).items():
        if name.rpartition(".")[2] == _EXTRA:
            continue  # among `module_values`
        if not isinstance(value, torch.Tensor) or id(value) not in own:
            raise CheckpointError(
                f"the state_dict() of this {type(module).__name__} has {name!r} ({type(value).__name__}), which is not one of "
                "its parameters or buffers, so that it cannot be filled in place; save model.state_dict() as a value instead"
            )
        if is_lazy(value):
            raise CheckpointError(f"{name!r} of this {type(module).__name__} has no shape yet: run one forward before")
        found.setdefault(id(value), (name, value))
    return [made for name, value in found.values() if (made := make(name, value)) is not None]


def _state_dict(module: nn.Module) -> dict[str, Any]:
    try:
        return module.state_dict(keep_vars=True)
    except TypeError as error:
        if "keep_vars" not in str(error):
            raise
        raise CheckpointError(
            f"the state_dict() of this {type(module).__name__}, or of a module in it, does not take what torch gives it "
            f"({error}): write def state_dict(self, *args, **kwargs), and give these to super().state_dict"
        ) from error


def extra_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The submodules that have ``get_extra_state``, under the names of ``state_dict``."""
    return {
        f"{name}.{_EXTRA}" if name else _EXTRA: part
        for name, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def fill_module_values(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Give each submodule the extra state that was found in it; the others' is left."""
    parts = extra_modules(module)
    for name in values.keys() & parts.keys():
        parts[name].set_extra_state(values[name])


def is_shard(key: object, value: Any, parameter: torch.Tensor) -> bool:
    """Whether an entry of the state of a parameter is a shard; the rest (step counters, lists, flags) are values.

    Where the parameter is one number, so is its state, and only the counter is a value.
    """
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or (parameter.dim() == 0 and key != "step"))


def state_device(key: object, device: torch.device, group: Mapping[str, Any]) -> torch.device | None:
    """Where a tensor in the state of a parameter belongs, by the rule of ``Optimizer.load_state_dict``.

    On the parameter's ``device``; but the step counter of a group that is neither fused nor capturable (None) lies anywhere,
    and best on the host.
    """
    return device if key != "step" or group.get("fused") or group.get("capturable") else None


class Raw:
    """What lies on this rank of a module and its optimizers, and their values: everything. ``optimizer=None`` is the module.

    ``parameter_names`` are of what the optimizers' groups hold, by ``id``. Either may be left out where nothing is asked of it.
    """

    def __init__(self, module: nn.Module | None, parameter_names: Mapping[int, str]) -> None:
        self.module = nn.Module() if module is None else module
        self._parameter_names = parameter_names

    @property
    def parameter_names(self) -> Mapping[int, str]:
        return self._parameter_names

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        """What lies here of the tensor that is found here under a name; None where nothing does. Local, without a copy.

        ``tensor`` is a parameter or buffer, or of an optimizer's state of it under ``key``, or its gradient ("grad").
        """
        return whole(f"{name}/{key}" if key else name, tensor)

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        """The state that this rank keeps. Local."""
        names, state = self.parameter_names, optimizer.state
        return [StateEntry(names[id(p)], tuple(p.shape), p, state.get(p, {})) for p in parameters_of(optimizer)]

    def new_state(self, entry: StateEntry, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for what this rank keeps of a tensor of this shape in the state of a parameter. Local."""
        return torch.empty(shape, dtype=dtype, device=entry.parameter.device)

    def has(self, name: str) -> bool:
        """Whether the module keeps on this rank what its ``state_dict`` has under a name and is no tensor. Local."""
        return True

    def groups(self, optimizer: Optimizer) -> dict[str, Mapping[str, Any]]:
        names = self.parameter_names
        return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        """The tensors that lie on this rank, at full precision (a master copy where there is one). Local, without a copy.

        CheckpointError where there is something that could not be found again.
        """
        if optimizer is None:
            return module_shards(self.module, self.part)
        held = self.entries(optimizer)
        _check_keys(optimizer, self.parameter_names, held)
        return [
            made
            for entry in held
            for key, value in entry.state.items()
            if is_shard(key, value, entry.parameter) and (made := self.part(entry.name, value, key)) is not None
        ]

    def values(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """An optimizer's groups, with their parameters' names, and what of its state is not a shard, by parameter and key.

        The values of all ranks together are the optimizer's. Of the module what ``get_extra_state`` returns, by name. Local.
        """
        if optimizer is None:
            return {n: part.get_extra_state() for n, part in extra_modules(self.module).items() if self.has(n)}
        names = self.parameter_names
        return {
            "groups": [
                {**g, "params": [names[id(parameter)] for parameter in g["params"]]} for g in optimizer.param_groups
            ],
            "state": {
                entry.name: {k: v for k, v in entry.state.items() if not is_shard(k, v, entry.parameter)}
                for entry in self.entries(optimizer)
                if entry.state
            },
        }

    def slots(self, optimizer: Optimizer | None, manifest: Manifest) -> list[Shard]:
        """What this rank needs filled of the checkpoint that ``manifest`` describes; creates optimizer state. Local."""
        if optimizer is None:
            return self.shards(None)
        slots = []
        like_parameters = _is_elementwise(optimizer)
        by_name = {entry.name: entry for entry in self.entries(optimizer)}
        for full_name, (shape, dtype) in manifest.items():
            name, _, key = full_name.rpartition("/")
            if (entry := by_name.get(name)) is None:
                continue
            if like_parameters and shape != entry.shape:  # which is told by the caller: nothing is made
                slots.append(Shard(full_name, entry.shape, 0, torch.empty(entry.shape, dtype=dtype, device="meta")))
                continue
            state = optimizer.state[entry.parameter]
            if not is_shard(key, state.get(key), entry.parameter):
                floating = like_parameters and dtype.is_floating_point and entry.parameter.is_floating_point()
                state[key] = self.new_state(entry, key, shape, entry.parameter.dtype if floating else dtype)
            slot = self.part(name, state[key], key)
            if slot is not None and like_parameters and slot.shape == tuple(slot.tensor.shape):
                slot = replace(slot, shape=entry.shape)
            slots += [] if slot is None else [slot]
        return slots

    def fill(self, optimizer: Optimizer | None, values: Mapping[str, Any]) -> None:
        """Take over the values of all ranks' ``values`` together; what they lack of a parameter's state is dropped. Local."""
        if optimizer is None:
            fill_module_values(self.module, values)
            return
        _fill_groups(optimizer.param_groups, values["groups"])
        groups = self.groups(optimizer)
        for entry in self.entries(optimizer):
            saved_state = values["state"].get(entry.name)
            if saved_state is None:
                optimizer.state.pop(entry.parameter, None)
                continue
            state = optimizer.state[entry.parameter]
            for key, value in saved_state.items():
                device = state_device(key, entry.parameter.device, groups[entry.name])
                state[key] = _placed(value, state.get(key), device)


def _check_keys(optimizer: Optimizer, names: Mapping[int, str], held: Sequence[StateEntry]) -> None:
    kind = type(optimizer).__name__
    known = {*map(id, parameters_of(optimizer)), *(id(entry.parameter) for entry in held)}
    keys: Iterable[object] = optimizer.state
    for owner in keys:
        if not isinstance(owner, torch.Tensor):
            raise CheckpointError(
                f"the state of this {kind} has the entry {owner!r}, which belongs to none of its parameters and would be lost: "
                "keep it in param_groups, or save it as a value"
            )
        if id(owner) not in known and optimizer.state[owner]:
            raise CheckpointError(
                f"this {kind} has state of {names.get(id(owner), 'a parameter')} (shape {tuple(owner.shape)}), which is in none "
                "of its groups, so that it would be lost: keep the parameter in a group, frozen, or drop its state "
                "(optimizer.state.pop(parameter))"
            )
    for entry in held:
        for key, value in entry.state.items():
            if isinstance(value, torch.Tensor) and (not isinstance(key, str) or "/" in key):
                raise CheckpointError(
                    f"the state of {entry.name} in this {kind} has a tensor under {key!r}: expected a string without a slash"
                )


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Whether tensors of its state are known to have the parameters' shapes."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in ("LBFGS", "Adafactor")


def _fill_groups(groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """What is one tensor in several groups, as a learning rate can be, stays one where its saved values are equal."""
    filled: dict[int, torch.Tensor] = {}
    for group, values in zip(groups, saved, strict=True):
        for key in [key for key in values if key != "params"]:
            before, made = group.get(key), _placed(values[key], group.get(key), None)
            if isinstance(before, torch.Tensor) and isinstance(made, torch.Tensor):
                first = filled.setdefault(id(before), made)
                made = first if made.dtype == first.dtype and torch.equal(made, first) else made
            group[key] = made


def _placed(value: Any, before: Any, device: torch.device | None) -> Any:
    """A saved value in the place of the one before: copies of its tensors, on ``device``, else where that one was."""
    if device is None and isinstance(before, torch.Tensor):
        device = before.device
    return map_tensors(lambda tensor: tensor.to(device, copy=True), value, others=True)
