"""The drift guard: what must be equal on all ranks is compared while training goes on.

Comparing replicas by a hash every so many steps is Megatron-LM's idea (``--check-weight-hash-across-dp-replicas-interval``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...data.iteration import latest
from ...errors import RankMismatchError
from ...gradients.log import remove_hooks
from ...process import current
from ...process.collectives import ORDER, ORDERS
from ...process.control import agree, agree_later
from ...process.transfer import to_host
from ...trees import all_tensors

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger("accel")

#: Of a step's time. Half of what docs/design.md promises: the message's own thread is not measured.
_SHARE: Final = 5e-4
#: Steps from the first comparison to the second, from which the costs are known.
_FIRST: Final = 16
_LEAST, _MOST = 16, 1 << 14
_NEVER: Final = sys.maxsize
_NAMED: Final = 5
#: The key of the inputs among the digests, and how many of them are noted from one comparison to the next.
_INPUTS: Final = "inputs"
_NOTED: Final = 8
_SAME: Final = (
    "%s is given the same inputs on all %d ranks, so that each computes what the others do, unless losses or random numbers "
    "are its own (actions, dropout): give the loader to accel.setup, as in model, optimizer, loader = accel.setup(model, "
    "optimizer, loader), or choose other data by accel.rank(); where it is meant, nothing is wrong"
)
#: What this rank had at a step: texts by what they say, digests of tensors by name, its place and digests of its parts.
#: The step, facts that must be equal, and digests by name of what ranks of one place have alike; "" is everywhere.
_Snapshot: TypeAlias = tuple[int, dict[str, str], dict[str, dict[str, Any]]]


@final
class DriftGuard:
    """Counts one engine's steps, and every so many compares what its ranks must have alike.

    ``every``: steps from one comparison to the next; None chooses them by what they cost, 0 means never.
    """

    def __init__(self, engine: Engine, every: int | None) -> None:
        self._engine = weakref.ref(engine)
        self._every = every
        self._kind = engine.label
        #: Steps of the engine's optimizers so far, or backwards where it has none, the last that an exception ended, the one
        #: from which on ``judge`` is to be called, and whether ``begin`` is.
        self.restart()
        self.judged = False
        #: Steps from the last comparison to the next one, once there was one.
        self.interval = every or _FIRST
        self._todo: Callable[[], None] | None = None
        self._cost = 0.0
        # Of engines whose steps undo what one rank wrote: see `watch`.
        self._names: dict[int, str] = {}
        self._uses: dict[str, _Use] = {}
        self._writes: dict[str, tuple[int, int]] = {}
        self._versions: dict[str, int] = {}
        self._hooks: list[RemovableHandle] = []
        #: What the first forwards are given, until a comparison shows that ranks have other inputs; then None.
        self._inputs: FirstInputs | None = None

    @property
    def progress(self) -> str:
        """How far this rank has come, as text."""
        return f"{self.steps} steps" + (", the last of which was broken off" if 0 < self.steps == self.broken else "")

    def count_backward(self) -> None:
        """Count one that has ended, on every rank, as a step: there is no optimizer, and the loop may update weights by hand."""
        self.steps += 1
        if self.steps >= self.due:
            self.judge()
            self.begin()

    def judge(self) -> None:
        """End the comparison that is under way; comes before a step that is due.

        RankMismatchError where the ranks differ; on every rank, which says in what.
        """
        start = time.thread_time()
        engine = self._engine()
        assert engine is not None  # it is stepping
        if 0 < self._cut == self.steps - 1:  # by name, since ranks that made that step to its end do not compare now
            agree(f"step {self.steps} of {self._kind}, after one that an exception ended", None)
        uses, self._uses = self._uses, {}
        for name, use in uses.items():
            if use.changed(engine.named[name]):
                self._wrote(name, self.steps)
        self.judged = True
        todo, self._todo = self._todo, None
        if todo is not None:
            todo()
        self._cost += time.thread_time() - start

    def begin(self) -> None:
        """Begin a comparison, if it is time for one; comes after ``judge``, when the gradients of the step are final."""
        start = time.thread_time()
        self.judged = False
        engine = self._engine()
        if self._todo is None and self.steps >= self._next and engine is not None:
            self._take()
        self.due = self._next if self._todo is None else self.steps + 1
        self._cost += time.thread_time() - start

    def pause(self) -> None:
        """Compare nothing until ``restart``: the ranks may make different numbers of steps."""
        self.due, self._todo = _NEVER, None

    def restart(self) -> None:
        """Count anew, on every rank."""
        self.steps, self.broken, self._cut, self._equal, self._begun = 0, 0, 0, 0, (0, 0.0)
        self.due = self._next = _NEVER if self._every == 0 else 1

    def break_off(self, optimizer: Optimizer) -> None:
        """Hear that an exception ended a step, maybe on each rank after other parameters: the next one compares what there is.

        Not where owners give the others what they have stepped.
        """
        self.broken, engine = self.steps, self._engine()
        if self.due != _NEVER and engine is not None and not engine.gradients.steps_part(optimizer):
            self._cut, self._next, self.due = self.steps, self.steps + 1, self.steps + 1

    def forget(self) -> None:
        """Begin anew, on every rank: what was different so far is about to be replaced."""
        engine = self._engine()
        assert engine is not None  # it is filled
        self.pause()
        self.restart()
        self._uses.clear()
        self._writes.clear()
        self._versions = {name: engine.named[name]._version for name in self._versions}

    def stop(self) -> None:
        """Compare no more. Local."""
        self.due, self._todo, self._every = _NEVER, None, 0
        self._forget_inputs()
        remove_hooks(self._hooks)
        self._uses.clear()
        self._names.clear()

    # -- one comparison -------------------------------------------------------------------------------------------

    def _take(self) -> None:
        engine = self._engine()
        assert engine is not None  # it is stepping
        facts, parts = self._facts(engine), engine.holdings.replicated_parts()
        tensors = {"": [*engine.holdings.replicas(), *_tensors_of_groups(engine.optimizers)], **parts}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            digests = {place: {name: _digest_of(name, t) for name, t in some} for place, some in tensors.items()}
        order = None if latest.kept is None or latest.kept.thread != get_ident() else latest.kept.order
        if order is not None:
            loader, first = order
            digests[f"loader {loader}"] = {ORDER: first}  # one rank alone may have looked at a batch of another
        if self._inputs is not None:
            digests[_INPUTS], self._inputs.digests = {str(n): d for n, d in enumerate(self._inputs.digests)}, []
        snapshot = self.steps, facts, digests
        steps, then = self._begun
        self._begun = (self.steps, time.perf_counter())
        pace = (self._begun[1] - then) / (self.steps - steps) if steps else 0.0
        costs, self._cost = (self._cost, pace), 0.0
        remote = [(some, n, v) for some in digests.values() for n, v in some.items() if isinstance(v, torch.Tensor)]
        if not remote:
            self._send(snapshot, costs)
            return
        # By the next step the device has them ready: waiting for them leaves it a whole step's work.
        values, copied = to_host([value for *_, value in remote])

        def send() -> None:
            copied()
            for (some, name, _), value in zip(remote, values.tolist(), strict=True):
                some[name] = value
            self._send(snapshot, costs)

        self._todo = send

    def _send(self, snapshot: _Snapshot, costs: tuple[float, float]) -> None:
        _, facts, digests = snapshot
        inputs = digest_bytes(repr(given).encode()) if (given := digests.pop(_INPUTS, None)) else 0
        compared = {place: list(some.values()) for place, some in digests.items()} | {"facts": sorted(facts.items())}
        summary = tuple((place, digest_bytes(repr(values).encode())) for place, values in compared.items())
        zeros = any(
            name.startswith(GRADIENT) and not value for some in digests.values() for name, value in some.items()
        )
        answers = agree_later(f"the drift guard of {self._kind}", (summary, inputs, zeros, *costs))
        self._todo = functools.partial(self._judge, snapshot, answers)

    def _judge(self, snapshot: _Snapshot, answers: Callable[[], list[Any]]) -> None:
        (step, *mine), told = snapshot, answers()
        self.interval = self._every or _interval([costs for _, _, _, *costs in told])
        # A gradient of zeros tells nothing: that of an adapter's first matrix, where the second one begins with zeros.
        self._next = step + min(self.interval, step if any(zeros for _, _, zeros, *_ in told) else self.interval)
        if self._cut and step <= self._cut + 1:  # once more: its optimizer's state shows in the weights of the next one
            self._next = max(step, self._cut) + 1
        self._judge_inputs([inputs for _, inputs, *_ in told])
        found = {pair for summary, *_ in told for pair in summary}  # one of each place where the ranks are equal
        if len(dict(found)) == len(found):
            self._equal = step if told else self._equal
            return
        everyone = agree(f"the drift guard of {self._kind}, comparing what differs", mine)
        since = f"at step {self._equal} they were equal" if self._equal else "they have not been found equal before"
        raise RankMismatchError(
            f"the ranks of {self._kind} have drifted apart by step {step}, {since}: {_difference(everyone)}"
        )

    # -- inputs that should differ --------------------------------------------------------------------------------

    def _judge_inputs(self, inputs: Sequence[int]) -> None:
        """Forget them if they differ; warn if they were the same twice, since one batch may be so by chance."""
        if self._inputs is None:
            return
        if len(set(inputs)) != 1 or not inputs[0]:
            self._forget_inputs()
        elif not self._inputs.suspicious:
            self._inputs.suspicious = True
        else:
            self._forget_inputs()
            if current().place.rank == 0:
                logger.warning(_SAME, self._kind, len(inputs))

    def _forget_inputs(self) -> None:
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None

    # -- what must be equal ---------------------------------------------------------------------------------------

    def _facts(self, engine: Engine) -> dict[str, str]:
        """What must be equal and is not a tensor, as text by what it says."""
        facts = {"number of optimizers": str(len(engine.optimizers))}
        for place, group in _groups_of(engine.optimizers):
            compared = {k: v for k, v in group.items() if k != "params" and isinstance(v, _COMPARED)}
            facts |= {f"{key} {place}": _plain(value) for key, value in compared.items()}
        if engine.gradients.reduced:
            frozen = [name for name, trainable in zip(engine.names, engine.mask.now(), strict=True) if not trainable]
            facts["frozen parameters"] = ", ".join(frozen)
        for name, (count, last) in sorted(self._writes.items()):
            facts[f"changes of {name} outside of steps"] = f"{count}, the last before step {last},"
        for name, before in self._versions.items():
            facts[f"changes of {name} in place"] = f"{engine.named[name]._version - before}"
        return facts

    # -- writes that a step undoes --------------------------------------------------------------------------------

    @property
    def watching(self) -> bool:
        """Whether ``read`` is to hear of every use of ``p.data``."""
        return bool(self._names)

    def watch(self, engine: Engine) -> None:
        """See in two comparisons what the first training forwards are given, where ranks read different batches.

        And count what the program writes to weights, where a step would spread or undo what one rank wrote alone. To those
        engines' weights values tell nothing later: after the step they are equal again, partly edited.
        """
        if self._every != 0 and engine.replica(engine.options, engine.process)[1] > 1:
            self._inputs = FirstInputs(engine)
        if self._every == 0 or not engine.holdings.undoes_writes:
            return
        self._names = engine.holdings.parameter_names
        if engine.holdings.divides_weights:
            self._versions = {name: p._version for name, p in engine.named.items()}
        _COUNTING.add(self)
        self._hooks = [m.register_load_state_dict_pre_hook(_loading) for m in engine.module.modules()]

    def loaded(self, optimizer: Optimizer) -> None:
        """Hear that a state was loaded into an optimizer, of which each rank may have a part."""
        engine = self._engine()
        if engine is not None and engine.holdings.undoes_writes:
            self._wrote(f"the state of {type(optimizer).__name__}", self.steps + 1)

    def read(self, tensor: torch.Tensor, alias: torch.Tensor | None) -> None:
        """Hear that reading ``tensor.data`` gives ``alias``, or that it is about to be set (None)."""
        if (name := self._names.get(id(tensor))) is not None:
            self._use(name, tensor if tensor.device.type == "cpu" else None).add(alias)

    def loading(self, module: nn.Module, prefix: str, state: Mapping[str, Any]) -> None:
        """Hear that a module's own parameters are about to be loaded."""
        for key, parameter in module._parameters.items():
            if (name := self._names.get(id(parameter))) is not None and prefix + key in state:
                self._use(name, parameter).add(None)

    def _use(self, name: str, tensor: torch.Tensor | None) -> _Use:
        """What was done to a parameter since the last step; at first the values of a tensor that is given are remembered."""
        if name not in self._uses:
            self.due = self.steps + 1
            # A part may stay as it is where others change.
            self._uses[name] = _Use(None if tensor is None or self._versions else digest_now(tensor))
        return self._uses[name]

    def _wrote(self, name: str, step: int) -> None:
        count, last = self._writes.get(name, (0, 0))
        if last != step:
            self._writes[name] = (count + 1, step)


