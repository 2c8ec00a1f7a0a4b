"""The watchdog thread of each rank: it logs which rank waits where, and ends groups that are stuck.

Every second, each watchdog reads the counter ``alarm`` in the job's store. A rank raises it

- to end the process groups of all ranks (key ``ended``),
- to say that it won't join any more collectives (key ``left``),
- to ask all ranks for a report, after it has waited in a collective for some seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from .startup import Process

logger = logging.getLogger("accel")

_INTERVAL: Final = 1.0  # seconds between two looks at the store
_UNUSED_TAG: Final = 0x5EED  # nobody sends a message with this tag
_BUSY: Final = 0.05  # share of a CPU. A process that waits in a collective uses less

_TORCH: Final = os.path.join(os.path.dirname(torch.__file__), "")
# Files of libraries: accel, the packages beside torch, and Python itself.
_LIBRARIES: Final = tuple(
    os.path.join(os.path.dirname(path), "")
    for path in (os.path.dirname(__file__), os.path.dirname(torch.__file__), os.__file__)
)
# The hooks of a reducer have no frames, so these functions of torch are the innermost ones.
_REDUCING: Final = {"_engine_run_backward": "backward", "_pre_forward": "forward"}
# These wait for a single rank, which may still come.
_POINT_TO_POINT: Final = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


# -- where a rank is -------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Report:
    """The position of a rank.

    Attributes:
        place: the accel call or torch collective in which it waits. Empty outside of collectives.
        line: the line of the user's program.
        rounds: how many messages of accel it has exchanged with all ranks.
        waited: for how many seconds it has waited there.
    """

    place: str
    line: str = ""
    rounds: int = 0
    waited: float = 0.0

    def __str__(self) -> str:
        text = f"is in {self.place}" if self.place else "is in no collective"
        return f"{text} ({self.line})" if self.line else text


def _stack_of(thread: int) -> list[tuple[str, str, str]]:
    """Return path, line and function of a thread's frames, innermost first.

    faulthandler runs no Python code meanwhile, so the thread can't move on.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        for section in re.split(r"^(?:Current thread|Thread) ", file.read(), flags=re.MULTILINE):
            if section.startswith(f"0x{thread:016x}"):
                return re.findall(r'File "([^"]*)", line (\d+) in (\S+)', section)
    return []


def _collective_of(stack: list[tuple[str, str, str]]) -> str:
    """Return the name of the torch collective that a thread is in, or an empty string."""
    if stack and stack[0][0].startswith(_TORCH) and stack[0][2] in _REDUCING:
        return _REDUCING[stack[0][2]]
    name = ""
    for path, _, function in stack:
        if not path.startswith(os.path.join(_TORCH, "distributed", "")):
            break
        # DTensor waits for its collectives in wait_tensor.
        if path.endswith("distributed_c10d.py") or function == "wait_tensor":
            name = function
    return name


def _line_of(stack: list[tuple[str, str, str]]) -> str:
    """Return the innermost line of the user's program."""
    for path, line, function in stack:
        if not path.startswith((*_LIBRARIES, "<frozen")):
            return f"{os.path.basename(path)}:{line} in {function}"
    return ""


