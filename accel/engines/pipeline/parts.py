"""What of a pipeline's model lies on which rank. The other stages' tensors hold no memory here, and reading them is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer

from ... import shard
from ...errors import BackendError
from ...gradients.flat import broadcast_
from ...process.control import agree
from ...shard import Entry, Shard
from ..holdings import Holdings, Item
from .channel import Channel
from .stages import Named

_FULL: Final = "use accel.full_state_dict(...) on all ranks, or accel.save"


@final
class Away:
    """Stands guard at a child that lies on another rank: calls, copies and pickles of it are refused."""

    def __init__(self, child: str, rank: int) -> None:
        self._where = f"child {child!r} of this pipeline lies on rank {rank}"
        self.open = False

    def __call__(self, *args: object) -> None:
        """Before its forward."""
        self._refuse("call the handle, on all ranks")

    def state_dict(self, *args: object) -> None:
        """Before its ``state_dict``."""
        if not self.open:
            self._refuse(_FULL)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse("copy the module that accel.teardown(model) returns")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse(_FULL)

    def _refuse(self, advice: str) -> NoReturn:
        raise BackendError(f"{self._where}: {advice}")


@final
class Whole:
    """Stands guard at an optimizer of which this rank holds the state of its stage: ``state_dict`` is refused."""

    def __init__(self) -> None:
        self._open = False

    def __call__(self, *args: object) -> None:
        """Before its ``state_dict``."""
        if not self._open:
            raise BackendError(f"each rank of a pipeline holds the optimizer's state of its own stage: {_FULL}")

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let it through."""
        self._open = True
        try:
            yield
        finally:
            self._open = False


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
        channel: to the other ranks.
    """

    def __init__(self, module: nn.Module, stages: Sequence[Sequence[Named]], channel: Channel) -> None:
        self._module = module
        self._channel = channel
        self._stage_of = {name: number for number, stage in enumerate(stages) for name, _ in stage}
        self._guards: list[Away] = []
        self._hooks: list[Any] = []
        own = [child for _, child in stages[channel.rank]]
        for number, stage in enumerate(stages):
            for name, child in stage:
                if any(child is mine for mine in own):  # an activation, say, may stand in several stages
                    continue
                guard = Away(name, number)
                self._guards.append(guard)
                self._hooks.append(child.register_forward_pre_hook(guard))
                self._hooks.append(child.register_state_dict_pre_hook(guard.state_dict))
        #: The parameters of other ranks.
        self.away = [(name, p) for name, p in module.named_parameters() if not self.owns(name)]
        self.release()

    def owner(self, name: str) -> int:
        """The rank that owns what has this name; what is in no child is the first rank's."""
        return self._stage_of.get(name.partition(".")[0], 0)

    def owns(self, name: str) -> bool:
        """Whether this rank owns what has this name."""
        return self.owner(name) == self._channel.rank

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def release(self) -> None:
        """Free the memory of what other ranks own."""
        for name, tensor in self._tensors().items():
            if not self.owns(name):
                tensor.grad = None
                tensor.data = empty_like(tensor)

    def release_state(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Drop the optimizer's state of what other ranks own."""
        for parameter in list(optimizer.state):
            if isinstance(parameter, torch.Tensor) and not self.owns(names[id(parameter)]):
                del optimizer.state[parameter]

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let ``state_dict`` go through the whole module."""
        for guard in self._guards:
            guard.open = True
        try:
            yield
        finally:
            for guard in self._guards:
                guard.open = False

    @contextlib.contextmanager
    def with_memory(self) -> Iterator[None]:
        """Give all tensors memory for a while, to be written to."""
        for name, tensor in self._tensors().items():
            if not self.owns(name):
                tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        try:
            yield
        finally:
            self.release()

    def close(self) -> None:
        """Let the children be called and copied again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- collectives --------------------------------------------------------------------------------------------------

    def gather(self, what: str, mine: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of all ranks; tensors of others come as new ones. Collective."""
        kinds = {k: (tuple(v.shape), v.dtype, v.device.type) if _moves(v) else v for k, v in mine.items()}
        whole: dict[str, Any] = {}
        everyone = agree(f"{what} ({self._channel.label})", (kinds, [k for k, v in mine.items() if _moves(v)]))
        for rank, (entries, moving) in enumerate(everyone):
            own = rank == self._channel.rank
            tensors = {
                k: mine[k].detach().to(self._channel.carrier) if own else self._new(*entries[k][:2]) for k in moving
            }
            broadcast_(tensors.values(), self._channel.group, rank)
            for key, value in entries.items():
                if own:
                    whole[key] = mine[key]
                else:
                    whole[key] = tensors[key].to(self._home(entries[key][2])) if key in tensors else value
        return whole

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._channel.carrier)

    def _home(self, kind: str) -> torch.device:
        return self._channel.device if kind == self._channel.device.type else torch.device(kind)

    def restore(self) -> None:
        """Give every rank all tensors, with their gradients. Collective."""
        self.close()
        tensors = self._tensors()
        mine = {name: tensor.data for name, tensor in tensors.items() if self.owns(name)}
        grads = {f"{n} (gradient)": t.grad for n, t in tensors.items() if self.owns(n) and t.grad is not None}
        extra = shard.module_values(self._module, self.owns)
        whole = self.gather("the end of a pipeline", {**mine, **grads, **extra})
        for name, tensor in tensors.items():
            if not self.owns(name):
                tensor.data = whole[name]
                tensor.grad = whole.get(f"{name} (gradient)")
        away = {name: whole[name] for name in shard.extra_modules(self._module) if not self.owns(name)}
        shard.fill_module_values(self._module, away)

    def full_state_dict(self) -> dict[str, Any]:
        """The whole module's. Collective."""
        with self.opened():
            state: dict[str, Any] = self._module.state_dict()
        whole = self.gather("accel.full_state_dict", {name: value for name, value in state.items() if self.owns(name)})
        for name in state:
            state[name] = whole[name]
        return state

    def full_state(self, optimizer: Optimizer, names: Mapping[int, str]) -> dict[torch.Tensor, dict[str, Any]]:
        """The whole optimizer's state by parameter. Collective."""
        parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        mine = {
            f"{name}/{key}": value
            for name, parameter in parameters.items()
            if self.owns(name)
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for full_name, value in self.gather("the whole state of an optimizer", mine).items():
            name, _, key = full_name.rpartition("/")
            state.setdefault(parameters[name], {})[key] = value
        return state

    def full_optimizer_state_dict(self, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
        """What the optimizer's ``state_dict()`` would hold in one process. Collective."""
        state = self.full_state(optimizer, names)
        full: dict[str, Any] = optimizer.state_dict()
        flat = [p for group in optimizer.param_groups for p in group["params"]]
        full["state"] = {index: state[p] for index, p in enumerate(flat) if p in state}
        return full


@final
class PipelineHoldings(Holdings):
    """This rank's stage."""

    def partial(self, optimizer: Optimizer | None) -> bool:
        """Once the stages are apart."""
        return self.engine._parts is not None

    def has(self, name: str) -> bool:
        """What runs on this rank."""
        return self.engine._parts is None or bool(self.engine._parts.owns(name))

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        """All of what is in its stage."""
        return super().part(name, tensor, key) if self.has(name) else None

    def entries(self, optimizer: Optimizer) -> list[Entry]:
        """Of its stage's parameters."""
        return [entry for entry in super().entries(optimizer) if self.has(entry.name)]

    def gradients(self) -> Iterator[Item]:
        """Of its stage's parameters."""
        return ((name, key, value) for name, key, value in super().gradients() if self.has(name))

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        """None once the stages are apart."""
        return [] if self.partial(None) else super().replicas()


def _moves(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_sparse
