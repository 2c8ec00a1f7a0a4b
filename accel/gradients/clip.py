"""Clipping with a norm over all ranks, by ``accel.clip_grad_norm_`` and by torch's own functions.

A decorator of torch's functions keeps each of them in a closure cell. accel replaces the function there while an engine
needs it, so it doesn't matter how a program imported it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, final

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad

from ..errors import BackendError
from ..precision import here, norms
from ..process import Process
from ..process.control import Waiting
from .patches import Patch, around

_DTYPE: Final = operator.attrgetter("dtype")
#: Elements for which a call takes as long as its work on them.
_FEW: Final = 1 << 16


# -- a norm over the ranks ----------------------------------------------------------------------------------------------


@torch.no_grad()
def norm_over_ranks(
    parameters: Iterable[torch.Tensor], counted: Sequence[torch.Tensor], norm_type: float, process: Process
) -> torch.Tensor:
    """Return the norm of all ranks' gradients together, a 0-dim tensor on the process's device. Collective.

    Args:
        parameters: the parameters that are clipped, which tell the dtype of the norm: a rank may count no gradient.
        counted: the gradients that this rank counts. A gradient that several ranks have is counted by one of them.
        norm_type: the order of the norm.

    Raises:
        BackendError: the order is not above 0, so the norm does not add up over the ranks.
    """
    order = float(norm_type)
    if not order > 0:
        raise BackendError(
            f"norm_type={norm_type!r}: a norm of this order does not add up over the ranks; use one above 0"
        )
    dtype = torch.float64 if torch.float64 in map(_DTYPE, parameters) else torch.float32
    total = _power(_merged(counted), order, process.device)
    if not math.isinf(order):
        dist.all_reduce(total, group=process.group)
        return total.pow(1.0 / order).to(dtype)
    nan = total.isnan()  # a maximum over the ranks may lose it
    largest = torch.stack([total.masked_fill(nan, 0.0), nan.to(total.dtype)])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=process.group)
    return largest[0].masked_fill(largest[1] > 0, float("nan")).to(dtype)


def _power(gradients: Iterable[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the sum of powers, or the maximum; in float64, so that the order of adding does not show."""
    none = torch.zeros(1, dtype=torch.float64, device=device)
    stacked = torch.cat([none, *(n.to(device, torch.float64) for n in norms(gradients, order))])
    return stacked.max() if math.isinf(order) else stacked.pow(order).sum()


