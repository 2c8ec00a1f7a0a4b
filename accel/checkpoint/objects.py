"""Objects that a load fills in place: modules, optimizers, tensors, anything with a state dict."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, ClassVar, TypeAlias, TypeVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import process, shard
from ..data import LoaderHandle
from ..engines import Engine
from ..errors import AccelError, CheckpointError, text_of_error
from ..handles import ModelHandle
from ..process.rng import RngState
from ..registry import Registry, registry, resolve_module
from ..shard import Manifest, Shard
from .shards import LocalShard, check_tensor
from .values import TAG, Decoder, Encoder, Json, Placeholder, place

T = TypeVar("T")
#: The JSON of an object in the record.
Node: TypeAlias = Mapping[str, Json]


class Stage(IntEnum):
    """The order in which a load fills objects. Tensors are read before ``TENSORS``."""

    LOADERS = 0
    STATE_DICTS = 1
    TENSORS = 2
    RANKS = 3


class StateObject(Placeholder):
    """An object of a state. The names of its tensors in the checkpoint begin with ``name``."""

    kind: ClassVar[str]
    #: True if the node is made of the ``value`` of all ranks. Otherwise it is rank 0's.
    merged = False
    #: The key in ``value`` under which each rank has only the entries of its shards.
    divided: ClassVar[str] = ""
    engine: Engine | None = None
    stage = Stage.TENSORS

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        #: The JSON in the record. ``value`` is added once the ranks have exchanged theirs.
        self.node = {TAG: self.kind}

    def shards(self) -> Iterator[LocalShard]:
        """Give the shards on this rank. Local."""
        return iter(())

    def value(self, encoder: Encoder) -> dict[str, Json]:
        """Return everything that is not a shard. Local."""
        return {"name": self.name}

    def problem(self, node: Node) -> str:
        """Return why this object can't take a saved node, or an empty string. Local."""
        return ""

    def slots(self, manifest: Manifest, node: Node) -> list[tuple[str, Shard]]:
        """Return the shards that a load fills, with the names of the saved tensors. Local."""
        return []

    def decode(self, node: Node, decoder: Decoder) -> Any:
        """Return the argument of ``fill``. Called before any object is changed."""
        return None

    def fill(self, values: Any) -> None:
        """Load everything that is not a shard. The shards are filled already."""

    def local_shard(self, own: Shard, equal: bool) -> LocalShard:
        """Return a shard of this object under its name in the checkpoint."""
        return LocalShard(replace(own, name=f"{self.name}/{own.name}"), equal)


def call(path: str, method: Callable[..., T], *args: Any) -> T:
    """Call a method of the object at ``path``. CheckpointError names the object if it raises."""
    try:
        return method(*args)
    except Exception as error:
        problem = f"{path}.{method.__name__}() raised {text_of_error(error)}"
        raise CheckpointError(problem) from error


def structure_of(objects: Sequence[StateObject]) -> list[list[str]]:
    """Return a description that ranks compare. Two models of one class differ in their engines."""
    labels = [one.engine.label if one.engine is not None else "" for one in objects]
    return [[one.name, one.kind, label] for one, label in zip(objects, labels, strict=True)]


@final
class TensorObject(StateObject):
    """A tensor in the state."""

    kind = "tensor"

    def __init__(self, name: str, path: str, tensor: torch.Tensor) -> None:
        super().__init__(name, path)
        check_tensor(tensor, path)
        self._shard = shard.whole(name, tensor)

    def shards(self) -> Iterator[LocalShard]:
        yield LocalShard(self._shard, equal=False)

    def slots(self, manifest: Manifest, node: Node) -> list[tuple[str, Shard]]:
        return [("", self._shard)]


