"""Sections ``checkpoints`` and ``during``: saving and loading beside the same bytes moved by hand, and beside DCP."""

from __future__ import annotations

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
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

import accel
from accel.checkpoint.shards import memory

from .report import Data, Panel, Section, Verdict, judged, table
from .timing import Times, attempt, clocked, note, over_ranks, scratch, summarise, turns
from .workloads import GPT, adamw, characters

WORLD = 2
LAYOUTS = {"replicated": "ddp", "FSDP2": "fsdp"}
#: By group, the contender that the others are compared with.
BASES = {
    "save": "raw write and fsync",
    "load": "raw pread",
    "load, cold": "raw pread",
    "verify": "raw pread of a share",
    "stall": "memcpy into reused buffers",
}
#: The first contender with the checksums that accel computes too.
BY_HAND = {"save": "raw write, xxh3, fsync", "load": "raw pread, xxh3"}
#: The directory of each save. It is removed before, because all contenders write new files.
FOLDERS = {
    ("save", "accel"): "accel",
    ("save", "DCP"): "dcp",
    ("stall", "accel"): "background",
    ("stall", "DCP"): "dcp-background",
}
#: By group, the most of the first contender's time that accel may take.
LIMITS = {"save": 1.1, "load": 1.15, "load, cold": 1.15, "verify": 1.25, "stall": 1.15}


