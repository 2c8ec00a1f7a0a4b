"""Shards of tensors, and the state of modules and optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, starmap
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import CheckpointError
from .trees import map_tensors

_EXTRA: Final = "_extra_state"

# -- boxes -----------------------------------------------------------------------------------------

Shape = tuple[int, ...]
#: (begin, end) along each dimension of a tensor, or a single range of elements in row-major order.
Box = tuple[tuple[int, int], ...]


def shape_of(box: Box) -> Shape:
    """Return the shape of a box."""
    return tuple([end - begin for begin, end in box])


def slices(box: Box) -> tuple[slice, ...]:
    """Return the slices of a box in its tensor."""
    return tuple(starmap(slice, box))


def intersection(one: Box, other: Box) -> Box | None:
    """Return the common elements of two boxes, or None."""
    sides = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        begin, end = max(a, c), min(b, d)
        if begin >= end:
            return None
        sides.append((begin, end))
    return tuple(sides)


def relative(box: Box, outer: Box) -> Box:
    """Return a box relative to the start of a box that contains it."""
    sides = zip(box, outer, strict=True)
    return tuple([(begin - first, end - first) for (begin, end), (first, _) in sides])


def flattened(box: Box, shape: Shape) -> Box | None:
    """Return a box as a range in row-major order, or None if it isn't a range."""
    if len(box) == 1 and len(shape) != 1:
        return box
    start, is_cut, row = 0, False, math.prod(shape)
    for (begin, end), size in zip(box, shape, strict=True):
        if is_cut and (begin, end) != (0, size):
            return None
        row //= max(size, 1)
        start += begin * row
        is_cut = is_cut or end - begin != 1
    return ((start, start + math.prod(shape_of(box))),)


