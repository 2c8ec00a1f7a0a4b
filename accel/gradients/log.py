"""Hooks on single parameters, for backends that need more than a look before and after a backward."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .watch import TrainableMask as TrainableMask
from .watch import explain as explain


class GradientLog:
    """Notes the index of each parameter whose gradient autograd accumulates.

    The entry is ``~index`` if the parameter is frozen or has another dtype by then. The log holds indices because a
    parameter would never be freed if its hook reached a list that holds it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        #: What came since the last ``fold``.
        self.entries: list[int] = []
        self._stepped: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            if not parameter.is_inference() and parameter.is_floating_point():
                hook = _noting(self.entries, index, parameter.dtype)
                register = parameter.register_post_accumulate_grad_hook
                self._hooks.append(even_frozen(parameter, register, hook))

    def fold(self, *, stepping: Optimizer | None = None) -> None:
        """Forget the entries, because the gradients are final, and note who steps with them."""
        if self.entries:
            self._stepped.clear()
            self.entries.clear()
        if stepping is not None:
            self._stepped.add(id(stepping))

    def repeats(self, optimizer: Optimizer) -> bool:
        """True if this is the optimizer's second step since a gradient came."""
        return not self.entries and id(optimizer) in self._stepped

    def drop(self, indices: Container[int]) -> None:
        """Forget the entries of parameters whose gradients were dropped."""
        self.entries[:] = [e for e in self.entries if (e if e >= 0 else ~e) not in indices]

    def close(self) -> None:
        """Remove the hooks."""
        remove_hooks(self._hooks)
        self.entries.clear()


def _noting(entries: list[int], index: int, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
    def note(parameter: torch.Tensor) -> None:
        entries.append(index if parameter.requires_grad and parameter.dtype is dtype else ~index)

    return note


def even_frozen(parameter: nn.Parameter, register: Callable[..., RemovableHandle], hook: Any) -> RemovableHandle:
    """Register a hook on a parameter that may be frozen; torch wants ``requires_grad`` for it."""
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = register(hook)
    parameter.requires_grad_(trainable)
    return handle


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove hooks, and forget them."""
    for hook in hooks:
        hook.remove()
    hooks.clear()
