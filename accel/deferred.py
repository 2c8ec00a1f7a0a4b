"""Deferred initialization: modules get memory and values in ``setup``."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import BackendError
from .trees import map_tensors

#: The attribute of a deferred parameter that holds its ``Origin``.
_ORIGIN: Final = "_accel_origin"


class Source(NamedTuple):
    """A directory of weights, and the model's name in it."""

    weights: str
    name: str | None


class Origin(NamedTuple):
    """A deferred parameter's module, source of values, and recorded writes."""

    module: Callable[[], nn.Module | None]
    source: Source | None
    writes: set[str]


@contextmanager
def deferred_init(
    weights: str | os.PathLike[str] | None = None, *, name: str | None = None
) -> Iterator[None]:
    """Build modules without allocating their parameters.

    Parameters are created on the meta device, and ``accel.setup`` gives them
    memory and values from each module's ``reset_parameters()`` or
    ``_reset_parameters()``. Buffers are allocated as usual. ``setup`` raises if a
    parameter gets no values, or if other code in the context wrote to it.

    Args:
        weights: a checkpoint, or a directory with ``model.safetensors`` or its
            index (diffusers' names work too). It must contain all parameters and
            persistent buffers. Each rank reads only its shards.
        name: the model's name, if the checkpoint contains several.
    """
    source = None if weights is None else Source(os.fspath(weights), name)
    recorder = _Recorder()

    def defer(module: nn.Module, name: str, p: nn.Parameter | None) -> Any:
        """Return a parameter on meta to register instead of ``p``."""
        if p is None or p.is_meta:
            return None
        deferred = nn.Parameter(p.detach().to("meta"), p.requires_grad)
        deferred.__class__ = type(p)
        origin = Origin(weakref.ref(module), source, recorder.record(deferred))
        if getattr(module, name, None) is not None:
            origin.writes.add("It replaced a parameter.")
        # Programs set attributes on parameters, for example to exclude them from weight decay.
        vars(deferred).update(vars(p), **{_ORIGIN: origin})
        return deferred

    hook = register_module_parameter_registration_hook(defer)
    try:
        with recorder:
            yield
    finally:
        hook.remove()


class _Recorder(TorchDispatchMode):
    """Records in-place operations on parameters, with their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: dict[int, set[str]] = {}

    def record(self, parameter: Tensor) -> set[str]:
        """Start recording writes to a parameter and aliases, such as ``p.data``."""
        writes = self._writes[parameter.untyped_storage()._cdata] = set()
        return writes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and func._schema.is_mutable else None
        writes = None
        if isinstance(target, Tensor) and target.is_meta:
            writes = self._writes.get(target.untyped_storage()._cdata)
        if writes is not None:
            # Compare tensors by shape only, because reset_parameters may copy random values.
            shown = map_tensors(operator.attrgetter("shape"), args[1:])
            writes.add(f"{func} {shown} {kwargs}")
        return func(*args, **kwargs)


def weights_of(module: nn.Module) -> Source | None:
    """Return the source of a deferred module's weights, or None."""
    for parameter in module.parameters():
        origin: Origin | None = getattr(parameter, _ORIGIN, None)
        if origin is not None and origin.source is not None:
            return origin.source
    return None


def check_deferred(module: nn.Module) -> None:
    """Raise BackendError if a tensor would get no values, or lose them."""
    recorder, deferred = _Recorder(), []
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if not tensor.is_meta:
            continue
        if not hasattr(tensor, _ORIGIN):
            raise BackendError(
                f"{name} on the meta device would get no values. "
                "Build the model inside accel.deferred_init()."
            )
        deferred.append((name, getattr(tensor, _ORIGIN), recorder.record(tensor)))
    if not deferred or weights_of(module) is not None:
        return
    with torch.no_grad(), recorder:
        for _, reset in resetting(module):
            reset()
    for name, origin, writes in deferred:
        if not writes:
            raise BackendError(
                f"No reset_parameters() gives values to {name}. Define one, or "
                "build the model outside of accel.deferred_init()."
            )
        # nanoGPT calls self.apply(init_weights) in its constructor.
        if not origin.writes <= writes:
            raise BackendError(
                f"Values of {name} that were set inside accel.deferred_init() would be lost. "
                "Set them in reset_parameters(), or use accel.deferred_init(weights=directory)."
            )


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, undo: ExitStack) -> None:
    """Allocate deferred parameters, and reset them unless weights will be read."""
    deferred = [p for p in module.parameters() if p.is_meta]
    ids = set(map(id, deferred))
    source, resets = weights_of(module), list(resetting(module))
    for p in deferred:
        # Most systems assign memory on the first write, so don't fill it if weights will be read.
        allocate = without_values if source is None else torch.empty_like
        real = nn.Parameter(allocate(p, device=device), p.requires_grad)
        swap(p, real)
        undo.callback(swap, p, real)
    for child, reset in resets if source is None else ():
        if not ids.isdisjoint(map(id, child.parameters())):
            reset()


def resetting(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], None]]]:
    """Yield submodules and a function to reset each, children first."""
    modules: list[nn.Module] = []
    module.apply(modules.append)
    for child in dict.fromkeys(modules):
        reset = getattr(child, "_reset_parameters", None)
        reset = getattr(child, "reset_parameters", reset)
        if not callable(reset) or next(child.parameters(), None) is None:
            continue
        # Tied parameters keep the values of the submodule that created them.
        tied = []
        for name, parameter in child.named_parameters(recurse=False):
            origin: Origin | None = getattr(parameter, _ORIGIN, None)
            creator = child if origin is None else origin.module()
            if creator is not child and creator in modules:
                tied.append(name)
        yield child, partial(_reset, child, reset, tied)


def _reset(child: nn.Module, reset: Callable[[], Any], tied: list[str]) -> None:
    parameters = list(map(child.get_parameter, tied))
    values = list(map(torch.clone, parameters))
    reset()
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def without_values(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor for values that are lost, filled with NaN (or 0)."""
    has_nan = like.is_floating_point() or like.is_complex()
    value = torch.nan if has_nan else 0
    return torch.full(like.shape, value, dtype=like.dtype, device=device)


def swap(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Exchange the contents of two parameters, but not their identities."""
    other.__class__ = type(parameter)
    attributes = dict(vars(parameter))
    attributes.pop(_ORIGIN, None)
    vars(other).update(attributes | vars(other))
    torch.utils.swap_tensors(parameter, other)
