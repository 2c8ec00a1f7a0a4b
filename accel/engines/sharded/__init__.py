"""``sharded``: optimizer state and final gradients split over the ranks, as fairscale's OSS does, exact in every loop."""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from ...errors import BackendError, RankMismatchError
from ...gradients.log import even_frozen, remove_hooks
from ...handles import HiddenAttribute
from ...process import Process
from ...process.control import agree
from ...process.packing import average_, reduce_to_owners
from ...process.startup import unseen_group
from ...shard import StateEntry, parameters_of
from ..base.engine import Engine, SequenceOptions
from ..base.gradients import Gradients, refuse_scripts
from ..base.holdings import Holdings
from ..base.memory import MemoryUse, TensorSize, add_uses
from ..base.step import refuse_steps
from ..base.versions import check_version

logger = logging.getLogger("accel")

#: What is known of a gradient, in the order in which one rank's knowledge outranks another's.
NONE, EVERYWHERE, OWNED, REPLACED, LOCAL, SPARSE = range(6)


# -- gradients --------------------------------------------------------------------------------------------------------


def knowledge(gradient: torch.Tensor | None) -> int:
    """What this rank knows of a gradient."""
    if gradient is None:
        return NONE
    if gradient.is_sparse:
        return SPARSE
    if HiddenAttribute.KEY not in gradient.__dict__:
        return LOCAL
    noted: int | None = HiddenAttribute.get(gradient)
    return LOCAL if noted is None else noted


def complete(parameters: Sequence[nn.Parameter], world: int) -> list[torch.Tensor]:
    """Make this rank's gradients ones whose means with the other ranks' are the final ones, each in memory of its own."""
    gradients: list[Any] = [p.grad for p in parameters]
    for n, gradient in enumerate(gradients):
        if gradient is None:
            gradients[n] = parameters[n].grad = torch.zeros_like(parameters[n])
        elif HiddenAttribute.KEY in gradient.__dict__ and HiddenAttribute.get(gradient) == OWNED:
            spread(gradient, world)
    if len({g.data_ptr() for g in gradients}) < len(gradients):
        places: set[int] = set()
        for n, gradient in enumerate(gradients):
            # A loop may assign one to several parameters, and it is changed in place.
            if gradient.data_ptr() in places:
                gradients[n] = parameters[n].grad = gradient.clone()
            places.add(gradients[n].data_ptr())
    return gradients


def spread(gradient: torch.Tensor, world: int) -> None:
    """Make an owner's final gradient one whose mean over the ranks, of which the others have none, is that gradient."""
    with torch.no_grad():
        gradient.mul_(world)
    HiddenAttribute.clear(gradient)


def spread_before_accumulation(parameter: nn.Parameter, world: int) -> RemovableHandle:
    """Keep the mean over the ranks right where a backward adds to a gradient that is final, which it is not any more then.

    Every backward pays for the hook, so that only parameters get it whose gradients a loop has kept over a step or clipping.
    """
    reference = weakref.ref(parameter)  # a hook that holds its parameter would keep it for ever

    def before(_: torch.Tensor) -> None:
        held = reference()
        if held is not None and held.grad is not None and (noted := HiddenAttribute.get(held.grad)) is not None:
            spread(held.grad, world) if noted == OWNED else HiddenAttribute.clear(held.grad)

    return even_frozen(parameter, parameter.register_hook, before)


# -- optimizer state --------------------------------------------------------------------------------------------------