@final
class FirstInputs:
    """Stands in the place of an engine's ``run``, and notes digests of the tensors that training forwards are given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.digests: list[int | torch.Tensor] = []
        #: Whether all ranks were given the same up to the comparison before.
        self.suspicious = False
        vars(engine)["run"] = self

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self._engine()
        assert engine is not None  # it is running
        trains = torch.is_grad_enabled() and engine.module.training and not torch.compiler.is_compiling()
        if trains and len(self.digests) < _NOTED:
            kinds = ("cpu", engine.process.device.type)
            with contextlib.suppress(Exception), torch.no_grad():  # what has no bits to read, as inside of torch.func
                for _, t in all_tensors((args, kwargs)):
                    if type(t) is torch.Tensor and t.layout is torch.strided and t.device.type in kinds:
                        self.digests.append(digest(t))
        return type(engine).run(engine, function, args, kwargs)

    def close(self) -> None:
        if (engine := self._engine()) is not None:
            vars(engine).pop("run", None)


@final
class _Use:
    """What a program may have written to a parameter since the last step."""

    def __init__(self, before: int | None) -> None:
        self._before = before
        self._written = False
        self._aliases: list[torch.Tensor] = []

    def add(self, alias: torch.Tensor | None) -> None:
        """An alias that may be written to; None for a write."""
        if alias is None or len(self._aliases) >= 8:
            self._fold()
        if alias is None:
            self._written = True
        else:
            self._aliases.append(alias)

    def changed(self, parameter: torch.Tensor) -> bool:
        """Whether something was written, and is not undone as far as that is known."""
        self._fold()
        if not self._written or self._before is None:
            return self._written
        return digest_now(parameter) != self._before

    def _fold(self) -> None:
        # An alias has a version counter of its own, which a write through it, or through a view of it, moves.
        self._written = self._written or any(not a.is_inference() and a._version for a in self._aliases)
        self._aliases.clear()


#: The guards that count writes.
_COUNTING: Final[weakref.WeakSet[DriftGuard]] = weakref.WeakSet()


def _loading(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Tells them of ``load_state_dict``. A copy of a module has it too, by its name, and none knows the copy's parameters."""
    for guard in list(_COUNTING):
        guard.loading(module, prefix, state)


