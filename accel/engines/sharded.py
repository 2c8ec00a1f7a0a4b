"""``sharded``: fairscale's OSS, which shards the optimizer state.

OSS assigns an owner to each parameter, keeps weights in flat buffers, and
broadcasts them after a step. Before the step, accel reduces gradients to
owners. The user's optimizer steps, because OSS's own ``step`` and
``clip_grad_norm`` are wrong after freezing or gradient accumulation.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ..gradients.totals import held_by_any, held_here
from ..gradients.watch import REQUIRES_GRAD
from ..process import Process
from ..process.control import agree
from ..process.packing import average_, broadcast_, reduce_to_owners
from ..process.startup import unseen_group
from ..shard import StateEntry, parameters_of
from .base.engine import Engine
from .base.gradients import Gradients
from .base.holdings import Holdings
from .base.memory import MemoryUse, TensorSize, add_uses
from .base.options import SequenceOptions
from .base.placement import Placement, Placements
from .base.raw_objects import Args, Function, Kwargs
from .base.refusals import refuse_overlaps
from .base.versions import check_version

logger = logging.getLogger("accel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded(SequenceOptions):
    """Options of ``sharded``.

    Args:
        broadcast_buffers: broadcast rank 0's buffers once per step.
    """

    broadcast_buffers: bool = True


# -- weights ------------------------------------------------------------------------------------


@final
class FlatWeights:
    """Trainable parameters in OSS's flat buffers, one per owner."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
        # Otherwise fairscale's default arguments would keep the process group alive.
        with unseen_group():
            from fairscale.optim.oss import OSS  # type: ignore[import-untyped,unused-ignore]
        # OSS assigns owners in this order. From large to small balances them best.
        ordered = sorted(parameters, key=lambda p: -p.numel())
        self._oss = OSS([{"params": ordered}], optim=lambda groups, **_: optimizer)
        self._oss.group = None
        #: The owner of each parameter, by its ``id``.
        self.rank_of = {id(p): rank for p, rank in self._oss._param_to_rank.items()}
        self._adopt_buffers()

    def refresh(self) -> None:
        """Make the trainable parameters views of new buffers. Local."""
        # OSS would keep the buffer of an owner that has only frozen parameters now.
        self._oss.buckets.clear()
        self._oss.refresh_trainable()
        self._adopt_buffers()

    def _adopt_buffers(self) -> None:
        for by_rank in self._oss.buckets.values():
            for bucket in by_rank.values():
                # Broadcast bytes, because not every process group supports every dtype.
                bucket.buffer = bucket.buffer.view(torch.uint8)
        # OSS would synchronize a GPU before each broadcast. NCCL waits for the stream by itself.
        self._oss._default_device = torch.device("cpu")
        self.flat = list(filter(REQUIRES_GRAD, self._oss.param_groups[0]["params"]))
        self._addresses = list(map(Tensor.data_ptr, self.flat))

    def broadcast(self) -> None:
        """Broadcast the owners' values to all ranks. Collective."""
        # The loop may have assigned `p.data`, for example to evaluate averaged weights.
        if list(map(Tensor.data_ptr, self.flat)) != self._addresses:
            self.refresh()
        self._oss._broadcast_params()
        # backward() of a graph from before the step must raise on all ranks.
        torch.autograd.graph.increment_version(self.flat)

    def release(self) -> None:
        """Give each parameter its own memory again. Local."""
        for p in self.flat:
            p.data = p.data.clone()
        self._oss.buckets.clear()


# -- gradients ----------------------------------------------------------------------------------


