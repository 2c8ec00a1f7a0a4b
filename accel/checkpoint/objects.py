"""The objects that a load fills in place: models, optimizers, tensors and others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Any, ClassVar, final

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
from .values import TAG, Decoder, Encoder, Json, Placeholder


class Stage(IntEnum):
    """The order in which a load fills objects."""

    STATE_DICTS = 1  # load_state_dict() may raise
    TENSORS = 2
    RANKS = 3  # filling other objects may use random numbers


class StateObject(Placeholder):
    """An object of a state."""

    #: The names of its tensors in the checkpoint start with ``name``, errors with ``path``.
    name: str
    path: str
    kind: ClassVar[str]
    #: True if the node merges the ``value`` of all ranks. If False, the node has rank 0's.
    merged = False
    #: The key in ``value`` under which each rank has only the entries of its own shards.
    divided: ClassVar[str] = ""
    engine: Engine | None = None
    stage = Stage.TENSORS

    def __init__(self) -> None:
        #: The JSON in the record. A save adds ``value`` and, if ``merged``, other ranks' entries.
        self.node: dict[str, Json] = {TAG: self.kind}
        #: For a load: the shards to read, named as in the record, and the argument of ``fill``.
        self.wanted: list[Shard] = []
        self.values: Any = None

    def shards(self) -> Iterator[LocalShard]:
        """Yield the shards on this rank. Local."""
        return iter(())

    def value(self, encoder: Encoder) -> dict[str, Json]:
        """Return everything except the shards as JSON. Local."""
        return {"name": self.name}

    def problem(self) -> str:
        """Return why the node doesn't fit, or an empty string. Local."""
        return ""

    def slots(self, manifest: Manifest) -> list[tuple[str, Shard]]:
        """Return the shards to fill, with the names of the saved tensors. Local."""
        return []

    def decode(self, decoder: Decoder) -> Any:
        """Return the argument of ``fill``. Called before any object is changed."""
        return decoder.decode(self.node.get("state"))

    def fill(self, values: Any) -> None:
        """Load everything except shards, which are filled separately."""

    def named(self, shard: Shard) -> Shard:
        """Return a shard of this object under its name in the checkpoint."""
        return shard.named(f"{self.name}/{shard.name}")


def structure_of(objects: Iterable[StateObject]) -> list[list[str]]:
    """Return a description to compare between ranks."""
    rows = []
    for entry in objects:
        # The label distinguishes two models of the same class, as in a GAN.
        label = "" if entry.engine is None else entry.engine.label
        rows.append([entry.name, entry.kind, label])
    return rows


@final
class TensorObject(StateObject):
    """A tensor in the state."""

    kind = "tensor"

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def shards(self) -> Iterator[LocalShard]:
        yield LocalShard(shard.whole(self.name, self._tensor), equal=False)

    def slots(self, manifest: Manifest) -> list[tuple[str, Shard]]:
        return [("", shard.whole("", self._tensor))]


class StatefulObject(StateObject):
    """An object with ``state_dict`` and ``load_state_dict``, such as a scheduler."""

    kind = "stateful"
    stage = Stage.STATE_DICTS

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._target = target

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the user's object. CheckpointError names the object."""
        try:
            return method(*args)
        except Exception as error:
            problem = f"{self.path}.{method.__name__}() raised {text_of_error(error)}"
            raise CheckpointError(problem) from error

    def state(self, encoder: Encoder) -> Json:
        """Return the state dict as JSON."""
        state = self._call(self._target.state_dict)
        return encoder.encode(state, f"{self.path}.state_dict()")

    def value(self, encoder: Encoder) -> dict[str, Json]:
        return {"state": self.state(encoder)}

    def fill(self, values: Any) -> None:
        self._call(self._target.load_state_dict, values)


@final
class RankObject(StatefulObject):
    """An object with its own state on each rank, such as RNGs."""

    kind = "ranks"
    stage = Stage.RANKS
    value = StateObject.value

    def decode(self, decoder: Decoder) -> Any:
        """Decode this rank's entry of ``node["ranks"]``. Additional ranks reuse an entry."""
        saved = self.node["ranks"]
        return decoder.decode(saved[process.rank() % len(saved)])

    def fill(self, values: Any) -> None:
        super().fill(values)
        rank = process.rank()
        if rank >= len(self.node["ranks"]) and isinstance(self._target, RngState):
            self._target.diverge(rank)


