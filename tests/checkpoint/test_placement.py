"""Checkpoints on disks of hosts: each rank works in a directory of its own, and names the checkpoint relative to it."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.__main__ import main
from accel.checkpoint import placement, record, storage
from accel.checkpoint.save import Writer, save_alone
from accel.errors import CheckpointError
from tests.distributed import run


class At:
    """Context: this rank is on one of the hosts."""

    def __init__(self, root: str, host: str) -> None:
        self.home = Path(root) / host
        self.home.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Path:
        self._before = os.getcwd()
        os.chdir(self.home)
        return self.home

    def __exit__(self, *error: object) -> None:
        os.chdir(self._before)


def state(value: float, backend: str = "fsdp") -> dict[str, Any]:
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    with torch.no_grad():
        for p in raw.parameters():
            p.fill_(value)
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters()), backend=backend, devices="cpu")
    for p in raw.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "value": value}


def values(found: dict[str, Any]) -> set[float]:
    """The model's, and the plain one."""
    whole = accel.full_state_dict(found["model"])
    return {round(float(x), 3) for t in whole.values() for x in t.flatten()} | {found["value"]}


def files(home: Path, name: str = "ckpt") -> list[str]:
    return sorted(p.name for p in (home / name).iterdir() if p.suffix == ".safetensors")


def saves_and_loads(root: str) -> None:
    rank = accel.rank()
    with At(root, f"host{rank}") as home:
        one = state(2.0)
        accel.save(one, "ckpt", placement="host")
        assert len(files(home)) == 1
        assert files(home)[0].endswith(f"{rank:05d}.safetensors")
        assert {p.name for p in (home / "ckpt").iterdir()} == {".accel.lock", "accel.json", *files(home)}
        other = state(0.0)
        accel.load("ckpt", other)
        assert values(other) == {2.0}
        assert len(files(home)) == 1  # nothing came from elsewhere
        # Whole weights: what lies on other hosts is fetched.
        whole = state(0.0, "ddp")
        accel.load("ckpt", whole)
        assert values(whole) == {2.0}
        assert len(files(home)) == 3
        accel.save(one | {"value": 3.0}, "ckpt", placement="host")
        assert len(files(home)) == 1
        # Who looks at one host alone is told.
        for act in (accel.verify, lambda c: accel.export(c, "out"), lambda c: accel.link(c, "second")):
            with pytest.raises(
                CheckpointError, match="lies on the disk of host.*export and link.*see the files of one"
            ):
                act("ckpt")  # type: ignore[operator]
        assert main(["diff", "ckpt", "ckpt"]) == 1
        # Copies are each host's own to compare: a byte of one that falls to no other rank.
        accel.save(one | {"value": 3.0}, "copies", placement="host", replicas=2)
        accel.verify("copies")
        if rank == 1:
            damaged = home / "copies" / files(home, "copies")[0]
            damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
        with pytest.raises(CheckpointError, match="rank 1|is damaged between"):
            accel.verify("copies")
        shutil.rmtree("copies")
        assert accel.latest(".") is None
        assert accel.latest(".", placement="host") == "./ckpt"
        # An ordinary checkpoint is one where all ranks see it: no load could give one host's to the others.
        if rank == 1:
            save_alone({"value": 4.0}, "alone")
        save_alone({"value": 5.0}, "each")
        assert accel.latest(".", placement="host") == "./ckpt"
    accel.save({"value": 6.0}, f"{root}/shared")
    assert accel.latest(root, placement="host") == f"{root}/shared"


def test_each_host_keeps_its_own_files(tmp_path: Path) -> None:
    run(3, saves_and_loads, str(tmp_path))


def survives(root: str) -> None:
    rank = accel.rank()
    with At(root, f"host{rank}") as home:
        one = state(2.0)
        accel.save(one, "ckpt/step-1", placement="host", replicas=1, keep=2)
        assert len(files(home, "ckpt/step-1")) == 2
        accel.save(one | {"value": 3.0}, "ckpt/step-2", placement="host", keep=2)
        accel.barrier()
        if rank == 1:  # replaced by an empty one
            shutil.rmtree("ckpt")
        accel.barrier()
        other = state(0.0)
        assert accel.latest("ckpt", placement="host") == "ckpt/step-1"
        with pytest.raises(CheckpointError, match="1 of 3 files.* on none of these hosts.*left on"):
            accel.load("ckpt/step-2", other)
        accel.load("ckpt/step-1", other)
        assert values(other) == {2.0}
        accel.save(one | {"value": 4.0}, "ckpt/step-3", placement="host", replicas=1, keep=1)
        accel.barrier()
        assert os.listdir("ckpt") == ["step-3"]
        assert {p.name.split("-")[0] for p in (home / "ckpt/step-3").iterdir()} == {
            ".accel.lock",
            "accel.json",
            "accel",
        }


def full(path: str) -> None:
    if path.endswith(".record.tmp"):  # what a file is called while it comes
        raise OSError(errno.ENOSPC, "No space left on device", path)


