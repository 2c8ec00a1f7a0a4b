"""A user's state as a tree of containers, objects that a load fills in place, and plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import shard
from ..data import LoaderHandle
from ..errors import AccelError, CheckpointError
from ..handles import ModelHandle, raw
from ..process.rng import RngState
from ..registry import Registry, registry, resolve_module
from .objects import (
    ModuleObject,
    OptimizerObject,
    RankObject,
    StatefulObject,
    StateObject,
    TensorObject,
    call,
)
from .shards import LocalShard, check_tensor
from .values import DEPTH, TAG, Encoder, Json, place

#: The first character in the names of tensors that are part of plain values.
OF_VALUES: Final = "~"
#: Types that are not, and don't contain, objects.
PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})

# -- names of tensors ------------------------------------------------------------------------------


def component(key: object) -> str:
    """Return a key as a part of a tensor's name. Parts are joined by slashes."""
    if not isinstance(key, str):
        value = key.item() if type(key).__module__ == "numpy" else key  # type: ignore[attr-defined]
        return f"[{_escape(repr(value))}]"
    text = _escape(key)
    return f"%{ord(text[0]):02X}{text[1:]}" if text[:1] in ("[", OF_VALUES) else text


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("/", "%2F")


def join(name: str, part: str) -> str:
    """Return the name of a container's item."""
    return f"{name}/{part}" if name else part


# -- flatten ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """An object with its name in the checkpoint and its path in the state."""

    value: Any
    name: str
    path: str


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A dict, list or tuple that contains objects. Its other items are plain values."""

    container: Any
    children: dict[Any, Tree]


Tree: TypeAlias = Branch | Leaf


def is_object(value: Any) -> bool:
    """True if a checkpoint fills the value in place instead of replacing it."""
    if type(value) in PLAIN or isinstance(value, type):
        return False
    if isinstance(value, torch.Tensor | nn.Module | Optimizer | StateObject):
        return True
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(value, method, None)) for method in methods)


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """Return the keys and items of a dict, list or tuple."""
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


def flatten(value: Any, name: str = "", path: str = "state", depth: int = 0) -> Tree | None:
    """Return the objects in a value as a tree, or None if the value contains no object."""
    if is_object(value):
        return Leaf(value, name, path)
    # Encoder refuses containers that are nested more deeply.
    if not isinstance(value, dict | list | tuple) or depth > DEPTH:
        return None
    children = {}
    for key, item in items_of(value):
        if type(item) not in PLAIN:
            child = flatten(item, join(name, component(key)), place(path, key), depth + 1)
            if child is not None:
                children[key] = child
    return Branch(value, children) if children else None


def leaves(tree: Tree | None) -> Iterator[Leaf]:
    """Yield the objects of a tree in order."""
    if isinstance(tree, Leaf):
        yield tree
    elif tree is not None:
        for child in tree.children.values():
            yield from leaves(child)


@final
class State:
    """A user's state, a nested dict."""

    def __init__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise CheckpointError(
                f"Expected the state as a dict, found a {type(state).__name__}. "
                'Write accel.save({"model": model, "optimizer": optimizer}, dir).'
            )
        self.state = state
        self.tree = flatten(state)
        #: A raw optimizer's parameters have the names that they have in one of these.
        self._raw_modules: list[nn.Module] = []
        for leaf in leaves(self.tree):
            if type(leaf.value) is ModelHandle:
                self._raw_modules.append(raw(leaf.value))  # also if its engine was torn down
            elif isinstance(leaf.value, nn.Module):
                self._raw_modules.append(resolve_module(leaf.value)[0])

    def encode(self, encoder: Encoder) -> tuple[dict[str, Json], list[StateObject]]:
        """Return the state as JSON and its objects, whose nodes in the JSON are filled in later."""
        objects: list[StateObject] = []
        paths: dict[str, str] = {}

        def visit(tree: Tree | None, value: Any, path: str) -> Json:
            if tree is None:
                return encoder.encode(value, path)
            if isinstance(tree, Leaf):
                _check_unique(paths, tree.name, path)
                objects.append(self.object_of(tree))
                return objects[-1].node
            items = items_of(value)
            nodes = [visit(tree.children.get(key), item, place(path, key)) for key, item in items]
            if isinstance(value, list):
                return nodes
            if isinstance(value, tuple):
                return {TAG: "tuple", "items": nodes}
            if all(type(key) is str for key in value) and TAG not in value:
                return dict(zip(value, nodes, strict=True))
            keys = [encoder.encode_key(key, path) for key in value]
            return {TAG: "dict", "items": [list(pair) for pair in zip(keys, nodes, strict=True)]}

        return visit(self.tree, self.state, "state"), objects

    def object_of(self, leaf: Leaf) -> StateObject:
        """Return the object that saves and fills a leaf."""
        value, name, path = leaf.value, leaf.name, leaf.path
        if isinstance(value, StateObject):
            value.name, value.path = name, path
            return value
        try:
            is_own = isinstance(value, LoaderHandle) and value._accel.part
            if is_own or isinstance(value, RngState):
                return RankObject(name, path, value)
            if isinstance(value, nn.Module):
                return _module_object(value, name, path)
            if isinstance(value, Optimizer):
                return self._optimizer_object(value, name, path)
            if isinstance(value, torch.Tensor):
                check_tensor(value, path)
                return TensorObject(name, path, value)
        except CheckpointError:
            raise
        except AccelError as error:
            raise CheckpointError(f"{path}: {error}") from error
        return StatefulObject(name, path, value)

    def _optimizer_object(self, optimizer: Optimizer, name: str, path: str) -> StateObject:
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
        for module in [*self._raw_modules, *(engine.module for engine in registry.in_order())]:
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            if held <= names.keys():
                return OptimizerObject(name, path, optimizer, None, names)
        return OptimizerObject(name, path, optimizer, None, None)


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


def _check_unique(paths: dict[str, str], name: str, path: str) -> None:
    if paths.setdefault(name, path) != path:
        raise CheckpointError(
            f"{paths[name]} and {path} have the same name {name!r}. Use different keys."
        )


# -- the tensors on this rank ----------------------------------------------------------------------


def shards_of(
    objects: Sequence[StateObject], filter: Callable[[str], bool] | None
) -> list[LocalShard]:
    """Return the shards on this rank. ``filter`` chooses tensors by name, but keeps optimizers."""
    found = []
    paths: dict[str, str] = {}
    for one in objects:
        for local in one.shards():
            name = local.shard.name
            _check_unique(paths, name, one.path)
            if filter is None or isinstance(one, OptimizerObject) or filter(name):
                check_tensor(local.shard.tensor, f"{one.path}, {name}")
                found.append(local)
    return found


def value_shard(number: int, path: str, tensor: torch.Tensor) -> LocalShard:
    """Return the shard of a tensor that is part of a plain value."""
    return LocalShard(shard.whole(f"{OF_VALUES}{number}/{component(path)}", tensor), equal=False)
