"""Finding hangs: what ranks that wait tell each other of where they are, who is missing, and why the groups ended."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate, chain, repeat, takewhile, tee
from operator import methodcaller
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .environments import Place
from .packing import framed, to_bytes, to_tensor, unframed

if TYPE_CHECKING:
    from .startup import Process

logger = logging.getLogger("accel")

_TAG, _NO_TAG = (
    0xACCE1,
    0x5EED,
)  # of messages on the control group; nobody sends with the second one
_TORCH: Final = os.path.join(os.path.dirname(torch.__file__), "")
_COLLECTIVES: Final = os.path.join(_TORCH, "distributed", "")
#: By which a DTensor's collectives, and those that can be compiled, wait.
_FUNCTIONAL: Final = os.path.join(_COLLECTIVES, "_functional_collectives.py")
#: Functions of torch's in which a reducer is, or a hook of one, which have no frame.
_REDUCERS: Final = {"_engine_run_backward": "backward", "_pre_forward": "forward"}
#: accel's own files, the packages beside torch, and Python's own.
_LIBRARIES: Final = tuple(
    os.path.join(os.path.dirname(path), "")
    for path in (os.path.dirname(__file__), os.path.dirname(torch.__file__), os.__file__)
)
_MESSAGES: Final = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
_GONE: Final = "is gone without a word: it was killed, or the link to its host is cut"
_BUSY: Final = 0.02  # share of a CPU that a blocked thread does not use


# -- what a rank says of itself ---------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Report:
    """Where a rank is."""

    begun: Mapping[str, int]  # how many collectives, by group
    cpu: float  # seconds that the thread that trains has used; nan where the system does not tell
    doing: str  # what of accel's it is in that needs the others; empty where it is in nothing
    call: str  # the collective of torch's that it is in, by name
    line: str  # where in the user's program
    since: float = 0.0  # for how many seconds it has waited there

    @property
    def waits(self) -> bool:
        """Whether it is in a collective, as far as can be seen."""
        return bool(self.doing or self.call)

    def ahead_of(self, other: Report) -> bool:
        """Whether it has begun a collective that the other rank has not: there it waits for the other, if it waits."""
        if any(number > other.begun.get(group, number) for group, number in self.begun.items()):
            return True
        return (
            self.begun == other.begun and bool(self.call and other.call) and self.call != other.call
        )

    def __str__(self) -> str:
        what = f"is in {self.doing or self.call}" if self.waits else "is in no collective"
        return f"{what} ({self.line})" if self.line else what


def report(begun: Mapping[str, int], thread: int, doing: str, since: float) -> Report:
    """This rank's, seen from another thread: the one that trains pays nothing for it."""
    stack = stack_of(thread)
    cpu = float("nan")
    if stack and hasattr(time, "pthread_getcpuclockid"):
        cpu = time.clock_gettime(time.pthread_getcpuclockid(thread))
    return Report(begun, cpu, doing, _call(stack), _line(stack), since)


def stack_of(thread: int) -> list[FrameType]:
    """Where a thread is, innermost first.

    Nothing of Python's runs in between, so that the thread cannot go on: ``f_back`` of a frame that has been left has ended a
    process. Nor is garbage collected, which Python up to 3.11 may begin wherever it makes an object: a ``threading.local`` among
    it waits for the lock of the threads that the interpreter itself holds here, for ever (python/cpython#106883).
    """
    call = methodcaller("__call__")
    enabled, again = tee(iter(gc.isenabled, None))
    newest = map(methodcaller("get", thread), map(call, [sys._current_frames]))
    frames = takewhile(bool, accumulate(chain(newest, repeat("f_back")), getattr))
    restored = map(call, map((gc.disable, gc.enable).__getitem__, again))
    _, _, stack, _ = next(
        zip(enabled, map(call, [gc.disable]), map(list, [frames]), restored, strict=False)
    )
    return stack


