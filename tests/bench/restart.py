"""Section ``restart``: from the kill of one rank to the first step of the job that torchrun starts in its place."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from .section import Data, Panel, Section, Verdict, answer, failures, table

CONTENDERS = (
    "accel ddp",
    "accel ddp, deferred_init",
    "torch DDP",
    "accel fsdp",
    "accel fsdp, deferred_init",
    "torch FSDP2",
)
PHASES = (
    "torchrun",
    "import torch",
    "import library",
    "model",
    "process group",
    "setup",
    "load",
    "first step",
)
LIMIT_SECONDS = 600.0
ABOUT = """A GPT of 114 million parameters with AdamW on 2 ranks over gloo, under torchrun on one host: rank 1 is killed \
(SIGKILL) after a step, and the clock runs until the first step of the job that torchrun starts again has ended, on the slower \
rank. All contenders run the same program (`tests/bench/restarted.py`): raw torch loads with `torch.load(mmap=True)`, and with \
torch.distributed.checkpoint under FSDP2; accel's checks all bytes while it fills. With *deferred_init* the model is built \
without memory where there is a checkpoint, `setup` reads its weights from there, and `load` the rest \
([recipe](checkpoints.md#starting-again)). *torchrun* is what passes until the new \
processes are there; *import torch* has Python's own start in it; \
*model* is the user's: its first values, and the import of torch's compiler that the first optimizer \
of a process brings. *cpu* is what that rank computed until its first step ended, below by phase, and *touched* the memory \
that it had from the kernel by then, page by page, which takes several times longer where a virtual machine had not used it \
before. Bytecode is kept, as Python does unless told otherwise. *bytes* is what both ranks together need to read as many bytes \
into new memory from a warm page cache. Medians of rounds in which all take turns; the machine's load counts in full. \
torchrun's store stays over a restart, with the addresses of processes that are gone: raw torch is started with \
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, accel is not."""


def _job(contender: str, blocks: int, folder: Path) -> dict[str, Any]:
    """Seconds of each phase, on the rank that was later."""
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
    killed = json.loads((folder / "marks-0-1.json").read_text())[-1][1]
    attempt = max(int(path.name.split("-")[1]) for path in folder.glob("marks-*.json"))
    ranks = [json.loads((folder / f"marks-{attempt}-{rank}.json").read_text()) for rank in range(2)]
    late = max(ranks, key=lambda marks: next(at for phase, at, *_ in marks if phase == "first step"))
    found: dict[str, Any] = {"attempts": attempt}
    before, used = killed, 0.0
    for phase, at, cpu, touched in late:
        if phase == "bytes":
            found["bytes"] = max(at for marks in ranks for name, at, *_ in marks if name == "bytes")
            continue
        found[phase], found[f"cpu of {phase}"] = at - before, cpu - used
        before, used = at, cpu
        if phase == "first step":
            found["total"], found["cpu"], found["touched"] = (
                at - killed,
                cpu,
                touched * os.sysconf("SC_PAGE_SIZE") / 1e9,
            )
    return found


def _measure(quick: bool) -> Data:
    blocks, rounds = (2, 1) if quick else (16, 5)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    failed: dict[str, str] = {}
    for turn in range(rounds):
        order = CONTENDERS[turn % len(CONTENDERS) :] + CONTENDERS[: turn % len(CONTENDERS)]
        for name in order:
            if name in failed:
                continue
            with tempfile.TemporaryDirectory(prefix="accel-bench-", dir=os.environ.get("ACCEL_BENCH_DIR")) as folder:
                try:
                    found[name].append(_job(name, blocks, Path(folder)))
                except (RuntimeError, OSError, psutil.Error) as error:
                    failed[name] = str(error).strip().splitlines()[-1]
    jobs = {}
    for name, rows in found.items():
        if rows and name not in failed:
            jobs[name] = {key: median(row[key] for row in rows) for key in rows[0]}
            jobs[name]["least"] = min(row["total"] for row in rows)
            jobs[name]["attempts"] = max(row["attempts"] for row in rows)
    return {"rounds": rounds, "jobs": jobs, "failed": failed}


def _tell(data: Data) -> list[str]:
    head = ["", *PHASES, "all", "least", "cpu", "touched", "next step", "bytes", "starts"]
    rows = []
    for name, job in data["jobs"].items():
        keys = (*PHASES, "total", "least", "cpu", "touched", "next step", "bytes")
        rows.append([name, *(f"{job[key]:.2f}" if key in job else "" for key in keys), f"{job['attempts']:.0f}"])
    cpu = [[name, *(f"{job[f'cpu of {phase}']:.2f}" for phase in PHASES[1:])] for name, job in data["jobs"].items()]
    return [
        f"{ABOUT} {data['rounds']} rounds, in seconds, and GB for *touched*.",
        table(head, rows),
        table(["cpu", *PHASES[1:]], cpu),
        *failures(data["failed"]),
    ]


def _judge(data: Data) -> Iterator[Verdict]:
    for name, job in data["jobs"].items():
        if not name.startswith("accel"):
            continue
        most = max(PHASES, key=lambda phase: job[phase])
        cause = f"most of it is {most}, {job[most]:.1f} s"
        if (raw := data["jobs"].get("torch FSDP2" if "fsdp" in name else "torch DDP")) is not None:
            cause += f"; raw torch took {raw['total']:.1f} s in this run"
        yield Verdict(
            f"from the kill to the first step, {name}",
            "6.5 s",
            f"{job['total']:.1f} s",
            answer(job["total"], 6.5, cause=cause),
        )
        lost = job["attempts"] - 1
        yield Verdict(f"starts that were lost, {name}", "0", f"{lost:.0f}", answer(lost, 0))
        ratio = (job["setup"] + job["load"]) / job["bytes"]
        yield Verdict(f"setup and load against reading the bytes, {name}", "1.3", f"{ratio:.2f}", answer(ratio, 1.3))


def _draw(data: Data) -> list[Panel]:
    jobs = data["jobs"]
    bars = {phase: [job[phase] for job in jobs.values()] for phase in PHASES}
    return (
        [Panel("From the kill of a rank to the first step", "seconds", list(jobs), bars, 6.5, stacked=True)]
        if jobs
        else []
    )


SECTION = Section("restart", "Restarts", _measure, _tell, _judge, _draw)