def _trained(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a GPT, and AdamW with its state."""
    torch.manual_seed(0)
    model = GPT(1024, layers)
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Movers:
    """One state, replicated (``ddp``) or in shards (``fsdp``), with every way to move it."""

    def __init__(self, directory: str, backend: str, layers: int) -> None:
        self.directory = Path(directory)
        self.model, self.optimizer, _ = accel.setup(*_trained(layers), backend=backend, devices="cpu")
        moments = [v for s in self.optimizer.state.values() for v in s.values() if v.dim() > 0]
        self.whole = {str(i): t.detach() for i, t in enumerate([*self.model.parameters(), *moments])}
        self.tensors = [t.to_local() if isinstance(t, DTensor) else t for t in self.whole.values()]
        self.nbytes = sum(t.nbytes for t in self.tensors)
        self.rank, world = accel.rank(), accel.world_size()
        #: Of this rank's tensors, those in the raw file of each rank.
        self.files = {self.rank: self.tensors}
        if backend == "ddp":
            by_size = sorted(self.tensors, key=lambda t: t.nbytes)
            self.files = {r: by_size[r::world] for r in range(world)}
        self.copies = [torch.zeros_like(t) for t in self.files[self.rank]]
        # DCP's background thread speaks to the other ranks while this one goes on.
        self.group = dist.new_group(backend="gloo")

    def digest(self) -> list[int]:
        return [xxhash.xxh3_64_intdigest(memory(t)) for t in self.tensors]

    def raw(self, rank: int) -> Path:
        return self.directory / f"raw{rank}"

    def raw_save(self, step: int = 1 << 40, hashed: bool = False) -> None:
        """Write and sync this rank's share of the bytes to a new file."""
        digest = xxhash.xxh3_64()
        with open(self.raw(self.rank), "wb", buffering=0) as file:
            for tensor in self.files[self.rank]:
                view = memory(tensor)
                while view:
                    if hashed:
                        digest.update(view[:step])
                    view = view[file.write(view[:step]) :]
            os.fsync(file.fileno())

    def raw_load(self, step: int = 1 << 40, hashed: bool = False) -> None:
        """Read all bytes of this rank."""
        digest = xxhash.xxh3_64()
        for rank, tensors in self.files.items():
            with open(self.raw(rank), "rb", buffering=0) as file:
                for tensor in tensors:
                    view = memory(tensor)
                    while view:
                        count = file.readinto(view[:step])
                        if hashed:
                            digest.update(view[:count])
                        view = view[count:]

    def raw_read(self) -> None:
        """Read this rank's share of the bytes into a buffer."""
        buffer = memoryview(bytearray(8 << 20))
        with open(self.raw(self.rank), "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def memcpy(self) -> None:
        """Copy the share that this rank writes into buffers that exist already."""
        for copy, tensor in zip(self.copies, self.files[self.rank], strict=True):
            copy.copy_(tensor)

    def acts(self) -> dict[str, dict[str, Callable[[], Any]]]:
        """Return the contenders of each group. The result of a background save is waited for later."""
        state, whole = {"model": self.model, "optimizer": self.optimizer}, self.whole
        folders = {key: self.directory / name for key, name in FOLDERS.items()}
        path, background = folders["save", "accel"], folders["stall", "accel"]
        dcp_path, dcp_background = folders["save", "DCP"], folders["stall", "DCP"]
        contenders: dict[str, tuple[Callable[[], Any], ...]] = {
            "save": (self.raw_save, lambda: accel.save(state, path), lambda: dcp.save(whole, checkpoint_id=dcp_path)),
            "load": (self.raw_load, lambda: accel.load(path, state), lambda: dcp.load(whole, checkpoint_id=dcp_path)),
            "verify": (self.raw_read, lambda: accel.verify(path)),
            "stall": (
                self.memcpy,
                lambda: accel.save(state, background, wait=False),
                lambda: dcp.async_save(whole, checkpoint_id=dcp_background, process_group=self.group),
            ),
        }
        named = contenders.items()
        found = {group: dict(zip((BASES[group], "accel", "DCP"), acts, strict=False)) for group, acts in named}
        found["save"][BY_HAND["save"]] = lambda: self.raw_save(1 << 20, hashed=True)
        found["load"][BY_HAND["load"]] = lambda: self.raw_load(256 << 10, hashed=True)
        return found | {"load, cold": found["load"]}


def _forget_files(directory: Path) -> None:
    """Drop the files in a directory from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _prepare(moving: Movers, group: str, name: str) -> None:
    if group == "save" and name.startswith("raw"):
        moving.raw(moving.rank).unlink(missing_ok=True)
    if accel.is_main() and (group, name) in FOLDERS:
        shutil.rmtree(moving.directory / FOLDERS[group, name], ignore_errors=True)
    for tensor in moving.tensors if group.startswith("load") else ():
        tensor.zero_()
    if accel.is_main() and group == "load, cold":
        _forget_files(moving.directory)
    if accel.is_main() and group in ("save", "stall"):
        os.sync()
    accel.barrier()


def _rounds(directory: str, backend: str, layers: int, rounds: int, cold: bool) -> dict[str, Any]:
    """Return the times of this rank by group, and its bytes."""
    moving = Movers(directory, backend, layers)
    expected, contenders = moving.digest(), moving.acts()
    if not cold:
        del contenders["load, cold"]
    times: dict[str, dict[str, Times]] = {group: {} for group in contenders}
    for number in range(rounds + 1):
        for group, acts in contenders.items():
            for name in turns(list(acts), number):
                _prepare(moving, group, name)
                seconds, pending = clocked(lambda act=acts[name]: (act(), accel.barrier())[0])
                if number > 0:  # The first round is for what a library does only once.
                    note(times[group].setdefault(name, {}), seconds)
                if pending is not None and group == "stall":
                    pending.result()
                if group.startswith("load") and moving.digest() != expected:
                    raise RuntimeError(f"{name} does not bring back the values that were saved")
    return {"times": times, "nbytes": moving.nbytes}


def _measure(quick: bool) -> Data:
    layers, rounds = (1, 3) if quick else (4, 11)
    data: Data = {"rounds": rounds, "failed": {}, "tables": {}}
    disk = os.environ.get("ACCEL_BENCH_DIR") or tempfile.gettempdir()
    for place, root in (("tmpfs", "/dev/shm"), ("disk", disk)):
        for layout, backend in LAYOUTS.items():
            where = f"{layout}, {place}"
            with tempfile.TemporaryDirectory(prefix="accel-bench-", dir=root) as directory:
                ranks = attempt(data, where, WORLD, _rounds, directory, backend, layers, rounds, place == "disk")
            for group in ranks[0]["times"] if ranks else ():
                rows = summarise(over_ranks([rank["times"][group] for rank in ranks]), BASES[group])
                found = {"nbytes": ranks[0]["nbytes"], "group": group, "where": where, "rows": rows}
                data["tables"][f"{group}: {where}"] = found
    return data


def _tell(data: Data) -> list[str]:
    parts = []
    for key, found in data["tables"].items():
        parts.append(f"### {key}, {found['nbytes'] / 1e6:.0f} MB a rank, {data['rounds']} rounds")
        lines = []
        for name, row in found["rows"].items():
            medians = [f"{row[clock]['median']:.4f}" for clock in ("wall", "cpu")]
            ratios = [f"{row[clock]['ratio']:.2f}" for clock in ("wall", "cpu")]
            lines.append([name, *medians, *ratios])
        parts.append(table(["", "wall, s", "cpu, s", "wall ratio", "cpu ratio"], lines))
    return parts


def _judge(data: Data) -> Iterator[Verdict]:
    for key, found in data["tables"].items():
        rows, cause = found["rows"], ""
        by_hand = rows.get(BY_HAND.get(found["group"].partition(",")[0]))
        if by_hand:
            cause = f"{by_hand['wall']['ratio']:.2f} by hand, with the same checksums"
        yield judged(f"accel, {key}", rows["accel"]["wall"]["ratio"], LIMITS[found["group"]], cause=cause)


def _draw(data: Data) -> list[Panel]:
    panels = []
    for group, limit in LIMITS.items():
        tables = {found["where"]: found["rows"] for found in data["tables"].values() if found["group"] == group}
        names = dict.fromkeys(name for rows in tables.values() for name in rows)
        bars = {n: [rows[n]["wall"]["ratio"] for rows in tables.values()] for n in names}
        if bars:
            panels.append(Panel(group, f"wall time, multiple of {BASES[group]}", list(tables), bars, limit))
    return panels


SECTION = Section("checkpoints", "Checkpoints", _measure, _tell, _judge, _draw)

# -- a save while training goes on -------------------------------------------------------------------------------------

NOTHING = "nothing, for a second"


def _train(loop: Movers, least: int, done: Callable[[], bool]) -> tuple[int, float]:
    """Train until all ranks are done, at least so many steps. Return their number and the seconds of one."""
    inputs, targets = characters()
    begin, count, ready = time.perf_counter(), 0, torch.zeros(1)
    while count < least or not ready.item():
        loop.optimizer.zero_grad()
        F.cross_entropy(loop.model(inputs), targets).backward()
        loop.optimizer.step()
        count += 1
        ready.fill_(done())
        dist.all_reduce(ready, dist.ReduceOp.MIN)
    return count, (time.perf_counter() - begin) / count


def _nothing() -> Future[None]:
    pending: Future[None] = Future()
    threading.Timer(1.0, pending.set_result, (None,)).start()
    return pending


def _round(loop: Movers, save: Callable[[], Any], least: int) -> dict[str, float]:
    accel.barrier()
    if accel.is_main():
        shutil.rmtree(loop.directory)
        loop.directory.mkdir()
        os.sync()
    _, before = _train(loop, least, lambda: True)
    begin = time.perf_counter()
    pending = save()
    stall = time.perf_counter() - begin
    ends: list[float] = []
    pending.add_done_callback(lambda _: ends.append(time.perf_counter() - begin))
    count, during = _train(loop, least, pending.done)
    pending.result()
    _, after = _train(loop, least, lambda: True)
    lost = count * (during - (before + after) / 2)
    return {"lost": lost + stall, "stall": stall, "total": ends[0], "steps": count}


def _rounds_during(directory: str, layers: int, rounds: int, least: int) -> tuple[int, Data]:
    loop = Movers(directory, "ddp", layers)
    saves = loop.acts()["stall"] | {NOTHING: _nothing}
    del saves[BASES["stall"]]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in saves}
    for number in range(rounds + 1):
        for name in turns(list(saves), number):
            figures = _round(loop, saves[name], least)
            if number:  # The first round is for what a library does only once.
                found[name].append(figures)
    return loop.nbytes, found


def _measure_during(quick: bool) -> Data:
    layers, rounds, least = (1, 3, 4) if quick else (4, 9, 8)
    data: Data = {"rounds": rounds, "rows": {}, "failed": {}}
    with scratch() as directory:
        results = attempt(data, "a save during training", WORLD, _rounds_during, directory, layers, rounds, least)
    for name in results[0][1] if results else ():
        slowest: dict[str, list[float]] = {}
        for ranks in zip(*(found[name] for _, found in results), strict=True):
            # A round ends when it does on all ranks.
            for key in ranks[0]:
                slowest.setdefault(key, []).append(max(rank[key] for rank in ranks))
        data["rows"][name] = {key: [median(values), min(values)] for key, values in slowest.items()}
        data["nbytes"] = results[0][0]
    return data


def _tell_during(data: Data) -> list[str]:
    lines = []
    for name, row in data["rows"].items():
        cells = [f"{row[key][0]:.3f} ({row[key][1]:.3f})" for key in ("lost", "stall", "total")]
        lines.append([name, *cells, f"{row['steps'][0]:.0f}"])
    head = ["", "lost, s", "stall, s", "total, s", "steps meanwhile"]
    return [f"### {data.get('nbytes', 0) / 1e6:.0f} MB, {data['rounds']} rounds", table(head, lines)]


def _judge_during(data: Data) -> Iterator[Verdict]:
    if data["rows"]:
        own, noise = data["rows"]["accel"], abs(data["rows"][NOTHING]["lost"][0])
        title = f"training lost by a background save of {own['total'][0]:.1f} s, beside DCP's"
        yield judged(title, own["lost"][0], data["rows"]["DCP"]["lost"][0], "{:.2f} s", noise)


DURING = Section("during", "A save while training goes on", _measure_during, _tell_during, _judge_during)
