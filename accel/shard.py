"""Where the state of models and optimizers lies on this rank: what a checkpoint writes, and what it fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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


def tensor_names(module: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter and persistent buffer, in the order of ``state_dict``, by ``id``."""
    found: dict[int, list[str]] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        passing = part._non_persistent_buffers_set
        tensors = chain(part._parameters.items(), (item for item in part._buffers.items() if item[0] not in passing))
        for name, tensor in tensors:
            if tensor is not None:
                found.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
    return found


#: Makes the shard of a tensor of the state, or None where nothing of it lies on this rank.
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


def _entries(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter, optimizer.state.get(parameter, {})


def is_sharded(value: Any) -> bool:
    """Whether an entry of an optimizer's state is a shard; the rest (step counters, lists, flags) are values."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _is_shard(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """The same for a known parameter: where that is one number, so is its state, and only the counter is a value."""
    return is_sharded(value) or (isinstance(value, torch.Tensor) and parameter.dim() == 0 and key != "step")


def optimizer_shards(optimizer: Optimizer, names: Mapping[int, str], make: Make = whole) -> list[Shard]:
    """The tensors of an optimizer's state; ``names`` are those of its parameters, by ``id``.

    Raises:
        CheckpointError: the state has an entry that could not be found again.
    """
    _check_keys(optimizer, names)
    return [
        made
        for name, parameter, state in _entries(optimizer, names)
        for key, value in state.items()
        if _is_shard(key, value, parameter) and (made := make(f"{name}/{key}", value)) is not None
    ]


def _check_keys(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    kind = type(optimizer).__name__
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    keys: Iterable[object] = optimizer.state
    for owner in keys:
        if not isinstance(owner, torch.Tensor):
            raise CheckpointError(
                f"the state of this {kind} has the entry {owner!r}, which belongs to none of its parameters and would be lost: "
                "keep it in param_groups, or save it as a value"
            )
        if id(owner) not in held and optimizer.state[owner]:
            raise CheckpointError(
                f"this {kind} has state of {names.get(id(owner), 'a parameter')} (shape {tuple(owner.shape)}), which is in none "
                "of its groups, so that it would be lost: keep the parameter in a group, frozen, or drop its state "
                "(optimizer.state.pop(parameter))"
            )
    for name, _, state in _entries(optimizer, names):
        entries: Iterable[tuple[object, object]] = state.items()
        for key, value in entries:
            if isinstance(value, torch.Tensor) and (not isinstance(key, str) or "/" in key):
                raise CheckpointError(
                    f"the state of {name} in this {kind} has a tensor under {key!r}: expected a string without a slash"
                )


def optimizer_values(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The groups, with their parameters' names, and whatever state is not a shard, by parameter and key.

    The values of all ranks together are the optimizer's: a rank may give the state of its own parameters only.
    """
    return {
        "groups": [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
        "state": {
            name: {key: value for key, value in state.items() if not _is_shard(key, value, parameter)}
            for name, parameter, state in _entries(optimizer, names)
            if state
        },
    }


def optimizer_slots(optimizer: Optimizer, names: Mapping[int, str], manifest: Manifest) -> list[Shard]:
    """Shards to fill, one for each tensor of ``manifest`` that is of a parameter of this optimizer; creates what is not there."""
    slots = []
    like_parameters = _is_elementwise(optimizer)
    parameters = {name: (parameter, optimizer.state[parameter]) for name, parameter, _ in _entries(optimizer, names)}
    for full_name, (shape, dtype) in manifest.items():
        name, _, key = full_name.rpartition("/")
        if name in parameters:
            parameter, state = parameters[name]
            if not _is_shard(key, state.get(key), parameter):
                state[key] = torch.empty(shape, dtype=dtype, device=parameter.device)
            slot = whole(full_name, state[key])
            slots.append(replace(slot, shape=tuple(parameter.shape)) if like_parameters else slot)
    return slots


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Whether tensors of its state are known to have the parameters' shapes."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in ("LBFGS", "Adafactor")


def fill_optimizer_values(optimizer: Optimizer, names: Mapping[int, str], values: Mapping[str, Any]) -> None:
    """Take over group values and plain state; parameters without an entry in ``values["state"]`` lose their state."""
    for group, saved in zip(optimizer.param_groups, values["groups"], strict=True):
        for key, value in saved.items():
            if key != "params":
                group[key] = _placed(value, group.get(key), None)
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            saved_state = values["state"].get(names[id(parameter)])
            if saved_state is None:
                optimizer.state.pop(parameter, None)
                continue
            state = optimizer.state[parameter]
            device = parameter.device if on_device else None
            state.update({key: _placed(value, state.get(key), device) for key, value in saved_state.items()})


def _placed(value: Any, before: Any, device: torch.device | None) -> Any:
    """A saved value in the place of the one before: a copy, on ``device``, else where that one was."""
    if not isinstance(value, torch.Tensor):
        return value
    if device is None and isinstance(before, torch.Tensor):
        device = before.device
    return value.clone() if device is None else value.to(device, copy=True)
