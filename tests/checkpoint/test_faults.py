"""Whatever ends a save, at whatever moment: a directory holds the old checkpoint or the new one, whole."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.errors import CheckpointError
from tests.checkpoint.helpers import filled, value_of
from tests.distributed import GUARD, outcomes, refusals, run, wait_for
from tests.faults import Fault, full_disk

KILLS = int(os.environ.get("ACCEL_TEST_KILLS", "6"))


def tensors(value: float) -> dict[str, Any]:
    return filled(value, *range(100_000, 100_006))


def save_for_ever(directory: str, wait: bool) -> None:
    for value in itertools.count(1.0):
        accel.save(tensors(value), directory, wait=wait)


@pytest.mark.parametrize(("world", "wait"), [(1, True), (2, True), (2, False)])
def test_killed_at_any_moment(world: int, wait: bool, tmp_path: Path) -> None:
    """All ranks die by SIGKILL: the checkpoint is whole, the next save works and leaves nothing of the dead ones."""
    directory = tmp_path / "checkpoint"
    numbers = random.Random(world)
    last = 0.0
    for _ in range(max(1, KILLS // 3)):
        kill = partial(Fault, "SIGKILL", at="accel:save", turn=3)
        ends = [kill(rank=rank, after=numbers.uniform(0, 0.05)) for rank in range(world)]
        for result in outcomes(world, save_for_ever, str(directory), wait, breaks=True, fails=ends):
            assert result.error  # where not of its own end, it heard of the other's first
            assert result.error != ("Died",) or result.message == "exit status -9"
        accel.verify(directory)
        assert value_of(directory) >= 1
        last -= 1
        accel.save(tensors(last), directory)
        assert value_of(directory) == last
        assert sorted(p.suffix for p in directory.iterdir()) == [".json", ".safetensors"]


@pytest.mark.parametrize("limit", [0, 1_000_000, 2_400_000])
def test_a_full_disk_changes_nothing(limit: int, tmp_path: Path) -> None:
    accel.save(tensors(1.0), tmp_path / "c")
    before = {path: path.read_bytes() for path in tmp_path.glob("c/*")}
    with full_disk(limit), pytest.raises(CheckpointError, match="File too large"):
        accel.save(tensors(2.0), tmp_path / "c")
    assert {path: path.read_bytes() for path in tmp_path.glob("c/*")} == before
    assert value_of(tmp_path / "c") == 1
    accel.save(tensors(3.0), tmp_path / "c")
    assert value_of(tmp_path / "c") == 3


def save_on_a_full_disk(directory: str, wait: bool) -> None:
    model = accel.setup(torch.nn.Linear(400, 400), backend="ddp").model

    def save(value: float, wait: bool = True) -> Any:
        for parameter in model.parameters():
            parameter.data.fill_(value)
        return accel.save({"model": model}, directory, wait=wait)

    def found() -> set[float]:
        accel.load(directory, {"model": model})
        return {float(v) for p in model.parameters() for v in (p.min(), p.max())}

    save(1.0, False).result(60)  # the ranks' connections for this need a disk
    try:
        with full_disk(10_000 if accel.rank() == 1 else 10**9):
            pending = save(2.0, wait)
            if pending is not None:
                pending.exception(60)
        save(3.0)
    except CheckpointError:
        assert found() == {1}
        accel.barrier()  # a rank hears of the failure while another one still removes its file
        assert len(os.listdir(directory)) == 3
        accel.barrier()
        save(4.0)
        assert found() == {4}
        raise


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_of_one_rank(wait: bool, tmp_path: Path) -> None:
    messages = refusals(2, save_on_a_full_disk, str(tmp_path / "c"), wait, error="CheckpointError")
    assert "File too large" in messages[1]
    assert "rank 1" in messages[0]
    assert "File too large" in messages[0]


FULL = """
import os, sys
import torch
import accel
from accel import CheckpointError

def refused(call, *words):
    try:
        call()
    except CheckpointError as error:
        assert all(word in str(error) for word in (root, "No space left on device", "Free space", *words)), error
    else:
        raise AssertionError("no error")

