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
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.checkpoint import folder, record
from accel.errors import CheckpointError
from tests.distributed import GUARD, outcomes, refusals, run, wait_for
from tests.faults import Fault, full_disk

KILLS = int(os.environ.get("ACCEL_TEST_KILLS", "6"))


def tensors(value: float) -> dict[str, Any]:
    return {"n": value, "x": {str(i): torch.full((100_000 + i,), value) for i in range(6)}}


def read(directory: Any) -> float:
    """The value of a checkpoint all of whose tensors must have it."""
    state = tensors(-1.0)
    accel.load(directory, state)
    found = {state["n"], *(float(v) for x in state["x"].values() for v in (x.min(), x.max()))}
    assert len(found) == 1, f"a mixture: {found}"
    return float(state["n"])


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
        ends = [
            Fault("SIGKILL", at="accel:save", rank=rank, turn=3, after=numbers.uniform(0, 0.05))
            for rank in range(world)
        ]
        for result in outcomes(world, save_for_ever, str(directory), wait, breaks=True, fails=ends):
            assert result.error  # where not of its own end, it heard of the other's first
            assert result.error != ("Died",) or result.message == "exit status -9"
        accel.verify(directory)
        assert read(directory) >= 1
        last -= 1
        accel.save(tensors(last), directory)
        assert read(directory) == last
        assert sorted(p.suffix for p in directory.iterdir()) == [".json", ".safetensors"]


