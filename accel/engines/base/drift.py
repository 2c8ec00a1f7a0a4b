"""The drift guard: compare what must be equal on all ranks at steps 1, 10, 100 and then every 1,000.

Comparing replicas by a hash every so many steps is Megatron-LM's idea (``--check-weight-hash-across-dp-replicas-interval``).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...errors import RankMismatchError
from ...facts import comparable_text, differing_names
from ...process import current
from ...process.control import agree
from ...trees import all_tensors
from .digest import digest, digest_bytes, digests

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger("accel")

_EARLY: Final = (1, 10, 100)
_INTERVAL: Final = 1000
_NEVER: Final = sys.maxsize
#: How many names an error gives, and how many forwards' inputs are noted from one check to the next.
_NAMED: Final = 5
_NOTED: Final = 8
_SAME_INPUTS: Final = (
    "%s is given the same inputs on all %d ranks, so every rank computes the same gradients. Pass the loader to accel.setup, or "
    "choose different data by accel.rank(). If you mean it, ignore this warning."
)
_GROUPS: Final = (
    "Change groups on every rank, and step a scheduler with a value that all ranks share: "
    "scheduler.step(accel.all_reduce(loss, 'mean'))."
)
_WEIGHTS: Final = (
    "Load state and change weights on every rank, never under accel.is_main(). If ranks have different kinds of devices, "
    "which round differently, use drift_check=0."
)


@final
class DriftGuard:
    """Counts one engine's steps, and compares what its ranks replicate at steps 1, 10, 100 and then every ``interval``.

    An interval of None is 1,000, and 0 is never.
    """

    def __init__(self, engine: Engine, interval: int | None) -> None:
        self._engine = weakref.ref(engine)
        self._label = engine.label
        self._interval = _INTERVAL if interval is None else interval or _NEVER
        reads_other_batches = engine.replica(engine.options, engine.process)[1] > 1
        #: The inputs of the first forwards, until two checks have compared them.
        self.inputs = FirstInputs() if interval != 0 and reads_other_batches else None
        self.restart()

    @property
    def progress(self) -> str:
        """Return how far this rank has come, as text."""
        return f"{self.steps} steps" + (", the last of which was broken off" if 0 < self.steps == self.broken else "")

    def restart(self) -> None:
        """Count from 0, on every rank."""
        #: Steps of the engine's optimizers, or backwards if it has none; the last step that raised; and the next to check.
        self.steps = self.broken = 0
        self.next = _NEVER if self._interval == _NEVER else 1

    def pause(self) -> None:
        """Check nothing until ``restart``, because ranks may make different numbers of steps."""
        self.next = _NEVER

    def stop(self) -> None:
        """Check nothing any more. Local."""
        self.next, self._interval, self.inputs = _NEVER, _NEVER, None

    def count_backward(self) -> None:
        """Count a backward as a step, for an engine without optimizers whose loop updates weights by hand."""
        self.steps += 1
        if self.steps >= self.next:
            self.check()

    def check(self) -> None:
        """Compare the ranks. Collective.

        Raises:
            RankMismatchError: on every rank, if the ranks differ.
        """
        engine = self._engine()
        assert engine is not None  # it is stepping
        later = self.steps + self._interval
        self.next = min([later, *(step for step in _EARLY if step > self.steps)])
        facts = _facts(engine)
        tensors = {"": [*engine.holdings.replicas(), *_tensors_of_groups(engine.optimizers)]}
        tensors |= {place: list(named) for place, named in engine.holdings.replicated_parts().items()}
        values = {place: digests([tensor for _, tensor in named]) for place, named in tensors.items()}
        compared: dict[str, list[Any]] = {**values, "facts": sorted(facts.items())}
        summary = [(place, digest_bytes(repr(each).encode())) for place, each in compared.items()]
        inputs = self.inputs.take() if self.inputs is not None else 0
        everyone = agree(f"the drift check of {self._label} at step {self.steps}", (summary, inputs))
        self._judge_inputs([theirs for _, theirs in everyone])
        different = {pair for theirs, _ in everyone for pair in theirs}
        if len(dict(different)) < len(different):
            # Names are exchanged only now.
            names = {place: [name for name, _ in named] for place, named in tensors.items()}
            by_name = {place: dict(zip(names[place], values[place], strict=True)) for place in tensors}
            details = agree(f"what differs in {self._label}", (facts, by_name))
            raise RankMismatchError(
                f"{self._label} is not the same on all ranks at step {self.steps}: {_difference(details)}"
            )

    def _judge_inputs(self, inputs: Sequence[int]) -> None:
        """Warn if the inputs were the same in two checks, since one batch may be the same by chance."""
        if self.inputs is None:
            return
        if len(set(inputs)) != 1 or not inputs[0]:
            self.inputs = None
        elif not self.inputs.suspicious:
            self.inputs.suspicious = True
        else:
            self.inputs = None
            if current().place.rank == 0:
                logger.warning(_SAME_INPUTS, self._label, len(inputs))


@final
class FirstInputs:
    """Digests of the tensors that the first training forwards after a check are given."""

    def __init__(self) -> None:
        self._digests: list[int | torch.Tensor] = []
        #: True if all ranks were given the same before the last check.
        self.suspicious = False

    def note(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take digests of a forward's arguments."""
        trains = torch.is_grad_enabled() and engine.module.training and not torch.compiler.is_compiling()
        if not trains or len(self._digests) >= _NOTED:
            return
        kinds = ("cpu", engine.process.device.type)
        with contextlib.suppress(Exception), torch.no_grad():  # tensors inside of torch.func have no bits
            for _, t in all_tensors((args, kwargs)):
                if type(t) is torch.Tensor and t.layout is torch.strided and t.device.type in kinds:
                    self._digests.append(digest(t))

    def take(self) -> int:
        """Return one number for the digests so far, or 0 if there are none, and forget them."""
        values, self._digests = [int(value) for value in self._digests], []
        return digest_bytes(repr(values).encode()) if values else 0


