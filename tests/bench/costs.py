"""Section ``costs``: single verbs, and the import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.gradients.watch import trainable

from .contenders import RIVALS, installed_rivals
from .ranks import run
from .section import Data, Section, Verdict, judged, table
from .timing import Contender, Times, interleave, note, summarise
from .workloads import MANY

NUM_IMPORTS = 9
SETUP, MASK, IMPORT = "repeated `accel.setup(model, optimizer, loader)`", "trainability check of 500 tensors", "accel"
#: The most milliseconds of cpu time, and the cause of more.
LIMITS = {
    SETUP: (0.05, "each object is looked up again, the loader's options are compared"),
    MASK: (0.04, "one attribute of each parameter is read in every forward"),
    IMPORT: (50.0, "accel's own classes and modules are built, which load nothing that torch has not loaded"),
}


def _verbs(seconds: float) -> dict[str, Times]:
    model, optimizer = MANY.build()
    parameters = list(model.parameters())
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)))
    accel.setup(model, optimizer, loader, devices="cpu")
    acts: dict[str, Callable[[], Any]] = {
        SETUP: partial(accel.setup, model, optimizer, loader),
        MASK: partial(trainable, parameters),
    }
    return interleave([Contender(name, lambda act=act: act) for name, act in acts.items()], seconds, 200)


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
    rows = summarise(run(1, _verbs, 2.0 if quick else 12.0)[0], SETUP) | summarise(_imports(packages), IMPORT)
    return {"rows": rows, "failed": {}}


def _tell(data: Data) -> list[str]:
    lines = []
    for name, row in data["rows"].items():
        title = name if name in (SETUP, MASK) else f"`import {name}`"
        lines.append([title, *(f"{1e3 * row[clock]['median']:.4f}" for clock in ("wall", "cpu"))])
    return [table(["", "wall, ms", "cpu, ms"], lines)]


def _judge(data: Data) -> Iterator[Verdict]:
    for name, (limit, cause) in LIMITS.items():
        clock = "wall" if name == IMPORT else "cpu"
        target = "`import accel` over `import torch`" if name == IMPORT else name
        yield judged(target, 1e3 * data["rows"][name][clock]["median"], limit, "{:.3f} ms", cause=cause)


SECTION = Section("costs", "Costs of single verbs", _measure, _tell, _judge)
