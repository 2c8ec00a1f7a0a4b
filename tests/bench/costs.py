"""Section ``costs``: single verbs, and the import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch
from torch.utils.data import DataLoader, TensorDataset

import accel

from .contenders import RIVALS, installed_rivals
from .ranks import run
from .section import Data, Section, Verdict, judged, table
from .timing import Contender, Times, interleave, note, summarise
from .workloads import MANY

NUM_IMPORTS = 9
SETUP, IMPORT = "repeated `accel.setup(model, optimizer, loader)`", "accel"


def _setup_again(seconds: float) -> dict[str, Times]:
    model, optimizer = MANY.build()
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)))
    accel.setup(model, optimizer, loader, devices="cpu")
    again = partial(accel.setup, model, optimizer, loader)
    return interleave([Contender(SETUP, lambda: again)], seconds, 200)


def _imports(packages: list[str]) -> dict[str, Times]:
    """Import each library in fresh processes after torch, the libraries taking turns."""
    times: dict[str, Times] = {package: {} for package in packages}
    code = (
        "import torch, time\nw, c = time.perf_counter(), time.process_time()\nimport {package}\n"
        "print(time.perf_counter() - w, time.process_time() - c)"
    )
    # Python keeps bytecode unless told otherwise. The first round makes what is missing and does not count.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for number in range(NUM_IMPORTS + 1):
        for package in packages:
            command = [sys.executable, "-c", code.format(package=package)]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            wall, cpu = output.split()
            if number:
                note(times[package], {"wall": float(wall), "cpu": float(cpu)})
    return times


def _measure(quick: bool) -> Data:
    packages = ["accel", *([] if quick else [RIVALS[name] for name in installed_rivals()])]
    setup = summarise(run(1, _setup_again, 2.0 if quick else 12.0)[0], SETUP)
    return {"rows": setup | summarise(_imports(packages), IMPORT), "failed": {}}


def _tell(data: Data) -> list[str]:
    lines = []
    for name, row in data["rows"].items():
        title = name if name == SETUP else f"`import {name}`"
        lines.append([title, *(f"{1e3 * row[clock]['median']:.4f}" for clock in ("wall", "cpu"))])
    return [table(["", "wall, ms", "cpu, ms"], lines)]


def _judge(data: Data) -> Iterator[Verdict]:
    """Hold milliseconds against their limits: each object is looked up again, and accel's own modules are built."""
    yield judged(SETUP, 1e3 * data["rows"][SETUP]["cpu"]["median"], 0.05, "{:.3f} ms")
    over = 1e3 * data["rows"][IMPORT]["wall"]["median"]
    yield judged("`import accel` over `import torch`", over, 50.0, "{:.3f} ms")


SECTION = Section("costs", "Costs of single verbs", _measure, _tell, _judge)