@final
class ShardedGradients(Gradients):
    """Gradients that a step or clipping reduces to their owner.

    ``p.grad`` is this rank's share. The gradient is the mean of the ranks'
    shares, and a missing share is zero. A step or clipping leaves the final
    gradient on the owner. Before a backward adds to it, the owner
    multiplies it by the number of ranks, which makes it a share again.
    """

    reduced = deferred = True
    engine: ShardedEngine

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        place = engine.process.place
        self._rank, self._world = place.rank, place.world_size
        #: The owner of each parameter, by the parameter's ``id``. It steps the parameter.
        self.rank_of: dict[int, int] = {}
        #: The optimizers that step only the parameters this rank owns.
        self.optimizers: set[Optimizer] = set()
        #: All flat weights, of every optimizer.
        self.weights: list[FlatWeights] = []
        #: The parameters with a final gradient, by their ``id``. Equal on all ranks.
        self._final: dict[int, nn.Parameter] = {}

    def give_owners(self, optimizer: Optimizer) -> None:
        """Give owners to trainable parameters without an owner. Local."""
        # Parameters that become trainable later get a new OSS, so no optimizer state moves.
        by_dtype = defaultdict[torch.dtype, list[nn.Parameter]](list)
        for p in parameters_of(optimizer) if optimizer in self.optimizers else ():
            is_new = id(p) in self.engine.known and id(p) not in self.rank_of
            if is_new and p.requires_grad and p.numel():
                by_dtype[p.dtype].append(p)
        for parameters in by_dtype.values():
            self.weights.append(FlatWeights(parameters, optimizer))
            self.rank_of |= self.weights[-1].rank_of
        if by_dtype:
            self.engine.holdings.drop_others(optimizer)

    def backward_begins(self) -> None:
        super().backward_begins()
        self._share_final()
        self.buffers.touch()

    @torch.no_grad()
    def _share_final(self) -> None:
        """Turn final gradients into shares before a backward. Local."""
        for key, p in self._final.items():
            if self.rank_of[key] == self._rank and p.grad is not None:
                p.grad.mul_(self._world)
        self._final.clear()

    def pending(self) -> bool:
        """True, because one rank doesn't know about the others."""
        return self.engine.distributed and self.engine.started

    def settle(self, optimizer: Optimizer | None = None) -> None:
        engine = self.engine
        if not engine.distributed:
            return
        what, parameters = "the reduction of gradients", engine.parameters
        if optimizer is not None:
            # An optimizer that was not given to setup may also have parameters of other models.
            parameters = [p for p in parameters_of(optimizer) if id(p) in engine.known]
            what = f"a step of {type(optimizer).__name__} with {len(parameters)} parameters"
            # A param_group may have been added after setup.
            self.give_owners(optimizer)
        rank_of = self.rank_of if optimizer in self.optimizers else {}
        self._reduce(what, parameters, rank_of)

    def finalize(self, what: str, parameters: Sequence[Tensor]) -> None:
        self._reduce(what, self.engine.parameters, self.rank_of)

    def _reduce(
        self, what: str, parameters: Sequence[nn.Parameter], rank_of: Mapping[int, int]
    ) -> None:
        """Reduce shares to final gradients, on owners if any. Collective."""
        if not rank_of:
            self._share_final()
        # A rank may have run no backward, if its batch had nothing to train on.
        what = f"{what} ({self.engine.label})"
        by_rank = agree(what, (held_here(parameters), self.buffers.stale))
        masks, stale = zip(*by_rank, strict=True)
        if any(stale):
            self.buffers.synchronize()
        names = self.engine.holdings.parameter_names
        indices = held_by_any(what, masks, [names[id(p)] for p in parameters])
        everywhere: list[Tensor] = []
        by_owner: list[list[Tensor]] = [[] for _ in range(self._world)]
        for index in indices:
            p = parameters[index]
            # A final gradient is on its owner only. If more ranks have it, the loop assigned it.
            if id(p) in self._final and sum(mask[index] for mask in masks) == 1:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            owner = rank_of.get(id(p))
            (everywhere if owner is None else by_owner[owner]).append(p.grad)
        add = functools.partial(dist.all_reduce, group=self.process.group)
        average_(everywhere, self._world, add)
        reduce_to_owners(by_owner, self._rank, self.process.group)
        for p in map(parameters.__getitem__, indices):
            if id(p) in rank_of:
                self._final[id(p)] = p
                # Without a gradient, the optimizer skips it on this rank and creates no state.
                if rank_of[id(p)] != self._rank:
                    p.grad = None

    def parts(self, parameters: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return gradients to count in a norm, and uncounted copies. Local."""
        counted: list[Tensor] = []
        copies: list[Tensor] = []
        for p in parameters:
            if p.grad is not None:
                counts = self._rank == 0 or id(p) in self._final
                (counted if counts else copies).append(p.grad)
        return counted, copies

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """Broadcast stepped parameters from owners. Collective."""
        if optimizer not in self.optimizers:
            return
        rest = {id(p): p for p in parameters_of(optimizer) if id(p) in self._final}
        for weights in self.weights:
            if not weights.rank_of.keys().isdisjoint(rest):
                weights.broadcast()
                for p in weights.flat:
                    rest.pop(id(p), None)
        # Parameters frozen with a gradient of zeros are stepped too, but are in no flat buffer.
        for key, p in rest.items():
            broadcast_([p.data], None, self.rank_of[key])


# -- the engine ---------------------------------------------------------------------------------


@final
class ShardedHoldings(Holdings):
    """Optimizer state on owners, or on every rank without an owner."""

    engine: ShardedEngine

    def partial(self, optimizer: Optimizer | None) -> bool:
        return optimizer in self.engine.gradients.optimizers

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        entries = super().entries(optimizer)
        if not self.partial(optimizer):
            return entries
        rank, rank_of = self.engine.process.place.rank, self.engine.gradients.rank_of
        return [entry for entry in entries if rank_of.get(id(entry.parameter), rank) == rank]


@final
class ShardedEngine(Engine):
    """Runs the module. Ranks keep the optimizer state they own."""

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
            refuse_overlaps(module, cls.name)

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse:
        """Assign owners as OSS does: the rank with the fewest elements."""
        sizes, owned = [0] * world_size, [MemoryUse()] * world_size
        uses: list[MemoryUse] = []
        for tensor in sorted(tensors, key=lambda tensor: -tensor.numel):
            is_split = tensor.optimizer is not None and tensor.trainable
            uses.append(tensor.use(1, not is_split, not is_split))
            if is_split:
                owner = sizes.index(min(sizes))
                sizes[owner] += tensor.numel
                owned[owner] = add_uses([owned[owner], tensor.use(0)])
        return add_uses([*uses, max(owned, key=lambda use: use.total)])

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        if not self.distributed:
            return
        kind = type(optimizer)
        if kind.__module__.startswith("torch.optim.") and not issubclass(kind, LBFGS):
            check_version("sharded", "fairscale", "0.4.12", "0.4.13")
            self.gradients.optimizers.add(optimizer)
        else:
            text = "backend='sharded' saves no memory with %s. Use an optimizer of torch.optim."
            logger.warning(text, kind.__name__)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        super().start(optimizers)
        for optimizer in self.optimizers:
            self.gradients.give_owners(optimizer)

    def rebuild(self) -> None:
        for weights in self.gradients.weights:
            weights.refresh()
        for optimizer in self.optimizers:
            self.gradients.give_owners(optimizer)

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        for weights in self.gradients.weights:
            weights.release()

    def run(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        return function(*args, **kwargs)
