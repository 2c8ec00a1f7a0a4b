"""The drift guard: check that replicated state is equal on all ranks at steps 1, 10, 100 and then every 1,000 steps.

Megatron-LM has a similar check (``--check-weight-hash-across-dp-replicas-interval``).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import RankMismatchError
from ...facts import comparable_text, differing_names
from ...handles import HiddenAttribute
from ...process import current
from ...process.control import agree
from ...trees import all_tensors
from .digest import digest, digest_values, digests

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger("accel")

_EARLY: Final = (1, 10, 100)
_INTERVAL: Final = 1000
_NEVER: Final = sys.maxsize
#: The number of names in an error, and of forwards whose inputs are digested before a check.
_MAX_NAMES: Final = 5
_MAX_FORWARDS: Final = 8
_SAME_INPUTS: Final = (
    "All %d ranks got the same inputs for %s, so every rank computes the same gradients. Pass the DataLoader to "
    "accel.setup(). Ignore this warning if it is intended."
)
_GROUPS: Final = (
    "Change param_groups on every rank. Step a scheduler with a value that all ranks share: "
    "scheduler.step(accel.all_reduce(loss, 'mean'))."
)
_WEIGHTS: Final = (
    "Load state and change weights on every rank, not only if accel.is_main(). If ranks have different kinds of devices, "
    "use drift_check=0."
)


@final
class DriftGuard:
    """A counter of an engine's steps that compares the ranks at steps 1, 10, 100 and then every ``interval`` steps.

    An interval of None means 1,000 steps, and 0 means never.
    """

    def __init__(self, engine: Engine, interval: int | None) -> None:
        self._engine = weakref.ref(engine)
        self._interval = _INTERVAL if interval is None else interval
        places = engine.replica(engine.options, engine.process)[1]
        #: Digests of the first forwards' inputs. None after two checks have compared them.
        self.inputs = FirstInputs() if self._interval and places > 1 else None
        self.restart()

    @property
    def progress(self) -> str:
        """The number of steps on this rank, as text."""
        interrupted = 0 < self.steps == self.broken
        return f"{self.steps} steps" + (
            ", the last of which was interrupted" if interrupted else ""
        )

    def restart(self) -> None:
        """Count from 0, on every rank."""
        #: Steps of the engine's optimizers (or backwards if it has none), the last step that raised, the next to check.
        self.steps = self.broken = 0
        self.next = 1 if self._interval else _NEVER

    def pause(self) -> None:
        """Skip checks until ``restart``, because ranks may make different numbers of steps."""
        self.next = _NEVER

    def stop(self) -> None:
        """Skip all checks from now on."""
        self.next, self._interval, self.inputs = _NEVER, 0, None

    def count_backward(self) -> None:
        """Count a backward as a step, for an engine without optimizers. Collective if a check is due."""
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
        self._compare_inputs(engine.label, [inputs for _, inputs in by_rank])
        if differing_names([hashes for hashes, _ in by_rank], ignore_absent=True):
            difference = _difference(agree(f"{title}: names", facts))
            raise RankMismatchError(
                f"{engine.label} is not the same on all ranks at step {self.steps}: {difference}"
            )

    def _compare_inputs(self, label: str, inputs: Sequence[int]) -> None:
        """Warn if the inputs were the same in two checks, because one batch may be the same by chance."""
        if self.inputs is None:
            return
        same = bool(inputs[0]) and len(set(inputs)) == 1
        if same and not self.inputs.were_same:
            self.inputs.were_same = True
            return
        self.inputs = None
        if same and current().place.rank == 0:
            logger.warning(_SAME_INPUTS, len(inputs), label)


@final
class FirstInputs:
    """Digests of the tensors that the first training forwards after a check get."""

    def __init__(self) -> None:
        self._digests: list[int | torch.Tensor] = []
        #: True if all ranks had the same inputs before the last check.
        self.were_same = False

    def note(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Digest a forward's arguments."""
        is_training = (
            torch.is_grad_enabled() and engine.module.training and not torch.compiler.is_compiling()
        )
        if not is_training or len(self._digests) >= _MAX_FORWARDS:
            return
        devices = ("cpu", engine.process.device.type)
        with (
            contextlib.suppress(Exception),
            torch.no_grad(),
        ):  # tensors inside torch.func.grad have no bits
            for _, t in all_tensors((args, kwargs)):
                if (
                    type(t) is torch.Tensor
                    and t.layout is torch.strided
                    and t.device.type in devices
                ):
                    self._digests.append(digest(t))

    def take(self) -> int:
        """Return one number for the digests since the last call, or 0 if there are none."""
        values, self._digests = [int(value) for value in self._digests], []
        return digest_values(values) if values else 0


