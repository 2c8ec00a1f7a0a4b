"""The watchdog thread of each rank: it says which ranks wait for which, and ends groups that are stuck.

The watchdogs meet in the store of the job. Every second each looks at the counter ``alarm``. Nobody
raises it while the program trains. A rank raises it

- to tell why it ended the process groups (key ``ended``), so that all other ranks end theirs,
- to tell that it leaves (key ``left``),
- to ask all ranks for a report, after it has waited in a collective for some seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import pickle
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .launchers import Place

if TYPE_CHECKING:
    from .startup import Process

logger = logging.getLogger("accel")

_INTERVAL: Final = 1.0  # seconds between two looks at the store
_UNUSED_TAG: Final = 0x5EED  # nobody sends a message with this tag
_BUSY: Final = 0.05  # share of a CPU. A process that is blocked in a collective uses less

_TORCH: Final = os.path.join(os.path.dirname(torch.__file__), "")
# Files of libraries: accel, the packages beside torch, and Python itself.
_LIBRARIES: Final = tuple(
    os.path.join(os.path.dirname(path), "")
    for path in (os.path.dirname(__file__), os.path.dirname(torch.__file__), os.__file__)
)
_POINT_TO_POINT: Final = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_FRAME: Final = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


# -- where a rank is -------------------------------------------------------------------------------


class _Frame(NamedTuple):
    path: str
    line: str
    function: str


@final
@dataclass(frozen=True, slots=True)
class Report:
    """Where a rank is.

    Attributes:
        place: the accel call or torch collective in which it waits. Empty outside of collectives.
        line: the line of the user's program.
        rounds: how many messages of accel it has exchanged with all ranks.
        cpu: the CPU seconds that its process has used.
        time: when the report was made, in seconds of this rank's clock.
    """

    place: str
    line: str
    rounds: int = 0
    cpu: float = 0.0
    time: float = 0.0

    def is_stuck_since(self, earlier: Report) -> bool:
        """True if the rank waits in a collective and hasn't moved since the earlier report."""
        moved = (self.place, self.rounds) != (earlier.place, earlier.rounds)
        busy = self.cpu - earlier.cpu > _BUSY * (self.time - earlier.time)
        return bool(self.place) and self.place not in _POINT_TO_POINT and not moved and not busy

    def __str__(self) -> str:
        text = f"is in {self.place}" if self.place else "is in no collective"
        return f"{text} ({self.line})" if self.line else text


def _stack_of(thread: int) -> list[_Frame]:
    """Return a thread's frames, innermost first.

    faulthandler writes them without running Python code, so that the thread can't go on meanwhile.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        for section in re.split(r"^(?:Current thread|Thread) ", file.read(), flags=re.MULTILINE):
            if section.startswith(f"0x{thread:016x}"):
                return [_Frame(*frame) for frame in _FRAME.findall(section)]
    return []


def _collective_of(stack: list[_Frame]) -> str:
    """Return the name of the torch collective that a thread is in, or an empty string."""
    if not stack or not stack[0].path.startswith(_TORCH):
        return ""
    # The hooks of a reducer have no frames, so these functions of torch are the innermost ones.
    reducing = {"_engine_run_backward": "backward", "_pre_forward": "forward"}
    if stack[0].function in reducing:
        return reducing[stack[0].function]
    name = ""
    for frame in stack:
        if not frame.path.startswith(os.path.join(_TORCH, "distributed", "")):
            break
        # DTensor waits for its collectives in wait_tensor.
        if frame.path.endswith("distributed_c10d.py") or frame.function == "wait_tensor":
            name = frame.function
    return name


def _line_of(stack: list[_Frame]) -> str:
    """Return the innermost line of the user's program."""
    for frame in stack:
        if not frame.path.startswith((*_LIBRARIES, "<frozen")):
            return f"{os.path.basename(frame.path)}:{frame.line} in {frame.function}"
    return ""


