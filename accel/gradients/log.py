"""Hears of gradients as autograd accumulates them: from the log an engine knows what is still local or unscaled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class GradientLog:
    """Notes each gradient as autograd accumulates it: the parameter's index, or ``~index`` where the parameter is not as it was.

    Numbers, not parameters: a parameter whose hook reaches a list that holds it would never be freed.

    Attributes:
        entries: what was noted since the last ``fold``; an engine may add None where a reduction ended.
        pending: gradients noted before the last ``fold`` have not been reduced since.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.entries: list[int | None] = []
        self.pending = False
        self._plain = False
        self._accepted = 0
        self._hooks: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            self._hooks += _after_accumulation(parameter, _noting(self.entries, index, parameter.dtype))

    def fold(self, pending: bool) -> None:
        """Forget the entries; remember whether something is unreduced, or came from a plain backward."""
        self._plain = self.plain
        self.pending = pending
        self._accepted = 0
        self.entries.clear()

    def drop(self, indices: Container[int]) -> None:
        """Forget the entries of parameters whose gradients were dropped."""
        kept = [e is None or (e if e >= 0 else ~e) not in indices for e in self.entries]
        self._accepted = sum(kept[: self._accepted])
        self.entries[:] = [e if e is None or e >= 0 else ~e for e, keep in zip(self.entries, kept, strict=True) if keep]

    @property
    def active(self) -> bool:
        """Whether it notes anything."""
        return bool(self._hooks)

    @property
    def plain(self) -> bool:
        """Whether a gradient came that no ``accept`` covered."""
        return self._plain or len(self.entries) > self._accepted

    def accept(self) -> None:
        """Cover every gradient up to now."""
        self._plain = False
        self._accepted = len(self.entries)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.entries.clear()


class BackwardEnd:
    """Calls a method at the end of each backward that leaves a gradient in one of some parameters.

    Args:
        parameters: these.
        method: is held weakly, since what a parameter's hook reaches is never freed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], method: Callable[[], None]) -> None:
        self._hooks: list[RemovableHandle] = []
        hook = _ending(weakref.WeakMethod(method))
        for parameter in parameters:
            self._hooks += _after_accumulation(parameter, hook)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _ending(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[torch.Tensor], None]:
    heard = -1

    def call() -> None:
        if (live := method()) is not None:
            live()

    def arrived(_: torch.Tensor) -> None:
        nonlocal heard
        task = torch._C._current_graph_task_id()
        if task != heard:  # the first gradient of this backward
            heard = task
            at_end_of_backward(call)

    return arrived


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Let the backward that runs end with this call, after those that it was told before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def _after_accumulation(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> list[RemovableHandle]:
    """Let ``hook`` hear of each gradient of a parameter, which may be frozen now; none where it can have none."""
    if not parameter.is_floating_point() and not parameter.is_complex():
        return []
    trainable = parameter.requires_grad
    # torch wants requires_grad to register the hook, which then also serves a later unfreeze.
    handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trainable)
    return [handle]


def _noting(entries: list[int | None], index: int, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
    append = entries.append

    def note(parameter: torch.Tensor) -> None:
        append(index if parameter.requires_grad and parameter.dtype is dtype else ~index)

    return note
