"""Deferred initialization: modules are built without memory, and get their values in ``setup``."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import BackendError, CheckpointError, described, is_url, refuse_url

#: On a deferred parameter: a reference to the module that it was created for, and the source of its
#: values.
_DEFERRED: Final = "_accel_deferred"
#: True on a deferred parameter that was written to, other than by ``reset_parameters``.
_WRITTEN: Final = "_accel_written"
_RESETS: Final = ("reset_parameters", "_reset_parameters")


class Source(NamedTuple):
    """A directory of weights, the model's name there, and True if other weights are an error."""

    weights: str
    name: str | None
    strict: bool


@contextlib.contextmanager
def deferred_init(
    weights: str | os.PathLike[str] | None = None, *, name: str | None = None, strict: bool = True
) -> Iterator[None]:
    """Build modules without allocating their parameters.

    Parameters are created on the meta device, and ``accel.setup`` gives them memory and values.
    Buffers are real. The values come from each module's ``reset_parameters()`` (or
    ``_reset_parameters()``), and are the same on all ranks. Backends that shard do this one module
    at a time. ``setup`` raises if a parameter has no such method, or if other code in the context
    has written to it, because that write would be lost.

    Args:
        weights: a checkpoint with one model, or a directory with ``model.safetensors`` or its index
            (diffusers' names work too). Each rank reads only what it needs, converted to the
            model's dtypes, and no method is called. The directory must have all parameters and
            persistent buffers. Other buffers stay as they were built.
        name: the name of the model, if the checkpoint has several.
        strict: with False, ``weights`` may have other tensors, and may lack buffers. A warning
            lists both.
    """
    if type(strict) is not bool:
        raise CheckpointError(f"deferred_init(strict={strict!r}): expected True or False.")
    source = None
    if weights is not None:
        if not isinstance(weights, str | os.PathLike):
            raise CheckpointError(
                f"deferred_init(weights=...): expected a path, found {described(weights)}."
            )
        path = os.fspath(weights)
        if not is_url(path):
            path = os.path.abspath(os.path.expanduser(refuse_url(path, CheckpointError)))
        source = Source(path, name, strict)
    elif name is not None or not strict:
        option = f"name={name!r}" if name is not None else "strict=False"
        raise CheckpointError(
            f"deferred_init({option}): of which checkpoint? Pass weights=... too."
        )
    writes = _Writes()
    hook = register_module_parameter_registration_hook(functools.partial(_defer, source, writes))
    try:
        with writes if source is None else contextlib.nullcontext():
            yield
    finally:
        hook.remove()


class _Writes(TorchDispatchMode):
    """A mode that marks deferred parameters if they are written to outside ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters_by_storage: dict[int, nn.Parameter] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and func._schema.is_mutable else None
        if isinstance(target, torch.Tensor) and target.is_meta and not _is_resetting():
            storage = target.untyped_storage()._cdata
            setattr(self.parameters_by_storage.get(storage, target), _WRITTEN, True)
        return func(*args, **(kwargs or {}))


def _is_resetting() -> bool:
    """True inside of a ``reset_parameters``, which constructors of torch's modules call."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in _RESETS:
        frame = frame.f_back
    return frame is not None


def _defer(
    source: Source | None,
    writes: _Writes,
    module: nn.Module,
    name: str,
    parameter: nn.Parameter | None,
) -> Any:
    """Return a parameter on the meta device in place of one that a module is given."""
    if parameter is None or parameter.is_meta:
        return None
    deferred = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    deferred.__class__ = type(parameter)
    deferred.__dict__.update(parameter.__dict__)
    setattr(deferred, _DEFERRED, (weakref.ref(module), source))
    writes.parameters_by_storage[deferred.untyped_storage()._cdata] = deferred
    if (
        module._parameters.get(name) is not None and not _is_resetting()
    ):  # it replaces an initialized parameter
        setattr(deferred, _WRITTEN, True)
    return deferred


# -- checks before setup ---------------------------------------------------------------------------


def weights_of(module: nn.Module) -> Source | None:
    """Return the source of a deferred module's values.

    Raises:
        BackendError: its parameters have different sources.
    """
    sources = {getattr(p, _DEFERRED, (None, None))[1] for p in module.parameters() if p.is_meta}
    if len(sources) > 1:
        raise BackendError(
            f"The parameters of {type(module).__name__} would get their values from {len(sources)} "
            "different sources. Build the whole model in one accel.deferred_init()."
        )
    return next(iter(sources), None)


