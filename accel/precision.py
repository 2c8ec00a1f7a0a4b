"""Precision of a model, the loss scale of fp16, and conversion in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import PrecisionError
from .shard import parameters_of, state_device
from .trees import map_tensors

#: The dtypes of parameters and of autocast for each precision. None leaves dtypes unchanged.
_DTYPES: Final[dict[str, tuple[torch.dtype | None, torch.dtype | None]]] = {
    "32-true": (None, None),
    "bf16-mixed": (None, torch.bfloat16),
    "16-mixed": (None, torch.float16),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
}


def dtype_of(value: object) -> torch.dtype | None:
    """Return a dtype, or the dtype with a name such as "torch.bfloat16"."""
    if isinstance(value, str):
        value = getattr(torch, value.removeprefix("torch."), None)
    return value if isinstance(value, torch.dtype) else None


@final
class Precision:
    """The dtypes of parameters and of the forward pass. Outputs are fp32."""

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in _DTYPES:
            names = ", ".join(_DTYPES)
            raise PrecisionError(f"Unknown precision {name!r}. Use one of {names}.")
        self.name, self.device = name, device
        self.plain = name == "32-true"
        self.scaled = name == "16-mixed"
        self.storage, self.compute = _DTYPES[name]

    def check(self, module: nn.Module) -> None:
        """Raise PrecisionError if mixed precision would train 16-bit weights."""
        if self.compute is None:
            return
        for name, p in module.named_parameters():
            half = p.is_floating_point() and p.dtype.itemsize < 4
            if half and p.requires_grad:
                raise PrecisionError(
                    f"precision={self.name!r} trains fp32 parameters, but {name} is "
                    f"{p.dtype}. Call model.float() first, or use 'bf16-true'."
                )

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` in this precision."""
        if self.plain:
            return fn(*args, **kwargs)
        if self.storage is None:
            with torch.autocast(self.device.type, self.compute):
                out = fn(*args, **kwargs)
        else:
            to_storage = partial(_moved, None, self.storage)
            args, kwargs = map_tensors(to_storage, (args, kwargs))
            out = fn(*args, **kwargs)
        return map_tensors(_to_fp32, out)


def _to_fp32(tensor: Tensor) -> Tensor:
    # A method may return the module's own parameter or buffer. The caller needs the object itself.
    if isinstance(tensor, nn.Parameter | nn.Buffer):
        return tensor
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if half else tensor


# -- the loss scale --------------------------------------------------------------------------------


@final
class LossScale:
    """The dynamic loss scale of this process, as in ``torch.amp.GradScaler``.

    The scale applies only during ``backward``, because clipping and logging need
    unscaled gradients. It is a power of two, so scaling is exact.
    """

    GROWTH_INTERVAL: Final = 2000

    def __init__(self) -> None:
        self.restore()
        #: The number of scaled backward passes so far.
        self.serial = 0
        #: The value of ``serial`` at the last counted step, and at the last inf or NaN.
        self._counted = self._halved = 0

    def state(self) -> tuple[float, int]:
        """Return the arguments of ``restore``."""
        return self.value, self._good_steps

    def restore(self, value: float = 65536.0, good_steps: int = 0) -> None:
        """Set the scale, and the number of steps since its last change."""
        self.value, self._good_steps = value, good_steps

    def backward(self, loss: Tensor, holders: Iterable[Any], **options: Any) -> None:
        """Run a backward on the scaled loss, and unscale the gradients."""
        # A parameter may be both a holder and a leaf, but must be scaled only once.
        unique = dict.fromkeys(chain(holders, _leaves(loss)))
        _multiply(unique, self.value)
        try:
            (loss * self.value).backward(**options)
        finally:
            _multiply(unique, 1.0 / self.value)
            self.serial += 1

    def judge(self, finite: bool) -> bool:
        """Return ``finite``, and update the scale once per backward."""
        if self._counted != self.serial:
            self._counted = self.serial
            self._good_steps += 1
        if not finite and self._halved != self.serial:
            self._halved = self.serial
            self.restore(self.value / 2)
        elif self._good_steps == self.GROWTH_INTERVAL:
            self.restore(self.value * 2)
        return finite


