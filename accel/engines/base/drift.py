"""The drift guard: replicated state is compared at steps 1, 10, 100 and then every 1,000 steps.

Megatron-LM has a similar check (``--check-weight-hash-across-dp-replicas-interval``).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn

from ...errors import RankMismatchError
from ...facts import comparable_text, first_difference
from ...gradients.watch import trainable
from ...handles import HiddenAttribute
from ...process.control import agree
from ...trees import all_tensors
from .digest import digest, digest_values, digests

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger("accel")

_EARLY: Final = (1, 10, 100)
_INTERVAL: Final = 1000
_NEVER: Final = sys.maxsize
_SAME_INPUTS: Final = (
    "All %d ranks got the same inputs for %s, so every rank computes the same gradients. Pass the "
    "DataLoader to accel.setup(). Ignore this warning if it is intended."
)
_ADVICE: Final = (
    "Load state and change weights on every rank, not only if accel.is_main(), and step schedulers "
    "with a value that all ranks share."
)


@final
class DriftGuard:
    """A counter of an engine's steps, which compares the ranks at some of them.

    An interval of None means 1,000 steps, and 0 means never.
    """

    def __init__(self, engine: Engine, interval: int | None) -> None:
        self._engine = weakref.ref(engine)
        self._interval = _INTERVAL if interval is None else interval
        places = engine.replica(engine.options, engine.process)[1]
        #: The inputs of training. None after two checks have compared them.
        self.inputs = FirstInputs() if self._interval and places > 1 else None
        self.restart()

    @property
    def progress(self) -> str:
        """The number of steps on this rank, as text."""
        is_broken = 0 < self.steps == self.broken
        return f"{self.steps} steps" + (", the last of which was interrupted" if is_broken else "")

    def restart(self) -> None:
        """Count from 0, on every rank."""
        #: Steps of all optimizers, or backwards without an optimizer, and the last that raised.
        self.steps = self.broken = 0
        self.next = 1 if self._interval else _NEVER

    def pause(self) -> None:
        """Skip checks until ``restart``, if ranks may make different numbers of steps."""
        self.next = _NEVER

    def count_backward(self) -> None:
        """Count a backward of an engine without optimizers. Collective if a check is due."""
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
        self.next = min([n for n in _EARLY if n > self.steps] + [self.steps + self._interval])
        facts = _facts(engine)
        # Names are exchanged only if a digest differs.
        hashes = {digest_values(name): digest_values(fact) for name, fact in facts.items()}
        inputs = 0 if self.inputs is None else self.inputs.take()
        title = f"the drift check of {engine.label} at step {self.steps}"
        by_rank = agree(title, (hashes, inputs))
        if first_difference([hashes for hashes, _ in by_rank], ignore_absent=True):
            difference = first_difference(agree(f"{title}: names", facts), ignore_absent=True)
            where = f"{engine.label} differs between ranks at step {self.steps}"
            raise RankMismatchError(f"{where}: {difference}. {_ADVICE}")
        if self.inputs is not None:
            self._judge_inputs(engine, [inputs for _, inputs in by_rank])

    def _judge_inputs(self, engine: Engine, inputs: Sequence[int]) -> None:
        """Warn if two checks found the same inputs, because one batch may be the same by chance."""
        assert self.inputs is not None
        is_same = inputs[0] != 0 and len(set(inputs)) == 1
        if is_same and not self.inputs.were_same:
            self.inputs.were_same = True
            return
        self.inputs = None
        if is_same and engine.process.place.rank == 0:
            logger.warning(_SAME_INPUTS, len(inputs), engine.label)


@final
class FirstInputs:
    """A digest of the inputs of the first training forward after a check."""

    def __init__(self) -> None:
        self._digests: list[int | torch.Tensor] = []
        #: True if all ranks had the same inputs before the last check.
        self.were_same = False

    def note(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Digest a forward's arguments."""
        trains = torch.is_grad_enabled() and engine.module.training
        if self._digests or not trains or torch.compiler.is_compiling():
            return
        devices = ("cpu", engine.process.device.type)
        # Tensors inside torch.func.grad have no bits.
        with contextlib.suppress(Exception), torch.no_grad():
            for _, tensor in all_tensors((args, kwargs)):
                is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided
                if is_dense and tensor.device.type in devices:
                    self._digests.append(digest(tensor))

    def take(self) -> int:
        """Return one number for the digests since the last call, or 0 if there are none."""
        values, self._digests = [int(value) for value in self._digests], []
        return digest_values(values) if values else 0


# -- loads on one rank -----------------------------------------------------------------------------


def before_load(module: nn.Module, *_: object) -> None:
    """Check in ``load_state_dict`` that all ranks call it. A hook of the engine's module."""
    # A function and not a method, because copies of the module have the hook, but no engine.
    engine: Engine | None = HiddenAttribute.get(module)
    if engine is not None:
        compare_load(engine, "load_state_dict() of the model")


def compare_load(engine: Engine, what: str) -> None:
    """Raise RankMismatchError if only some ranks load a state. Collective."""
    if engine.distributed and engine.synchronizes and not engine.ended:
        engine.compare(what)


# -- facts that must be equal on all ranks ---------------------------------------------------------

#: Other values of groups, such as functions, may have different texts on equal ranks.
_PLAIN: Final = (bool, int, float, complex, str, bytes, torch.dtype, type(None), tuple, list, dict)


def _facts(engine: Engine) -> dict[str, str]:
    """Return values of groups, and digests of tensors, as text by name."""
    facts: dict[str, str] = {}
    tensors = dict(engine.holdings.replicas())
    for number, optimizer in enumerate(engine.optimizers):
        number_of = f" (optimizer {number})" if len(engine.optimizers) > 1 else ""
        name = type(optimizer).__name__ + number_of
        facts[f"the number of groups of {name}"] = str(len(optimizer.param_groups))
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                fact = f"{key} of group {index} of {name}"
                if isinstance(value, torch.Tensor):
                    tensors[fact] = value
                elif key != "params" and isinstance(value, _PLAIN):
                    facts[fact] = comparable_text(value)
    if engine.gradients.reduced:
        pairs = zip(engine.names, trainable(engine.parameters), strict=True)
        facts["frozen parameters"] = ", ".join(name for name, trains in pairs if not trains)
    for name, value in zip(tensors, digests(tensors.values()), strict=True):
        facts[name] = f"{value:016x}"
    return facts