@final
class ModuleObject(StateObject):
    """A raw module, an engine's module, or the submodule at ``prefix`` of an engine's."""

    kind = "module"
    divided = "extra"

    def __init__(self, module: nn.Module, engine: Engine | None = None, prefix: str = "") -> None:
        super().__init__()
        self.module = module
        self.engine = engine
        self._prefix = prefix
        self._holdings = shard.Raw(module, {}) if engine is None else engine.holdings
        #: True if the ranks have different parameters of one model, as in a pipeline.
        self.merged = engine is not None and engine.distributed and engine.gradients.spread

    def _shards(self) -> Iterator[tuple[str, Shard]]:
        """Yield the engine's name of each shard, and the shard as named in this module."""
        names: dict[str, str] = {}
        if self._prefix:
            outer = shard.tensor_names(self._holdings.module)
            for key, own_names in shard.tensor_names(self.module).items():
                names[outer[key][0]] = own_names[0]
        for local in self._holdings.shards(None):
            if not self._prefix:
                yield local.name, local
            elif local.name in names:
                yield local.name, local.named(names[local.name])

    def shards(self) -> Iterator[LocalShard]:
        # In a pipeline each buffer is on a single rank, so it can't differ between ranks.
        everything, equal = self.merged, set[str]()
        if self.engine is not None and self.engine.synchronizes:
            everything = everything or not self.engine.distributed
            equal = set(self.engine.named)
        for engine_name, local in self._shards():
            yield LocalShard(self.named(local), everything or engine_name in equal)

    def value(self, encoder: Encoder) -> dict[str, Json]:
        extra = {}
        for name, value in self._holdings.values(None).items():
            if name.startswith(self._prefix):
                extra[name.removeprefix(self._prefix)] = value
        # All ranks must list the tensors in files. So tensors of a single rank become JSON.
        encoder = Encoder(None) if self.merged else encoder
        node = {"extra": encoder.encode(extra, f"{self.path}.state_dict()")}
        return node if self.engine is None else {**node, "backend": self.engine.name}

    def slots(self, manifest: Manifest) -> list[tuple[str, Shard]]:
        return [(local.name, local) for _, local in self._shards()]

    def decode(self, decoder: Decoder) -> Any:
        return decoder.decode(self.node["extra"])

    def fill(self, values: Any) -> None:
        shard.fill_module_values(self.module, values)


def _module_object(module: nn.Module) -> StateObject:
    module, _ = resolve_module(module)
    engine = Registry.engine(module)
    if engine is not None:
        return ModuleObject(module, engine)
    for engine in registry.in_order():
        for prefix, part in engine.module.named_modules():
            if part is module:
                return ModuleObject(module, engine, f"{prefix}.")
        shared = [name for name, p in module.named_parameters() if id(p) in engine.known]
        if shared or any(type(part) is ModelHandle for part in module.modules()):
            raise CheckpointError(
                f"this {type(module).__name__} holds parameters of a model that is set up "
                f"({', '.join(shared[:3])}). Save the model that accel.setup returned."
            )
    return ModuleObject(module)


