"""Hears of gradients as autograd accumulates them: from the log an engine knows what is still local or unscaled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, final

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


# -- What the gradient log says about a reducer that averages once for each armed backward -----------------------------


@final
class Reduction:
    """Tells reduced gradients from local ones.

    A forward *arms* the reducer. The next gradient of each expected parameter then completes one reduction; whatever
    comes before, after or without it is local until something averages it. Averaging again is harmless: what is
    already equal on all ranks stays as it is.

    Args:
        log: the gradients that came.
        noted: the end of a reduction is noted in the log (as None) instead of being told by counting.
    """

    def __init__(self, log: GradientLog, noted: bool) -> None:
        self.log = log
        self.noted = noted
        self.armed = False
        #: All existing gradients are known to be final.
        self.settled = False
        self._stepped: set[int] = set()
        self._stepping: int | None = None
        self._expected: frozenset[int] = frozenset()
        self._open_since = -1
        #: Had no gradient when the reduction was completed without them: a later backward must bring one.
        self._awaited: frozenset[int] = frozenset()

    def reset(self, expected: Iterable[int]) -> None:
        """A new reducer, of these parameters."""
        self.armed = False
        self._expected, self._awaited = frozenset(expected), frozenset()

    def arm(self) -> None:
        """A synchronised forward: the next backward will be reduced, with all that was accumulated before it."""
        self.settled = False
        self._awaited = frozenset()
        if self.log.entries or self.log.pending:
            local = self.local()
            self.settled = bool(self.log.entries) and not local
            self.log.fold(pending=local)
        self.armed = True

    def opened(self, graph: bool) -> None:
        """Note a forward, and whether it made a graph."""
        self._open_since = len(self.log.entries) if graph else -1

    @property
    def graph_open(self) -> bool:
        """Whether a graph still waits for its backward, as far as is known."""
        return len(self.log.entries) == self._open_since

    def started(self) -> bool:
        """Whether the armed backward has begun."""
        return self.armed and bool(self.log.entries)

    def complete(self) -> bool:
        """Whether the armed reduction has run."""
        entries = self.log.entries
        return None in entries if self.noted else (self._awaited or self._expected).issubset(entries)

    def exact(self) -> bool:
        """Whether each expected gradient came once after the reducer was armed, and nothing else: the usual step."""
        entries = self.log.entries
        return (
            self.armed
            and not self.noted
            and len(entries) == len(self._expected)
            and self._expected.issuperset(entries)
            and bool(entries)
        )

    def local(self) -> bool:
        """Whether a gradient came that no reduction since has covered."""
        entries = self.log.entries
        if not self.armed or not entries:
            return bool(entries) or self.log.pending
        if self.noted:
            return entries[-1] is not None
        return len(entries) != len(self._expected) or not self.complete()

    def missing(self) -> list[int]:
        """The expected parameters that got no gradient."""
        return sorted((self._awaited or self._expected).difference(self.log.entries))

    def unfinished(self) -> bool:
        """Whether a reduction began that is not known to have all its gradients, of its own backward or of a later one."""
        return self.started() or bool(self._awaited)

    def completed(self) -> None:
        """The armed reduction was completed without the missing gradients: all others are final."""
        self._awaited = frozenset() if self.noted else self._expected.difference(self.log.entries)
        self.armed, self.settled = False, True
        self.log.fold(pending=False)

    def stepping(self, optimizer_id: int) -> None:
        """Note a step: the same optimizer's second one without a gradient in between steps with gradients of unknown origin."""
        if not self.log.entries and optimizer_id in self._stepped:
            self.settled = False
        self._stepped.add(optimizer_id)
        self._stepping = optimizer_id

    def changed(self) -> list[int]:
        """The parameters that were frozen, or got another dtype, between their forward and backward."""
        return [~i for i in self.log.entries if i is not None and i < 0]

    def finish(self) -> None:
        """Every gradient is final now."""
        if self.log.entries:
            self.armed = False
            self._stepped.intersection_update({self._stepping})
        self._stepping = None
        self._awaited = frozenset()
        self.log.fold(pending=False)
        self.settled = True
