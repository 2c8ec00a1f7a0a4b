"""What a state holds beside plain values: the objects that a checkpoint fills in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeVar, final

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from .. import shard
from ..data import LoaderHandle
from ..engines import Engine
from ..engines.base.step import take_added_groups
from ..errors import CheckpointError, text_of_error
from ..process.rng import RngState
from ..shard import Manifest, Shard
from .values import TAG, Decoder, Encoder, Json, items_in, place

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalRange:
    """A range that lies on this rank."""

    shard: Shard  # under its name in the checkpoint
    equal: bool  # the ranks that have it have the same values; else this is compared, and the lowest rank's are saved
    kind: str = ""  # of the rank's file that it goes into, one of ``KINDS``


#: The files of a rank, by the ends of their names. One that holds just what an earlier file holds is linked, so that what may
#: not have changed has files of its own: what is frozen; and modules that are frozen and were never set up, such as a moving
#: average, which changes all the same.
KINDS: Final = ("", "-still", "-apart")


class StateObject:
    """One object of a state: the names of its tensors begin with ``name``, and ``path`` is where it is in the state."""

    kind: ClassVar[str]
    #: What a saved node must have, with its type.
    fields: ClassVar[Mapping[str, type]] = {}
    #: Its node is made of all ranks' ``value``, which have parts of what is under ``divided``; else rank 0's is taken.
    merged = False
    divided: ClassVar[str] = ""
    #: The engine that must hear that its slots were filled.
    engine: Engine | None = None

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        #: Its place in the record's values, filled in when the ranks have told theirs.
        self.node: dict[str, Json] = {TAG: self.kind}

    def ranges(self) -> Iterator[LocalRange]:
        """The ranges that lie on this rank. Local."""
        return iter(())

    def value(self, encoder: Encoder) -> dict[str, Json]:
        """The rest of its node, as this rank knows it. Local."""
        return {"name": self.name}

    def merge(self, values: Sequence[dict[str, Json]]) -> dict[str, Json]:
        """The rest of its node, of all ranks' ``value``, where ``merged``."""
        parts = [value[self.divided] for value in reversed(values)]
        return {**values[0], self.divided: {name: item for part in parts for name, item in part.items()}}

    @classmethod
    def check(cls, node: Mapping[str, Json]) -> None:
        """Refuse a node that accel did not write: a ValueError says what is wrong."""
        for key, kind in cls.fields.items():
            if key not in node or not isinstance(node[key], kind):
                raise ValueError(f"{key!r} of a {cls.kind} is {str(node.get(key))[:60]}")

    def problem(self, node: Mapping[str, Json]) -> str:
        """Why this object cannot take a saved node; empty if it can. Local, changes nothing."""
        return ""

    def slots(self, manifest: Manifest, node: Mapping[str, Json]) -> list[tuple[str, Shard]]:
        """The ranges that this rank needs, each with the name of the saved tensor (without ``name``)."""
        return []

    @classmethod
    def encoded(cls, node: Mapping[str, Json]) -> list[Json]:
        """The values in a saved node that ``fill`` decodes."""
        return []

    def fill(self, node: Mapping[str, Json], decoder: Decoder) -> None:
        """Take over what is no tensor; the slots are filled."""

    def undo(self) -> Callable[[], None]:
        """What brings back how it is now, after ``slots`` have created state."""
        return lambda: None

    def local_range(self, own: Shard, equal: bool, kind: str = "") -> LocalRange:
        """Of one of its shards, which gets the name that it has in the checkpoint."""
        return LocalRange(Shard(f"{self.name}/{own.name}", own.shape, own.start, own.tensor, own.box), equal, kind)


def called(path: str, method: Callable[..., T], *args: Any) -> T:
    """What a method of a user's object gives; a CheckpointError says whose it is that failed."""
    try:
        return method(*args)
    except Exception as error:
        raise CheckpointError(f"{path}.{method.__name__}() raised {text_of_error(error)}") from error


