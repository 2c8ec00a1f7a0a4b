"""Conversion of parameters to shards and back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...deferred import resetting, swap, without_values
from ...errors import AccelError, BackendError
from ...process import reason_of
from ...process.packing import broadcast_
from ..base.absent import Absent, bring_back, name_of, take_away

if TYPE_CHECKING:
    from . import FSDPEngine


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield each use of each parameter."""
    for child in module.modules():
        for name, p in child.named_parameters(recurse=False, remove_duplicate=False):
            yield child, name, p


@final
class Conversion:
    """The parameters before ``setup``, and their shards. Collective.

    Attributes:
        known: the shard for each old parameter, gathered parameter and
            shard, by ``id``.
        gathered: the parameter in autograd's graph, by ``id`` of its shard.
        old: the parameter objects that shards replaced, by name.
    """

    def __init__(self, engine: FSDPEngine) -> None:
        self.engine, self.module, self.sharded = engine, engine.module, engine.sharded
        self.known: dict[int, nn.Parameter] = {}
        self.gathered: dict[int, nn.Parameter] = {}
        self.old: dict[str, nn.Parameter] = {}
        self._places = list(_places(self.module))

    def shard(self, blocks: Mapping[str, nn.Module]) -> None:
        """Put shards in the parameters' places, block by block."""
        before = dict(self.module.named_parameters())
        for p in before.values():
            # Image models use torch.channels_last, but FSDP2 supports only contiguous weights.
            p.data = p.data.contiguous()
        reads = self.engine.reads
        if not reads and any(p.is_meta for p in before.values()):
            self._give_values(blocks.values())
        else:
            for block in blocks.values():
                self.sharded.apply(block)
        self.sharded.apply(self.module)
        self.sharded.initialize(blocks, self.engine.label, reads)
        for name, shard in self.module.named_parameters():
            p = before[name]
            self.known[id(shard)] = self.known[id(p)] = shard
            if shard is not p:
                self.old[name] = p
                p.grad = None
                p.requires_grad_(False)
                take_away(p, StandIn, shard=shard)
        for param in self.sharded.params:
            self.gathered[id(param.sharded_param)] = param.unsharded_param
            self.known[id(param.unsharded_param)] = param.sharded_param

    @torch.no_grad()
    def _give_values(self, blocks: Iterable[nn.Module]) -> None:
        """Initialize parameters. Shard each block after its last reset."""
        process = self.engine.process
        # In the order of the constructors, so rank 0 draws the same numbers as a single process.
        resets = list(resetting(self.module))
        # A module's last reset may be the reset of a module that contains it.
        last: dict[nn.Module, int] = {}
        for number, (child, _) in enumerate(resets):
            last.update(dict.fromkeys(child.modules(), number))
        ends = {block: max(map(last.get, block.modules(), repeat(0))) for block in blocks}
        # Weak references, so that each full parameter is freed when a shard replaces it.
        full = weakref.WeakValueDictionary[int, nn.Parameter]()
        for number, (child, reset) in enumerate(resets):
            for owner, name, p in _places(child):
                if p.is_meta:
                    real = nn.Parameter(without_values(p, process.device), p.requires_grad)
                    setattr(owner, name, full.setdefault(id(p), real))
            if not set(full.values()).isdisjoint(child.parameters()):
                reset()
                broadcast_(child.parameters(), process.group)
            for block, end in ends.items():
                if end == number:
                    self.sharded.apply(block)

    # -- back to full parameters -------------------------------------------------------------------

    def restore(self, optimizers: Sequence[Optimizer]) -> None:
        """Fill the old parameters, with NaN if a rank can't be reached."""
        engine, named = self.engine, self.engine.named
        full: dict[tuple[str, Any], Tensor] = {}
        try:
            if self.old and not engine.ended:
                shards = [(name, "", named[name]) for name in self.old]
                items = chain(shards, engine.holdings.gradients())
                full = engine.holdings.gather("the end of a sharded model", items)
        except (RuntimeError, AccelError) as error:
            engine.ended = str(error) if isinstance(error, AccelError) else reason_of(error)
        self.sharded.undo()
        back: dict[int, nn.Parameter] = {}
        for name, p in self.old.items():
            bring_back(p)
            shard = named[name]
            back[id(shard)] = p
            value = full.get((name, ""))
            if value is None:
                value = without_values(shard, engine.process.device)
            if p.is_meta:
                swap(p, nn.Parameter(value, requires_grad=False))
            else:
                p.data = value
            p.grad = full.get((name, "grad"))
            p.requires_grad_(shard.requires_grad)
        for owner, name, p in self._places:
            setattr(owner, name, p)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [back.get(id(p), p) for p in group["params"]]
            for name in self.old:
                optimizer.state.pop(named[name], None)


# -- parameters from before setup: a loop still clips, freezes and optimizes lists of them ---------


def _of_shard(name: str) -> Any:
    return property(
        lambda old: getattr(old.shard, name), lambda old, value: setattr(old.shard, name, value)
    )


class StandIn(Absent, nn.Parameter):
    """A replaced parameter without values. It has its shard's ``grad``."""

    shard: nn.Parameter
    # `FSDPGradients.leaf` replaces the parameter in these calls.
    plain = frozenset([torch.autograd.grad, torch.autograd.backward])
    grad = _of_shard("grad")
    requires_grad = _of_shard("requires_grad")

    def requires_grad_(self, requires_grad: bool = True) -> StandIn:
        self.shard.requires_grad_(requires_grad)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"a parameter of shape {tuple(self.shape)}, replaced by its shard"

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"{name_of(function)} uses a parameter from before accel.setup, "
            "which has no values. Take it from model.parameters()."
        )
