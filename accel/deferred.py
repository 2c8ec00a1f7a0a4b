"""Modules that are built without memory, and get their values when they are set up."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import BackendError, CheckpointError, described, is_url, refuse_url

#: On a parameter that waits for its first values: the module that it was made for, and the directory that they come from.
_MARK: Final = "_accel_deferred"
#: On one that has memory and no values: the setup that was to give it some has failed.
_LOST: Final = "_accel_without_values"
#: On one that waits: code other than its first values' wrote to it, which nothing would bring back.
_WRITTEN: Final = "_accel_written"
_RESETS: Final = ("reset_parameters", "_reset_parameters")


class Source(NamedTuple):
    """A directory of weights, the model's name there, and whether it has to have just what the model has."""

    weights: str
    name: str | None
    strict: bool


@contextlib.contextmanager
def deferred_init(
    weights: str | os.PathLike[str] | None = None, *, name: str | None = None, strict: bool = True
) -> Iterator[None]:
    """Context: parameters of modules built inside lie on the meta device, without memory or values; buffers are real.

    ``accel.setup`` gives them values by each module's ``reset_parameters()`` (or ``_reset_parameters()``), the same on
    all ranks; a backend that shards makes one such module whole at a time. It refuses, by name, a parameter
    that no such method covers, and one that anything else in the context wrote to, whose values would be lost.

    Args:
        weights: read the values from there instead: a checkpoint with one model, or a directory with
            ``model.safetensors`` or its index (also as diffusers names them). Each rank reads what it needs, and no method
            is called. All parameters and persistent buffers of the model that is set up must be there; they are
            converted to its dtypes. Buffers that are not persistent stay as they were built.
        name: which model, where that checkpoint has several, as ``accel.export`` names them.
        strict: False leaves out what ``weights`` has beside, and buffers that it lacks stay as they were built, with a warning
            that lists both. Each parameter must be there all the same.
    """
    source = None
    if type(strict) is not bool:
        raise CheckpointError(f"strict={strict!r}: expected True or False")
    if weights is not None:
        if not isinstance(weights, str | os.PathLike):
            raise CheckpointError(f"deferred_init(weights=...): expected a path, found {described(weights)}")
        source = os.fspath(weights)
        if not is_url(source):
            source = os.path.abspath(os.path.expanduser(refuse_url(source, CheckpointError)))
    elif name is not None:
        raise CheckpointError(f"deferred_init(name={name!r}): of which checkpoint? Give weights=... too")
    elif not strict:
        raise CheckpointError("deferred_init(strict=False): with which weights? Give weights=... too")
    where = None if source is None else Source(source, name, strict)
    writes = _Writes()
    hook = register_module_parameter_registration_hook(functools.partial(_without_memory, where, writes))
    try:
        with writes if source is None else contextlib.nullcontext():
            yield
    finally:
        hook.remove()


class _Writes(TorchDispatchMode):
    """Mode: marks the parameters without memory that are written to outside of their ``reset_parameters``, by any alias."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, nn.Parameter] = {}  # by their storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and func._schema.is_mutable else None
        if isinstance(first, torch.Tensor) and first.is_meta and not _resetting():
            setattr(self.made.get(first.untyped_storage()._cdata, first), _WRITTEN, True)
        return func(*args, **(kwargs or {}))


def _resetting() -> bool:
    """Whether first values are being given now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in _RESETS:
        frame = frame.f_back
    return frame is not None


def _without_memory(
    source: Source | None, writes: _Writes, module: nn.Module, name: str, parameter: nn.Parameter | None
) -> Any:
    if parameter is None or parameter.is_meta:
        return None
    meta = parameter.detach().to("meta")
    made = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    made.__class__ = type(parameter)
    made.__dict__.update(parameter.__dict__)
    setattr(made, _MARK, (weakref.ref(module), source))
    writes.made[made.untyped_storage()._cdata] = made
    if module._parameters.get(name) is not None and not _resetting():  # other values in the place of the first ones
        setattr(made, _WRITTEN, True)
    return made


def weights_of(module: nn.Module) -> Source | None:
    """Where the values of a deferred module come from; BackendError where there are several."""
    sources = {getattr(p, _MARK, (None, None))[1]: name for name, p in module.named_parameters() if p.is_meta}
    if len(sources) > 1:
        places = "; ".join(
            f"{name} from {', '.join(map(str, source)) if source else 'reset_parameters()'}"
            for source, name in sources.items()
        )
        raise BackendError(
            f"the parameters of this {type(module).__name__} would come from several places ({places}): build all of it in one "
            "accel.deferred_init()"
        )
    return next(iter(sources), None)


