"""What autograd does with an engine's parameters: which got gradients, and which may."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class GradientLog:
    """Notes each gradient as autograd accumulates it: the parameter's index, or ``~index`` where the parameter is not as it was.

    Numbers, not parameters: a parameter whose hook reaches a list that holds it would never be freed.

    Attributes:
        entries: what was noted since the last ``fold``; an engine may add None where a reduction ended.
        unreduced: gradients noted before the last ``fold`` have not been reduced since.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.entries: list[int | None] = []
        self.unreduced = False
        self._plain = False
        self._accepted = 0
        #: The optimizers that have stepped with the gradients that are there.
        self._stepped: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            self._hooks += _after_accumulation(parameter, _noting(self.entries, index, parameter.dtype))

    def fold(self, *, unreduced: bool = False, stepping: Optimizer | None = None) -> None:
        """Forget the entries; remember whether something is unreduced or came from a plain backward, and who steps with it."""
        self.unreduced = unreduced
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
        """Remove the hooks."""
        remove_hooks(self._hooks)
        self.entries.clear()


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove and forget them."""
    for hook in hooks:
        hook.remove()
    hooks.clear()


class BackwardEnd:
    """Calls a method at the end of each backward that leaves a gradient in one of some parameters.

    Args:
        parameters: these.
        method: is held weakly, since what a parameter's hook reaches is never freed.
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
        """Remove the hooks."""
        remove_hooks(self._hooks)


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


# -- which parameters may get gradients --------------------------------------------------------------------------------

_requires_grad = operator.attrgetter("requires_grad")


class TrainableMask:
    """Compares ``requires_grad`` of every parameter with the mask that the engine was built for.

    The idea of a mask comparison before each forward, on by default, is fairscale's (its pull request 369).
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.known = self.now()

    def now(self) -> list[bool]:
        """The mask as it is."""
        with torch._C.DisableTorchFunctionSubclass():  # a parameter's class may watch its uses, which takes its time
            return list(map(_requires_grad, self._parameters))

    def changed(self) -> bool:
        """Whether it differs from what the engine knows."""
        return self.now() != self.known


def explain(masks: Sequence[Sequence[bool]], names: Sequence[str]) -> str:
    """The first parameter on which the ranks' masks differ."""
    for name, flags in zip(names, zip(*masks, strict=True), strict=True):
        if len(set(flags)) > 1:
            ranks = [rank for rank, trainable in enumerate(flags) if trainable]
            return f"{name} is trainable on ranks {ranks} and frozen on the others"
    return "they agree"


# -- what the gradient log says about a reducer that averages once for each armed backward ---------------------------


@final
class Reduction:
    """Tells reduced gradients from local ones.

    A forward *arms* the reducer. The next gradient of each expected parameter then completes one reduction; whatever
    comes before, after or without it is local until something averages it. Averaging again is harmless: what is
    already equal on all ranks stays as it is.
    """

    def __init__(self, log: GradientLog, noted: bool) -> None:
        self.log = log
        #: The end of a reduction is noted in the log (as None) instead of being told by counting.
        self.noted = noted
        self.armed = False
        #: All existing gradients are known to be final.
        self.settled = False
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
        if self.log.entries or self.log.unreduced:
            local = self.local()
            self.settled = bool(self.log.entries) and not local
            self.log.fold(unreduced=local)
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
            return bool(entries) or self.log.unreduced
        if self.noted:
            return entries[-1] is not None
        return len(entries) != len(self._expected) or not self.complete()

    def missing(self) -> list[int]:
        """The expected parameters that got no gradient."""
        return sorted((self._awaited or self._expected).difference(self.log.entries))

    def unfinished(self) -> bool:
        """Whether a reduction began that is not known to have all its gradients, of its own backward or of a later one."""
        return self.started() or bool(self._awaited)

    def ended_without(self) -> None:
        """The armed reduction was completed without the missing gradients: all others are final."""
        self._awaited = frozenset() if self.noted else self._expected.difference(self.log.entries)
        self.armed, self.settled = False, True
        self.log.fold()

    def changed(self) -> list[int]:
        """The parameters that were frozen, or got another dtype, between their forward and backward."""
        return [~i for i in self.log.entries if i is not None and i < 0]

    def finish(self, stepping: Optimizer | None = None) -> None:
        """Every gradient is final now, and an optimizer may be about to step with them."""
        self.armed = self.armed and not self.log.entries
        self._awaited = frozenset()
        self.log.fold(stepping=stepping)
        self.settled = True