@final
class OptimizerObject(StateObject):
    """A raw optimizer, or one of an engine. Ignores parameters outside its groups."""

    kind = "optimizer"
    merged = True
    divided = "state"

    def __init__(
        self, optimizer: Optimizer, engine: Engine | None, names: Mapping[int, str] | None
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.engine = engine
        self._has_names = names is not None
        parameters = shard.parameters_of(optimizer)
        if names is None:
            names = {id(parameter): str(i) for i, parameter in enumerate(parameters)}
        #: The parameters by name, in the order of the groups.
        self._parameters: dict[str, nn.Parameter] = {}
        for parameter in parameters:
            if id(parameter) not in names:
                shape = tuple(parameter.shape)
                raise CheckpointError(f"a parameter of shape {shape} is not in the model. Add it.")
            self._parameters[names[id(parameter)]] = parameter
        self._holdings = shard.Raw(None, names) if engine is None else engine.holdings

    def shards(self) -> Iterator[LocalShard]:
        equal = self.engine is not None and self.engine.synchronizes
        for local in self._holdings.shards(self.optimizer):
            yield LocalShard(self.named(local), equal)

    def value(self, encoder: Encoder) -> dict[str, Json]:
        values, engine = self._holdings.values(self.optimizer), self.engine
        scaled = engine is not None and engine.precision.scaled
        return {
            "class": type(self.optimizer).__name__,
            "named": self._has_names,
            "groups": encoder.encode(values["groups"], f"{self.path}.param_groups"),
            "state": encoder.encode(values["state"], f"{self.path}.state"),
            "frozen": sorted(name for name, p in self._parameters.items() if not p.requires_grad),
            "scale": [*engine.loss_scale.state()] if engine is not None and scaled else None,
        }

    def problem(self) -> str:
        node = self.node
        kind = type(self.optimizer).__name__
        if node["class"] != kind:
            return f"the checkpoint has the state of {node['class']}, but this is {kind}"
        sizes, saved_sizes = _sizes(self.optimizer.param_groups), _sizes(node["groups"])
        if sizes != saved_sizes:
            return f"the checkpoint has groups of {saved_sizes} parameters instead of {sizes}"
        for saved_name, name in self._names_here().items():
            if saved_name != name and node["named"] and self._has_names:
                return f"a parameter is {saved_name} in the checkpoint but {name} here"
        return ""

    def _names_here(self) -> dict[str, str]:
        """Return the parameter names here by saved name."""
        saved = [name for group in self.node["groups"] for name in group["params"]]
        return dict(zip(saved, self._parameters, strict=True))

    def slots(self, manifest: Manifest) -> list[tuple[str, Shard]]:
        """Return the shards to fill. State that doesn't exist is on the meta device."""
        names = self._names_here()
        #: The shapes and dtypes of saved state tensors, by their names here.
        self._manifest: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for saved_name, form in manifest.items():
            if saved_name.rpartition("/")[0] in names:
                self._manifest[_renamed(saved_name, names)] = form
        return [(slot.name, slot) for slot in self._slots(create=False)]

    def _slots(self, *, create: bool) -> Iterator[Shard]:
        """Yield the shards to fill under their saved names."""
        saved_names = dict(zip(self._parameters, self._names_here(), strict=True))
        for slot in self._holdings.slots(self.optimizer, self._manifest, create=create):
            yield slot.named(_renamed(slot.name, saved_names))

    def allocate(self) -> Iterator[Shard]:
        """Create the state that doesn't exist yet, and yield all shards to fill."""
        return map(self.named, self._slots(create=True))

    def decode(self, decoder: Decoder) -> Any:
        names, state = self._names_here(), decoder.decode(self.node["state"])
        state = {names[saved_name]: entries for saved_name, entries in state.items()}
        return {"groups": decoder.decode(self.node["groups"]), "state": state}

    def fill(self, values: Any) -> None:
        self._holdings.fill(self.optimizer, values)
        engine = self.engine
        scale = self.node.get("scale")
        if scale and engine is not None and engine.precision.scaled:
            engine.loss_scale.restore(*scale)
        frozen = set(self.node["frozen"])
        for saved_name, name in self._names_here().items():
            self._parameters[name].requires_grad_(saved_name not in frozen)


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _renamed(tensor: str, names: Mapping[str, str]) -> str:
    """Replace the parameter's name in the name of a state tensor."""
    parameter, _, key = tensor.rpartition("/")
    return f"{names[parameter]}/{key}"


def _optimizer_object(optimizer: Optimizer, modules: Sequence[nn.Module]) -> StateObject:
    engine = Registry.find_engine_of(optimizer)
    if type(optimizer).state_dict is not Optimizer.state_dict:
        # For example a wrapper around an optimizer. Only its load_state_dict() loads the entries.
        entries = optimizer.state_dict().keys() - {"state", "param_groups"}
        if entries and engine is not None and engine.holdings.partial(optimizer):
            raise CheckpointError(
                f"the state_dict() of this {type(optimizer).__name__} has extra entries "
                f"{sorted(map(str, entries))[:5]}, which backend {engine.name!r} can't shard. "
                "Use a backend that doesn't shard this optimizer."
            )
        if entries:
            return StatefulObject(optimizer)
    if engine is not None:
        return OptimizerObject(optimizer, engine, engine.holdings.parameter_names)
    ids = set(map(id, shard.parameters_of(optimizer)))
    for module in [*modules, *map(attrgetter("module"), registry.in_order())]:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        if ids <= names.keys():
            return OptimizerObject(optimizer, None, names)
    return OptimizerObject(optimizer, None, None)


def make_object(
    value: Any, name: str, path: str, modules: Sequence[nn.Module], tag: object
) -> StateObject:
    """Return the object of a value, for a load of the kind in the saved ``tag``.

    ``modules`` name the parameters of raw optimizers.
    """
    if isinstance(value, torch.Tensor):
        check_tensor(value, path)
    try:
        entry = value if isinstance(value, StateObject) else _object_of(value, modules, tag)
    except AccelError as error:
        raise CheckpointError(f"{path}: {error}") from error
    entry.name, entry.path = name, path
    return entry


def _object_of(value: Any, modules: Sequence[nn.Module], tag: object) -> StateObject:
    if isinstance(value, nn.Module):
        return _module_object(value)
    if isinstance(value, Optimizer):
        return _optimizer_object(value, modules)
    if isinstance(value, torch.Tensor):
        return TensorObject(value)
    by_rank = isinstance(value, RngState)
    if isinstance(value, LoaderHandle):
        # A load follows the checkpoint, which a different number of ranks may have saved.
        by_rank = tag == RankObject.kind if tag else bool(value._accel.part)
    return RankObject(value) if by_rank else StatefulObject(value)
