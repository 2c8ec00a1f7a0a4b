"""Jobs that are killed while they save on disks of hosts, one of which is lost: ``python -m tests.checkpoint.lose_hosts``.

Each round starts a job of three hosts, loads what there is, saves after every step with a replica, and is killed at a random
moment. The host that was killed first comes back empty if the job had saved since it lost one. What is loaded next must be at
least the last save that returned on any rank, whole and of one step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HOSTS = {"a": 1, "b": 2, "c": 1}  # ranks
LIMIT_SECONDS = 120.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


def _train(rank: int, world: int, home: str, store: str, series: bool, told: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import accel

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.chdir(home)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        raw = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
        model, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters()), backend="fsdp", devices="cpu")
        state: dict[str, Any] = {"model": model, "step": 0}
        if last := accel.latest("ckpt", placement="host"):
            accel.load(last, state)
        values = {float(v) for p in raw.parameters() for v in p.detach().to_local().flatten()} if last else {0.0}
        told.send(("loaded", state["step"], values <= {float(state["step"])}))
        while True:
            state["step"] += 1
            with torch.no_grad():
                for p in raw.parameters():
                    p.to_local().fill_(state["step"])
            told.send(("begun", state["step"]))
            accel.save(
                state,
                f"ckpt/step-{state['step']}" if series else "ckpt",
                placement="host",
                replicas=1,
                keep=2 if series else None,
            )
            told.send(("saved", state["step"]))
    except BaseException as error:
        told.send(("failed", f"{type(error).__name__}: {error}"))
        os._exit(1)


class Job:
    """One start of all ranks."""

    def __init__(self, root: Path, number: int, series: bool) -> None:
        self.ranks = [host for host, count in HOSTS.items() for _ in range(count)]
        self.pipes, self.processes = [], []
        self.begun = self.saved = 0
        self.loaded: list[tuple[int, bool]] = []
        self.failures: list[str] = []
        for rank, host in enumerate(self.ranks):
            (root / host).mkdir(exist_ok=True)
            ours, theirs = _context.Pipe(duplex=False)
            args = (rank, len(self.ranks), str(root / host), str(root / f"store-{number}"), series, theirs)
            self.processes.append(_context.Process(target=_train, args=args, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def listen(self, seconds: float) -> None:
        """Hear what the ranks say, for so long."""
        end = time.monotonic() + seconds
        while self.pipes and (left := end - time.monotonic()) > 0:
            for pipe in wait(self.pipes, left):
                try:
                    kind, *what = pipe.recv()
                except EOFError:
                    self.pipes.remove(pipe)
                    continue
                if kind == "loaded":
                    self.loaded.append((what[0], what[1]))
                elif kind == "failed":
                    self.failures.append(what[0])
                else:
                    setattr(self, kind, max(getattr(self, kind), what[0]))

    def wait_for(self, ready: Any) -> bool:
        end = time.monotonic() + LIMIT_SECONDS
        while not ready() and not self.failures and time.monotonic() < end:
            self.listen(0.01)
        return bool(ready())

    def kill(self, host: str, after: float) -> None:
        for mine in (True, False):
            for process, where in zip(self.processes, self.ranks, strict=True):
                if (where == host) == mine:
                    process.kill()
            if mine:
                self.listen(after)
        for process in self.processes:
            process.join()
        self.listen(0.2)


def attack(kills: int, seed: int, series: bool) -> tuple[int, int, list[str]]:
    """How many hosts were lost, how many jobs came back from there, and what was wrong."""
    draw, wrong, lost_hosts, came_back = random.Random(seed), [], 0, 0
    with tempfile.TemporaryDirectory(prefix="accel-hosts-") as folder:
        root, durable, latest = Path(folder), 0, 0
        fresh = True
        for number in range(kills):
            job = Job(root, number, series)
            if not job.wait_for(lambda job=job: len(job.loaded) == len(job.ranks)):
                wrong.append(f"round {number}: nothing was loaded; {durable} was saved; {job.failures[:1]}")
            for step, whole in job.loaded:
                if not whole or not durable <= step <= max(latest, durable):
                    wrong.append(f"round {number}: step {step}, whole {whole}, of {durable} to {latest}")
            came_back += number > 0 and not job.failures
            if draw.random() < 0.8:
                job.wait_for(lambda job=job: job.saved)
            job.listen(draw.random() * 0.4)
            host = draw.choice(list(HOSTS))
            job.kill(host, draw.choice((0.0, 0.0, draw.random() * 0.05)))
            fresh = fresh or bool(job.saved)
            durable, latest = max(durable, job.saved), max(latest, job.begun)
            if fresh:
                shutil.rmtree(root / host)
                lost_hosts, fresh = lost_hosts + 1, False
            if wrong:
                break
    return lost_hosts, came_back, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    failed = False
    for series in (False, True):
        kills = arguments.kills // 2
        hosts, back, wrong = attack(kills, arguments.seed + series, series)
        where = "in a directory for each step" if series else "into one directory"
        print(
            f"{kills} kills of jobs that save {where}: {hosts} hosts lost, {back} jobs came back, lost {len(wrong)}",
            flush=True,
        )
        print(*wrong, sep="\n", flush=True)
        failed |= bool(wrong)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
