"""Where the state of models and optimizers lies on this rank: what a checkpoint writes, and what it fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


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


def module_shards(module: nn.Module) -> list[Shard]:
    """Parameters and persistent buffers under the names of ``state_dict``; what is tied has the first of its names."""
    found: dict[int, Shard] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), whole(name, value))
    return list(found.values())


def _entries(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter, optimizer.state.get(parameter, {})


def is_sharded(value: Any) -> bool:
    """Whether an entry of an optimizer's state is a shard; the rest (step counters, lists, flags) are values."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def optimizer_shards(optimizer: Optimizer, names: Mapping[int, str]) -> list[Shard]:
    """The tensors of an optimizer's state; ``names`` are those of its parameters, by ``id``."""
    return [
        whole(f"{name}/{key}", value)
        for name, _, state in _entries(optimizer, names)
        for key, value in state.items()
        if is_sharded(value)
    ]


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
            name: {key: value for key, value in state.items() if not is_sharded(value)}
            for name, _, state in _entries(optimizer, names)
            if state
        },
    }


def optimizer_slots(optimizer: Optimizer, names: Mapping[int, str], manifest: Manifest) -> list[Shard]:
    """Shards to fill, one for each tensor of ``manifest`` that is of a parameter of this optimizer; creates what is not there."""
    slots = []
    parameters = {name: (parameter, optimizer.state[parameter]) for name, parameter, _ in _entries(optimizer, names)}
    for full_name, (shape, dtype) in manifest.items():
        name, _, key = full_name.rpartition("/")
        if name in parameters:
            parameter, state = parameters[name]
            if not is_sharded(state.get(key)):
                state[key] = torch.empty(shape, dtype=dtype, device=parameter.device)
            slots.append(whole(full_name, state[key]))
    return slots


def fill_optimizer_values(optimizer: Optimizer, names: Mapping[int, str], values: Mapping[str, Any]) -> None:
    """Take over group values and plain state; parameters without an entry in ``values["state"]`` lose their state."""
    for group, saved in zip(optimizer.param_groups, values["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for name, parameter, _ in _entries(optimizer, names):
        if name not in values["state"]:
            optimizer.state.pop(parameter, None)
        else:
            state = optimizer.state[parameter]
            state.update({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values["state"][name].items()})