root = sys.argv[1]
model = torch.nn.Linear(600, 700)
outside = f"{root}-outside"
accel.save({"model": model}, outside)
accel.save({"n": 1}, f"{root}/c")
refused(lambda: accel.save({"model": model}, f"{root}/c"), "/c/accel-")
refused(lambda: accel.save({"model": model}, f"{root}/c", wait=False).result(), "/c/accel-")
refused(lambda: accel.save({"n": 0}, f"{root}/c"), "the last background save failed", "/c/accel-")
refused(lambda: accel.save({"text": "a" * 2_000_000}, f"{root}/c"), "/c/.accel-")
refused(lambda: accel.export(outside, f"{root}/out"), "/out/.model.safetensors")
assert accel.load(f"{root}/c") == {"n": 1}
assert not os.listdir(f"{root}/out"), os.listdir(f"{root}/out")
accel.save({"n": 2}, f"{root}/c")
print("all refused")
"""


def test_full_file_systems_are_named(tmp_path: Path) -> None:
    """A real one, of 1 MiB, in a mount namespace of its own: save, background save, record and export."""
    root = tmp_path / "full"
    root.mkdir()
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount.append('mount -t tmpfs -o size=1m none "$0" && exec "$@"')
    if shutil.which("unshare") is None or subprocess.run([*mount, str(root), "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount")
    command = [*mount, str(root), sys.executable, "-c", FULL, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD * 2, check=False)
    assert done.stdout.strip().endswith("all refused"), done.stderr


def test_errors_name_the_file(tmp_path: Path) -> None:
    accel.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "c")
    (tmp_path / "file").write_text("mine")
    calls: list[Any] = [accel.export, accel.link, lambda _, where: accel.save({"n": 1}, where)]
    for call in calls:
        for where, message in (("x" * 300, "File name too long"), ("file/below", "Not a directory")):
            with pytest.raises(CheckpointError, match=f"{message}.*{where}"):
                call(tmp_path / "c", tmp_path / where)
    with pytest.raises(CheckpointError, match="File exists|Not a directory"):
        accel.save({"n": 1}, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_other_files_are_never_touched(tmp_path: Path) -> None:
    """Not even those with names much like accel's. The files of a dead save are removed."""
    other = ["model.safetensors", "accel-notes.safetensors", "accel-123.safetensors", ".accel-x.record", "log"]
    dead = ["accel-0123456789ab-00000.safetensors", "accel-0123456789ab-00003-still.safetensors"]
    for name in [*other, *dead, ".accel-0123456789ab.record"]:
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    accel.save({"n": 1}, tmp_path)
    accel.save({"n": 2}, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {*other, "folder", "accel.json"}
    assert all((tmp_path / name).read_text() == name for name in other)
    (tmp_path / "accel.json").write_text('{"mine": 1}')
    for call in (lambda: accel.save({"n": 1}, tmp_path), lambda: accel.load(tmp_path)):
        with pytest.raises(CheckpointError, match="was not written by accel"):
            call()
    assert (tmp_path / "accel.json").read_text() == '{"mine": 1}'


def different(directory: str) -> None:
    """Each of these calls is refused on both ranks, and the next one works."""
    accel.init()
    rank, odd = accel.rank(), accel.rank() == 1
    good: dict[str, Any] = {"x": torch.zeros(10), "n": 1}
    accel.save(good, f"{directory}/c")
    other = f"{directory}/d"
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("got dir=.* on rank 0 and dir=.* on rank 1", lambda: accel.save(good, other + "x" * rank)),
        ("rank 1 and rank 0 have different objects", lambda: accel.save({**good, "xy"[rank]: good["x"]}, other)),
        (
            r"x is F32 \[10\] on one rank and F32 \[11\] on rank 1",
            lambda: accel.save({"x": torch.zeros(10 + rank)}, other),
        ),
        (r'state\["bad"\] is a object', lambda: accel.save({"bad": object() if odd else 1}, other)),
        ("Pass the same", lambda: accel.save(good, other, wait=odd)),
        ("Pass the same", lambda: accel.save(good, f"{other}-1", keep=1 + odd)),
        ("Pass the same", lambda: accel.load(f"{directory}/c", good, strict=odd)),
        ("Pass the same", lambda: accel.load(f"{directory}/c", good, convert=odd)),
        ("Pass the same", lambda: accel.load(f"{directory}/c", {} if odd else good)),
    ]
    for message, call in refused:
        with pytest.raises(CheckpointError, match=message):
            call()
    accel.load(f"{directory}/c", good)
    assert os.listdir(directory) == ["c"]


