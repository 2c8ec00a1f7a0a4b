"""``sharded``: optimizer state and final gradients are divided by parameter, as in fairscale's OSS.

OSS chooses an owner rank for each parameter, keeps the weights in flat buffers, and broadcasts them
after a step. accel reduces each gradient to its owner before the step, and the user's own optimizer
steps the parameters that have a gradient. OSS's ``step``, ``clip_grad_norm`` and ``state_dict``,
and ShardedDataParallel, are wrong if a loop freezes parameters or keeps gradients.
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
from ..process.packing import average_, reduce_to_owners
from ..process.startup import unseen_group
from ..shard import StateEntry, parameters_of
from .base.engine import Engine
from .base.gradients import Gradients, other_parameters, refuse_overlaps, refuse_scripts
from .base.holdings import Holdings
from .base.memory import MemoryUse, TensorSize, add_uses
from .base.options import SequenceOptions
from .base.placement import Placement, Placements
from .base.versions import check_version

if TYPE_CHECKING:
    from ._oss import Shards

logger = logging.getLogger("accel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded(SequenceOptions):
    """Options of ``sharded``.

    Args:
        broadcast_buffers: all ranks take rank 0's buffers once a step.
    """

    broadcast_buffers: bool = True


# -- gradients ----------------------------------------------------------------------------------


@final
class ShardedGradients(Gradients):
    """Gradients that stay on their rank until a step or clipping, and then are on their owner.

    ``p.grad`` is this rank's share, and the gradient is the mean of the ranks' shares. A missing
    share is zero. A step or clipping leaves the gradient itself on the owner, and None on the other
    ranks. The owner multiplies it by the number of ranks, which makes it a share again, before
    anything is added to it.
    """

    reduced = deferred = True
    engine: ShardedEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._rank, self._world = engine.process.place.rank, engine.process.place.world_size
        #: The owners of the parameters of each optimizer that can be split.
        self.shards: dict[Optimizer, Shards] = {}
        self.loads = [0] * self._world
        #: The parameters whose gradient, not a share, is on this rank, their owner. By ``id``.
        self._final: dict[int, tuple[nn.Parameter, weakref.ref[torch.Tensor]]] = {}
        #: The parameters that an optimizer is stepping, until the other ranks have the new values.
        self.stepped: dict[Optimizer, list[nn.Parameter]] = {}

    @property
    def _names(self) -> dict[int, str]:
        names: dict[int, str] = self.engine.holdings.parameter_names
        return names

    def backward_begins(self) -> None:
        """Make this rank's final gradients shares, because a backward is about to add to them."""
        super().backward_begins()
        gradients = [parameter.grad for parameter, _ in self._final.values()]
        _multiply([g for g in gradients if g is not None], self._world)
        self._final.clear()
        self.buffers.touch()

    def pending(self) -> bool:
        """Return True, because only the ranks together know who has a gradient."""
        return self.engine.distributed and self.engine.started

    def settle(self, optimizer: Optimizer | None = None) -> None:
        if not self.engine.distributed:
            return
        if optimizer is None:
            self._reduce("the gradients", self.engine.parameters, {})
        else:
            self._settle_step(optimizer)

    def _settle_step(self, optimizer: Optimizer) -> None:
        # setup may not have seen the optimizer, which then may hold parameters of other models.
        parameters = [p for p in parameters_of(optimizer) if id(p) in self._names]
        number = [*self.engine.steppers, id(optimizer)].index(id(optimizer))
        details = f"(optimizer {number}, {len(parameters)} parameters)"
        what = f"a step of {type(optimizer).__name__} {details}"
        shards = self.shards.get(optimizer)
        if shards is None:
            self._reduce(what, parameters, {})
        else:
            self.stepped[optimizer] = self._reduce(what, parameters, shards.owner, shards)

    def _reduce(
        self,
        what: str,
        parameters: Sequence[nn.Parameter],
        owner: Mapping[int, int],
        shards: Shards | None = None,
    ) -> list[nn.Parameter]:
        """Replace shares by gradients, on the owner or, without one, on every rank. Collective.

        Returns the parameters that have a gradient on any rank. ``shards`` are of an optimizer that
        is about to step them. ``what`` names the call for messages.
        """
        what = f"{what} of {self.engine.label}"
        moved = shards is not None and any(part.moved() for part in shards.parts)
        from_ranks = agree(what, (held_here(parameters), self.buffers.stale, moved))
        masks = [mask for mask, _, _ in from_ranks]
        live = held_by_any(what, masks, [self._names[id(p)] for p in parameters])
        if any(stale for _, stale, _ in from_ranks):
            self.buffers.synchronize()
        with_gradient = [parameters[number] for number in live]
        if shards is not None:
            if any(moved for _, _, moved in from_ranks):
                _refresh(shards)
            self.assign(shards, with_gradient)  # A group may have been added after setup.
        columns = list(zip(*masks, strict=True))
        self._send(with_gradient, [columns[number] for number in live], owner)
        return with_gradient

    def _send(
        self,
        parameters: Sequence[nn.Parameter],
        masks: Sequence[Sequence[int]],
        owner: Mapping[int, int],
    ) -> None:
        """Average the shares of each parameter. Collective.

        The mask of a parameter has a 1 for each rank that has a share.
        """
        finals: list[torch.Tensor] = []
        single: list[torch.Tensor] = []
        everywhere: list[torch.Tensor] = []
        by_owner: list[list[torch.Tensor]] = [[] for _ in range(self._world)]
        for parameter, mask in zip(parameters, masks, strict=True):
            gradient = parameter.grad
            rank = owner.get(id(parameter))
            _, final = self._final.pop(id(parameter), (None, None))
            if rank is not None and sum(mask) == mask[rank] == 1:
                # The owner has the gradient already, or the only share, so nothing is sent.
                if gradient is not None and final is None:
                    single.append(gradient)
                continue
            if gradient is None:
                parameter.grad = gradient = torch.zeros_like(parameter)
            elif final is not None and (sum(mask) == 1 or final() is gradient):
                # Not if the loop assigned new gradients on all ranks: those are shares.
                finals.append(gradient)
            (everywhere if rank is None else by_owner[rank]).append(gradient)
        _multiply(finals, self._world)
        _multiply(single, 1 / self._world)
        group = self.process.group
        average_(everywhere, self._world, lambda flat: dist.all_reduce(flat, group=group))
        reduce_to_owners(by_owner, self._rank, group)
        for parameter in parameters:
            rank = owner.get(id(parameter))
            if rank == self._rank and parameter.grad is not None:
                self._final[id(parameter)] = parameter, weakref.ref(parameter.grad)
            elif rank is not None:
                parameter.grad = None  # The optimizer skips it, and makes no state.

    def finalize(self, what: str, parameters: Sequence[torch.Tensor]) -> None:
        if len(parameters) < len(self.engine.parameters):
            names = sorted({self._names[id(p)] for p in parameters})
            self.engine.compare(what, names, other_parameters)
        owner: dict[int, int] = {}
        for shards in self.shards.values():
            owner |= shards.owner
        self._reduce(what, self.engine.parameters, owner)

    def parts(
        self,
        parameters: Sequence[torch.Tensor],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's gradients, and those that every rank has and rank 0 counts. Local."""
        counted: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                counts = self._rank == 0 or id(parameter) in self._final
                (counted if counts else copies).append(parameter.grad)
        return counted, copies

    def assign(self, shards: Shards, parameters: Iterable[nn.Parameter]) -> None:
        """Give owners to parameters without one, and drop the state of the other ranks. Local."""
        if shards.add(parameters):
            self.engine.holdings.drop_others(shards.optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        self.publish([optimizer])

    def publish(self, optimizers: Iterable[Optimizer]) -> None:
        """Give every rank what these optimizers have stepped. Collective if there is something."""
        for optimizer in optimizers:
            stepped = self.stepped.pop(optimizer, None)
            if stepped:
                self.shards[optimizer].broadcast(stepped, self._rank)


def _refresh(shards: Shards) -> None:
    """Apply a change of ``requires_grad``, or of the parameters' memory. Local."""
    for part in shards.parts:
        part.refresh_trainable()


def _multiply(gradients: list[torch.Tensor], factor: float) -> None:
    if gradients:
        with torch.no_grad():
            torch._foreach_mul_(gradients, factor)


# -- optimizer state ----------------------------------------------------------------------------


@final
class ShardedHoldings(Holdings):
    """Optimizer state that is on the owner, or on every rank if a parameter has no owner yet."""

    engine: ShardedEngine

    def partial(self, optimizer: Optimizer | None) -> bool:
        return optimizer in self.engine.gradients.shards

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        entries = super().entries(optimizer)
        if not self.partial(optimizer):
            return entries
        rank = self.engine.process.place.rank
        owner = self.engine.gradients.shards[optimizer].owner
        return [entry for entry in entries if owner.get(id(entry.parameter), rank) == rank]


# -- the engine ---------------------------------------------------------------------------------


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
        cls,
        module: nn.Module,
        tensors: Sequence[TensorSize],
        options: Any,
        world_size: int,
    ) -> MemoryUse:
        """Follow OSS, which gives the next parameter to the rank with the fewest elements."""
        owner: dict[str, int] = {}
        loads = [0] * world_size
        for number in sorted({t.optimizer for t in tensors if t.optimizer is not None}):
            ranks = sorted(range(world_size), key=loads.__getitem__)
            sizes = [0] * world_size
            for tensor in sorted(tensors, key=lambda tensor: -tensor.numel):
                if tensor.optimizer == number and tensor.trainable:
                    smallest = sizes.index(min(sizes))
                    sizes[smallest] += tensor.numel
                    owner[tensor.name] = ranks[smallest]
            loads = [loads[rank] + sizes[ranks.index(rank)] for rank in range(world_size)]
        uses = []
        for rank in range(world_size):
            owned = [owner.get(t.name, rank) == rank for t in tensors]
            pairs = zip(tensors, owned, strict=True)
            uses.append(add_uses(tensor.use(1, here, here) for tensor, here in pairs))
        return max(uses, key=lambda use: use.total)

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        if not self.distributed:
            return
        kind = type(optimizer)
        if not kind.__module__.startswith("torch.optim.") or issubclass(kind, LBFGS):
            logger.warning(
                "backend='sharded' saves no memory with %s, because every rank steps all of it. "
                "Use an optimizer of torch.optim other than LBFGS.",
                kind.__name__,
            )
            return
        with unseen_group():
            check_version("sharded", "fairscale", "0.4.12", "0.4.13")
            from ._oss import Shards
        self.gradients.shards[optimizer] = Shards(optimizer, self.gradients.loads)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        super().start(optimizers)
        self._assign_trainable()

    def rebuild(self) -> None:
        self._assign_trainable()
        for shards in self.gradients.shards.values():
            _refresh(shards)

    def _assign_trainable(self) -> None:
        for optimizer, shards in self.gradients.shards.items():
            self.gradients.assign(shards, [p for p in parameters_of(optimizer) if p.requires_grad])

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        for shards in self.gradients.shards.values():
            for part in shards.parts:
                part.release()

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if function is self.entry and self.gradients.stepped:
            # A step raised on this rank, and the others wait for its weights.
            self.gradients.publish(list(self.gradients.stepped))
        return function(*args, **kwargs)
