"""Snapshots in memory of the hosts. Here that is a directory on disk; hosts are directories too, as in ``test_placement``."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.checkpoint import placement, record, storage
from accel.checkpoint.reader import Reader
from accel.checkpoint.save import Writer
from accel.errors import CheckpointError
from tests.checkpoint.test_placement import At, state, values
from tests.distributed import GUARD, run
from tests.interpreters import executable
from tests.programs import ROOT, clean_environ


@contextmanager
def memory_in(root: str) -> Iterator[None]:
    """Context: shared memory is there."""
    os.makedirs(root, exist_ok=True)
    with replaced(placement, "MEMORY", root):
        yield
    placement.seen_in_memory.clear()


@contextmanager
def warnings() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: found.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("accel").removeHandler(handler)


@contextmanager
def replaced(where: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm/accel")


def held(root: str) -> list[str]:
    return sorted(p.name for p in Path(root).rglob("*.safetensors"))


def loaded(directory: str, backend: str = "fsdp", **options: Any) -> float:
    other = state(0.0, backend)
    accel.load(directory, other, **options)
    (value,) = values(other)
    return value


def plain(value: float) -> dict[str, Any]:
    return {"x": torch.full((1000,), value), "value": value}


def read(directory: str, **options: Any) -> float:
    other = plain(0.0)
    accel.load(directory, other, **options)
    assert set(other["x"].tolist()) == {other["value"]}
    return float(other["value"])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def fails(directory: str, where: Any, name: str, wait: bool) -> None:
    """What ends before the commit, or in it, changes nothing."""

    def save() -> None:
        pending = accel.save(plain(4.0), directory, in_memory=True, wait=wait)
        if pending is not None:
            pending.result()

    with replaced(where, name, full), pytest.raises(CheckpointError, match="No space left.*--shm-size"):
        save()
    assert read(directory) == 3.0


def saves_and_loads(root: str) -> None:
    directory, memory, rank = f"{root}/run/ckpt", f"{root}/memory", accel.rank()
    with memory_in(memory), warnings() as said:
        accel.save(plain(1.0), directory)
        on_disk = os.listdir(directory)
        accel.save(plain(2.0), directory, in_memory=True)
        assert len(held(memory)) == 2
        assert read(directory) == 2.0
        assert accel.latest(f"{root}/run") == directory
        accel.verify(directory)
        with pytest.raises(CheckpointError, match="strict, check and convert are"):
            accel.load(directory, {}, strict=rank == 0)
        # The place of the old one is taken; in the background too.
        pending = accel.save(plain(3.0), directory, in_memory=True, wait=False)
        assert pending is not None
        pending.result()
        accel.barrier()
        assert len(held(memory)) == 2
        assert set(os.listdir(directory)) == {*on_disk, ".accel.memory"}
        assert read(directory) == 3.0
        for where, name, wait in ((storage, "reserve", True), (Writer, "put", True), (Writer, "put", False)):
            fails(directory, where, name, wait)
        with pytest.raises(CheckpointError, match="before this one failed"):
            accel.save(plain(4.0), directory, in_memory=True)
        # A clock that goes back makes nothing older.
        with replaced(record, "time", SimpleNamespace(time=lambda: 1.0)):
            accel.save(plain(5.0), directory, in_memory=True)
        assert read(directory) == 5.0
        assert not said
        accel.barrier()
        # What is damaged is passed over for what is on disk, with one warning, whatever the check; then it is set aside.
        if rank == 0:
            flip(next(Path(memory).rglob("*-00001.safetensors")))
        accel.barrier()
        assert read(directory, check="stream") == read(directory) == 1.0
        assert [("is damaged between" in one, "on disk is" in one) for one in said] == [(True, True)] * (rank == 0)
        accel.save(plain(6.0), directory, in_memory=True)
        accel.barrier()
        assert read(directory) == 6.0
        accel.save(plain(7.0), directory)
        accel.barrier()
        assert not held(memory)
        assert read(directory) == 7.0
        accel.save(state(8.0), directory, in_memory=True)
        assert loaded(directory) == loaded(directory, "ddp", check="stream") == 8.0


def other_world(root: str) -> None:
    with memory_in(f"{root}/memory"):
        assert loaded(f"{root}/run/ckpt", "single") == 8.0


def damaged_series(root: str) -> None:
    """Of a series what is on disk has another name: the next start goes on from there, and the next save frees the memory."""
    rank = accel.rank()
    with memory_in(f"{root}/memory"), warnings() as said:
        accel.save(plain(1.0), f"{root}/run/step-1")
        accel.save(plain(2.0), f"{root}/run/step-2", in_memory=True)
        with pytest.raises(CheckpointError, match=r"step-2 is in memory, in .*, which no link on disk can reach"):
            accel.link(f"{root}/run/step-2", f"{root}/run/best")
        if rank == 0:
            flip(next(Path(f"{root}/memory").rglob("*-00001.safetensors")))
        accel.barrier()
        last = accel.latest(f"{root}/run")
        assert last == f"{root}/run/step-2"
        with pytest.raises(
            CheckpointError, match="does not exist.*is damaged between.*set aside in .*start again, and accel.latest"
        ):
            read(last)
        assert not said
        assert accel.latest(f"{root}/run") == f"{root}/run/step-1"
        assert read(f"{root}/run/step-1") == 1.0
        accel.save(plain(3.0), f"{root}/run/step-3", in_memory=True)
        accel.barrier()
        assert len(held(f"{root}/memory")) == 2
        assert accel.latest(f"{root}/run") == f"{root}/run/step-3"
        assert read(f"{root}/run/step-3") == 3.0
        # A file that cannot be read just now proves nothing.
        with (
            replaced(Reader, "verify", full),
            pytest.raises(CheckpointError, match="No space left.*remove .*step-3, and"),
        ):
            read(f"{root}/run/step-3")
        assert read(f"{root}/run/step-3") == 3.0
        # What one host has lost of it, nobody can bring back.
        for spoil in (lambda path: os.truncate(path, 100), Path.unlink):
            accel.save(plain(3.0), f"{root}/run/step-3", in_memory=True)
            if rank == 0:
                spoil(next(Path(f"{root}/memory").rglob("*-00001.safetensors")))
            accel.barrier()
            assert accel.latest(f"{root}/run") == f"{root}/run/step-1"
            assert "cut or changed" in said[-1] or "is not complete, load another" in said[-1]
            with pytest.raises(CheckpointError, match="does not exist.*1 of 2 files.*set aside in .*start again, and"):
                read(f"{root}/run/step-3")
            with pytest.raises(CheckpointError, match="does not exist; expected[^;]*$"):
                read(f"{root}/run/step-3")
            assert accel.latest(f"{root}/run") == f"{root}/run/step-1"
        # The last of a series leaves nothing in memory but this user's own folder.
        accel.save(plain(4.0), f"{root}/run/step-4")
        accel.barrier()
        assert not [*Path(f"{root}/memory").glob("*/*")]


def test_the_newest_snapshot_is_in_memory(tmp_path: Path) -> None:
    run(2, saves_and_loads, str(tmp_path))
    run(1, other_world, str(tmp_path))


def starts_anew(rank: int, memory: str) -> None:
    """The host of one rank, whose memory is empty then."""
    accel.barrier()
    if accel.rank() == rank:
        shutil.rmtree(memory)
        os.makedirs(memory)
    accel.barrier()


def on_two_hosts(root: str) -> None:
    rank = accel.rank()
    memory = f"{root}/memory{rank}"
    with At(root, f"host{rank}"), memory_in(memory), warnings() as said:
        accel.save(state(1.0), "run/step-1", placement="host")
        accel.save(state(2.0), "run/step-1", in_memory=True)
        assert len(held(memory)) == 1
        assert loaded("run/step-1") == 2.0
        # One host starts anew, and its part of what was in memory is nowhere.
        starts_anew(1, memory)
        assert accel.latest("run", placement="host") == "run/step-1"
        assert loaded("run/step-1") == 1.0
        assert ["on none of these hosts" in one for one in said] == [True] * (rank == 0)
        # With a copy it is whole; and the next of the series takes its place, in the background too.
        accel.save(state(3.0), "run/step-3", in_memory=True, replicas=1)
        starts_anew(1, memory)
        assert accel.latest("run", placement="host") == "run/step-3"
        assert loaded("run/step-3", "ddp") == 3.0
        pending = accel.save(state(4.0), "run/step-4", in_memory=True, wait=False)
        assert pending is not None
        accel.teardown()  # waits for it
        assert pending.done()
        pending.result()
        accel.barrier()
        assert accel.latest("run", placement="host") == "run/step-4"
        assert loaded("run/step-4") == 4.0
        assert len(held(f"{root}/memory0")) == 1
        # Disks of hosts in the background: one record on all of them.
        pending = accel.save(state(5.0), "run/step-5", placement="host", wait=False)
        assert pending is not None
        pending.result()
        accel.barrier()
        assert accel.latest("run", placement="host") == "run/step-5"
        assert loaded("run/step-5") == 5.0
        assert len(held(f"host{rank}/run/step-5")) == 0
        assert not held(f"{root}/memory0")
        assert len(said) == (rank == 0)


def test_a_part_that_is_lost(tmp_path: Path) -> None:
    run(2, on_two_hosts, str(tmp_path))


def test_a_series_has_one_snapshot(tmp_path: Path) -> None:
    """And what another job left there is not touched, nor read where the directory was removed."""
    memory = str(tmp_path / "memory")
    one: dict[str, Any] = {"x": torch.zeros(3), "n": 0}
    with memory_in(memory):
        accel.init()
        for n in (1, 2, 3):
            accel.save(one | {"n": n}, tmp_path / f"run/step-{n}", in_memory=True)
            assert len(held(memory)) == 1
            assert accel.latest(tmp_path / "run") == str(tmp_path / f"run/step-{n}")
        placement.seen_in_memory.clear()  # as in another process
        accel.save(one, tmp_path / "run/step-9", in_memory=True)
        accel.save(one, tmp_path / "run/step-9", keep=1)
        assert len(held(memory)) == 1
        assert accel.load(tmp_path / "run/step-3")["n"] == 3
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").mkdir()
        assert accel.latest(tmp_path / "run") is None
        # Of a store.
        accel.save(one | {"n": 1}, "memory://bucket/run/step-1")
        accel.save(one | {"n": 2}, "memory://bucket/run/step-2", in_memory=True)
        assert accel.latest("memory://bucket/run") == "memory://bucket/run/step-2"
        assert accel.load("memory://bucket/run/step-2")["n"] == 2
        accel.save(one | {"n": 3}, "memory://bucket/run/step-3")
        assert accel.latest("memory://bucket/run") == "memory://bucket/run/step-3"
        assert len(held(memory)) == 1
        accel.teardown()


def test_a_name_without_a_number_in_a_store(tmp_path: Path) -> None:
    """The store lists nothing of what is in memory alone."""
    memory, root = str(tmp_path / "memory"), "memory://unnumbered/run"
    one: dict[str, Any] = {"x": torch.zeros(3)}
    with memory_in(memory):
        accel.init()
        for value, place in ((1, f"{root}/first"), (2, f"{root}/last"), (3, f"{root}/last"), (4, f"{root}/step-1")):
            accel.save(one | {"n": value}, place, in_memory=True)
            assert accel.latest(root) == accel.latest(place) == accel.latest(root, placement="host") == place
            assert accel.load(place)["n"] == value
        assert len(held(memory)) == 3
        for value, place in ((5, f"{root}/last"), (6, "memory://unnumbered")):
            accel.save(one | {"n": value}, place)
            assert accel.latest(place) == place
            assert accel.load(place)["n"] == value
        assert len(held(memory)) == 2
        for name in ("best", "best2", "best"):  # that one has a number makes them no series
            accel.save(one | {"n": 8}, f"{root}/{name}", in_memory=True)
        assert accel.load(f"{root}/best")["n"] == accel.load(f"{root}/best2")["n"] == 8
        accel.save(one | {"n": 9}, f"{root}/best3", in_memory=True)
        assert accel.load(f"{root}/best")["n"] == 8
        with pytest.raises(CheckpointError, match="does not exist"):
            accel.load(f"{root}/best2")
        accel.save(one | {"n": 7}, "memory://unnumbered-7", in_memory=True)
        assert accel.load("memory://unnumbered-7")["n"] == 7
        assert not (tmp_path / "memory:").exists()
        accel.teardown()


def test_what_is_frozen_is_linked_on_disk_all_the_same(tmp_path: Path) -> None:
    net = nn.Linear(8, 8)
    net.bias.requires_grad_(False)
    for n in (1, 2, 3, 4):
        accel.save({"model": net, "n": n}, tmp_path / f"run/step-{n}", in_memory=n % 2 == 0)
    (still,) = (tmp_path / "run/step-3").glob("*-still.safetensors")
    assert still.stat().st_nlink == 2
    accel.save({}, tmp_path / "run/step-5")
    accel.teardown()


def test_memory_that_is_not_ones_own(tmp_path: Path) -> None:
    planted = tmp_path / f"accel-{os.geteuid()}"
    with memory_in(str(tmp_path)):
        planted.mkdir(mode=0o755)
        with pytest.raises(CheckpointError, match="not a directory of this user alone"):
            accel.save({}, tmp_path / "run", in_memory=True)
        planted.rmdir()
        planted.symlink_to(tmp_path)
        with pytest.raises(CheckpointError, match="not a directory of this user alone"):
            accel.save({}, tmp_path / "run", in_memory=True)
    none = replaced(placement, "MEMORY", str(tmp_path / "none"))
    with none, pytest.raises(CheckpointError, match="needs shared memory in .*none"):
        accel.save({}, tmp_path / "run", in_memory=True)
    accel.teardown()


def test_memory_that_others_may_look_into_is_passed_over_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    with memory_in(str(memory)):
        accel.save({"n": 1}, tmp_path / "run/step-1")
        accel.save({"n": 2}, tmp_path / "run/step-2", in_memory=True)
        assert accel.latest(tmp_path / "run").endswith("step-2")  # type: ignore[union-attr]
        home = memory / f"accel-{os.geteuid()}"
        assert not any("passed over" in one.message for one in caplog.records)
        home.chmod(0o755)
        for _ in range(2):  # it is said once
            assert accel.latest(tmp_path / "run").endswith("step-1")  # type: ignore[union-attr]
        (said,) = (one.message for one in caplog.records if "passed over" in one.message)
        assert said == (
            f"what was saved in memory is passed over: others may look into {home}: chmod 700 it, or remove it"
        )
        home.chmod(0o700)
        assert accel.load(accel.latest(tmp_path / "run"))["n"] == 2  # type: ignore[arg-type]
    accel.teardown()


def test_a_restart_of_torchrun_goes_on_from_memory(tmp_path: Path) -> None:
    """Rank 1 is killed in step 7, when memory has step 6 and the disk step 2; it ends as a run that nothing disturbs."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--monitor-interval=0.1",
    ]
    command = [executable(), *torchrun, str(Path(__file__).parent / "resumed.py"), str(tmp_path / "run")]
    environ = clean_environ() | {"PYTHON_EXEC": executable()}
    done = subprocess.run(command, env=environ, cwd=ROOT, check=False, capture_output=True, text=True, timeout=GUARD)
    found = re.search(r"began at step 6, ended with (\S+)", done.stdout)
    assert found, done.stdout + done.stderr
    torch.manual_seed(0)
    net = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(8):
        optimizer.zero_grad()
        net(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
    assert float(found[1]) == pytest.approx(sum(float(p.detach().double().sum()) for p in net.parameters()), rel=1e-5)
    assert not Path(placement.memory_place(str(tmp_path / "run")) or "").exists()


def test_a_damaged_snapshot_of_a_series_is_no_error_for_ever(tmp_path: Path) -> None:
    run(2, damaged_series, str(tmp_path))
