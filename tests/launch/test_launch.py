"""accel.launch and accel.check_picklable: what goes to the workers, what comes back, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from tests.distributed import GUARD, wait_for
from tests.interpreters import executable
from tests.programs import ROOT


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def here() -> tuple[set[psutil.Process], int, int, set[str]]:
    """Child processes, open files, threads, and torch's files in shared memory that processes which are gone have left."""
    me = psutil.Process()
    shared = (re.match(r"torch_(\d+)_", name) for name in os.listdir("/dev/shm"))
    left = {found.string for found in shared if found and not psutil.pid_exists(int(found[1]))}
    return set(me.children(recursive=True)), me.num_fds(), threading.active_count(), left


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers have torch when they begin."""
    monkeypatch.setattr(sys, "executable", executable())
    subprocess.run([executable(), "-c", ""], check=True)  # what they are forked from is there when children are counted


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    """Nothing is there that was not there before."""
    # The first store opens files that all later ones use.
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = here()
    yield
    deadline = time.monotonic() + 60
    while any(not now <= then for now, then in zip(here(), before, strict=True)):
        assert time.monotonic() < deadline, f"before {before}, after {here()}"
        time.sleep(0.05)


# -- a script, in which everything is of __main__ ---------------------------------------------------------------------

SCRIPT = """
import dataclasses, json, pickle, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import accel

class Rows(Dataset):
    def __init__(self):
        self.x = torch.randn(64, 6, generator=torch.Generator().manual_seed(3))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.x[i].sum().reshape(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.act = lambda x: x.relu()
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls += self.training
        return self.last(self.act(self.first(x)))

@dataclasses.dataclass
class Result:
    engine: str
    argv: list

def loop(model, optimizer, scheduler, loader):
    for x, y in [*loader, *loader]:
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()

def train(parts, scheduler, data):
    with torch.no_grad():
        critic.weight += torch.ops.aten.add.Scalar(torch.zeros(()), accel.rank() + 1.0)
    loader = DataLoader(data, 16 // accel.world_size(), num_workers=2)
    model, optimizer, loader = accel.setup(parts["model"], parts["optimizer"], loader)
    loop(model, optimizer, scheduler, loader)
    pickle.loads(pickle.dumps(parts["model"].first)), pickle.loads(pickle.dumps(Net))  # classes of __main__ by their names
    return Result(repr(model), sys.argv)

def build():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

critic = nn.Linear(2, 2)  # no argument: the function itself reaches it
model, optimizer, scheduler = build()
weight, before = model.first.weight, critic.weight.detach().clone()
result = accel.launch(train, {"model": model, "optimizer": optimizer}, scheduler, Rows(), num_processes=2)
assert type(result) is Result
assert weight is model.first.weight is optimizer.param_groups[0]["params"][0]
assert torch.allclose(critic.weight, before + 1)  # rank 0 added 1, rank 1 added 2 to its own copy

reference, reference_optimizer, reference_scheduler = build()
loop(reference, reference_optimizer, reference_scheduler, DataLoader(Rows(), 16))
assert not torch.allclose(reference.first.weight, build()[0].first.weight)
for p, q in zip(model.parameters(), reference.parameters()):
    torch.testing.assert_close(p, q, atol=1e-5, rtol=0)
    moments = optimizer.state[p]["exp_avg"], reference_optimizer.state[q]["exp_avg"]
    torch.testing.assert_close(*moments, atol=1e-5, rtol=0)
assert model.calls == reference.calls == scheduler.last_epoch == reference_scheduler.last_epoch == 8
assert optimizer.param_groups[0]["lr"] == reference_optimizer.param_groups[0]["lr"] < 0.05
print(json.dumps([result.engine, result.argv]))
"""


def test_script_gets_trained_state_back(tmp_path: Path) -> None:
    """As in a notebook cell: the state comes back in place and equals one process on the whole batch."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "error", str(script), "--flag", "7"]
    out = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=GUARD)
    assert out.returncode == 0, out.stderr
    assert "Warning" not in out.stderr
    engine, argv = json.loads(out.stdout)
    assert engine.startswith("ModelHandle[ddp](")
    assert argv == [str(script), "--flag", "7"]


# -- results ----------------------------------------------------------------------------------------------------------


def place() -> tuple[Any, ...]:
    accel.init()
    return accel.rank(), accel.all_gather(torch.tensor([[accel.rank(), os.getpid()]])), os.environ["OMP_NUM_THREADS"]


def test_rank_0_returns_and_nothing_stays(quick: None, nothing_stays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    rank, gathered, threads = accel.launch(place, num_processes=2)
    assert rank == 0
    assert gathered[:, 0].tolist() == [0, 1]
    assert len({os.getpid(), *gathered[:, 1].tolist()}) == 3
    assert int(threads) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert not any(psutil.pid_exists(pid) for pid in gathered[:, 1].tolist())


def train_on(net: nn.Module, optimizer: torch.optim.Optimizer, backend: str) -> dict[str, Any]:
    loader = DataLoader(TensorDataset(torch.ones(2, 2)), 1)
    model, optimizer, loader = accel.setup(net, optimizer, loader, backend=backend)
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
    return {"all": (model, optimizer, loader), "weight": accel.full_state_dict(model)["weight"]}


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_handles_travel_as_raw_objects(backend: str, quick: None) -> None:
    """As in a notebook in which an earlier cell trained in the kernel: its handle has the new, full weights."""
    raw = nn.Linear(2, 1, bias=False)
    raw_optimizer = torch.optim.SGD(raw.parameters(), lr=0.5, momentum=0.9)
    model, optimizer, _ = accel.setup(raw, raw_optimizer, backend="single", devices="cpu")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = raw.weight.detach().clone()
    result = accel.launch(train_on, raw, raw_optimizer, backend, num_processes=2)
    # velocity 1, then 0.9 * 1 + 1
    assert torch.allclose(model.weight, before - 0.5 * 1.9)
    assert torch.allclose(optimizer.state[model.weight]["momentum_buffer"], torch.tensor(1.9))
    trained, its_optimizer, loader = result["all"]
    assert [type(item) for item in result["all"]] == [nn.Linear, torch.optim.SGD, DataLoader]
    assert torch.equal(trained.weight, result["weight"])
    assert torch.equal(trained.weight, raw.weight)
    assert its_optimizer.param_groups[0]["params"][0] is trained.weight
    assert its_optimizer.state[trained.weight]["momentum_buffer"].shape == (1, 2)
    accel.teardown()


# -- failures ---------------------------------------------------------------------------------------------------------


def fail(how: str, path: str, model: nn.Module) -> None:
    """Rank 1 fails while rank 0 waits for it, both with a dataloader's workers beside them."""
    model = accel.setup(model)[0]
    batches = iter(DataLoader(TensorDataset(torch.zeros(64, 1)), num_workers=1))
    next(batches)
    with torch.no_grad():
        accel.unwrap(model).weight.fill_(9)
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children())]
    Path(path, f"{accel.rank()}.part").write_text(json.dumps(pids))
    os.replace(Path(path, f"{accel.rank()}.part"), Path(path, str(accel.rank())))  # whole as soon as it is there
    accel.barrier()
    if accel.rank() == 1:
        if how == "raise":
            raise ValueError("boom")
        os.kill(os.getpid(), getattr(signal, how))
    accel.barrier()
    time.sleep(GUARD)


