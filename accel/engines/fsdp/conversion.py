"""From whole parameters to shards and back, for a module and the optimizers of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...deferred import borrowing, refuse_without_values, reset_own, resetting, weights_of, without_values
from ...gradients.average import average_gradients_
from ...gradients.log import GradientLog
from ...process import Process
from ...process.packing import broadcast_
from ...shard import Shard
from . import shards, standin
from .module import ShardedModule, kept_whole
from .pending import drop
from .shards import cut_if_fits, here

# -- First values for shards of parameters that were built without memory ----------------------------------------------


def allocate(module: nn.Module, device: torch.device) -> set[int]:
    """Give shards on the meta device memory; returns the identities of those that now wait for values. Local."""
    names = [name for name, p in module.named_parameters() if p.is_meta]
    if names:
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    parameters = dict(module.named_parameters())
    return {id(parameters[name]) for name in names}


@torch.no_grad()
def initialize(
    module: nn.Module,
    waiting: set[int],
    borrowed: dict[int, set[str]],
    whole_of: Callable[[nn.Parameter], torch.Tensor],
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Rank 0's values by ``reset_parameters``, for one module that has it at a time. Collective.

    ``borrowed`` is ``deferred.borrowing`` of the module; ``whole_of`` gathers what has its values already. Every rank draws
    the same random numbers as in one process, and no more than that module is whole at a time.
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
                without_values(p, device) if key in empty else whole_of(p),
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


@final
class Conversion:
    """The module's shards, the parameter objects that they replaced, and which is which."""

    def __init__(self, module: nn.Module, process: Process, options: Any, label: str) -> None:
        self.module = module
        self.label = label
        self.process = process
        self.options = options
        assert process.group is not None
        self.group: dist.ProcessGroup = process.group
        self.scalars: list[nn.Parameter] = []
        self._scalar_names: list[str] = []
        self.scalar_log = GradientLog(())
        #: By identity: the shard of every parameter object, old, gathered or the shard itself.
        self.known: dict[int, nn.Parameter] = {}
        #: By name the parameter objects that shards replaced, and these.
        self.replaced: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._places = [(m, n, p) for m in module.modules() for n, p in m._parameters.items() if p is not None]
        self._local = shards.LocalShards()
        self.sharded = ShardedModule(module, self.group, process.device, options)

    def shard(self, blocks: Sequence[str], whole_of: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Put shards in the parameters' places. Collective where there are gradients, or first values to be made."""
        old = dict(self.module.named_parameters())
        for parameter in old.values():
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        grads = self._mean_gradients(list(old.values()))
        children = [self.module.get_submodule(name) for name in blocks]
        borrowed, weights = borrowing(self.module), weights_of(self.module)
        self.sharded.apply(children)
        storage = torch.device("cpu") if self.options.cpu_offload else self.process.device
        waiting = allocate(self.module, storage)
        self.scalars = kept_whole(self.module)
        if weights is None:  # else they are read into the shards
            initialize(self.module, waiting, borrowed, whole_of, self.process.device, self.group)
        new = dict(self.module.named_parameters())
        names = {id(parameter): name for name, parameter in new.items()}
        self._scalar_names = [names[id(p)] for p in self.scalars]
        for name, parameter in old.items():
            shard = new[name]
            self.known[id(shard)] = shard
            if shard is not parameter:
                self.known[id(parameter)] = shard
                self.replaced[name] = parameter, shard
                standin.put(parameter, shard)
                if name in grads:
                    shard.grad = shards.cut(grads[name], shard)
        self.scalar_log = GradientLog(self.scalars)

    def _mean_gradients(self, parameters: list[nn.Parameter]) -> dict[str, torch.Tensor]:
        """Gradients that were there before, as their mean."""
        names = [name for name, _ in self.module.named_parameters()]
        average_gradients_(f"gradients before accel.setup ({self.label})", parameters, names, self.process)
        return {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}

    def canonical(self, parameter: nn.Parameter) -> nn.Parameter:
        """The shard of a parameter object."""
        return self.known.get(id(parameter), parameter)

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        """What autograd knows of a parameter object."""
        shard = self.known.get(id(parameter), parameter)
        return next((whole for whole, s in self.sharded.gathered() if s is shard), parameter)

    def mark_gathered(self) -> None:
        """Know the gathered parameters."""
        self.sharded.mark_gathered()
        self.known.update((id(whole), shard) for whole, shard in self.sharded.gathered())

    # -- gradients ------------------------------------------------------------------------------------------------

    def scalars_pending(self) -> bool:
        """Whether scalar parameters, which every rank has whole, got gradients of this rank's own."""
        return bool(self.scalar_log.entries)

    def average_scalars(self) -> None:
        """Make the scalars' gradients final. Collective."""
        what = f"the reduction of scalars ({self.label})"
        average_gradients_(what, self.scalars, self._scalar_names, self.process, announced=True)
        self.scalar_log.fold()

    def drop_pending(self) -> None:
        """Drop what was not reduced."""
        for param in self.sharded.pending():
            drop(param)
        self.scalar_log.fold()

    def age(self, optimizer: Optimizer) -> None:
        """Mark gathered parameters as changed where the optimizer will change their shards."""
        stepped = {id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None}
        aged = [whole for whole, shard in self.sharded.gathered() if id(shard) in stepped]
        if aged:
            torch.autograd.graph.increment_version(aged)

    def gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What lies on this rank of the final gradients, and those of scalars, which every rank has."""
        scalars = set(map(id, self.scalars))
        found = [(id(p) in scalars, here(p.grad)) for p in self.known_shards() if p.grad is not None]
        return [g for common, g in found if not common], [g for common, g in found if common]

    def known_shards(self) -> Iterable[nn.Parameter]:
        """Every parameter of the module as it is between steps."""
        return {id(p): p for p in self.known.values()}.values()

    # -- state ----------------------------------------------------------------------------------------------------

    def part(self, name: str, tensor: torch.Tensor, key: Any) -> Shard | None:
        """What of a tensor lies here."""
        return self._local(f"{name}/{key}" if key else name, tensor)

    def new(self, parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor in the state of a parameter."""
        return shards.new(parameter, shape, dtype)

    # -- the way back ---------------------------------------------------------------------------------------------

    def restore(self, whole: Mapping[tuple[str, Any], torch.Tensor] | None, optimizers: Sequence[Optimizer]) -> None:
        """Put the parameter objects that were there before in the shards' places; nan into them where None is known. Local.

        Args:
            whole: values and gradients, by name, and "" or "grad".
            optimizers: whose groups hold shards.
        """
        self.scalar_log.close()
        self.sharded.undo()
        for key, (old, shard) in self.replaced.items():
            value = without_values(shard, self.process.device) if whole is None else whole[key, ""]
            standin.take(old, value, None if whole is None else whole.get((key, "grad")))
        for module, name, own in self._places:
            module._parameters[name] = own
        back = {id(shard): old for old, shard in self.replaced.values()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [back.get(id(p), p) for p in group["params"]]
            for held in [key for key in optimizer.state if id(key) in back]:
                del optimizer.state[held]
