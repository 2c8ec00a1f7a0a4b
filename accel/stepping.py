"""What happens around the step of a user's optimizer, whichever object the user steps."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Final, Protocol, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .errors import OptimizerError, PrecisionError
from .handles import OptimizerHandle, Owner, end
from .precision import LossScale, Precision, gradients_of
from .process import Process
from .slot import Slot

_PROTOCOL: Final = "_step_supports_amp_scaling"


class Stepped(Owner, Protocol):
    """What stepping needs of an engine."""

    process: Process
    precision: Precision
    loss_scale: LossScale

    def prepare_step(self, *, by_grad_scaler: bool = False) -> None: ...
    def check_optimizer(self, optimizer: Optimizer) -> None: ...


@final
class Stepper:
    """Hooks on one raw optimizer: gradients are final before it steps, and a step that overflowed changes nothing.

    A user's ``torch.amp.GradScaler`` is met by torch's own protocol: an optimizer that says it supports scaling is
    always stepped, and finds scale and overflow in its attributes ``grad_scale`` and ``found_inf``.
    """

    def __init__(self, engine: Stepped, optimizer: Optimizer) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.handle = OptimizerHandle(engine, optimizer)
        self._num_groups = len(optimizer.param_groups)
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fused = hasattr(optimizer, _PROTOCOL)
        if not self._fused:
            setattr(optimizer, _PROTOCOL, True)
        Slot.put(optimizer, self.handle)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Give the optimizer back to its user."""
        for hook in self._hooks:
            hook.remove()
        if not self._fused:
            delattr(self.optimizer, _PROTOCOL)
        self.engine.loss_scale.forget(self.optimizer)
        Slot.clear(self.optimizer)
        end(self.handle)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(optimizer.param_groups) != self._num_groups:
            self.engine.check_optimizer(optimizer)
            self._num_groups = len(optimizer.param_groups)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            return (args[0], self._global(closure)), {k: v for k, v in kwargs.items() if k != "closure"}
        found_inf = getattr(optimizer, "found_inf", None)
        self.engine.prepare_step(by_grad_scaler=found_inf is not None)
        safe = self._unscale_for_user(found_inf) if found_inf is not None else self.engine.loss_scale.unscale(optimizer)
        if not safe:
            self._hide_gradients()
        return None

    def _unscale_for_user(self, found_inf: torch.Tensor) -> bool:
        if self._fused:
            return True
        scale, self.optimizer.grad_scale = self.optimizer.grad_scale, None  # type: ignore[attr-defined]
        self.optimizer.found_inf = None  # type: ignore[attr-defined]
        if scale is not None and (grads := gradients_of(self.optimizer)):
            torch._foreach_mul_(grads, scale.double().reciprocal().float().to(grads[0].device))
        return not found_inf.item()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden.clear()
        # By this mark a scheduler built on the other object knows that a step came before its own.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def _hide_gradients(self) -> None:
        # Optimizers skip a parameter without gradient, state included: so the overflowed step changes nothing.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _global(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure as it would be in one process: final gradients, and the ranks' mean loss."""
        if self.engine.precision.scaled:
            raise PrecisionError("optimizer.step(closure) has no loss scaling: use 'bf16-mixed' or '32-true'")
        process = self.engine.process

        def global_closure() -> Any:
            loss = closure()
            self.engine.prepare_step()
            if loss is None or process.place.world_size == 1:
                return loss
            mean = torch.as_tensor(loss, device=process.device).detach().clone()
            dist.all_reduce(mean, group=process.group)
            return mean / process.place.world_size

        return global_closure


def check_parameters(optimizer: Optimizer, known: Container[int], module: nn.Module, path: str) -> None:
    """Refuse an optimizer's parameters whose identity is not among ``known``.

    Raises:
        OptimizerError: names them.
    """
    strangers = [
        f"param_groups[{g}]['params'][{i}] of shape {tuple(p.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if id(p) not in known
    ]
    if strangers:
        raise OptimizerError(
            f"{path} holds parameters that are not of this {type(module).__name__}: {', '.join(strangers[:5])}; each "
            "rank would train its own: make them part of the model"
        )
