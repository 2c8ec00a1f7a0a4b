"""``sharded``: optimizer state and final gradients are sharded by parameter, as in fairscale's OSS.

OSS chooses the rank that owns a parameter, keeps the weights in flat buffers, and broadcasts them
after a step. accel reduces each gradient to its owner before the step, and the user's own optimizer
steps the parameters that have a gradient. OSS's own ``step`` and ``clip_grad_norm``, and
ShardedDataParallel, are wrong if a loop freezes parameters or accumulates gradients.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from ..gradients.totals import held_by_any, held_here
from ..process import Process
from ..process.control import agree
from ..process.packing import average_, broadcast_from_owners, reduce_to_owners
from ..process.startup import unseen_group
from ..shard import StateEntry, parameters_of
from .base.engine import Engine
from .base.gradients import Gradients, refuse_overlaps, refuse_scripts
from .base.holdings import Holdings
from .base.memory import MemoryUse, TensorSize, add_uses
from .base.options import SequenceOptions
from .base.placement import Placement, Placements
from .base.versions import check_version

if TYPE_CHECKING:
    from ._oss import FlatOSS

logger = logging.getLogger("accel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded(SequenceOptions):
    """Options of ``sharded``.

    Args:
        broadcast_buffers: all ranks take rank 0's buffers once a step.
    """

    broadcast_buffers: bool = True


# -- owners -------------------------------------------------------------------------------------


@final
class Owners:
    """The rank that steps each parameter, by the parameter's ``id``.

    Parameters that become trainable later get an OSS of their own, so no optimizer state moves.
    """

    def __init__(self, engine: ShardedEngine) -> None:
        self.rank_of: dict[int, int] = {}
        #: The optimizers that step only the parameters of this rank.
        self.optimizers: set[Optimizer] = set()
        self._engine = weakref.proxy(engine)
        self._place = engine.process.place
        self._parts: list[FlatOSS] = []

    def add(self, optimizer: Optimizer) -> None:
        """Give owners to an optimizer's trainable parameters that have none. Local."""
        if optimizer not in self.optimizers:
            return
        new = []
        for parameter in parameters_of(optimizer):
            known = id(parameter) in self._engine.known
            if known and parameter.requires_grad and id(parameter) not in self.rank_of:
                new.append(parameter)
        if not new:
            return
        with unseen_group():
            from ._oss import FlatOSS
        # From large to small, which balances best.
        part = FlatOSS(sorted(new, key=lambda p: -p.numel()), optimizer)
        self._parts.append(part)
        self.rank_of |= part.rank_of
        self._engine.holdings.drop_others(optimizer)

    def refresh(self, *, moved_only: bool = False) -> None:
        """Apply a change of ``requires_grad``, or of the parameters' memory. Local."""
        for part in self._parts:
            if not moved_only or part.moved():
                part.refresh_trainable()

    @torch.no_grad()
    def broadcast(self, stepped: Iterable[nn.Parameter]) -> None:
        """Give every rank the owners' values of ``stepped`` parameters. Collective."""
        rest = {id(p): p for p in stepped if id(p) in self.rank_of}
        for part in self._parts:
            if part.rank_of.keys().isdisjoint(rest):
                continue
            part._broadcast_params()
            received = [p for p in part.flat if self.rank_of[id(p)] != self._place.rank]
            # backward() of a graph from before the step must raise on all ranks.
            torch.autograd.graph.increment_version(received)
            for parameter in part.flat:
                rest.pop(id(parameter), None)
        # Parameters in channels_last are in no buffer, and frozen ones that have a gradient.
        by_owner: list[list[torch.Tensor]] = [[] for _ in range(self._place.world_size)]
        for key, parameter in rest.items():
            by_owner[self.rank_of[key]].append(parameter)
        broadcast_from_owners(by_owner, None)

    def release(self) -> None:
        """Give each parameter memory of its own again."""
        for part in self._parts:
            part.release()


# -- gradients ----------------------------------------------------------------------------------


