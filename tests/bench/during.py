"""Section ``during``: what a background save costs the training that goes on beside it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import accel

from .ranks import run
from .section import Data, Section, Verdict, answer, brief, failures, table
from .workloads import GPT, adamw

WORLD = 2
ACCEL, THREAD, PROCESS, NOTHING = "accel", "DCP, thread", "DCP, process", "nothing, for a second"
ABOUT = """A GPT with AdamW on 2 ranks over gloo, each with one thread. In each round a contender's save begins after some \
steps, and the loop goes on until it is durable on all ranks. *loss* is the time that the steps meanwhile take beyond that \
of as many before and after it, as a share of *total*, the time until the save's end; *stall* is what the call itself \
takes, beside a memcpy of this rank's share of the bytes; *other cpu* is what threads beside the loop's use more than \
without a save. Medians of rounds in which all take turns, with the least in brackets; what *nothing* loses is this run's \
noise. DCP does not sync its files."""
LIMIT_SECONDS = 1800.0


def _beside() -> float:
    return time.process_time() - time.thread_time()


class Loop:
    """A model that trains, in steps that all ranks count alike."""

    def __init__(self, width: int, blocks: int) -> None:
        torch.manual_seed(0)
        net = GPT(width, blocks)
        self.model, self.optimizer, _ = accel.setup(net, adamw(net), backend="ddp", devices="cpu")
        self.batch = torch.randint(256, (2, 32)), torch.randint(256, (2, 32))
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.steps(2, lambda: True)
        held = [v for s in self.optimizer.state.values() for v in s.values() if v.dim() > 0]
        self.whole = {str(i): t.detach() for i, t in enumerate([*self.model.parameters(), *held])}
        self.nbytes = sum(t.nbytes for t in self.whole.values())
        self.share = torch.zeros(self.nbytes // WORLD, dtype=torch.uint8), torch.ones(self.nbytes // WORLD).byte()
        self.group = dist.new_group(backend="gloo")

    def steps(self, least: int, done: Callable[[], bool]) -> tuple[int, float, float]:
        """Steps until all ranks are done, at least so many; the seconds of one, and those of cpu of other threads."""
        begin, beside, count, ready = time.perf_counter(), _beside(), 0, torch.zeros(1)
        while count < least or not ready.item():
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.batch[0]), self.batch[1]).backward()
            self.optimizer.step()
            count += 1
            ready.fill_(done())
            dist.all_reduce(ready, dist.ReduceOp.MIN)
        return count, (time.perf_counter() - begin) / count, (_beside() - beside) / count

    def save(self, name: str, directory: Path) -> Any:
        if name == NOTHING:
            pending: Future[None] = Future()
            threading.Timer(1.0, pending.set_result, (None,)).start()
            return pending
        if name == ACCEL:
            return accel.save(self.state, directory / "accel", wait=False)
        kind = AsyncCheckpointerType.PROCESS if name == PROCESS else AsyncCheckpointerType.THREAD
        return dcp.async_save(
            self.whole, checkpoint_id=directory / name, process_group=self.group, async_checkpointer_type=kind
        )

    def memcpy(self) -> float:
        begin = time.perf_counter()
        self.share[0].copy_(self.share[1])
        return time.perf_counter() - begin


def _round(loop: Loop, name: str, directory: Path, least: int) -> dict[str, float]:
    accel.barrier()
    if accel.is_main():
        shutil.rmtree(directory / name, ignore_errors=True)
        os.sync()
    copied = min(loop.memcpy() for _ in range(3))
    _, before, quiet = loop.steps(least, lambda: True)
    begin = time.perf_counter()
    pending = loop.save(name, directory)
    stall = time.perf_counter() - begin
    ends: list[float] = []
    pending.add_done_callback(lambda _: ends.append(time.perf_counter() - begin))
    count, during, busy = loop.steps(least, pending.done)
    pending.result()
    _, after, _ = loop.steps(least, lambda: True)
    lost = count * (during - (before + after) / 2)
    found = {"loss": lost / ends[0], "stall": stall, "memcpy": copied, "total": ends[0], "steps": count}
    return found | {"cpu": count * (busy - quiet)}


