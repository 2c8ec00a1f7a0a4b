"""Who owns which parameter, what is known of its gradient, and the part of an optimizer's state that a rank keeps."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...errors import OptimizerError
from ...handles import Slot
from ...process.control import agree
from ...process.startup import unseen_group
from ...shard import is_sharded
from .._copies import allow_copies, refuse_copies
from ..private import require
from .exchange import broadcast_from_owners

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
class SplitState:
    """Hooks on an optimizer that has the state of this rank's parameters only: it is never taken for the whole."""

    def __init__(self, optimizer: Optimizer, owners: Owners) -> None:
        self._owners = owners
        self._whole = False
        self._optimizer = weakref.ref(optimizer)
        refuse_copies(optimizer)
        self._hooks = [
            optimizer.register_state_dict_pre_hook(self._refuse),
            optimizer.register_load_state_dict_pre_hook(self._keep_own),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        if (optimizer := self._optimizer()) is not None:
            allow_copies(optimizer)

    def drop(self, optimizer: Optimizer) -> None:
        """Let go of the state of other ranks' parameters."""
        for parameter in self.parameters(optimizer):
            if not self._owners.owns(parameter):
                optimizer.state.pop(parameter, None)

    def own(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The optimizer's parameters that are this rank's."""
        return list(filter(self._owners.owns, self.parameters(optimizer)))

    def parameters(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """All of the optimizer's, each of which has an owner from now on."""
        parameters = parameters_of(optimizer)
        self._owners.take(parameters)
        return parameters

    def full_state_dict(self, optimizer: Optimizer, gather: Callable[[Optimizer], None]) -> dict[str, Any]:
        """The whole ``state_dict``, for which ``gather`` brings the state of all ranks."""
        try:
            gather(optimizer)
            self._whole = True
            return optimizer.state_dict()
        finally:
            self._whole = False
            self.drop(optimizer)

    def _refuse(self, optimizer: Optimizer) -> None:
        if not self._whole:
            raise OptimizerError(
                f"this rank has only its own part of the state of {type(optimizer).__name__}, so that state_dict() would "
                "miss the rest: call accel.full_state_dict(optimizer) on every rank, or accel.save"
            )

    def _keep_own(self, optimizer: Optimizer, full: Mapping[str, Any]) -> dict[str, Any]:
        owned = map(self._owners.owns, self.parameters(optimizer))
        numbers = itertools.chain.from_iterable(group["params"] for group in full["param_groups"])
        # Where the numbers of parameters differ, torch's own check raises.
        mine = {number for number, own in zip(numbers, owned, strict=False) if own}
        return {**full, "state": {k: v for k, v in full["state"].items() if not isinstance(k, int) or k in mine}}


def gather_state(optimizer: Optimizer, owners: Owners, rank: int, group: dist.ProcessGroup | None, label: str) -> None:
    """Give every rank the state of all parameters of the model that ``label`` names. Collective."""
    parameters = parameters_of(optimizer)
    owners.take(parameters)
    # Shapes and plain values by pickle, tensors' contents in flat pieces.
    mine = {
        i: {k: _described(v) for k, v in optimizer.state[p].items()}
        for i, p in enumerate(parameters)
        if owners.owns(p) and p in optimizer.state
    }
    everyone = agree(f"gathering the state of an optimizer ({label})", mine)
    tensors: list[list[torch.Tensor]] = [[] for _ in everyone]
    for owner, theirs in enumerate(everyone):
        for i, entries in theirs.items():
            p = parameters[i]
            if owner != rank:
                optimizer.state[p] = {k: _made(v, there, p.device) for k, (v, there) in entries.items()}
            tensors[owner] += filter(is_sharded, optimizer.state[p].values())
    broadcast_from_owners(tensors, rank, group)
    # In the same order on all ranks.
    whole: dict[torch.Tensor, Any] = {p: optimizer.state.pop(p) for p in parameters if p in optimizer.state}
    optimizer.state.update(whole)


def _described(value: Any) -> tuple[Any, bool]:
    """What other ranks make the same entry of, and whether it lies beside the parameter."""
    if not isinstance(value, torch.Tensor):
        return value, False
    return value.to("meta" if is_sharded(value) else "cpu"), value.device.type != "cpu"


def _made(value: Any, there: bool, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    place = device if there else torch.device("cpu")
    return torch.empty_like(value, device=place) if value.is_meta else value.to(place)