class StatefulObject(StateObject):
    """An object with ``state_dict`` and ``load_state_dict``, such as a scheduler or a loader."""

    kind = "stateful"

    def __init__(self, name: str, path: str, target: Any) -> None:
        super().__init__(name, path)
        self._target = target
        # Loaders check their state before anything is changed.
        self.stage = Stage.LOADERS if isinstance(target, LoaderHandle) else Stage.STATE_DICTS

    def state(self, encoder: Encoder) -> Json:
        """Return the state dict as JSON."""
        state = call(self.path, self._target.state_dict)
        return encoder.encode(state, f"{self.path}.state_dict()")

    def value(self, encoder: Encoder) -> dict[str, Json]:
        return {"state": self.state(encoder)}

    def decode(self, node: Node, decoder: Decoder) -> Any:
        return decoder.decode(node["state"])

    def fill(self, values: Any) -> None:
        call(self.path, self._target.load_state_dict, values)


@final
class RankObject(StatefulObject):
    """An object with a state for each rank: generators, and loaders that ranks read alone."""

    kind = "ranks"

    def __init__(self, name: str, path: str, target: RngState | LoaderHandle) -> None:
        super().__init__(name, path, target)
        # Filling the other objects may draw random numbers.
        self.stage = Stage.RANKS
        self._is_new_rank = False

    def value(self, encoder: Encoder) -> dict[str, Json]:
        return {"name": self.name}

    def decode(self, node: Node, decoder: Decoder) -> Any:
        """Decode this rank's entry of ``node["ranks"]``. New ranks take that of another rank."""
        saved, rank = node["ranks"], process.rank()
        self._is_new_rank = rank >= len(saved)
        return decoder.decode(saved[rank % len(saved)])

    def fill(self, values: Any) -> None:
        super().fill(values)
        if self._is_new_rank and isinstance(self._target, RngState):
            self._target.diverge(process.rank())


# -- modules ---------------------------------------------------------------------------------------


@final
class ModuleObject(StateObject):
    """A module: raw, of an engine, or the part of an engine's module at ``prefix``."""

    kind = "module"
    divided = "extra"

    def __init__(
        self, name: str, path: str, module: nn.Module, engine: Engine | None, prefix: str
    ) -> None:
        super().__init__(name, path)
        self.module = module
        self.engine = engine
        self._prefix = prefix
        self._holdings = shard.Raw(module, {}) if engine is None else engine.holdings
        #: True if all ranks together have one model, for example in a pipeline.
        self.merged = engine is not None and engine.distributed and engine.gradients.spread

    def _shards(self) -> list[tuple[str, Shard]]:
        """Return the shards under their names in this module, with the names in the engine's."""
        shards = self._holdings.shards(None)
        names = {one.name: one.name for one in shards}
        if self.engine is not None and self._prefix:
            inner = shard.tensor_names(self.module)
            outer = shard.tensor_names(self.engine.module)
            names = {outer[key][0]: inner[key][0] for key in inner}
        return [(s.name, replace(s, name=names[s.name])) for s in shards if s.name in names]

    def shards(self) -> Iterator[LocalShard]:
        # If the module is spread over the ranks, each buffer is on one of them.
        everything, equal = self.merged, set[str]()
        if self.engine is not None and self.engine.synchronizes:
            everything = everything or not self.engine.distributed
            equal = set(self.engine.named)
        for engine_name, one in self._shards():
            yield self.local_shard(one, everything or engine_name in equal)

    def value(self, encoder: Encoder) -> dict[str, Json]:
        values, prefix = self._holdings.values(None), self._prefix
        names = [name for name in shard.extra_modules(self.module) if prefix + name in values]
        extra = {name: values[prefix + name] for name in names}
        # All ranks must know the tensors in shards, so those of a single rank become JSON.
        encoder = Encoder(None) if self.merged else encoder
        node = {"extra": encoder.encode(extra, f"{self.path}.state_dict()")}
        return node if self.engine is None else {**node, "backend": self.engine.name}

    def slots(self, manifest: Manifest, node: Node) -> list[tuple[str, Shard]]:
        return [(one.name, one) for _, one in self._shards()]

    def tied(self) -> dict[str, list[str]]:
        """Return the other names of tied tensors by their first name, which checkpoints use."""
        all_names = shard.tensor_names(self.module).values()
        return {names[0]: names[1:] for names in all_names if len(names) > 1}

    def decode(self, node: Node, decoder: Decoder) -> Any:
        return decoder.decode(node["extra"])

    def fill(self, values: Any) -> None:
        shard.fill_module_values(self.module, values)


