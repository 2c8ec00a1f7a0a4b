"""One rank of the job that section ``restart`` kills, under torchrun. It notes the end of each phase."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.bench.workloads import GPT, adamw

#: The end of each phase, by a clock that all processes of the machine share.
MARKS: dict[str, float] = {}
#: Model, optimizer, loader, and the function that saves them.
Job = tuple[Any, Any, Any, Callable[[], Any]]
SAVED_AT, KILLED_AT = 2, 3
CONTEXT = 32


def mark(phase: str) -> None:
    MARKS[phase] = time.clock_gettime(time.CLOCK_BOOTTIME)


def build(blocks: int) -> tuple[GPT, torch.optim.Optimizer, Any]:
    """The user's program, the same for all contenders."""
    torch.manual_seed(0)
    model = GPT(768, blocks, CONTEXT)
    tokens = torch.randint(256, (64, CONTEXT + 1))
    return model, adamw(model), DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 2)


def by_accel(backend: str, blocks: int, folder: Path) -> Job:
    import accel

    backend, _, deferred = backend.partition(", ")
    last = accel.latest(folder / "saved")
    with accel.deferred_init(weights=last) if deferred else contextlib.nullcontext():
        model, optimizer, loader = build(blocks)
    accel.init()
    mark("start")
    model, optimizer, loader = accel.setup(model, optimizer, loader, backend=backend, devices="cpu")
    state = {"model": model, "optimizer": optimizer}
    if last:
        # A deferred model has its weights.
        accel.load(last, {"optimizer": optimizer} if deferred else state)
    mark("setup and load")
    return model, optimizer, loader, lambda: accel.save(state, folder / "saved")


def raw_ddp(blocks: int, folder: Path) -> Job:
    raw, optimizer, loader = build(blocks)
    dist.init_process_group("gloo")
    mark("start")
    model = DistributedDataParallel(raw, gradient_as_bucket_view=True)
    path = folder / "saved" / "state.pt"
    if path.exists():
        saved = torch.load(path, mmap=True, weights_only=True)
        raw.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    mark("setup and load")

    def save() -> None:
        if dist.get_rank() == 0:
            path.parent.mkdir()
            torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict()}, path)
        dist.barrier()

    return model, optimizer, loader, save


def main() -> None:
    contender, blocks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    kind, _, backend = contender.partition(" ")
    model, optimizer, loader, save = by_accel(backend, blocks, folder) if kind == "accel" else raw_ddp(blocks, folder)
    notes = folder / f"marks-{attempt}-{rank}.json"
    for step, (x, y) in enumerate(loader, 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        mark("step")
        notes.write_text(json.dumps(MARKS))
        if attempt:
            break
        if step == SAVED_AT:
            save()
        if step == KILLED_AT and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
