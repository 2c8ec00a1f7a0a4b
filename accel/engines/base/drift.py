"""The drift guard, which compares replicated state between ranks."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

import torch
from torch import Tensor, nn

from ...errors import RankMismatchError
from ...facts import comparable_text, first_difference
from ...gradients.watch import trainable
from ...handles import HiddenAttribute
from ...process.control import agree
from ...trees import all_tensors
from .digest import digest, digest_values, digests
from .raw_objects import Args, Kwargs

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger("accel")

_EARLY: Final = (1, 10, 100)
_INTERVAL: Final = 1000
_NEVER: Final = sys.maxsize
_SAME_INPUTS: Final = (
    "All %d ranks got the same inputs for %s, so every rank computes "
    "the same gradients. Pass the DataLoader to accel.setup(). "
    "Ignore this warning if it is intended."
)
_ADVICE: Final = (
    "Load state and change weights on every rank, not only if "
    "accel.is_main(), and step schedulers with a value that all "
    "ranks share."
)


@final
class DriftGuard:
    """Counts an engine's steps, and compares the ranks at some of them."""

    def __init__(self, engine: Engine, interval: int | None) -> None:
        self._engine = weakref.ref(engine)
        self._interval = _INTERVAL if interval is None else interval
        _, places = engine.replica(engine.options, engine.process)
        #: True until two checks have compared the inputs of training.
        self.watches_inputs = self._interval > 0 and places > 1
        #: Digests of this rank's inputs, and True if all ranks' were equal at the last check.
        self._inputs: list[int | Tensor] = []
        self._were_same = False
        self.restart()

    @property
    def progress(self) -> str:
        """The number of steps on this rank, as text."""
        text = ", the last of which was interrupted" if 0 < self.steps == self.broken else ""
        return f"{self.steps} steps{text}"

    def restart(self) -> None:
        """Count from 0, on every rank."""
        #: Optimizer steps, or backwards without an optimizer. ``broken`` is an unfinished step.
        self.steps = self.broken = 0
        self.next = 1 if self._interval else _NEVER

    def pause(self) -> None:
        """Skip checks until ``restart``. Ranks may differ in steps."""
        self.next = _NEVER

    def count(self) -> None:
        """Count a backward without an optimizer. Collective if a check is due."""
        self.steps += 1
        if self.steps >= self.next:
            self.check()

    def check(self) -> None:
        """Raise RankMismatchError if ranks differ. Collective."""
        engine = self._engine()
        assert engine is not None
        self.next = min([n for n in _EARLY if n > self.steps] + [self.steps + self._interval])
        facts = _facts(engine)
        hashes = {digest_values(name): digest_values(fact) for name, fact in facts.items()}
        inputs = 0
        if self._inputs:
            inputs = digest_values(list(map(int, self._inputs)))
        self._inputs.clear()
        title = f"the drift check of {engine.label} at step {self.steps}"
        by_rank, inputs_by_rank = zip(*agree(title, (hashes, inputs)), strict=True)
        # Names are exchanged only if a digest differs.
        if first_difference(by_rank, ignore_absent=True):
            all_facts = agree(f"{title}: names", facts)
            difference = first_difference(all_facts, ignore_absent=True)
            raise RankMismatchError(
                f"{engine.label} differs between ranks at step {self.steps}: "
                f"{difference}. {_ADVICE}"
            )
        if self.watches_inputs:
            self._judge(engine, inputs_by_rank)

    def note(self, engine: Engine, args: Args, kwargs: Kwargs) -> None:
        """Digest the inputs of the first training forward after a check."""
        trains = torch.is_grad_enabled() and engine.module.training
        if self._inputs or not trains or torch.compiler.is_compiling():
            return
        devices = ("cpu", engine.process.device.type)
        # A digest of a tensor inside torch.func.grad raises, because it has no memory.
        with contextlib.suppress(Exception), torch.no_grad():
            for _, tensor in all_tensors((args, kwargs)):
                is_dense = type(tensor) is Tensor and tensor.layout is torch.strided
                if is_dense and tensor.device.type in devices:
                    self._inputs.append(digest(tensor))

    def _judge(self, engine: Engine, inputs: Sequence[int]) -> None:
        """Warn after two checks with the same inputs."""
        # Wait for the second check, because one batch may be equal by chance.
        is_same = inputs[0] != 0 and len(set(inputs)) == 1
        if is_same and self._were_same and engine.process.place.rank == 0:
            logger.warning(_SAME_INPUTS, len(inputs), engine.label)
        self.watches_inputs = is_same and not self._were_same
        self._were_same = is_same


# -- loads on one rank -----------------------------------------------------------------------------


def before_load(module: nn.Module, *_: object) -> None:
    """Check that all ranks load a state. A hook of the module."""
    # Not a method, because copies of the module have the hook but must not keep the engine.
    engine: Engine | None = HiddenAttribute.get(module)
    if engine is not None:
        compare_load(engine, "load_state_dict() of the model")


def compare_load(engine: Engine, what: str) -> None:
    """Raise RankMismatchError if only some ranks load. Collective."""
    if engine.distributed and engine.synchronizes and not engine.ended:
        engine.compare(what)


# -- facts, equal on all ranks ---------------------------------------------------------------------

#: Other values of groups, such as functions, may have different texts on ranks that agree.
_PLAIN: Final = (bool, int, float, complex, str, bytes, torch.dtype, type(None), tuple, list, dict)


def _facts(engine: Engine) -> dict[str, str]:
    """Return values of groups and digests of tensors, by name."""
    facts: dict[str, str] = {}
    tensors = dict(engine.holdings.replicas())
    for number, optimizer in enumerate(engine.optimizers):
        number_of = f" (optimizer {number})" if len(engine.optimizers) > 1 else ""
        name = type(optimizer).__name__ + number_of
        facts[f"the number of groups of {name}"] = str(len(optimizer.param_groups))
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                fact = f"{key} of group {index} of {name}"
                if isinstance(value, Tensor):
                    tensors[fact] = value
                elif key != "params" and isinstance(value, _PLAIN):
                    facts[fact] = comparable_text(value)
    if engine.gradients.reduced:
        for name, trains in zip(engine.names, trainable(engine.parameters), strict=True):
            facts[f"requires_grad of {name}"] = str(trains)
    for name, value in zip(tensors, digests(tensors.values()), strict=True):
        facts[name] = f"{value:016x}"
    return facts
