"""What torch's reducer has reduced, and what came without it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...gradients.log import GradientLog

#: Parameters and their gradients, with the numbers of writes to these.
_Look: TypeAlias = tuple[Sequence[nn.Parameter], list[tuple[torch.Tensor | None, int]]]
_NOTHING: Final[_Look] = ((), [])
#: Where the reducer says which parameters it waits for, by their numbers among its own.
_MISSING: Final = re.compile(r"indices which did not receive grad for rank \d+: ([\d ]+)")


@final
class Reduction:
    """Tells reduced gradients from local ones: by the reducer's own account, and by what a backward leaves in ``p.grad``.

    A forward *arms* the reducer. The next backward that reaches its parameters brings each of them one gradient, and then the
    reducer ends; what any other backward brings is local until something averages it. Averaging again is harmless: what is
    already equal on all ranks stays as it is. Nothing runs for a single gradient: a backward of an armed reducer is
    judged by what that says and by one parameter, any other by all parameters before and after it.

    Args:
        parameters: all of the module.
        log: gets an entry for each backward that brought something.
        unused: parameters may go without a gradient, so that all of them are looked at after a reduction.
        late: is given the parameters that a reduction waits for when another backward begins: ends it without them, or drops it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        log: GradientLog,
        unused: bool,
        late: Callable[[list[int]], None],
    ) -> None:
        self._parameters = parameters
        self.log = log
        self._unused = unused
        self._late = late
        #: All existing gradients are known to be final; some came that no reduction since has covered.
        self.settled = self.local = False
        #: A backward has brought gradients without the reducer, which counts these parameters as used.
        self.passed = False
        self._graph_since = -1
        #: The backwards that run; what is watched in them, and its gradients before.
        self.running: set[object] = set()
        self._before = _NOTHING
        #: Of one that may be all of an armed reduction: whether there is one, a parameter's gradient, and its writes before.
        self._usual = False
        self._first: tuple[torch.Tensor | None, int] = (None, 0)
        self.reset(None, ())

    def reset(self, reducer: Any, expected: Sequence[int]) -> None:
        """Use a new reducer, if any, of these parameters."""
        self._reducer, self._expected = reducer, expected
        self._trained = [self._parameters[i] for i in expected]
        #: Parameters that the reducer doesn't know: frozen, thawed since, or ignored by the model's own choice.
        self._dtype = self._trained[0].dtype if self._trained else None
        known = set(expected)
        self._others = [p for i, p in enumerate(self._parameters) if i not in known]
        #: The next backward will be reduced; one has begun to be, and did not come to its end.
        self.armed = self.unfinished = False
        #: Had no gradient when the reduction was ended without them: a later backward must bring one.
        self.awaited: set[int] = set()

    def release(self) -> None:
        self._reducer = None

    def forward(self, graph: bool, armed: bool) -> None:
        """There was one; whether it made a graph, and the next backward will be reduced, with all that came before it."""
        log = self.log
        # model.double() ends the reducer's hooks. Gradients are local then, until the step averages them.
        if armed and self._trained[0].dtype is self._dtype:
            if self.running:
                self.look()
            self.settled = bool(log.entries) and not self.local
            if log.entries:
                log.fold()
            self.armed = True
            if self._unused or self.awaited or self.running:
                self.awaited.clear()
                self._remember()
        self._graph_since = len(log.entries) if graph else -1

    @property
    def graph_open(self) -> bool:
        """Whether a graph still waits for its backward, as far as is known."""
        return len(self.log.entries) == self._graph_since

    # -- backwards ------------------------------------------------------------------------------------------------

    def begin(self, run: object) -> None:
        """A backward begins, maybe inside of another one."""
        running = self.running
        if not running:
            if self.unfinished:
                self._late(self.missing())
            if self.armed and not (self._unused or self.unfinished):
                grad = self._trained[0].grad
                self._usual, self._first = True, (grad, 0 if grad is None else grad._version)
        running.add(run)
        if not (self._usual or self._before[1]):
            self._remember()

    def end(self, run: object) -> None:
        """It has ended, well or not."""
        running = self.running
        running.discard(run)
        if self._usual and not running and self._reduced():
            self._usual, self._first = False, (None, 0)
            self._end_reduction()
            self.log.entries.append(None)
        elif self.armed or not running:
            self.look()
            if self.running:
                self._remember()
            else:
                self._before = _NOTHING

    def _reduced(self) -> bool:
        """True if the reducer has reduced all gradients of the backward."""
        grad, (before, writes) = self._trained[0].grad, self._first
        if grad is None or (grad is before and grad._version == writes):
            return False
        return self.armed and not self._complaint()

    def look(self) -> None:
        """Take in what the backward that runs has brought by now."""
        if self._usual:
            self._usual, self._before = False, (self._trained[:1], [self._first])
        watched, before_it = self._before
        if not before_it:
            return
        pairs = enumerate(zip(_gradients(watched), before_it, strict=True))
        came = [i for i, (now, before) in pairs if now[0] is not before[0] or now[1] != before[1]]
        known = self.unfinished
        if self.armed:
            self.unfinished = bool(self._complaint())
            if came and not self.unfinished:
                self._end_reduction()
        elif came:
            self.local = self.passed = True
            self.awaited.difference_update(came)
        if came or self.unfinished is not known:
            self.log.entries.append(None)

    def _end_reduction(self) -> None:
        self.armed, self.local = False, any(p.grad is not None for p in self._others)

    def _remember(self) -> None:
        watched: Sequence[nn.Parameter] = self._parameters if self.running else ()
        if self.running and self.armed:
            watched = self._trained if self._unused else self._trained[:1]
        self._before = watched, _gradients(watched)

    def _complaint(self) -> str:
        """What the reducer says where it has begun, and not come to its own last act."""
        reducer = self._reducer
        try:
            if reducer is not None:
                reducer._check_reducer_finalized()
        except RuntimeError as error:
            return str(error)
        return ""

    # -- what is known --------------------------------------------------------------------------------------------

    def missing(self) -> list[int]:
        """The expected parameters that got no gradient."""
        found = _MISSING.search(self._complaint())
        return [self._expected[int(number)] for number in found[1].split()] if found else sorted(self.awaited)

    def finish(self, stepping: Optimizer | None = None) -> None:
        """Every gradient is final now, and an optimizer may be about to step with them."""
        self.settled, self.local = True, False
        self.awaited.clear()
        self.log.fold(stepping=stepping)
        if self.running:
            self._remember()

    def end_without(self, missing: Sequence[int]) -> None:
        """Let the reducer end a reduction for which these got no gradient yet, and leave them without. Collective."""
        absent = [(self._expected.index(i), self._parameters[i]) for i in missing]
        empty = [p for _, p in absent if p.grad is None]

        def take(_: torch.Tensor) -> None:
            for number, parameter in absent:
                before = parameter.grad
                parameter.grad = torch.zeros_like(parameter) if before is None else before
                try:
                    self._reducer._autograd_hook(number)
                except RuntimeError as error:
                    # With find_unused_parameters it may know already that no gradient will come, and then wants none.
                    if "ready only once" not in str(error):
                        raise
                    parameter.grad = before

        # The reducer waits for its buckets in a callback of autograd's, which only a backward has.
        start = torch.zeros((), requires_grad=True, device="cpu")
        end = start.clone()
        end.register_hook(take)
        torch.autograd.grad(end, start)
        for parameter in empty:
            parameter.grad = None
        self._end_reduction()
        self.unfinished = False
        self.finish()
        self.awaited.update(() if self._unused else missing)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[tuple[torch.Tensor | None, int]]:
    """The gradients, which torch either replaces or, where it adds to them in place, counts up."""
    with torch._C.DisableTorchFunctionSubclass():  # a parameter's class may watch its uses
        return [(grad, 0 if grad is None else grad._version) for grad in [p.grad for p in parameters]]
