"""Moves a module or an optimizer's state to a device and dtype, in place: parameters keep their identity."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .trees import map_tensors

#: Tensors that were converted to another dtype, with the one that they had.
Dtypes = list[tuple[torch.Tensor, torch.dtype]]


def convert_module(
    module: nn.Module, device: torch.device, dtype: torch.dtype | None, undo: contextlib.ExitStack
) -> Dtypes:
    """Move parameters, their gradients and buffers; ``dtype`` is for floating ones. ``undo`` puts the old values back."""
    changed: Dtypes = []
    for tensor in chain(module.parameters(), module.buffers()):
        if dtype is not None and tensor.is_floating_point() and tensor.dtype is not dtype:
            changed.append((tensor, tensor.dtype))
        _convert_with_gradient(tensor, device, dtype, undo)
    return changed


def restore_dtypes(changed: Dtypes, optimizers: Iterable[Optimizer]) -> None:
    """Give converted tensors, and the optimizer state that belongs to them, the dtype that they had."""
    for_good = contextlib.ExitStack()
    for tensor, dtype in changed:
        _convert_with_gradient(tensor, tensor.device, dtype, for_good)
    if changed:
        for optimizer in optimizers:
            convert_optimizer(optimizer, for_good)
    for_good.pop_all()
    changed.clear()


def _convert_with_gradient(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None, undo: contextlib.ExitStack
) -> None:
    # A gradient of another dtype than its tensor's cannot be held, not even on the way back.
    grad, tensor.grad = tensor.grad, None
    undo.callback(setattr, tensor, "grad", grad)
    _convert(tensor, device, dtype, undo)
    undo.callback(setattr, tensor, "grad", None)
    if grad is not None:
        tensor.grad = grad.to(device=device, dtype=dtype if grad.is_floating_point() else None)


def _convert(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None, undo: contextlib.ExitStack) -> None:
    dtype = dtype if tensor.is_floating_point() else None
    before = tensor.data
    # What has no memory yet gets it from the engine.
    after = before.to(device=None if before.is_meta else device, dtype=dtype)
    if after is not before:
        _put(tensor, after)
        undo.callback(_put, tensor, before)


def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give ``tensor`` another value, dtype and device; it stays the same object."""
    if torch._has_compatible_shallow_copy_type(tensor, value):
        tensor.data = value
    else:  # an XLA tensor and one in memory, say: whole tensors change places
        twin = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.detach()
        torch.utils.swap_tensors(tensor, twin)


def convert_optimizer(optimizer: Optimizer, undo: contextlib.ExitStack) -> None:
    """Bring the optimizer's state to where its parameters are, by the rule of ``Optimizer.load_state_dict``."""
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in list(state.items()):
                if key == "step" and not on_device:
                    continue

                def move(tensor: torch.Tensor, key: str = key, to: torch.Tensor = parameter) -> torch.Tensor:
                    floating = tensor.is_floating_point() and key != "step"
                    return tensor.to(device=to.device, dtype=to.dtype if floating else tensor.dtype)

                undo.callback(state.__setitem__, key, value)
                state[key] = map_tensors(move, value, others=True)


#: (parent, name, the module that was there before)
Replaced = list[tuple[nn.Module, str, nn.Module]]


def convert_batchnorms(module: nn.Module, group: dist.ProcessGroup | None) -> Replaced:
    """Put a ``SyncBatchNorm`` of the same parameters and buffers in each BatchNorm's place."""
    replaced: Replaced = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
                replaced.append((parent, name, child))
                parent._modules[name] = nn.SyncBatchNorm.convert_sync_batchnorm(child, group)
    return replaced


def restore_batchnorms(replaced: Replaced) -> None:
    """Put the user's own modules back, with the buffers and mode of their stand-ins."""
    for parent, name, child in replaced:
        stand_in = parent._modules[name]
        assert stand_in is not None
        child.train(stand_in.training)
        child._buffers.update(stand_in._buffers)
        parent._modules[name] = child
    replaced.clear()