@final
class ShardedHoldings(Holdings):
    """Of an optimizer that can be split, the state of the parameters that this rank owns."""

    def partial(self, optimizer: Optimizer | None) -> bool:
        return optimizer is not None and bool(self.engine.splits(optimizer))

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        held = super().entries(optimizer)
        if not self.partial(optimizer):
            return held
        owners = self.engine.gradients.owners
        owners.take(parameters_of(optimizer))
        return [entry for entry in held if owners.owns(entry.parameter)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded(SequenceOptions):
    """Options of ``sharded``.

    Args:
        broadcast_buffers: all ranks take rank 0's buffers once a step.
    """

    broadcast_buffers: bool = True


@final
class ShardedGradients(Gradients):
    """Backward stays local; before a step each gradient goes to its owner, and after it the new values come back.

    A gradient carries a note of where it is final (``EVERYWHERE``, ``OWNED``); without one it is this rank's
    own. So all that the loop may do with gradients in between, or not do on some ranks, is known at the step.
    """

    reduced = partial = deferred = True
    engine: ShardedEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._rank, self._world = engine.process.place.rank, engine.process.place.world_size
        self._index: dict[int, int] = {}
        with unseen_group():
            check_version("sharded", "fairscale", "0.4.12", "0.4.13")
            from .owners import Owners
        self.owners = Owners(self._rank, self._world)
        #: By optimizer (one may step or write inside of another), the parameters that their owners have stepped, or may
        #: have, and the other ranks do not have yet.
        self._unpublished: dict[int, set[int]] = {}
        #: By identity, the parameters that were left final gradients here since the last backward, with where these are; and,
        #: of those whose gradients were still there when the next one came, the hooks.
        self._left: dict[int, tuple[nn.Parameter, int]] = {}
        self._spreading: dict[int, RemovableHandle] = {}

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        super().follow(parameters)
        self._index = {id(p): i for i, p in enumerate(parameters)}

    def begin(self, run: object) -> None:
        """Before a backward: see to the gradients that a loop keeps from before the last step or clipping. Local."""
        for key, (parameter, _) in self._left.items():
            if parameter.grad is not None and key not in self._spreading:
                self._spreading[key] = spread_before_accumulation(parameter, self._world)
        self._left.clear()

    def backward_begins(self) -> None:
        super().backward_begins()
        self.begin(None)

    def pending(self) -> bool:
        """Always: what other ranks have is known only together."""
        return self.engine.distributed and self.engine.started

    def settle(self, optimizer: Optimizer | None = None) -> None:
        """Bring the gradients of one optimizer to their owners; all of them to every rank for code that looks at ``p.grad``."""
        engine = self.engine
        if not engine.distributed:
            super().settle()
            return
        if optimizer is None:
            self._settle("the gradients", range(len(engine.parameters)), everywhere=True, weakest=OWNED)
            return
        split = self.steps_part(optimizer)
        indices = [self._index[id(p)] for p in parameters_of(optimizer) if id(p) in self._index]
        number = [*engine.steppers, id(optimizer)].index(id(optimizer))
        what = f"a step of {type(optimizer).__name__} (optimizer {number}, {len(indices)} parameters)"
        live = self._settle(what, indices, everywhere=not split, weakest=LOCAL if split else OWNED)
        if split:
            self._unpublished.setdefault(id(optimizer), set()).update(live)

    def _settle(self, what: str, indices: Sequence[int], *, everywhere: bool, weakest: int) -> list[int]:
        """Bring the gradients that are known as ``weakest`` or less to their owners, or everywhere.

        Returns the parameters that have a gradient on any rank.
        """
        engine = self.engine
        # As long as this list lives, torch need not make new Python objects of them at each use.
        mine = [engine.parameters[i].grad for i in indices]
        codes = self._agree(what, [engine.parameters[i] for i in indices], mine)
        if SPARSE in codes:
            names = [engine.names[i] for i, code in zip(indices, codes, strict=True) if code == SPARSE]
            raise BackendError(
                f"backend {engine.name!r} cannot split the sparse gradient of {', '.join(names[:5])}: use dense gradients "
                "(nn.Embedding(sparse=False))"
            )
        live = [i for i, code in zip(indices, codes, strict=True) if code != NONE]
        if len(self.owners.rank_of) < len(engine.parameters):
            self.owners.take(engine.parameters[i] for i in live)
        pending = [engine.parameters[i] for i, code in zip(indices, codes, strict=True) if code >= weakest]
        gradients = complete(pending, self._world)
        if everywhere:
            average_(gradients, self._world, lambda flat: dist.all_reduce(flat, group=self.process.group))
            for parameter, gradient in zip(pending, gradients, strict=True):
                self._leave(parameter, gradient, EVERYWHERE)
        else:
            reduce_to_owners(self.owners.by_owner(pending, gradients), self._rank, self.process.group)
            rank_of, rank = self.owners.rank_of, self._rank
            for parameter in [engine.parameters[i] for i in live]:
                if rank_of[id(parameter)] != rank:  # an optimizer skips what has no gradient, and makes no state for it
                    parameter.grad = None
                elif (final := parameter.grad) is not None:
                    self._leave(parameter, final, OWNED)
        return live

    def _leave(self, parameter: nn.Parameter, gradient: torch.Tensor, where: int) -> None:
        HiddenAttribute.put(gradient, where)
        self._left[id(parameter)] = parameter, where

    def _known(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> int:
        """``knowledge``, and whether a loop has given its owner another one in the place of the final gradient."""
        known = knowledge(gradient)
        return REPLACED if known == LOCAL and self._left.get(id(parameter), (None, NONE))[1] == OWNED else known

    def _agree(self, what: str, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> bytes:
        """What is known of each gradient on all ranks together; brings stale buffers up to date."""
        mine = bytes(map(self._known, parameters, gradients) if self._left else map(knowledge, gradients))
        if LOCAL in mine:
            self.buffers.touch()
        what = f"{what} of {self.engine.label}"
        told = agree(what, (zlib.compress(mine, 1), self.buffers.stale, self.owners.digest))
        if len({digest for *_, digest in told}) > 1:
            raise RankMismatchError(f"{what}: the ranks gave owners to different parameters; add groups on every rank")
        if any(stale for _, stale, _ in told):
            self.buffers.synchronize()
        found = {code for code, *_ in told}
        codes = mine if len(found) == 1 else bytes(map(max, *map(zlib.decompress, found)))
        if REPLACED not in codes:
            return codes
        for code, gradient in zip(codes, gradients, strict=True):
            # The other ranks have none, as after a clip: `p.grad = p.grad * 0.5` where there is one.
            if code == REPLACED and gradient is not None:
                HiddenAttribute.put(gradient, OWNED)
        return codes.replace(bytes([REPLACED]), bytes([OWNED]))

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        parameters = self.engine.parameters
        if not self.engine.distributed or not self.engine.optimizers:
            return super().clip(max_norm, norm_type, error_if_nonfinite)
        self._settle("clipping by accel.clip_grad_norm_", range(len(parameters)), everywhere=False, weakest=LOCAL)
        return self.clip_parts(max_norm, norm_type, error_if_nonfinite)

    def parts(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients that are on their owner alone."""
        return [p.grad for p in parameters if p.grad is not None], []

    def after_step(self, optimizer: Optimizer) -> None:
        self.publish(optimizer)

    def steps_part(self, optimizer: Optimizer) -> bool:
        return self.engine.splits(optimizer)

    def publish(self, optimizer: Optimizer | None = None) -> None:
        """Give every rank what the owners have stepped, by this optimizer or by any. Collective where there is something."""
        if not self._unpublished:
            return
        keys = list(self._unpublished) if optimizer is None else [id(optimizer)]
        indices: set[int] = set().union(*(self._unpublished.get(key, ()) for key in keys))
        if indices:
            self.owners.publish([self.engine.parameters[i] for i in sorted(indices)], self.process.group)
        for key in keys:
            self._unpublished.pop(key, None)

    def let_go(self) -> None:
        """Of the parameters, which get memory of their own again."""
        self.owners.release()
        remove_hooks(list(self._spreading.values()))
        self._left.clear()
        self._spreading.clear()


@final
class ShardedEngine(Engine):
    """The module runs as it is; optimizers whose kind allows keep on each rank the state of its own parameters."""

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

    @classmethod
    def predict(cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int) -> MemoryUse:
        """Deal the optimizers' parameters out, in the order in which ``Owners`` does.

        A parameter's gradient and state stay on its owner. Without an optimizer, every rank
        keeps the gradient.
        """
        dealt = [tensor for tensor in tensors if tensor.optimizer is not None]
        dealt.sort(key=lambda t: (t.optimizer, not t.trainable, -t.numel))
        loads = [0] * world_size
        owned: list[list[TensorSize]] = [[] for _ in loads]
        for tensor in dealt:
            rank = loads.index(min(loads))
            loads[rank] += tensor.numel
            owned[rank].append(tensor)
        uses = []
        for own in owned:
            here = {tensor.name for tensor in own}
            kept = [t.name in here or t.optimizer is None for t in tensors]
            uses.append(add_uses(t.use(1, k, k) for t, k in zip(tensors, kept, strict=True)))
        return max(uses, key=lambda use: use.total)

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        if self.distributed and not self.splits(optimizer):
            logger.warning(
                "%s steps whole on every rank, which saves no memory: backend %r splits torch's own optimizers, but not "
                "LBFGS",
                type(optimizer).__name__,
                self.name,
            )

    def splits(self, optimizer: Optimizer) -> bool:
        return id(optimizer) in self.steppers and self._splittable(optimizer)

    def _splittable(self, optimizer: Optimizer) -> bool:
        own = type(optimizer).__module__.startswith("torch.optim.")
        return self.distributed and own and not isinstance(optimizer, LBFGS)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Rank 0's weights; then each rank keeps the state of its own parameters only, and weights lie together by owner."""
        super().start(optimizers)
        for optimizer in filter(self.splits, optimizers):
            self.holdings.drop_others(optimizer)
        if self.distributed:
            self.gradients.owners.flatten(self.label)

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                HiddenAttribute.clear(parameter.grad)
        try:
            for optimizer in filter(self._splittable, optimizers):
                if self.ended:
                    refuse_steps(optimizer, self.ended)
                elif self.started:
                    self.holdings.give_back("the whole state of an optimizer", optimizer, self.named)
        finally:
            self.gradients.let_go()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is not self.entry:
            return function(*args, **kwargs)
        self.gradients.publish()  # a step raised half-way
        out = function(*args, **kwargs)
        if torch.is_grad_enabled():
            self.gradients.begin(None)  # which not every way to begin one calls
            self.gradients.buffers.touch()
        return out
