"""Which tests run which lines of the package, in every process that they start.

``record(tree)`` runs all tests in a copy of the checkout. A ``sitecustomize.py`` of the copy, which is first on the path of
all processes there, has each of them write what it runs; whose test that is says the variable that pytest sets.
PYTEST_DONT_REWRITE: it is a plugin, and imported before pytest is.
"""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER = "LINES_OF_TESTS"
TEST = "PYTEST_CURRENT_TEST"
#: Written after so many new lines, since tests kill processes.
CHUNK = 50


@dataclass
class Record:
    """``tests``: those that run a line of a file; ``seconds``: what each test took."""

    tests: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[str, float] = field(default_factory=dict)

    def select(self, file: str, line: int, seconds: float) -> list[str]:
        """Tests that run a line, or its file where no test runs the line: of each function one first, short ones first."""
        found = self.tests.get((file, line)) or {t for (f, _), tests in self.tests.items() if f == file for t in tests}
        turns: defaultdict[str, int] = defaultdict(int)
        order = []
        for test in sorted(found & self.seconds.keys(), key=lambda test: (self.seconds[test], test)):
            function = test.partition("[")[0]
            order.append((turns[function], self.seconds[test], test))
            turns[function] += 1
        chosen: list[str] = []
        for _, needed, test in sorted(order):
            seconds -= needed
            if chosen and seconds < 0:
                break
            chosen.append(test)
        return chosen


class _Writer:
    """Traces the lines of this process."""

    def __init__(self, root: str, folder: str) -> None:
        self.root = f"{root}/accel/"
        self.folder = folder
        self.test = ""
        self.seen: set[tuple[str, int]] = set()
        self.new: list[tuple[str, int]] = []
        self.calls: dict[str, bool] = {}

    def call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if file not in self.calls:
            self.calls[file] = file.startswith(self.root)
        if not self.calls[file]:
            return None
        if (test := os.environ.get(TEST, "").rpartition(" ")[0]) != self.test:
            self.write()
            self.test, self.seen = test, set()
        return self.line(frame, event, argument)

    def line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        place = frame.f_code.co_filename, frame.f_lineno
        if place not in self.seen:
            self.seen.add(place)
            self.new.append(place)
            if len(self.new) > CHUNK:
                self.write()
        return self.line

    def write(self) -> None:
        new, self.new = self.new, []
        if new and self.test:
            rows = "".join(f"{file[len(self.root) - 6 :]}:{line}\n" for file, line in new)
            with open(f"{self.folder}/{os.getpid()}", "a") as out:
                out.write(f"= {self.test}\n{rows}")


_writer: _Writer | None = None


class _Start:
    """Begins to trace where the package is about to be imported: what is before has none of its lines, and goes faster."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "accel" and _writer is not None:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            threading.settrace(_writer.call)
            sys.settrace(_writer.call)


def begin() -> None:
    """Trace this process and those that it forks."""
    global _writer
    if FOLDER in os.environ:
        _writer = _Writer(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.environ[FOLDER])
        atexit.register(_writer.write)
        sys.meta_path.insert(0, _Start())  # type: ignore[arg-type]


def pytest_runtest_setup() -> None:
    """A test may have ended the tracing: pytest has this module as a plugin."""
    if _writer is not None:
        sys.settrace(_writer.call)


def record(tree: Path, workers: int) -> Record:
    """Run all tests of a copy."""
    (tree / "sitecustomize.py").write_text("from tests import lines\nlines.begin()\n")
    found = Record()
    with tempfile.TemporaryDirectory(prefix="accel-lines-") as folder:
        environ = os.environ | {"PYTHONPATH": str(tree), FOLDER: folder, "OMP_NUM_THREADS": "1"}
        options = ["-p", "tests.lines", "-vvv", "--durations=0", f"-n{workers}", "--dist=worksteal"]
        command = [sys.executable, "-m", "pytest", *options]
        out = subprocess.run(command, cwd=tree, env=environ, stdout=subprocess.PIPE, text=True, check=False).stdout
        for seconds, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(.*?)$", out, re.MULTILINE):
            found.seconds[test] = found.seconds.get(test, 0.0) + float(seconds)
        for test in re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", out, re.MULTILINE):
            found.seconds.pop(test, None)
        for path in Path(folder).iterdir():
            test = ""
            for row in path.read_text().splitlines():
                if row.startswith("= "):
                    test = row[2:]
                else:
                    file, _, line = row.rpartition(":")
                    found.tests[file, int(line)].add(test)
    (tree / "sitecustomize.py").unlink()
    return found
