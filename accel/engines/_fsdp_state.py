"""The state verbs of an engine whose parameters and optimizer state are shards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .. import shard
from ..errors import AccelError, BackendError
from ..flat import broadcast_
from ..shard import Manifest, Shard
from ._copies import allow_copies, refuse_copies
from ._fsdp_shards import LocalShards
from ._state import StateVerbs

if TYPE_CHECKING:
    from ._fsdp_conversion import Conversion


@final
class Guard:
    """Refuses ``state_dict()``, copies and pickles of raw modules and optimizers, which would look whole."""

    def __init__(self) -> None:
        self._open = False
        self._hooks: dict[int, RemovableHandle] = {}

    def watch(self, raw: nn.Module | Optimizer) -> None:
        """Refuse from now on."""
        self._hooks[id(raw)] = raw.register_state_dict_pre_hook(self.refuse)
        if isinstance(raw, Optimizer) or any(True for _ in raw.parameters()):
            refuse_copies(raw)

    def release(self, raw: nn.Module | Optimizer) -> None:
        """Refuse no more."""
        if (hook := self._hooks.pop(id(raw), None)) is not None:
            hook.remove()
            allow_copies(raw)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let through inside."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def refuse(self, raw: object, *_: Any) -> None:
        """Raise, unless opened."""
        if not self._open:
            raise AccelError(
                f"{type(raw).__name__}.state_dict() is sharded, so that this rank holds a part of it only: every rank calls "
                "accel.full_state_dict(model or optimizer) for the whole, or accel.save(...) for a checkpoint"
            )


class ShardedState(StateVerbs):
    """Whole state goes in and out; what lies on this rank is listed; what would be a part only is refused."""

    _parts: Conversion | None
    guard: Guard

    def state_dict(self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Refused where shards are."""
        if self._parts is not None:
            self.guard.refuse(self.module if optimizer is None else optimizer)
        return super().state_dict(optimizer, args, kwargs)

    def full_state_dict(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """Every shard gathered, on every rank; buffers are rank 0's. Collective."""
        parts = self._parts
        if parts is None:
            return super().full_state_dict(optimizer)
        parts.sharded.reshard()
        with self.guard.opened():
            if optimizer is not None:
                state: dict[str, Any] = parts.whole_state(optimizer.state_dict())
                return state
            broadcast_([b.data for b in self.module.buffers()], self.process.group)
            own = self.module.state_dict(keep_vars=True)
        made: dict[int, Any] = {}  # what is tied is one tensor
        for value in own.values():
            if id(value) not in made:
                made[id(value)] = parts.whole_state(value.detach() if isinstance(value, torch.Tensor) else value)
        return _like(own, {name: made[id(value)] for name, value in own.items()})

    def load_state_dict(self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take this rank's part of a full state."""
        parts = self._parts
        if parts is None:
            return super().load_state_dict(optimizer, args, kwargs)
        named = dict(zip(("state_dict", "strict", "assign"), args, strict=False)) | kwargs
        full = named.pop("state_dict")
        if optimizer is not None:
            return optimizer.load_state_dict(parts.cut_optimizer_state(optimizer, full))
        if named.get("assign"):
            raise BackendError(
                "load_state_dict(assign=True) would replace sharded parameters by whole ones: leave assign out"
            )
        parts.sharded.reshard()
        mine = dict(self.module.named_parameters(remove_duplicate=False))
        return self.module.load_state_dict(
            _like(full, {n: parts.cut(v, mine.get(n)) for n, v in full.items()}), **named
        )

    def synchronize(self, source: int = 0) -> None:
        """Rank ``source``'s weights and buffers; only its buffers where the weights are shards. Collective."""
        tensors = [b.data for b in self.module.buffers()]
        if self._parts is None:
            tensors += [p.data for p in self.parameters if not p.is_meta]
        if self.distributed:
            broadcast_(tensors, self.process.group, source)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        """This rank's rows of each tensor."""
        parts = self._parts
        if parts is None:
            return super().shards(optimizer)
        if optimizer is not None:
            return shard.optimizer_shards(optimizer, self.parameter_names, LocalShards())
        parts.sharded.reshard()
        with self.guard.opened():
            return shard.module_shards(self.module, LocalShards())

    def slots(self, optimizer: Optimizer | None, manifest: Manifest) -> list[Shard]:
        """What ``shards`` lists; an optimizer's state is created."""
        if self._parts is None or optimizer is None:
            return self.shards(None) if optimizer is None else super().slots(optimizer, manifest)
        return self._parts.slots(optimizer, self.parameter_names, manifest)


def _like(original: Any, values: dict[str, Any]) -> OrderedDict[str, Any]:
    """A state dict of these values, with the versions of modules that ``original`` carries."""
    made = OrderedDict(values)
    if hasattr(original, "_metadata"):
        made._metadata = original._metadata  # type: ignore[attr-defined]
    return made
