"""A user's state as leaves and plain values, and the same state met with a saved one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import shard
from ..data import LoaderHandle
from ..engines import Engine
from ..errors import AccelError, CheckpointError
from ..handles import ModelHandle, OptimizerHandle, raw
from ..process.rng import RngState
from ..registry import Registry, registry, resolve_module
from .dtypes import check_tensor
from .leaves import Leaf, Listed, ModuleLeaf, OptimizerLeaf, RankLeaf, Ready, StatefulLeaf, TensorLeaf
from .shards import METADATA
from .values import DEPTH, TAG, Encoder, Json, place

#: Names of tensors that values hold begin with it.
KEPT: Final = "~"


def component(key: object) -> str:
    """A key as a part of a tensor's name: other keys have other parts, and no part has a slash."""
    if not isinstance(key, str):
        return f"[{_escaped(_written(key))}]"
    text = _escaped(key)
    return f"%{ord(text[0]):02X}{text[1:]}" if text[:1] in ("[", KEPT) else text


def former_component(key: object) -> str:
    """Of a key that is no string, as accel 0.1.0 had it: a path, a device or a number of numpy could look as another key."""
    return f"[{_escaped(str(key))}]"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("/", "%2F")


def below(name: str, part: str) -> str:
    """The name of what a component leads to in a container."""
    return f"{name}/{part}" if name else part


def _written(key: Any) -> str:
    """The ``repr`` of a key, which is the same in every process and with every version of what the key is of."""
    if type(key) is tuple:
        return f"({', '.join(map(_written, key))}{',' if len(key) == 1 else ''})"
    if isinstance(key, frozenset):
        return f"frozenset({{{', '.join(sorted(map(_written, key)))}}})"
    return repr(key.item() if type(key).__module__ == "numpy" else key)


def is_object(value: Any) -> bool:
    """Whether a value is filled in place by a checkpoint, and not replaced."""
    if isinstance(value, type):
        return False
    if isinstance(value, torch.Tensor | nn.Module | Optimizer | Ready):
        return True
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def holds_object(value: Any) -> bool:
    """Whether a container holds an object, at any depth."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        container = todo.pop()
        if (
            isinstance(container, dict | list | tuple)
            and type(container) is not torch.Size
            and id(container) not in seen
        ):
            seen.add(id(container))
            items = [item for _, item in items_of(container)]
            if any(map(is_object, items)):
                return True
            todo += items
    return False


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Keys and items of a walked container."""
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


class State:
    """A user's state, taken apart.

    Args:
        state: the nested dict.
        modules: of the state, for the names of raw optimizers' parameters.
    """

    def __init__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise CheckpointError(f"expected the state as a dict, found a {type(state).__name__}")
        self.state = state
        modules = [v for v in _objects(state) if isinstance(v, nn.Module)]
        self._raw_modules = [raw(m) if type(m) is ModelHandle else resolve_module(m)[0] for m in modules]

    def leaf(self, value: Any, name: str, path: str) -> Leaf:
        """The leaf of an object."""
        if isinstance(value, Ready):
            return value.leaf(name, path)
        try:
            if isinstance(value, RngState) or (isinstance(value, LoaderHandle) and value._accel.part):
                return RankLeaf(name, path, value)
            if isinstance(value, nn.Module):
                return _module_leaf(value, name, path)
            if isinstance(value, Optimizer):
                return self._optimizer_leaf(value, name, path)
            if isinstance(value, torch.Tensor):
                check_tensor(value, path)
                return TensorLeaf(name, path, value)
        except CheckpointError:
            raise
        except AccelError as error:
            raise CheckpointError(f"{path}: {error}") from error
        return StatefulLeaf(name, path, value)

    def _optimizer_leaf(self, optimizer: Optimizer, name: str, path: str) -> Leaf:
        engine: Engine | None
        if type(optimizer) is OptimizerHandle:
            engine = object.__getattribute__(optimizer, "_accel_engine")
            optimizer = object.__getattribute__(optimizer, "_accel_raw")
            if engine is None:
                raise CheckpointError(f"{path}: this handle's engine was torn down; give the raw optimizer")
        else:
            handle = Registry.optimizer_handle(optimizer)
            engine = None if handle is None else object.__getattribute__(handle, "_accel_engine")
        if engine is not None:
            return OptimizerLeaf(name, path, optimizer, engine, engine.holdings.parameter_names)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        candidates = [*self._raw_modules, *(e.module for e in registry.in_order())]
        for module in candidates:
            named = {id(p): n for n, p in module.named_parameters()}
            if held <= named.keys():
                return OptimizerLeaf(name, path, optimizer, None, named)
        return OptimizerLeaf(name, path, optimizer, None, None)

    def encode(self, encoder: Encoder) -> tuple[dict[str, Json], list[Leaf]]:
        """The state as JSON, in which each leaf's node is still to be filled, and the leaves.

        Raises:
            CheckpointError: something cannot be stored; names its path.
        """
        leaves: list[Leaf] = []
        paths: dict[str, str] = {}

        def visit(value: Any, name: str, path: str, depth: int) -> Json:
            if depth > DEPTH:
                raise CheckpointError(f"{path}: nested more than {DEPTH} levels deep, or a container that holds itself")
            if is_object(value):
                leaf = self.leaf(value, name, path)
                _take_name(paths, name, path)
                leaves.append(leaf)
                return leaf.node
            if not holds_object(value):
                return encoder.encode(value, path)
            parts = {
                key: visit(item, below(name, component(key)), place(path, key), depth + 1)
                for key, item in items_of(value)
            }
            if isinstance(value, dict):
                return _as_dict(parts, encoder, path)
            return list(parts.values()) if isinstance(value, list) else {TAG: "tuple", "items": list(parts.values())}

        return visit(self.state, "", "state", 0), leaves


