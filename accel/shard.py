"""Where the state of models and optimizers lies on this rank: what a checkpoint writes, and what it fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .errors import CheckpointError

_EXTRA: Final = "_extra_state"


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous range of a tensor's elements in row-major order, in the memory that holds it on this rank.

    Args:
        name: of the tensor; an optimizer's state of a parameter is ``"<parameter>/<key>"``.
        shape: of the whole tensor.
        start: the first element of the range.
        tensor: the range, of any shape; writing to it changes the state itself.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor

    def fill(self, whole: torch.Tensor) -> None:
        """Take the range from the whole tensor."""
        own = whole.detach().reshape(-1)[self.start : self.start + self.tensor.numel()]
        self.tensor.copy_(own.view(self.tensor.shape))


#: Shape and dtype of every tensor that a checkpoint holds, by name.
Manifest = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def whole(name: str, tensor: torch.Tensor) -> Shard:
    """The shard of a tensor that lies on this rank as a whole."""
    return Shard(name, tuple(tensor.shape), 0, tensor.detach())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements may lie in one place, as in an expanded tensor."""
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
    """An optimizer's state of one parameter, as far as this rank keeps it.

    Args:
        name: of the parameter.
        shape: of the whole parameter.
        parameter: what the state is of on this rank: the parameter, or a part of it.
        state: by key; empty where there is none yet.
    """

    name: str
    shape: tuple[int, ...]
    parameter: torch.Tensor
    state: Mapping[Any, Any]


#: Makes the shard of a tensor of the module, or None where nothing of it lies on this rank.
Make = Callable[[str, torch.Tensor], Shard | None]


