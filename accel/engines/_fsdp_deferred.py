"""First values for shards of parameters that were built without memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ..deferred import refuse_without_values, reset_own, resetting, without_values
from ..flat import broadcast_
from ._fsdp_shards import cut_if_fits, gather, here


def allocate(module: nn.Module, device: torch.device) -> set[int]:
    """Give shards on the meta device memory; returns the identities of those that now wait for values. Local."""
    names = [name for name, p in module.named_parameters() if p.is_meta]
    if names:
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    parameters = dict(module.named_parameters())
    return {id(parameters[name]) for name in names}


@torch.no_grad()
def initialize(
    module: nn.Module, waiting: set[int], borrowed: dict[int, set[str]], device: torch.device, group: dist.ProcessGroup
) -> None:
    """Rank 0's values by ``reset_parameters``, for one module that has it at a time. Collective.

    ``borrowed`` is ``deferred.borrowing`` of the module. Every rank draws the same random numbers as in one process, and
    no more than that module is whole at a time.
    """
    if not waiting:
        return
    empty = set(waiting)
    for child, reset in resetting(module):
        shards = {id(p): p for p in child.parameters()}
        if waiting.isdisjoint(shards):
            continue
        whole = {
            key: nn.Parameter(
                without_values(p, device) if key in empty else _gathered(p, device, group),
                requires_grad=p.requires_grad,
            )
            for key, p in shards.items()
        }
        places = [(m, n, p) for m in child.modules() for n, p in m._parameters.items() if p is not None]
        for owner, name, p in places:
            owner._parameters[name] = whole[id(p)]
        try:
            reset_own(child, reset, borrowed[id(child)])
        finally:
            for owner, name, p in places:
                owner._parameters[name] = p
        broadcast_([w.data for w in whole.values()], group)
        for key, p in shards.items():
            here(p).copy_(here(cut_if_fits(whole[key].data, p)))
        empty -= shards.keys()
    refuse_without_values((n, here(p)) for n, p in module.named_parameters() if id(p) in waiting)


def _gathered(p: nn.Parameter, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
    return gather(p, device, group) if here(p) is not p else p.detach().clone()
