"""Who owns which parameter, what is known of its gradient, and the part of an optimizer's state that a rank keeps."""

from __future__ import annotations

import functools
import itertools
import weakref
import zlib
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...handles import Slot
from ...process.startup import unseen_group
from ...shard import StateEntry
from ..base.holdings import Holdings
from ..base.private import require

#: What is known of a gradient, in the order in which one rank's knowledge outranks another's.
NONE, EVERYWHERE, OWNED, LOCAL, SPARSE = range(5)


#: The names of fairscale that this backend relies on, and the versions with which its tests were run.
_PRIVATE: Final = (("fairscale.optim.oss:OSS.", "partition_parameters", "which rank steps which parameter"),)
_RAN: Final = ("0.4.12", "0.4.13")


@final
class Owners:
    """Gives each parameter to one rank by fairscale's partition: the next parameter to the rank that has the least.

    Asked again with more parameters, it leaves those where they are that have an owner. All ranks must ask alike.

    Attributes:
        rank_of: the owner's rank, by ``id`` of the parameter.
        digest: differs where ranks did not ask alike.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._order: list[SimpleNamespace] = []
        self._hooks: list[RemovableHandle] = []
        self.rank_of: dict[int, int] = {}
        self.digest = 0

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give an owner to those that have none."""
        new = list({id(p): p for p in parameters if id(p) not in self.rank_of}.values())
        if not new:
            return
        with unseen_group():
            require("backend 'sharded'", "fairscale", _PRIVATE, _RAN)
            from fairscale.optim.oss import OSS  # type: ignore[import-untyped,import-not-found,unused-ignore]

        # Trainable ones first: these have gradients and state. From large to small, which balances best.
        new.sort(key=lambda p: (not p.requires_grad, -p.numel()))
        # Stand-ins, since a frozen parameter would count as one element, and may be trained later.
        self._order += [SimpleNamespace(key=id(p), numel=p.numel().__int__, requires_grad=True) for p in new]
        request = SimpleNamespace(
            world_size=self._world, _partition_parameters=[], param_groups=[{"params": self._order}]
        )
        for rank, groups in enumerate(OSS.partition_parameters(request)):
            self.rank_of.update((parameter.key, rank) for parameter in groups[0]["params"])
        self.digest = zlib.crc32(str([self.digest, *(p.shape for p in new)]).encode())
        self._hooks += [spread_before_accumulation(p, self._world) for p in new if self.owns(p) and _has_gradients(p)]

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is this rank's."""
        return self.rank_of.get(id(parameter)) == self._rank

    def close(self) -> None:
        """Remove the hooks on the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _has_gradients(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


# -- gradients --------------------------------------------------------------------------------------------------------


def knowledge(gradient: torch.Tensor | None, touched: bool) -> int:
    """What this rank knows of a gradient; ``touched`` says that a backward added to it since it was noted."""
    if gradient is None:
        return NONE
    if gradient.is_sparse:
        return SPARSE
    noted: int | None = None if touched else Slot.get(gradient)
    return LOCAL if noted is None else noted


def complete(parameters: Iterable[nn.Parameter], world: int) -> list[torch.Tensor]:
    """Make this rank's gradients ones whose means with the other ranks' are the final ones, each in memory of its own."""
    gradients = []
    places: set[int] = set()
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif Slot.get(parameter.grad) == OWNED:
            spread(parameter.grad, world)
        # A loop may assign one to several parameters, and it is changed in place.
        if parameter.grad.data_ptr() in places:
            parameter.grad = parameter.grad.clone()
        places.add(parameter.grad.data_ptr())
        gradients.append(parameter.grad)
    return gradients


def spread(gradient: torch.Tensor, world: int) -> None:
    """Make an owner's final gradient one whose mean over the ranks, of which the others have none, is that gradient."""
    with torch.no_grad():
        gradient.mul_(world)
    Slot.clear(gradient)


def spread_before_accumulation(parameter: nn.Parameter, world: int) -> RemovableHandle:
    """Keep the mean over the ranks right where a backward adds to a gradient that only its owner still has."""
    reference = weakref.ref(parameter)  # a hook that holds its parameter would keep it for ever

    def before(_: torch.Tensor) -> None:
        held = reference()
        if held is not None and held.grad is not None and Slot.get(held.grad) == OWNED:
            spread(held.grad, world)

    trainable = parameter.requires_grad
    # torch wants requires_grad to register the hook, which then also serves a later unfreeze.
    handle: RemovableHandle = parameter.requires_grad_(True).register_hook(before)
    parameter.requires_grad_(trainable)
    return handle


# -- optimizer state --------------------------------------------------------------------------------------------------


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of its groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@final
class ShardedHoldings(Holdings):
    """Of an optimizer that can be split, the state of the parameters that this rank owns."""

    undoes_writes = True

    def partial(self, optimizer: Optimizer | None) -> bool:
        """Never the model."""
        return optimizer is not None and bool(self.engine.splits(optimizer))

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        """Of what this rank owns."""
        held = super().entries(optimizer)
        if not self.partial(optimizer):
            return held
        owners = self.engine.gradients.owners
        owners.take(parameters_of(optimizer))
        return [entry for entry in held if owners.owns(entry.parameter)]

    def attach(self, optimizer: Optimizer) -> None:
        """Never take its state for the whole from now on; the raw optimizer keeps this rank's part of what it loads."""
        self.guard.watch(optimizer, functools.partial(_own_of, weakref.ref(self)))

    def drop(self, optimizer: Optimizer) -> None:
        """Let go of the state of other ranks' parameters."""
        own = {id(entry.parameter) for entry in self.entries(optimizer)}
        for parameter in parameters_of(optimizer):
            if id(parameter) not in own:
                optimizer.state.pop(parameter, None)


def _own_of(
    reference: weakref.ref[ShardedHoldings], optimizer: Optimizer, full: Mapping[str, Any]
) -> dict[str, Any] | None:
    """This rank's part of a whole state. Where the numbers of parameters differ, torch's own check raises."""
    if (holdings := reference()) is None:
        return None
    own = {id(entry.parameter) for entry in holdings.entries(optimizer)}
    numbers = itertools.chain.from_iterable(group["params"] for group in full["param_groups"])
    mine = {n for n, p in zip(numbers, parameters_of(optimizer), strict=False) if id(p) in own}
    return {**full, "state": {k: v for k, v in full["state"].items() if not isinstance(k, int) or k in mine}}