# -- loads on one rank -------------------------------------------------------------------------------------------------


def watch_loads(engine: Engine) -> RemovableHandle:
    """Check on each ``load_state_dict`` of the engine's module that all ranks call it."""
    hook: RemovableHandle = engine.module.register_load_state_dict_pre_hook(_before_load)
    return hook


def _before_load(module: nn.Module, *_: object) -> None:
    # A function and not a method, because copies of the module have the hook too. They have no engine.
    engine: Engine | None = HiddenAttribute.get(module)
    if engine is not None:
        compare_load(engine, "load_state_dict() of the model")


def compare_load(engine: Engine, what: str) -> None:
    """Raise RankMismatchError if only some ranks load a state. Collective."""
    if not engine.ended:
        engine.compare(what)


# -- facts that must be equal on all ranks -----------------------------------------------------------------------------


def _facts(engine: Engine) -> dict[str, str | int]:
    """Return values as text, and digests of tensors, by name."""
    facts: dict[str, str | int] = {}
    tensors: dict[str, torch.Tensor] = {}
    groups = [
        f"{type(optimizer).__name__} ({len(optimizer.param_groups)})"
        for optimizer in engine.optimizers
    ]
    facts["optimizers and their numbers of groups"] = ", ".join(groups)
    for name, value in _group_values(engine):
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, _COMPARED):
            facts[name] = comparable_text(value)
    if engine.gradients.reduced:
        frozen = [
            name
            for name, trainable in zip(engine.names, engine.mask.now(), strict=True)
            if not trainable
        ]
        facts["frozen parameters"] = ", ".join(frozen)
    tensors |= dict(engine.holdings.replicas())
    return facts | dict(zip(tensors, digests(tensors.values()), strict=True))


def _group_values(engine: Engine) -> Iterator[tuple[str, Any]]:
    for number, optimizer in enumerate(engine.optimizers):
        which = f" (optimizer {number})" if len(engine.optimizers) > 1 else ""
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"{key} of group {index} of {type(optimizer).__name__}{which}", value


#: Other values of groups, such as functions, may have different texts on equal ranks.
_COMPARED: Final = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    type(None),
    tuple,
    list,
    dict,
)


def _difference(by_rank: Sequence[Mapping[str, str | int]]) -> str:
    """Return a text about the first fact that differs."""
    name, *others = differing_names(by_rank, ignore_absent=True)
    also = f" (also {', '.join(others[:_MAX_NAMES])})" if others else ""
    ranks_by_value: dict[str | int, list[int]] = {}
    for rank, facts in enumerate(by_rank):
        if name in facts:
            ranks_by_value.setdefault(facts[name], []).append(rank)
    first, *rest = ranks_by_value
    if isinstance(first, int):
        ranks = sorted(rank for value in rest for rank in ranks_by_value[value])
        return f"{name} on ranks {ranks} is not what it is on rank {ranks_by_value[first][0]}{also}. {_WEIGHTS}"
    described = "; ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_by_value.items())
    return f"{name}: {described}{also}. {_GROUPS}"