def explain(reports: Mapping[int, Report | None]) -> str:
    """Describe where the ranks are. Ranks in the same place share a sentence."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, report in reports.items():
        ranks_by_text.setdefault(str(report or "does not answer"), []).append(rank)
    sentences = []
    for text, ranks in ranks_by_text.items():
        more = ", ..." if len(ranks) > 8 else ""
        sentences.append(f"rank {', '.join(map(str, ranks[:8]))}{more} {text}")
    return "; ".join(sentences)


def are_stuck(reports: Iterable[Report | None], patience: float) -> bool:
    """True if every rank has long waited in a collective, but not all in the same place."""
    places = set()
    for report in reports:
        # A rank that computes, sleeps or reads data may still come.
        if report is None or report.place in ("", *_POINT_TO_POINT) or report.waited < patience:
            return False
        places.add(report.place)
    return len(places) > 1


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
        # A connection does one thing at a time, so this thread needs its own.
        self._store: Any = process.store("watchdog", own_connection=True)
        self._alarm = 0
        self._asked = 0.0  # when a rank has asked last
        self._last = Report("")
        self._since = self._seen = time.monotonic()
        self._cpu = time.process_time()
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
        message = json.dumps([reason, mismatch])
        how = "has ended its process groups"
        self._tell(how, lambda: self._store.compare_set("ended", "", message))

    def tell_leave(self, how: str) -> None:
        """Tell all ranks that this rank won't join any more collectives."""
        self._tell(how, lambda: None)
        self.wait_for_others()

    def wait_for_others(self) -> None:
        """Let the others hear rank 0, because the store may end with it. They have 1.5 intervals."""
        deadline = time.monotonic() + 1.5 * self.interval
        with contextlib.suppress(RuntimeError):
            while self._rank == 0 and time.monotonic() < deadline:
                if len(self._store.get("left").splitlines()) >= self._world:
                    break
                time.sleep(0.01)

    def _tell(self, how: str, write: Callable[[], object]) -> None:
        def tell() -> None:
            write()
            self._store.append("left", f"{self._rank} {how}\n")
            self._store.add("alarm", 1)

        _ends_within(2, tell)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the process with the store has ended
            while not self._stopped.wait(self.interval):
                self._look()
                self._answer()

    def _answer(self) -> None:
        """React to what other ranks have told or asked since the last time."""
        alarm = self._store.add("alarm", 0)
        if alarm == self._alarm:
            return
        self._asked = time.monotonic()
        if self._store.check(["ended"]):
            self._notice(*json.loads(self._store.get("ended")))
            return
        if self._store.check(["left"]):
            for line in self._store.get("left").decode().splitlines():
                rank, _, how = line.partition(" ")
                self.left[int(rank)] = how
        report = json.dumps(astuple(self._report()))
        for number in range(self._alarm + 1, alarm + 1):
            self._store.set(f"{number}/{self._rank}", report)
        self._alarm = alarm

    def _report(self) -> Report:
        stack = _stack_of(self._trainer)
        place, rounds = self._process.doing or _collective_of(stack), self._process.rounds
        is_still = (place, rounds) == (self._last.place, self._last.rounds)
        waited = time.monotonic() - self._since if place and is_still else 0.0
        return Report(place, _line_of(stack), rounds, waited)

    def _look(self) -> None:
        """Ask all ranks where they are if this rank has waited for long."""
        now, cpu = time.monotonic(), time.process_time()
        is_busy = cpu - self._cpu > _BUSY * (now - self._seen)
        self._seen, self._cpu = now, cpu
        # Reading the stack holds the interpreter, so a rank that computes doesn't pay for it.
        report = self._last = Report("") if is_busy else self._report()
        if not report.waited:
            self._since, self._logged = now, 0.0
        if self.left and self._process.doing and report.waited > self.patience:
            # The connections of a rank that has left stay open until its process ends.
            who = "; ".join(f"rank {rank} {how}" for rank, how in sorted(self.left.items()))
            self._notice(f"{who}, and rank {self._rank} {report}", False)
            return
        # The lowest waiting rank asks first, and its question serves all.
        turn = min(self._rank, 50) * self.interval / 10
        if report.waited > self.patience + turn and now - self._asked > self.patience / 2:
            reports = self._ask()
            if self._stopped.is_set():
                return
            where = explain(reports)
            if report.waited >= 2 * self._logged:
                self._logged = report.waited
                text = "rank %d has waited for %.0f s: %s"
                logger.warning(text, self._rank, report.waited, where)
            if are_stuck(reports.values(), self.patience / 2):
                self._notice(
                    f"the ranks wait for each other: {where}. Every rank must call its models and "
                    "accel in the same order. Look for a call under accel.is_main(), or for loops "
                    "of different lengths.",
                    True,
                )

    def _ask(self) -> dict[int, Report | None]:
        number = self._store.add("alarm", 1)
        keys = [f"{number}/{rank}" for rank in range(self._world)]
        deadline = time.monotonic() + 3 * self.interval
        while not self._store.check(keys) and time.monotonic() < deadline:
            if threading.current_thread() is self._thread:
                self._answer()
            if self._stopped.wait(self.interval / 10):
                break
        reports: dict[int, Report | None] = {}
        for rank, key in enumerate(keys):
            answers = self._store.check([key])
            reports[rank] = Report(*json.loads(self._store.get(key))) if answers else None
        return reports

    def ask(self) -> dict[int, Report | None]:
        """Return the reports of all ranks, or nothing if the store can't be reached.

        For the training thread. A rank that was killed or hangs has None.
        """
        reports: dict[int, Report | None] = {}
        _ends_within(3 * self.interval + 2, lambda: reports.update(self._ask()))
        return reports


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