def _module_object(module: nn.Module, name: str, path: str) -> StateObject:
    module, _ = resolve_module(module)
    engine = Registry.engine(module)
    if engine is not None:
        return ModuleObject(name, path, module, engine, "")
    for engine in registry.in_order():
        for prefix, part in engine.module.named_modules():
            if part is module:
                return ModuleObject(name, path, module, engine, f"{prefix}.")
        shared = [name for name, p in module.named_parameters() if id(p) in engine.known]
        if shared or any(type(part) is ModelHandle for part in module.modules()):
            raise CheckpointError(
                f"{path}: this {type(module).__name__} holds parameters of a model that is set up "
                f"({', '.join(shared[:3])}). Save the model that accel.setup returned."
            )
    return ModuleObject(name, path, module, None, "")


# -- optimizers ------------------------------------------------------------------------------------


@final
class OptimizerObject(StateObject):
    """An optimizer: raw, or of an engine. Parameters outside its groups are left alone.

    Args:
        names: the names of the model's parameters by ``id``. None: match them by position.
    """

    kind = "optimizer"
    merged = True
    divided = "state"

    def __init__(
        self,
        name: str,
        path: str,
        optimizer: Optimizer,
        engine: Engine | None,
        names: Mapping[int, str] | None,
    ) -> None:
        super().__init__(name, path)
        self.optimizer = optimizer
        self.engine = engine
        self._has_names = names is not None
        held = shard.parameters_of(optimizer)
        names = {id(p): str(i) for i, p in enumerate(held)} if names is None else names
        for parameter in held:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"{path}: this {type(optimizer).__name__} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not of its model. Make it part of the model."
                )
        self._parameters = {names[id(p)]: p for p in held}
        self._holdings = shard.Raw(None, names) if engine is None else engine.holdings
        #: The saved tensors of the state under their names here, and their saved names.
        self._manifest: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._saved_names: dict[str, str] = {}

    def shards(self) -> Iterator[LocalShard]:
        equal = self.engine is not None and self.engine.synchronizes
        for one in self._holdings.shards(self.optimizer):
            yield self.local_shard(one, equal)

    def value(self, encoder: Encoder) -> dict[str, Json]:
        values, engine = self._holdings.values(self.optimizer), self.engine
        groups, state = [], {}
        for i, group in enumerate(values["groups"]):
            groups.append(encoder.encode(group, place(f"{self.path}.param_groups", i)))
        for name, own in values["state"].items():
            state[name] = encoder.encode(own, place(f"{self.path}.state", name))
        scaled = engine is not None and engine.precision.scaled
        return {
            "class": type(self.optimizer).__name__,
            "named": self._has_names,
            "groups": groups,
            "state": state,
            "frozen": sorted(name for name, p in self._parameters.items() if not p.requires_grad),
            "scale": [*engine.loss_scale.state()] if engine is not None and scaled else None,
        }

    def _group_names(self) -> list[list[str]]:
        return [group["params"] for group in self._holdings.values(self.optimizer)["groups"]]

    def _names_here(self, node: Node) -> dict[str, str]:
        """Return the names here by the saved names. They differ without the names of a model."""
        saved = [name for group in node["groups"] for name in group["params"]]
        if node["named"] and self._has_names:
            return {name: name for name in saved}
        return dict(zip(saved, itertools.chain(*self._group_names()), strict=True))

    def problem(self, node: Node) -> str:
        kind = type(self.optimizer).__name__
        if node["class"] != kind:
            return f"the checkpoint has the state of a {node['class']}, and this is a {kind}"
        here, saved = self._group_names(), [group["params"] for group in node["groups"]]
        sizes, saved_sizes = [*map(len, here)], [*map(len, saved)]
        if sizes != saved_sizes:
            return f"the checkpoint has groups of {saved_sizes} parameters, and not of {sizes}"
        if node["named"] and self._has_names:
            pairs = zip(itertools.chain(*saved), itertools.chain(*here), strict=True)
            for saved_name, name in pairs:
                if saved_name != name:
                    return f"a parameter is {saved_name} in the checkpoint and {name} here"
        return ""

    def slots(self, manifest: Manifest, node: Node) -> list[tuple[str, Shard]]:
        """Return the shards to fill. State that doesn't exist yet is on the meta device."""
        names_here = self._names_here(node)
        self._manifest, self._saved_names = {}, {}
        for saved_name, form in manifest.items():
            parameter, _, key = saved_name.rpartition("/")
            if parameter in names_here:
                name = f"{names_here[parameter]}/{key}"
                self._saved_names[name], self._manifest[name] = saved_name, form
        slots = self._holdings.slots(self.optimizer, self._manifest, create=False)
        return [(self._saved_names[slot.name], slot) for slot in slots]

    def allocate(self) -> list[Shard]:
        """Create the state that doesn't exist yet. Return the shards under their saved names."""
        slots = self._holdings.slots(self.optimizer, self._manifest)
        return [replace(s, name=f"{self.name}/{self._saved_names[s.name]}") for s in slots]

    def decode(self, node: Node, decoder: Decoder) -> Any:
        decoded = {"groups": decoder.decode(node["groups"]), "state": decoder.decode(node["state"])}
        return {**node, **decoded, "names": self._names_here(node)}

    def fill(self, values: Any) -> None:
        names, engine = values["names"], self.engine
        groups = []
        for group in values["groups"]:
            groups.append({**group, "params": [names[name] for name in group["params"]]})
        state = {names[name]: own for name, own in values["state"].items()}
        self._holdings.fill(self.optimizer, {"groups": groups, "state": state})
        if values.get("scale") and engine is not None and engine.precision.scaled:
            engine.loss_scale.restore(*values["scale"])
        frozen = set(values["frozen"])
        for saved_name, name in names.items():
            parameter, trainable = self._parameters[name], saved_name not in frozen
            if parameter.requires_grad != trainable:
                parameter.requires_grad_(trainable)