def _merged(gradients: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the same elements in fewer tensors: small neighbours in memory, as a reduction leaves them, become one."""
    found = list(gradients)
    if {*map(type, found)} != {torch.Tensor} or len({*map(_DTYPE, found)}) > 1:
        return found
    if not all(map(torch.Tensor.is_contiguous, found)):
        return found
    merged: list[torch.Tensor] = []
    number, length, end, width = 0, 0, -1, found[0].itemsize
    sizes, places = map(torch.Tensor.numel, found), map(torch.Tensor.data_ptr, found)
    for i, (size, place) in enumerate(zip(sizes, places, strict=True)):
        if place != end or length + size > _FEW:
            merged += _as_one(found[number:i], length)
            number, length = i, 0
        length, end = length + size, place + size * width
    return merged + _as_one(found[number:], length)


def _as_one(run: list[torch.Tensor], length: int) -> list[torch.Tensor]:
    """Return neighbours as one view, or as they are if they lie in several pieces of memory."""
    if len(run) < 2 or (run[0].storage_offset() + length) * run[0].itemsize > run[0].untyped_storage().nbytes():
        return run
    return [run[0].as_strided((length,), (1,))]


@torch.no_grad()
def scale_(gradients: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Multiply gradients so that a ``norm`` above ``max_norm`` becomes ``max_norm``, as torch does. No device is waited for."""
    factor = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in _merged(gradients):
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, gradients_there in by_device.items():
        torch._foreach_mul_(gradients_there, factor.to(device))


# -- clipping gradients in parts -----------------------------------------------------------------------------------------


class ClippedGradients(Protocol):
    """The gradients of one engine, as clipping uses them."""

    process: Process

    @property
    def in_parts(self) -> bool: ...
    @property
    def spread(self) -> bool: ...
    def finalize(self, what: str, parameters: Sequence[torch.Tensor]) -> None: ...
    def parts(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...
    def norm_for_user(self, norm: torch.Tensor) -> torch.Tensor: ...


#: Engines' gradients, with the parameters of each.
Owners: TypeAlias = list[tuple[ClippedGradients, list[torch.Tensor]]]


class Part(NamedTuple):
    """The final gradients of some parameters of one engine that are on this rank."""

    gradients: ClippedGradients
    parameters: Sequence[torch.Tensor]
    #: The gradients that this rank counts in a norm, and those that a different rank counts.
    counted: list[torch.Tensor]
    copies: list[torch.Tensor]


def part_of(gradients: ClippedGradients, parameters: Sequence[torch.Tensor]) -> Part:
    """Return what this rank has of the gradients of these parameters. They are final. Local."""
    return Part(gradients, parameters, *gradients.parts(parameters))


def clip_parts_(
    parts: Sequence[Part], rest: Sequence[Any], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Clip gradients in parts, and the full gradients of ``rest``, by one norm. Return the norm before. Collective.

    Raises:
        RuntimeError: the norm is inf or nan, and ``error_if_nonfinite`` is True.
    """
    norm = _norm(parts, rest, norm_type, error_if_nonfinite)
    scale_(_on_this_rank(parts, rest), max_norm, norm)
    return norm


def _norm(parts: Sequence[Part], rest: Sequence[Any], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    """Return the norm of gradients in parts and of full ones together. Collective."""
    by_part: list[torch.Tensor] = []
    for part in parts:
        process = part.gradients.process
        with Waiting(process, "clipping of gradients"):
            by_part.append(norm_over_ranks(part.parameters, part.counted, norm_type, process))
    norm = by_part[0]
    if len(by_part) > 1 or rest:
        full = [here(p.grad) for p in rest if p.grad is not None]
        stacked = [n.to(norm) for by_dtype in norms(full, float(norm_type)) for n in by_dtype]
        norm = torch.linalg.vector_norm(torch.stack([*by_part, *stacked]), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped"
        )
    return norm


def _on_this_rank(parts: Sequence[Part], rest: Sequence[Any]) -> list[torch.Tensor]:
    gradients: list[torch.Tensor] = []
    for part in parts:
        gradients += part.counted + part.copies
    return gradients + [here(p.grad) for p in rest if p.grad is not None]


def _for_user(parts: Sequence[Part], rest: Sequence[Any], norm: torch.Tensor) -> torch.Tensor:
    """Return the norm in the form in which torch returns that of such parameters."""
    return norm if len(parts) > 1 or rest else parts[0].gradients.norm_for_user(norm)


# -- torch's functions --------------------------------------------------------------------------------------------------


class Owning(Protocol):
    """The registry, as clipping uses it."""

    def owners(self, parameters: Sequence[torch.Tensor]) -> tuple[Owners, list[torch.Tensor]]: ...
    def parameters_of(self, gradients: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...


def clip_patches(registry: Owning) -> tuple[Patch, ...]:
    """Return the patches that let torch's functions clip the parameters of the registry's engines."""
    clip = _Clip(registry)
    replacements: dict[str, Callable[..., Any]] = {
        "clip_grad_norm_": clip.by_norm,
        "clip_grad_value_": clip.by_value,
        "_get_total_norm": clip.total_norm,
        "_clip_grads_with_norm_": clip.with_norm,
    }
    return tuple(around(_Cells(getattr(clip_grad, name)), "func", act) for name, act in replacements.items())


@final
class _Cells:
    """The variables in the closure of a function, as a table."""

    def __init__(self, function: Any) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))

    def get(self, name: str, default: Any) -> Any:
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents


@final
class _Clip:
    """The functions that stand in for torch's. Each makes gradients final first, so all are collective."""

    def __init__(self, registry: Owning) -> None:
        self._registry = registry
        #: True while torch's own function runs, which calls the others.
        self._inside = False

    def by_norm(
        self,
        original: Callable[..., torch.Tensor],
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        parts, rest = self._finalize("torch.nn.utils.clip_grad_norm_", _as_list(parameters))
        if not parts:
            return self._call(original, rest, max_norm, norm_type, error_if_nonfinite, foreach)
        norm = clip_parts_(parts, rest, max_norm, norm_type, error_if_nonfinite)
        return _for_user(parts, rest, norm)

    def by_value(self, original: Callable[..., None], parameters: Any, *args: Any, **kwargs: Any) -> None:
        parts, rest = self._finalize("torch.nn.utils.clip_grad_value_", _as_list(parameters))
        gradients = _on_this_rank(parts, ()) + [p.grad for p in rest if p.grad is not None]
        if gradients:  # torch cannot clip nothing, which may be all that this rank has
            original([SimpleNamespace(grad=gradient) for gradient in gradients], *args, **kwargs)

    def total_norm(
        self,
        original: Callable[..., torch.Tensor],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        if self._inside:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        given = _as_list(tensors)
        parameters, others = self._registry.parameters_of(given)
        if others and not parameters:  # none of an engine's
            return original(given, norm_type, error_if_nonfinite, foreach)
        parts, rest = self._finalize("torch.nn.utils.get_total_norm", parameters)
        if any(part.gradients.spread for part in parts):
            raise BackendError(
                "torch.nn.utils.get_total_norm sees the gradients of this rank only: accel.clip_grad_norm_(model, "
                'float("inf")) measures those of all ranks'
            )
        others += [p.grad for p in rest if p.grad is not None]
        if not parts:
            return original(others, norm_type, error_if_nonfinite, foreach)
        holders = [SimpleNamespace(grad=gradient) for gradient in others]
        return _for_user(parts, holders, _norm(parts, holders, norm_type, error_if_nonfinite))

    def with_norm(
        self,
        original: Callable[..., None],
        parameters: Any,
        max_norm: float,
        total_norm: torch.Tensor,
        foreach: bool | None = None,
    ) -> None:
        if self._inside:
            original(parameters, max_norm, total_norm, foreach)
            return
        parts, rest = self._finalize("torch.nn.utils.clip_grads_with_norm_", _as_list(parameters))
        if parts:
            scale_(_on_this_rank(parts, rest), max_norm, here(total_norm))
        else:
            original(rest, max_norm, total_norm, foreach)

    def _call(self, original: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        self._inside = True
        try:
            return original(*args)
        finally:
            self._inside = False

    def _finalize(self, what: str, parameters: list[torch.Tensor]) -> tuple[list[Part], list[torch.Tensor]]:
        """Make the gradients of these parameters final. Return those in parts, and the parameters with full gradients."""
        owners, rest = self._registry.owners(parameters)
        for gradients, own in owners:
            gradients.finalize(what, own)
        parts = [part_of(gradients, own) for gradients, own in owners if gradients.in_parts]
        return parts, rest + [p for gradients, own in owners if not gradients.in_parts for p in own]


def _as_list(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