def _interval(costs: Iterable[Sequence[float]]) -> int:
    """Steps to the next comparison, so that on no rank they cost more than their share; the same on all ranks."""
    worst = max((cost / pace for cost, pace in costs if pace), default=None)
    if worst is None:
        return _FIRST
    # A power of two, so that it does not follow every disturbance.
    return int(min(max(2 ** math.ceil(math.log2(max(worst / _SHARE, 1))), _LEAST), _MOST))


# -- what is compared -------------------------------------------------------------------------------------------------


def _groups_of(optimizers: Sequence[Optimizer]) -> Iterable[tuple[str, dict[str, Any]]]:
    for number, optimizer in enumerate(optimizers):
        which = f" (optimizer {number})" if len(optimizers) > 1 else ""
        for index, group in enumerate(optimizer.param_groups):
            yield f"of group {index} of {type(optimizer).__name__}{which}", group


def _tensors_of_groups(optimizers: Sequence[Optimizer]) -> Iterable[tuple[str, torch.Tensor]]:
    for place, group in _groups_of(optimizers):
        for key, value in group.items():
            for number, item in enumerate(value if isinstance(value, tuple | list) and key != "params" else (value,)):
                if isinstance(item, torch.Tensor):
                    yield f"{key}[{number}] {place}" if item is not value else f"{key} {place}", item


