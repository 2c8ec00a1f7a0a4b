"""From parameters to shards and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...deferred import resetting, swap, weights_of, without_values
from ...errors import AccelError, BackendError
from ...process import reason_of
from ...process.packing import broadcast_
from ..base.absent import Absent, bring_back, name_of, take_away

if TYPE_CHECKING:
    from . import FSDPEngine

#: A module's table of parameters, a name in it, and the parameter.
Place: TypeAlias = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]


def _places(module: nn.Module) -> list[Place]:
    """Return the places of all parameters. A tied parameter has several."""
    places: list[Place] = []
    for child in module.modules():
        for name, p in child._parameters.items():
            if p is not None:
                places.append((child._parameters, name, p))
    return places


@final
class Conversion:
    """The parameters of before ``setup``, and their shards. Methods are collective.

    Attributes:
        known: the shard of each old parameter, gathered parameter and shard, by identity.
        gathered: the parameter that autograd knows, by the identity of its shard.
        old: the parameter objects that shards replaced, by name.
    """

    def __init__(self, engine: FSDPEngine) -> None:
        self.engine, self.module, self.sharded = engine, engine.module, engine.sharded
        self.known: dict[int, nn.Parameter] = {}
        self.gathered: dict[int, nn.Parameter] = {}
        self.old: dict[str, nn.Parameter] = {}
        self._places = _places(self.module)

    def shard(self, names: Sequence[str]) -> None:
        """Put shards in the parameters' places. ``names`` are those of the blocks."""
        before = dict(self.module.named_parameters())
        for parameter in before.values():
            # Image models use torch.channels_last, but FSDP2 takes only contiguous weights.
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        blocks = [self.module.get_submodule(name) for name in names]
        if any(p.is_meta for p in before.values()) and weights_of(self.module) is None:
            self._give_values(blocks)
        else:
            for block in blocks:
                self.sharded.apply(block)
        self.sharded.apply(self.module)
        self.sharded.initialize(blocks, self.engine.label)
        for name, shard in self.module.named_parameters():
            parameter = before[name]
            self.known[id(shard)] = self.known[id(parameter)] = shard
            if shard is not parameter:
                self.old[name] = parameter
                parameter.grad = None
                parameter.requires_grad_(False)
                take_away(parameter, StandIn, shard=shard)
        for param in self.sharded.params:
            self.gathered[id(param.sharded_param)] = param.unsharded_param
            self.known[id(param.unsharded_param)] = param.sharded_param

    @torch.no_grad()
    def _give_values(self, blocks: Sequence[nn.Module]) -> None:
        """Initialize parameters of ``accel.deferred_init``, and shard each block at its last reset.

        The order of the resets is that of the constructors, so a rank draws the random numbers of a
        single process. Then rank 0 sends its values.
        """
        process = self.engine.process
        resets = list(resetting(self.module))
        # The last reset of each module, which may be that of a module around it.
        last: dict[nn.Module, int] = {}
        for number, (child, _) in enumerate(resets):
            last.update(dict.fromkeys(child.modules(), number))
        ends = {block: max(last.get(part, 0) for part in block.modules()) for block in blocks}
        #: By the identity of the parameter on the meta device, which the caller puts back.
        full: dict[int, nn.Parameter] = {}
        for number, (child, reset) in enumerate(resets):
            for table, name, p in _places(child):
                if p.is_meta and id(p) not in full:
                    value = without_values(p, process.device)
                    full[id(p)] = nn.Parameter(value, p.requires_grad)
                table[name] = full.get(id(p), p)
            if not set(full.values()).isdisjoint(child.parameters()):
                reset()
                broadcast_([p.data for p in child.parameters()], process.group)
            for block in blocks:
                if ends[block] == number:
                    inside = set(block.parameters())
                    full = {key: p for key, p in full.items() if p not in inside}
                    self.sharded.apply(block)

    # -- back to full parameters -------------------------------------------------------------------

    def restore(self, optimizers: Sequence[Optimizer]) -> None:
        """Put full values into the old parameters: NaN if a rank can't be reached."""
        engine, old = self.engine, self.old
        holdings, named = engine.holdings, engine.named
        full: dict[tuple[str, Any], torch.Tensor] = {}
        try:
            if old and not engine.ended:
                shards = [(name, "", named[name]) for name in old]
                gradients = [item for item in holdings.gradients() if item[0] in old]
                full = holdings.gather("the end of a sharded model", [*shards, *gradients])
        except (RuntimeError, AccelError) as error:
            engine.ended = str(error) if isinstance(error, AccelError) else reason_of(error)
        self.sharded.undo()
        for table, name, parameter in self._places:
            table[name] = parameter
        back = {id(named[name]): p for name, p in old.items()}
        for name, parameter in old.items():
            bring_back(parameter)
            shard = named[name]
            if (value := full.get((name, ""))) is None:
                value = without_values(shard, engine.process.device)
            if parameter.is_meta:
                swap(parameter, nn.Parameter(value, requires_grad=False))
            else:
                parameter.data = value
            parameter.grad = full.get((name, "grad"))
            parameter.requires_grad_(shard.requires_grad)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [back.get(id(p), p) for p in group["params"]]
            for name in old:
                optimizer.state.pop(named[name], None)


# -- parameter objects of before setup: lists of them clip, freeze and build optimizers ------------


def _of_shard(name: str) -> Any:
    return property(
        lambda old: getattr(old.shard, name), lambda old, value: setattr(old.shard, name, value)
    )


class StandIn(Absent, nn.Parameter):
    """A replaced parameter. Its ``grad`` is the shard's, and any use of its values raises."""

    shard: nn.Parameter
    plain = frozenset([torch.autograd.grad, torch.autograd.backward])  # by `FSDPGradients.leaf`
    extra = ("shard",)
    grad = _of_shard("grad")
    requires_grad = _of_shard("requires_grad")

    def requires_grad_(self, requires_grad: bool = True) -> StandIn:
        self.shard.requires_grad_(requires_grad)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"a parameter of shape {tuple(self.shape)} whose shard is in use"

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"{name_of(function)} uses a parameter from before accel.setup, which has no values. "
            "Take it from model.parameters()."
        )