def check_deferred(module: nn.Module) -> None:
    """Raise BackendError if parameters or buffers would never get values."""
    meta = [(name, p) for name, p in module.named_parameters() if p.is_meta]
    plain = [name for name, p in meta if not hasattr(p, _DEFERRED)]
    plain += [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if plain:
        raise BackendError(
            f"{', '.join(plain[:3])} on the meta device has no values. Build the model inside accel.deferred_init()."
        )
    if not meta or weights_of(module) is not None:
        return
    # nanoGPT calls self.apply(init_weights) in its constructor.
    written = [name for name, p in meta if hasattr(p, _WRITTEN)]
    if written:
        raise BackendError(
            f"The values of {', '.join(written[:3])} were set inside accel.deferred_init(), which "
            "allocates none. To load pretrained weights, build the model from its config inside "
            "accel.deferred_init(weights=directory)."
        )
    covered = {id(p) for child, _ in resetting(module) for p in child.parameters()}
    uncovered = [name for name, p in meta if id(p) not in covered]
    if uncovered:
        raise BackendError(
            f"The module of {', '.join(uncovered[:3])} has no reset_parameters() to initialize it. "
            "Add the method, or build the model outside of accel.deferred_init()."
        )


# -- memory and values -----------------------------------------------------------------------------


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, undo: contextlib.ExitStack) -> None:
    """Give memory and values to deferred parameters. Values from a directory are read later."""
    deferred = [p for p in module.parameters() if p.is_meta]
    if not deferred:
        return
    source, borrowed = weights_of(module), borrowing(module)
    recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    undo.callback(_connect, recurrent)
    _disconnect(recurrent)
    for parameter in deferred:
        # Memory that nobody writes to takes no space on most systems.
        value = (
            torch.empty_like(parameter, device=device)
            if source
            else without_values(parameter, device)
        )
        real = nn.Parameter(value, requires_grad=parameter.requires_grad)
        swap(parameter, real)
        undo.callback(_take_away, parameter, real)
    _connect(recurrent)
    undo.callback(_disconnect, recurrent)
    if source is None:
        deferred_ids = set(map(id, deferred))
        for child, reset in resetting(module):
            if any(id(p) in deferred_ids for p in child.parameters()):
                reset_own(child, reset, borrowed[id(child)])
        refuse_without_values(
            (name, p) for name, p in module.named_parameters() if id(p) in deferred_ids
        )


def resetting(
    module: nn.Module, seen: set[nn.Module] | None = None
) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    """Give submodules with their ``reset_parameters``, children first as in a constructor."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from resetting(child, seen)
    methods = [getattr(module, name, None) for name in _RESETS]
    reset = next(filter(None, methods), None)
    if callable(reset) and any(True for _ in module.parameters()):
        yield module, reset


def borrowing(module: nn.Module) -> dict[int, set[str]]:
    """Return names of tied parameters that a different submodule created, by the submodule's id."""
    inside = set(module.modules())
    names: dict[int, set[str]] = {id(child): set() for child in inside}
    for child in inside:
        for name, parameter in child._parameters.items():
            owner = getattr(parameter, _DEFERRED, (lambda: None, None))[0]()
            if owner is not child and owner in inside:
                names[id(child)].add(name)
    return names


def reset_own(child: nn.Module, reset: Callable[[], Any], borrowed: set[str]) -> None:
    """Call ``reset``. Borrowed parameters keep the values that their own module gave them."""
    values = {name: child.get_parameter(name).clone() for name in borrowed}
    reset()
    for name, value in values.items():
        child.get_parameter(name).copy_(value)


def without_values(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory for a tensor, filled with NaN, so that it shows if it is never given values."""
    memory = torch.empty(like.shape, dtype=like.dtype, device=device)
    return (
        memory.fill_(float("nan"))
        if memory.is_floating_point() or memory.is_complex()
        else memory.zero_()
    )


def refuse_without_values(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise BackendError if ``reset_parameters`` did not initialize a parameter."""
    names = [name for name, p in named if p.numel() and bool(p.isnan().all())]
    if names:
        raise BackendError(
            f"reset_parameters() gave no values to {', '.join(names[:3])}. Initialize it there, "
            "because accel.deferred_init() builds it without values."
        )


def swap(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Exchange the contents of two parameters, whose identities optimizers know."""
    other.__class__ = type(parameter)
    for name, value in parameter.__dict__.items():
        if name != _DEFERRED:
            other.__dict__.setdefault(name, value)
    torch.utils.swap_tensors(parameter, other)


def _take_away(parameter: nn.Parameter, real: nn.Parameter) -> None:
    with contextlib.suppress(RuntimeError):  # a library may still refer to it
        swap(parameter, real)


def _disconnect(recurrent: Iterable[nn.RNNBase]) -> None:
    """Drop weak references of RNNs to their weights, because torch can't swap such tensors."""
    for child in recurrent:
        child._flat_weight_refs = []


def _connect(recurrent: Iterable[nn.RNNBase]) -> None:
    for child in recurrent:
        child._init_flat_weights()
