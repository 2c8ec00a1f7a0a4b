"""Numeric precision of a model, and the loss scale that fp16 needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import CoroutineType, GeneratorType
from typing import Any, Final, Protocol, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .errors import PrecisionError
from .shard import parameters_of, state_device
from .trees import map_tensors


class Accumulator(Protocol):
    """Where a backward leaves a gradient: a leaf tensor, or an engine's part of one."""

    @property
    def grad(self) -> torch.Tensor | None: ...


NAMES: Final = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


def dtype_of(given: object) -> torch.dtype | None:
    """The dtype that a text names, with or without ``torch.``, or that is given itself; None of anything else."""
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    return found if isinstance(found, torch.dtype) else None


@final
class Precision:
    """What a precision name means for parameters, inputs, the forward pass and outputs.

    ``32-true`` leaves the module as its author made it. ``*-mixed`` keeps fp32 parameters, runs the forward
    pass under autocast and gives fp32 outputs. ``bf16-true`` and ``16-true`` store and compute in bfloat16 or float16, and
    give fp32 outputs.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in NAMES:
            raise PrecisionError(f"unknown precision {name!r}; known: {', '.join(NAMES)}")
        self.name = name
        self.device = device
        self.plain = name == "32-true"
        self.scaled = name == "16-mixed"
        self.storage = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(name)
        mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        self.compute = mixed.get(name)

    def check(self, module: nn.Module) -> None:
        """Refuse (PrecisionError) trainable half-precision parameters where fp32 ones are promised."""
        if self.compute is None:
            return
        wrong = [
            f"{name} ({str(p.dtype).removeprefix('torch.')})"
            for name, p in module.named_parameters()
            if p.requires_grad and p.is_floating_point() and p.dtype.itemsize < 4
        ]
        if wrong:
            raise PrecisionError(
                f"precision {self.name!r} trains fp32 parameters, but {len(wrong)} of this "
                f"{type(module).__name__} are not: {', '.join(wrong[:5])}; call model.float() first or ask for 'bf16-true'"
            )

    def check_optimizer(self, optimizer: Optimizer, path: str) -> None:
        """Refuse (PrecisionError) an ``eps`` that is 0 in the dtype of the state, where nothing may be divided by 0."""
        for eps in (group.get("eps") for group in optimizer.param_groups):
            rounded = torch.tensor(eps, dtype=self.storage, device="cpu") if isinstance(eps, float) and eps else None
            if rounded is not None and not rounded:
                raise PrecisionError(
                    f"{path} ({type(optimizer).__name__}) has eps={eps}, which precision {self.name!r} rounds to 0, so that "
                    "weights become nan: build it with eps=1e-4, or ask for 'bf16-true' or '16-mixed'"
                )

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` in this precision; PrecisionError for a generator or coroutine, which would run outside of it."""
        if self.plain:
            return fn(*args, **kwargs)
        if self.storage is not None:
            args, kwargs = map_tensors(self._store, (args, kwargs), others=True)
            out = fn(*args, **kwargs)
        else:
            with torch.autocast(self.device.type, self.compute):
                out = fn(*args, **kwargs)
        if isinstance(out, (GeneratorType, CoroutineType)):
            raise PrecisionError(
                f"{getattr(fn, '__qualname__', fn)} returns a {type(out).__name__}, whose body would run outside "
                f"precision {self.name!r}: return tensors, or use '32-true'"
            )
        return map_tensors(_to_fp32, out, others=True)

    def _store(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.storage) if tensor.is_floating_point() else tensor


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    # A parameter or buffer that is given out is the module's own, not a result.
    half = tensor.dtype is torch.bfloat16 or tensor.dtype is torch.float16
    return tensor.float() if half and not isinstance(tensor, (nn.Parameter, nn.Buffer)) else tensor


@final
class LossScale:
    """The one dynamic loss scale of this process, by the rule of ``torch.amp.GradScaler``.

    The scale lives only inside ``backward``: afterwards every gradient is divided again, so that clipping, logging and
    models of another precision see true gradients. The scale is a power of two, so both are exact.
    """

    GROWTH_INTERVAL: Final = 2000

    def __init__(self) -> None:
        self.value = 65536.0
        #: How many scaled backwards there were.
        self.serial = 0
        self._counted = 0
        self._halved = 0
        self._good_steps = 0

    def state(self) -> tuple[float, int]:
        return self.value, self._good_steps

    def restore(self, value: float, good_steps: int) -> None:
        self.value, self._good_steps = value, good_steps

    def backward(
        self,
        loss: torch.Tensor,
        accumulators: Iterable[Accumulator],
        gradient: torch.Tensor | None,
        retain_graph: bool | None,
        inputs: Any,
    ) -> None:
        """``loss.backward()`` with the loss scaled on the way; ``accumulators`` and all other leaves get true gradients."""
        holders: dict[int, Accumulator] = {id(a): a for a in accumulators}
        holders.update((id(t), t) for t in _leaves(loss))
        _multiply(holders.values(), self.value)
        try:
            (loss * self.value).backward(gradient, retain_graph, False, inputs)
        finally:
            _spoil(_multiply(holders.values(), 1.0 / self.value))
            self.serial += 1

    def judge(self, finite: bool) -> bool:
        """Whether an optimizer may step whose gradients are ``finite``; adapts the scale once for each scaled backward."""
        if self._counted != self.serial:
            self._counted = self.serial
            self._good_steps += 1
        if not finite and self._halved != self.serial:
            self.value, self._halved, self._good_steps = self.value / 2, self.serial, 0
        elif self._good_steps == self.GROWTH_INTERVAL:
            self.value, self._good_steps = self.value * 2, 0
        return finite


