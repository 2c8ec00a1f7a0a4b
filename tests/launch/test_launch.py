"""accel.launch and accel.check_picklable: what goes to the workers, what comes back, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
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
from accel.launch import collect_stateful
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
import dataclasses, json, os, pickle, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import accel

class Rows(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(3))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.x[i].sum().reshape(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1)
        self.act = lambda x: x.relu()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.last(self.act(self.norm(self.first(x))))

@dataclasses.dataclass
class Result:
    world: int
    engine: str
    device: str
    losses: torch.Tensor
    seconds: float
    argv: list

def loop(model, optimizer, scheduler, loader, epochs=2):
    losses = []
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses

def train(parts, scheduler, data):
    with torch.no_grad():
        critic.weight += torch.ops.aten.add.Scalar(torch.zeros(()), accel.rank() + 1.0)
    world = accel.world_size()
    loader = DataLoader(data, 16 // world, num_workers=2)
    model, optimizer, loader = accel.setup(parts["model"], parts["optimizer"], loader)
    begin = time.perf_counter()
    losses = loop(model, optimizer, scheduler, loader)
    seconds = time.perf_counter() - begin
    pickle.loads(pickle.dumps([data, parts["model"].first, Net]))  # classes of __main__ by their names
    return Result(world, repr(model)[:17], str(accel.device()), torch.tensor(losses), seconds, sys.argv)

def build():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

critic = nn.Linear(2, 2)  # no argument: the function itself reaches it
model, optimizer, scheduler = build()
weight, before = model.first.weight, critic.weight.detach().clone()
result = accel.launch(train, {"model": model, "optimizer": optimizer}, scheduler, Rows(64), num_processes=2)

reference, reference_optimizer, reference_scheduler = build()
loop(reference, reference_optimizer, reference_scheduler, DataLoader(Rows(64), 16))
pairs = list(zip(model.parameters(), reference.parameters()))
moments = [(optimizer.state[p]["exp_avg"], reference_optimizer.state[q]["exp_avg"]) for p, q in pairs]
print(json.dumps({
    "type": type(result) is Result, "world": result.world, "engine": result.engine, "argv": result.argv,
    "same object": weight is model.first.weight and optimizer.param_groups[0]["params"][0] is weight,
    "moved": float((reference.first.weight - build()[0].first.weight).detach().abs().max()),
    "weights": max(float((p - q).detach().abs().max()) for p, q in pairs),
    "moments": max(float((p - q).abs().max()) for p, q in moments),
    "lr": [optimizer.param_groups[0]["lr"], reference_optimizer.param_groups[0]["lr"]],
    "scheduler": [scheduler.last_epoch, reference_scheduler.last_epoch],
    "calls": [float(model.calls), float(reference.calls)],
    "critic": float((critic.weight - before).detach().mean()),
    "losses": len(result.losses), "seconds": result.seconds,
}))
"""


