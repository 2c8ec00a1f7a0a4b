"""The state of a model and its optimizers on this rank, and full state from it.

A backend says which state is sharded and where its shards are (``partial``, ``part``, ``entries``, ``has``). The rest is
the same for every backend: ``state_dict``, ``load_state_dict``, checkpoints, ``teardown`` and copies.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError
from ...gradients.hooks import remove_hooks
from ...process.control import Waiting, agree
from ...process.packing import broadcast_, writable
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
from .digest import digest, digest_values
from .gather import Item, gather
from .raw_objects import Guard, Snapshot, Target, as_author_made, copied_to, in_place_of
from .step import take_added_groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .engine import Engine

_CPU = torch.device("cpu")


class Holdings(Raw):
    """The state on this rank. By default each rank has all of it. ``optimizer=None`` means the model."""

    #: True if an option may put shards into host memory. Full state goes to the device all the same.
    offloads: bool = False
    #: True if ``start`` gives parameters on the meta device memory and values.
    materializes: bool = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.module, {})
        self.engine: Any = engine
        self.guard = Guard(self)
        #: The full shapes of parameters, which may be shards later.
        self.shapes = {name: p.shape for name, p in engine.named.items()}

    # -- what a backend overrides -----------------------------------------------------------------------------------

    def partial(self, optimizer: Optimizer | None) -> bool:
        """True if this rank may have only a part of the state. The same on all ranks. Local."""
        return False

    def prepare(self, *, writing: bool) -> None:
        """Make tensors match their shards, before they are read or written. Local."""

    def filled(self) -> None:
        """Update what depends on the shards after they were filled, such as half-precision copies. Collective."""

    def gradients(self) -> Iterator[Item]:
        """Return the final gradients on this rank. Local."""
        for name, parameter in self.engine.named.items():
            if parameter.grad is not None:
                yield name, "grad", parameter.grad

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Return the weights that are equal before each step on all ranks that have one of this name. Local."""
        sharded = self.engine.placements.weights.sharded
        return [] if sharded else list(self.engine.named.items())

    @property
    def snapshot(self) -> Snapshot | None:
        """The changes of the module that the backend's library made. Local."""
        return None

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the model if it has one. Local."""
        return None

    @classmethod
    def divides_from_host(cls, options: Any) -> bool:
        """True if ``start`` copies this rank's shards from host memory to its device. Pure.

        Full weights that are read from files then never need memory.
        """
        return False

    # -- for checkpoints --------------------------------------------------------------------------------------------

    @property
    def parameter_names(self) -> dict[int, str]:
        """Names by the identity of the optimizers' parameters."""
        return {id(p): name for name, p in self.engine.named.items()}

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        take_added_groups(self.engine, optimizer)
        return super().entries(optimizer)

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        if optimizer is None:
            self.prepare(writing=False)
        with self.guard.opened():
            return super().shards(optimizer)

    # -- full state -------------------------------------------------------------------------------------------------

    @final
    def full_state_dict(self, optimizer: Optimizer | None, *, keep: bool = True) -> dict[str, Any]:
        """Return what the raw object's ``state_dict()`` holds in one process, on ranks that ``keep`` it. Collective.

        It is what that method returns while full tensors replace shards, so hooks and the order of keys are the object's
        own. The full tensors are in host memory, because a device may be too small for them.
        """
        if not self.partial(optimizer):
            return (optimizer or self.module).state_dict()
        return self._full_state("accel.full_state_dict", optimizer, keep=keep)

    @final
    def state_dict(self, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the full state for ``state_dict(*args, **kwargs)`` of a sharded raw object or its handle. Collective."""
        kind = "model" if optimizer is None else "optimizer"
        if kwargs.get("keep_vars") or args[2:] == (True,):
            raise BackendError(
                "state_dict(keep_vars=True) would return parameters that are sharded. Leave keep_vars out."
            )
        # If a rank calls it alone, this text is in the error of the other ranks.
        advice = (
            f"which every rank calls: write state = {kind}.state_dict() above an `if` of one rank"
        )
        return self._full_state(f"{kind}.state_dict(), {advice},", optimizer, *args, **kwargs)

    def _full_state(
        self, title: str, optimizer: Optimizer | None, *args: Any, keep: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        with Waiting(self.engine.process, title):
            name = "the model" if optimizer is None else type(optimizer).__name__
            # After an interruption, ranks may have shards of different steps. They compare the title.
            title = f"{title} of {name} after {self.engine.drift.progress}"
            if optimizer is not None:
                return self._full_optimizer(title, optimizer, keep)
            full, extra = self._whole_tensors(title, keep=keep)
            if not keep:
                return {}
            with self.guard.opened(), in_place_of(self.module, full):
                state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
            prefix = kwargs.get("prefix", "")
            names = {prefix + name: value for name, value in extra.items()}
            state.update({name: value for name, value in names.items() if name in state})
            return state

    def _whole_tensors(
        self, what: str, *, copied: bool = False, keep: bool = True
    ) -> tuple[dict[int, torch.Tensor], dict[str, Any]]:
        """Return full tensors by the identity of the model's own, and the modules' extra state. Collective.

        With ``copied``, buffers that are not in the state dict are among them.
        """
        self.prepare(writing=False)
        tensors = dict(self.module.named_buffers()) if copied else {}
        tensors |= _first_names(self.module)
        extra = self.values(None) if type(self).has is not Holdings.has else {}
        held: list[Item] = [(name, "", tensor) for name, tensor in tensors.items()]
        held += [(name, "extra", value) for name, value in extra.items()]
        values = self.gather(what, held, device=_CPU, keep=keep)
        full: dict[int, torch.Tensor] = {}
        for name, tensor in tensors.items() if keep else ():
            value = values.pop((name, "")).to(tensor.dtype)  # a master copy is more precise
            is_parameter = isinstance(tensor, nn.Parameter)
            full[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
        return full, {name: value for (name, _), value in values.items()}

    def _full_optimizer(self, title: str, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        names = self.parameter_names
        entries = self.entries(optimizer)
        full = self._whole_state(title, optimizer, entries, _CPU, keep)
        if not keep:
            return {}
        replaced = {id(entry.parameter) for entry in entries}.union(names)
        state: Any = {
            p: full[names[id(p)]] for p in parameters_of(optimizer) if names[id(p)] in full
        }
        state |= {key: value for key, value in optimizer.state.items() if id(key) not in replaced}
        shards, optimizer.state = optimizer.state, defaultdict(dict, state)
        try:
            with self.guard.opened():
                return optimizer.state_dict()
        finally:
            optimizer.state = shards

    @final
    def copy(self, memo: dict[int, Any]) -> nn.Module:
        """Return a deep copy of the module as its author made it, with full tensors. Collective if it is sharded."""
        extra: dict[str, Any] = {}
        if self.partial(None):
            title = "a copy of the model, which every rank makes: write full = copy.deepcopy(model) above an `if` of one rank"
            with Waiting(self.engine.process, title):
                full, extra = self._whole_tensors(title, copied=True)
            memo |= full
        with as_author_made(self.module, self.snapshot, self.engine.replaced_modules):
            made = copy.deepcopy(self.module, memo)
        fill_module_values(
            made, {name: value for name, value in extra.items() if not self.has(name)}
        )
        return made

    @final
    def copy_to_pickle(self) -> nn.Module:
        """Return a deep copy of a module that is not sharded. Local.

        Raises:
            BackendError: if the module is sharded.
        """
        if self.partial(None):
            raise BackendError(
                f"Can't pickle {self.engine.kind}, because this rank holds only shards of it. Pickle copy.deepcopy(model), "
                "which every rank calls, or accel.full_state_dict(model)."
            )
        return self.copy({})

    # -- loading full state -----------------------------------------------------------------------------------------

    @final
    def load_state_dict(
        self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Load a full state, the same on every rank, by the raw object's own method. Collective like ``filled``.

        Hooks, checks and messages are the raw object's. Each rank keeps its own shards.
        """
        if not self.partial(optimizer):
            return (optimizer or self.module).load_state_dict(*args, **kwargs)
        if optimizer is None:
            return self._load_model(args, kwargs)
        return self._load_optimizer(optimizer, args, kwargs)

    def _load_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("assign") or args[2:3] == (True,):
            raise BackendError(
                "load_state_dict(assign=True) would replace parameters that are sharded. Leave assign out."
            )
        self.prepare(writing=True)
        targets: dict[int, torch.Tensor] = {}
        places: list[tuple[str, torch.Tensor, Target]] = []
        for name, tensor in _first_names(self.module).items():
            target = targets[id(tensor)] = Target.of(tensor, self.shapes.get(name))
            places.append((name, tensor, target))

        @torch.no_grad()
        def fill() -> None:
            for name, tensor, target in places:
                value: Any = target.given
                target.given = None
                if value is not None and (shard := self.part(name, tensor)) is not None:
                    shard.fill(value.full_tensor() if hasattr(value, "full_tensor") else value)
                    # Autograd may have saved the parameter, whose memory is not the shard's with some backends.
                    torch.autograd.graph.increment_version(tensor)
            self.filled()

        with self.guard.opened(), copied_to(), in_place_of(self.module, targets, fill):
            out = self.module.load_state_dict(*args, **kwargs)
        fill()
        return out

    def _load_optimizer(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        full: dict[str, Any] = {}
        calls = []

        def take_state(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            """Keep the state of parameters from torch, which checks and loads the groups."""
            names = self.parameter_names
            numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
            name_of = {
                n: names[id(p)] for n, p in zip(numbers, parameters_of(optimizer), strict=False)
            }
            rest = {}
            for number, state in state_dict["state"].items():
                if number in name_of:
                    full[name_of[number]] = state
                else:
                    rest[number] = state
            return {**state_dict, "state": rest}

        def fill(_: Optimizer) -> None:
            calls.append(True)
            self.take(optimizer, full)
            # Some classes update the state of older versions there.
            optimizer.__setstate__(
                {"state": optimizer.state, "param_groups": optimizer.param_groups}
            )

        hooks = [
            optimizer.register_load_state_dict_pre_hook(take_state),
            optimizer.register_load_state_dict_post_hook(fill, prepend=True),
        ]
        try:
            with self.guard.opened():
                optimizer.load_state_dict(*args, **kwargs)
        finally:
            remove_hooks(hooks)
        if not calls:
            raise OptimizerError(
                f"{type(optimizer).__name__}.load_state_dict() must call super().load_state_dict(), so that this rank can keep "
                "its part of the state. Or use accel.save and accel.load."
            )

    @torch.no_grad()
    def take(self, optimizer: Optimizer, whole: Mapping[str, Mapping[Any, Any]]) -> None:
        """Keep this rank's part of the full state of parameters, by name. Other parameters keep their state. Local."""
        groups = self.groups(optimizer)
        for entry in self.entries(optimizer):
            if state := whole.get(entry.name):
                group = groups[entry.name]
                parts = {
                    key: self.own_part(entry, key, value, group) for key, value in state.items()
                }
                optimizer.state[entry.parameter] = parts

    @final
    def own_part(self, entry: StateEntry, key: Any, value: Any, group: Mapping[str, Any]) -> Any:
        """Return this rank's part of a full value in a parameter's state, in the dtype and on the device that torch uses."""
        like = entry.parameter

        def shard(tensor: torch.Tensor) -> torch.Tensor:
            if hasattr(tensor, "full_tensor"):  # a shard already
                return tensor
            if key == "step" and tensor.numel() == 1:
                return tensor.to(state_device(key, like.device, group), copy=True)
            is_floating = like.is_floating_point() and tensor.is_floating_point()
            dtype = like.dtype if is_floating else tensor.dtype
            if tuple(tensor.shape) != entry.shape or tensor.layout is not torch.strided:
                return tensor.to(like.device, dtype, copy=True)
            part = self.new_state(entry, key, tuple(tensor.shape), dtype)
            if (slot := self.part(entry.name, part, key)) is not None:
                slot.fill(tensor)
            return part

        return map_tensors(shard, value, others=True)

    @final
    def drop_others(self, optimizer: Optimizer) -> None:
        """Drop the state of parameters that other ranks step. Local."""
        kept = {id(entry.parameter) for entry in self.entries(optimizer)}
        for parameter in parameters_of(optimizer):
            if id(parameter) not in kept:
                optimizer.state.pop(parameter, None)

    # -- full tensors from shards -----------------------------------------------------------------------------------

    def _whole_state(
        self,
        what: str,
        optimizer: Optimizer,
        entries: Iterable[StateEntry],
        device: torch.device | None = None,
        keep: bool = True,
    ) -> dict[str, dict[Any, Any]]:
        """Return the full state of parameters by name, in the same order on all ranks. Collective."""
        names = self.parameter_names
        order = [names[id(p)] for p in parameters_of(optimizer)] + list(names.values())
        held = [(entry.name, key, value) for entry in entries for key, value in entry.state.items()]
        full: dict[str, dict[Any, Any]] = {name: {} for name in order}
        for (name, key), value in self.gather(what, held, device=device, keep=keep).items():
            full[name][key] = value
        return {name: state for name, state in full.items() if state}

    @final
    def give_back(
        self, what: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Make a raw optimizer's state full on every rank, also of parameters in no group. Collective."""
        entries, names = self.entries(optimizer), self.parameter_names
        known = {*map(id, parameters_of(optimizer)), *(id(entry.parameter) for entry in entries)}
        for key, state in optimizer.state.items():
            if isinstance(key, torch.Tensor) and id(key) in names and id(key) not in known:
                entries.append(StateEntry(names[id(key)], tuple(key.shape), key, state))
        full, groups = self._whole_state(what, optimizer, entries), self.groups(optimizer)
        for entry in entries:
            optimizer.state.pop(entry.parameter, None)
        device = self.engine.process.device
        for name, state in full.items():
            if self.offloads:  # numbers are still beside the shards
                group = groups.get(name, {})
                state = {
                    key: to_device(value, state_device(key, device, group))
                    for key, value in state.items()
                }
            optimizer.state[parameters[name]] = state

    @final
    def gather(
        self,
        what: str,
        held: Iterable[Item],
        *,
        device: torch.device | None = None,
        keep: bool = True,
    ) -> dict[tuple[str, Any], Any]:
        """Return full values by name and key from the values on each rank, as ``gather`` does. Collective."""
        process = self.engine.process
        device = process.device if device is None and self.offloads else device
        return gather(
            f"{what} ({self.engine.label})", held, self.part, process, device=device, keep=keep
        )

    @final
    def synchronize(self, source: int = 0) -> None:
        """Copy rank ``source``'s weights and buffers to all ranks, before they are sharded. Collective."""
        engine = self.engine
        if not engine.distributed:
            return
        weights = [] if engine.reads else [p.data for p in engine.parameters if not p.is_meta]
        buffers = engine.module.named_buffers()
        odd = [name for name, b in buffers if b.layout is not torch.strided or b.is_quantized]
        if odd:
            raise BackendError(
                f"The buffers {', '.join(odd[:5])} of {engine.label} are sparse or quantized, so they can't be "
                "broadcast. Keep them in plain attributes of the module."
            )
        values = inner_tensors(weights) + writable(engine.module.buffers())
        # In host memory a digest takes less time than a broadcast, and ranks usually start with equal weights.
        on_host = all(
            type(t) is torch.Tensor and t.layout is torch.strided and t.device.type == "cpu"
            for t in values
        )
        digests = agree(
            f"the weights of {engine.label}",
            digest_values([digest(t) for t in values]) if on_host else None,
        )
        if digests[0] is None or len(set(digests)) > 1:
            broadcast_(values, engine.process.group, source)


def _first_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, each once, under its first name."""
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(module):
        tensors.setdefault(id(tensor), (name, tensor))
    return dict(tensors.values())
