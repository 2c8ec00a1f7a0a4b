"""Numeric precision of a model, and the loss scale that fp16 needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from .collectives import map_tensors
from .errors import PrecisionError

NAMES: Final = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")


@final
class Precision:
    """What a precision name means for parameters, inputs, the forward pass and outputs.

    ``32-true`` leaves the module as its author made it. ``*-mixed`` keeps fp32 parameters, runs the forward
    pass under autocast and gives fp32 outputs. ``bf16-true`` stores and computes in bfloat16 and gives fp32 outputs.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in NAMES:
            raise PrecisionError(f"unknown precision {name!r}; known: {', '.join(NAMES)}")
        self.name = name
        self.device = device
        self.plain = name == "32-true"
        self.scaled = name == "16-mixed"
        self.storage = torch.bfloat16 if name == "bf16-true" else None
        self.compute = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(name)

    def check(self, module: nn.Module) -> None:
        """Refuse trainable half-precision parameters where fp32 ones are promised.

        Raises:
            PrecisionError: names the parameters.
        """
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

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` in this precision."""
        if self.plain:
            return fn(*args, **kwargs)
        if self.storage is not None:
            args, kwargs = map_tensors(self._store, (args, kwargs), others=True)
            return map_tensors(_to_fp32, fn(*args, **kwargs), others=True)
        with torch.autocast(self.device.type, self.compute):
            out = fn(*args, **kwargs)
        return map_tensors(_to_fp32, out, others=True)

    def _store(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.storage) if tensor.is_floating_point() else tensor


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.dtype is torch.bfloat16 or tensor.dtype is torch.float16
    return tensor.float() if half else tensor


@final
class LossScale:
    """The one dynamic loss scale of this process (``torch.amp.GradScaler`` does the arithmetic).

    Gradients made by ``backward`` are scaled until the optimizer that owns them steps or is clipped;
    ``unscale`` divides them and tells whether a step is safe.
    """

    def __init__(self) -> None:
        self._scaler: torch.amp.GradScaler | None = None
        self._scaled: dict[int, Optimizer] = {}
        self._unscaled: dict[int, Optimizer] = {}

    def _get(self, device: torch.device) -> torch.amp.GradScaler:
        if self._scaler is None:
            self._scaler = torch.amp.GradScaler(device.type)
        return self._scaler

    @property
    def value(self) -> float:
        """The scale as it is; 1 before the first scaled loss."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The scaled loss; brings the scale up to date with the steps since the last call first."""
        scaler = self._get(loss.device)
        if self._unscaled:
            self._update(scaler)
        return scaler.scale(loss)

    def _update(self, scaler: torch.amp.GradScaler) -> None:
        leftovers = [g for o in self._unscaled.values() for g in gradients_of(o)]
        waiting = [g for o in self._scaled.values() for g in gradients_of(o)]
        before = scaler.get_scale() if waiting else 1.0
        if any(o["found_inf_per_device"] for o in scaler._per_optimizer_states.values()):
            scaler.update()
        # The scale is a power of two, so both products are exact: what a next backward adds to must be in its unit.
        if leftovers:
            torch._foreach_mul_(leftovers, scaler.get_scale())
            self._scaled.update(self._unscaled)
        if waiting and scaler.get_scale() != before:
            torch._foreach_mul_(waiting, scaler.get_scale() / before)
        self._unscaled.clear()

    @contextlib.contextmanager
    def outside(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Keep these parameters' gradients unscaled through a scaled backward.

        What they hold is brought to the scale before and back after it; the scale is a power of two, so both are exact.
        """
        parameters = list(parameters)
        scaler = self._scaler
        assert scaler is not None
        if grads := [p.grad for p in parameters if p.grad is not None]:
            torch._foreach_mul_(grads, scaler.get_scale())
        try:
            yield
        finally:
            if grads := [p.grad for p in parameters if p.grad is not None]:
                torch._foreach_mul_(grads, 1.0 / scaler.get_scale())

    def mark(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer``'s gradients are scaled."""
        self._scaled[id(optimizer)] = optimizer

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer``'s gradients are scaled."""
        return id(optimizer) in self._scaled

    def unscale(self, optimizer: Optimizer) -> bool:
        """Divide ``optimizer``'s gradients by the scale if that is due; False where they hold inf or nan."""
        scaler = self._scaler
        key = id(optimizer)
        if scaler is None or (key not in self._scaled and key not in self._unscaled):
            return True
        if self._scaled.pop(key, None) is not None:
            if not gradients_of(optimizer):
                return True
            scaler.unscale_(optimizer)
            self._unscaled[key] = optimizer
        found = scaler._per_optimizer_states[key]["found_inf_per_device"].values()
        return not any(v.item() for v in found)

    def forget(self, optimizer: Optimizer) -> None:
        """Drop what is noted of an optimizer whose engine ends; its scaled gradients are unscaled."""
        self.unscale(optimizer)
        self._scaled.pop(id(optimizer), None)


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The gradients that ``optimizer`` would step with."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