def survives_in_the_background(root: str) -> None:
    """The copies go from host to host while the ranks train; the end of accel in a process waits for them."""
    rank = accel.rank()
    with At(root, f"host{rank}") as home, pytest.MonkeyPatch.context() as patch:
        send, trained = placement._send, threading.Event()
        patch.setattr(placement, "_send", lambda *args: (trained.wait(20), send(*args)))
        pending = accel.save(state(6.0), "back", placement="host", replicas=1, wait=False)
        assert pending is not None
        assert [sum(accel.all_gather([torch.ones(9)])[0].tolist()) for _ in range(50)] == [9.0 * 3] * 50
        assert not pending.done()
        trained.set()
        assert [sum(accel.all_gather([torch.ones(9)])[0].tolist()) for _ in range(50)] == [9.0 * 3] * 50
        pending.result()
        assert len(files(home, "back")) == 2
        accel.barrier()
        if rank == 1:
            shutil.rmtree("back")
        accel.barrier()
        accel.load("back", other := state(0.0))
        assert values(other) == {6.0}
        # A copy for which there is no room is an error on every rank, and what was there stays.
        if rank == 2:
            create = storage.Local.create
            patch.setattr(storage.Local, "create", lambda *args: full(args[1]) or create(*args))
        pending = accel.save(state(7.0), "back", placement="host", replicas=1, wait=False)
        assert pending is not None
        with pytest.raises(CheckpointError, match="No space left"):
            pending.result(20)


def damaged_on_one(root: str) -> None:
    """Where a file is damaged, its copy on another host is taken once it is removed."""
    rank = accel.rank()
    with At(root, f"host{rank}") as home:
        accel.save(state(2.0), "ckpt", placement="host", replicas=1)
        mine = min((home / "ckpt").glob(f"accel-*-{rank:05d}*.safetensors"))
        content = bytearray(mine.read_bytes())
        content[-1] ^= 1
        if rank == 0:
            mine.write_bytes(content)
        accel.barrier()
        other = state(0.0)
        with pytest.raises(CheckpointError, match="remove this file here: accel.load on all hosts then takes its copy"):
            accel.load("ckpt", other)
        if rank == 0:
            mine.unlink()
        accel.barrier()
        accel.load("ckpt", other)
        assert values(other) == {2.0}


def test_a_damaged_file_has_a_copy(tmp_path: Path) -> None:
    run(2, damaged_on_one, str(tmp_path))


def test_a_lost_host_is_found_on_its_neighbour(tmp_path: Path) -> None:
    run(3, survives, str(tmp_path))
    run(3, survives_in_the_background, str(tmp_path))


def fewer(root: str, hosts: list[str], expected: float) -> None:
    with At(root, hosts[accel.rank()]):
        other = state(0.0)
        accel.load("ckpt", other)
        assert values(other) == {expected}


def saves(root: str, hosts: list[str], value: float, replicas: int) -> None:
    with At(root, hosts[accel.rank()]):
        accel.save(state(value), "ckpt", placement="host", replicas=replicas)


def test_other_worlds_on_other_hosts(tmp_path: Path) -> None:
    root = str(tmp_path)
    run(4, saves, root, ["a", "a", "b", "b"], 5.0, 1)
    shutil.rmtree(tmp_path / "a")
    run(1, fewer, root, ["b"], 5.0)
    run(3, fewer, root, ["a", "b", "c"], 5.0)
    # One disk for all after all: as on a file system that they share.
    run(2, saves, root, ["nfs", "nfs"], 6.0, 1)
    run(3, fewer, root, ["nfs", "nfs", "x"], 6.0)
    assert len(files(tmp_path / "nfs")) == 2


def commits_by_half(root: str) -> None:
    rank = accel.rank()
    with At(root, f"host{rank}") as home:
        accel.save(state(2.0), "ckpt", placement="host")
        old = (home / "ckpt/accel.json").read_bytes()
        kept = home / "kept"
        shutil.copytree("ckpt", kept)
        accel.save(state(3.0), "ckpt", placement="host")
        if rank == 1:  # as if killed before it had the new record
            for file in kept.iterdir():
                shutil.copy(file, home / "ckpt" / file.name)
            assert (home / "ckpt/accel.json").read_bytes() == old
        accel.barrier()
        other = state(0.0)
        accel.load("ckpt", other)
        assert values(other) == {3.0}
        with pytest.MonkeyPatch.context() as patch:  # another host is rank 0 now, and its clock is late
            patch.setattr(record, "time", SimpleNamespace(time=lambda: 1.0))
            accel.save(other, "later", placement="host")
        assert accel.latest(".", placement="host") == "./later"
        # A save that fails leaves both, since each is the only one for some host.
        broken = state(4.0) | {"bad": lambda: 0}
        with pytest.raises(CheckpointError):
            accel.save(broken, "ckpt", placement="host")
        accel.load("ckpt", other)
        assert values(other) == {3.0}
        with pytest.raises(CheckpointError, match="replicas=1"):
            accel.save(other, "ckpt", replicas=1)


def test_a_commit_on_one_host_is_the_commit(tmp_path: Path) -> None:
    run(2, commits_by_half, str(tmp_path))


def ends_in_a_commit(root: str) -> tuple[str | None, float]:
    """Rank 0's host has the record of the second save, rank 1's that of the first."""
    with At(root, f"host{accel.rank()}"):
        accel.save(state(2.0), "ckpt", placement="host")
        put = Writer.put
        if accel.rank() == 1:
            Writer.put = lambda self, content: os.stat("no such file")  # type: ignore[method-assign,assignment]
        try:
            with pytest.raises(CheckpointError, match="no such file"):
                accel.save(state(3.0), "ckpt", placement="host")
        finally:
            Writer.put = put  # type: ignore[method-assign]
        found = accel.latest("ckpt", placement="host")
        other = state(0.0)
        accel.load("ckpt", other)
        return found, other["value"]


def test_a_save_that_ended_in_the_commit_is_found(tmp_path: Path) -> None:
    """``latest`` finds what ``load`` does: else a job would begin anew."""
    assert run(2, ends_in_a_commit, str(tmp_path)) == [("ckpt", 3.0)] * 2