def resetting(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    """The submodules that can give themselves values, children first as in a constructor, with the method that does."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from resetting(child, seen)
    reset = next((method for name in _RESETS if (method := getattr(module, name, None))), None)
    if callable(reset) and any(True for _ in module.parameters()):
        yield module, reset


def borrowing(module: nn.Module) -> dict[int, set[str]]:
    """By submodule, the names of its parameters that were made for another one and tied: that one's first values count."""
    inside = set(module.modules())

    def borrowed(child: nn.Module) -> Iterator[str]:
        for name, parameter in child._parameters.items():
            maker = getattr(parameter, _MARK, (lambda: None, None))[0]()
            if maker is not child and maker in inside:
                yield name

    return {id(child): set(borrowed(child)) for child in inside}


def check_deferred(module: nn.Module) -> None:
    """Refuse (BackendError) parameters and buffers that would never get values."""
    if lost := [n for n, p in module.named_parameters() if hasattr(p, _LOST)]:
        raise BackendError(
            f"the setup that was to give values to {', '.join(lost[:5])} has failed, and they have none: build it again in "
            "accel.deferred_init()"
        )
    lost = [n for n, p in module.named_parameters() if p.is_meta and not hasattr(p, _MARK)]
    lost += [n for n, b in module.named_buffers() if b.is_meta]
    if lost:
        raise BackendError(
            f"parameters and buffers on the meta device have no values: {', '.join(lost[:5])}; materialise the module first, or "
            "build it inside accel.deferred_init()"
        )
    if not any(p.is_meta for p in module.parameters()) or weights_of(module) is not None:
        return
    if lost := [n for n, p in module.named_parameters() if p.is_meta and hasattr(p, _WRITTEN)]:
        raise BackendError(
            f"The values of {', '.join(lost[:3])} were set inside accel.deferred_init(), which allocates none. To load "
            "pretrained weights, build the model from its config inside accel.deferred_init(weights=directory)."
        )
    covered = {id(p) for child, _ in resetting(module) for p in child.parameters()}
    bare = [name for name, p in module.named_parameters() if p.is_meta and id(p) not in covered]
    if bare:
        raise BackendError(
            f"parameters on the meta device whose module has no reset_parameters(): {', '.join(bare[:5])}; add the method, "
            "which gives them their first values, or build the model outside accel.deferred_init()"
        )


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, undo: contextlib.ExitStack) -> None:
    """Give every parameter on the meta device memory on ``device`` and its first values; ``undo`` takes them away again.

    Values that come from a directory come later; on most systems, memory of the host that nobody writes to takes nothing.
    """
    if not (replaced := [p for p in module.parameters() if p.is_meta]):
        return
    weights, borrowed = weights_of(module), borrowing(module)
    recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    undo.callback(_refer, recurrent)
    _forget(recurrent)
    for parameter in replaced:
        made = without_values(parameter, device) if weights is None else torch.empty_like(parameter, device=device)
        real = nn.Parameter(made, requires_grad=parameter.requires_grad)
        swap(parameter, real)
        undo.callback(_take_away, parameter, real)
    _refer(recurrent)
    undo.callback(_forget, recurrent)
    if weights is not None:
        return
    waiting = {id(p) for p in replaced}
    for child, reset in resetting(module):
        if any(id(p) in waiting for p in child.parameters()):
            reset_own(child, reset, borrowed[id(child)])
    refuse_without_values((name, p) for name, p in module.named_parameters() if id(p) in waiting)


def _forget(recurrent: Sequence[nn.RNNBase]) -> None:
    """Torch exchanges no tensors that weak references lead to, as those that an RNN has to its weights."""
    for child in recurrent:
        child._flat_weight_refs = []


def _refer(recurrent: Sequence[nn.RNNBase]) -> None:
    for child in recurrent:
        child._init_flat_weights()


def _take_away(parameter: nn.Parameter, real: nn.Parameter) -> None:
    with contextlib.suppress(RuntimeError):  # a library may still refer to it; `without_setup` tells
        swap(parameter, real)


def without_setup(module: nn.Module) -> Callable[[], None]:
    """What is to be called last where the setup fails: a parameter that waited for values, and has memory now, has none."""
    waiting = {name for name, p in module.named_parameters() if p.is_meta}

    def lose() -> None:
        for name, parameter in module.named_parameters():
            if name in waiting and not parameter.is_meta:
                setattr(parameter, _LOST, True)

    return lose


def reset_own(child: nn.Module, reset: Callable[[], Any], borrowed: set[str]) -> None:
    """Call ``reset``, and let borrowed parameters keep their values."""
    kept = [(child._parameters[name], child.get_parameter(name).clone()) for name in borrowed]
    reset()
    for parameter, value in kept:
        assert parameter is not None
        parameter.copy_(value)


def without_values(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory on ``device`` that shows whether it was given values: it is nan where it can be."""
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    return made.fill_(float("nan")) if made.is_floating_point() or made.is_complex() else made.zero_()


def refuse_without_values(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse (BackendError) parameters that ``reset_parameters`` left as they were."""
    bare = [name for name, p in named if p.numel() and bool(p.isnan().all())]
    if bare:
        raise BackendError(
            f"reset_parameters() gave no values to {', '.join(bare[:5])}, which accel.deferred_init() built without: "
            "initialise them there"
        )


def swap(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Exchange what two parameter objects hold; each keeps its identity, which optimizers know it by."""
    other.__class__ = type(parameter)
    for name, value in parameter.__dict__.items():
        if name != _MARK:
            other.__dict__.setdefault(name, value)
    torch.utils.swap_tensors(parameter, other)
