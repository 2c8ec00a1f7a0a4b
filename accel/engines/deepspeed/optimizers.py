"""What may step fragments: optimizers of torch and of DeepSpeed, and DeepSpeed's Adam in the place of torch's under offload."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...errors import OptimizerError
from ...gradients.patches import Patch, around
from ..base.local import ELEMENTWISE
from .library import library

logger = logging.getLogger("accel")

#: DeepSpeed's own of this kind: those that step weights in the memory of the host, and those that step them on a device.
_ON_HOST: Final = frozenset({"DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"})
_ON_DEVICE: Final = frozenset({"FusedAdam", "FusedLion"})


def refuse_optimizer(optimizer: Optimizer, stage: int, vouched: bool, offloads: bool, device: torch.device) -> None:
    """Refuse one that would see a part of a parameter as another parameter, or cannot step where the parts lie.

    Raises:
        OptimizerError: names it.
    """
    kind = type(optimizer)
    name, own = kind.__name__, kind.__module__.startswith("deepspeed.ops.")
    if own and name in _ON_HOST and not offloads and device.type != "cpu":
        raise OptimizerError(
            f"{name} steps weights in CPU memory, and these are on {device}: use DeepSpeed(offload_optimizer=True), or "
            "torch.optim.AdamW(fused=True)"
        )
    if own and name in _ON_DEVICE and offloads and device.type != "cpu":
        raise OptimizerError(
            f"{name} steps weights on {device}, and DeepSpeed(offload_optimizer=True) has them in CPU memory: use "
            "DeepSpeed's optimizers for the CPU, or torch's"
        )
    if kind not in ELEMENTWISE and not (own and name in _ON_HOST | _ON_DEVICE) and not vouched:
        raise OptimizerError(
            f"{name} with DeepSpeed stage {stage}: each rank steps its part of each parameter as "
            "a flat tensor, which is known to be exact for torch's elementwise optimizers (SGD, Adam, AdamW, ...) and "
            "DeepSpeed's (DeepSpeedCPUAdam, FusedAdam, ...); use stage 0, or, if this one is elementwise too, "
            "config={'zero_allow_untested_optimizer': True}"
        )


def level_steps(optimizer: Optimizer) -> None:
    """Where an optimizer counts the steps of a group in its last parameter, let all of them know: another may be last later."""
    if type(optimizer).__name__ not in _ON_DEVICE:
        return
    for group in optimizer.param_groups:
        states = [optimizer.state[p] for p in group["params"] if optimizer.state.get(p)]
        count = max((state["step"] for state in states), default=0)
        for state in states:
            state["step"] = count


# -- DeepSpeed's Adam on the CPU ---------------------------------------------------------------------------------------

#: The attribute of a tensor that it steps.
_MARK: Final = "_accel_cpu_adam"


@final
class CPUAdam:
    """The arithmetic of DeepSpeed's compiled op, which torch's ``Adam`` and ``AdamW`` call in the place of their own."""

    def __init__(self) -> None:
        self._op: Any = library("deepspeed.ops.op_builder").CPUAdamBuilder().load(verbose=False)
        counter = library("deepspeed.ops.adam.cpu_adam").DeepSpeedCPUAdam
        #: By whether the decay of weights is decoupled.
        self._numbers: dict[bool, int] = {}
        for decoupled in (False, True):
            self._numbers[decoupled] = number = counter.optimizer_id
            counter.optimizer_id += 1
            self._op.create_adam(number, 1e-3, 0.9, 0.999, 1e-8, 0.0, decoupled, False)

    def step(self, lists: Sequence[list[torch.Tensor]], group: dict[str, Any]) -> None:
        """Step weights, given with gradients, both moments and numbers of steps."""
        *tensors, counts = lists
        torch._foreach_add_(counts, 1)
        number, lr, eps, decay = (
            self._numbers[group["decoupled_weight_decay"]],
            *(float(group[name]) for name in ("lr", "eps", "weight_decay")),
        )
        betas = float(group["beta1"]), float(group["beta2"])
        for weights, grad, mean, square, count in zip(*tensors, counts, strict=True):
            self._op.adam_update(number, int(count), lr, *betas, eps, decay, True, weights, grad, mean, square)


@functools.cache
def cpu_adam() -> CPUAdam | None:
    """Compiled at the first use on a machine; None, which is said once, where it cannot be."""
    try:
        return CPUAdam()
    except Exception as error:  # whatever compilers say
        logger.warning(
            "DeepSpeed's CPU Adam cannot be built (%s: %s): torch's own steps the offloaded weights",
            type(error).__name__,
            error,
        )
        return None


def choose_adam(optimizers: Iterable[Optimizer], weights: Iterable[Any], user: Any) -> None:
    """As DeepSpeed does under offload: let its Adam step these weights where torch's would. Local."""
    names = {type(o).__name__ for o in optimizers if type(o) in (torch.optim.Adam, torch.optim.AdamW)}
    if not names or (adam := cpu_adam()) is None:
        return
    for tensor in weights:
        setattr(tensor, _MARK, adam)
    _arithmetic().need(user)
    if dist.get_rank() != 0:
        return
    logger.info(
        "DeepSpeed's CPU Adam computes the steps of %s on offloaded weights; groups, hooks and state stay the optimizer's "
        "(config={'zero_force_ds_cpu_optimizer': False} keeps torch's own arithmetic)",
        " and ".join(sorted(names)),
    )


@functools.cache
def _arithmetic() -> Patch:
    return around(vars(library("torch.optim.adam")), "adam", _adam)


def _adam(
    plain: Any, params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, most: Any, steps: Any, **group: Any
) -> None:
    adam: CPUAdam | None = getattr(params[0], _MARK, None) if params else None
    special = any(group.get(name) for name in ("amsgrad", "maximize", "capturable", "differentiable", "fused"))
    if adam is None or special or any(p.dtype is not torch.float32 for p in params):
        plain(params, grads, exp_avgs, exp_avg_sqs, most, steps, **group)
    else:
        adam.step((params, grads, exp_avgs, exp_avg_sqs, steps), group)
