"""Shards of tensors, and the state of modules and optimizers that checkpoints write and fill."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

# -- boxes of a tensor that is cut along several dimensions, and the grid that they make -----------

#: (begin, end) in each dimension. () is the whole tensor.
Box = tuple[tuple[int, int], ...]
#: The positions at which each dimension is cut, in increasing order. () is nowhere.
Cuts = tuple[tuple[int, ...], ...]


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the sizes of a box."""
    return tuple(end - begin for begin, end in box)


def in_box(box: Box, other: Box) -> tuple[slice, ...]:
    """Return the intersection of two boxes as an index into the second one."""
    sides = zip(box, other, strict=True)
    return tuple(
        slice(max(begin, first) - first, min(end, last) - first)
        for (begin, end), (first, last) in sides
    )


def divided(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Give elements ``start`` to ``stop`` of a box in row-major order, as few boxes, in order."""
    if not box and start < stop:
        yield box
        return
    while start < stop:
        row_size = math.prod(shape_of(box[1:]))
        row, offset = divmod(start, row_size)
        rows = 0 if offset else (stop - start) // row_size
        first_row = box[0][0] + row
        if rows:
            count = rows * row_size
            yield ((first_row, first_row + rows), *box[1:])
        else:
            count = min(stop - start, row_size - offset)
            for rest in divided(box[1:], offset, offset + count):
                yield ((first_row, first_row + 1), *rest)
        start += count


@final
class Grid:
    """A tensor that all ranks cut into the same blocks.

    The line of a grid is all elements, block after block in row-major order, and row-major inside
    of each block.
    """

    def __init__(self, shape: tuple[int, ...], cuts: Cuts = ()) -> None:
        self.shape, self.cuts = shape, cuts
        self.whole: Box = tuple((0, size) for size in shape)
        self._sides = [
            list(pairwise((0, *at, size)))
            for size, at in zip(shape, cuts or [()] * len(shape), strict=True)
        ]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], boxes: Collection[Box]) -> Grid:
        """Return the grid of a tensor's boxes.

        Raises:
            CheckpointError: they overlap, leave a hole, or don't form a grid.
        """
        if not any(boxes):
            return cls(shape)
        distinct = {box or cls(shape).whole for box in boxes}
        cuts = []
        for dim in range(len(shape)):
            cuts.append(tuple(sorted({box[dim][0] for box in distinct} - {0})))
        grid = cls(shape, tuple(cuts))
        if len(distinct) != math.prod(map(len, grid._sides)) or distinct != set(
            grid.blocks(grid.whole)
        ):
            raise CheckpointError(
                f"the parts of {name} {list(shape)} overlap or leave a hole: {sorted(distinct)[:4]}"
            )
        return grid

    def first(self, block: Box) -> int:
        """Return the position of a block's first element on the line."""
        position = 0
        for dim, (begin, _) in enumerate(block):
            position += math.prod(shape_of(block[:dim])) * begin * math.prod(self.shape[dim + 1 :])
        return position

    def block(self, position: int) -> Box:
        """Return the block of an element on the line."""
        block: Box = ()
        for dim, sides in enumerate(self._sides):
            row_size = math.prod(shape_of(block)) * math.prod(self.shape[dim + 1 :])
            side = sides[bisect_right(sides, position // row_size, key=itemgetter(0)) - 1]
            block = (*block, side)
            position -= side[0] * row_size
        return block

    def blocks(self, box: Box) -> Iterator[Box]:
        """Give the blocks that intersect a box."""
        hit: list[list[tuple[int, int]]] = []
        for sides, (begin, end) in zip(self._sides, box, strict=True):
            hit.append([side for side in sides if side[0] < end and begin < side[1]])
        return product(*hit)

    def put(self, values: torch.Tensor, start: int, tensor: torch.Tensor) -> None:
        """Copy elements of the line, from position ``start`` on, into the full tensor."""
        done = 0
        while done < len(values):
            block = self.block(start + done)
            offset = start + done - self.first(block)
            stop = min(offset + len(values) - done, math.prod(shape_of(block)))
            for box in divided(block, offset, stop):
                target = tensor[tuple(slice(*side) for side in box)]
                target.copy_(values[done : done + target.numel()].view(target.shape))
                done += target.numel()


# -- shards ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous range of elements of a tensor, in row-major order, that is stored on this rank.

    The range may be in a box of the tensor. All boxes of a tensor form a grid. If the elements of a
    box are a range of the tensor, as rows of a matrix are, it is stored as a range: ``start``
    moves, and ``box`` becomes ().

    Args:
        name: the tensor's name. An optimizer's state of a parameter is named
            ``"<parameter>/<key>"``.
        shape: the shape of the full tensor.
        start: the position of the first element in the box.
        tensor: the elements, in any shape. Writing to it changes the state itself.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor
    box: Box = ()

    def __post_init__(self) -> None:
        if not self.box:
            return
        # The first dimension that can be cut decides, so that all boxes of a grid become ranges, or
        # none.
        rows = next((dim for dim, size in enumerate(self.shape) if size != 1), 0)
        for dim, (side, size) in enumerate(zip(self.box, self.shape, strict=True)):
            if dim != rows and side != (0, size):
                return
        object.__setattr__(
            self, "start", self.start + self.box[rows][0] * math.prod(self.shape[rows + 1 :])
        )
        object.__setattr__(self, "box", ())

    def fill(self, whole: torch.Tensor) -> None:
        """Copy the shard's elements from the full tensor."""
        box = whole.detach()[tuple(slice(*side) for side in self.box)]
        elements = box.reshape(-1)[self.start : self.start + self.tensor.numel()]
        self.tensor.copy_(elements.view(self.tensor.shape))


def whole(name: str, tensor: torch.Tensor) -> Shard:
    """Return the shard of a tensor that this rank has in full."""
    return Shard(name, tuple(tensor.shape), 0, tensor.detach())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """True if elements may share memory, as in an expanded tensor."""
    if tensor.is_contiguous():
        return False
    reach = 0  # of the smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


# -- names and entries of state dicts --------------------------------------------------------------

#: The shape and dtype of every tensor in a checkpoint, by name.
Manifest = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Give parameters and persistent buffers as in ``state_dict``, tied ones under all names."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, tensor in chain(child._parameters.items(), child._buffers.items()):
            if tensor is not None and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, tensor


def tensor_names(module: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter and persistent buffer, by id."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(module):
        names.setdefault(id(tensor), []).append(name)
    return names


def module_shards(
    module: nn.Module, make: Callable[[str, torch.Tensor], Shard | None]
) -> list[Shard]:
    """Return the shards of parameters and persistent buffers. Tied ones have their first name.

    Raises:
        CheckpointError: ``state_dict`` adds entries, which could not be filled in place.
    """
    own = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}
    kind = type(module).__name__
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] == _EXTRA:
            continue  # it is one of the values
        if not isinstance(value, torch.Tensor) or id(value) not in own:
            raise CheckpointError(
                f"the state_dict() of this {kind} has {name!r} ({type(value).__name__}), which is "
                "not one of its parameters or buffers. Save model.state_dict() as a value instead."
            )
        if is_lazy(value):
            raise CheckpointError(
                f"{name!r} of this {kind} has no shape yet. Run one forward before."
            )
        tensors.setdefault(id(value), (name, value))
    shards = [make(name, tensor) for name, tensor in tensors.values()]
    return [shard for shard in shards if shard is not None]


def extra_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules with a ``get_extra_state``, by their names in ``state_dict``."""
    modules = {}
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            modules[f"{name}.{_EXTRA}" if name else _EXTRA] = child
    return modules


def fill_module_values(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Set the extra state of the submodules that have some in ``values``."""
    modules = extra_modules(module)
    for name in values.keys() & modules.keys():
        modules[name].set_extra_state(values[name])


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer's groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_shard(key: object, value: Any, parameter: torch.Tensor) -> bool:
    """True if an entry of a parameter's state is stored as shards, and not as a value.

    The state of a 0-dim parameter is 0-dim too, except for its counter.
    """
    return isinstance(value, torch.Tensor) and (
        value.dim() > 0 or (parameter.dim() == 0 and key != "step")
    )


def state_device(
    key: object, device: torch.device, group: Mapping[str, Any]
) -> torch.device | None:
    """Return the device of state of a parameter, by the rule of ``Optimizer.load_state_dict``.

    None means any device: a step counter may be anywhere, unless its group is fused or capturable.
    """
    return device if key != "step" or group.get("fused") or group.get("capturable") else None


# -- the state on this rank ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateEntry:
    """The optimizer state of one parameter that this rank keeps.

    Args:
        name, shape: those of the full parameter.
        parameter: the parameter, or this rank's shard of it.
        state: by key, empty before the first step.
    """

    name: str
    shape: tuple[int, ...]
    parameter: torch.Tensor
    state: Mapping[Any, Any]


class Raw:
    """The state of a module and its optimizers on this rank. ``optimizer=None`` means the module.

    Args:
        module: None if only optimizers are asked for.
        parameter_names: the names of the parameters in the optimizers' groups, by id.
    """

    def __init__(self, module: nn.Module | None, parameter_names: Mapping[int, str]) -> None:
        self.module = nn.Module() if module is None else module
        self._parameter_names = parameter_names

    @property
    def parameter_names(self) -> Mapping[int, str]:
        return self._parameter_names

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        """Return this rank's shard of a tensor, without a copy, or None if it has none. Local.

        ``tensor`` is a parameter or buffer, or its optimizer state under ``key``, or its gradient
        ("grad").
        """
        return whole(f"{name}/{key}" if key else name, tensor)

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        """Return the optimizer state that this rank keeps. Local."""
        names, state = self.parameter_names, optimizer.state
        return [
            StateEntry(names[id(p)], tuple(p.shape), p, state.get(p, {}))
            for p in parameters_of(optimizer)
        ]

    def new_state(
        self, entry: StateEntry, key: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Allocate this rank's shard of optimizer state with this full shape. Local."""
        return torch.empty(shape, dtype=dtype, device=entry.parameter.device)

    def has(self, name: str) -> bool:
        """True if this rank keeps the module's extra state of this name. Local."""
        return True

    def groups(self, optimizer: Optimizer) -> dict[str, Mapping[str, Any]]:
        """Return the group of each parameter, by name."""
        names = self.parameter_names
        return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        """Return this rank's tensors (master copies if there are some), without a copy. Local.

        Raises:
            CheckpointError: there is something that could not be loaded again.
        """
        if optimizer is None:
            return module_shards(self.module, self.part)
        entries = self.entries(optimizer)
        _check_keys(optimizer, self.parameter_names, entries)
        shards = []
        for entry in entries:
            for key, value in entry.state.items():
                if is_shard(key, value, entry.parameter):
                    shards.append(self.part(entry.name, value, key))
        return [shard for shard in shards if shard is not None]

    def values(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """Return everything that is not a shard. Local.

        For an optimizer these are its groups, with the names of their parameters, and the values of
        its state, by parameter and key. All ranks' values together are the optimizer's. For the
        module it is the extra state, by name.
        """
        if optimizer is None:
            modules = extra_modules(self.module)
            return {
                name: child.get_extra_state() for name, child in modules.items() if self.has(name)
            }
        names = self.parameter_names
        groups = [
            {**group, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        state = {}
        for entry in self.entries(optimizer):
            if entry.state:
                items = entry.state.items()
                state[entry.name] = {
                    key: value for key, value in items if not is_shard(key, value, entry.parameter)
                }
        return {"groups": groups, "state": state}

    def slots(self, optimizer: Optimizer | None, manifest: Manifest) -> list[Shard]:
        """Return the shards that a checkpoint fills. Missing optimizer state is created. Local."""
        if optimizer is None:
            return self.shards(None)
        elementwise = _is_elementwise(optimizer)
        entries = {entry.name: entry for entry in self.entries(optimizer)}
        slots = []
        for full_name, (shape, dtype) in manifest.items():
            name, _, key = full_name.rpartition("/")
            entry = entries.get(name)
            if entry is None:
                continue
            if elementwise and shape != entry.shape:  # the caller raises, so nothing is allocated
                slots.append(
                    Shard(
                        full_name,
                        entry.shape,
                        0,
                        torch.empty(entry.shape, dtype=dtype, device="meta"),
                    )
                )
                continue
            state = optimizer.state[entry.parameter]
            if not is_shard(key, state.get(key), entry.parameter):
                floating = dtype.is_floating_point and entry.parameter.is_floating_point()
                dtype = entry.parameter.dtype if elementwise and floating else dtype
                state[key] = self.new_state(entry, key, shape, dtype)
            slot = self.part(name, state[key], key)
            if slot is not None and elementwise and slot.shape == tuple(slot.tensor.shape):
                slot = replace(slot, shape=entry.shape)
            if slot is not None:
                slots.append(slot)
        return slots

    def fill(self, optimizer: Optimizer | None, values: Mapping[str, Any]) -> None:
        """Set all ranks' ``values`` together. Other state of a parameter is dropped. Local."""
        if optimizer is None:
            fill_module_values(self.module, values)
            return
        for group, saved in zip(optimizer.param_groups, values["groups"], strict=True):
            options = {key: value for key, value in saved.items() if key != "params"}
            group.update(
                {key: _copied(value, group.get(key), None) for key, value in options.items()}
            )
        groups = self.groups(optimizer)
        for entry in self.entries(optimizer):
            saved = values["state"].get(entry.name)
            if saved is None:
                optimizer.state.pop(entry.parameter, None)
                continue
            state = optimizer.state[entry.parameter]
            for key, value in saved.items():
                device = state_device(key, entry.parameter.device, groups[entry.name])
                state[key] = _copied(value, state.get(key), device)


def _check_keys(
    optimizer: Optimizer, names: Mapping[int, str], entries: Sequence[StateEntry]
) -> None:
    """Raise CheckpointError for state that could not be loaded again."""
    kind = type(optimizer).__name__
    known = {*map(id, parameters_of(optimizer)), *(id(entry.parameter) for entry in entries)}
    for owner, state in optimizer.state.items():
        empty = isinstance(state, dict) and not state
        if id(owner) not in known and not empty:
            label = (
                names.get(id(owner), "a parameter")
                if isinstance(owner, torch.Tensor)
                else repr(owner)
            )
            raise CheckpointError(
                f"this {kind} has state of {label}, which is in none of its groups and would be "
                "lost. Keep a frozen parameter in its group, or call "
                "optimizer.state.pop(parameter)."
            )
    for entry in entries:
        for key, value in entry.state.items():
            if isinstance(value, torch.Tensor) and (not isinstance(key, str) or "/" in key):
                raise CheckpointError(
                    f"the state of {entry.name} in this {kind} has a tensor under {key!r}: "
                    "expected a string without a slash"
                )


def _is_elementwise(optimizer: Optimizer) -> bool:
    """True if tensors of the state are known to have the shapes of the parameters."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in (
        "LBFGS",
        "Adafactor",
    )


def _copied(value: Any, old: Any, device: torch.device | None) -> Any:
    """Return a saved value with its tensors copied to ``device``, or to the old value's device."""
    if device is None and isinstance(old, torch.Tensor):
        device = old.device
    return map_tensors(lambda tensor: tensor.to(device, copy=True), value, others=True)
