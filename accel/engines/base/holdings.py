"""What of a model and its optimizers lies on this rank, and one road for whole state in and out, for every engine.

A backend says where things lie (``partial``, ``part``, ``entries``, ``has``); all the rest follows: what checkpoints write and
fill, ``state_dict``, ``full_state_dict``, ``load_state_dict``, the gathering at an engine's end, and copies.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError
from ...gradients.log import remove_hooks
from ...process.control import Waiting, agree
from ...process.packing import broadcast_, writable
from ...shard import Raw, Shard, StateEntry, fill_module_values, named_tensors, parameters_of, state_device
from ...trees import inner_tensors, map_tensors, to_device
from .absent import about
from .digest import digest, digest_bytes
from .gather import Item, gather
from .raw_objects import REPLACED, Guard, Target, copied, copied_to, in_place_of, is_of
from .step import take_added_groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .engine import Engine


class Holdings(Raw):
    """Engines that keep everything whole on every rank need no more than this. ``optimizer=None`` means the model itself."""

    #: State lies in the host's memory by the engine's doing; whole it lies on the device, as in one process.
    offloads: bool = False
    #: The engine's ``start`` gives values to parameters on the meta device by itself.
    materializes: bool = False
    #: What of these is a class or a hook of a module, or in the place of one of its methods, is there for the engine.
    packages: tuple[str, ...] = ("accel.",)

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.module, {})
        self.engine: Any = engine
        self.guard = Guard(self)
        #: Of each parameter, whole, whatever becomes of it on this rank.
        self.shapes = {name: p.shape for name, p in engine.named.items()}

    # -- where things lie: what a backend overrides -------------------------------------------------------------------

    def partial(self, optimizer: Optimizer | None) -> bool:
        """Whether this rank may hold a part only. Local, and the same on all ranks."""
        return False

    def prepare(self, *, writing: bool) -> None:
        """Make what lies here as its shards say it, to be read or to be written. Local."""

    def filled(self) -> None:
        """Hear that shards were filled: derive what depends on them (half-precision copies, say). Collective."""

    def gradients(self) -> Iterator[Item]:
        """The final gradients that this rank keeps. Local."""
        for name, parameter in self.engine.named.items():
            if parameter.grad is not None:
                yield name, "grad", parameter.grad

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        """The weights that every rank holds whole, and equal before each step. Local."""
        return list(self.engine.named.items())

    def replicated_parts(self) -> Mapping[str, Sequence[tuple[str, torch.Tensor]]]:
        """What this rank holds of the other weights, by its place: equal on ranks of one place before each step. Local."""
        return {}

    def kind(self, module: nn.Module) -> type[Any]:
        """The class that its author gave a module. Local."""
        # One that a library derives says that it is its metaclass's, where that is not the usual one.
        kinds = {kind: (kind, *kind.__bases__) for kind in type(module).__mro__}
        return next(kind for kind, near in kinds.items() if not any(is_of(one, self.packages) for one in near))

    def added(self, owner: nn.Module | nn.Parameter) -> set[str]:
        """The names of attributes of a module or parameter that are there for the engine. Local."""
        found = {n for n, value in vars(owner).items() if n in REPLACED and is_of(value, self.packages)}
        return found | about(owner)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that the model lies on, where it lies on one. Local."""
        return None

    @classmethod
    def divides_from_host(cls, options: Any) -> bool:
        """Whether the engine's ``start`` takes this rank's part of the weights to its device, out of memory of the host. Pure.

        Values that are read from files go into such parts only: until then the whole lies there untouched, and takes nothing.
        """
        return False

    # -- what checkpoints write and fill --------------------------------------------------------------------------------

    @property
    def parameter_names(self) -> dict[int, str]:
        """Names by the identity of what the optimizers' groups hold."""
        return {id(p): name for name, p in self.engine.named.items()}

    def entries(self, optimizer: Optimizer) -> list[StateEntry]:
        take_added_groups(self.engine, optimizer)
        return super().entries(optimizer)

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        if optimizer is None:
            self.prepare(writing=False)
        with self.guard.opened():
            return super().shards(optimizer)

    # -- what the handles do --------------------------------------------------------------------------------------------

    @final
    def full_state_dict(self, optimizer: Optimizer | None, *, keep: bool = True) -> dict[str, Any]:
        """What the raw object's ``state_dict()`` would hold in one process, on every rank that is to ``keep`` it. Collective.

        It is what that method returns while whole tensors are in the places of parts, so that hooks and order are its own.
        What is divided may not fit on one device: these tensors lie on the host.
        """
        return self._whole_dict("accel.full_state_dict", optimizer, keep=keep)

    @final
    def state_dict(self, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What ``state_dict()`` of a divided model or optimizer gives: ``full_state_dict``, in copies. Collective."""
        kind = "model" if optimizer is None else "optimizer"
        # The errors of the others say where this rank is.
        advice = f", which every rank calls: write state = {kind}.state_dict() above an `if` of one rank"
        state = self._whole_dict(f"{kind}.state_dict()", optimizer, advice)
        if optimizer is not None:
            return state
        return _under(state, *args, **kwargs) if args or kwargs else state

    def _whole_dict(
        self, what: str, optimizer: Optimizer | None, advice: str = "", keep: bool = True
    ) -> dict[str, Any]:
        if not self.partial(optimizer):
            return (optimizer or self.module).state_dict()
        # The ranks compare it: after an interruption they may have parts of different steps.
        whose = "the model" if optimizer is None else type(optimizer).__name__
        title = f"{what} of {whose} after {self.engine.drift.progress}{advice}"
        with Waiting(self.engine.process, what + advice):
            return self._full_model(title, keep) if optimizer is None else self._full_optimizer(title, optimizer, keep)

    @final
    def copy(self, memo: dict[int, Any], pickled: object = None) -> nn.Module:
        """The user's module, as its author made it, whole; see ``copied``. Collective where ``state_dict`` of the model is."""
        whole, extra = dict[int, torch.Tensor](), dict[str, Any]()
        if self.partial(None):
            what = f"a {'copy' if pickled is None else 'pickle'} of the model"
            what += ", which every rank makes: write whole = copy.deepcopy(model) above an `if` of one rank, and pickle that"
            with Waiting(self.engine.process, what):
                whole, extra = self._whole_tensors(what, copied=True)
        made = copied(self, whole, memo, pickled)
        fill_module_values(made, {name: value for name, value in extra.items() if not self.has(name)})
        return made

    def _whole_tensors(
        self, what: str, *, copied: bool = False, keep: bool = True
    ) -> tuple[dict[int, torch.Tensor], dict[str, Any]]:
        """For the places of the model's, by the identity of these; and the modules' extra state. Collective."""
        others: dict[int, torch.Tensor] = {}
        self.prepare(writing=False)
        tensors = (dict(self.module.named_buffers()) if copied else {}) | _first_names(self.module)
        extra = self.values(None) if type(self).has is not Holdings.has else {}
        held = [(name, "", tensor) for name, tensor in tensors.items()]
        held += [(name, "extra", value) for name, value in extra.items()]
        whole = self.gather(what, held, device=torch.device("cpu"), keep=keep)
        for name, tensor in tensors.items() if keep else ():
            full = whole.pop((name, "")).to(tensor.dtype)  # a master copy has more digits
            others[id(tensor)] = nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full
        return others, {name: value for (name, _), value in whole.items()}

    def _full_model(self, what: str, keep: bool) -> dict[str, Any]:
        others, extra = self._whole_tensors(what, keep=keep)
        if not keep:
            return {}
        with self.guard.opened(), in_place_of(self.module, others):
            state: dict[str, Any] = self.module.state_dict()
        made: dict[Any, torch.Tensor] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:  # what is tied is one tensor
                state[name] = made.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), value)
        state.update({name: value for name, value in extra.items() if name in state})
        return state

    def _full_optimizer(self, what: str, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        names = self.parameter_names
        entries = self.entries(optimizer)
        whole = self._whole_state(what, optimizer, entries, torch.device("cpu"), keep)
        if not keep:
            return {}
        kept = {id(entry.parameter) for entry in entries}.union(names)  # a rank may hold state of what another steps
        state: Any = {names[id(p)]: p for p in parameters_of(optimizer)}
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
            return (self.module if optimizer is None else optimizer).load_state_dict(*args, **kwargs)
        if optimizer is None:
            return self._load_model(args, kwargs)
        self._load_optimizer(optimizer, args, kwargs)
        return None

    def _load_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("assign") or args[2:3] == (True,):
            raise BackendError(
                "load_state_dict(assign=True) would replace parameters that are divided over the ranks: leave assign out"
            )
        self.prepare(writing=True)
        module = self.module
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

        stand_ins = in_place_of(module, {key: t for key, (*_, t) in targets.items()}, take)
        with self.guard.opened(), copied_to(), stand_ins:
            out = module.load_state_dict(*args, **kwargs)
        take()
        return out

    @torch.no_grad()
    def _fill(self, name: str, tensor: torch.Tensor, given: torch.Tensor) -> None:
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
            held = [names[id(p)] for p in parameters_of(optimizer)]
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
            remove_hooks(hooks)
        if not calls:
            raise OptimizerError(
                f"{type(optimizer).__name__}.load_state_dict() does not call torch's own, so that this rank cannot keep its part "
                "of the state only: call super().load_state_dict(...) there, or use accel.save and accel.load"
            )

    @torch.no_grad()
    def take(self, optimizer: Optimizer, whole: Mapping[str, Mapping[Any, Any]]) -> None:
        """Keep this rank's part of the whole state of parameters, by name; that of others stays as it is. Local."""
        groups = self.groups(optimizer)
        for entry in self.entries(optimizer):
            if state := whole.get(entry.name):
                group = groups[entry.name]
                own = {key: self.own_part(entry, key, value, group) for key, value in state.items()}
                optimizer.state[entry.parameter] = own

    @final
    def own_part(self, entry: StateEntry, key: Any, value: Any, group: Mapping[str, Any]) -> Any:
        """This rank's part of a whole value in the state of a parameter, in the dtype and place that torch gives it. Local."""
        like = entry.parameter
        device = state_device(key, like.device, group)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if hasattr(tensor, "full_tensor"):  # cut already
                return tensor
            if key == "step" and tensor.numel() == 1:
                return tensor.to(device, copy=True)
            floating = like.is_floating_point() and tensor.is_floating_point()
            dtype = like.dtype if floating else tensor.dtype
            if tuple(tensor.shape) != entry.shape or tensor.layout is not torch.strided:
                return tensor.to(like.device, dtype, copy=True)
            made = self.new_state(entry, key, tuple(tensor.shape), dtype)
            if (mine := self.part(entry.name, made, key)) is not None:
                mine.fill(tensor)
            return made

        return map_tensors(cut, value, others=True)

    @final
    def drop_others(self, optimizer: Optimizer) -> None:
        """Drop the state of those of its parameters of which other ranks keep it. Local."""
        own = {id(entry.parameter) for entry in self.entries(optimizer)}
        for parameter in parameters_of(optimizer):
            if id(parameter) not in own:
                optimizer.state.pop(parameter, None)

    # -- whole state from parts ---------------------------------------------------------------------------------------

    def _whole_state(
        self,
        what: str,
        optimizer: Optimizer,
        entries: Iterable[StateEntry],
        device: torch.device | None = None,
        keep: bool = True,
    ) -> dict[str, dict[Any, Any]]:
        """By the names of its parameters, in one order on all ranks. Collective."""
        names = self.parameter_names
        held_names = (names[id(p)] for p in parameters_of(optimizer))
        order = {name: i for i, name in enumerate(dict.fromkeys([*held_names, *names.values()]))}
        whole: dict[str, dict[Any, Any]] = {}
        held = [(entry.name, key, value) for entry in entries for key, value in entry.state.items()]
        for (name, key), value in self.gather(what, held, device=device, keep=keep).items():
            whole.setdefault(name, {})[key] = value
        return dict(sorted(whole.items(), key=lambda item: order[item[0]]))

    @final
    def give_back(self, what: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
        """Make a raw optimizer's state whole on every rank, also that of parameters in no group. Collective."""
        entries, names = self.entries(optimizer), self.parameter_names
        known = {*map(id, parameters_of(optimizer)), *(id(entry.parameter) for entry in entries)}
        entries += [
            StateEntry(names[id(key)], tuple(key.shape), key, state)
            for key, state in optimizer.state.items()
            if isinstance(key, torch.Tensor) and id(key) in names and id(key) not in known
        ]
        whole, groups = self._whole_state(what, optimizer, entries), self.groups(optimizer)
        for entry in entries:
            optimizer.state.pop(entry.parameter, None)
        for name, state in whole.items():
            if self.offloads:  # numbers lie still where they were beside the parts
                own, group = self.engine.process.device, groups.get(name, {})
                state = {key: to_device(value, state_device(key, own, group)) for key, value in state.items()}
            optimizer.state[parameters[name]] = state

    @final
    def gather(
        self, what: str, held: Iterable[Item], *, device: torch.device | None = None, keep: bool = True
    ) -> dict[tuple[str, Any], Any]:
        """``gather`` of what this rank has; ``what`` names it for messages. Collective."""
        process = self.engine.process
        device = process.device if device is None and self.offloads else device
        return gather(f"{what} ({self.engine.label})", held, self.part, process, device=device, keep=keep)

    @final
    def synchronize(self, source: int = 0) -> None:
        """Give every rank rank ``source``'s weights and buffers, while all are whole; what all have is not sent. Collective."""
        engine = self.engine
        if engine.distributed:
            named = engine.module.named_buffers()
            if odd := [n for n, b in named if b.layout is not torch.strided or b.is_quantized]:
                raise BackendError(
                    f"buffers of {engine.label} are sparse, nested or quantized, which the ranks cannot send each other: "
                    f"{', '.join(odd[:5])}; make them dense, or plain attributes of the module, which each rank has for itself"
                )
            weights = [] if engine.reads else [p.data for p in engine.parameters if not p.is_meta]
            values = inner_tensors(weights)
            values += writable(engine.module.buffers())
            told = agree(f"the weights of {engine.label}", _digest(values))
            if told[0] is None or len(set(told)) > 1:
                broadcast_(values, engine.process.group, source)


def _digest(tensors: Sequence[torch.Tensor]) -> int | None:
    """Equal where all values are, bit for bit; None where it takes no less time than to send them, as on accelerators."""
    if any(type(t) is not torch.Tensor or t.layout is not torch.strided or t.device.type != "cpu" for t in tensors):
        return None
    return digest_bytes(repr([digest(t) for t in tensors]).encode())


def _under(state: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
    """A module's state as part of its parent's, as ``Module.state_dict`` gives it."""
    if keep_vars:
        raise BackendError(
            "state_dict(keep_vars=True) would give parameters that are divided over the ranks: leave it out"
        )
    target: Any = OrderedDict() if destination is None else destination
    target.update({prefix + name: value for name, value in state.items()})
    if not hasattr(target, "_metadata"):
        target._metadata = OrderedDict()
    target._metadata.update({prefix + name if name else prefix[:-1]: about for name, about in state._metadata.items()})
    return target  # type: ignore[no-any-return]


def _first_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, each once, under its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(module):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())