def test_ranks_that_differ(tmp_path: Path) -> None:
    run(2, different, str(tmp_path))


def different_values(directory: str) -> Any:
    rank, net = accel.rank(), torch.nn.Linear(300, 300)
    torch.nn.init.constant_(net.weight, float(rank))
    state = {"n": rank, "net": net, "x": torch.full((5000,), float(rank)), "same": torch.arange(5000.0)}
    accel.save(state, directory)
    accel.load(directory, state)
    return state["n"], net.weight.unique().tolist(), state["x"].unique().tolist(), float(state["same"].sum())


def test_rank_0_s_values_are_saved(tmp_path: Path) -> None:
    expected = (0, [0.0], [0.0], float(torch.arange(5000.0).sum()))
    assert run(2, different_values, str(tmp_path / "c")) == [expected, expected]


def save_alone(directory: str, failed: Path) -> None:
    accel.init()
    accel.process.current().timeout = timedelta(seconds=2)  # of what follows: to come up together may take longer
    if not accel.is_main():
        wait_for(failed.exists)
        return
    try:
        accel.save({"n": 1}, directory)
    finally:
        failed.touch()


def test_a_save_on_one_rank(tmp_path: Path) -> None:
    first, _ = outcomes(2, save_alone, str(tmp_path / "c"), tmp_path / "failed", breaks=True)
    assert "TimeoutError" in first.error
    assert "in 'accel.save': rank 1 is in " in first.message
    assert not (tmp_path / "c" / "accel.json").exists()


class Torn(torch.optim.SGD):
    """Is interrupted after it has changed a weight, once."""

    torn = True

    def step(self, closure: Any = None) -> Any:
        if accel.rank() == 1 and self.torn and self.param_groups[0]["lr"] == 0.5:
            self.torn = False
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(0.5)
            raise KeyboardInterrupt
        plain: Any = torch.optim.SGD.step
        # Once a plain SGD exists, super().step() would run the hooks a second time.
        return (plain.__wrapped__ if hasattr(plain, "hooked") else plain)(self, closure)


def interrupted(backend: str, moment: str, wait: bool, directory: Path) -> None:
    """Rank 1 is interrupted before, or in, a step that rank 0 makes, and all go on from the last checkpoint."""
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 64)
    model, optimizer, _ = accel.setup(net, Torn(net.parameters(), lr=0.1, momentum=0.9), backend=backend)

    def step(moment: str = "") -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        if moment == "before" and accel.rank() == 1:
            raise KeyboardInterrupt
        optimizer.param_groups[0]["lr"] = 0.5 if moment else 0.1
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1

    state = {"model": model, "optimizer": optimizer}
    for _ in range(5):
        step()
    accel.save(state, directory)
    with contextlib.suppress(KeyboardInterrupt):
        step(moment)
    last = "5 steps" if moment == "before" else "6 steps, the last of which was interrupted"
    with pytest.raises(accel.AccelError, match=f"has run 6 steps on rank 0 and {last} on rank 1. Stop all ranks"):
        accel.save(state, directory, wait=wait)
    if backend != "ddp":
        with pytest.raises(accel.AccelError, match=f"after {last}"):
            accel.full_state_dict(model)
    accel.load(directory, state)
    for _ in range(40):  # the drift guard has nothing against it
        step()
    accel.save(state, directory, wait=wait)
    accel.full_state_dict(model)


CASES = [("ddp", "before", True), ("ddp", "in", False), ("fsdp", "before", True)]


@pytest.mark.parametrize(("backend", "moment", "wait"), CASES)
def test_interrupted_ranks_save_no_mixture(backend: str, moment: str, wait: bool, tmp_path: Path) -> None:
    run(2, interrupted, backend, moment, wait, tmp_path / "c")