@torch.no_grad()
def _multiply(holders: Iterable[Accumulator], factor: float) -> list[torch.Tensor]:
    grads = [here(a.grad) for a in holders if a.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)
    return grads


@torch.no_grad()
def _spoil(grads: Iterable[torch.Tensor]) -> None:
    """Turn inf into nan, which stays through a clamp of values: an overflow is to be seen at the step."""
    if dense := [grad for grad in grads if grad.layout == torch.strided]:
        torch._foreach_lerp_(dense, dense, 0.0)  # x + 0 * (x - x)


def here(tensor: torch.Tensor) -> torch.Tensor:
    """What of a sharded tensor lies on this rank; any other is here as a whole."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        waiting.extend(following for following, _ in node.next_functions)


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The gradients that ``optimizer`` would step with."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def all_finite(optimizer: Optimizer) -> bool:
    """Whether ``optimizer``'s gradients on this rank hold neither inf nor nan."""
    largest = norms(map(here, gradients_of(optimizer)), float("inf"))
    return all(bool(some.isfinite().all()) for some in largest)


def norms(tensors: Iterable[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The norm of each tensor that has elements: one tensor of them for each device and dtype, so that one read gives all."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    dense = (t.coalesce().values() if t.is_sparse else t for t in tensors)
    some = [t for t in dense if t.numel()]  # nothing has no norm
    for norm in torch._foreach_norm(some, order) if some else ():
        alike.setdefault((norm.device, norm.dtype), []).append(norm)
    return [torch.stack(found) for found in alike.values()]


# -- conversion --------------------------------------------------------------------------------------------------------
# Moves a module or an optimizer's state to a device and dtype, in place: parameters keep their identity.

#: Tensors that were converted to another dtype, with the one that they had.
Dtypes = list[tuple[torch.Tensor, torch.dtype]]


def convert_module(
    module: nn.Module, device: torch.device, dtype: torch.dtype | None, undo: contextlib.ExitStack
) -> Dtypes:
    """Move parameters, their gradients and buffers; ``dtype`` is for floating ones. ``undo`` puts the old values back."""
    changed: Dtypes = []
    moved: set[int] = set()
    for tensor in chain(module.parameters(), module.buffers()):
        if dtype is not None and tensor.is_floating_point() and tensor.dtype is not dtype:
            changed.append((tensor, tensor.dtype))
        if _convert(tensor, device, dtype, undo):
            moved.add(id(tensor))
    for child in module.modules():
        if isinstance(child, nn.RNNBase) and not moved.isdisjoint(map(id, child.parameters())):
            child.flatten_parameters()  # cuDNN would copy weights that lie apart at every forward
    return changed


def restore_dtypes(changed: Dtypes, optimizers: Iterable[Optimizer]) -> None:
    """Give converted tensors, and the optimizer state that belongs to them, the dtype that they had."""
    for_good = contextlib.ExitStack()
    for tensor, dtype in changed:
        _convert(tensor, tensor.device, dtype, for_good)
    if changed:
        for optimizer in optimizers:
            convert_optimizer(optimizer, for_good)


def _convert(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None, undo: contextlib.ExitStack) -> bool:
    """Whether it has other memory now."""
    # A gradient of another dtype than its tensor's cannot be held, not even on the way back.
    grad, tensor.grad = tensor.grad, None
    undo.callback(setattr, tensor, "grad", grad)
    before = tensor.data
    # What has no memory yet gets it from the engine.
    after = before.to(None if before.is_meta else device, dtype if tensor.is_floating_point() else None)
    if after is not before:
        _put(tensor, after)
        undo.callback(_put, tensor, before)
    undo.callback(setattr, tensor, "grad", None)
    if grad is not None:
        tensor.grad = grad.to(device, dtype if grad.is_floating_point() else None)
    return after is not before


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
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in list(state.items()):
                if state_device(key, parameter.device, group) is None:
                    continue

                def move(tensor: torch.Tensor, key: str = key, to: torch.Tensor = parameter) -> torch.Tensor:
                    floating = tensor.is_floating_point() and key != "step"
                    return tensor.to(device=to.device, dtype=to.dtype if floating else tensor.dtype)

                undo.callback(state.__setitem__, key, value)
                state[key] = map_tensors(move, value, others=True)


# -- BatchNorm over ranks ----------------------------------------------------------------------------------------------

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
