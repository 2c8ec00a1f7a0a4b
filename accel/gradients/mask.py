"""Which parameters are trainable, and whether that changed since an engine was last built for it."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence

import torch
from torch import nn

logger = logging.getLogger("accel")
_requires_grad = operator.attrgetter("requires_grad")
_QUIET_CHECKS = 10_000


class TrainableMask:
    """Compares ``requires_grad`` of every parameter with the mask that the engine was built for.

    The idea of a mask comparison before each forward, on by default, is fairscale's (its pull request 369).
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._quiet_checks = 0
        self.known = self.now()

    def now(self) -> list[bool]:
        """The mask as it is."""
        with torch._C.DisableTorchFunctionSubclass():  # a parameter's class may watch its uses, which takes its time
            return list(map(_requires_grad, self._parameters))

    def changed(self) -> bool:
        """Whether it differs from what the engine knows; says once when it never does."""
        if self.now() != self.known:
            self._quiet_checks = -1
            return True
        if self._quiet_checks >= 0:
            self._quiet_checks += 1
            if self._quiet_checks == _QUIET_CHECKS:
                self._quiet_checks = -1
                logger.info(
                    "requires_grad did not change in %d forwards: the option auto_refresh=False saves the check "
                    "(after a change, call accel.refresh_trainable)",
                    _QUIET_CHECKS,
                )
        return False


def explain(masks: Sequence[Sequence[bool]], names: Sequence[str]) -> str:
    """The first parameter on which the ranks' masks differ."""
    for i, name in enumerate(names):
        ranks = [rank for rank, mask in enumerate(masks) if mask[i]]
        if len(ranks) not in (0, len(masks)):
            return f"{name} is trainable on ranks {ranks} and frozen on the others"
    return "they agree"
