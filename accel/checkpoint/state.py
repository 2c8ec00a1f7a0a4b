"""A user's state: its objects, which a checkpoint fills in place, with their names in it, and its plain values. Local."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import shard
from ..data import LoaderHandle
from ..engines import Engine
from ..errors import AccelError, CheckpointError
from ..handles import ModelHandle, engine_behind, raw
from ..process.rng import RngState
from ..registry import Registry, registry, resolve_module
from .objects import (
    LocalRange,
    ModuleObject,
    OptimizerObject,
    RankObject,
    StatefulObject,
    StateObject,
    TensorObject,
    called,
)
from .safetensors import METADATA, check_tensor
from .values import DEPTH, TAG, Encoder, Json, place

#: Names of tensors that values hold begin with it.
OF_VALUES: Final = "~"


def component(key: object) -> str:
    """A key as a part of a tensor's name: other keys have other parts, and no part has a slash."""
    if not isinstance(key, str):
        return f"[{_escaped(_written(key))}]"
    text = _escaped(key)
    return f"%{ord(text[0]):02X}{text[1:]}" if text[:1] in ("[", OF_VALUES) else text


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


_OBJECTS: Final = (torch.Tensor, nn.Module, Optimizer, StateObject)
#: Types of values that are no objects, and hold none.
PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


def is_object(value: Any) -> bool:
    """Whether a value is filled in place by a checkpoint, and not replaced."""
    if type(value) in PLAIN or isinstance(value, type):
        return False
    if isinstance(value, _OBJECTS):
        return True
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """The keys and items of a container that is walked."""
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


def _holders(root: Any) -> set[int]:
    """The ids of the containers that hold an object, at any depth."""
    found: set[int] = set()
    seen: set[int] = set()

    def visit(container: Any, depth: int) -> bool:
        if id(container) not in seen and depth <= DEPTH:  # what is nested more deeply cannot be stored
            seen.add(id(container))
            for item in container.values() if isinstance(container, dict) else container:
                if type(item) in PLAIN:
                    continue
                walked = isinstance(item, dict | list | tuple) and type(item) is not torch.Size
                if is_object(item) or (walked and visit(item, depth + 1)):
                    found.add(id(container))
        return id(container) in found

    visit(root, 0)
    return found


@final
class State:
    """A user's state, a nested dict, taken apart."""

    def __init__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise CheckpointError(
                f"expected the state as a dict, found a {type(state).__name__}: a dict names what is in it, as in "
                'accel.save({"model": model, "optimizer": optimizer}, dir)'
            )
        self.state = state
        self._holders = _holders(state)
        # For the names of raw optimizers' parameters.
        modules = [value for value, *_ in self.objects() if isinstance(value, nn.Module)]
        self._raw_modules = [raw(m) if type(m) is ModelHandle else resolve_module(m)[0] for m in modules]

    def holds_object(self, container: Any) -> bool:
        """Whether one of its containers holds an object, at any depth."""
        return id(container) in self._holders

    def objects(self) -> Iterator[tuple[Any, str, str]]:
        """All objects in order, each with its name and path."""

        def visit(value: Any, name: str, path: str, depth: int) -> Iterator[tuple[Any, str, str]]:
            if is_object(value):
                yield value, name, path
            elif depth <= DEPTH and self.holds_object(value):
                for key, item in items_of(value):
                    yield from visit(item, below(name, component(key)), place(path, key), depth + 1)

        return visit(self.state, "", "state", 0)

    def object_of(self, value: Any, name: str, path: str) -> StateObject:
        """What a checkpoint does with an object."""
        if isinstance(value, StateObject):  # of another library's checkpoint
            value.name, value.path = name, path
            return value
        try:
            if isinstance(value, RngState) or (isinstance(value, LoaderHandle) and value._accel.part):
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
        handle = Registry.optimizer_handle(optimizer)
        engine: Engine | None = None if handle is None else engine_behind(handle)
        if engine is None and handle is optimizer:
            raise CheckpointError(f"{path}: this handle's engine was torn down; give the raw optimizer")
        given = optimizer if handle is None else raw(handle)
        if own := _own_entries(given, path):
            if engine is not None and engine.holdings.partial(given):
                raise CheckpointError(
                    f"{path}: the state_dict() of this {type(given).__name__} has entries of its own ({', '.join(own[:5])}), "
                    f"which backend {engine.name!r} cannot divide: use one where each process has whole optimizers"
                )
            return StatefulObject(name, path, optimizer)
        if handle is not None and engine is not None:
            return OptimizerObject(name, path, raw(handle), engine, engine.holdings.parameter_names)
        held = set(map(id, shard.parameters_of(optimizer)))
        candidates = [*self._raw_modules, *(e.module for e in registry.in_order())]
        for module in candidates:
            named = {id(p): n for n, p in module.named_parameters()}
            if held <= named.keys():
                return OptimizerObject(name, path, optimizer, None, named)
        return OptimizerObject(name, path, optimizer, None, None)

    def encode(self, encoder: Encoder) -> tuple[dict[str, Json], list[StateObject]]:
        """The state as JSON, in which each object's node is to be filled, and the objects; refuses what cannot be stored."""
        objects: list[StateObject] = []
        paths: dict[str, str] = {}

        def visit(value: Any, name: str, path: str, depth: int) -> Json:
            if depth > DEPTH:
                raise CheckpointError(f"{path}: nested more than {DEPTH} levels deep, or a container that holds itself")
            if is_object(value):
                one = self.object_of(value, name, path)
                objects.append(one)
                _take_name(paths, name, path)
                return one.node
            if not self.holds_object(value):
                return encoder.encode(value, path)
            parts = {
                key: visit(item, below(name, component(key)), place(path, key), depth + 1)
                for key, item in items_of(value)
            }
            if isinstance(value, dict):
                return _as_dict(parts, encoder, path)
            return list(parts.values()) if isinstance(value, list) else {TAG: "tuple", "items": list(parts.values())}

        return visit(self.state, "", "state", 0), objects


