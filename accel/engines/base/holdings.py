"""The state of a model and its optimizers on this rank, and full state.

A backend defines its shards with ``partial``, ``part``, ``entries`` and
``has``. Everything else is the same for all backends: ``state_dict``,
``load_state_dict``, checkpoints, ``teardown`` and copies.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import BackendError
from ...process.control import Waiting
from ...process.packing import broadcast_
from ...shard import (
    Raw,
    Shard,
    StateEntry,
    fill_module_values,
    named_tensors,
    parameters_of,
    state_device,
)
from ...trees import inner_tensors, map_tensors, to_device
from .gather import Item, gather
from .raw_objects import Args, Guard, Kwargs, Snapshot, Target, as_author_made, in_place_of

if TYPE_CHECKING:
    from .engine import Engine

_CPU = torch.device("cpu")


class Holdings(Raw):
    """The state on this rank. ``optimizer=None`` means the model's."""

    #: True if ``start`` gives parameters on the meta device memory and values.
    materializes: bool = False

    def __init__(self, engine: Engine) -> None:
        # Raw.__init__ would set `parameter_names`, which is a property here.
        self.module, self.engine = engine.module, cast(Any, engine)
        self.guard = Guard(self)
        #: The full shapes of parameters, which may be shards later.
        self.shapes = {name: p.shape for name, p in engine.named.items()}

    # -- for a backend to override -----------------------------------------------------------------

    def partial(self, optimizer: Optimizer | None) -> bool:
        """True if ranks may lack some state. Equal on all ranks. Local."""
        return False

    def prepare(self, *, writing: bool) -> None:
        """Make tensors match shards, before reads and writes. Local."""

    def filled(self) -> None:
        """Update dependent tensors after shards were filled. Collective."""

    def gradients(self) -> Iterator[Item]:
        """Return the final gradients on this rank. Local."""
        for name, p in self.engine.named.items():
            if p.grad is not None:
                yield name, "grad", p.grad

    def replicas(self) -> Sequence[tuple[str, Tensor]]:
        """Return weights that are equal on all ranks, by name. Local."""
        if self.engine.placements.weights.sharded:
            return []
        return list(self.engine.named.items())

    @property
    def snapshot(self) -> Snapshot | None:
        """The changes of the backend's library to the module. Local."""
        return None

    @classmethod
    def divides_from_host(cls, options: Any) -> bool:
        """True if ``start`` copies shards from CPU memory. Pure."""
        return False

    @property
    def parameter_names(self) -> dict[int, str]:  # type: ignore[override]
        """Names by the identity of the optimizers' parameters."""
        return {id(p): name for name, p in self.engine.named.items()}

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        if optimizer is None:
            self.prepare(writing=False)
        with self.guard.opened():
            return super().shards(optimizer)

    # -- full state --------------------------------------------------------------------------------

    @final
    def full_state_dict(self, optimizer: Optimizer | None, *, keep: bool = True) -> dict[str, Any]:
        """Return a full ``state_dict()``, empty unless ``keep``. Collective."""
        if not self.partial(optimizer):
            return (optimizer or self.module).state_dict()
        return self.state_dict(optimizer, title="accel.full_state_dict", keep=keep)

    @final
    def state_dict(
        self,
        optimizer: Optimizer | None,
        *args: Any,
        title: str = "",
        keep: bool = True,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return full state in CPU memory, by the raw method. Collective."""
        # The title has the step count, so that ranks raise if an exception has set them apart.
        name, variable = self.engine.kind, "model"
        if optimizer is not None:
            name, variable = type(optimizer).__name__, "optimizer"
        # If one rank calls this alone, the other ranks' error shows this text.
        advice = "" if title else " (call it on every rank, not under an `if`)"
        title = title or f"{variable}.state_dict()"
        title = f"{title} of {name} after {self.engine.drift.progress}{advice}"
        with Waiting(self.engine.process, title):
            if optimizer is not None:
                return self._full_optimizer(title, optimizer, keep)
            full, extra = self._full_tensors(title, keep=keep)
            if not keep:
                return {}
            with self.guard.opened(), in_place_of(self.module, full):
                state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
            prefix = kwargs.get("prefix", "")
            for name, value in extra.items():
                if prefix + name in state:
                    state[prefix + name] = value
            return state

    def _full_tensors(
        self, title: str, *, keep: bool = True
    ) -> tuple[dict[int, Tensor], dict[str, Any]]:
        """Return full tensors by ``id``, and extra state. Collective."""
        self.prepare(writing=False)
        tensors = dict(self.module.named_buffers()) | _first_names(self.module)
        held: list[Item] = [(name, "", tensor) for name, tensor in tensors.items()]
        # In a pipeline, only the rank of a module's stage has the module's extra state.
        if type(self).has is not Holdings.has:
            for name, value in self.values(None).items():
                held.append((name, "extra", value))
        full: dict[int, Tensor] = {}
        extra: dict[str, Any] = {}
        gathered = self.gather(title, held, device=_CPU, keep=keep)
        for (name, key), value in gathered.items():
            if key == "extra":
                extra[name] = value
                continue
            tensor = tensors[name]
            # DeepSpeed's master copies are in float32.
            value = value.to(tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, tensor.requires_grad)
            full[id(tensor)] = value
        return full, extra

    def _full_optimizer(self, title: str, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        full = self._full_optimizer_state(title, optimizer, device=_CPU, keep=keep)
        if not keep:
            return {}
        names = self.parameter_names
        shards, optimizer.state = optimizer.state, defaultdict(dict)
        for p in parameters_of(optimizer):
            name = names[id(p)]
            if name in full:
                optimizer.state[p] = full[name]
        try:
            with self.guard.opened():
                return optimizer.state_dict()
        finally:
            optimizer.state = shards

    @final
    def copy(self, memo: dict[int, Any]) -> nn.Module:
        """Return a full deep copy of the raw model. Collective if sharded."""
        extra: dict[str, Any] = {}
        if self.partial(None):
            # If one rank calls this alone, the other ranks' error shows this text.
            title = "copy.deepcopy(model) or pickle (call it on every rank, not under an `if`)"
            with Waiting(self.engine.process, title):
                full, extra = self._full_tensors(title)
            memo |= full
        with as_author_made(self.module, self.snapshot, self.engine.replaced_modules):
            copied = copy.deepcopy(self.module, memo)
        fill_module_values(copied, extra)
        return copied

    # -- loading full state ------------------------------------------------------------------------

    @final
    def load_state_dict(self, optimizer: Optimizer | None, args: Args, kwargs: Kwargs) -> Any:
        """Load a full state by the raw method. Collective."""
        if optimizer is None:
            return self._load_model(args, kwargs)
        return self._load_optimizer(optimizer, *args, **kwargs)

    def _load_model(self, args: Args, kwargs: Kwargs) -> Any:
        if kwargs.get("assign"):
            raise BackendError(
                "load_state_dict(assign=True) would replace shards. Remove assign=True."
            )
        self.prepare(writing=True)
        tensors = _first_names(self.module)
        targets = {}
        for name, tensor in tensors.items():
            targets[id(tensor)] = Target.of(tensor, self.shapes.get(name))

        @torch.no_grad()
        def fill() -> None:
            for name, tensor in tensors.items():
                target = targets[id(tensor)]
                value: Any = target.given
                target.given = None
                shard = None if value is None else self.part(name, tensor)
                if shard is None:
                    continue
                if hasattr(value, "full_tensor"):
                    value = value.full_tensor()
                shard.fill(value)
                # Autograd may not notice the write, because the shard may have its own memory.
                torch.autograd.graph.increment_version(tensor)
            self.filled()

        with self.guard.opened(), in_place_of(self.module, targets, fill):
            out = self.module.load_state_dict(*args, **kwargs)
        fill()
        return out

    def _load_optimizer(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        names, full = self.parameter_names, {}
        state = dict(state_dict["state"])
        parameters = iter(parameters_of(optimizer))
        for group in state_dict["param_groups"]:
            for number, p in zip(group["params"], parameters, strict=False):
                if number in state:
                    full[names[id(p)]] = state.pop(number)
        # torch checks and loads the groups, and state that belongs to no parameter.
        with self.guard.opened():
            optimizer.load_state_dict({**state_dict, "state": state})
        self.take(optimizer, full)

    @final
    @torch.no_grad()
    def take(self, optimizer: Optimizer, full: Mapping[str, Mapping[Any, Any]]) -> None:
        """Keep this rank's shard of full state by name. Local."""
        groups = self.groups(optimizer)
        for entry in self.entries(optimizer):
            own = {}
            for key, value in full.get(entry.name, {}).items():
                own[key] = self.own_part(entry, key, value, groups[entry.name])
            # A parameter without loaded state keeps its state, as in torch.
            if own:
                optimizer.state[entry.parameter] = own

    @final
    def own_part(self, entry: StateEntry, key: Any, value: Any, group: Mapping[str, Any]) -> Any:
        """Return this rank's shard of a full value, with torch's dtype."""
        like = entry.parameter

        def shard(tensor: Tensor) -> Tensor:
            # A state of torch.distributed.checkpoint has DTensors.
            if hasattr(tensor, "full_tensor"):
                return tensor
            if key == "step" and tensor.numel() == 1:
                return tensor.to(state_device(key, like.device, group), copy=True)
            is_floating = like.is_floating_point() and tensor.is_floating_point()
            dtype = like.dtype if is_floating else tensor.dtype
            if tuple(tensor.shape) != entry.shape or tensor.layout is not torch.strided:
                return tensor.to(like.device, dtype, copy=True)
            local = self.new_state(entry, key, tuple(tensor.shape), dtype)
            part = self.part(entry.name, local, key)
            if part is not None:
                part.fill(tensor)
            return local

        return map_tensors(shard, value)

    @final
    def drop_others(self, optimizer: Optimizer) -> None:
        """Drop the state that belongs to other ranks. Local."""
        kept = {id(entry.parameter) for entry in self.entries(optimizer)}
        for p in parameters_of(optimizer):
            if id(p) not in kept:
                optimizer.state.pop(p, None)

    def _full_optimizer_state(
        self, title: str, optimizer: Optimizer, **options: Any
    ) -> dict[str, dict[Any, Any]]:
        """Return full state by name, in parameter order. Collective."""
        held: list[Item] = []
        for entry in self.entries(optimizer):
            held += [(entry.name, key, value) for key, value in entry.state.items()]
        names = self.parameter_names
        full: dict[str, dict[Any, Any]] = {names[id(p)]: {} for p in parameters_of(optimizer)}
        for (name, key), value in self.gather(title, held, **options).items():
            full.setdefault(name, {})[key] = value
        return {name: state for name, state in full.items() if state}

    @final
    def give_back(self, title: str, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        """Make a raw optimizer's state full on every rank. Collective."""
        full = self._full_optimizer_state(title, optimizer)
        for entry in self.entries(optimizer):
            optimizer.state.pop(entry.parameter, None)
        groups, device = self.groups(optimizer), self.engine.process.device
        for name, values in full.items():
            optimizer.state[parameters[name]] = values
            # Step counters of offloaded state are on the CPU, and fused optimizers need the GPU.
            for key in values:
                target = state_device(key, device, groups.get(name, {}))
                values[key] = to_device(values[key], target)

    @final
    def gather(
        self, title: str, held: Iterable[Item], *, device: Any = None, keep: bool = True
    ) -> dict[Any, Any]:
        """Return full values by name and key. Collective."""
        process, title = self.engine.process, f"{title} ({self.engine.label})"
        return gather(title, held, self.part, process, device or process.device, keep)

    @final
    def synchronize(self, source: int = 0) -> None:
        """Broadcast a rank's weights and buffers. Collective."""
        engine = self.engine
        if not engine.distributed:
            return
        parameters = () if engine.reads else engine.parameters
        weights = [p.data for p in parameters if not p.is_meta]
        for name, buffer in engine.module.named_buffers():
            if buffer.layout is not torch.strided or buffer.is_quantized:
                raise BackendError(
                    f"The buffer {name} of {engine.label} is sparse or quantized, "
                    "so it can't be broadcast. Keep it in a plain attribute."
                )
        values = [*inner_tensors(weights), *engine.module.buffers()]
        with Waiting(engine.process, f"the weights of {engine.label}"):
            broadcast_(values, engine.process.group, source)


def _first_names(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their first name."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named_tensors(module):
        tensors.setdefault(id(tensor), (name, tensor))
    return dict(tensors.values())
