"""Section ``checkpoints``: saving and loading beside the same bytes moved by hand, and beside other libraries."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import accel

from .movers import BASES, Movers
from .ranks import attempt, restart_peak, status
from .section import Data, Panel, Section, Verdict, judged, table
from .timing import Times, clocked, note, over_ranks, summarise

WORLD = 2
LAYOUTS = {"replicated": "ddp", "FSDP2": "fsdp"}
#: By group, the most of the first contender's time that accel may take.
LIMITS = {"save": 1.1, "load, warm": 1.15, "verify": 1.25, "load, cold": 1.15, "stall": 1.15}
MIB = 2**20


def _prepare(moving: Movers, group: str, name: str, cold: bool) -> None:
    if group == "save" and name.startswith("raw"):
        # accel's files are new ones in each round.
        moving.raw(moving.rank).unlink(missing_ok=True)
    if not accel.is_main():
        return
    if group in ("save", "stall") and cold:
        os.sync()
    for path in moving.directory.rglob("*") if group == "load, cold" else ():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _rounds(directory: str, backend: str, layers: int, rounds: int, cold: bool) -> dict[str, Any]:
    """Return times and extra memory of this rank by group, and its bytes."""
    moving = Movers(directory, backend, layers)
    expected = moving.digest()
    groups = [group for group in LIMITS if cold or group != "load, cold"]
    times: dict[str, dict[str, Times]] = {group: {} for group in groups}
    extra: dict[str, dict[str, int]] = {group: {} for group in groups}
    for number in range(rounds + 1):
        for group in groups:
            acts = list(moving.acts(group).items())
            turn = number % len(acts)
            for name, act in (*acts[turn:], *acts[:turn]):
                loads = group.startswith("load")
                for tensor in moving.tensors if loads else ():
                    tensor.zero_()
                _prepare(moving, group, name, cold)
                accel.barrier()
                before = restart_peak()
                seconds, pending = clocked(lambda act=act: (act(), accel.barrier())[0])
                if number > 0:
                    note(times[group].setdefault(name, {}), seconds)
                else:
                    # The first round is for memory, and for what a library does only once.
                    extra[group][name] = max(status("VmHWM") - before, 0)
                if group == "stall" and pending is not None:
                    pending.result()
                if loads and moving.digest() != expected:
                    raise RuntimeError(f"{name} does not bring back the values that were saved")
    return {"times": times, "extra": extra, "nbytes": moving.nbytes}


def _measure(quick: bool) -> Data:
    layers, rounds = (1, 3) if quick else (3, 11)
    data: Data = {"rounds": rounds, "failed": {}, "tables": {}}
    disk = os.environ.get("ACCEL_BENCH_DIR") or tempfile.gettempdir()
    for place, root in (("tmpfs", "/dev/shm"), ("disk", disk)):
        for layout, backend in LAYOUTS.items():
            where = f"{layout}, {place}"
            with tempfile.TemporaryDirectory(prefix="accel-bench-", dir=root) as directory:
                ranks = attempt(data, where, WORLD, _rounds, directory, backend, layers, rounds, place == "disk")
            for group in ranks[0]["times"] if ranks else ():
                rows = summarise(over_ranks([rank["times"][group] for rank in ranks]), BASES[group])
                extra = {name: max(rank["extra"][group][name] for rank in ranks) for name in rows}
                told = {"nbytes": ranks[0]["nbytes"], "group": group, "where": where, "rows": rows, "extra": extra}
                data["tables"][f"{group}: {where}"] = told
    return data


def _tell(data: Data) -> list[str]:
    parts = []
    for key, told in data["tables"].items():
        parts.append(f"### {key}, {told['nbytes'] / 1e6:.0f} MB a rank, {data['rounds']} rounds")
        lines = []
        for name, row in told["rows"].items():
            wall, cpu = row["wall"], row["cpu"]
            line = [name, f"{wall['median']:.4f}", f"{cpu['median']:.4f}", f"{wall['ratio']:.2f}"]
            lines.append([*line, f"{cpu['ratio']:.2f}", f"{told['extra'][name] / MIB:.0f}"])
        parts.append(table(["", "wall, s", "cpu, s", "wall ratio", "cpu ratio", "extra, MiB a rank"], lines))
    return parts


def _judge(data: Data) -> Iterator[Verdict]:
    for key, told in data["tables"].items():
        rows, group = told["rows"], told["group"]
        yield judged(f"{group}: accel, {told['where']}", rows["accel"]["wall"]["ratio"], LIMITS[group])
        if group in ("save", "load, warm"):
            yield judged(f"extra memory of a {key}", told["extra"]["accel"] / MIB, 64, "{:.0f} MiB")


def _draw(data: Data) -> list[Panel]:
    panels = []
    for group, limit in LIMITS.items():
        tables = {told["where"]: told["rows"] for told in data["tables"].values() if told["group"] == group}
        names = dict.fromkeys(name for rows in tables.values() for name in rows)
        bars = {n: [rows[n]["wall"]["ratio"] for rows in tables.values()] for n in names}
        if bars:
            panels.append(Panel(group, f"wall time, multiple of {BASES[group]}", list(tables), bars, limit))
    return panels


SECTION = Section("checkpoints", "Checkpoints", _measure, _tell, _judge, _draw)
