"""torch's reducer, which averages gradients once for each armed backward: what it does, and what it leaves to others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..gradients.log import GradientLog
from .base.memory import ParameterSize

# -- Compression of gradients on the wire, by torch's own communication hooks ------------------------------------------


def compress(
    ddp: DistributedDataParallel,
    name: str | None,
    group: dist.ProcessGroup | None,
    rank: int,
    entries: list[int | None],
) -> Any:
    """Let a compression reduce the buckets, which adds None to ``entries`` at the last of them; returns its state.

    None is the plain mean; ``rank`` is that of PowerSGD's approximation.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # a tenth of accel's import

    state: Any = group
    hook: Any = powerSGD_hook.powerSGD_hook
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, rank, start_powerSGD_iter=2)
    else:
        hook = getattr(default_hooks, "allreduce_hook" if name is None else f"{name}_compress_hook")

    # It holds no engine: the reducer keeps it, where no garbage collector looks.
    def noting(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        if bucket.is_last():
            entries.append(None)
        return future

    noting.__annotations__.clear()  # of which torch accepts only its own
    ddp.register_comm_hook(None, noting)
    return state


def kept(state: Any) -> list[torch.Tensor]:
    """The tensors that a compression keeps from step to step: PowerSGD's errors and its low-rank factors."""
    tables = ("error_dict", "p_memory_dict", "q_memory_dict")
    return [tensor for table in tables for tensor in getattr(state, table, {}).values()]


def predict_kept(name: str | None, rank: int, parameters: Iterable[ParameterSize]) -> int:
    """Bytes of ``kept`` for these trainable parameters."""
    if name != "powersgd":
        return 0
    total = 0
    for parameter in parameters:
        total += parameter.nbytes
        rows = parameter.shape[0] if len(parameter.shape) > 1 else 1
        columns = parameter.numel // max(rows, 1)
        factors = (rows + columns) * min(rows, columns, rank)
        # torch compresses a matrix where that halves it at least.
        if rows > 1 and 2 * factors < parameter.numel:
            total += factors * parameter.itemsize
    return total


# -- the reducer itself -----------------------------------------------------------------------------------------------


def end_without(ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter], missing: Iterable[int]) -> None:
    """Let the reducer end a reduction for which these parameters got no gradient yet, and leave them without. Collective."""
    numbers = {id(p): n for n, p in enumerate(p for p in ddp.module.parameters() if p.requires_grad)}
    reducer: Any = ddp.reducer
    absent = [parameters[i] for i in missing]
    empty = [p for p in absent if p.grad is None]

    def take(_: torch.Tensor) -> None:
        for parameter in absent:
            before = parameter.grad
            parameter.grad = torch.zeros_like(parameter) if before is None else before
            try:
                reducer._autograd_hook(numbers[id(parameter)])
            except RuntimeError as error:
                # With find_unused_parameters it may know already that no gradient will come, and then wants none.
                if "ready only once" not in str(error):
                    raise
                parameter.grad = before

    # The reducer waits for its buckets in a callback of autograd's, which only a backward has.
    start = torch.zeros((), requires_grad=True)
    end = start.clone()
    end.register_hook(take)
    torch.autograd.grad(end, start)
    for parameter in empty:
        parameter.grad = None


def finalized(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer has come to its own last act in the backward that it was armed for."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


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
