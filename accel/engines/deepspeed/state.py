"""What this rank has of a model that DeepSpeed shards: fragments of parameters and optimizer state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch.optim import Optimizer

from ...deferred import without_values
from ...precision import convert_optimizer
from ...shard import Shard, StateEntry
from ..base.absent import plainly
from ..base.gather import Item
from ..base.holdings import Holdings
from ..base.raw_objects import Snapshot
from ..base.step import take_added_groups
from .config import Configuration
from .library import without_groups
from .partitions import Fragment, Partitions

if TYPE_CHECKING:
    from . import DeepSpeedEngine

logger = logging.getLogger("accel")


@final
class DeepSpeedHoldings(Holdings):
    """Fragments of parameters. While the engine's ``zero`` is None, every rank has everything."""

    engine: DeepSpeedEngine
    offloads = True

    @property
    def snapshot(self) -> Snapshot | None:
        return None if self.engine.zero is None else self.engine.zero.snapshot

    @classmethod
    def divides_from_host(cls, options: Any) -> bool:
        return Configuration(options).stage == 3

    def partial(self, optimizer: Optimizer | None) -> bool:
        """True for optimizers, and for the model if it doesn't hold what they update."""
        zero = self.engine.zero
        return zero is not None and (optimizer is not None or zero.divides_weights or zero.masters)

    def prepare(self, *, writing: bool) -> None:
        """Take over what the program has written, or raise BackendError."""
        if not writing:
            self.engine.take_edits()

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        found: list[Shard] = plainly(super().shards)(optimizer)
        return found

    def _fragment(self, name: str) -> tuple[bool, Fragment | None]:
        """Return if a parameter is sharded, and this rank's fragment of it."""
        if (zero := self.engine.zero) is None or name not in zero.by_name:
            return False, None
        return True, zero.fragments.get(zero.by_name[name])

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        divided, fragment = self._fragment(name)
        if not divided:
            return super().part(name, tensor, key)
        shape = tuple(self.shapes[name])
        if not key:
            if fragment is None:  # of a parameter without elements no rank has one
                return None if torch.Size(shape).numel() else super().part(name, tensor)
            return Shard(name, shape, fragment.start, fragment.weights)
        if (
            fragment is None
            or tensor.shape != fragment.weights.shape
            or (key == "step" and tensor.numel() == 1)
        ):
            return super().part(name, tensor, key)
        return Shard(f"{name}/{key}", shape, fragment.start, tensor)

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        if (zero := self.engine.zero) is None:
            return super().entries(optimizer)
        take_added_groups(self.engine, optimizer)
        found = []
        for index in self.engine.indices(optimizer):
            if (fragment := zero.fragments.get(index)) is not None:
                name, state = self.engine.names[index], optimizer.state.get(fragment.weights, {})
                found.append(StateEntry(name, tuple(zero.shapes[index]), fragment.weights, state))
        return found

    def new_state(
        self, entry: StateEntry, key: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        divided, _ = self._fragment(entry.name)
        shape = tuple(entry.parameter.shape) if divided and shape == entry.shape else shape
        return super().new_state(entry, key, shape, dtype)

    def gradients(self) -> Iterator[Item]:
        assert self.engine.zero is not None  # it is called by `restore`
        for index, fragment in self.engine.zero.fragments.items():
            if fragment.grad is not None:
                yield self.engine.names[index], "grad", fragment.grad

    def filled(self) -> None:
        if self.engine.zero is not None:
            self.engine.gradients.publish(self.engine.zero)

    def restore(self, zero: Partitions, optimizers: Sequence[Optimizer]) -> None:
        """Give the user's own objects full weights, gradients and optimizer state. Collective."""
        engine, what = self.engine, "the end of a divided model"
        if lost := zero.take_edits():
            logger.warning(
                "%s changed in place, which is lost", ", ".join(engine.names[i] for i in lost[:5])
            )
        named = engine.named
        held = [*((name, "", p) for name, p in named.items()), *self.gradients()]
        whole = self.gather(what, held, device=torch.device("cpu"))
        device, dtypes = engine.process.device, [p.dtype for p in named.values()]
        zero.end([whole.pop((name, "")) for name in named])
        # Only now, when the fragments have made room on the device.
        for (name, parameter), dtype in zip(named.items(), dtypes, strict=True):
            parameter.data = parameter.data.to(device, dtype)
            if (name, "grad") in whole:
                parameter.grad = whole.pop((name, "grad")).to(device, parameter.dtype)
        with contextlib.ExitStack() as for_good:
            for optimizer in optimizers:
                convert_optimizer(optimizer, for_good)
            for_good.pop_all()

    def leave(self, zero: Partitions, optimizers: Sequence[Optimizer]) -> None:
        """Do it without the other ranks: sharded weights are nan, and the optimizers don't step."""
        for optimizer in optimizers:
            for fragment in zero.fragments.values():
                optimizer.state.pop(fragment.weights, None)
        with without_groups():
            divided = zero.divides_weights
            copy = (
                (lambda p: without_values(p, p.device))
                if divided
                else (lambda p: p.detach().clone())
            )
            zero.end([copy(p) for p in self.engine.parameters])
