"""The watchdog thread of each rank. It logs where ranks wait, and shuts down stuck groups.

Every second it reads the counter ``alarm`` in the job's store. A rank increments the counter
to ask all ranks for a report, or to announce its end (key ``news``).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from .startup import Process

logger = logging.getLogger("accel")

_UNUSED_TAG: Final = 0x5EED
# Share of a CPU. A process that waits in a collective uses less.
_BUSY: Final = 0.05

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
# Files that aren't the user's: accel, the packages next to torch, and Python itself.
_LIBRARIES: Final = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(os.path.dirname(torch.__file__)) + os.sep,
    os.path.dirname(os.__file__) + os.sep,
    "<frozen",
)
# A reducer's hooks have no Python frame, so the innermost frame is one of these functions.
_REDUCING: Final = {"_engine_run_backward": "backward", "_pre_forward": "forward"}
# These calls wait for a single rank that may still arrive, so they aren't stuck.
_POINT_TO_POINT: Final = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


@final
@dataclass(frozen=True, slots=True)
class Report:
    """The position of a rank."""

    #: The accel call or torch collective in which the rank waits. Empty if in neither.
    place: str
    line: str = ""
    #: The number of accel's messages to all ranks, and the seconds spent in ``place``.
    rounds: int = 0
    waited: float = 0.0

    def __str__(self) -> str:
        text = f"is in {self.place}" if self.place else "is in no collective"
        return f"{text} ({self.line})" if self.line else text


def _position(thread: int) -> tuple[str, str]:
    """Return a thread's torch collective, and the line of the user's program."""
    collective, in_torch = "", True
    # traceback.extract_stack() would check every source file on the disk.
    frames = traceback.walk_stack(sys._current_frames().get(thread))
    for depth, (frame, line) in enumerate(frames):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if depth == 0 and path.startswith(_TORCH):
            collective = _REDUCING.get(name, "")
        in_torch = in_torch and path.startswith(f"{_TORCH}distributed{os.sep}")
        # DTensor waits for its collectives in wait_tensor.
        if in_torch and (path.endswith("distributed_c10d.py") or name == "wait_tensor"):
            collective = name
        if not path.startswith(_LIBRARIES):
            return collective, f"{os.path.basename(path)}:{line} in {name}"
    return collective, ""


def named(ranks: Iterable[int]) -> str:
    """Return a text such as ``rank 0, 1, 3``, with at most eight ranks."""
    numbers = list(map(str, ranks))
    if len(numbers) > 8:
        numbers[8:] = ["..."]
    return f"rank {', '.join(numbers)}"


def are_stuck(reports: Iterable[Report | None], patience: float) -> bool:
    """True if all ranks have waited for long, but not all in the same place."""
    places = set()
    for report in reports:
        # A rank that computes, sleeps or reads data may still arrive.
        if report is None or report.place in ("", *_POINT_TO_POINT) or report.waited < patience:
            return False
        places.add(report.place)
    return len(places) > 1


@final
class Watchdog:
    """A thread that monitors the training thread and the other ranks."""

    def __init__(self, process: Process) -> None:
        #: Why ranks have left, by rank. They won't join any more collectives.
        self.left: dict[int, str] = {}
        #: The seconds of waiting after which a rank asks the other ranks for reports.
        self.patience = min(10.0, process.timeout.total_seconds() / 5)
        #: The seconds between two reads of the store.
        self.interval = 1.0
        self._process = process
        self._rank, self._world = process.place.rank, process.place.world_size
        self._trainer = threading.get_ident()
        # A connection handles one request at a time, so this thread needs its own connection.
        store: Any = process.store
        path = f"accel/{process.token}/watchdog"
        self._store: Any = distributed_c10d.PrefixStore(path, store.clone())
        self._alarm = 0
        # The time of the last query of any rank, and the wait before this rank's next query.
        self._asked, self._due = 0.0, 0.0
        self._last = Report("")
        self._since = self._seen = time.monotonic()
        self._cpu = time.process_time()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accel-watchdog", daemon=True)
        self._thread.start()

    def tell_end(self, reason: str, mismatch: bool) -> None:
        """Tell all ranks why this rank shut down its groups. They do the same."""
        self._stopped.set()
        self._tell(reason, True, mismatch)

    def leave(self, how: str) -> None:
        """Stop, and tell all ranks ``how`` this rank leaves, if not empty."""
        if how:
            self._tell(how, False, False)
        # The store may exit with rank 0, so the others get 1.5 intervals to read the news.
        deadline = time.monotonic() + 1.5 * self.interval
        with suppress(RuntimeError):
            while self._rank == 0 and time.monotonic() < deadline:
                if len(self._store.get("news").splitlines()) >= self._world:
                    break
                time.sleep(0.01)
        self._stopped.set()
        self._thread.join(5)

    def _tell(self, *news: str | bool) -> None:
        def tell() -> None:
            self._store.append("news", json.dumps([self._rank, *news]) + "\n")
            self._store.add("alarm", 1)

        _try_for(2, tell)

    def _run(self) -> None:
        # The store raises RuntimeError if the process that hosts it has exited.
        with suppress(RuntimeError):
            while not self._stopped.wait(self.interval):
                self._look()
                self._answer()

    def _answer(self) -> None:
        """Handle news and queries of other ranks."""
        alarm = self._store.add("alarm", 0)
        if alarm == self._alarm:
            return
        self._asked = time.monotonic()
        news = self._store.get("news") if self._store.check(["news"]) else b""
        for line in news.splitlines():
            rank, text, is_end, mismatch = json.loads(line)
            if is_end:
                self._end(text, mismatch)
                return
            self.left[rank] = text
        report = json.dumps(astuple(self._report()))
        for number in range(self._alarm + 1, alarm + 1):
            self._store.set(f"{number}/{self._rank}", report)
        self._alarm = alarm

    def _end(self, reason: str, mismatch: bool) -> None:
        if not self._process.ended:
            logger.error("rank %d: the process groups were shut down: %s", self._rank, reason)
        self._process.end(reason, mismatch)

    def _report(self) -> Report:
        collective, line = _position(self._trainer)
        place, rounds = self._process.doing or collective, self._process.rounds
        is_still = (place, rounds) == (self._last.place, self._last.rounds)
        waited = time.monotonic() - self._since if place and is_still else 0.0
        return Report(place, line, rounds, waited)

    def _look(self) -> None:
        """Ask all ranks where they are if this rank has waited for long."""
        now, cpu = time.monotonic(), time.process_time()
        is_busy = cpu - self._cpu > _BUSY * (now - self._seen)
        self._seen, self._cpu = now, cpu
        # Reading the stack holds the GIL, so don't read it if this rank computes.
        report = self._last = Report("") if is_busy else self._report()
        if not report.waited:
            self._since, self._due = now, self.patience
        if self.left and self._process.doing and report.waited > self.patience:
            # A rank that has left keeps its connections until it exits, so no collective fails.
            self._end(f"{self._who_left()}. Rank {self._rank} {report}", False)
            return
        # The lowest waiting rank asks first. The others then wait, because one query is enough.
        turn = min(self._rank, 50) * self.interval / 10
        if report.waited > self._due + turn and now - self._asked > self.patience / 2:
            self._due = 2 * report.waited
            self._compare(report)

    def _compare(self, report: Report) -> None:
        reports = self._ask()
        if self._stopped.is_set():
            return
        where = self._explain(reports)
        logger.warning("rank %d has waited for %.0f s: %s", self._rank, report.waited, where)
        if are_stuck(reports.values(), self.patience / 2):
            self._end(
                f"the ranks wait for each other: {where}. Look for a call under accel.is_main(), "
                "or for loops of different lengths.",
                True,
            )

    def _explain(self, reports: Mapping[int, Report | None]) -> str:
        """Describe where the ranks are. Ranks in the same place share a sentence."""
        ranks_by_text: dict[str, list[int]] = {}
        for rank, report in reports.items():
            host = self._process.hosts[rank]
            silent = f"(host {host}) did not answer: it exited, hangs or can't be reached"
            ranks_by_text.setdefault(str(report or silent), []).append(rank)
        return "; ".join(f"{named(ranks)} {text}" for text, ranks in ranks_by_text.items())

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

    def reason_of(self, error: RuntimeError) -> str:
        """Return why a collective failed. Wait up to 3 s for other ranks to report it."""
        deadline = time.monotonic() + 3
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self._process.ended or self.left:
                break
            time.sleep(0.02)
        return self._process.ended or self._who_left() or self.who_is_missing(error)

    def who_is_missing(self, error: BaseException) -> str:
        """Describe the ranks that caused an error. Empty if unknown."""
        text = str(error)
        # gloo raises RuntimeError. Connections that the user's program opens raise other classes.
        is_lost = isinstance(error, RuntimeError) and ("imed out" in text or "by peer" in text)
        if self._stopped.is_set() or not is_lost:
            return ""
        reports: dict[int, Report | None] = {}
        _try_for(3 * self.interval + 2, lambda: reports.update(self._ask()))
        if self._process.ended:
            return ""
        if not reports:
            return f"rank 0 (host {self._process.hosts[0]}) or its launcher can't be reached"
        missing: dict[int, Report | None] = {}
        for rank, report in reports.items():
            if report is None or report.rounds < self._process.rounds:
                missing[rank] = report
        return self._explain(missing or reports)

    def _who_left(self) -> str:
        texts = []
        for rank, how in sorted(self.left.items()):
            texts.append(f"rank {rank} (host {self._process.hosts[rank]}) {how}")
        return "; ".join(texts)


def _try_for(seconds: float, use_store: Callable[[], None]) -> None:
    """Use the store in a thread, because the store of a lost node never answers."""

    def act() -> None:
        # ValueError: the user has destroyed the default group.
        with suppress(RuntimeError, ValueError):
            use_store()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)


# -- connections -----------------------------------------------------------------------------------


def disconnect_all() -> None:
    """Close the connections of all groups, to release waiting threads."""
    backends: list[Any] = []
    for group in list(distributed_c10d._world.pg_map):
        _close_gloo(group)
        backends += accelerator_backends(group)
    # Groups may wait for each other's kernels, so abort in one batch, newest first, as torch does.
    for name in ("_group_start", "abort", "_group_end"):
        for backend in reversed(backends) if name == "abort" else backends[-1:]:
            if hasattr(backend, name):
                getattr(backend, name)()


def accelerator_backends(group: dist.ProcessGroup) -> list[Any]:
    """Return a group's backends for accelerators, such as nccl, but not gloo."""
    backends: list[Any] = []
    for device in group._device_types:
        with suppress(RuntimeError):
            backend: Any = group._get_backend(device)
            if backend.name() != "gloo" and backend not in backends:
                backends.append(backend)
    return backends


def _close_gloo(group: dist.ProcessGroup) -> None:
    """Close a gloo group's connections."""
    # Aborting the group doesn't close them while a reducer or a pending operation holds it, but a
    # receive that times out does. A receive from a lost rank closes nothing, so try all ranks.
    for peer in set(range(group.size())) - {group.rank()}:
        buffer = [torch.empty(1, device="cpu")]
        with suppress(RuntimeError):
            group.recv(buffer, peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