def _call(stack: Sequence[FrameType]) -> str:
    """The function of torch's whose innermost frame this is, where that may be a collective."""
    if (
        stack
        and (reducing := _REDUCERS.get(stack[0].f_code.co_name))
        and stack[0].f_code.co_filename.startswith(_TORCH)
    ):
        return reducing
    if any(
        frame.f_code.co_filename == _FUNCTIONAL and frame.f_code.co_name == "wait_tensor"
        for frame in stack[:2]
    ):
        return "wait_tensor"
    inside = takewhile(
        lambda code: code.co_filename.startswith(_COLLECTIVES), (frame.f_code for frame in stack)
    )
    names = [code.co_name for code in inside if code.co_filename.endswith("distributed_c10d.py")]
    return names[-1] if names else ""


def _line(stack: Sequence[FrameType]) -> str:
    for frame in stack:
        path = frame.f_code.co_filename
        if not path.startswith((*_LIBRARIES, "<frozen")):
            return f"{os.path.basename(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def stuck(first: Sequence[Report], second: Sequence[Report]) -> list[int]:
    """The ranks that wait for each other in different places, so that none of them will ever go on.

    A rank that computes, sleeps or reads may still come; so may one that waits only for such ranks. ``first`` and ``second``
    are all ranks' reports, some time apart.
    """
    waiting = {
        r for r, (one, two) in enumerate(zip(first, second, strict=True)) if _is_blocked(one, two)
    }
    while free := {
        rank
        for rank in waiting
        if not any(second[rank].ahead_of(second[other]) for other in waiting)
    }:
        waiting -= free
    return sorted(waiting)


def _is_blocked(one: Report, two: Report) -> bool:
    """Whether a rank has not moved in what needs all ranks; messages between two are not counted alike on all."""
    same = (one.begun, one.doing, one.call) == (two.begun, two.doing, two.call)
    idle = two.cpu - one.cpu < _BUSY * max(two.since - one.since, 1.0)
    return two.waits and two.call not in _MESSAGES and same and idle


