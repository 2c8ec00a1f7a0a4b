"""What fails, on which rank, where and when: a test declares it, and it happens to real processes and real files.

    outcomes(2, save, directory, breaks=True, faults=[Fault("SIGKILL", at="accel.checkpoint.shards:write", rank=1)])

``at`` is a function, as ``module:name``, that fails where it is called, or a word that the program says by ``reach``.
A fault happens once, in the process that comes to it first, also where a launcher starts the program again. One that never
happened fails the test, which would prove nothing without it. Programs install the faults of their environment by
``begin()``, or are run by ``python -m tests.faults script.py ...``. The idea is that of torchft's ``EventInjector``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "ACCEL_TEST_FAULTS"


@dataclass(frozen=True)
class Fault:
    """``how``: a signal's name, ``exit <status>``, or ``host``, which ends the process and the one that started it."""

    how: str
    at: str
    rank: int | None = None  # any
    turn: int = 1
    after: float = 0.0  # seconds later, wherever the process is by then
    when: str = ""  # not before this file is there


@dataclass(frozen=True)
class Plan:
    """Faults, and the folder in which each leaves a mark when it happens."""

    folder: str
    faults: tuple[Fault, ...]

    @property
    def environ(self) -> dict[str, str]:
        return {VARIABLE: json.dumps([self.folder, [asdict(fault) for fault in self.faults]])}

    def happens(self, index: int) -> bool:
        """Mark that it does, unless it has."""
        with contextlib.suppress(FileExistsError):
            Path(self.folder, str(index)).touch(exist_ok=False)
            return True
        return False


_plan: Plan | None = None
_turns: Counter[int] = Counter()
_whole_life = contextlib.ExitStack()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def declared(faults: Sequence[Fault]) -> Iterator[Plan]:
    """A plan for the processes that are started here; each of its faults must have happened at the end."""
    with tempfile.TemporaryDirectory(prefix="accel-test-") as folder:
        yield Plan(folder, tuple(faults))
        missed = [fault for index, fault in enumerate(faults) if not Path(folder, str(index)).exists()]
        assert not missed, f"never happened: {missed}"


@contextlib.contextmanager
def installed(plan: Plan) -> Iterator[None]:
    """The plan's faults, in this process."""
    global _plan
    _plan = plan
    _turns.clear()
    with contextlib.ExitStack() as stack:
        for place in {fault.at for fault in plan.faults if ":" in fault.at}:
            stack.callback(_wrap(place))
        try:
            yield
        finally:
            _plan = None


def _wrap(place: str) -> Any:
    """Let a function say where it is; returns how to undo it."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, name)

    @functools.wraps(original)
    def reaching(*args: Any, **kwargs: Any) -> Any:
        reach(place)
        return original(*args, **kwargs)

    setattr(owner, name, reaching)
    return lambda: setattr(owner, name, original)


def begin() -> None:
    """Install the faults that the environment declares, until the process ends."""
    if VARIABLE in os.environ:
        folder, faults = json.loads(os.environ[VARIABLE])
        _whole_life.enter_context(installed(Plan(folder, tuple(Fault(**fault) for fault in faults))))


def reach(place: str) -> None:
    """The program is at a place; what was declared for it happens."""
    for index, fault in enumerate(_plan.faults if _plan else ()):
        if fault.at != place or fault.rank not in (None, _rank()):
            continue
        _turns[index] += 1
        if _turns[index] == fault.turn and _plan is not None and _plan.happens(index):
            while fault.when and not os.path.exists(fault.when):
                time.sleep(0.01)
            if fault.after:
                timer = threading.Timer(fault.after, _happen, [fault.how])
                timer.daemon = True
                timer.start()
            else:
                _happen(fault.how)


def _happen(how: str) -> None:
    kind, _, status = how.partition(" ")
    if kind == "exit":
        os._exit(int(status))
    if kind == "host":
        os.kill(os.getppid(), signal.SIGKILL)
        kind = "SIGKILL"
    os.kill(os.getpid(), signal.Signals[kind])


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond ``size``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    from tests import faults

    faults.begin()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