def module_shards(module: nn.Module, make: Make = whole) -> list[Shard]:
    """Parameters and persistent buffers under the names of ``state_dict``; what is tied has the first of its names.

    Raises:
        CheckpointError: ``state_dict`` makes entries of its own, which could not be filled in place.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    own = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}
    for name, value in module.state_dict(keep_vars=True).items():
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


def extra_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The submodules that have ``get_extra_state``, under the names of ``state_dict``."""
    return {
        f"{name}.{_EXTRA}" if name else _EXTRA: part
        for name, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def module_values(module: nn.Module, has: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """What ``get_extra_state`` returns in them; ``has`` tells by the name whether this rank has it."""
    return {name: part.get_extra_state() for name, part in extra_modules(module).items() if has(name)}


def fill_module_values(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Give each submodule the extra state that ``module_values`` found in it; the others' is left."""
    parts = extra_modules(module)
    for name in values.keys() & parts.keys():
        parts[name].set_extra_state(values[name])


def entries(optimizer: Optimizer, names: Mapping[int, str]) -> list[StateEntry]:
    """Of each parameter in its groups; ``names`` are those of the parameters, by ``id``."""
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [StateEntry(names[id(p)], tuple(p.shape), p, optimizer.state.get(p, {})) for p in held]


def is_sharded(value: Any) -> bool:
    """Whether an entry of an optimizer's state is a shard; the rest (step counters, lists, flags) are values."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def is_shard(key: object, value: Any, parameter: torch.Tensor) -> bool:
    """The same for a known parameter: where that is one number, so is its state, and only the counter is a value."""
    return is_sharded(value) or (isinstance(value, torch.Tensor) and parameter.dim() == 0 and key != "step")


def state_shard(name: str, key: str, value: torch.Tensor) -> Shard | None:
    """The shard of a tensor in the state of a parameter, where this rank has all of it."""
    return whole(f"{name}/{key}", value)


def optimizer_shards(
    optimizer: Optimizer,
    names: Mapping[int, str],
    held: Iterable[StateEntry] | None = None,
    make: Callable[[str, str, torch.Tensor], Shard | None] = state_shard,
) -> list[Shard]:
    """The tensors of an optimizer's state; ``names`` are those of its parameters, by ``id``.

    Args:
        optimizer: the raw one.
        names: of its parameters, by ``id``.
        held: what this rank keeps; by default everything.
        make: the shard of a tensor, from the name of its parameter and its key.

    Raises:
        CheckpointError: the state has an entry that could not be found again.
    """
    held = entries(optimizer, names) if held is None else list(held)
    _check_keys(optimizer, names, held)
    return [
        made
        for entry in held
        for key, value in entry.state.items()
        if is_shard(key, value, entry.parameter) and (made := make(entry.name, key, value)) is not None
    ]


def _check_keys(optimizer: Optimizer, names: Mapping[int, str], held: Sequence[StateEntry]) -> None:
    kind = type(optimizer).__name__
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known |= {id(entry.parameter) for entry in held}
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


def optimizer_values(
    optimizer: Optimizer, names: Mapping[int, str], held: Iterable[StateEntry] | None = None
) -> dict[str, Any]:
    """The groups, with their parameters' names, and whatever state is not a shard, by parameter and key.

    The values of all ranks together are the optimizer's: a rank may give the state of its own parameters only.
    """
    return {
        "groups": [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
        "state": {
            entry.name: {k: v for k, v in entry.state.items() if not is_shard(k, v, entry.parameter)}
            for entry in (entries(optimizer, names) if held is None else held)
            if entry.state
        },
    }


#: Makes the state of a shape and dtype under a key of what an entry is of.
New = Callable[[StateEntry, str, tuple[int, ...], torch.dtype], torch.Tensor]


def new_state(entry: StateEntry, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a whole tensor beside the parameter."""
    return torch.empty(shape, dtype=dtype, device=entry.parameter.device)


def optimizer_slots(
    optimizer: Optimizer,
    names: Mapping[int, str],
    manifest: Manifest,
    held: Iterable[StateEntry] | None = None,
    make: Callable[[str, str, torch.Tensor], Shard | None] = state_shard,
    new: New = new_state,
) -> list[Shard]:
    """Shards to fill, one for each tensor of ``manifest`` whose state this rank keeps; creates what is not there."""
    slots = []
    like_parameters = _is_elementwise(optimizer)
    held = entries(optimizer, names) if held is None else held
    by_name = {entry.name: entry for entry in held}
    for full_name, (shape, dtype) in manifest.items():
        name, _, key = full_name.rpartition("/")
        if (entry := by_name.get(name)) is None:
            continue
        state = optimizer.state[entry.parameter]
        if not is_shard(key, state.get(key), entry.parameter):
            state[key] = new(entry, key, shape, dtype)
        slot = make(name, key, state[key])
        if slot is not None and like_parameters and slot.shape == tuple(slot.tensor.shape):
            slot = replace(slot, shape=entry.shape)
        slots += [] if slot is None else [slot]
    return slots


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Whether tensors of its state are known to have the parameters' shapes."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in ("LBFGS", "Adafactor")


def fill_optimizer_values(
    optimizer: Optimizer, names: Mapping[int, str], values: Mapping[str, Any], held: Iterable[StateEntry] | None = None
) -> None:
    """Take over group values and plain state; parameters without an entry in ``values["state"]`` lose their state."""
    on_device = {}
    for group, saved in zip(optimizer.param_groups, values["groups"], strict=True):
        for key, value in saved.items():
            if key != "params":
                group[key] = _placed(value, group.get(key), None)
        on_device.update({names[id(p)]: bool(group.get("capturable") or group.get("fused")) for p in group["params"]})
    for entry in list(entries(optimizer, names) if held is None else held):
        saved_state = values["state"].get(entry.name)
        if saved_state is None:
            optimizer.state.pop(entry.parameter, None)
            continue
        state = optimizer.state[entry.parameter]
        device = entry.parameter.device if on_device[entry.name] else None
        state.update({key: _placed(value, state.get(key), device) for key, value in saved_state.items()})


def _placed(value: Any, before: Any, device: torch.device | None) -> Any:
    """A saved value in the place of the one before: a copy, on ``device``, else where that one was."""
    if not isinstance(value, torch.Tensor):
        return value
    if device is None and isinstance(before, torch.Tensor):
        device = before.device
    return value.clone() if device is None else value.to(device, copy=True)
