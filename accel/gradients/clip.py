"""Clipping by a norm over all ranks, in ``accel.clip_grad_norm_`` and in torch's own functions.

A decorator of torch's functions keeps each of them in a closure cell. accel replaces the function in
the cell while an engine needs it, so it doesn't matter how a program imported the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, final

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad

from ..errors import BackendError
from ..precision import here, norms
from ..process import Process
from ..process.control import Waiting
from .patches import Patch, around


class Gradients(Protocol):
    """The gradients of an engine."""

    process: Process

    @property
    def spread(self) -> bool: ...
    @property
    def in_parts(self) -> bool: ...
    def finalize(self, what: str, parameters: Sequence[torch.Tensor]) -> None: ...
    def parts(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...
    def norm_for_user(self, norm: torch.Tensor) -> torch.Tensor: ...


#: Engines' gradients, with the parameters of each.
Owners: TypeAlias = list[tuple[Gradients, list[torch.Tensor]]]


class Registry(Protocol):
    """The live engines."""

    def owners(self, parameters: Sequence[torch.Tensor]) -> tuple[Owners, list[torch.Tensor]]: ...
    def parameters_of(
        self, gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...


# -- a norm over the ranks ----------------------------------------------------------------------------------------------


@torch.no_grad()
def norm_over_ranks(
    parameters: Iterable[torch.Tensor],
    counted: Sequence[torch.Tensor],
    norm_type: float,
    process: Process,
) -> torch.Tensor:
    """Return the norm of all ranks' gradients together, a 0-dim tensor. Collective.

    Args:
        parameters: they tell the dtype of the norm, because a rank may count no gradient.
        counted: the gradients that this rank counts. Only one rank counts a replicated gradient.
        norm_type: the order of the norm.

    Raises:
        BackendError: the order is not above 0, so norms do not add up over the ranks.
    """
    order = float(norm_type)
    if not order > 0:
        raise BackendError(f"norm_type={norm_type!r} does not add up over ranks. Use one above 0.")
    double = any(parameter.dtype is torch.float64 for parameter in parameters)
    dtype = torch.float64 if double else torch.float32
    total = _power(counted, order, process.device)
    if not math.isinf(order):
        dist.all_reduce(total, group=process.group)
        return total.pow(1.0 / order).to(dtype)
    nan = total.isnan()  # a maximum over the ranks may lose it
    largest = torch.stack([total.masked_fill(nan, 0.0), nan.to(total.dtype)])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=process.group)
    return largest[0].masked_fill(largest[1] > 0, float("nan")).to(dtype)


def _power(gradients: Iterable[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the sum of powers, or the maximum; float64 hides the order of adding."""
    none = torch.zeros(1, dtype=torch.float64, device=device)
    by_dtype = [norm.to(device, torch.float64) for norm in norms(gradients, order)]
    stacked = torch.cat([none, *by_dtype])
    return stacked.max() if math.isinf(order) else stacked.pow(order).sum()