def engines_of(objects: Iterable[StateObject]) -> dict[str, str]:
    """By path the models with an engine: two of one class have equal names and shapes, which hides them from other checks."""
    return {one.path: one.engine.label for one in objects if one.engine is not None}


def progress_of(objects: Iterable[StateObject]) -> dict[str, str]:
    """By path how far the engines have come: ranks that were interrupted in different steps have parts of different models."""
    return {one.path: one.engine.drift.progress for one in objects if one.engine is not None}


@final
class StatefulObject(StateObject):
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, scalers, samplers, loader handles."""

    kind = "stateful"
    fields: ClassVar[Mapping[str, type]] = {"state": object}

    def __init__(self, name: str, path: str, value: Any) -> None:
        super().__init__(name, path)
        self.value_object = value

    def value(self, encoder: Encoder) -> dict[str, Json]:
        return {"state": encoder.encode(called(self.path, self.value_object.state_dict), f"{self.path}.state_dict()")}

    @classmethod
    def encoded(cls, node: Mapping[str, Json]) -> list[Json]:
        return [node["state"]]

    def fill(self, node: Mapping[str, Json], decoder: Decoder) -> None:
        called(self.path, self.value_object.load_state_dict, decoder.decode(node["state"]))


@final
class TensorObject(StateObject):
    """A tensor in the state, which is filled in place."""

    kind = "tensor"

    def __init__(self, name: str, path: str, tensor: torch.Tensor) -> None:
        super().__init__(name, path)
        self._tensor = tensor

    def ranges(self) -> Iterator[LocalRange]:
        yield LocalRange(shard.whole(self.name, self._tensor), equal=False)

    def problem(self, node: Mapping[str, Json]) -> str:
        return "" if "name" in node else "the checkpoint has a small tensor inside a value here"

    def slots(self, manifest: Manifest, node: Mapping[str, Json]) -> list[tuple[str, Shard]]:
        return [("", shard.whole(self.name, self._tensor))]


@final
class RankObject(StateObject):
    """What each rank has its own state of: the random generators, and loaders that each rank reads by itself."""

    kind = "ranks"
    fields: ClassVar[Mapping[str, type]] = {"name": str}

    def __init__(self, name: str, path: str, value: RngState | LoaderHandle) -> None:
        super().__init__(name, path)
        self._object = value

    def own(self, encoder: Encoder) -> Json:
        return encoder.encode(called(self.path, self._object.state_dict), self.path)

    def fill_own(self, values: Sequence[Json], decoder: Decoder, rank: int) -> None:
        """Take over this rank's value; a rank that the saving job did not have draws numbers of its own."""
        state = decoder.decode(values[rank % len(values)])
        called(self.path, self._object.load_state_dict, state)
        if rank >= len(values) and isinstance(self._object, RngState):
            self._object.diverge(rank)


# -- Modules and optimizers: raw ones, those of an engine, and parts of an engine's module -----------------------------


