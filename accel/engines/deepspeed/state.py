"""What of a model that DeepSpeed divides lies on this rank: fragments of parameters, and of their optimizers' state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch.optim import Optimizer

from ...precision import convert_optimizer
from ...shard import Shard, StateEntry
from ..base.absent import plainly
from ..base.gather import Item
from ..base.holdings import Holdings
from ..base.step import refuse_steps
from . import foreign
from .library import without_groups
from .partitions import Fragment, Partitions

logger = logging.getLogger("accel")


@final
class DeepSpeedHoldings(Holdings):
    """Fragments of what is divided; while the engine's ``zero`` is None, everything is whole."""

    offloads = True

    def partial(self, optimizer: Optimizer | None) -> bool:
        """The optimizers' state always; the model where it does not hold what they step."""
        zero: Partitions | None = self.engine.zero
        return zero is not None and (optimizer is not None or zero.divides_weights or zero.masters)

    def prepare(self, *, writing: bool) -> None:
        """What the loop has written is taken over, or refused."""
        if not writing:
            self.engine.take_edits()

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        """This rank's fragments, and whatever is whole."""
        found: list[Shard] = plainly(super().shards)(optimizer)
        return found

    def _fragment(self, name: str) -> tuple[bool, Fragment | None]:
        """Whether a parameter is divided, and this rank's part of it."""
        zero: Partitions | None = self.engine.zero
        index = self._numbers.get(name) if zero is not None else None
        if zero is None or index is None or not zero.is_divided(index):
            return False, None
        return True, zero.fragments.get(index)

    @property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.engine.names)}

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        """A fragment of what is divided, at full precision."""
        divided, fragment = self._fragment(name)
        if not divided:
            return super().part(name, tensor, key)
        shape = tuple(self.shapes[name])
        if not key:
            if fragment is None:  # of a parameter without elements no rank has one
                return None if torch.Size(shape).numel() else super().part(name, tensor)
            return Shard(name, shape, fragment.start, fragment.weights)
        if fragment is None or tensor.shape != fragment.weights.shape or (key == "step" and tensor.numel() == 1):
            return super().part(name, tensor, key)
        return Shard(f"{name}/{key}", shape, fragment.start, tensor)

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        """By fragments."""
        zero: Partitions | None = self.engine.zero
        if zero is None:
            return super().entries(optimizer)
        found = []
        for index in self.engine.indices(optimizer):
            if (fragment := zero.fragments.get(index)) is not None:
                name, state = self.engine.names[index], optimizer.state.get(fragment.weights, {})
                found.append(StateEntry(name, tuple(zero.shapes[index]), fragment.weights, state))
        return found

    def new_state(self, entry: StateEntry, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As large as the fragment."""
        divided, _ = self._fragment(entry.name)
        return super().new_state(
            entry, key, tuple(entry.parameter.shape) if divided and shape == entry.shape else shape, dtype
        )

    @classmethod
    def read_foreign(cls, path: str, load: Any, new: Any) -> dict[str, Any] | None:
        """What DeepSpeed's ``save_checkpoint`` wrote."""
        return foreign.read(path, load, new)

    def gradients(self) -> Iterator[Item]:
        """Of the fragments."""
        for index, fragment in self.engine.zero.fragments.items():
            if fragment.grad is not None:
                yield self.engine.names[index], "grad", fragment.grad

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        """None where weights are divided."""
        return [] if self.engine.zero is not None and self.engine.zero.divides_weights else super().replicas()

    def filled(self) -> None:
        """Every rank sees the weights that were filled."""
        if self.engine.zero is not None:
            self.engine.zero.spread()

    def restore(self, zero: Partitions, optimizers: Sequence[Optimizer]) -> None:
        """Whole weights, gradients and optimizer state in the user's own objects. Collective."""
        engine, what = self.engine, "the end of a divided model"
        if lost := zero.take_edits():
            logger.warning("%s changed in place, which is lost", ", ".join(engine.names[i] for i in lost[:5]))
        named = dict(zip(engine.names, engine.parameters, strict=True))
        whole = self.gather(what, [*((name, "", p) for name, p in named.items()), *self.gradients()])
        states = [self.whole_state(what, optimizer) for optimizer in optimizers]
        for optimizer, state in zip(optimizers, states, strict=True):
            self.give_back(optimizer, state, named)
        # What accel made half becomes whole again from its fp32 copy.
        ours = {id(tensor) for tensor, _ in engine.dtypes}
        zero.end([w if id(p) in ours else w.to(p.dtype) for p, w in ((p, whole[n, ""]) for n, p in named.items())])
        for name, parameter in named.items():
            if (name, "grad") in whole:
                parameter.grad = whole[name, "grad"].to(parameter.dtype)
        with contextlib.ExitStack() as for_good:
            for optimizer in optimizers:
                convert_optimizer(optimizer, for_good)
            for_good.pop_all()

    def leave(self, zero: Partitions, optimizers: Sequence[Optimizer]) -> None:
        """The same without the other ranks: weights that this rank has a part of are nan, and its optimizers do not step."""
        for optimizer in optimizers:
            for fragment in zero.fragments.values():
                optimizer.state.pop(fragment.weights, None)
            refuse_steps(optimizer, self.engine.ended)
        with without_groups():
            zero.end([zero.here(i) for i in range(len(self.engine.parameters))])

    def storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's, and the fragments'; weights that only the optimizer has count as its state."""
        zero: Partitions | None = self.engine.zero
        fragments = [] if zero is None else list(zero.fragments.values())
        yield from (("parameters", fragment.home) for fragment in fragments)
        yield from super().storages()
        yield from (("gradients", fragment.grad) for fragment in fragments if fragment.grad is not None)
        yield from (("optimizer_state", fragment.weights) for fragment in fragments)
        yield from (("buckets", bucket) for bucket in ([] if zero is None else zero.buckets()))
