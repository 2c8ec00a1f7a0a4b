"""Section ``restart``: from the kill of one rank to the first step of the job that torchrun starts in its place."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from .report import Data, Panel, Section, Verdict, brief, judged, table
from .timing import scratch, turns

RAW = "torch DDP"
CONTENDERS = ("accel ddp", "accel ddp, deferred_init", "accel fsdp", "accel fsdp, deferred_init", RAW)
PHASES = ("start", "setup and load", "step")
LIMIT_SECONDS = 600.0


def _job(contender: str, blocks: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of each phase, on the rank that was later."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    command += ["-m", "tests.bench.restarted", contender, str(blocks), str(folder)]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"OMP_NUM_THREADS": "1"}
    if not contender.startswith("accel"):
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with open(folder / "log", "w+") as log:
        torchrun = psutil.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            status = torchrun.wait(LIMIT_SECONDS)
        finally:
            for process in [*torchrun.children(recursive=True), torchrun] if torchrun.is_running() else []:
                process.kill()
        if status:
            log.seek(0)
            raise RuntimeError(log.read()[-2000:])
    killed = json.loads((folder / "marks-0-1.json").read_text())["step"]
    attempt = max(int(path.name.split("-")[1]) for path in folder.glob("marks-*.json"))
    ranks = [json.loads((folder / f"marks-{attempt}-{rank}.json").read_text()) for rank in range(2)]
    late = max(ranks, key=lambda marks: marks["step"])
    ends = [killed, *(late[phase] for phase in PHASES)]
    phases = {phase: after - before for phase, before, after in zip(PHASES, ends, ends[1:], strict=False)}
    return phases | {"total": ends[-1] - killed, "attempts": attempt}


def _measure(quick: bool) -> Data:
    blocks, rounds = (2, 1) if quick else (16, 5)
    jobs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    data: Data = {"rounds": rounds, "jobs": {}, "failed": {}}
    for turn in range(rounds):
        for name in turns(CONTENDERS, turn):
            if name in data["failed"]:
                continue
            try:
                with scratch() as folder:
                    jobs[name].append(_job(name, blocks, Path(folder)))
            except (RuntimeError, OSError, psutil.Error) as error:
                data["failed"][name] = brief(str(error))
    for name, rows in jobs.items():
        if name not in data["failed"]:
            data["jobs"][name] = {key: median(row[key] for row in rows) for key in rows[0]}
            data["jobs"][name]["attempts"] = max(row["attempts"] for row in rows)
    return data


def _tell(data: Data) -> list[str]:
    rows = []
    for name, job in data["jobs"].items():
        rows.append([name, *(f"{job[key]:.2f}" for key in (*PHASES, "total")), f"{job['attempts']:.0f}"])
    return [f"{data['rounds']} rounds:", table(["", *PHASES, "all", "starts"], rows)]


def _judge(data: Data) -> Iterator[Verdict]:
    raw = data["jobs"].get(RAW)
    for name, job in data["jobs"].items():
        if raw and name.startswith("accel ddp"):
            title = f"from the kill to the first step, against raw torch, {name}"
            yield judged(title, job["total"] / raw["total"], 1.05)
        if name != RAW:
            yield judged(f"starts that were lost, {name}", job["attempts"] - 1, 0, "{:.0f}")


def _draw(data: Data) -> list[Panel]:
    bars = {name: [job["total"]] for name, job in data["jobs"].items()}
    limit = data["jobs"][RAW]["total"] if RAW in data["jobs"] else None
    return [Panel("A rank is killed", "seconds", ["until the end of the next first step"], bars, limit)] if bars else []


SECTION = Section("restart", "Restarts", _measure, _tell, _judge, _draw)