_TEXTS: Final = (bool, int, float, complex, str, bytes, torch.dtype, type(None))
_COMPARED: Final = (*_TEXTS, tuple, list, dict)


def _plain(value: Any) -> str:
    """Text that is the same on every rank where the value is; what has no such text is told by its class."""
    if isinstance(value, _TEXTS):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_plain(v)}' for key, v in value.items())}}}"
    return type(value).__name__


def _difference(everyone: Sequence[tuple[Mapping[str, str], Mapping[str, Mapping[str, int]]]]) -> str:
    facts, parts = zip(*everyone, strict=True)
    if differing := _differing(facts):
        values = [theirs.get(differing[0], "none") for theirs in facts]
        by_value = {value: [r for r, v in enumerate(values) if v == value] for value in dict.fromkeys(values)}
        said = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
        written = differing[0].startswith("changes of ")
        return f"{differing[0]}: {said}{_more(differing[1:])}; " + (_WRITES if written else _VALUES)
    for place in sorted({place for theirs in parts for place in theirs}):
        first, *others = (rank for rank, theirs in enumerate(parts) if place in theirs)
        if differing := _differing([parts[rank][place] for rank in (first, *others)]):
            others = [r for r in others if parts[r][place].get(differing[0]) != parts[first][place].get(differing[0])]
            where = f" ({place})" if place else ""
            advice = _GRADIENTS if differing[0].startswith(GRADIENT) else ORDERS if differing[0] == ORDER else _WEIGHTS
            return f"{differing[0]}{where} on ranks {others} is not what it is on rank {first}{_more(differing[1:])}; {advice}"
    raise AssertionError("summaries differ, and what they are of does not")