def content(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.mark.parametrize("limit", [0, 1_000_000, 2_400_000])
def test_a_full_disk_changes_nothing(limit: int, tmp_path: Path) -> None:
    accel.save(tensors(1.0), tmp_path / "c")
    before = content(tmp_path / "c")
    with full_disk(limit), pytest.raises(CheckpointError, match="File too large"):
        accel.save(tensors(2.0), tmp_path / "c")
    assert content(tmp_path / "c") == before
    assert read(tmp_path / "c") == 1
    accel.save(tensors(3.0), tmp_path / "c")
    assert read(tmp_path / "c") == 3


def save_on_a_full_disk(directory: str, wait: bool) -> None:
    """Each rank writes half of a model."""
    model = accel.setup(torch.nn.Linear(400, 400), backend="ddp").model

    def value() -> float:
        accel.load(directory, {"model": model})
        (found,) = {float(v) for p in model.parameters() for v in (p.min(), p.max())}
        return found

    def save(value: float, wait: bool = True) -> Any:
        for parameter in model.parameters():
            parameter.data.fill_(value)
        return accel.save({"model": model}, directory, wait=wait)

    save(1.0)
    try:
        with full_disk(10_000 if accel.rank() == 1 else 10**9):
            pending = save(2.0, wait)
            if pending is not None:
                pending.exception(60)
        save(3.0)
    except CheckpointError:
        assert value() == 1
        accel.barrier()  # a rank hears of the failure while another one still removes its file
        assert len(os.listdir(directory)) == 3
        accel.barrier()
        save(4.0)
        assert value() == 4
        raise


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_of_one_rank_is_an_error_on_all(wait: bool, tmp_path: Path) -> None:
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
        assert all(word in str(error) for word in (root, "No space left on device", "free space", *words)), error
    else:
        raise AssertionError("no error")

root = sys.argv[1]
model = torch.nn.Linear(600, 700)
outside = f"{root}-outside"
accel.save({"model": model}, outside)
accel.save({"n": 1}, f"{root}/c")
refused(lambda: accel.save({"model": model}, f"{root}/c"), "/c/accel-")
refused(lambda: accel.save({"model": model}, f"{root}/c", wait=False).result(), "/c/accel-")
refused(lambda: accel.save({"n": 0}, f"{root}/c"), "the background save before this one failed", "/c/accel-")
refused(lambda: accel.save({"text": "a" * 2_000_000}, f"{root}/c"), "/c/.accel-")
refused(lambda: accel.export(outside, f"{root}/out"), "/out/.model.safetensors")
assert accel.load(f"{root}/c") == {"n": 1}
assert not os.listdir(f"{root}/out"), os.listdir(f"{root}/out")
accel.save({"n": 2}, f"{root}/c")
print("all refused")
"""


def test_a_full_file_system_is_named_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    """A real one, of 1 MiB, in a mount namespace of its own: save, background save, record and export."""
    root = tmp_path / "full"
    root.mkdir()
    mount = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m none "$0" && exec "$@"',
    ]
    if shutil.which("unshare") is None or subprocess.run([*mount, str(root), "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount")
    command = [*mount, str(root), sys.executable, "-c", FULL, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD * 2, check=False)
    assert done.stdout.strip().endswith("all refused"), done.stderr


def test_errors_of_the_system_name_the_file(tmp_path: Path) -> None:
    """Names that are too long, a system that has no such directories, and files in the place of directories."""
    accel.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "c")
    (tmp_path / "file").write_text("mine")
    long = str(tmp_path / ("x" * 300))
    for call in (lambda: accel.save({"n": 1}, long), lambda: accel.export(tmp_path / "c", long)):
        with pytest.raises(CheckpointError, match=f"File name too long: {long}"):
            call()
    with pytest.raises(CheckpointError, match=f"File name too long: {long}"):
        accel.link(tmp_path / "c", long)
    for where, message in (
        ("/proc/no-such/c", "No such file"),
        (tmp_path / "file", "File exists|Not a directory"),
        (tmp_path / "file" / "below", "Not a directory"),
    ):
        with pytest.raises(CheckpointError, match=message):
            accel.save({"n": 1}, where)
    assert (tmp_path / "file").read_text() == "mine"


def test_two_jobs_at_once(tmp_path: Path) -> None:
    """The one that commits last is refused, and removes nothing that the other needs."""
    accel.save(tensors(1.0), tmp_path)
    late = folder.Commit(str(tmp_path))
    accel.save(tensors(2.0), tmp_path)
    with pytest.raises(CheckpointError, match="is another job's: it has saved there since this save began"):
        late.put(record.read(str(tmp_path)))
    assert read(tmp_path) == 2
    assert len(os.listdir(tmp_path)) == 2
    accel.save(tensors(3.0), tmp_path)
    assert read(tmp_path) == 3


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
        with pytest.raises(CheckpointError, match="another format"):
            call()
    assert (tmp_path / "accel.json").read_text() == '{"mine": 1}'


def different(directory: str, what: str) -> None:
    rank = accel.rank()
    state: dict[str, Any] = {"x": torch.zeros(10), "n": 1}
    if what == "directory" and rank == 1:
        directory += "x"
    if what == "keys" and rank == 1:
        state["y"] = torch.zeros(3)
    if what == "shape":
        state["x"] = torch.zeros(10 + rank)
    if what == "value" and rank == 1:
        state["bad"] = object()
    accel.save(state, directory)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("directory", "got dir=.* on rank 0 and dir=.* on rank 1"),
        ("keys", "the state of rank 1 has other objects"),
        ("shape", r"x is F32 \[10\] on one rank and F32 \[11\] on rank 1"),
        ("value", r'state\["bad"\] is a object'),
    ],
)
def test_ranks_that_differ(what: str, message: str, tmp_path: Path) -> None:
    import re

    for text in refusals(2, different, str(tmp_path / "c"), what, error="CheckpointError"):
        assert re.search(message, text), text
    assert not (tmp_path / "c" / "accel.json").exists()


def different_values(directory: str) -> Any:
    rank = accel.rank()
    net = torch.nn.Linear(300, 300)
    torch.nn.init.constant_(net.weight, float(rank))
    state = {"n": rank, "net": net, "x": torch.full((5000,), float(rank)), "same": torch.arange(5000.0)}
    accel.save(state, directory)
    accel.load(directory, state)
    return state["n"], net.weight.unique().tolist(), state["x"].unique().tolist(), float(state["same"].sum())


def test_where_ranks_have_other_values_those_of_rank_0_are_saved(tmp_path: Path) -> None:
    """Never a mixture of them."""
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


def test_a_save_on_one_rank_ends_with_an_error(tmp_path: Path) -> None:
    first, _ = outcomes(2, save_alone, str(tmp_path / "c"), tmp_path / "failed", breaks=True)
    assert "TimeoutError" in first.error
    assert "in 'accel.save': rank 1 did not come in time" in first.message
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
        return super().step(closure)


def interrupted(backend: str, moment: str, wait: bool, directory: Path) -> list[str]:
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

    def attempt(act: Callable[[], Any]) -> None:
        with pytest.raises(accel.AccelError) as caught:
            act()
        said.append(str(caught.value))

    state, said = {"model": model, "optimizer": optimizer}, list[str]()
    for _ in range(5):
        step()
    accel.save(state, directory)
    with contextlib.suppress(KeyboardInterrupt):
        step(moment)
    attempt(lambda: accel.save(state, directory, wait=wait))
    if backend != "ddp":
        attempt(lambda: accel.full_state_dict(model))
    accel.load(directory, state)
    for _ in range(40):  # the drift guard has nothing against it
        step()
    accel.save(state, directory, wait=wait)
    accel.full_state_dict(model)
    return said


@pytest.mark.parametrize(
    ("backend", "moment", "wait"), [("ddp", "before", True), ("ddp", "in", False), ("fsdp", "before", True)]
)
def test_ranks_interrupted_in_different_steps_save_no_mixture(
    backend: str, moment: str, wait: bool, tmp_path: Path
) -> None:
    last = "5 steps" if moment == "before" else "6 steps, the last of which was interrupted"
    for said in run(2, interrupted, backend, moment, wait, tmp_path / "c"):
        assert f"is after 6 steps on rank 0 and after {last} on rank 1. Stop all ranks" in said[0]
        assert backend == "ddp" or f"after {last}" in said[1]
