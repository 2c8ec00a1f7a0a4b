"""Fragments of parameters and optimizer state, and their full state."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...deferred import without_values
from ...precision import convert_optimizer
from ...shard import Shard, StateEntry, flat_shard
from ..base.absent import plainly
from ..base.gather import Item
from ..base.holdings import Holdings
from ..base.raw_objects import Override, Snapshot
from .config import Configuration
from .partitions import Partitions

if TYPE_CHECKING:
    from . import DeepSpeedEngine


@final
class DeepSpeedHoldings(Holdings):
    """Fragments, or full parameters if ``engine.zero`` is None."""

    engine: DeepSpeedEngine

    @property
    def snapshot(self) -> Snapshot | None:
        return None if self.engine.zero is None else self.engine.zero.snapshot

    @classmethod
    def divides_from_host(cls, options: Any) -> bool:
        return Configuration(options).stage == 3

    def partial(self, optimizer: Optimizer | None) -> bool:
        """True for optimizers, and for a model with masters or shards."""
        zero = self.engine.zero
        if zero is None:
            return False
        return optimizer is not None or self.engine.stage == 3 or zero.masters

    def prepare(self, *, writing: bool) -> None:
        if self.engine.zero is not None and not writing:
            self.engine.zero.take_edits()

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        return plainly(super().shards)(optimizer)  # type: ignore[no-any-return]

    def part(self, name: str, tensor: Tensor, key: Any = "") -> Shard | None:
        zero = self.engine.zero
        if zero is None or name not in self.engine.named:
            return super().part(name, tensor, key)
        p, shape = self.engine.named[name], tuple(self.shapes[name])
        fragment = zero.fragment_of(p)
        # Below stage 3, integer tensors such as 4-bit weights are full on every rank.
        if not key and (self.engine.stage == 3 or p.is_floating_point()):
            return fragment and flat_shard(name, shape, fragment.start, fragment.weights)
        is_step = key == "step" and tensor.numel() == 1
        if fragment is None or tensor.shape != fragment.weights.shape or is_step:
            return super().part(name, tensor, key)
        return flat_shard(f"{name}/{key}", shape, fragment.start, tensor)

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        zero = self.engine.zero
        if zero is None:
            return super().entries(optimizer)
        entries = []
        for entry in super().entries(optimizer):
            fragment = zero.fragment_of(entry.parameter)
            if fragment is not None:
                state = optimizer.state.get(fragment.weights, {})
                entries.append(replace(entry, parameter=fragment.weights, state=state))
        return entries

    def new_state(
        self, entry: StateEntry, key: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        shape = tuple(entry.parameter.shape) if shape == entry.shape else shape
        return super().new_state(entry, key, shape, dtype)

    def filled(self) -> None:
        if self.engine.zero is not None:
            self.engine.zero.publish()

    def restore(self, zero: Partitions, optimizers: Sequence[Optimizer]) -> None:
        """Give back full weights, gradients and state. Collective."""
        engine, cpu = self.engine, torch.device("cpu")
        zero.take_edits()
        named, device = engine.named, engine.process.device
        held: list[Item] = [(name, "", p) for name, p in named.items()]
        dtypes = {name: p.dtype for name, p in named.items()}
        for index, fragment in zero.fragments.items():
            grad = fragment.weights.grad
            if grad is not None and not zero.interruption.incomplete:
                held.append((engine.names[index], "grad", grad))
        full = self.gather("the end of a sharded model", held, device=cpu)
        zero.end([full.pop((name, "")) for name in named])
        # Only now, because the end of the fragments has freed memory on the device.
        for name, p in named.items():
            p.data = p.data.to(device, dtypes[name])
            if (name, "grad") in full:
                p.grad = full.pop((name, "grad")).to(p)
        for optimizer in optimizers:
            # The stack is never closed, so the conversion is permanent.
            convert_optimizer(optimizer, contextlib.ExitStack())

    def leave(self, zero: Partitions, optimizers: Sequence[Optimizer]) -> None:
        """Restore without other ranks. Sharded weights become NaN."""
        for optimizer in optimizers:
            for fragment in zero.fragments.values():
                optimizer.state.pop(fragment.weights, None)
        lost, parameters = self.engine.stage == 3, self.engine.parameters
        zero.end([without_values(p, p.device) if lost else p.detach().clone() for p in parameters])


def watch_zero_grad(engine: DeepSpeedEngine, raw: nn.Module | Optimizer) -> Override:
    """Let ``raw.zero_grad()`` also drop the fragments' gradients."""

    def zero_grad(owner: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = plainly(original)(*args, **kwargs)
        if engine.zero is not None:
            set_to_none = kwargs.get("set_to_none", args[0] if args else True)
            engine.zero.drop(engine.indices(owner), set_to_none)
        return result

    return Override(raw, "zero_grad", zero_grad)
