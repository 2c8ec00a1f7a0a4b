"""``sharded``: optimizer state and final gradients are divided by parameter, as fairscale's OSS does.

fairscale's OSS chooses an owner rank for each parameter, keeps the weights in flat buffers, and broadcasts them after
a step (``_oss.py``). accel reduces each gradient to its owner before the step, and the user's own optimizer steps the
parameters that have a gradient. OSS's own ``step``, ``clip_grad_norm`` and ``state_dict``, and ShardedDataParallel,
aren't used, because they are wrong if a loop freezes parameters or keeps gradients.
"""

from __future__ import annotations

import functools
import itertools
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
from .base.engine import Engine, SequenceOptions
from .base.gradients import Gradients, other_parameters, refuse_overlaps, refuse_scripts
from .base.holdings import Holdings
from .base.memory import MemoryUse, TensorSize, add_uses
from .base.step import refuse_steps
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
    """Gradients that stay on their rank until a step or clipping, and then are on their owner alone.

    ``p.grad`` is this rank's share, and the gradient is the mean of the ranks' shares. A missing share is zero. A
    step or clipping leaves the gradient itself on the owner and None on the other ranks. The owner multiplies it by
    the number of ranks, which makes it a share again, before anything is added to it.
    """

    reduced = partial = deferred = True
    engine: ShardedEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        place = engine.process.place
        self._rank, self._world = place.rank, place.world_size
        self._names: dict[int, str] = {}
        #: The owners of the parameters of each optimizer that can be split.
        self.shards: dict[Optimizer, Shards] = {}
        self._loads = [0] * self._world
        #: The parameters whose gradient, not a share, this rank has as the owner. By ``id``, with that gradient.
        self._final: dict[int, tuple[nn.Parameter, weakref.ref[torch.Tensor]]] = {}
        #: The parameters of each optimizer that has begun a step and whose new values the other ranks don't have yet.
        self._stepped: dict[Optimizer, list[nn.Parameter]] = {}
        self.listener = self

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        super().follow(parameters)
        self._names = dict(zip(map(id, parameters), self.engine.names, strict=True))

    def begin(self, run: object) -> None:
        """Make this rank's final gradients shares, because a backward is about to add to them. Local."""
        _multiply([p.grad for p, _ in self._final.values() if p.grad is not None], self._world)
        self._final.clear()
        self.buffers.touch()

    def end(self, run: object) -> None:
        """Do nothing. The next step sees what a backward has left."""

    def pending(self) -> bool:
        """True on several ranks, because only the ranks together know who has a gradient."""
        return self.engine.distributed and self.engine.started

    def settle(self, optimizer: Optimizer | None = None) -> None:
        engine = self.engine
        if not engine.distributed:
            super().settle()
        elif optimizer is None:
            self._average("the gradients", engine.parameters)
        else:
            self._settle_step(optimizer)
            self.end_held_back()

    def end_backward(self, indices: Sequence[int]) -> None:
        what = f"a backward ({len(indices)} parameters in no optimizer)"
        self._average(what, [self.engine.parameters[i] for i in indices])

    def _settle_step(self, optimizer: Optimizer) -> None:
        """Bring the gradients of one optimizer to their owners, or to every rank if it steps whole."""
        parameters = [p for p in parameters_of(optimizer) if id(p) in self._names]
        number = [*self.engine.steppers, id(optimizer)].index(id(optimizer))
        what = f"a step of {type(optimizer).__name__} (optimizer {number}, {len(parameters)} parameters)"
        shards = self.shards.get(optimizer)
        if shards is None:
            self._average(what, parameters)
            return
        masks, live, moved = self._agree(what, parameters, shards.moved())
        if moved:
            shards.refresh()
        stepped = [parameters[i] for i in live]
        if any(id(p) not in shards.owner for p in stepped):
            # The group was added to the optimizer after setup.
            self.assign(optimizer, [*_trainable(optimizer), *stepped])
        self._reduce(parameters, masks, live, shards.owner)
        self._stepped[optimizer] = stepped

    def _average(self, what: str, parameters: Sequence[nn.Parameter]) -> None:
        """Give every rank the gradients. Collective."""
        masks, live, _ = self._agree(what, parameters)
        self._reduce(parameters, masks, live, {})

    def _bring_to_owners(self, what: str) -> None:
        """Give each owner the gradients of its parameters, and every rank those that no rank owns. Collective."""
        owner: dict[int, int] = {}
        for shards in self.shards.values():
            owner |= shards.owner
        parameters = self.engine.parameters
        masks, live, _ = self._agree(what, parameters)
        self._reduce(parameters, masks, live, owner)

    def _agree(
        self, what: str, parameters: Sequence[nn.Parameter], moved: bool = False
    ) -> tuple[list[bytes], list[int], bool]:
        """Return which gradients each rank has, the numbers of those that any has, and if weights moved on any rank.

        Brings stale buffers up to date. Collective.

        Raises:
            BackendError: a rank has a sparse gradient. Every rank raises it.
        """
        what = f"{what} of {self.engine.label}"
        from_ranks = agree(what, (held_here(parameters), self.buffers.stale, moved))
        masks = [mask for mask, _, _ in from_ranks]
        live = held_by_any(what, masks, [self._names[id(p)] for p in parameters])
        if any(stale for _, stale, _ in from_ranks):
            self.buffers.synchronize()
        return masks, live, any(moved for _, _, moved in from_ranks)

    def _reduce(
        self, parameters: Sequence[nn.Parameter], masks: Sequence[bytes], live: Sequence[int], owner: Mapping[int, int]
    ) -> None:
        """Replace shares by gradients, which are on the owner alone or, if there is no owner, on every rank. Collective."""
        finals: list[torch.Tensor] = []
        alone: list[torch.Tensor] = []
        everywhere: list[torch.Tensor] = []
        by_owner: list[list[torch.Tensor]] = [[] for _ in range(self._world)]
        for number in live:
            parameter = parameters[number]
            target = owner.get(id(parameter))
            num_shares = sum(mask[number] for mask in masks)
            _, final = self._final.pop(id(parameter), (None, None))
            if target is not None and num_shares == masks[target][number] == 1:
                # Nothing to send: the owner's gradient is final, or the only share.
                if target == self._rank and final is None:
                    alone.append(parameter.grad)
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif final is not None and (num_shares == 1 or final() is parameter.grad):
                # Otherwise the loop has assigned a new share on all ranks.
                finals.append(parameter.grad)
            (everywhere if target is None else by_owner[target]).append(parameter.grad)
        _multiply(finals, self._world)
        _multiply(alone, 1 / self._world)
        average_(everywhere, self._world, lambda flat: dist.all_reduce(flat, group=self.process.group))
        reduce_to_owners(by_owner, self._rank, self.process.group)
        for parameter in (parameters[number] for number in live):
            target = owner.get(id(parameter))
            if target == self._rank:
                self._final[id(parameter)] = parameter, weakref.ref(parameter.grad)
            elif target is not None:
                parameter.grad = None  # The optimizer skips the parameter, and makes no state for it.
        if self.log.entries:
            self.log.fold()

    # -- clipping -----------------------------------------------------------------------------------

    @property
    def in_parts(self) -> bool:
        return self.engine.distributed

    def finalize(self, what: str, parameters: Sequence[torch.Tensor]) -> None:
        names = sorted({self._names[id(p)] for p in parameters})
        self.engine.compare(what, names, other_parameters)
        self._bring_to_owners(what)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        if not self.engine.distributed:
            return super().clip(max_norm, norm_type, error_if_nonfinite)
        self._bring_to_owners("clipping by accel.clip_grad_norm_")
        return self.clip_parts(max_norm, norm_type, error_if_nonfinite)

    def parts(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients that this rank counts, and those that rank 0 counts because every rank has them. Local."""
        counted: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                counts = self._rank == 0 or id(parameter) in self._final
                (counted if counts else copies).append(parameter.grad)
        return counted, copies

    # -- steps --------------------------------------------------------------------------------------

    def assign(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Give owners to parameters that have none, and drop the state that is now another rank's. Local."""
        if self.shards[optimizer].add(parameters):
            self.engine.holdings.drop_others(optimizer)

    def attach(self, optimizer: Optimizer) -> None:
        """Prepare to split the optimizer; ``assign`` follows. Local."""
        with unseen_group():
            check_version("sharded", "fairscale", "0.4.12", "0.4.13")
            from ._oss import Shards
        self.shards[optimizer] = Shards(optimizer, self._loads)

    def steps_part(self, optimizer: Optimizer) -> bool:
        return optimizer in self.shards

    def after_step(self, optimizer: Optimizer) -> None:
        self._publish([optimizer])

    def publish(self) -> None:
        """Give every rank what a step that raised may have changed. Collective if there is something."""
        if self._stepped:
            self._publish(list(self._stepped))

    def _publish(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            if stepped := self._stepped.pop(optimizer, None):
                self.shards[optimizer].broadcast(stepped, self._rank)


def _multiply(gradients: list[torch.Tensor], factor: float) -> None:
    if gradients:
        with torch.no_grad():
            torch._foreach_mul_(gradients, factor)


def _trainable(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for p in parameters_of(optimizer) if p.requires_grad]


# -- optimizer state ----------------------------------------------------------------------------


@final
class ShardedHoldings(Holdings):
    """The state of a split optimizer lies with the owner. A parameter without an owner has its state on every rank."""

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


def _local_state(
    reference: weakref.ref[ShardedHoldings], optimizer: Optimizer, full: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return this rank's part of a full state. If the numbers of parameters differ, torch's own check raises."""
    if (holdings := reference()) is None:
        return None
    local = {id(entry.parameter) for entry in holdings.entries(optimizer)}
    numbers = itertools.chain.from_iterable(group["params"] for group in full["param_groups"])
    kept = {n for n, p in zip(numbers, parameters_of(optimizer), strict=False) if id(p) in local}
    return {**full, "state": {k: v for k, v in full["state"].items() if not isinstance(k, int) or k in kept}}


# -- the engine ---------------------------------------------------------------------------------


@final
class ShardedEngine(Engine):
    """The module runs as it is. Optimizers of ``torch.optim`` keep on each rank the state of the parameters it owns."""

    name = "sharded"
    options_type = Sharded
    requires = {"fairscale": "fairscale>=0.4.12"}
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
    def predict(cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int) -> MemoryUse:
        """Follow OSS, which gives the next parameter to the rank that has the fewest elements."""
        loads = [0] * world_size
        owner: dict[str, int] = {}
        for number in sorted({t.optimizer for t in tensors if t.optimizer is not None}):
            ranks = sorted(range(world_size), key=loads.__getitem__)
            sizes = [0] * world_size
            for tensor in tensors:
                if tensor.optimizer == number and tensor.trainable:
                    smallest = sizes.index(min(sizes))
                    sizes[smallest] += tensor.numel
                    owner[tensor.name] = ranks[smallest]
            for rank, size in zip(ranks, sizes, strict=True):
                loads[rank] += size
        uses = []
        for rank in range(world_size):
            owned = [owner.get(t.name, rank) == rank for t in tensors]
            uses.append(add_uses(t.use(1, here, here) for t, here in zip(tensors, owned, strict=True)))
        return max(uses, key=lambda use: use.total)

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        if not self.distributed:
            return
        if type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS):
            self.gradients.attach(optimizer)
            # The raw optimizer keeps this rank's part of a state that it loads.
            self.holdings.guard.watch(optimizer, functools.partial(_local_state, weakref.ref(self.holdings)))
        else:
            logger.warning(
                "backend='sharded' saves no memory with %s, because every rank steps all of it. Use an optimizer of "
                "torch.optim other than LBFGS.",
                type(optimizer).__name__,
            )

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Take rank 0's weights, and divide them by owner. Collective."""
        super().start(optimizers)
        self._assign_trainable()

    def rebuild(self) -> None:
        self._assign_trainable()
        for shards in self.gradients.shards.values():
            shards.refresh()

    def _assign_trainable(self) -> None:
        for optimizer in self.gradients.shards:
            self.gradients.assign(optimizer, _trainable(optimizer))

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        shards = self.gradients.shards
        try:
            for optimizer in filter(shards.__contains__, optimizers):
                if self.ended:
                    refuse_steps(optimizer, self.ended)
                elif self.started:
                    self.holdings.give_back("the whole state of an optimizer", optimizer, self.named)
        finally:
            for shard in shards.values():
                shard.release()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is self.entry:
            self.gradients.publish()  # If a step raised half-way on this rank, the others wait for its weights.
        return function(*args, **kwargs)
