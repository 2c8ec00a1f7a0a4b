"""Real process groups: used, started from variables, torchrun and refusals; and the ends that let no rank hang."""

from __future__ import annotations

import contextlib
import io
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import accel
from accel import process
from accel.errors import AccelError, DeviceError, LaunchError
from accel.process import rng
from accel.process.launchers import Place
from accel.process.startup import Wait, meet
from tests.distributed import outcomes, run, wait_for
from tests.programs import LAUNCHERS, by_hand, free_port, scripts

# -- one process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    process.shutdown()
    yield
    process.shutdown()


@pytest.mark.usefixtures("alone")
def test_one_process_has_no_group() -> None:
    assert (process.rank(), process.world_size(), process.local_rank(), process.is_main()) == (0, 1, 0, True)
    assert process.running() is None
    here = process.current()
    assert here is process.current() is process.running()
    assert (here.group, here.control, here.timeout) == (None, None, timedelta(minutes=30))
    assert not dist.is_initialized()
    assert here.device == process.device()


@pytest.mark.usefixtures("alone")
def test_a_second_init_must_be_equal() -> None:
    process.init(timeout=7, devices="cpu")
    here = process.current()
    process.init(timeout=timedelta(seconds=7), devices=None)
    process.use_devices("auto")
    assert process.current() is here
    with pytest.raises(AccelError, match=r"timeout=8.*7 s"):
        process.init(timeout=8)
    with pytest.raises(DeviceError, match="no accelerator '63'"):
        process.init(devices=[63])
    assert here.devices == (torch.device("cpu"),)
    process.shutdown()
    process.init(timeout=8)
    assert process.current().timeout == timedelta(seconds=8)


@pytest.mark.usefixtures("alone")
def test_a_wrong_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AccelError, match="process_group='gluu'.*gloo"):
        process.init(process_group="gluu")
    monkeypatch.setenv("ACCEL_DEVICES", "63")
    for start in (process.device, process.current, lambda: process.use_devices([63])):
        with pytest.raises(DeviceError, match="63"):
            start()
        assert process.running() is None
    process.init(devices="cpu")
    assert process.device() == torch.device("cpu")


@pytest.mark.usefixtures("alone")
def test_ended_groups_say_why() -> None:
    dependent = Mock()
    process.current().dependents.add(dependent)
    process.end_groups("the reason")
    dependent.abandon.assert_called_once_with("the reason")
    assert process.running() is None
    assert process.rank() == 0
    with pytest.raises(AccelError, match=r"accel.teardown.*the reason"):
        process.current()
    with pytest.raises(AccelError, match="the reason"):
        process.init()
    process.shutdown()
    assert process.current().place.world_size == 1
    process.shutdown()


@pytest.mark.usefixtures("alone")
def test_seed() -> None:
    import numpy as np

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    before = accel.rng_state().state_dict()
    try:
        rng.seed(5)
        first = draw()
        rng.seed(5, per_rank=True)
        assert draw() == first
        rng.seed(6)
        assert not set(draw()) & set(first)
    finally:
        accel.rng_state().load_state_dict(before)


@pytest.mark.usefixtures("alone")
def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    process.print("a", 1, sep="-", end="!\n")
    process.print("a", 1, sep="-", every_rank=True)
    process.print()
    assert capsys.readouterr().out == "a-1!\n[rank 0] a-1\n\n"


# -- a process group that is there already ----------------------------------------------------------------------------


def use_existing() -> tuple[object, ...]:
    default = dist.group.WORLD
    before = process.running(), process.rank(), process.world_size(), process.local_rank()
    here = process.current()
    assert here.group is default
    assert here.control not in (None, default)
    assert here.device == torch.device("cpu")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        process.print("once")
        process.print("all", every_rank=True)
    process.init(process_group="gloo")
    process.shutdown()
    assert dist.group.WORLD is default
    value = torch.tensor(process.rank() + 1)
    dist.all_reduce(value)
    again = process.current()
    assert again is not here
    assert again.control is not here.control
    return (*before, value.item(), out.getvalue())


def test_an_existing_group_is_used() -> None:
    assert run(2, use_existing) == [
        (None, 0, 2, 0, 3, "once\n[rank 0] all\n"),
        (None, 1, 2, 1, 3, "[rank 1] all\n"),
    ]


def start_wrongly() -> None:
    if process.rank() == 1:
        os.environ["ACCEL_DEVICES"] = "63"
    with pytest.raises(DeviceError, match=r"rank 1: ACCEL_DEVICES='63'"):
        process.current()
    os.environ.pop("ACCEL_DEVICES", None)
    process.init(timeout=30)
    with pytest.raises(AccelError, match="process_group='cpu:gloo'.*'cuda': 'gloo'"):
        process.init(process_group="cpu:gloo")