def _take_name(paths: dict[str, str], name: str, path: str) -> None:
    """Keys of different types may look alike; what has one name would be saved once."""
    if paths.setdefault(name, path) != path:
        raise CheckpointError(f"{paths[name]} and {path} have the same name in a checkpoint, {name!r}: use other keys")


def _as_dict(parts: dict[Any, Json], encoder: Encoder, path: str) -> Json:
    keys = encoder.keys(parts, path)
    if all(type(key) is str for key in parts) and TAG not in parts:
        return parts
    return {TAG: "dict", "items": [list(pair) for pair in zip(keys, parts.values(), strict=True)]}


def _objects(value: Any, depth: int = 0) -> Iterator[Any]:
    """All objects in a state, in order."""
    if is_object(value):
        yield value
    elif depth <= DEPTH and holds_object(value):
        for _, item in items_of(value):
            yield from _objects(item, depth + 1)


def _module_leaf(module: nn.Module, name: str, path: str) -> Leaf:
    module, _ = resolve_module(module)
    engine = Registry.engine(module)
    if engine is not None:
        return ModuleLeaf(name, path, module, engine, "")
    for engine in registry.in_order():
        for prefix, part in engine.module.named_modules():
            if part is module:
                return ModuleLeaf(name, path, module, engine, f"{prefix}.")
        shared = [n for n, p in module.named_parameters() if id(p) in engine.known]
        if shared or any(type(part) is ModelHandle for part in module.modules()):
            raise CheckpointError(
                f"{path}: this {type(module).__name__} holds parameters of a model that is set up ({', '.join(shared[:5])}): "
                "save that model's handle, or a part of that model"
            )
    return ModuleLeaf(name, path, module, None, "")


def listings(leaves: Sequence[Leaf], keep: Callable[[str], bool] | None) -> list[Listed]:
    """What lies on this rank of all leaves, without the tensors that ``keep`` refuses (never an optimizer's).

    Raises:
        CheckpointError: a tensor cannot be stored.
    """
    found = []
    paths: dict[str, str] = {}
    for leaf in leaves:
        for listed in leaf.listed():
            _take_name(paths, listed.shard.name, leaf.path)
            if listed.shard.name == METADATA:
                raise CheckpointError(
                    f"{leaf.path}: in the files of a checkpoint {METADATA!r} is no name of a tensor; rename the key"
                )
            if keep is not None and not isinstance(leaf, OptimizerLeaf) and not keep(listed.shard.name):
                continue
            check_tensor(listed.shard.tensor, f"{leaf.path}, {listed.shard.name}")
            if isinstance(leaf, ModuleLeaf) and shard.overlaps_itself(listed.shard.tensor):
                raise CheckpointError(
                    f"{leaf.path}, {listed.shard.name}: its elements share memory (an expanded or overlapping view), so that no "
                    "load could fill it: register its clone()"
                )
            found.append(listed)
    return found


def kept_shard(number: int, path: str, tensor: torch.Tensor) -> Listed:
    """A tensor that is part of a value."""
    return Listed(shard.whole(f"{KEPT}{number}/{component(path)}", tensor), sure=False)