def explain(reports: Mapping[int, Report]) -> str:
    """Describe where the ranks are. Ranks in the same place share a sentence."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, report in reports.items():
        ranks_by_text.setdefault(str(report), []).append(rank)
    return "; ".join(f"rank {_listed(ranks)} {text}" for text, ranks in ranks_by_text.items())


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def are_stuck(first: Mapping[int, Report], second: Mapping[int, Report]) -> bool:
    """True if every rank waits in a collective, but not all in the same place.

    A rank that computes, sleeps or reads data may still come to the others' collective.

    Args:
        first, second: the ranks' reports at two times.
    """
    waiting = all(report.is_stuck_since(first[rank]) for rank, report in second.items())
    return waiting and len({report.place for report in second.values()}) > 1


# -- the thread ------------------------------------------------------------------------------------


@final
class Watchdog:
    """A thread beside the thread that trains.

    Attributes:
        left: how ranks have left that won't join any more collectives, by rank.
        patience: the seconds in a collective after which a rank asks the others where they are.
    """

    def __init__(self, process: Process, notice: Callable[[str, bool], None]) -> None:
        self.left: dict[int, str] = {}
        self.patience = min(10.0, process.timeout.total_seconds() / 5)
        self.interval = _INTERVAL
        self._process = process
        self._rank, self._world = process.place.rank, process.place.world_size
        self._notice = notice
        self._trainer = threading.get_ident()
        # A store does one thing at a time, so this thread needs its own connection.
        self._store: Any = process.store("watchdog", own_connection=True)
        self._alarm = 0
        self._asked = 0.0  # when a rank, this one or a different one, has asked last
        self._last = Report("", "", cpu=time.process_time(), time=time.monotonic())
        self._since = time.monotonic()
        self._logged = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accel-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5)

    def is_alive(self) -> bool:
        """True while the thread hears the other ranks."""
        return self._thread.is_alive()

    def tell_end(self, reason: str, mismatch: bool) -> None:
        """Tell all ranks why this rank ended the process groups. They end theirs."""
        self._stopped.set()
        message = pickle.dumps((reason, mismatch)).hex()
        self._tell(lambda: self._store.compare_set("ended", "", message))

    def tell_leave(self, how: str) -> None:
        """Tell all ranks that this rank won't join any more collectives."""
        self._tell(lambda: self._store.append("left", f"{self._rank} {how}\n"))
        self.wait_for_others()

    def wait_for_others(self) -> None:
        """Let the others hear rank 0, because the store may end with it. They have 1.5 intervals."""
        deadline = time.monotonic() + 1.5 * self.interval
        with contextlib.suppress(RuntimeError):
            while self._rank == 0 and time.monotonic() < deadline:
                lines = self._store.get("left") if self._store.check(["left"]) else b""
                others = [line for line in lines.splitlines() if not line.startswith(b"0 ")]
                if len(others) >= self._world - 1:
                    break
                time.sleep(0.01)

    def _tell(self, write: Callable[[], object]) -> None:
        def tell() -> None:
            write()
            self._store.add("alarm", 1)

        _ends_within(2, tell)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the process with the store has ended
            while not self._stopped.wait(self.interval):
                self._answer()
                self._look()

    def _answer(self) -> None:
        """React to what other ranks have told or asked since the last time."""
        alarm = self._store.add("alarm", 0)
        if alarm == self._alarm:
            return
        self._asked = time.monotonic()
        if self._store.check(["ended"]):
            self._stopped.set()
            message = pickle.loads(bytes.fromhex(self._store.get("ended").decode()))
            self._store.append("left", f"{self._rank} has ended its process groups\n")
            self._notice(*message)
            return
        if self._store.check(["left"]):
            for line in self._store.get("left").decode().splitlines():
                rank, _, how = line.partition(" ")
                self.left[int(rank)] = how
        for number in range(self._alarm + 1, alarm + 1):
            self._report_for(number)
        self._alarm = alarm

    def _report_for(self, number: int) -> None:
        self._store.set(f"{number}/{self._rank}", pickle.dumps(self._report()).hex())

    def _report(self) -> Report:
        stack = _stack_of(self._trainer)
        place = self._process.doing or _collective_of(stack)
        rounds = self._process.rounds
        return Report(place, _line_of(stack), rounds, time.process_time(), time.monotonic())

    def _look(self) -> None:
        """Ask all ranks where they are if this rank has waited for long."""
        now, cpu = time.monotonic(), time.process_time()
        # Reading the stack holds the interpreter, so a rank that computes doesn't pay for it.
        if cpu - self._last.cpu > _BUSY * (now - self._last.time):
            self._last = Report("", "", cpu=cpu, time=now)
            return
        report = self._report()
        if not report.is_stuck_since(self._last):
            self._since, self._logged = report.time, 0.0
        self._last = report
        waited = report.time - self._since
        if self.left and self._process.doing and waited > self.patience:
            # The connections of a rank that has left stay open until its process ends.
            who = "; ".join(f"rank {rank} {how}" for rank, how in sorted(self.left.items()))
            self._notice(f"{who}, and rank {self._rank} {report}", False)
            return
        # The lowest waiting rank asks first, and its question serves all.
        turn = min(self._rank, 50) * self.interval / 10
        if waited > self.patience + turn and report.time - self._asked > self.patience / 2:
            self._investigate()

    def _investigate(self) -> None:
        first = self._ask()
        if self._lowest_waiting(first) != self._rank:
            return
        self._log(first)
        end = time.monotonic() + self.patience / 2
        while time.monotonic() < end:
            if self._stopped.wait(self.interval):
                return
            self._answer()
        second = self._ask()
        if len(first) == len(second) == self._world and are_stuck(first, second):
            self._notice(
                f"the ranks wait for each other: {explain(second)}. Every rank must call its "
                "models and accel in the same order. Look for a call under accel.is_main(), or "
                "for loops of different lengths.",
                True,
            )

    def _lowest_waiting(self, reports: Mapping[int, Report]) -> int:
        return min((rank for rank, report in reports.items() if report.place), default=-1)

    def _ask(self) -> dict[int, Report]:
        """Return the reports of the ranks that answer within some seconds."""
        number = self._store.add("alarm", 1)
        for missed in range(self._alarm + 1, number + 1):
            self._report_for(missed)
        self._alarm, self._asked = number, time.monotonic()
        keys = [f"{number}/{rank}" for rank in range(self._world)]
        deadline = time.monotonic() + 3 * self.interval
        while not self._store.check(keys) and time.monotonic() < deadline:
            if self._stopped.wait(self.interval / 10):
                break
        reports = {}
        for rank, key in enumerate(keys):
            if self._store.check([key]):
                reports[rank] = pickle.loads(bytes.fromhex(self._store.get(key).decode()))
        return reports

    def _log(self, reports: Mapping[int, Report]) -> None:
        waited = time.monotonic() - self._since
        if waited < 2 * self._logged:
            return
        self._logged = waited
        silent = [rank for rank in range(self._world) if rank not in reports]
        text = explain(reports)
        if silent:
            text += f"; rank {_listed(silent)} does not answer"
        logger.warning("rank %d has waited for %.0f s: %s", self._rank, waited, text)


