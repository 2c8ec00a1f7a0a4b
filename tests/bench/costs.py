"""Section ``costs``: single verbs, and the import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.gradients.watch import look, trainable

from .contenders import RIVALS, installed_rivals
from .ranks import run
from .section import Data, Section, Verdict, answer, table
from .timing import Contender, Row, Times, interleave, summarise
from .workloads import MANY

NUM_BATCHES = 500
NUM_IMPORTS = 9
CAUSES = {
    "setup": "each object is looked up again, the loader's options are compared",
    "mask": "one attribute of each parameter is read in every forward",
    "import": "the building of accel's own classes and modules, which load nothing that torch has not loaded",
}


# -- in the worker process --------------------------------------------------------------------------------------------


def _setup_again(seconds: float) -> dict[str, Times]:
    model, optimizer = MANY.build()
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)))
    handles = accel.setup(model, optimizer, loader, devices="cpu")
    raws = Contender("raw objects", lambda: accel.setup(model, optimizer, loader))
    again = Contender("handles", lambda: accel.setup(*handles))
    return interleave([raws, again], seconds, 200)


def _mask(seconds: float) -> dict[str, Times]:
    parameters = list(MANY.build()[0].parameters())
    return interleave([Contender("check", lambda: trainable(parameters))], seconds, 200)


def _watch(seconds: float) -> dict[str, Times]:
    parameters = list(MANY.build()[0].parameters())
    return interleave([Contender("look", lambda: look(parameters))], seconds, 200)


def _loaders(seconds: float) -> dict[str, Times]:
    """Epochs of batches that cost almost nothing; the start of an epoch is part of it."""

    def loader() -> Any:
        return DataLoader(range(NUM_BATCHES * 4), 4, shuffle=True, collate_fn=len)

    def epoch(batches: Any) -> Callable[[], None]:
        def once() -> None:
            for _ in batches:
                pass

        return once

    def by_accel() -> Any:
        return accel.setup(*MANY.build(), loader(), devices="cpu").dataloaders

    def by_accelerate() -> Any:
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare(loader())

    def by_fabric() -> Any:
        from lightning_fabric import Fabric

        return Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader())

    makers = {"raw torch": loader, "accel": by_accel, "Accelerate": by_accelerate, "Fabric": by_fabric}
    take_part = {"raw torch", "accel", *installed_rivals()}
    built = [Contender(name, epoch(make())) for name, make in makers.items() if name in take_part]
    return interleave(built, seconds, 1, units=NUM_BATCHES)


def _costs(seconds: float) -> dict[str, dict[str, Times]]:
    parts = {"setup": _setup_again, "mask": _mask, "watch": _watch, "loader": _loaders}
    return {name: fn(seconds) for name, fn in parts.items()}


# -- from the outside -------------------------------------------------------------------------------------------------


def _imports(rivals: bool) -> list[Row]:
    """Each library's import in fresh processes that have imported torch before, the libraries taking turns."""
    packages = ["accel", *(RIVALS[name] for name in installed_rivals() if rivals)]
    times = {name: Times() for name in ("torch", *packages)}
    code = (
        "import time\nfor name in {names}:\n    w, c = time.perf_counter(), time.process_time()\n    __import__(name)\n"
        "    print(name, time.perf_counter() - w, time.process_time() - c)"
    )
    # Bytecode is kept, as Python does unless told otherwise; the first round makes what is missing and does not count.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for number in range(NUM_IMPORTS + 1):
        for package in packages:
            command = [sys.executable, "-c", code.format(names=["torch", package])]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            if number == 0:
                continue
            for line in output.splitlines():
                name, wall, cpu = line.split()
                if name == package or package == "accel":
                    times[name].wall.append(float(wall))
                    times[name].cpu.append(float(cpu))
                    times[name].thread.append(float(cpu))
    return summarise(times)


def _measure(quick: bool) -> Data:
    found = {name: summarise(times) for name, times in run(1, _costs, 1.0 if quick else 6.0)[0].items()}
    found["import"] = _imports(rivals=not quick)
    return {name: [asdict(row) for row in measured] for name, measured in found.items()}


def _rows(data: Data) -> dict[str, list[Row]]:
    return {name: [Row(**row) for row in measured] for name, measured in data.items()}


def _tell(data: Data) -> list[str]:
    costs = _rows(data)
    setup, mask, watch, loader = (costs[name] for name in ("setup", "mask", "watch", "loader"))
    lines: list[tuple[str, float, float]] = [
        ("repeated `accel.setup(model, optimizer, loader)` of raw objects", setup[0].wall, setup[0].cpu),
        ("the same of their handles", setup[1].wall, setup[1].cpu),
        ("trainability check of 500 tensors (`trainable`)", mask[0].wall, mask[0].cpu),
        ("look at 500 gradients (`look`), twice per backward on ddp", watch[0].wall, watch[0].cpu),
        *(
            (f"dataloader, {r.name}: for each batch over the raw `DataLoader`", r.wall_over, r.cpu_over)
            for r in loader[1:]
        ),
    ]
    figures = [[what, f"{wall:.2f}", f"{cpu:.2f}"] for what, wall, cpu in lines]
    imports = [[f"`import {r.name}`", f"{r.wall / 1e3:.1f}", f"{r.cpu / 1e3:.1f}"] for r in costs["import"]]
    missing = [name for name in RIVALS if name not in {r.name for r in loader}]
    return [
        f"In microseconds, from loops in one process. The dataloader is the difference of epochs of {NUM_BATCHES} "
        "shuffled batches that cost almost nothing themselves (the raw one takes "
        f"{loader[0].wall:.1f} a batch), their start included.",
        table(["", "wall", "cpu"], figures),
        f"Imports in milliseconds, in {NUM_IMPORTS} or more fresh processes each, which take turns and import torch first; all "
        "bytecode exists already:",
        table(["", "wall", "cpu"], imports),
        *([f"Not installed, so not measured: {', '.join(missing)}."] if missing else []),
    ]


def _judge(data: Data) -> Iterator[Verdict]:
    costs = _rows(data)
    for name, what, limit in (
        ("setup", "repeated `accel.setup(model, optimizer, loader)`", 50.0),
        ("mask", "trainability check of 500 tensors", 40.0),
    ):
        row = costs[name][0]
        yield Verdict(what, f"{limit:.0f} us", f"{row.cpu:.1f} us", answer(row.cpu, limit, cause=CAUSES[name]))
    row = next(r for r in costs["import"] if r.name == "accel")
    verdict = answer(row.wall, 50e3, cause=CAUSES["import"])
    yield Verdict("`import accel` over `import torch`", "50 ms", f"{row.wall / 1e3:.1f} ms", verdict)


SECTION = Section("costs", "Costs of single verbs", _measure, _tell, _judge)
