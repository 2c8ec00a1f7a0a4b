"""A state of another library as one that accel saves: which dicts are models and optimizers, told by what is in them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import torch

from ...errors import CheckpointError
from ...shard import whole
from ..dtypes import check_tensor
from ..leaves import Leaf, Listed, Ready
from ..values import DEPTH, Decoder, Encoder, Json, place

logger = logging.getLogger("accel")

_PREFIXES: Final = ("module.", "_orig_mod.")
_EXTRA: Final = "_extra_state"


def adopt(state: Any, source: str, *, optimizer: bool) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The state to save, and the paths of what was found.

    Raises:
        CheckpointError: it is no dict, or an optimizer's state cannot be taken over.
    """
    found: dict[str, list[str]] = {"models": [], "optimizers": [], "values": [], "left out": []}
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{source} holds a {type(state).__name__}; expected a dict with a state dict in it")
    if is_model(state):
        state = {"model": state}
    taken = {key: _adopt(value, str(key), source, optimizer, found, 0) for key, value in state.items()}
    return {key: value for key, value in taken.items() if value is not _LEFT_OUT}, found


_LEFT_OUT: Final = object()


def _adopt(value: Any, path: str, source: str, optimizer: bool, found: dict[str, list[str]], depth: int) -> Any:
    if depth > DEPTH:
        raise CheckpointError(f"{source}: {path} is nested more than {DEPTH} levels deep")
    if is_optimizer(value):
        found["optimizers" if optimizer else "left out"].append(path)
        try:
            return _optimizer(value) if optimizer else _LEFT_OUT
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{source}: the optimizer's state {path} cannot be taken over ({error}); optimizer=False leaves it out"
            ) from error
    if is_model(value):
        found["models"].append(path)
        return _model(value, f"{source}: {path}")
    if type(value) is dict or (isinstance(value, list | tuple) and type(value) in (list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        taken = [(k, _adopt(v, place(path, k), source, optimizer, found, depth + 1)) for k, v in items]
        if isinstance(value, dict):
            return {k: v for k, v in taken if v is not _LEFT_OUT}
        return type(value)(None if v is _LEFT_OUT else v for _, v in taken)
    found["values"].append(path)
    return value.detach() if isinstance(value, torch.Tensor) else value


def is_model(value: Any) -> bool:
    """Whether a value is a module's state dict: tensors by name."""
    if not isinstance(value, Mapping) or not value or not all(type(key) is str for key in value):
        return False
    tensors = [key for key in value if not key.endswith(_EXTRA)]
    return bool(tensors) and all(isinstance(value[key], torch.Tensor) for key in tensors)


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer's state dict."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    groups = value["param_groups"]
    return isinstance(groups, list) and all(isinstance(g, Mapping) and "params" in g for g in groups)


def _model(state: Mapping[str, Any], where_from: str) -> Ready:
    prefix = ""
    while more := next((p for p in _PREFIXES if all(key.startswith(prefix + p) for key in state)), None):
        prefix += more
    if prefix:
        logger.info("the prefix %s was taken off the names of a model", prefix)
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    seen: set[tuple[Any, ...]] = set()
    for full, value in state.items():
        name = full[len(prefix) :]
        if name.rpartition(".")[2] == _EXTRA:
            extra[name] = value
            continue
        check_tensor(value, f"{where_from}, {full}")
        place_of = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
        where = (*place_of, value.dtype, value.is_conj(), value.is_neg())
        if value.numel() and where in seen:
            continue  # tied: it is there under its first name
        seen.add(where)
        tensors[name] = value.detach()
    return Ready(lambda name, path: ReadyLeaf(name, path, "module", tensors, {"extra": extra}))


def _optimizer(state: Mapping[str, Any]) -> Ready:
    """Names are the state's own where it has some; else parameters are numbered, in the order of the groups."""
    groups: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    given = [n for g in state["param_groups"] for n in g.get("param_names", g["params"])]
    named = bool(given) and all(isinstance(name, str) for name in given)
    for group in state["param_groups"]:
        labels = group.get("param_names", group["params"]) if named else group["params"]
        for key, label in zip(group["params"], labels, strict=True):
            names[str(key)] = label if named else str(len(names))
        params = [names[str(key)] for key in group["params"]]
        groups.append({**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": params})
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for key, entries in state["state"].items():
        if str(key) not in names:
            raise ValueError(f"it has state of {key!r}, which is in no group")
        name = names[str(key)]
        rest[name] = {}
        number = all(v.dim() == 0 for v in entries.values() if isinstance(v, torch.Tensor))
        for what, value in entries.items():
            if isinstance(value, torch.Tensor) and (value.dim() or (number and what != "step")):
                tensors[f"{name}/{what}"] = value.detach()
            else:
                rest[name][what] = value
    node = {"class": "", "named": named, "groups": groups, "state": rest, "frozen": [], "scale": None}
    return Ready(lambda name, path: ReadyLeaf(name, path, "optimizer", tensors, node))


@final
class ReadyLeaf(Leaf):
    """An object of another library's checkpoint: its tensors and its node are known, and it can only be saved."""

    def __init__(
        self, name: str, path: str, kind: str, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
    ) -> None:
        super().__init__(name, path)
        self.node = {**self.node, "!": kind}
        self._tensors = tensors
        self._values = values

    kind = "ready"

    def listed(self) -> Iterator[Listed]:
        for name, tensor in self._tensors.items():
            yield Listed(whole(f"{self.name}/{name}", tensor), sure=True)

    def value(self, encoder: Encoder) -> dict[str, Json]:
        return {key: encoder.encode(value, f"{self.path}.{key}") for key, value in self._values.items()}

    def fill(self, node: Mapping[str, Json], decoder: Decoder) -> None:
        raise CheckpointError(f"{self.path} can only be saved")