def divided(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield few boxes that cover elements ``start`` to ``stop`` of a box."""
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


def expanded(box: Box, shape: Shape) -> Iterator[Box]:
    """Yield boxes with the same elements and a side for each dimension."""
    if len(box) == len(shape):
        yield box
    else:
        yield from divided(tuple((0, size) for size in shape), *box[0])


# -- shards ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's elements of a tensor."""

    #: The tensor's name, or ``"<parameter>/<key>"`` for optimizer state.
    name: str
    #: The shape of the full tensor.
    shape: Shape
    #: A box of the full tensor. A box with one side is a range in row-major order.
    region: Box
    #: The elements, in any shape. The memory is the state's, so writing to it changes the state.
    tensor: Tensor

    def named(self, name: str) -> Shard:
        """Return this shard under a different name."""
        return Shard(name, self.shape, self.region, self.tensor)

    def fill(self, whole: Tensor) -> None:
        """Copy the shard's elements from the full tensor."""
        source, region = whole.detach(), self.region
        if len(region) == 1 and len(self.shape) != 1:
            source = source.reshape(-1)
        self.tensor.copy_(source[slices(region)].reshape(self.tensor.shape))


def flat_shard(name: str, shape: Shape, start: int, tensor: Tensor) -> Shard:
    """Return a shard of the elements from ``start`` on."""
    return Shard(name, shape, ((start, start + tensor.numel()),), tensor)


def whole(name: str, tensor: Tensor) -> Shard:
    """Return a shard that covers the full tensor."""
    return flat_shard(name, tuple(tensor.shape), 0, tensor.detach())


# -- names and entries of state dicts --------------------------------------------------------------

#: The shape and dtype of every tensor in a checkpoint, by name.
Manifest = Mapping[str, tuple[Shape, torch.dtype]]


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, tied ones under all names."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        skipped = child._non_persistent_buffers_set
        for name, tensor in chain(child._parameters.items(), child._buffers.items()):
            if tensor is not None and name not in skipped:
                yield f"{prefix}.{name}".lstrip("."), tensor


def tensor_names(module: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter and persistent buffer, by id."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(module):
        names.setdefault(id(tensor), []).append(name)
    return names


def extra_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules with extra state, by name in ``state_dict``."""
    modules = {}
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            modules[f"{name}.{_EXTRA}".lstrip(".")] = child
    return modules


def fill_module_values(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Set the extra state of submodules, by name in ``state_dict``."""
    for name, child in extra_modules(module).items():
        if name in values:
            child.set_extra_state(values[name])


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer's groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_shard(key: object, value: Any, p: Tensor) -> bool:
    """True if a checkpoint stores an entry of a parameter's state as shards."""
    if not isinstance(value, Tensor):
        return False
    # A 0-dim parameter has 0-dim state that is a shard too, unlike its step counter.
    return value.dim() > 0 or (p.dim() == 0 and key != "step")


def state_device(
    key: object, device: torch.device, group: Mapping[str, Any]
) -> torch.device | None:
    """Return the device that ``load_state_dict`` moves state to, or None for any."""
    # A step counter may be anywhere, unless its group is fused or capturable.
    fixed = key != "step" or group.get("fused") or group.get("capturable")
    return device if fixed else None


# -- the state on this rank ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateEntry:
    """This rank's optimizer state for a parameter."""

    name: str
    #: The shape of the full parameter.
    shape: Shape
    #: The parameter, or this rank's shard of it.
    parameter: Tensor
    #: The values by key, empty before the first step.
    state: Mapping[Any, Any]


class Raw:
    """This rank's state of a module (``None``) and its optimizers."""

    def __init__(self, module: nn.Module | None, parameter_names: Mapping[int, str]) -> None:
        #: An empty module for optimizers alone.
        self.module = nn.Module() if module is None else module
        #: The names of the parameters in the optimizers' groups, by id.
        self.parameter_names = parameter_names

    def part(self, name: str, tensor: Tensor, key: Any = "") -> Shard | None:
        """Return this rank's shard of a tensor, not copied, or None. Local.

        ``key`` is the key of optimizer state, "grad" for a gradient, or "".
        """
        return whole(f"{name}/{key}" if key else name, tensor)

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        """Return the optimizer state of this rank. Local."""
        names, state = self.parameter_names, optimizer.state
        return [
            StateEntry(names[id(p)], tuple(p.shape), p, state.get(p, {}))
            for p in parameters_of(optimizer)
        ]

    def new_state(self, entry: StateEntry, key: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Allocate this rank's shard of state, given the full shape. Local."""
        return torch.empty(shape, dtype=dtype, device=entry.parameter.device)

    def has(self, name: str) -> bool:
        """True if this rank keeps the extra state with this name. Local."""
        return True

    def groups(self, optimizer: Optimizer) -> dict[str, Mapping[str, Any]]:
        """Return the group of each parameter, by name."""
        groups: dict[str, Mapping[str, Any]] = {}
        for group in optimizer.param_groups:
            groups.update(dict.fromkeys(self._names_in(group), group))
        return groups

    def _names_in(self, group: Mapping[str, Any]) -> list[str]:
        names = self.parameter_names
        return [names[id(p)] for p in group["params"]]

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        """Return this rank's shards or their master copies, not copied. Local."""
        if optimizer is None:
            return self._module_shards()
        shards: list[Shard | None] = []
        for entry in self.entries(optimizer):
            for key, value in entry.state.items():
                if not is_shard(key, value, entry.parameter):
                    continue
                if not isinstance(key, str) or "/" in key:
                    raise CheckpointError(
                        f"The state of {entry.name} has a tensor under {key!r}. "
                        "Use a string without a slash as the key."
                    )
                shards.append(self.part(entry.name, value, key))
        return list(filter(None, shards))

    def _module_shards(self) -> list[Shard]:
        """Return the shards of the module's tensors, tied ones once."""
        module = self.module
        own = set(map(id, chain(module.parameters(), module.buffers())))
        shards: dict[int, Shard | None] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if name.rpartition(".")[2] == _EXTRA or id(value) in shards:
                continue
            # bitsandbytes adds the scales of quantized weights, which a load couldn't fill.
            if id(value) not in own:
                raise CheckpointError(
                    f"The state_dict() of this {type(module).__name__} has {name!r} "
                    f"({type(value).__name__}), which isn't a parameter or buffer. "
                    "Save model.state_dict() as a value instead."
                )
            shards[id(value)] = self.part(name, value)
        return list(filter(None, shards.values()))

    def values(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """Return everything except shards. Local.

        For an optimizer, this is its groups with parameter names and the plain
        values of its state. For the module, this is its extra state by name.
        """
        if optimizer is None:
            items = extra_modules(self.module).items()
            return {name: child.get_extra_state() for name, child in items if self.has(name)}
        groups = [{**g, "params": self._names_in(g)} for g in optimizer.param_groups]
        state = {}
        for entry in self.entries(optimizer):
            p, values = entry.parameter, entry.state.items()
            if values:
                state[entry.name] = {k: v for k, v in values if not is_shard(k, v, p)}
        return {"groups": groups, "state": state}

    def slots(
        self, optimizer: Optimizer | None, manifest: Manifest, *, create: bool = True
    ) -> list[Shard]:
        """Return the shards for a checkpoint to fill. Local.

        Missing optimizer state is created, on meta if ``create`` is False.
        """
        if optimizer is None:
            return self.shards(None)
        # LBFGS, Adafactor and optimizers of other libraries may have state of any shape.
        kind = type(optimizer)
        elementwise = kind.__module__.startswith("torch.optim.")
        elementwise = elementwise and kind.__name__ not in ("LBFGS", "Adafactor")
        entries = {entry.name: entry for entry in self.entries(optimizer)}
        slots = []
        for full_name, (shape, dtype) in manifest.items():
            name, _, key = full_name.rpartition("/")
            entry = entries.get(name)
            if entry is None:
                continue
            p = entry.parameter
            full_shape = entry.shape if elementwise else shape
            is_new = not is_shard(key, entry.state.get(key), p)
            if is_new and elementwise and dtype.is_floating_point:
                dtype = p.dtype if p.is_floating_point() else dtype
            # The caller raises if the shape differs, so don't allocate memory for it.
            if shape != full_shape or (is_new and not create):
                nothing = torch.empty(full_shape, dtype=dtype, device="meta")
                slots.append(whole(full_name, nothing))
                continue
            state = optimizer.state[p]
            if is_new:
                state[key] = self.new_state(entry, key, shape, dtype)
            slot = self.part(name, state[key], key)
            if slot is None:
                continue
            if elementwise and slot.shape == tuple(slot.tensor.shape):
                slot = replace(slot, shape=entry.shape)
            slots.append(slot)
        return slots

    def fill(self, optimizer: Optimizer | None, values: Mapping[str, Any]) -> None:
        """Set ``values`` of all ranks, and drop other parameters' state. Local."""
        if optimizer is None:
            fill_module_values(self.module, values)
            return
        for group, saved in zip(optimizer.param_groups, values["groups"], strict=True):
            for key, value in saved.items():
                if key != "params":
                    group[key] = _copied(value, group.get(key), None)
        groups = self.groups(optimizer)
        for entry in self.entries(optimizer):
            p, saved = entry.parameter, values["state"].get(entry.name)
            if saved is None:
                optimizer.state.pop(p, None)
                continue
            state = optimizer.state[p]
            for key, value in saved.items():
                device = state_device(key, p.device, groups[entry.name])
                state[key] = _copied(value, state.get(key), device)


def _copied(value: Any, old: Any, device: torch.device | None) -> Any:
    """Return a copy of a value on ``device``, or on the old value's device."""
    if device is None and isinstance(old, Tensor):
        device = old.device
    return map_tensors(lambda tensor: tensor.to(device, copy=True), value)