# -- loads on one rank -------------------------------------------------------------------------------------------------

_watched: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()


def watch_loads(engine: Engine) -> RemovableHandle:
    """Compare over the ranks that each of them calls ``load_state_dict`` of the engine's module."""
    _watched.add(engine)
    hook: RemovableHandle = engine.module.register_load_state_dict_pre_hook(_loading)
    return hook


def _loading(module: nn.Module, *_: object) -> None:
    # A function of this file, and no method: copies and pickles of the module have the hook too, and no engine.
    for engine in list(_watched):
        if engine.module is module:
            compare_load(engine, "load_state_dict() of the model")


def compare_load(engine: Engine, what: str) -> None:
    """Raise RankMismatchError if only some ranks load a state. Collective."""
    if not engine.ended:
        engine.compare(what)


# -- what is compared -------------------------------------------------------------------------------------------------


def _facts(engine: Engine) -> dict[str, str]:
    """Return what must be equal and is not a tensor, as text by name."""
    facts = {"number of optimizers": str(len(engine.optimizers))}
    for place, group in _groups_of(engine.optimizers):
        compared = {k: v for k, v in group.items() if k != "params" and isinstance(v, _COMPARED)}
        facts |= {f"{key} {place}": comparable_text(value) for key, value in compared.items()}
    if engine.gradients.reduced:
        frozen = [name for name, trainable in zip(engine.names, engine.mask.now(), strict=True) if not trainable]
        facts["frozen parameters"] = ", ".join(frozen)
    return facts


def _groups_of(optimizers: Sequence[Optimizer]) -> Iterable[tuple[str, dict[str, Any]]]:
    for number, optimizer in enumerate(optimizers):
        which = f" (optimizer {number})" if len(optimizers) > 1 else ""
        for index, group in enumerate(optimizer.param_groups):
            yield f"of group {index} of {type(optimizer).__name__}{which}", group


def _tensors_of_groups(optimizers: Sequence[Optimizer]) -> Iterable[tuple[str, torch.Tensor]]:
    for place, group in _groups_of(optimizers):
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                yield f"{key} {place}", value


#: Other values of groups, such as functions, may have different texts on equal ranks.
_COMPARED: Final = (bool, int, float, complex, str, bytes, torch.dtype, type(None), tuple, list, dict)


def _difference(everyone: Sequence[tuple[Mapping[str, str], Mapping[str, Mapping[str, int]]]]) -> str:
    facts, by_name = zip(*everyone, strict=True)
    if differing := differing_names(facts):
        values = [theirs.get(differing[0], "none") for theirs in facts]
        by_value = {value: [r for r, v in enumerate(values) if v == value] for value in dict.fromkeys(values)}
        described = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
        return f"{differing[0]}: {described}{_more(differing[1:])}. {_GROUPS}"
    for place in sorted({place for theirs in by_name for place in theirs}):
        digests_by_rank = {rank: theirs[place] for rank, theirs in enumerate(by_name) if place in theirs}
        if differing := differing_names(list(digests_by_rank.values())):
            name, first = differing[0], min(digests_by_rank)
            expected = digests_by_rank[first].get(name)
            others = [rank for rank, theirs in digests_by_rank.items() if theirs.get(name) != expected]
            where = f" ({place})" if place else ""
            return (
                f"{name}{where} on ranks {others} is not what it is on rank {first}{_more(differing[1:])}. {_WEIGHTS}"
            )
    raise AssertionError


def _more(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"; also {', '.join(names[:_NAMED])}" + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
