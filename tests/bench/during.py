"""Section ``during``: the seconds of training that a background save costs."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import accel

from .movers import Movers
from .ranks import attempt, scratch
from .section import Data, Section, Verdict, judged, table
from .workloads import characters

WORLD = 2
NOTHING = "nothing, for a second"


class Loop(Movers):
    """A model that trains, in steps that all ranks count alike."""

    def steps(self, least: int, done: Callable[[], bool]) -> tuple[int, float]:
        """Train until all ranks are done, at least so many steps. Return their number and the seconds of one."""
        inputs, targets = characters()
        begin, count, ready = time.perf_counter(), 0, torch.zeros(1)
        while count < least or not ready.item():
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(inputs), targets).backward()
            self.optimizer.step()
            count += 1
            ready.fill_(done())
            dist.all_reduce(ready, dist.ReduceOp.MIN)
        return count, (time.perf_counter() - begin) / count

    def save(self, name: str) -> Any:
        if name != NOTHING:
            return self.acts("stall")[name]()
        pending: Future[None] = Future()
        threading.Timer(1.0, pending.set_result, (None,)).start()
        return pending


def _seconds(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _round(loop: Loop, name: str, least: int) -> dict[str, float]:
    accel.barrier()
    if accel.is_main():
        shutil.rmtree(loop.directory)
        loop.directory.mkdir()
        os.sync()
    copied = min(_seconds(loop.memcpy) for _ in range(3))
    _, before = loop.steps(least, lambda: True)
    begin = time.perf_counter()
    pending = loop.save(name)
    stall = time.perf_counter() - begin
    ends: list[float] = []
    pending.add_done_callback(lambda _: ends.append(time.perf_counter() - begin))
    count, during = loop.steps(least, pending.done)
    pending.result()
    _, after = loop.steps(least, lambda: True)
    lost = count * (during - (before + after) / 2)
    figures = {"lost": lost + stall, "stall": stall, "memcpy": copied, "ratio": stall / copied}
    return figures | {"total": ends[0], "steps": count}


def _rounds(directory: str, layers: int, rounds: int, least: int) -> tuple[int, Data]:
    loop = Loop(directory, "ddp", layers)
    names = [NOTHING, "accel", "DCP"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            figures = _round(loop, name, least)
            if number:  # The first round is for what a library does only once.
                found[name].append(figures)
    return loop.nbytes, found


def _measure(quick: bool) -> Data:
    layers, rounds, least = (1, 3, 4) if quick else (4, 15, 8)
    data: Data = {"rounds": rounds, "rows": {}, "failed": {}}
    with scratch() as directory:
        results = attempt(data, "a save during training", WORLD, _rounds, directory, layers, rounds, least)
    for name in results[0][1] if results else ():
        slowest: dict[str, list[float]] = {}
        for ranks in zip(*(found[name] for _, found in results), strict=True):
            # A round ends when it does on all ranks.
            for key in ranks[0]:
                slowest.setdefault(key, []).append(max(rank[key] for rank in ranks))
        data["rows"][name] = {key: [median(values), min(values)] for key, values in slowest.items()}
        data["nbytes"] = results[0][0]
    return data


def _tell(data: Data) -> list[str]:
    lines = []
    for name, row in data["rows"].items():
        cells = [f"{row[key][0]:.3f} ({row[key][1]:.3f})" for key in ("lost", "stall", "memcpy", "ratio", "total")]
        lines.append([name, *cells, f"{row['steps'][0]:.0f}"])
    head = ["", "lost, s", "stall, s", "memcpy, s", "stall / memcpy", "total, s", "steps meanwhile"]
    return [f"### {data.get('nbytes', 0) / 1e6:.0f} MB, {data['rounds']} rounds", table(head, lines)]


def _judge(data: Data) -> Iterator[Verdict]:
    if not data["rows"]:
        return
    own, noise = data["rows"]["accel"], abs(data["rows"][NOTHING]["lost"][0])
    title = f"training lost by a background save of {own['total'][0]:.1f} s, beside DCP's"
    yield judged(title, own["lost"][0], data["rows"]["DCP"]["lost"][0], "{:.2f} s", noise)
    cause = "beside the copy, each tensor is listed, and the ranks agree on the contents"
    yield judged("stall of that save against memcpy", own["ratio"][0], 1.15, cause=cause)


SECTION = Section("during", "A save while training goes on", _measure, _tell, _judge)