# -- missing ranks ---------------------------------------------------------------------------------


def missing_ranks(
    open_store: Callable[[], distributed_c10d.Store], place: Place, wait: float
) -> list[int] | None:
    """Return the ranks that don't call this function within ``wait`` seconds of this rank.

    gloo doesn't tell who is missing when a collective fails, so the other ranks say so themselves.
    None means that the store can't be reached.
    """
    missing: list[int] = []

    def ask() -> None:
        store = open_store()
        store.set(str(place.rank), "")
        time.sleep(wait)
        ranks = range(place.world_size)
        missing.extend(rank for rank in ranks if not store.check([str(rank)]))

    return missing if _ends_within(wait + 4, ask) else None


def _ends_within(seconds: float, ask: Callable[[], None]) -> bool:
    """True if a use of the store succeeds in time. Its node may be gone, and then it never ends."""
    done = threading.Event()

    def act() -> None:
        # ValueError: the user has destroyed the default group.
        with contextlib.suppress(RuntimeError, ValueError):
            ask()
            done.set()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()


# -- connections -----------------------------------------------------------------------------------


def disconnect_all() -> None:
    """Close the connections of all process groups, so that no thread waits in a collective."""
    groups = list(distributed_c10d._world.pg_map)
    for group in groups:
        _close_gloo(group)
    # Groups may wait for each other's kernels, so torch ends them as one batch, newest first.
    backends = []
    for group in reversed(groups):
        backends += [b for b in accelerator_backends(group) if hasattr(b, "abort")]
    batched = bool(backends) and hasattr(backends[0], "_group_start")
    if batched:
        backends[0]._group_start()
    for backend in backends:
        backend.abort()
    if batched:
        backends[0]._group_end()


def accelerator_backends(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of a group that run kernels, such as nccl. gloo runs none."""
    backends: list[Any] = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            backend: Any = None if device.type == "cpu" else group._get_backend(device)
            if backend is not None and backend.name() != "gloo" and backend not in backends:
                backends.append(backend)
    return backends


def _close_gloo(group: dist.ProcessGroup) -> None:
    """Close a gloo group's connections.

    Aborting or destroying a group doesn't close them while a reducer or a pending operation holds
    it. A receive that times out does. A receive from a rank that is gone fails earlier and closes
    nothing, so we try all ranks.
    """
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):
            buffer = [torch.empty(1, device="cpu")]
            group.recv(buffer, peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
