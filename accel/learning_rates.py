"""The linear rule: a step that sees k times the samples takes k times the learning rate (Goyal et al., arXiv 1706.02677)."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from torch.optim import Optimizer

from .errors import OptimizerError

#: In each group: what its learning rate was multiplied by. There it travels with the learning rate, into a checkpoint too.
_KEY: Final = "lr_scale"


def are_scaled(optimizer: Optimizer) -> bool:
    """Whether the learning rates were scaled."""
    return all(_KEY in group for group in optimizer.param_groups)


def check(optimizer: Optimizer, path: str) -> None:
    """Refuse groups without a learning rate.

    Raises:
        OptimizerError: names the group.
    """
    for number, group in enumerate(optimizer.param_groups):
        if "lr" not in group:
            raise OptimizerError(
                f"{path} ({type(optimizer).__name__}) with scale_lr=True: group {number} has no learning rate 'lr'"
            )
        if _KEY not in group:
            _refuse_scheduled(optimizer, number, path)


def _refuse_scheduled(optimizer: Optimizer, number: int, path: str) -> None:
    if "initial_lr" in optimizer.param_groups[number]:
        raise OptimizerError(
            f"{path} ({type(optimizer).__name__}) with scale_lr=True: a scheduler has taken the learning rate of group "
            f"{number} already, and would set it back: build the scheduler after accel.setup"
        )


def scale(optimizer: Optimizer, replicas: int, undo: contextlib.ExitStack) -> None:
    """Multiply the learning rates by the number of replicas, once: after another setup they are as after the first.

    Raises:
        OptimizerError: they were scaled for another number of replicas, and a scheduler has taken them since.
    """
    for number, group in enumerate(optimizer.param_groups):
        before: dict[str, Any] = {key: group[key] for key in ("lr", _KEY) if key in group}
        if before.get(_KEY) == replicas:
            continue
        _refuse_scheduled(optimizer, number, "the optimizer")
        undo.callback(group.update, before)
        if _KEY not in group:
            undo.callback(group.pop, _KEY)
        group["lr"] = group["lr"] * (replicas / group.get(_KEY, 1))
        group[_KEY] = replicas
