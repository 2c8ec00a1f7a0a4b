"""Objects that a load fills in place: modules, optimizers, tensors, anything with a state dict."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, TypeVar, final

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from .. import process, shard
from ..data import LoaderHandle
from ..engines import Engine
from ..engines.base.step import take_added_groups
from ..errors import CheckpointError, text_of_error
from ..process.rng import RngState
from ..shard import Manifest, Shard
from .shards import LocalShard
from .values import TAG, Decoder, Encoder, Json, place

T = TypeVar("T")
#: The JSON of an object in the record.
Node: TypeAlias = Mapping[str, Json]


class StateObject:
    """An object of a state. The names of its tensors in the checkpoint begin with ``name``."""

    kind: ClassVar[str]
    #: True if the node is made of the ``value`` of all ranks. Otherwise it is rank 0's.
    merged = False
    #: The key in ``value`` under which each rank has only the entries of its shards.
    divided: ClassVar[str] = ""
    engine: Engine | None = None

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        #: The JSON in the record. ``value`` is added once the ranks have exchanged theirs.
        self.node: dict[str, Json] = {TAG: self.kind}

    def shards(self) -> Iterator[LocalShard]:
        """Give the shards on this rank. Local."""
        return iter(())

    def value(self, encoder: Encoder) -> dict[str, Json]:
        """Return everything that is not a shard. Local."""
        return {"name": self.name}

    def part_of(self, value: dict[str, Json]) -> dict[str, Json]:
        """Return the part of a ``value`` that other ranks don't have."""
        return {self.divided: value[self.divided]}

    def merge(self, values: Sequence[dict[str, Json]]) -> dict[str, Json]:
        """Return the ``value`` of all ranks together."""
        entries: dict[str, Json] = {}
        for value in reversed(values):
            entries |= value[self.divided]
        return {**values[0], self.divided: entries}

    def problem(self, node: Node) -> str:
        """Return why this object can't take a saved node, or an empty string. Local."""
        return ""

    def slots(self, manifest: Manifest, node: Node) -> list[tuple[str, Shard]]:
        """Return the shards to fill on this rank, each with the name of its saved tensor. Local."""
        return []

    def decode(self, node: Node, decoder: Decoder) -> Any:
        """Return what ``fill`` takes. Called before any object is changed."""
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
        raise CheckpointError(
            f"{path}.{method.__name__}() raised {text_of_error(error)}"
        ) from error


def engines_of(objects: Iterable[StateObject]) -> dict[str, str]:
    """Return the engine of each model by path. Two models of one class look the same otherwise."""
    return {one.path: one.engine.label for one in objects if one.engine is not None}


def progress_of(objects: Iterable[StateObject]) -> dict[str, str]:
    """Return the steps of each engine by path. Ranks compare them after an interruption."""
    return {one.path: one.engine.drift.progress for one in objects if one.engine is not None}


@final
class StatefulObject(StateObject):
    """An object with ``state_dict`` and ``load_state_dict``, such as a scheduler or a loader."""

    kind = "stateful"

    def __init__(self, name: str, path: str, value: Any) -> None:
        super().__init__(name, path)
        self.value_object = value

    def value(self, encoder: Encoder) -> dict[str, Json]:
        state = call(self.path, self.value_object.state_dict)
        return {"state": encoder.encode(state, f"{self.path}.state_dict()")}

    def decode(self, node: Node, decoder: Decoder) -> Any:
        return decoder.decode(node["state"])

    def fill(self, values: Any) -> None:
        call(self.path, self.value_object.load_state_dict, values)


@final
class TensorObject(StateObject):
    """A tensor in the state."""

    kind = "tensor"

    def __init__(self, name: str, path: str, tensor: torch.Tensor) -> None:
        super().__init__(name, path)
        self._shard = shard.whole(name, tensor)

    def shards(self) -> Iterator[LocalShard]:
        yield LocalShard(self._shard, equal=False)

    def problem(self, node: Node) -> str:
        return "" if "name" in node else "the checkpoint has a small tensor inside a value here"

    def slots(self, manifest: Manifest, node: Node) -> list[tuple[str, Shard]]:
        return [("", self._shard)]