def _rounds(directory: str, width: int, blocks: int, rounds: int, least: int) -> Data:
    loop = Loop(width, blocks)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # DCP starts a process
    found: dict[str, list[dict[str, float]]] = {NOTHING: [], ACCEL: [], THREAD: [], PROCESS: []}
    failed: dict[str, str] = {}
    for number in range(rounds + 1):
        names = list(found)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            error, one = "", None
            try:
                one = _round(loop, name, Path(directory), least)
            except Exception as problem:
                error = brief(problem)
            errors: list[Any] = [None] * WORLD
            dist.all_gather_object(errors, error)
            if any(errors):
                failed[name] = next(filter(None, errors))
                del found[name]
            elif number and one is not None:  # the first round is for what is done only once
                found[name].append(one)
    return {"nbytes": loop.nbytes, "found": found, "failed": failed}


def _measure(quick: bool) -> Data:
    width, blocks, rounds, least = (256, 4, 3, 4) if quick else (512, 9, 15, 8)
    with tempfile.TemporaryDirectory(prefix="accel-bench-", dir=os.environ.get("ACCEL_BENCH_DIR")) as directory:
        results = run(WORLD, _rounds, directory, width, blocks, rounds, least, seconds=LIMIT_SECONDS)
    rows = {}
    for name in results[0]["found"]:
        # A round ends when it does on all ranks.
        rounds_of = [
            {key: max(own[key] for own in ranks) for key in ranks[0]}
            for ranks in zip(*(result["found"][name] for result in results), strict=True)
        ]
        for one in rounds_of:
            one["ratio"] = one["stall"] / one["memcpy"]
        rows[name] = {key: [median(r[key] for r in rounds_of), min(r[key] for r in rounds_of)] for key in rounds_of[0]}
    return {"nbytes": results[0]["nbytes"], "rounds": rounds, "rows": rows, "failed": results[0]["failed"]}


def _tell(data: Data) -> list[str]:
    lines = []
    for name, row in data["rows"].items():
        shares = [f"{100 * row['loss'][0]:.1f} % ({100 * row['loss'][1]:.1f})"]
        seconds = [f"{row[key][0]:.3f} ({row[key][1]:.3f})" for key in ("stall", "memcpy")]
        ratio = [f"{row['ratio'][0]:.2f} ({row['ratio'][1]:.2f})", f"{row['total'][0]:.2f} ({row['total'][1]:.2f})"]
        lines.append([name, *shares, *seconds, *ratio, f"{row['cpu'][0]:.3f}", f"{row['steps'][0]:.0f}"])
    head = ["", "loss", "stall, s", "memcpy, s", "stall / memcpy", "total, s", "other cpu, s", "steps meanwhile"]
    title = f"{data['nbytes'] / 1e6:.0f} MB, {data['rounds']} rounds"
    return [ABOUT, f"### {title}", table(head, lines), *failures(data["failed"])]


def _judge(data: Data) -> Iterator[Verdict]:
    if ACCEL in data["rows"]:
        row = data["rows"][ACCEL]
        loss, total = row["loss"][0], row["total"][0]
        what = f"throughput lost while a background save writes ({total:.1f} s)"
        noise = 100 * abs(data["rows"][NOTHING]["loss"][0]) if NOTHING in data["rows"] else 0.0
        yield Verdict(what, "5 %", f"{100 * loss:.1f} %", answer(100 * loss, 5.0, noise))
        cause = "beside the copy, each tensor is listed, and the ranks agree on what is saved"
        yield Verdict(
            "stall of that save against memcpy",
            "1.10",
            f"{row['ratio'][0]:.2f}",
            answer(row["ratio"][0], 1.1, 0.0, cause),
        )
    for name, error in data["failed"].items():
        yield Verdict(f"a background save while training: {name}", "", "none", f"**not measured**: {error}")


SECTION = Section("during", "A save while training goes on", _measure, _tell, _judge)