_VALUES: Final = (
    "change groups on every rank alike, and step a scheduler with a value that all ranks share (accel.all_reduce(loss, "
    '"mean") for ReduceLROnPlateau)'
)
_WRITES: Final = (
    "with this backend a rank steps its part of the weights only, so that the model is now partly the one, partly the other: "
    "load state and change weights on every rank, never under accel.is_main(), and go on from a checkpoint"
)
#: Of one that is compared, where the name of its parameter begins.
GRADIENT: Final = "the gradient of "
_GRADIENTS: Final = (
    "ranks that have parts of one layer compute one loss, of the same labels; a weight that the plan leaves whole, and that a "
    "rank uses with its part of a layer only, has a part of its gradient there: name its module in the plan too, as "
    "'replicated_with_grad_allreduce'"
)
_WEIGHTS: Final = (
    "load state and change weights on every rank, never under accel.is_main(), and step optimizers with the same values; "
    "where ranks have different kinds of devices, which round differently, use the option drift_check=0"
)


def _differing(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    return [name for name in names if len({theirs.get(name) for theirs in everyone}) > 1]


def _more(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"; also {', '.join(names[:_NAMED])}" + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


# -- digests ----------------------------------------------------------------------------------------------------------


def digest(tensor: torch.Tensor) -> int | torch.Tensor:
    """64 bits that differ where the tensor's bits do; on an accelerator a tensor, so that nothing waits for it."""
    if hasattr(tensor, "__tensor_flatten__"):  # made of others; of a DTensor this rank has a part
        inner = (
            []
            if hasattr(tensor, "full_tensor")
            else [digest(getattr(tensor, n)) for n in tensor.__tensor_flatten__()[0]]
        )
        return digest_bytes(repr([int(d) for d in inner]).encode())
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    if dense.device.type != "cpu":
        return sums(dense)
    return digest_bytes((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr())) if dense.nbytes else 0


def _digest_of(name: str, tensor: torch.Tensor) -> int | torch.Tensor:
    """``digest``; of a gradient of zeros it is 0 wherever that lies."""
    return digest(tensor) if not name.startswith(GRADIENT) or tensor.device.type != "cpu" or tensor.any() else 0


def digest_now(tensor: torch.Tensor) -> int:
    """``digest`` as a number, for which a device is waited for."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return int(digest(tensor))


def digest_bytes(data: Any) -> int:
    """64 bits that differ where the bytes do."""
    import xxhash  # when the first guard needs it

    return xxhash.xxh3_64_intdigest(data)


#: Of eight bytes both halves: a difference in the highest bit is lost when it is multiplied by a sum of two odd weights.
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_WIDTH: Final = 1024


def sums(dense: torch.Tensor) -> torch.Tensor:
    """A digest from integer sums, which any order of adding gives alike: of rows and of columns, each by weights of its own.

    One changed element always shows, and two swapped ones.
    """
    flat = dense.reshape(-1).view(_INTEGERS[dense.element_size()])
    whole = flat.numel() // _WIDTH * _WIDTH
    table, rest = flat[:whole].view(-1, _WIDTH), flat[whole:].to(torch.int64)
    rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    total = sum(
        (part * _weights(len(part), part.device, salt)).sum() for salt, part in enumerate((rows, columns, rest))
    )
    assert isinstance(total, torch.Tensor)
    return total


def _weights(length: int, device: torch.device, salt: int) -> torch.Tensor:
    """Odd numbers, mixed as by splitmix64's multiplications."""
    mixed = torch.arange(1, length + 1, dtype=torch.int64, device=device) * (0x1E3779B97F4A7C15 + 2 * salt)
    return ((mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9) | 1