@torch.no_grad()
def _multiply(holders: Iterable[Any], factor: float) -> None:
    """Multiply gradients in place."""
    grads = [here(holder.grad) for holder in holders if holder.grad is not None]
    dense = [grad for grad in grads if grad.layout == torch.strided]
    if grads:
        torch._foreach_mul_(grads, factor)
    if dense:
        # x + 0 * (x - x) turns inf into NaN, because clipping by value would make an inf finite.
        torch._foreach_lerp_(dense, dense, 0.0)


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors of a loss's graph."""
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes.extend(following for following, _ in node.next_functions)


def here(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def all_finite(optimizer: Optimizer) -> bool:
    """True if an optimizer's gradients on this rank are finite."""
    local = map(here, gradients_of(optimizer))
    dense = [g.coalesce().values() if g.is_sparse else g for g in local]
    nonempty = list(filter(Tensor.numel, dense))
    if not nonempty:
        return True
    largest = torch._foreach_norm(nonempty, float("inf"))
    # Leaves 0 or NaN, because a large float64 would become inf in float32 below.
    torch._foreach_mul_(largest, 0.0)
    device = largest[0].device
    # Read them as one tensor, because each read of a number waits for the device.
    zeros = torch.stack([zero.to(device, torch.float32) for zero in largest])
    return bool(zeros.isfinite().all())


# -- conversion in place: parameters keep their identity -------------------------------------------


def convert_module(
    module: nn.Module, device: torch.device, dtype: torch.dtype | None, undo: ExitStack
) -> None:
    """Move a module to a device, and its floating tensors to ``dtype``."""
    for tensor in chain(module.parameters(), module.buffers()):
        before, grad = tensor.data, tensor.grad
        # A meta tensor has no values to move. The engine allocates it on the device later.
        after = _moved(None if before.is_meta else device, dtype, before)
        if after is before:
            continue
        undo.callback(_assign, tensor, before, grad)
        moved = None if grad is None else grad.to(after.device, after.dtype)
        _assign(tensor, after, moved)
    for child in module.modules():
        # Otherwise cuDNN copies the weights of an LSTM in every forward.
        if isinstance(child, nn.RNNBase):
            child.flatten_parameters()


def _moved(device: torch.device | None, dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def _assign(tensor: Tensor, value: Tensor, grad: Tensor | None) -> None:
    """Set the value, dtype and device of a tensor in place."""
    # torch raises if a tensor has a gradient of a different dtype, even during the assignment.
    tensor.grad = None
    if torch._has_compatible_shallow_copy_type(tensor, value):
        tensor.data = value
    else:
        # For example, an XLA tensor can't take the data of a CPU tensor.
        other = value.detach()
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, other)
    tensor.grad = grad


def convert_optimizer(optimizer: Optimizer, undo: ExitStack) -> None:
    """Give state its parameter's device and dtype, as ``load_state_dict`` does."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            for key, value in list(state.items()):
                if state_device(key, p.device, group) is None:
                    continue
                undo.callback(state.__setitem__, key, value)
                dtype = p.dtype if key != "step" else None
                state[key] = map_tensors(partial(_moved, p.device, dtype), value)


#: Each replaced BatchNorm, as (parent, name in the parent, BatchNorm).
Replaced = list[tuple[nn.Module, str, nn.Module]]


def convert_batchnorms(module: nn.Module, group: dist.ProcessGroup | None) -> Replaced:
    """Replace each BatchNorm with a ``SyncBatchNorm`` of the same tensors."""
    children: Replaced = []
    for parent in module.modules():
        children += [(parent, name, child) for name, child in parent.named_children()]
    nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
    return [place for place in children if place[0].get_submodule(place[1]) is not place[2]]


def restore_batchnorms(replaced: Replaced) -> None:
    """Put BatchNorms back, with the buffers and mode of the SyncBatchNorms."""
    for parent, name, child in replaced:
        stand_in = parent.get_submodule(name)
        child.train(stand_in.training)
        for key, buffer in stand_in.named_buffers():
            setattr(child, key, buffer)
        setattr(parent, name, child)
    replaced.clear()
