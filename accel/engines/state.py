"""The verbs of an engine that carry state in and out. As written here they serve engines that keep whole tensors on each rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import shard
from ..process import Process
from ..process.packing import broadcast_
from ..shard import Manifest, Shard


class StateVerbs:
    """What checkpoints, ``state_dict`` and ``full_state_dict`` reach. ``optimizer=None`` means the model itself."""

    module: nn.Module
    names: list[str]
    parameters: list[nn.Parameter]
    process: Process
    distributed: bool

    def copy(self, memo: dict[int, Any]) -> nn.Module:
        """A raw copy, for ``copy.deepcopy(handle)``. Local."""
        return copy.deepcopy(self.module, memo)

    def set_data(self, parameter: torch.Tensor, value: torch.Tensor) -> bool:
        """Take what the loop assigns to ``parameter.data``, where torch would put it in a wrong place; False if not. Local."""
        return False

    def state_dict(self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The handle's ``state_dict()``. Local; raises where this rank does not hold it all."""
        state: dict[str, Any] = (self.module if optimizer is None else optimizer).state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The handle's ``load_state_dict(full)``, with the same full state on every rank."""
        return (self.module if optimizer is None else optimizer).load_state_dict(*args, **kwargs)

    def full_state_dict(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """What the raw object's ``state_dict()`` would hold in one process, on every rank. Collective."""
        return self.state_dict(optimizer, (), {})

    def synchronize(self, source: int = 0) -> None:
        """Give every rank rank ``source``'s weights and buffers. Collective."""
        if self.distributed:
            tensors = [p.data for p in self.parameters] + [b.data for b in self.module.buffers()]
            broadcast_(tensors, self.process.group, source)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def parameter_names(self) -> dict[int, str]:
        """Names by the identity of what the optimizers' groups hold."""
        return {id(p): n for p, n in zip(self.parameters, self.names, strict=True)}

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        """The tensors that lie on this rank, at full precision (a master copy where there is one). Local, without a copy."""
        if optimizer is None:
            return shard.module_shards(self.module)
        return shard.optimizer_shards(optimizer, self.parameter_names)

    def has(self, name: str) -> bool:
        """Whether the module keeps on this rank what its ``state_dict`` has under a name and is no tensor. Local."""
        return True

    def values(self, optimizer: Optimizer) -> dict[str, Any]:
        """``shard.optimizer_values`` of what lies on this rank. Local."""
        return shard.optimizer_values(optimizer, self.parameter_names)

    def slots(self, optimizer: Optimizer | None, manifest: Manifest) -> list[Shard]:
        """What this rank needs filled of the checkpoint that ``manifest`` describes; creates optimizer state. Local."""
        if optimizer is None:
            return shard.module_shards(self.module)
        return shard.optimizer_slots(optimizer, self.parameter_names, manifest)

    def fill_values(self, optimizer: Optimizer, values: Mapping[str, Any]) -> None:
        """Take over the values of all ranks' ``values`` together. Local; comes after the slots were filled."""
        shard.fill_optimizer_values(optimizer, self.parameter_names, values)

    @classmethod
    def read_foreign(cls, path: str, load: Any, new: Any) -> dict[str, Any] | None:
        """The state in a checkpoint that this backend's own library wrote; None if there is none. Local.

        Args:
            path: a directory.
            load: reads a pickled file without running what is in it; takes its path, and the names of classes that may be
                in it and are read as inert objects.
            new: makes a tensor of a shape and dtype that need not fit into memory.
        """
        return None

    def filled(self) -> None:
        """Hear that slots were filled: derive what depends on them (half-precision copies, say). Collective."""
        return