@final
class RankObject(StateObject):
    """An object with a state for each rank: generators, and loaders that ranks read alone."""

    kind = "ranks"

    def __init__(self, name: str, path: str, value: RngState | LoaderHandle) -> None:
        super().__init__(name, path)
        self._object = value
        self._is_new_rank = False

    def own(self, encoder: Encoder) -> Json:
        """Return this rank's state."""
        return encoder.encode(call(self.path, self._object.state_dict), self.path)

    def decode(self, node: Node, decoder: Decoder) -> Any:
        """Decode this rank's entry of ``node["ranks"]``. New ranks take that of another rank."""
        saved, rank = node["ranks"], process.rank()
        self._is_new_rank = rank >= len(saved)
        return decoder.decode(saved[rank % len(saved)])

    def fill(self, values: Any) -> None:
        call(self.path, self._object.load_state_dict, values)
        if self._is_new_rank and isinstance(self._object, RngState):
            self._object.diverge(process.rank())


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
        #: The names in this module by the engine's names. None: they are equal.
        self._names: dict[str, str] | None = None
        if engine is not None and prefix:
            outer, inner = shard.tensor_names(engine.module), shard.tensor_names(module)
            self._names = {outer[key][0]: names[0] for key, names in inner.items()}

    def _shards(self) -> list[Shard]:
        shards, names = self._holdings.shards(None), self._names
        if names is None:
            return shards
        return [replace(one, name=names[one.name]) for one in shards if one.name in names]

    def shards(self) -> Iterator[LocalShard]:
        engine, names = self.engine, self._names
        equal: set[str | None] = set()
        everything = False
        if engine is not None and engine.synchronizes:
            equal = {name if names is None else names.get(name) for name in engine.named}
            everything = not engine.distributed
        # If the module is spread over the ranks, each buffer is on one of them.
        everything = everything or self.merged
        for one in self._shards():
            yield self.local_shard(one, everything or one.name in equal)

    def value(self, encoder: Encoder) -> dict[str, Json]:
        values, prefix = self._holdings.values(None), self._prefix
        names = [name for name in shard.extra_modules(self.module) if prefix + name in values]
        extra = {name: values[prefix + name] for name in names}
        # All ranks must know the tensors in shards, so those of a single rank become JSON.
        encoder = Encoder(None) if self.merged else encoder
        node = {"extra": encoder.encode(extra, f"{self.path}.state_dict()")}
        return node if self.engine is None else {**node, "backend": self.engine.name}

    def slots(self, manifest: Manifest, node: Node) -> list[tuple[str, Shard]]:
        return [(one.name, one) for one in self._shards()]

    def tied(self) -> dict[str, list[str]]:
        """Return the other names of tied tensors by their first name, which checkpoints use."""
        all_names = shard.tensor_names(self.module).values()
        return {names[0]: names[1:] for names in all_names if len(names) > 1}

    def decode(self, node: Node, decoder: Decoder) -> Any:
        return decoder.decode(node["extra"])

    def fill(self, values: Any) -> None:
        shard.fill_module_values(self.module, values)
        if self.engine is not None and self.engine.holdings.partial(None):
            return  # hooks expect full tensors
        for part in reversed(list(self.module.modules())):
            for hook in part._load_state_dict_post_hooks.values():
                hook(part, _IncompatibleKeys([], []))


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
        if engine is not None:
            take_added_groups(engine, optimizer)
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
        #: The tensors of the state in the checkpoint, under the names here.
        self._saved_tensors: set[str] = set()

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
        here = itertools.chain.from_iterable(self._group_names())
        return dict(zip(saved, here, strict=True))

    def problem(self, node: Node) -> str:
        kind = type(self.optimizer).__name__
        if node["class"] != kind:
            return f"the checkpoint has the state of a {node['class']}, and this is a {kind}"
        here, saved = self._group_names(), [group["params"] for group in node["groups"]]
        sizes, saved_sizes = [*map(len, here)], [*map(len, saved)]
        if sizes != saved_sizes:
            return f"the checkpoint has groups of {saved_sizes} parameters, and not of {sizes}"
        if node["named"] and self._has_names and here != saved:
            pairs = zip(itertools.chain(*saved), itertools.chain(*here), strict=True)
            saved_name, name = next(pair for pair in pairs if pair[0] != pair[1])
            return f"a parameter is {saved_name} in the checkpoint and {name} here"
        return ""

    def slots(self, manifest: Manifest, node: Node) -> list[tuple[str, Shard]]:
        """Return the shards of the state to fill, and create those that don't exist yet."""
        names_here, saved_names, tensors = self._names_here(node), {}, {}
        for saved_name, form in manifest.items():
            parameter, _, key = saved_name.rpartition("/")
            if parameter in names_here:
                name = f"{names_here[parameter]}/{key}"
                saved_names[name], tensors[name] = saved_name, form
        self._saved_tensors = set(tensors)
        slots = self._holdings.slots(self.optimizer, tensors)
        return [(saved_names[slot.name], slot) for slot in slots]

    def snapshot(self) -> Callable[[], None]:
        """Return a function that removes the state created by ``slots``."""
        state = self.optimizer.state
        before = {parameter: dict(own) for parameter, own in state.items()}

        def restore() -> None:
            state.clear()
            state.update(before)

        return restore

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
        if engine is None or not engine.holdings.partial(self.optimizer):
            self._drop_other_state(state.keys())
        self._end_load()
        if values.get("scale") and engine is not None and engine.precision.scaled:
            engine.loss_scale.restore(*values["scale"])
        frozen = set(values["frozen"])
        for saved_name, name in names.items():
            parameter, trainable = self._parameters[name], saved_name not in frozen
            if parameter.requires_grad != trainable:
                parameter.requires_grad_(trainable)

    def _drop_other_state(self, filled: Iterable[str]) -> None:
        """Remove tensors that were not saved, as ``Optimizer.load_state_dict`` does."""
        for entry in self._holdings.entries(self.optimizer):
            if entry.name not in filled:
                continue
            for key, value in list(entry.state.items()):
                is_saved = f"{entry.name}/{key}" in self._saved_tensors
                if not is_saved and shard.is_shard(key, value, entry.parameter):
                    del self.optimizer.state[entry.parameter][key]

    def _end_load(self) -> None:
        """Do what ``Optimizer.load_state_dict`` does last: add new options, and call hooks."""
        optimizer, engine = self.optimizer, self.engine
        with contextlib.nullcontext() if engine is None else engine.holdings.guard.opened():
            optimizer.__setstate__(
                {"state": optimizer.state, "param_groups": optimizer.param_groups}
            )
            for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
                hook(optimizer)
