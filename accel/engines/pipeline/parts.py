"""What of a pipeline's model lies on which rank. The other stages' tensors hold no memory here, and reading them is an error."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...errors import BackendError
from ...shard import Shard, StateEntry
from ..base.gather import Item
from ..base.holdings import Holdings
from .stages import Named


def _refuse_call(where: str, *_: object) -> NoReturn:
    """Before the forward of a child that lies on another rank."""
    raise BackendError(f"{where}: call the handle, on all ranks")


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype in one element's memory: NaN, or the least integer; writing to it raises."""
    if tensor.is_floating_point() or tensor.is_complex():
        value: Any = float("nan")
    else:
        value = False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def refuse_tied(stages: Sequence[Sequence[Named]]) -> None:
    """Refuse a tensor that two stages hold: each would train its own.

    Raises:
        BackendError: names it.
    """
    holder: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for prefix, child in stage:
            for kind in (child.named_parameters(prefix), child.named_buffers(prefix)):
                for name, tensor in kind:
                    other, first = holder.setdefault(id(tensor), (number, name))
                    if other != number:
                        raise BackendError(
                            f"{first} and {name} are one tensor, but lie in stages {other} and {number} of the pipeline: give "
                            "Pipeline(balance=[...]) that puts them into one stage, or untie them"
                        )


@final
class Parts:
    """Which tensors this rank owns.

    Args:
        module: the user's Sequential.
        stages: each rank's children.
        rank: this one.
    """

    def __init__(self, module: nn.Module, stages: Sequence[Sequence[Named]], rank: int) -> None:
        self._module = module
        self._rank = rank
        self._stage_of = {name: number for number, stage in enumerate(stages) for name, _ in stage}
        self._hooks: list[RemovableHandle] = []
        own = [child for _, child in stages[rank]]
        for number, stage in enumerate(stages):
            for name, child in stage:
                if not any(child is mine for mine in own):  # an activation, say, may stand in several stages
                    refuse = functools.partial(_refuse_call, f"child {name!r} of this pipeline lies on rank {number}")
                    self._hooks.append(child.register_forward_pre_hook(refuse))
        mine = {id(part) for child in own for part in child.modules()}
        #: The modules of other ranks, by ``id``.
        self.elsewhere = {id(part) for part in module.modules()} - mine - {id(module)}
        #: The parameters of other ranks.
        self.away = [(name, p) for name, p in module.named_parameters() if not self.owns(name)]
        self.release()

    def owner(self, name: str) -> int:
        """The rank that owns what has this name; what is in no child is the first rank's."""
        return self._stage_of.get(name.partition(".")[0], 0)

    def owns(self, name: str) -> bool:
        """Whether this rank owns what has this name."""
        return self.owner(name) == self._rank

    def tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers, by name."""
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def release(self) -> None:
        """Free the memory of what other ranks own."""
        for name, tensor in self.tensors().items():
            if not self.owns(name):
                tensor.grad = None
                tensor.data = empty_like(tensor)

    def release_state(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Drop the optimizer's state of what other ranks own."""
        for parameter in list(optimizer.state):
            if isinstance(parameter, torch.Tensor) and not self.owns(names[id(parameter)]):
                del optimizer.state[parameter]

    def close(self) -> None:
        """Let the children be called and copied again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


@final
class PipelineHoldings(Holdings):
    """This rank's stage."""

    def partial(self, optimizer: Optimizer | None) -> bool:
        """Once the stages are apart."""
        return self.engine.parts is not None

    def has(self, name: str) -> bool:
        """What runs on this rank."""
        return self.engine.parts is None or bool(self.engine.parts.owns(name))

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        """All of what is in its stage."""
        return super().part(name, tensor, key) if self.has(name) else None

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        """Of its stage's parameters."""
        return [entry for entry in super().entries(optimizer) if self.has(entry.name)]

    def gradients(self) -> Iterator[Item]:
        """Of its stage's parameters."""
        return ((name, key, value) for name, key, value in super().gradients() if self.has(name))

    def restore(self, parts: Parts, optimizers: Sequence[Optimizer]) -> None:
        """Give every rank all tensors, with their gradients and the optimizers' state. Collective."""
        names = dict(self.engine.module.named_parameters())
        for optimizer in optimizers:
            parts.release_state(optimizer, self.parameter_names)
            self.give_back(optimizer, self.whole_state("the end of a pipeline", optimizer, strays=True), names)
        tensors = parts.tensors()
        held = [(name, "", tensor.data) for name, tensor in tensors.items()]
        extra = [(name, "extra", value) for name, value in self.values(None).items()]
        whole = self.gather("the end of a pipeline", [*held, *self.gradients(), *extra])
        for name, tensor in tensors.items():
            if not parts.owns(name):
                tensor.data = whole[name, ""]
                tensor.grad = whole.get((name, "grad"))
        self.fill(None, {n: value for (n, key), value in whole.items() if key == "extra" and not parts.owns(n)})

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        """None once the stages are apart."""
        return [] if self.partial(None) else super().replicas()