@final
class ModuleObject(StateObject):
    """A module: raw, of an engine, or a part of an engine's module."""

    kind = "module"
    divided = "extra"
    fields: ClassVar[Mapping[str, type]] = {"extra": dict}

    def __init__(self, name: str, path: str, module: nn.Module, engine: Engine | None, prefix: str) -> None:
        super().__init__(name, path)
        self.module = module
        self.engine = engine
        self._holdings = shard.Raw(module, {}) if engine is None else engine.holdings
        self._prefix = prefix
        # One model on all ranks together: what is no tensor lies on one of them, too.
        self.merged = engine is not None and engine.distributed and engine.gradients.spread
        self._spread = self.merged or (engine is not None and engine.synchronizes and not engine.distributed)
        #: The names that the engine gives to what is in this part of its module, and the part's own.
        self._own_names: dict[str, str] = {}
        if engine is not None and prefix:
            whole = shard.tensor_names(engine.module)
            self._own_names = {whole[key][0]: names[0] for key, names in shard.tensor_names(module).items()}

    def _own(self, name: str) -> str | None:
        """What is called ``name`` in the engine's module, by its name in this one; None if it is not in it."""
        return self._own_names.get(name) if self._prefix else name

    def _shards(self) -> list[Shard]:
        shards = self._holdings.shards(None)
        if not self._prefix:
            return shards
        return [replace(s, name=own) for s in shards if (own := self._own(s.name)) is not None]

    def ranges(self) -> Iterator[LocalRange]:
        engine, shards = self.engine, self._shards()
        named = dict(self.module.named_parameters()) if engine is None else engine.named
        parameters = {own: p for n, p in named.items() if (own := self._own(n)) is not None}
        equal = set(parameters) if engine is not None and engine.synchronizes else set()
        if self._spread:
            equal.update(s.name for s in shards)  # each buffer lies on one rank
        frozen = {n for n, p in parameters.items() if not p.requires_grad}
        still = "-still" if engine is not None or len(frozen) < len(parameters) else "-apart"
        for s in shards:
            yield self.local_range(s, s.name in equal, still if s.name in frozen else "")

    def value(self, encoder: Encoder) -> dict[str, Json]:
        names = {id(part): name for name, part in shard.extra_modules(self._holdings.module).items()}
        found = self._holdings.values(None)
        parts = shard.extra_modules(self.module).items()
        extra = {own: found[names[id(part)]] for own, part in parts if names[id(part)] in found}
        # What only one rank has cannot be in the shards, whose plan is made of tensors that all ranks know of.
        encoder = Encoder(None) if self.merged else encoder
        by = {} if self.engine is None else {"backend": self.engine.name}
        return {"extra": encoder.encode(extra, f"{self.path}.state_dict()"), **by}

    def slots(self, manifest: Manifest, node: Mapping[str, Json]) -> list[tuple[str, Shard]]:
        return [(s.name, s) for s in self._shards()]

    @classmethod
    def encoded(cls, node: Mapping[str, Json]) -> list[Json]:
        return [node["extra"]]

    def tied(self) -> dict[str, list[str]]:
        """The further names of parameters and buffers that have several, by the first, which a checkpoint has."""
        return {names[0]: names[1:] for names in shard.tensor_names(self.module).values() if len(names) > 1}

    def fill(self, node: Mapping[str, Json], decoder: Decoder) -> None:
        shard.fill_module_values(self.module, decoder.decode(node["extra"]))
        if self.engine is None or not self.engine.holdings.partial(None):  # a hook would see parts
            for part in reversed(list(self.module.modules())):
                for hook in getattr(part, "_load_state_dict_post_hooks", {}).values():
                    hook(part, _IncompatibleKeys([], []))