@torch.no_grad()
def scale_(gradients: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Multiply gradients so that a ``norm`` above ``max_norm`` becomes ``max_norm``, as torch does."""
    factor = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, on_device in by_device.items():
        torch._foreach_mul_(on_device, factor.to(device))


# -- clipping sharded gradients -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The final gradients of some parameters of one engine that are on this rank."""

    gradients: Gradients
    parameters: Sequence[torch.Tensor]
    #: The gradients that this rank counts in a norm, and those that a different rank counts.
    counted: list[torch.Tensor]
    copies: list[torch.Tensor]


def part_of(gradients: Gradients, parameters: Sequence[torch.Tensor]) -> Part:
    """Return this rank's part of the final gradients of ``parameters``. Local."""
    return Part(gradients, parameters, *gradients.parts(parameters))


def clip_parts_(
    parts: Sequence[Part],
    rest: Sequence[Any],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Clip sharded gradients, and the full gradients of ``rest``, by one norm. Collective.

    Returns the norm before. Raises as ``_total_norm``.
    """
    norm = _total_norm(parts, rest, norm_type, error_if_nonfinite)
    scale_(_on_this_rank(parts, rest), max_norm, norm)
    return norm


def _total_norm(
    parts: Sequence[Part], rest: Sequence[Any], norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Return the norm of sharded and full gradients together. Collective.

    Raises:
        RuntimeError: the norm is inf or nan, and ``error_if_nonfinite`` is True.
    """
    by_part = []
    for part in parts:
        process = part.gradients.process
        with Waiting(process, "clipping of gradients"):
            by_part.append(norm_over_ranks(part.parameters, part.counted, norm_type, process))
    norm = by_part[0]
    if len(by_part) > 1 or rest:
        full = [here(p.grad) for p in rest if p.grad is not None]
        by_gradient = [n.to(norm) for by_dtype in norms(full, float(norm_type)) for n in by_dtype]
        norm = torch.linalg.vector_norm(torch.stack([*by_part, *by_gradient]), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is {norm.item()}, so they can't be clipped."
        )
    return norm


def _on_this_rank(parts: Sequence[Part], rest: Sequence[Any]) -> list[torch.Tensor]:
    gradients = [here(p.grad) for p in rest if p.grad is not None]
    for part in parts:
        gradients += part.counted + part.copies
    return gradients


def _for_user(parts: Sequence[Part], rest: Sequence[Any], norm: torch.Tensor) -> torch.Tensor:
    """Return the norm in the form in which torch returns that of such parameters."""
    return norm if len(parts) > 1 or rest else parts[0].gradients.norm_for_user(norm)


# -- torch's functions --------------------------------------------------------------------------------------------------


def clip_patches(registry: Registry) -> tuple[Patch, ...]:
    """Return the patches with which torch's functions clip the parameters of engines."""
    clip = _Clip(registry)
    replacements: dict[str, Callable[..., Any]] = {
        "clip_grad_norm_": clip.by_norm,
        "clip_grad_value_": clip.by_value,
        "_get_total_norm": clip.total_norm,
    }
    return tuple(
        around(_Cells(getattr(clip_grad, name)), "func", act) for name, act in replacements.items()
    )


@final
class _Cells:
    """The variables in the closure of a function, as a table."""

    def __init__(self, function: Any) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))

    def get(self, name: str, default: Any) -> Any:
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value


@final
class _Clip:
    """The functions in the place of torch's. They make gradients final first, so all are collective."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        #: True while torch's own clip_grad_norm_ runs, which asks for a total norm.
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
        if parts:
            norm = clip_parts_(parts, rest, max_norm, norm_type, error_if_nonfinite)
            return _for_user(parts, rest, norm)
        self._inside = True
        try:
            return original(rest, max_norm, norm_type, error_if_nonfinite, foreach)
        finally:
            self._inside = False

    def by_value(
        self, original: Callable[..., None], parameters: Any, *args: Any, **kwargs: Any
    ) -> None:
        parts, rest = self._finalize("torch.nn.utils.clip_grad_value_", _as_list(parameters))
        gradients = _on_this_rank(parts, ()) + [p.grad for p in rest if p.grad is not None]
        if gradients:  # torch can't clip an empty list, which may be all that this rank has
            original([SimpleNamespace(grad=gradient) for gradient in gradients], *args, **kwargs)

    def total_norm(
        self,
        original: Callable[..., torch.Tensor],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        gradients = _as_list(tensors)
        parameters, others = (
            ([], gradients) if self._inside else self._registry.parameters_of(gradients)
        )
        if self._inside or (others and not parameters):
            return original(gradients, norm_type, error_if_nonfinite, foreach)
        parts, rest = self._finalize("torch.nn.utils.get_total_norm", parameters)
        if any(part.gradients.spread for part in parts):
            raise BackendError(
                "torch.nn.utils.get_total_norm sees the gradients of this rank only. Call "
                'accel.clip_grad_norm_(model, float("inf")) for the norm over all ranks.'
            )
        others += [p.grad for p in rest if p.grad is not None]
        if not parts:
            return original(others, norm_type, error_if_nonfinite, foreach)
        holders = [SimpleNamespace(grad=gradient) for gradient in others]
        return _for_user(parts, holders, _total_norm(parts, holders, norm_type, error_if_nonfinite))

    def _finalize(
        self, what: str, parameters: list[torch.Tensor]
    ) -> tuple[list[Part], list[torch.Tensor]]:
        """Make the gradients of ``parameters`` final.

        Returns those that are sharded, and the parameters with full gradients.
        """
        parts = []
        owners, rest = self._registry.owners(parameters)
        for gradients, own in owners:
            gradients.finalize(what, own)
        for gradients, own in owners:
            if gradients.in_parts:
                parts.append(part_of(gradients, own))
            else:
                rest += own
        return parts, rest


def _as_list(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