def test_a_script_without_a_guard_and_all_of_it_in_main(tmp_path: Path) -> None:
    """As in a notebook cell: the state comes back in place and is what one process on the whole batch gets."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "error", str(script), "--flag", "7"]
    out = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=GUARD)
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    assert found["type"]
    assert found["world"] == 2
    assert found["engine"].startswith("ModelHandle[ddp](")
    assert found["argv"] == [str(script), "--flag", "7"]
    assert found["same object"]
    assert found["moved"] > 1e-2
    assert found["weights"] < 1e-5
    assert found["moments"] < 1e-5
    assert found["lr"][0] == found["lr"][1] < 0.05
    assert found["scheduler"] == [8, 8]
    assert found["calls"] == [8, 8]
    assert found["critic"] == pytest.approx(1.0)  # rank 0 added 1, rank 1 added 2 to a copy of its own
    assert found["losses"] == 8
    assert "Warning" not in out.stderr


# -- results ----------------------------------------------------------------------------------------------------------


def place() -> tuple[Any, ...]:
    accel.init()
    return accel.rank(), accel.all_gather(torch.tensor([[accel.rank(), os.getpid()]])), os.environ["OMP_NUM_THREADS"]


def test_rank_0_gives_the_result_and_nothing_stays(
    quick: None, nothing_stays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    rank, gathered, threads = accel.launch(place, num_processes=2)
    assert rank == 0
    assert gathered[:, 0].tolist() == [0, 1]
    assert len({os.getpid(), *gathered[:, 1].tolist()}) == 3
    assert int(threads) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert not any(psutil.pid_exists(pid) for pid in gathered[:, 1].tolist())


def train_on(net: nn.Module, optimizer: torch.optim.Optimizer, backend: str) -> str:
    model, optimizer, _ = accel.setup(net, optimizer, backend=backend)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return repr(model).partition("(")[0]


@pytest.mark.parametrize(("backend", "name"), [("auto", "ddp"), ("fsdp", "fsdp")])
def test_a_model_that_is_set_up_in_the_caller_goes_as_its_raw_self(backend: str, name: str, quick: None) -> None:
    """As in a notebook where an earlier cell trained in the kernel: its handle sees the new weights, whole ones."""
    raw = nn.Linear(2, 1, bias=False)
    raw_optimizer = torch.optim.SGD(raw.parameters(), lr=0.5, momentum=0.9)
    model, optimizer, _ = accel.setup(raw, raw_optimizer, backend="single", devices="cpu")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = raw.weight.detach().clone()
    assert accel.launch(train_on, raw, raw_optimizer, backend, num_processes=2) == f"ModelHandle[{name}]"
    # velocity 1, then 0.9 * 1 + 1
    assert torch.allclose(model.weight, before - 0.5 * 1.9)
    assert torch.allclose(optimizer.state[model.weight]["momentum_buffer"], torch.tensor(1.9))
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.allclose(raw.weight, before - 0.5 * 1.9 - 0.5 * (0.9 * 1.9 + 1))
    accel.teardown()


def lock_and_growth(case: str, model: nn.Module) -> object:
    if case == "lock":
        return {"best": [threading.Lock()]}
    model.register_parameter("more", nn.Parameter(torch.ones(3)))
    with torch.no_grad():
        model.weight.fill_(0)
    return None


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("lock", r"result\['best'\]\[0\]: _thread.lock"),
        ("grown", r"changed the names or shapes of this Linear, so nothing was loaded"),
    ],
)
def test_what_cannot_come_back(case: str, message: str, quick: None, nothing_stays: None) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(accel.LaunchError, match=message):
        accel.launch(lock_and_growth, case, model, num_processes=1)
    assert torch.equal(model.weight, before)


# -- failures ---------------------------------------------------------------------------------------------------------


class OddError(Exception):
    """Can't be unpickled, because its class takes other arguments."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


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
    "raise": r"rank 1 of 2 in accel.launch\(fail\) raised; its traceback:(?s:.*)in fail(?s:.*)ValueError: boom",
    "SIGKILL": r"rank 1 of 2 in accel.launch\(fail\) was ended by SIGKILL, .* out of memory",
}
#: These end the others as those do.
ALONE = {
    "odd": r"rank 0 of 1 (?s:.*)OddError: code 3",
    "exit": r"rank 0 of 1 in accel.launch\(fail_alone\) ended with exit status 3",
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_ends_all_and_says_why(how: str, tmp_path: Path, nothing_stays: None) -> None:
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


def fail_alone(how: str) -> None:
    if how == "odd":
        raise OddError(code=3)
    os._exit(3)


@pytest.mark.parametrize("how", ALONE)
def test_what_is_told_of_a_failure(how: str, quick: None) -> None:
    with pytest.raises(accel.LaunchError, match=ALONE[how]) as caught:
        accel.launch(fail_alone, how, num_processes=1)
    assert caught.value.__cause__ is None


def end_after_a_failure() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    time.sleep(1)


def return_early() -> None:
    accel.init()
    if accel.rank() == 0:
        accel.barrier()


def test_a_rank_that_returns_early_is_told_as_such(quick: None) -> None:
    with pytest.raises(accel.LaunchError, match=r"rank 1 \(.*\) has returned from its function, and does not come"):
        accel.launch(return_early, num_processes=2)


def fail_together(how: str) -> None:
    if how == "setup on rank 0":
        if os.environ["RANK"] == "0":
            accel.setup(nn.Linear(1, 1))
    else:
        accel.init()
        with accel.main_first():
            raise OSError("no route")


TOGETHER = {
    "main_first": (r"rank 0 of 2 .*raised; its traceback:(?s:.*)OSError: no route$", OSError),
    "setup on rank 0": (
        r"rank 1 has returned from its function and does not come to accel.setup. Call it on every rank",
        accel.LaunchError,
    ),
}


@pytest.mark.parametrize("how", TOGETHER)
def test_the_rank_that_failed_is_told_and_not_those_that_heard_of_it(how: str, quick: None) -> None:
    message, cause = TOGETHER[how]
    with pytest.raises(accel.LaunchError, match=message) as caught:
        accel.launch(fail_together, how, num_processes=2)
    assert type(caught.value.__cause__) is cause


def test_a_rank_that_ends_well_after_a_failure_is_none_of_it(quick: None) -> None:
    with pytest.raises(accel.LaunchError, match=r"rank 1 of 2 in accel.launch\(end_after_a_failure\) raised"):
        accel.launch(end_after_a_failure, num_processes=2)


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
def test_the_end_of_the_caller_is_the_end_of_all(number: int, status: int, tmp_path: Path) -> None:
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


def test_what_cannot_be_sent_is_named_by_its_path() -> None:
    handle = accel.setup(nn.Linear(2, 2), backend="single")[0]
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].lock = threading.Lock()
    cases = {
        r"args\[0\]: ModelHandle; pass the raw Linear, and call accel.setup in the function": (handle,),
        r"args\[0\]\[1\].0.lock: _thread.lock": ((1, model),),
        r"args\[0\].keywords\['file'\]: _io.TextIOWrapper": (functools.partial(print, file=sys.__stdout__),),
    }
    for message, arguments in cases.items():
        with pytest.raises(accel.LaunchError, match=message):
            accel.launch(place, *arguments, num_processes=2)
    with pytest.raises(accel.LaunchError, match=r"lock_in_a_closure.<locals>.<lambda>\(\)'s lock: _thread.lock"):
        accel.launch(lock_in_a_closure(), num_processes=2)
    accel.teardown()