@final
class OptimizerObject(StateObject):
    """An optimizer, raw or of an engine.

    It speaks of the parameters in its own groups alone: what a model has beside them, frozen or not, is left as it is.
    ``names`` are those of the model's parameters, by ``id``; None where they are unknown, and parameters are met by position.
    """

    kind = "optimizer"
    merged = True
    divided = "state"
    fields: ClassVar[Mapping[str, type]] = {"class": str, "named": bool, "groups": list, "state": dict, "frozen": list}

    def __init__(
        self, name: str, path: str, optimizer: Optimizer, engine: Engine | None, names: Mapping[int, str] | None
    ) -> None:
        super().__init__(name, path)
        self.optimizer = optimizer
        self.engine = engine
        self._named = names is not None
        if engine is not None:
            take_added_groups(engine, optimizer)
        held = shard.parameters_of(optimizer)
        self._names = {id(p): str(i) for i, p in enumerate(held)} if names is None else names
        strangers = [tuple(p.shape) for p in held if id(p) not in self._names]
        if strangers:
            raise CheckpointError(
                f"{path}: this {type(optimizer).__name__} holds parameters that are not of its model (of shape "
                f"{', '.join(map(str, strangers[:5]))}), so that they have no name in a checkpoint: make them part of the model"
            )
        self._parameters = {self._names[id(p)]: p for p in held}
        self._holdings = shard.Raw(None, self._names) if engine is None else engine.holdings
        #: The saved names of parameters whose state does not fit, and is left as it is.
        self.left: set[str] = set()
        #: The tensors that a checkpoint has of the state, and which keys there were here before.
        self._given: set[str] = set()
        self._had: dict[str, set[Any]] = {}

    def ranges(self) -> Iterator[LocalRange]:
        frozen = self._frozen()
        equal = self.engine is not None and self.engine.synchronizes
        for s in self._holdings.shards(self.optimizer):
            yield self.local_range(s, equal, "-still" if s.name.rpartition("/")[0] in frozen else "")

    def _frozen(self) -> set[str]:
        return {n for n, p in self._parameters.items() if not p.requires_grad}

    def value(self, encoder: Encoder) -> dict[str, Json]:
        values, engine = self._holdings.values(self.optimizer), self.engine
        state = {n: encoder.encode(s, place(f"{self.path}.state", n)) for n, s in values["state"].items()}
        return {
            "class": type(self.optimizer).__name__,
            "named": self._named,
            "groups": [
                encoder.encode(g, place(f"{self.path}.param_groups", i)) for i, g in enumerate(values["groups"])
            ],
            "state": state,
            "frozen": sorted(self._frozen()),
            "scale": [*engine.loss_scale.state()] if engine is not None and engine.precision.scaled else None,
        }

    def _renamed(self, node: Mapping[str, Json]) -> dict[str, str]:
        """Saved names to those of this optimizer: by name where both have some, else by position."""
        saved = [name for group in node["groups"] for name in _options(group)["params"]]
        mine = [name for group in self._holdings.values(self.optimizer)["groups"] for name in group["params"]]
        return {name: name for name in saved} if node["named"] and self._named else dict(zip(saved, mine, strict=True))

    @classmethod
    def check(cls, node: Mapping[str, Json]) -> None:
        super().check(node)
        names: set[Any] = set()
        for group in node["groups"]:
            params = _options(group).get("params")
            if not isinstance(params, list):
                raise ValueError("a parameter group is not as accel writes it")
            names.update(params)
        # Those frozen need not be in a group: accel 0.1.0 wrote the names of all that the model had frozen.
        if not all(isinstance(name, str) for name in (*names, *node["frozen"])):
            raise ValueError("the name of a parameter is no text")
        if not names.issuperset(node["state"]):
            raise ValueError("an optimizer has state of parameters that are in no group")
        scale = node.get("scale")
        if scale is not None and [type(n) for n in scale] != [float, int]:
            raise ValueError(f"the loss scale is {scale!r}")
        if not all(isinstance(one, dict) for one in node["state"].values()):
            raise ValueError("an optimizer's state is not as accel writes it")

    def problem(self, node: Mapping[str, Json]) -> str:
        mine = [group["params"] for group in self._holdings.values(self.optimizer)["groups"]]
        saved = [_options(group)["params"] for group in node["groups"]]
        kind = type(self.optimizer).__name__
        if node["class"] and node["class"] != kind:
            return f"the checkpoint has the state of a {node['class']}, and this is a {kind}"
        if [len(g) for g in mine] != [len(g) for g in saved]:
            return (
                f"the checkpoint has parameter groups of {[len(g) for g in saved]} parameters, and this optimizer has "
                f"{[len(g) for g in mine]}"
            )
        if not node["class"]:
            # From another library's checkpoint, which does not say whose state it is; the groups' options tell, but for those
            # that the class gives to the state of its older versions.
            known = {k for g in node["groups"] for k in _options(g)} | _renewed(self.optimizer, node["groups"])
            if lacking := sorted({k for g in self._holdings.values(self.optimizer)["groups"] for k in g} - known):
                return f"the checkpoint's groups have no {', '.join(lacking)}, so that they are not those of a {kind}"
        if node["named"] and self._named:
            for i, (ours, theirs) in enumerate(zip(mine, saved, strict=True)):
                if ours != theirs:
                    first = next(k for k, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
                    return f"parameter {first} of group {i} is {theirs[first]} in the checkpoint and {ours[first]} here"
        return ""

    def slots(self, manifest: Manifest, node: Mapping[str, Json]) -> list[tuple[str, Shard]]:
        renamed = self._renamed(node)
        saved_names = {}
        mine = {}
        for name, value in manifest.items():
            parameter, _, key = name.rpartition("/")
            if parameter in renamed:
                mine[f"{renamed[parameter]}/{key}"] = value
                saved_names[f"{renamed[parameter]}/{key}"] = name
        self._given = set(mine)
        return [(saved_names[s.name], s) for s in self._holdings.slots(self.optimizer, mine)]

    @classmethod
    def encoded(cls, node: Mapping[str, Json]) -> list[Json]:
        return [*node["groups"], *node["state"].values()]

    def fill(self, node: Mapping[str, Json], decoder: Decoder) -> None:
        renamed = self._renamed(node)
        groups = [decoder.decode(group) for group in node["groups"]]
        saved = {renamed[name]: decoder.decode(own) for name, own in node["state"].items()}
        left = {renamed[name] for name in self.left}
        before = self._holdings.values(self.optimizer)["state"] if left else {}
        saved = {name: own for name, own in saved.items() if name not in left}
        kept = {name: before[name] for name in left if self._had.get(name)}
        values = {
            "groups": [{**group, "params": [renamed[name] for name in group["params"]]} for group in groups],
            "state": saved | kept,
        }
        self._holdings.fill(self.optimizer, values)
        self._finish(saved)
        if self.engine is not None and self.engine.precision.scaled and node.get("scale") is not None:
            self.engine.loss_scale.restore(*node["scale"])
        if not node["class"]:
            return  # another library's, which does not say what was frozen
        frozen = set(node["frozen"])
        for theirs, name in renamed.items():
            parameter = self._parameters[name]
            if parameter.requires_grad == (theirs in frozen):
                parameter.requires_grad_(theirs not in frozen)

    def _finish(self, filled: Container[str]) -> None:
        """What torch does at the end of ``load_state_dict``: no more state than was saved, as a class has it now; the hooks."""
        optimizer, engine = self.optimizer, self.engine
        if engine is None or not engine.holdings.partial(optimizer):
            for entry in self._holdings.entries(optimizer):
                tensors = [k for k, v in entry.state.items() if shard.is_shard(k, v, entry.parameter)]
                for key in tensors if entry.name in filled else ():
                    if f"{entry.name}/{key}" not in self._given:
                        del optimizer.state[entry.parameter][key]
        with contextlib.nullcontext() if engine is None else engine.holdings.guard.opened():
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
            for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
                hook(optimizer)

    def undo(self) -> Callable[[], None]:
        before = self._holdings.values(self.optimizer)
        self._had = had = {entry.name: set(entry.state) for entry in self._holdings.entries(self.optimizer)}

        def act() -> None:
            self._holdings.fill(self.optimizer, before)
            for entry in self._holdings.entries(self.optimizer):
                for key in set(entry.state) - had.get(entry.name, set()):
                    del self.optimizer.state[entry.parameter][key]

        return act


def _renewed(optimizer: Optimizer, groups: Sequence[Json]) -> set[str]:
    """The options that the optimizer's class gives to parameter groups that were saved without them."""
    made: list[dict[str, Any]] = [{**_options(group), "params": []} for group in groups]
    with contextlib.suppress(Exception):  # a class that wants more than a state dict has
        type(optimizer).__new__(type(optimizer)).__setstate__({"state": {}, "param_groups": made, "defaults": {}})
    return {key for group in made for key in group}


def _options(group: Json) -> dict[str, Json]:
    """A saved parameter group by its keys that are strings, also where it has others."""
    if isinstance(group, dict) and TAG not in group:
        return group
    if isinstance(group, dict) and group[TAG] == "dict":
        return {key: value for key, value in items_in(group) if type(key) is str}
    raise ValueError("a parameter group is not as accel writes it")