@final
class ShardedGradients(Gradients):
    """Gradients that stay on their rank until a step or clipping, and then are on their owner.

    ``p.grad`` is this rank's share, and the gradient is the mean of the ranks' shares. A missing
    share is zero. A step or clipping leaves the final gradient on the owner, and None on the other
    ranks. Before a backward adds to it, the owner multiplies it by the number of ranks. That makes
    it a share again.
    """

    reduced = deferred = True
    engine: ShardedEngine

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._rank, self._world = engine.process.place.rank, engine.process.place.world_size
        self.owners = Owners(engine)
        #: The parameters whose gradient is final, by their ``id``. Equal on all ranks.
        self._final: dict[int, nn.Parameter] = {}
        #: The parameters that an optimizer is stepping.
        self._stepped: list[nn.Parameter] = []

    def backward_begins(self) -> None:
        """Make this rank's final gradients shares, because a backward may add to them."""
        super().backward_begins()
        rank_of = self.owners.rank_of
        _multiply([p for key, p in self._final.items() if rank_of[key] == self._rank], self._world)
        self._final.clear()
        self.buffers.touch()

    def pending(self) -> bool:
        """Return True, because only the ranks together know if there is a gradient."""
        return self.engine.distributed and self.engine.started

    def settle(self, optimizer: Optimizer | None = None) -> None:
        engine, owners = self.engine, self.owners
        if not engine.distributed:
            return
        if optimizer is None:
            self._reduce("the reduction of gradients", engine.parameters, {})
            return
        # An optimizer that setup has not seen may hold parameters of other models too.
        parameters = [p for p in parameters_of(optimizer) if id(p) in engine.known]
        what = f"a step of {type(optimizer).__name__} with {len(parameters)} parameters"
        if optimizer in owners.optimizers:
            # A loop may have assigned `p.data`, as it does to evaluate averaged weights.
            owners.refresh(moved_only=True)
            owners.add(optimizer)  # A group may have been added after setup.
            self._stepped = self._reduce(what, parameters, owners.rank_of)
        else:
            self._reduce(what, parameters, {})

    def finalize(self, what: str, parameters: Sequence[torch.Tensor]) -> None:
        self._reduce(what, self.engine.parameters, self.owners.rank_of)

    def _reduce(
        self, what: str, parameters: Sequence[nn.Parameter], owners: Mapping[int, int]
    ) -> list[nn.Parameter]:
        """Replace shares by final gradients, on every rank if there is no owner. Collective.

        Return the parameters that have a gradient on any rank. ``what`` is for messages.
        """
        what = f"{what} ({self.engine.label})"
        # A rank may have run no backward, if its batch had nothing to train on.
        by_rank = agree(what, (held_here(parameters), self.buffers.stale))
        if any(stale for _, stale in by_rank):
            self.buffers.synchronize()
        masks = [mask for mask, _ in by_rank]
        names = self.engine.holdings.parameter_names
        indices = held_by_any(what, masks, [names[id(p)] for p in parameters])
        live = [parameters[index] for index in indices]
        num_shares = list(map(sum, zip(*masks, strict=True)))
        again: list[nn.Parameter] = []
        everywhere: list[torch.Tensor] = []
        by_owner: list[list[torch.Tensor]] = [[] for _ in range(self._world)]
        for index, parameter in zip(indices, live, strict=True):
            owner = owners.get(id(parameter))
            # If the loop has assigned gradients on all ranks, they are shares.
            if id(parameter) in self._final and num_shares[index] == 1:
                if owner is not None:
                    continue
                again.append(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            (everywhere if owner is None else by_owner[owner]).append(parameter.grad)
        _multiply(again, self._world)
        group = self.process.group
        average_(everywhere, self._world, lambda flat: dist.all_reduce(flat, group=group))
        reduce_to_owners(by_owner, self._rank, group)
        for parameter in live:
            owner = owners.get(id(parameter))
            if owner is None:
                self._final.pop(id(parameter), None)
                continue
            self._final[id(parameter)] = parameter
            if owner != self._rank:
                parameter.grad = None  # The optimizer skips it, and makes no state.
        return live

    def parts(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's gradients, and those that every rank has and rank 0 counts. Local."""
        counted: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                counts = self._rank == 0 or id(parameter) in self._final
                (counted if counts else copies).append(parameter.grad)
        return counted, copies

    def after_step(self, optimizer: Optimizer) -> None:
        stepped, self._stepped = self._stepped, []
        if stepped:
            self.owners.broadcast(stepped)


@torch.no_grad()
def _multiply(parameters: Iterable[nn.Parameter], factor: float) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


# -- the engine ---------------------------------------------------------------------------------


@final
class ShardedHoldings(Holdings):
    """Optimizer state that is on the owner, or on every rank if a parameter has no owner yet."""

    engine: ShardedEngine

    def partial(self, optimizer: Optimizer | None) -> bool:
        return optimizer in self.engine.gradients.owners.optimizers

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        entries = super().entries(optimizer)
        if not self.partial(optimizer):
            return entries
        rank = self.engine.process.place.rank
        rank_of = self.engine.gradients.owners.rank_of
        return [entry for entry in entries if rank_of.get(id(entry.parameter), rank) == rank]


@final
class ShardedEngine(Engine):
    """The module runs as it is, and each rank keeps optimizer state for the parameters it owns."""

    name = "sharded"
    options_type = Sharded
    requires = {"fairscale": "fairscale>=0.4.12"}
    placements = Placements(
        gradients=Placement.BY_PARAMETER, optimizer_state=Placement.BY_PARAMETER
    )
    gradients_type = ShardedGradients
    gradients: ShardedGradients
    holdings_type = ShardedHoldings
    holdings: ShardedHoldings
    options: Sharded

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        if process.place.world_size > 1:
            refuse_scripts(module, cls.name)
            refuse_overlaps(module, cls.name)

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse:
        """Follow OSS, which gives the next parameter to the rank with the fewest elements."""
        sizes = [0] * world_size
        uses: list[list[MemoryUse]] = [[] for _ in sizes]
        for tensor in sorted(tensors, key=lambda tensor: -tensor.numel):
            is_split = tensor.optimizer is not None and tensor.trainable
            owner = sizes.index(min(sizes))
            sizes[owner] += tensor.numel * is_split
            for rank, of_rank in enumerate(uses):
                here = rank == owner or not is_split
                of_rank.append(tensor.use(1, here, here))
        return max(map(add_uses, uses), key=lambda use: use.total)

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        if not self.distributed:
            return
        kind = type(optimizer)
        if kind.__module__.startswith("torch.optim.") and not issubclass(kind, LBFGS):
            check_version("sharded", "fairscale", "0.4.12", "0.4.13")
            self.gradients.owners.optimizers.add(optimizer)
        else:
            logger.warning(
                "backend='sharded' saves no memory with %s, because every rank steps all of it. "
                "Use an optimizer of torch.optim other than LBFGS.",
                kind.__name__,
            )

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        super().start(optimizers)
        for optimizer in self.optimizers:
            self.gradients.owners.add(optimizer)

    def rebuild(self) -> None:
        for optimizer in self.optimizers:
            self.gradients.owners.add(optimizer)
        self.gradients.owners.refresh()

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        self.gradients.owners.release()

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return function(*args, **kwargs)