def test_calls_that_cannot_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (0, True, "2"):
        with pytest.raises(accel.LaunchError, match="num_processes="):
            accel.launch(place, num_processes=number)  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(accel.LaunchError, match="rank 1 of 2 already"):
        accel.launch(place, num_processes=2)


def test_cuda_in_the_caller_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 << 20)
    with caplog.at_level(logging.WARNING, "accel"), pytest.raises(accel.LaunchError):
        accel.launch(place, threading.Lock(), num_processes=2)
    assert "has initialised CUDA (5 MiB allocated)" in caplog.text


# -- the parts --------------------------------------------------------------------------------------------------------


def test_what_has_a_state_is_found_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    found = collect_stateful({"fn": lambda: model[1], "args": [{"o": optimizer}, model[0], scheduler, model]})
    assert {id(item) for item in found} == {id(model), id(optimizer), id(scheduler)}
    assert len(found) == 3


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
    with pytest.raises(accel.LaunchError, match=r"obj\[0\]: lambda.*; obj\[4\]: lambda.* and 2 more$"):
        accel.check_picklable([eval("lambda: 0") for _ in range(7)])


AROUND = """
import functools, io, os, sys
import torch, accel

class Sample:
    value = 3

def train(rate=0.1):
    torch.save(Sample(), io.BytesIO())
    return rate

@torch.no_grad()
def decorated():
    return train(2.0)

class Trainer:
    def __call__(self):
        return train(3.0)
    def run(self):
        return train(4.0)

if __name__ == "__main__":
    for fn in (train, functools.partial(train, rate=0.5), decorated, Trainer(), Trainer().run, functools.partial(decorated)):
        print(accel.launch(fn, num_processes=1))
    try:
        accel.launch(functools.partial(os._exit, 0), num_processes=1)
    except accel.LaunchError as error:
        print(error)
"""


def test_what_stands_around_a_function_of_a_script_is_known(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(AROUND)
    found = subprocess.run(
        [executable(), str(script)], capture_output=True, text=True, timeout=GUARD, env=environment(), check=True
    )
    *values, ended = found.stdout.splitlines()
    assert values == ["0.1", "0.5", "2.0", "3.0", "4.0", "2.0"], found.stderr
    assert "rank 0 of 1 in accel.launch(" in ended
    assert "ended with exit status 0 before its function returned" in ended


def returned(backend: str) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    model, optimizer, loader = accel.setup(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        DataLoader(TensorDataset(torch.ones(8, 4)), 2),
        backend=backend,
    )
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    return {"all": (model, optimizer, loader), "weight": accel.full_state_dict(model)["weight"]}


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_handles_come_back_as_what_they_stand_for(backend: str) -> None:
    result = accel.launch(returned, backend, num_processes=2)
    model, optimizer, loader = result["all"]
    assert type(model) is nn.Linear
    assert torch.equal(model.weight, result["weight"])
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert optimizer.state[model.weight]["momentum_buffer"].shape == (2, 4)
    assert type(loader) is DataLoader