def test_wrong_options_raise_on_every_rank() -> None:
    run(2, start_wrongly)


def without_variables() -> tuple[object, ...]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    assert (process.rank(), process.world_size()) == (dist.get_rank(), dist.get_world_size())
    assert process.local_rank() == dist.get_rank()
    place = process.current().place
    return place.launcher, place.rank, place.world_size, process.local_rank(), place.local_world_size


def test_the_group_overrules_the_environment() -> None:
    for rank, result in enumerate(outcomes(2, without_variables, breaks=True)):
        assert result.value == ("process group", rank, 2, rank, 2), result.trace


# -- ends that let no rank hang ---------------------------------------------------------------------------------------


def end_while_others_wait(freed: Path) -> str:
    here = process.current()
    # A reducer and a pending operation hold the groups: then neither abort nor destroy closes a connection.
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    if process.rank() == 1:
        pending = dist.all_reduce(torch.ones(3), async_op=True)
        wait_for(lambda: len(list(freed.glob("waits*"))) == 3)
        time.sleep(0.3)
        process.end_groups("rank 1 has had enough")
        assert pending is not None
        assert not dist.is_initialized()
        wait_for(lambda: len(list(freed.glob("freed*"))) == 3, 50)  # the groups' own timeout is 60 s
        return "3 freed"
    (freed / f"waits{process.rank()}").touch()
    try:
        dist.all_reduce(torch.ones(3), group=here.control if process.rank() == 0 else None)
    except RuntimeError as error:
        assert model is not None
        (freed / f"freed{process.rank()}").touch()
        return str(error)
    return ""


def test_ending_groups_frees_every_rank(tmp_path: Path) -> None:
    results = outcomes(4, end_while_others_wait, tmp_path, breaks=True)
    assert results[1].value == "3 freed"


# -- groups that come up from the environment -------------------------------------------------------------------------

STARTING = """
import torch, torch.distributed as dist
from accel import process
assert process.world_size() == 2 and process.running() is None and not dist.is_initialized()
for round in range(3):
    here = process.current()
    assert here.owns_group and here.backends["cpu"] == "gloo"
    value = torch.tensor([here.place.rank + 1])
    dist.all_reduce(value, group=here.group)
    dist.all_reduce(value, group=here.control)
    process.print(here.place.launcher, here.place.local_world_size, value.item(), every_rank=True)
    process.shutdown()
    assert not dist.is_initialized()
"""


def test_groups_start_again() -> None:
    port = free_port()
    results = scripts(STARTING, by_hand(0, 2, port), by_hand(1, 2, port))
    assert [result.stdout.splitlines() for result in results] == [[f"[rank {r}] torchrun 1 6"] * 3 for r in range(2)]
    assert [result.stderr for result in results] == ["", ""]


@pytest.mark.usefixtures("alone")
def test_a_wrong_launch_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    mpich = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    waited = r"rank 1 has waited \d+ s \(of 1\) for rank 0 at 127.0.0.1:\d+. Start as many processes"
    for environ, message in (
        (mpich, "MPICH started 2 processes.*Set MASTER_ADDR"),
        (by_hand(1, 2, free_port()), waited),
    ):
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            with pytest.raises(LaunchError, match=message):
                process.init(timeout=1)
            assert process.running() is None
            assert not dist.is_initialized()


def test_a_start_among_old_keys(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def meet_as(rank: int, client: Any = store, seconds: float = 60) -> tuple[str, list[dict[str, str]]]:
        place = Place(rank=rank, world_size=3)
        wait = Wait(place, timedelta(seconds=seconds), next_log=seconds / 2)
        return meet(client, wait, {"host": f"host {rank}", "kind": "cpu by gloo", "problem": ""})

    names = set()
    for first in (0, 1, 2, 0):  # who comes first; the others only once it has seen what the start before left
        with ThreadPoolExecutor(3) as threads:
            clients = [dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(3)]
            early = threads.submit(meet_as, first, clients[first])
            time.sleep(0.05)
            rest = [threads.submit(meet_as, rank, clients[rank]) for rank in range(3) if rank != first]
            results = [one.result() for one in (early, *rest)]
        assert len({name for name, _ in results}) == 1
        assert all([report["host"] for report in reports] == ["host 0", "host 1", "host 2"] for _, reports in results)
        names.add(results[0][0])
    assert len(names) == 4
    with pytest.raises(LaunchError, match=r"rank 0 has waited \d+ s \(of 0.2\) for rank 1, 2. Start as many"):
        meet_as(0, seconds=0.2)
    assert "s (of 0.2) for rank 1, 2. It has not started" in caplog.text
