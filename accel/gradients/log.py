"""What autograd does with an engine's parameters: which got gradients, and which may."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class GradientLog:
    """Notes each gradient as autograd accumulates it: the parameter's index, or ``~index`` where the parameter is not as it was.

    Numbers, not parameters: a parameter whose hook reaches a list that holds it would never be freed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        #: What was noted since the last ``fold``; an engine may add None for a backward.
        self.entries: list[int | None] = []
        self._plain = False
        self._accepted = 0
        #: The optimizers that have stepped with the gradients that are there.
        self._stepped: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            self._hooks += _after_accumulation(parameter, _noting(self.entries, index, parameter.dtype))

    def fold(self, *, stepping: Optimizer | None = None) -> None:
        """Forget the entries; remember whether something came from a plain backward, and who steps with it."""
        if self.entries:
            self._plain = self._plain or len(self.entries) > self._accepted
            self._accepted = 0
            self._stepped.clear()
            self.entries.clear()
        if stepping is not None:
            self._stepped.add(id(stepping))

    def repeats(self, optimizer: Optimizer) -> bool:
        """Whether a step would be the optimizer's second one without a gradient in between: with ones assigned by hand, say."""
        return not self.entries and id(optimizer) in self._stepped

    def drop(self, indices: Container[int]) -> None:
        """Forget the entries of parameters whose gradients were dropped."""
        kept = [e is None or (e if e >= 0 else ~e) not in indices for e in self.entries]
        self._accepted = sum(kept[: self._accepted])
        self.entries[:] = [e if e is None or e >= 0 else ~e for e, keep in zip(self.entries, kept, strict=True) if keep]

    @property
    def plain(self) -> bool:
        """Whether a gradient came that no ``accept`` covered."""
        return self._plain or len(self.entries) > self._accepted

    def accept(self) -> None:
        """Cover every gradient up to now."""
        self._plain = False
        self._accepted = len(self.entries)

    def close(self) -> None:
        remove_hooks(self._hooks)
        self.entries.clear()


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove and forget them."""
    for hook in hooks:
        hook.remove()
    hooks.clear()


class BackwardEnd:
    """Calls a method at the end of each backward that leaves a gradient in one of some parameters.

    The method is held weakly, since what a parameter's hook reaches is never freed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)
        self._heard = -1
        self._hooks = [handle for p in parameters for handle in _after_accumulation(p, self._arrived)]

    def _arrived(self, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._heard:  # the first gradient of this backward
            self._heard = task
            at_end_of_backward(self._call)

    def _call(self) -> None:
        if (method := self._method()) is not None:
            method()

    def close(self) -> None:
        remove_hooks(self._hooks)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Let the backward that runs end with this call, after those that it was told before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def _after_accumulation(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> list[RemovableHandle]:
    """Let ``hook`` hear of each gradient of a parameter, which may be frozen now; none where it can have none."""
    if parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex()):
        return []
    return [even_frozen(parameter, parameter.register_post_accumulate_grad_hook, hook)]


def even_frozen(parameter: nn.Parameter, register: Callable[..., RemovableHandle], hook: Any) -> RemovableHandle:
    """Register a hook, for which torch wants ``requires_grad``; it then also serves a later unfreeze."""
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = register(hook)
    parameter.requires_grad_(trainable)
    return handle


def _noting(entries: list[int | None], index: int, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
    append = entries.append

    def note(parameter: torch.Tensor) -> None:
        append(index if parameter.requires_grad and parameter.dtype is dtype else ~index)

    return note


# -- which parameters may get gradients --------------------------------------------------------------------------------

_requires_grad = operator.attrgetter("requires_grad")


class TrainableMask:
    """Compares ``requires_grad`` of every parameter with what the engine was built for.

    The idea of a mask comparison before each forward, on by default, is fairscale's (its pull request 369).
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.known = self.now()

    def now(self) -> list[bool]:
        with torch._C.DisableTorchFunctionSubclass():  # a parameter's class may watch its uses, which takes its time
            return list(map(_requires_grad, self._parameters))

    def changed(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # without calling `now`: each forward comes here
            return list(map(_requires_grad, self._parameters)) != self.known


def explain(masks: Sequence[Sequence[bool]], names: Sequence[str]) -> str:
    """The first parameter on which the ranks' masks differ."""
    for name, flags in zip(names, zip(*masks, strict=True), strict=True):
        if len(set(flags)) > 1:
            ranks = [rank for rank, trainable in enumerate(flags) if trainable]
            return f"{name} is trainable on ranks {ranks} and frozen on the others"
    return "they agree"