def explain(reports: Sequence[Report], ranks: Sequence[int]) -> str:
    """Where these ranks are and for whom they wait; those that are in the same place together."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        missing = [
            r
            for r, other in enumerate(reports)
            if reports[rank].waits and reports[rank].ahead_of(other)
        ]
        text = f"{reports[rank]}{f' and waits for rank {_listed(missing)}' if missing else ''}"
        places.setdefault(text, []).append(rank)
    return "; ".join(f"rank {_listed(found)} {text}" for text, found in places.items())


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


# -- who is where ------------------------------------------------------------------------------------------------------


@final
@dataclass(slots=True)
class _Question:
    """What this rank asked of all: when the open question went and when the next one may, the last answers and those before."""

    number: int = 0
    sent: float = 0.0  # 0 where none is open
    next: float = 0.0
    answers: list[Report] = field(default_factory=list)
    before: list[Report] = field(default_factory=list)


@final
class HangDetector:
    """Two threads beside the one that trains: one hears the rank on the left, one looks how long this rank waits.

    Messages go round the ranks on accel's own group, each to the rank on the right: why the groups were ended
    (closed connections tell only those that wait for the rank that ended them), who has left, and the question where each
    rank is, to which each adds its report. A rank asks only after it has waited for seconds, so that training costs nothing.
    Where a collective fails after few seconds the detector is quicker. ``notice`` is told why the groups end, and whether the
    ranks are in different places. Kernels of nccl tell nobody of a rank that was killed: they wait for it, while the host waits
    for them wherever it reads from its device. Then the detector tells.
    """

    def __init__(
        self, process: Process, control: dist.ProcessGroup, notice: Callable[[str, bool], None]
    ) -> None:
        self._process, self._control, self._notice = process, control, notice
        self._rank, self._world = control.rank(), control.size()
        self._thread, limit = threading.get_ident(), process.timeout.total_seconds()
        self._deaf = any(
            kind != "cpu" and name != "gloo" for kind, name in process.backends.items()
        )
        self._patience = min(5.0, limit / 10)
        self._first_warning = min(30.0, limit / 2)
        #: How ranks left that will not come any more, by rank.
        self.left: dict[int, str] = {}
        self._stopped = threading.Event()
        self._sending = threading.Lock()
        self._sent: dict[int, list[Any]] = {}
        self._asked = _Question()
        self._since = self._warned = self._heard = 0.0
        self._last: tuple[object, ...] = ()
        self._threads = [
            threading.Thread(target=self._listen, name="accel-messages", daemon=True),
            threading.Thread(target=self._observe, name="accel-hangs", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        disconnect(self._control)
        for thread in self._threads:
            thread.join(5)
        self._sent.clear()

    def tell_end(self, reason: str, mismatch: bool) -> None:
        """Say why the groups end; returns when the next rank has heard it, or a moment later."""
        self._stopped.set()
        self._send(-1, ("end", reason, mismatch), wait=True)

    def tell_leave(self, how: str) -> None:
        self._send(-2, ("left", self._rank, how), wait=True)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send(self, key: int, message: tuple[Any, ...], *, wait: bool = False) -> None:
        """To the rank on the right. Where it does not listen, waiting with a limit would close all connections."""
        right = (self._rank + 1) % self._world
        with self._sending, contextlib.suppress(RuntimeError):
            works = []
            for piece in framed(pickle.dumps(message)):
                tensor = to_tensor(piece)
                works.append((self._control.send([tensor], right, _TAG), tensor))
            for work, _ in works if wait else ():
                work.wait(timedelta(seconds=1))
            self._sent[key] = works

    def _listen(self) -> None:
        left = (self._rank - 1) % self._world

        def receive(count: int) -> bytearray:
            piece = torch.zeros(count, dtype=torch.uint8, device="cpu")
            self._control.recv([piece], left, _TAG).wait(timedelta(days=365))
            return to_bytes(piece)

        with contextlib.suppress(RuntimeError):
            while True:
                kind, *content = pickle.loads(unframed(receive))
                if kind == "end":
                    self._notice(*content)
                    return
                if kind == "left":
                    self._note_left(*content)
                else:
                    self._answer(*content)
        if not self._stopped.is_set() and left not in self.left:
            self._note_left(left, _GONE)

    def _note_left(self, rank: int, how: str) -> None:
        self.left[rank] = how
        if rank != (self._rank + 1) % self._world:
            self._send(rank, ("left", rank, how))
        if self._deaf and how == _GONE:
            self._notice(f"rank {rank} {how}", False)

    def _answer(self, origin: int, number: int, reports: dict[int, Report]) -> None:
        """Add this rank's report to a question that goes round, or take the answers of one's own."""
        if origin == self._rank:
            if number == self._asked.number:
                self._asked.answers = [reports[r] for r in range(self._world)]
                self._asked.sent = 0.0
            return
        if origin < self._rank:
            self._heard = time.monotonic()
        self._send(origin, ("where", origin, number, {**reports, self._rank: self._report()}))

    def _report(self) -> Report:
        return report(
            self._process.begun(), self._thread, self._process.doing, time.monotonic() - self._since
        )

    # -- how long this rank waits -------------------------------------------------------------------------------------

    def _observe(self) -> None:
        self._since = time.monotonic()
        while not self._stopped.wait(self._patience / 5):
            with contextlib.suppress(RuntimeError):  # a group that is being destroyed
                mine, now = self._report(), time.monotonic()
                here = (mine.begun, mine.doing, mine.call)
                if not mine.waits or here != self._last:
                    self._last, self._since, self._warned = here, now, 0.0
                    self._asked.before, self._asked.answers, self._asked.next = [], [], 0.0
                elif mine.doing and self.left and now - self._since > 2 * self._patience:
                    # Its connections may stay: they close when its process ends, which would have woken this rank.
                    who = "; ".join(f"rank {rank} {how}" for rank, how in sorted(self.left.items()))
                    self._notice(f"{who}, and rank {self._rank} {mine}", False)
                elif now - self._since > self._patience:
                    self._investigate(now)

    def _investigate(self, now: float) -> None:
        waited, ask = now - self._since, self._asked
        if not ask.sent and ask.answers:
            if ask.before and (ranks := stuck(ask.before, ask.answers)):
                self._end(ask.answers, ranks)
                return
            suspected = stuck(ask.answers, ask.answers)
            ask.next = now if suspected else now + min(3 * self._patience, waited / 4)
            ask.before, ask.answers = ask.answers, []
        self._warn(waited)
        # One rank's questions serve all: the lowest that waits asks.
        if not ask.sent and now >= ask.next and now - self._heard > 4 * self._patience:
            ask.number, ask.sent = ask.number + 1, now
            self._send(self._rank, ("where", self._rank, ask.number, {self._rank: self._report()}))

    def _end(self, reports: Sequence[Report], ranks: Sequence[int]) -> None:
        self._notice(
            f"the ranks wait for each other: {explain(reports, ranks)}; every rank must call its models and accel in the same "
            "order: look for a forward, a step or a save on one rank only (`if accel.is_main():`), for loops of different "
            "lengths, and for modules that only one rank uses",
            True,
        )

    def _warn(self, waited: float) -> None:
        if waited < max(self._first_warning, 2 * self._warned):
            return
        now, reports = time.monotonic(), self._asked.before
        silent = self._asked.sent and now - self._asked.sent > self._patience
        if now - self._heard < 4 * self._patience or not (silent or reports):
            return
        self._warned = waited
        text = f"it {self._report()}, and not all ranks answer: one hangs, or the link to it is cut"
        text = text if silent else explain(reports, range(self._world))
        logger.warning("rank %d has waited for %.0f s: %s", self._rank, waited, text)


# -- who is missing ----------------------------------------------------------------------------------------------------


def missing_ranks(
    open_store: Callable[[], distributed_c10d.Store], place: Place, wait: float
) -> list[int] | None:
    """The ranks that do not come to a store within ``wait`` seconds; this one does. None where the store is not reached.

    Gloo does not tell who is missing where a collective fails, so those that are there say so.
    """
    missing: list[int] = []
    asked = threading.Event()

    def ask() -> None:
        with contextlib.suppress(
            RuntimeError, ValueError
        ):  # ValueError where the user has ended the default group
            store = open_store()
            store.set(str(place.rank), "")
            time.sleep(wait)
            missing.extend(
                other for other in range(place.world_size) if not store.check([str(other)])
            )
            asked.set()

    # The store may be on a host that is gone: then even the attempt may never end.
    threading.Thread(target=ask, daemon=True).start()
    return missing if asked.wait(wait + 4) else None


# -- connections -------------------------------------------------------------------------------------------------------


def counts(
    own: dist.ProcessGroup | None, world: int, parts: Sequence[dist.ProcessGroup]
) -> dict[str, int]:
    """How many collectives and messages this rank has begun on each group of all ranks but ``own``, and on those ``parts``."""
    found: dict[str, int] = {}
    for group in list(distributed_c10d._world.pg_map):
        known = isinstance(group, dist.ProcessGroup) and (group.size() == world or group in parts)
        # The group of background saves is used by a thread of its own.
        if group is not own and known and group.group_desc != "accel background":
            carriers: set[Any] = {group._get_backend(device) for device in group._device_types}
            with contextlib.suppress(RuntimeError):  # not every backend counts
                found[str(group.group_name)] = sum(
                    one._get_sequence_number_for_group() for one in carriers
                )
    return found


def abort_kernels() -> None:
    """Abort the communicators of accelerators, whose kernels may wait for other ranks, in all groups.

    The kernels' output is undefined then. All are aborted together as torch does it, since the end of one group may wait for
    another's.
    """
    groups = reversed(list(distributed_c10d._world.pg_map))
    backends = [
        backend
        for group in groups
        for backend in accelerator_backends(group)
        if hasattr(backend, "abort")
    ]
    grouped = bool(backends) and hasattr(backends[0], "_group_start")
    if grouped:
        backends[0]._group_start()
    for backend in backends:
        backend.abort()
    if grouped:
        backends[0]._group_end()


def accelerator_backends(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of a group that run kernels on accelerators, such as nccl and nccl2. gloo runs none."""
    backends: list[Any] = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            backend: Any = None if device.type == "cpu" else group._get_backend(device)
            if backend is not None and backend.name() != "gloo" and backend not in backends:
                backends.append(backend)
    return backends


def disconnect(group: dist.ProcessGroup) -> None:
    """Closes the connections of a gloo group, also of one that reducers and pending work still hold.

    Aborting or destroying a group lets go of it, but it stays connected as long as anything else holds it.
    A receive that times out makes gloo close every connection of the group, which the waiting ranks notice;
    one from a rank that is gone already fails without closing the others, so all are tried.
    """
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, device="cpu")], peer, _NO_TAG).wait(
                timedelta(milliseconds=1)
            )
