"""Ranks that step by themselves, and average their weights after every so many steps of an optimizer.

That is Local SGD (Stich, arXiv 1805.09767; Lin et al., arXiv 1808.07217); DiLoCo (Douillard et al., arXiv 2311.08105) with an
outer optimizer, which steps by the difference of what the weights were before and their mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.optim import SGD, Optimizer

from ...errors import AccelError, OptimizerError
from ...gradients.totals import average_gradients_, average_ranks_
from ...shard import parameters_of
from ..base.gradients import Gradients
from ..base.holdings import Holdings


@dataclass(slots=True)
class Interval:
    """An optimizer's steps since its weights were averaged; writes to these by then, and values, which ``outer`` steps."""

    steps: int = 0
    writes: dict[torch.Tensor, int] = field(default_factory=dict)
    before: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    outer: Optimizer | None = None

    @torch.no_grad()
    def begin(self, weights: Sequence[torch.Tensor], options: Mapping[str, Any] | None) -> None:
        """Remember them. One that comes later takes its first outer step in the next interval."""
        self.writes = {p: p._version for p in weights}
        if options is not None:
            for weight in weights:
                if weight not in self.before:
                    self.before[weight] = torch.empty_like(weight)
                self.before[weight].copy_(weight)
            self.outer = self.outer or SGD(list(self.before.values()), **options)
            self.outer.param_groups[0]["params"] = list(self.before.values())

    @torch.no_grad()
    def step(self, means: Sequence[torch.Tensor]) -> None:
        """Let the outer optimizer step, now that these weights are the means of all ranks."""
        pairs = [(p.detach(), self.before[p]) for p in means if p in self.before]
        for weight, before in pairs:
            before.grad = torch.sub(before, weight, out=weight)
        if self.outer is not None:
            self.outer.step()
        for weight, before in pairs:
            before.grad = None
            weight.copy_(before)


@final
class PeriodicGradients(Gradients):
    """Each rank steps with its own."""

    reduced = partial = before_any_step = True
    watched = True  # also with one process: an optimizer that accel does not know has no intervals

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._intervals: weakref.WeakKeyDictionary[Optimizer, Interval] = weakref.WeakKeyDictionary()

    def interval(self, optimizer: Optimizer) -> Interval:
        """That of one of the engine's optimizers; one without steps begins now."""
        interval = self._intervals.setdefault(optimizer, Interval())
        if not interval.steps:
            interval.begin(parameters_of(optimizer), self.engine.options.outer)
        return interval

    def check(self, optimizer: Optimizer) -> None:
        super().check(optimizer)
        held, others = set(parameters_of(optimizer)), [o for o in self.engine.optimizers if o is not optimizer]
        if any(not held.isdisjoint(parameters_of(other)) for other in others):
            raise OptimizerError(
                "sync_every: two optimizers have the same parameters, which are averaged after so many steps of one: call "
                "accel.teardown(model) before another optimizer takes them over"
            )

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Nothing but what ``no_sync`` held back of parameters in no optimizer."""
        super().settle(optimizer)
        self.end_held_back()

    def end_backward(self, indices: Sequence[int]) -> None:
        """Those of parameters in no optimizer are averaged at once."""
        engine = self.engine
        parameters, names = [engine.parameters[i] for i in indices], [engine.names[i] for i in indices]
        average_gradients_(f"gradients of parameters in no optimizer ({engine.label})", parameters, names, self.process)

    def before_step(self, optimizer: Optimizer) -> None:
        stepper = self.engine.steppers.get(id(optimizer))
        if stepper is None or stepper.awaits_closure:
            what = "steps, and was not given to accel.setup" if stepper is None else "steps with a closure"
            raise OptimizerError(
                f"{type(optimizer).__name__} {what}: sync_every counts plain steps of known optimizers"
            )
        self.interval(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        interval = self._intervals[optimizer]
        interval.steps += 1
        if interval.steps >= self.engine.options.sync_every:
            interval.step(self._average(optimizer, interval))
        apart, guard = self.engine.distributed and self.under_way(self.engine.optimizers), self.engine.holdings.guard
        if apart and not guard.watching:  # a state or a copy of the raw module would be this rank's own
            guard.watch_modules(self.engine.module, lambda _: True)
        elif not apart:
            guard.release_modules()

    def end(self, optimizers: Sequence[Optimizer]) -> None:
        """End their intervals by means alone, an outer step being one of a whole interval. Collective, unless ``ended``."""
        self.engine.holdings.guard.release_modules()
        for optimizer in self.under_way(optimizers):
            if ended := self.engine.ended:
                what = f"the weights of {self.engine.label} are this rank's own, between two averages"
                raise AccelError(f"{what}, in which the other ranks take no part: {ended}")
            self._average(optimizer, self._intervals[optimizer])

    def under_way(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Those in whose intervals there were steps."""
        return [o for o in optimizers if o in self._intervals and self._intervals[o].steps]

    def _average(self, optimizer: Optimizer, interval: Interval) -> Sequence[torch.Tensor]:
        """Make the weights that a step of any rank may have changed the means of all; returns them."""
        weights = parameters_of(optimizer)
        mine = [i for i, p in enumerate(weights) if p.requires_grad or p._version != interval.writes.get(p)]
        if self.engine.distributed:
            what = f"the average after {interval.steps} steps of {type(optimizer).__name__}"
            mine = sorted(set().union(*self.engine.compare(what, len(weights), beside=mine)))
        means = [weights[i] for i in mine]
        average_ranks_(means, self.process)
        self.buffers.synchronize()
        interval.steps = 0
        return means


@final
class PeriodicHoldings(Holdings):
    """Weights are equal on all ranks between intervals; the state of optimizers is each rank's own."""

    own_state = True

    def partial(self, optimizer: Optimizer | None) -> bool:
        """Where one state of an optimizer is asked for, it is rank 0's."""
        return optimizer is not None and self.engine.distributed

    def apart(self) -> Mapping[str, torch.Tensor]:
        """Those in an interval."""
        engine = self.engine
        under_way = engine.gradients.under_way(engine.optimizers) if engine.distributed else ()
        names = self.parameter_names if under_way else {}
        return {names[id(p)]: p for optimizer in under_way for p in parameters_of(optimizer)}

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Weights are compared between intervals only."""
        return [] if self.apart() else super().replicas()

    def outer(self, optimizer: Optimizer) -> tuple[Optimizer, Mapping[int, str]] | None:
        """What steps the weights between intervals."""
        interval, names = self.engine.gradients.interval(optimizer), self.parameter_names
        found = {id(before): names[id(p)] for p, before in interval.before.items()}
        return None if interval.outer is None else (interval.outer, found)

    def filled(self) -> None:
        """Begin anew with what was loaded."""
        self.engine.gradients.end(self.engine.optimizers)

    def storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of outer optimizers too."""
        yield from super().storages()
        for outer, _ in filter(None, map(self.outer, self.engine.optimizers)):
            yield from (("optimizer_state", before) for before in parameters_of(outer))
            yield from (("optimizer_state", v) for state in outer.state.values() for v in state.values())
