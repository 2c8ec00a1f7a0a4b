"""What of a model and its optimizers lies on this rank, and one road for whole state in and out, for every engine.

A backend says where things lie (``partial``, ``part``, ``entries``, ``has``); all the rest follows: what checkpoints write and
fill, ``state_dict``, ``full_state_dict``, ``load_state_dict``, the gathering at an engine's end, copies and measures.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from ... import shard
from ...errors import BackendError, OptimizerError
from ...process.control import Waiting
from ...process.packing import broadcast_
from ...shard import Manifest, Shard, StateEntry
from ...trees import map_tensors
from .gather import Item, gather
from .guards import Guard
from .memory import MemoryUse

if TYPE_CHECKING:
    from .engine import Engine


class Holdings:
    """Engines that keep everything whole on every rank need no more than this. ``optimizer=None`` means the model itself."""

    #: A step overwrites or spreads what one rank alone wrote to a weight, so that values tell nothing of it later.
    undoes_writes: bool = False
    #: The engine's ``parameters`` are each rank's part of a weight, and every rank does the same with them.
    divides_weights: bool = False
    #: State lies in the host's memory by the engine's doing; whole it lies on the device, as in one process.
    offloads: bool = False

    def __init__(self, engine: Engine) -> None:
        self.engine: Any = engine
        self.guard = Guard()
        #: Of each parameter, whole, whatever becomes of it on this rank.
        self.shapes = {name: p.shape for name, p in zip(engine.names, engine.parameters, strict=True)}

    # -- where things lie: what a backend overrides -------------------------------------------------------------------

    def partial(self, optimizer: Optimizer | None) -> bool:
        """Whether this rank may hold a part only. Local, and the same on all ranks."""
        return False

    def prepare(self, *, writing: bool) -> None:
        """Make what lies here as its shards say it, to be read or to be written. Local."""
        return

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        """What lies here of the tensor that is found here under a name; None where nothing does. Local, without a copy.

        Args:
            name: of a parameter or buffer.
            tensor: the parameter or buffer, or of its optimizer's state, or its gradient.
            key: of the state, or "grad"; empty for the parameter or buffer.
        """
        return shard.whole(f"{name}/{key}" if key else name, tensor)

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        """The state that this rank keeps. Local."""
        return shard.entries(optimizer, self.parameter_names)

    def new_state(self, entry: StateEntry, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for what this rank keeps of a tensor of this shape in the state of a parameter. Local."""
        return shard.new_state(entry, key, shape, dtype)

    def has(self, name: str) -> bool:
        """Whether the module keeps on this rank what its ``state_dict`` has under a name and is no tensor. Local."""
        return True

    def filled(self) -> None:
        """Hear that shards were filled: derive what depends on them (half-precision copies, say). Collective."""
        return

    def gradients(self) -> Iterator[Item]:
        """The final gradients that this rank keeps. Local."""
        for name, parameter in zip(self.engine.names, self.engine.parameters, strict=True):
            if parameter.grad is not None:
                yield name, "grad", parameter.grad

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        """The weights that every rank holds whole, and equal before each step. Local."""
        return list(zip(self.engine.names, self.engine.parameters, strict=True))

    def set_data(self, parameter: torch.Tensor, value: torch.Tensor) -> bool:
        """Take what the loop assigns to ``parameter.data``, where torch would put it in a wrong place; False if not. Local."""
        return False

    @classmethod
    def read_foreign(cls, path: str, load: Any, new: Any) -> dict[str, Any] | None:
        """The state in a checkpoint that this backend's own library wrote; None if there is none. Local.

        Args:
            path: a directory.
            load: reads a pickled file without running what is in it; takes its path, and the names of classes that may be
                in it and are read as inert objects.
            new: makes a tensor of a shape and dtype that need not fit into memory.
        """
        return None

    def storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What lives on this rank: tensors, each with the field of ``MemoryUse`` that it counts for. Local."""
        parameters = self.engine.parameters
        yield from (("parameters", parameter) for parameter in parameters)
        yield from (("buffers", buffer) for buffer in self.engine.module.buffers())
        yield from (("gradients", p.grad) for p in parameters if p.grad is not None)
        for optimizer in self.engine.optimizers:
            for state in optimizer.state.values():
                yield from (("optimizer_state", value) for value in state.values() if isinstance(value, torch.Tensor))

    def hidden_buckets(self) -> int:
        """Bytes of buckets that no tensor of ``storages`` lies in. Local."""
        return 0

    # -- what checkpoints write and fill --------------------------------------------------------------------------------

    @property
    def parameter_names(self) -> dict[int, str]:
        """Names by the identity of what the optimizers' groups hold."""
        return {id(p): n for n, p in zip(self.engine.names, self.engine.parameters, strict=True)}

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        """The tensors that lie on this rank, at full precision (a master copy where there is one). Local, without a copy."""
        if optimizer is not None:
            return shard.optimizer_shards(optimizer, self.parameter_names, self.entries(optimizer), self._state_part)
        self.prepare(writing=False)
        with self.guard.opened():
            return shard.module_shards(self.engine.module, self.part)

    def _state_part(self, name: str, key: str, tensor: torch.Tensor) -> Shard | None:
        return self.part(name, tensor, key)

    @final
    def values(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """``shard.optimizer_values`` of what lies on this rank; of the model the extra state by name. Local."""
        if optimizer is None:
            return shard.module_values(self.engine.module, self.has)
        return shard.optimizer_values(optimizer, self.parameter_names, self.entries(optimizer))

    @final
    def slots(self, optimizer: Optimizer | None, manifest: Manifest) -> list[Shard]:
        """What this rank needs filled of the checkpoint that ``manifest`` describes; creates optimizer state. Local."""
        if optimizer is None:
            return self.shards(None)
        names, held = self.parameter_names, self.entries(optimizer)
        return shard.optimizer_slots(optimizer, names, manifest, held, self._state_part, self.new_state)

    @final
    def fill(self, optimizer: Optimizer | None, values: Mapping[str, Any]) -> None:
        """Take over the values of all ranks' ``values`` together. Local; comes after the slots were filled."""
        if optimizer is None:
            shard.fill_module_values(self.engine.module, values)
        else:
            shard.fill_optimizer_values(optimizer, self.parameter_names, values, self.entries(optimizer))

    # -- what the handles do --------------------------------------------------------------------------------------------

    @final
    def copy(self, memo: dict[int, Any]) -> nn.Module:
        """A raw copy, for ``copy.deepcopy(handle)``. Local; raises where this rank does not hold it all."""
        made: nn.Module = copy.deepcopy(self.engine.module, memo)
        return made

    @final
    def state_dict(self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The handle's ``state_dict()``. Local; the guard refuses it where this rank does not hold it all."""
        raw = self.engine.module if optimizer is None else optimizer
        state: dict[str, Any] = raw.state_dict(*args, **kwargs)
        return state

    @final
    def full_state_dict(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """What the raw object's ``state_dict()`` would hold in one process, on every rank. Collective.

        It is what that method returns while whole tensors are in the places of parts, so that hooks and order are its own.
        """
        if not self.partial(optimizer):
            return self.state_dict(optimizer, (), {})
        kind = "the model" if optimizer is None else type(optimizer).__name__
        what = f"accel.full_state_dict of {kind}"
        with Waiting(self.engine.process, "accel.full_state_dict"):
            return self._full_model(what) if optimizer is None else self._full_optimizer(what, optimizer)

    def _full_model(self, what: str) -> dict[str, Any]:
        module: nn.Module = self.engine.module
        self.prepare(writing=False)
        tensors = _first_names(module)
        extra = self.values(None) if type(self).has is not Holdings.has else {}
        held = [(name, "", tensor) for name, tensor in tensors.items()]
        whole = self.gather(what, [*held, *((name, "extra", value) for name, value in extra.items())])
        others = {}
        for name, tensor in tensors.items():
            full = whole.pop((name, "")).to(tensor.dtype)  # a master copy has more digits
            others[id(tensor)] = nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full
        with self.guard.opened(), _in_place_of(module, others):
            state: dict[str, Any] = module.state_dict()
        made: dict[Any, torch.Tensor] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:  # what is tied is one tensor
                state[name] = made.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), value)
        state.update({name: value for (name, _), value in whole.items() if name in state})
        return state

    def _full_optimizer(self, what: str, optimizer: Optimizer) -> dict[str, Any]:
        names = self.parameter_names
        whole = self.whole_state(what, optimizer)
        kept = {id(entry.parameter) for entry in self.entries(optimizer)}
        state: Any = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        state = {parameter: whole[name] for name, parameter in state.items() if name in whole}
        state |= {key: value for key, value in optimizer.state.items() if id(key) not in kept}
        own, optimizer.state = optimizer.state, defaultdict(dict, state)
        try:
            with self.guard.opened():
                return optimizer.state_dict()
        finally:
            optimizer.state = own

    @final
    def load_state_dict(self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The handle's ``load_state_dict(full)``, with the same full state on every rank. Collective where ``filled`` is.

        It is the raw object's own, with its hooks, checks and messages; it meets what notes the values that this rank needs.
        """
        if not self.partial(optimizer):
            return (self.engine.module if optimizer is None else optimizer).load_state_dict(*args, **kwargs)
        if optimizer is None:
            return self._load_model(args, kwargs)
        self._load_optimizer(optimizer, args, kwargs)
        return None

    def _load_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("assign") or args[2:3] == (True,):
            raise BackendError(
                "load_state_dict(assign=True) would replace parameters that are divided over the ranks by whole ones: leave "
                "assign out"
            )
        if type(self).filled is not Holdings.filled:  # a collective
            self.engine.compare("load_state_dict")
        self.prepare(writing=True)
        module: nn.Module = self.engine.module
        targets = {
            id(tensor): (name, tensor, Target.of(tensor, self.shapes.get(name)))
            for name, tensor in _first_names(module).items()
        }

        def take() -> None:
            """Fill what was noted so far."""
            for name, tensor, target in targets.values():
                if target.given is not None:
                    self._fill(name, tensor, target.given)
                    target.given = None
            self.filled()

        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(False)
        try:
            with self.guard.opened(), _in_place_of(module, {key: t for key, (*_, t) in targets.items()}, take):
                out = module.load_state_dict(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
        take()
        return out

    @torch.no_grad()
    def _fill(self, name: str, tensor: torch.Tensor, given: torch.Tensor) -> None:
        self.engine.drift.read(tensor, None)  # as of any write
        if hasattr(given, "full_tensor"):
            given = given.full_tensor()
        if (mine := self.part(name, tensor)) is not None:
            mine.fill(given)
            # What autograd has saved for a backward is another tensor than the part, with some engines.
            torch.autograd.graph.increment_version(tensor)

    def _load_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken: dict[str, Any] = {}
        calls = []

        def take(_: Optimizer, full: dict[str, Any]) -> dict[str, Any]:
            """After the user's own hooks: the raw optimizer checks the groups, and loads these."""
            numbers = [number for group in full["param_groups"] for number in group["params"]]
            names = self.parameter_names
            held = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            known = dict(zip(numbers, held, strict=False))
            taken.update({known[n]: state for n, state in full["state"].items() if n in known})
            return {**full, "state": {n: state for n, state in full["state"].items() if n not in known}}

        def fill(_: Optimizer) -> None:
            calls.append(True)
            self.take(optimizer, taken)
            # Where a class brings the state of older versions up to date.
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

        hooks = [
            optimizer.register_load_state_dict_pre_hook(take),
            optimizer.register_load_state_dict_post_hook(fill, prepend=True),
        ]
        try:
            with self.guard.opened():
                optimizer.load_state_dict(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        if not calls:
            raise OptimizerError(
                f"{type(optimizer).__name__}.load_state_dict() does not call torch's own, so that this rank cannot keep its part "
                "of the state only: call super().load_state_dict(...) there, or use accel.save and accel.load"
            )

    @final
    @torch.no_grad()
    def take(self, optimizer: Optimizer, whole: Mapping[str, Mapping[Any, Any]]) -> None:
        """Keep this rank's part of the whole state of parameters, by name; that of others stays as it is. Local."""
        names = self.parameter_names
        beside = {
            names[id(p)]: bool(g.get("capturable") or g.get("fused"))
            for g in optimizer.param_groups
            for p in g["params"]
        }
        for entry in self.entries(optimizer):
            if state := whole.get(entry.name):
                optimizer.state[entry.parameter] = {
                    key: self.own_part(entry, key, value, counter_beside=beside[entry.name])
                    for key, value in state.items()
                }

    @final
    def own_part(self, entry: StateEntry, key: Any, value: Any, *, counter_beside: bool) -> Any:
        """This rank's part of a whole value in the state of a parameter, in the dtype and place that torch gives it. Local."""
        like = entry.parameter

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if hasattr(tensor, "full_tensor"):  # cut already
                return tensor
            if key == "step" and tensor.numel() == 1:
                return tensor.to(like.device, copy=True) if counter_beside else tensor.clone()
            floating = like.is_floating_point() and tensor.is_floating_point()
            dtype = like.dtype if floating else tensor.dtype
            if tuple(tensor.shape) != entry.shape or tensor.layout is not torch.strided:
                return tensor.to(like.device, dtype, copy=True)
            made = self.new_state(entry, key, tuple(tensor.shape), dtype)
            if (mine := self.part(entry.name, made, key)) is not None:
                mine.fill(tensor)
            return made

        return map_tensors(cut, value, others=True)

    # -- whole state from parts ---------------------------------------------------------------------------------------

    @final
    def whole_state(self, what: str, optimizer: Optimizer, *, strays: bool = False) -> dict[str, dict[Any, Any]]:
        """An optimizer's whole state by the names of its parameters, on every rank; ``strays`` are in no group. Collective."""
        entries = [*self.entries(optimizer), *(self._strays(optimizer) if strays else ())]
        held = [(entry.name, key, value) for entry in entries for key, value in entry.state.items()]
        names = self.parameter_names
        held_names = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        order = {name: i for i, name in enumerate(dict.fromkeys([*held_names, *names.values()]))}
        whole: dict[str, dict[Any, Any]] = {}
        for (name, key), value in self.gather(what, held).items():
            whole.setdefault(name, {})[key] = value
        return dict(sorted(whole.items(), key=lambda item: order[item[0]]))

    @final
    def give_back(
        self, optimizer: Optimizer, whole: Mapping[str, Mapping[Any, Any]], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Make ``whole_state`` the state of a raw optimizer, in one order on all ranks. Local."""
        for entry in [*self.entries(optimizer), *self._strays(optimizer)]:
            optimizer.state.pop(entry.parameter, None)
        for name, state in whole.items():
            optimizer.state[parameters[name]] = state

    def _strays(self, optimizer: Optimizer) -> list[StateEntry]:
        names = self.parameter_names
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        known |= {id(entry.parameter) for entry in self.entries(optimizer)}
        return [
            StateEntry(names[id(key)], tuple(key.shape), key, state)
            for key, state in optimizer.state.items()
            if isinstance(key, torch.Tensor) and id(key) in names and id(key) not in known
        ]

    @final
    def gather(self, what: str, held: Iterable[Item]) -> dict[tuple[str, Any], Any]:
        """``gather`` of what this rank has; ``what`` names it for messages. Collective."""
        return gather(f"{what} ({self.engine.label})", held, self.part, self.engine.process, on_device=self.offloads)

    @final
    def synchronize(self, source: int = 0) -> None:
        """Give every rank rank ``source``'s weights and buffers, while all are whole. Collective."""
        engine = self.engine
        if engine.distributed:
            tensors = [p.data for p in engine.parameters if not p.is_meta] + [b.data for b in engine.module.buffers()]
            broadcast_(tensors, engine.process.group, source)

    # -- memory ---------------------------------------------------------------------------------------------------------

    @final
    def full_shape(self, parameter: torch.Tensor) -> Sequence[int]:
        """The shape that a parameter has in one process."""
        return self.shapes[self.parameter_names[id(parameter)]]

    @final
    def measure(self) -> MemoryUse:
        """Bytes of the distinct storages of ``storages``, each counted once, for the first field that names it. Local."""
        seen: set[int] = set()
        sizes = {"buckets": self.hidden_buckets()}
        for field, tensor in self.storages():
            with torch._C.DisableTorchFunctionSubclass():  # also of a parameter whose class refuses its use
                storages = [part.untyped_storage() for part in _with_memory(tensor.detach())]
            for storage in storages:
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    sizes[field] = sizes.get(field, 0) + storage.nbytes()
        return MemoryUse(**sizes)


def _with_memory(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with memory of their own that lie on this rank."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    local = getattr(tensor, "to_local", None)
    return (tensor if local is None else local(),)


# -- other tensors in the places of a module's -------------------------------------------------------------------------


def _first_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, each once, under its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in shard.named_tensors(module):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


@contextlib.contextmanager
def _in_place_of(
    module: nn.Module, others: Mapping[int, torch.Tensor], before_hooks: Callable[[], None] | None = None
) -> Iterator[None]:
    """Inside, other tensors are in the places of a module's own, by the identity of these.

    Hooks that run after a module was loaded find its own tensors again; ``before_hooks`` fills them. FSDP2's do not run: they
    look for tensors that were replaced, and none is.
    """
    places: dict[int, list[tuple[Any, str, Any, Any]]] = {}
    hooks: list[tuple[dict[str, Any], Any]] = []

    def put_back(child: nn.Module) -> None:
        for part in child.modules():
            for container, name, other, own in places.pop(id(part), ()):
                if container.get(name) is other:
                    dict.__setitem__(container, name, own)

    def loaded(child: nn.Module, *_: Any) -> None:
        assert before_hooks is not None
        put_back(child)
        before_hooks()

    try:
        for part in module.modules():
            places[id(part)] = [
                (container, name, others[id(own)], own)
                for container in (part._parameters, part._buffers)
                for name, own in container.items()
                if id(own) in others
            ]
            for container, name, other, _ in places[id(part)]:
                dict.__setitem__(container, name, other)  # past a container's own ways, which may gather
            own_hooks = part._load_state_dict_post_hooks
            theirs = {k: h for k, h in own_hooks.items() if not str(h.__module__).startswith("torch.distributed.")}
            if before_hooks is not None and own_hooks:
                hooks.append((vars(part), own_hooks))
                vars(part)["_load_state_dict_post_hooks"] = OrderedDict({-1: loaded, **theirs} if theirs else {})
        yield
    finally:
        put_back(module)
        for attributes, own_hooks in hooks:
            attributes["_load_state_dict_post_hooks"] = own_hooks


_T: Any = torch.Tensor
#: What does not look at values.
_PLAIN: Final = frozenset(
    [
        *(getattr(_T, n).__get__ for n in ("shape", "dtype", "device", "layout", "ndim", "is_meta", "requires_grad")),
        *(getattr(_T, n).__get__ for n in ("is_sparse", "is_leaf", "is_cuda", "itemsize", "nbytes")),
        *(_T.size, _T.dim, _T.numel, _T.is_floating_point, _T.is_complex, _T.__len__, _T.__hash__, _T.stride),
    ]
)


@final
class Target(torch.Tensor):
    """Stands in a module for a tensor while a whole state is loaded, and notes what is copied to it."""

    given: torch.Tensor | None

    @staticmethod
    def of(tensor: torch.Tensor, shape: torch.Size | None) -> Target:
        """A stand-in with the whole shape, in one element's memory."""
        blank = torch.empty((), dtype=tensor.dtype, device=tensor.device)
        made = blank.expand(tensor.shape if shape is None else shape).as_subclass(Target)
        made.given = None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``copy_``, shape, dtype and the like; nothing else."""
        if func is _T.copy_ and isinstance(args[0], Target):
            if not isinstance(args[1], Target):  # else it is filled with itself
                args[0].given = args[1]
            return args[0]
        if func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise BackendError(
            f"{getattr(func, '__name__', func)} of a parameter while a state is loaded, of which this rank may hold a part: a "
            "hook that comes before a load, or an own _load_from_state_dict, finds no values there; change the state dict instead"
        )
