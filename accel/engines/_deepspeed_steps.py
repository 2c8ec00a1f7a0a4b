"""The user's own optimizer steps this rank's fragments, as if they were its parameters."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..precision import Accumulator
from . import _deepspeed_foreign
from ._deepspeed_verbs import Divided
from .base import Context


class Stepping(Divided, ABC):
    """Between ``before_step`` and ``after_step`` the fragments are in the parameters' places in the groups."""

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        self.stepping: Optimizer | None = None
        #: Every step clips to it; 0.0 for none.
        self.max_norm = 0.0

    @classmethod
    def read_foreign(cls, path: str, load: Any, new: Any) -> dict[str, Any] | None:
        """What DeepSpeed's ``save_checkpoint`` wrote."""
        return _deepspeed_foreign.read(path, load, new)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the norm over all ranks' parts."""
        self.settle()
        return self._clip(max_norm, norm_type)

    def _clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        if self.zero is None:
            return nn.utils.clip_grad_norm_(self.parameters, max_norm, norm_type)
        norm = self.zero.norm(float(norm_type), self.process.group, self.process.device)
        self.zero.scale((float(max_norm) / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def accumulators(self) -> Sequence[Accumulator]:
        """The fragments too: at stages 2 and 3 gradients come there while backward runs."""
        return self.parameters if self.zero is None else [*self.parameters, *self.zero.fragments.values()]

    def step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step; an exception leaves the groups as they were."""
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            self.hide()

    def before_step(self, optimizer: Optimizer) -> None:
        """From now on, what is final is shown to this optimizer."""
        self.hide()
        self.refuse_edits()
        self.stepping = optimizer

    def show(self, optimizer: Optimizer) -> None:
        """Clip as the configuration says, then put the fragments in the parameters' places in the groups."""
        if self.max_norm > 0:
            self._clip(self.max_norm, 2.0)
        if self.zero is None:
            return
        numbers = self.zero.numbers
        for group in optimizer.param_groups if not self.held else ():
            self.held.append((group, group["params"]))
            fragments = [self.zero.fragments.get(numbers[id(p)]) for p in group["params"]]
            group["params"] = [f.weights for f in fragments if f is not None]
        for fragment in self.zero.fragments.values():
            fragment.weights.grad = None if fragment.grad is None else fragment.grad.to(fragment.weights.dtype)

    def hide(self) -> None:
        """Put the parameters back."""
        self.stepping = None
        for group, parameters in self.held:
            group["params"] = parameters
        if self.held and self.zero is not None:
            for fragment in self.zero.fragments.values():
                fragment.weights.grad = None
        self.held.clear()

    def after_step(self, optimizer: Optimizer) -> None:
        """Every rank sees the new weights."""
        self.hide()
        if self.zero is not None:
            self.zero.spread()