FAILURES = {
    "raise": r"rank 1 of 2 in accel.launch\(fail\) raised an exception:(?s:.*)in fail(?s:.*)ValueError: boom",
    "SIGKILL": r"rank 1 of 2 in accel.launch\(fail\) ended with SIGKILL\. .* out of memory",
}


@pytest.mark.parametrize("how", FAILURES)
def test_failure_ends_all_workers(how: str, tmp_path: Path, nothing_stays: None) -> None:
    model = nn.Linear(1, 1)
    before = model.weight.detach().clone()
    with pytest.raises(accel.LaunchError, match=FAILURES[how]) as caught:
        accel.launch(fail, how, str(tmp_path), model, num_processes=2)
    if how == "raise":
        assert isinstance(caught.value.__cause__, ValueError)
    assert torch.equal(model.weight, before)
    pids = [pid for rank in (0, 1) for pid in json.loads((tmp_path / str(rank)).read_text())]
    assert len(pids) == 4
    wait_for(lambda: not alive(pids))


class OddError(Exception):
    """Can't be unpickled, because its class takes other arguments."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def fail_early(how: str) -> object:
    if how == "main_first":
        with accel.main_first():
            raise OSError("no route")
    if how == "returns":
        accel.init()
        return accel.barrier() if accel.rank() == 0 else None
    if os.environ["RANK"] == "0":
        time.sleep(1)  # it ends well, after the failure
    elif how == "odd":
        raise OddError(code=3)
    elif how == "exit":
        os._exit(3)
    return {"best": [threading.Lock()] if how == "result" else []}


EARLY: dict[str, tuple[str, type | None]] = {
    "odd": (r"rank 1 of 2 (?s:.*)OddError: code 3", None),
    "exit": (r"rank 1 of 2 in accel.launch\(fail_early\) ended with exit status 3", None),
    "main_first": (r"rank 0 of 2 .*raised an exception:(?s:.*)OSError: no route$", OSError),
    "returns": (r"rank 1 \(.*\) has returned from its function and won't join", accel.AccelError),
    "result": (r"result\['best'\]\[0\]: _thread.lock", accel.LaunchError),
}


@pytest.mark.parametrize("how", EARLY)
def test_error_names_rank_that_failed(how: str, quick: None) -> None:
    message, cause = EARLY[how]
    with pytest.raises(accel.LaunchError, match=message) as caught:
        accel.launch(fail_early, how, num_processes=2)
    found = caught.value.__cause__
    assert found is None if cause is None else isinstance(found, cause)


def alive(pids: list[int]) -> list[int]:
    """Which of the processes exist and are no zombies that wait for another parent."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