def _optimizer_object(
    optimizer: Optimizer, name: str, path: str, modules: Sequence[nn.Module]
) -> StateObject:
    engine = Registry.find_engine_of(optimizer)
    if type(optimizer).state_dict is not Optimizer.state_dict:
        # A class around another optimizer, for example. Only its load_state_dict takes them.
        entries = call(path, optimizer.state_dict).keys() - {"state", "param_groups"}
        if entries and engine is not None and engine.holdings.partial(optimizer):
            raise CheckpointError(
                f"{path}: the state_dict() of this {type(optimizer).__name__} has its own entries "
                f"{sorted(map(str, entries))[:5]}, which backend {engine.name!r} can't shard. "
                "Use a backend that keeps full optimizers."
            )
        if entries:
            return StatefulObject(name, path, optimizer)
    if engine is not None:
        return OptimizerObject(name, path, optimizer, engine, engine.holdings.parameter_names)
    held = {id(parameter) for parameter in shard.parameters_of(optimizer)}
    for module in [*modules, *(engine.module for engine in registry.in_order())]:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        if held <= names.keys():
            return OptimizerObject(name, path, optimizer, None, names)
    return OptimizerObject(name, path, optimizer, None, None)


# -- every object ----------------------------------------------------------------------------------


def make_object(value: Any, name: str, path: str, modules: Sequence[nn.Module]) -> StateObject:
    """Return the object of a value. The parameters of raw optimizers have names in ``modules``."""
    if isinstance(value, StateObject):
        value.name, value.path = name, path
        return value
    try:
        if isinstance(value, RngState) or (isinstance(value, LoaderHandle) and value._accel.part):
            return RankObject(name, path, value)
        if isinstance(value, nn.Module):
            return _module_object(value, name, path)
        if isinstance(value, Optimizer):
            return _optimizer_object(value, name, path, modules)
        if isinstance(value, torch.Tensor):
            return TensorObject(name, path, value)
    except CheckpointError:
        raise
    except AccelError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return StatefulObject(name, path, value)
