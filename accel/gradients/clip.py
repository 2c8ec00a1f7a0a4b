"""Clip gradients across all ranks, in torch's own functions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from ..errors import BackendError
from ..process import Process
from ..process.control import Waiting
from .patches import Attributes, Patch, around

Tensors: TypeAlias = Sequence[Tensor]
#: ``Gradients`` of engines, with some parameters of each.
Owners: TypeAlias = list[tuple[Any, Tensors]]

_DTYPE: Final = operator.attrgetter("dtype")
_DEVICE: Final = operator.attrgetter("device")


# -- sharded gradients -----------------------------------------------------------------------------


@torch.no_grad()
def clip_sharded_(
    owners: Owners, full: Tensors, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Clip final sharded gradients and ``full`` gradients. Collective.

    Returns the norm before clipping.
    """
    order = float(norm_type)
    if not order > 0:
        raise BackendError(f"norm_type={norm_type!r} can't clip gradient shards. Use one above 0.")
    local, norms = _by_device(full), list[Tensor]()
    for gradients, parameters in owners:
        counted, copies = map(_by_device, gradients.parts(parameters))
        local += counted + copies
        norms.append(_norm_over_ranks(gradients.process, parameters, counted, order))
    if full:
        norms.append(nn.utils.get_total_norm(full, order).to(norms[0]))
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The norm of order {order} is {norm.item()}, so gradients can't be clipped."
        )
    # Multiply even if it is 1, as torch does, because a comparison would wait for the device.
    factor = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    for tensors in local:
        torch._foreach_mul_(tensors, factor.to(tensors[0].device))
    return norm


def _norm_over_ranks(
    process: Process, parameters: Tensors, counted: list[list[Tensor]], order: float
) -> Tensor:
    """Return the norm of the counted gradients on all ranks. Collective.

    Only one rank counts a replicated gradient.
    """
    norms = [torch.zeros(1, dtype=torch.float64, device=process.device)]
    # A rank that counts no gradients takes the dtypes from its parameters.
    dtypes = set() if counted else set(map(_DTYPE, parameters))
    for tensors in counted:
        norms_of_tensors = torch.stack(torch._foreach_norm(tensors, order))
        dtypes.add(norms_of_tensors.dtype)
        norms.append(norms_of_tensors.to(process.device, torch.float64))
    local = torch.linalg.vector_norm(torch.cat(norms), order)
    # All-gather, because an all-reduce with MAX may lose a nan in gloo.
    by_rank = local.new_empty(process.place.world_size)
    with Waiting(process, "clipping of gradients"):
        dist.all_gather(list(by_rank.unbind()), local, group=process.group)
    norm: Tensor = torch.linalg.vector_norm(by_rank, order)
    return norm if torch.float64 in dtypes else norm.float()


def _by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return a list of nonempty tensors for each device."""
    # The norm of order inf raises for an empty tensor.
    nonempty = list(filter(Tensor.numel, tensors))
    devices = dict.fromkeys(map(_DEVICE, nonempty))
    # The usual case. The filter below would be slow for a model with many tensors.
    if len(devices) == 1:
        return [nonempty]
    return [[tensor for tensor in nonempty if tensor.device == device] for device in devices]


# -- torch's functions -----------------------------------------------------------------------------


def clip_patches(registry: Any) -> tuple[Patch, ...]:
    """Return patches of torch's functions to clip engines' parameters."""
    replacements: dict[Any, Callable[..., Any]] = {
        clip_grad.clip_grad_norm_: _clip_by_norm,
        clip_grad.clip_grad_value_: _clip_by_value,
    }
    patches = []
    for function, replacement in replacements.items():
        # Patch the cell of torch's decorator, because programs import the function under any name.
        (cell,) = function.__closure__
        act = functools.partial(replacement, registry)
        patches.append(around(Attributes(cell), "cell_contents", act))
    return tuple(patches)


def _clip_by_norm(
    registry: Any,
    original: Callable[..., Tensor],
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    owners, rest = _finalize(registry, "torch.nn.utils.clip_grad_norm_", _as_list(parameters))
    if not owners:
        return original(rest, max_norm, norm_type, error_if_nonfinite, foreach)
    return clip_sharded_(owners, _gradients(rest), max_norm, norm_type, error_if_nonfinite)


def _clip_by_value(
    registry: Any, original: Callable[..., None], parameters: Any, *args: Any, **kwargs: Any
) -> None:
    owners, rest = _finalize(registry, "torch.nn.utils.clip_grad_value_", _as_list(parameters))
    local = _gradients(rest)
    for gradients, own in owners:
        counted, copies = gradients.parts(own)
        local += counted + copies
    # A stage of a pipeline may have no gradients, and torch can't clip an empty list.
    if local:
        original([SimpleNamespace(grad=gradient) for gradient in local], *args, **kwargs)


def _finalize(registry: Any, what: str, given: list[Any]) -> tuple[Owners, list[Tensor]]:
    """Make gradients final. Return owners of shards, and full parameters."""
    owners, full, rest = Owners(), list[Tensor](), given
    for engine in registry.in_order():
        gradients = engine.gradients
        if not given and gradients.hidden():
            # The program passed only parameters with a p.grad, but in this backend none has one.
            raise BackendError(
                f"Backend {engine.name!r} keeps the gradients of {engine.label} outside of p.grad. "
                "Use accel.clip_grad_norm_(model, max_norm)."
            )
        own, others = list[Tensor](), list[Tensor]()
        for parameter in rest:
            (own if id(parameter) in engine.known else others).append(parameter)
        # A pipeline stage without gradients must still join the collective norm of all stages.
        if engine.distributed and (own or (gradients.spread and not given)):
            rest = others
            gradients.finalize(what, own)
            if gradients.in_parts:
                owners.append((gradients, own))
            else:
                full += own
    return owners, full + rest


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _as_list(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