def _own_entries(optimizer: Optimizer, path: str) -> list[str]:
    """What the class of an optimizer around another one, say, adds to ``state_dict``, and only its ``load_state_dict`` takes."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return []
    return [str(key) for key in called(path, optimizer.state_dict) if key not in ("state", "param_groups")]


def _take_name(paths: dict[str, str], name: str, path: str) -> None:
    """Keys of different types may look alike; what has one name would be saved once."""
    if paths.setdefault(name, path) != path:
        raise CheckpointError(f"{paths[name]} and {path} have the same name in a checkpoint, {name!r}: use other keys")


def _as_dict(parts: dict[Any, Json], encoder: Encoder, path: str) -> Json:
    keys = encoder.keys(parts, path)
    if all(type(key) is str for key in parts) and TAG not in parts:
        return parts
    return {TAG: "dict", "items": [list(pair) for pair in zip(keys, parts.values(), strict=True)]}


def _module_object(module: nn.Module, name: str, path: str) -> StateObject:
    module, _ = resolve_module(module)
    engine = Registry.engine(module)
    if engine is not None:
        return ModuleObject(name, path, module, engine, "")
    for engine in registry.in_order():
        for prefix, part in engine.module.named_modules():
            if part is module:
                return ModuleObject(name, path, module, engine, f"{prefix}.")
        shared = [n for n, p in module.named_parameters() if id(p) in engine.known]
        if shared or any(type(part) is ModelHandle for part in module.modules()):
            raise CheckpointError(
                f"{path}: this {type(module).__name__} holds parameters of a model that is set up ({', '.join(shared[:5])}): "
                "save that model's handle, or a part of that model"
            )
    return ModuleObject(name, path, module, None, "")


def local_ranges(objects: Sequence[StateObject], filter: Callable[[str], bool] | None) -> list[LocalRange]:
    """What lies on this rank of all objects, without what ``filter`` refuses (never an optimizer's), if it can be stored."""
    found = []
    paths: dict[str, str] = {}
    for one in objects:
        for held in one.ranges():
            name, tensor = held.shard.name, held.shard.tensor
            _take_name(paths, name, one.path)
            if name == METADATA:
                raise CheckpointError(
                    f"{one.path}: in the files of a checkpoint {METADATA!r} is no name of a tensor; rename the key"
                )
            if filter is not None and not isinstance(one, OptimizerObject) and not filter(name):
                continue
            check_tensor(tensor, f"{one.path}, {name}")
            if isinstance(one, ModuleObject) and shard.overlaps_itself(tensor):
                raise CheckpointError(
                    f"{one.path}, {name}: its elements share memory (an expanded or overlapping view), so that no "
                    "load could fill it: register its clone()"
                )
            found.append(held)
    return found


def value_range(number: int, path: str, tensor: torch.Tensor) -> LocalRange:
    """A tensor that is part of a value."""
    return LocalRange(shard.whole(f"{OF_VALUES}{number}/{component(path)}", tensor), equal=False)