WAITING = """
import signal, sys
from torch import nn
import accel
from tests.launch.test_launch import fail
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with Ctrl-C ignored
try:
    accel.launch(fail, "SIGSTOP", sys.argv[1], nn.Linear(1, 1), num_processes=2)
except KeyboardInterrupt:
    sys.exit(99)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 99), (signal.SIGKILL, -9)])
def test_workers_end_with_the_caller(number: int, status: int, tmp_path: Path) -> None:
    """Ctrl-C, and a kill of the parent; one of the workers is stopped and could not even hear a SIGTERM."""
    script = tmp_path / "wait.py"
    script.write_text(WAITING)
    process = subprocess.Popen([executable(), str(script), str(tmp_path)], env=environment(), start_new_session=True)
    try:
        wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in (0, 1)), GUARD)
        pids = [pid for rank in (0, 1) for pid in json.loads((tmp_path / str(rank)).read_text())]
        wait_for(lambda: psutil.Process(pids[2]).status() == psutil.STATUS_STOPPED)
        if number == signal.SIGKILL:  # a stopped process cannot watch its parent; a debugger would let it go on
            os.kill(pids[2], signal.SIGCONT)
        process.send_signal(number)
        assert process.wait(GUARD) == status
        wait_for(lambda: not alive(pids))
    finally:
        process.kill()
        process.wait()


# -- refusals, before any process starts ------------------------------------------------------------------------------


def lock_in_a_closure() -> Any:
    lock = threading.Lock()
    return lambda: lock


def test_unsendable_objects_are_named() -> None:
    handle = accel.setup(nn.Linear(2, 2), backend="single")[0]
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].lock = threading.Lock()
    for message, argument in (
        (r"args\[0\]: ModelHandle \(pass the raw module, and call accel.setup in the function\)", handle),
        (r"args\[0\]\[1\].0.lock: _thread.lock", (1, model)),
        (r"args\[0\].keywords\['file'\]: _io.TextIOWrapper", functools.partial(print, file=sys.__stdout__)),
        (r"args\[0\]\(\)'s lock: _thread.lock", lock_in_a_closure()),
    ):
        with pytest.raises(accel.LaunchError, match=message):
            accel.launch(place, argument, num_processes=2)
    accel.teardown()


def test_wrong_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (0, True, "2"):
        with pytest.raises(accel.LaunchError, match="num_processes="):
            accel.launch(place, num_processes=number)  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(accel.LaunchError, match="already rank 1 of 2"):
        accel.launch(place, num_processes=2)


def test_check_picklable_names_the_paths() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    accel.check_picklable(model)
    model[1].act = lambda x: x
    line = (lambda: None).__code__.co_firstlineno - 1
    with pytest.raises(accel.LaunchError, match=rf"model.1.act: lambda at test_launch.py:{line}$"):
        accel.check_picklable(model, "model")
    handle = accel.setup(model, backend="single").model
    with pytest.raises(accel.LaunchError, match=rf"handle.1.act: lambda at test_launch.py:{line}$"):
        accel.check_picklable(handle, "handle")
    del model[1].act
    accel.check_picklable(handle)
    accel.teardown()
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(accel.LaunchError, match=r"obj.0._forward_hooks\[\d+\]: lambda at test_launch.py"):
        accel.check_picklable(model)
    with pytest.raises(accel.LaunchError, match=r"obj\[0\]: lambda.*; obj\[4\]: lambda"):
        accel.check_picklable([eval("lambda: 0") for _ in range(7)])
