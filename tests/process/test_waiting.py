"""Ranks that wait for each other in different places end with an error that says where; slow ones go on."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import accel
from accel import process
from accel.process.order import Order
from accel.process.watchdog import Report, are_stuck
from tests.distributed import outcomes
from tests.faults import Fault
from tests.programs import by_hand, free_port, scripts

# -- loops that differ between ranks ----------------------------------------------------------------------------------

#: With weights that are gathered, however small.
ZERO3 = accel.DeepSpeed(config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
BACKENDS: dict[str, Any] = {"zero2": accel.DeepSpeed(stage=2), "zero3": ZERO3}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Loop:
    """A model and its optimizer, and the parts of loops."""

    def __init__(self, backend: str) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), *(Block() for _ in range(3)), nn.Linear(8, 2))
        self.model, self.optimizer, _ = accel.setup(
            net, torch.optim.SGD(net.parameters(), lr=0.1), backend=BACKENDS.get(backend, backend)
        )

    def backward(self) -> None:
        F.mse_loss(self.model(torch.ones(2, 4)), torch.zeros(2, 2)).backward()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.backward()
            self.optimizer.step()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, 4))

    def save(self, folder: Path) -> None:
        accel.save({"model": self.model}, folder / "checkpoint")


def on_main(act: Callable[[], object]) -> None:
    if accel.is_main():
        act()


# Each ends differently on the ranks; what was trained before has taught them an order, or has not.
CASES: dict[str, Callable[[Loop, Path], object]] = {
    "steps": lambda loop, _: [loop.train(2 + accel.rank()), accel.barrier()],
    "steps on main": lambda loop, _: [[loop.backward(), on_main(loop.optimizer.step)] for _ in range(4)],
    "evaluation": lambda loop, _: [loop.train(2), on_main(loop.evaluate), loop.train(2)],
    "save": lambda loop, path: [loop.train(2), on_main(loop.evaluate), loop.save(path)],
    "state": lambda loop, _: [loop.train(2), on_main(lambda: loop.model.state_dict()), loop.train(2)],
    "optimizer": lambda loop, _: [loop.train(), on_main(lambda: loop.optimizer.state_dict()), loop.train()],
    "clipping": lambda loop, _: [
        loop.train(2),
        loop.backward(),
        on_main(lambda: accel.clip_grad_norm_(loop.model, 1.0)),
        loop.optimizer.step(),
        loop.train(),
    ],
}


@contextmanager
def group(folder: Path, name: str, patience: float = 0.6) -> Iterator[None]:
    """A process group of its own, which may break; the watchdog is quicker than usual."""
    if dist.is_initialized():
        dist.destroy_process_group()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    method = f"file://{folder / name.replace(' ', '-')}.store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    watchdog = process.current().watchdog
    assert watchdog is not None
    watchdog.patience, watchdog.interval = patience, 0.1
    try:
        yield
    finally:
        with suppress(accel.AccelError):  # the ranks are in different places
            accel.teardown()
        if dist.is_initialized():
            dist.destroy_process_group()


def endings(backend: str, names: list[str], folder: Path) -> dict[str, str]:
    """The text of the error of each case on this rank."""
    found = {}
    for name in names:
        with group(folder, name):
            try:
                CASES[name](Loop(backend), folder)
            except accel.AccelError as error:
                found[name] = str(error)
    return found


GATHERED = "the gathering of"


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("fsdp", {"evaluation": GATHERED, "save": GATHERED, "state": "model.state_dict() of "}),
        ("zero3", {"evaluation": GATHERED, "save": "'accel.save'", "state": GATHERED, "clipping": "clip_grad_norm_"}),
        ("fsdp", {"optimizer": "optimizer.state_dict() of ", "clipping": "clip_grad_norm_", "steps": ""}),
        ("ddp", {"steps": "", "steps on main": ""}),
        ("sharded", {"steps": "", "optimizer": "optimizer.state_dict() of "}),
        ("zero2", {"steps": "", "clipping": ""}),
    ],
)
def test_a_difference_ends_every_rank(backend: str, words: dict[str, str], tmp_path: Path) -> None:
    for rank, result in enumerate(outcomes(2, endings, backend, list(words), tmp_path, breaks=True)):
        assert not result.error, f"rank {rank}: {result.trace}"
        for name, expected in words.items():
            text = result.value.get(name, "no error")
            for word in (expected, "rank 0", "rank 1"):
                assert word in text, f"{backend}, {name}, rank {rank}: {text}"
            assert "gloo" not in text


# -- programs in which a rank ends ------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, time, torch, accel
from tests.faults import begin, reach
begin()
accel.init(process_group="gloo")
accel.process.current().watchdog.patience = 2
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
model, optimizer, _ = accel.setup(net, torch.optim.SGD(net.parameters(), lr=.1), backend="{backend}")

def step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

step()
start = time.monotonic()
try:
    if accel.rank() == {waits}:
        {wait}
    else:
        {act}
except accel.AccelError as error:
    print(type(error).__name__, error)
print("after", int(time.monotonic() - start), "s")
"""


@dataclass(frozen=True)
class Ending:
    """An act of one rank while the other waits, and the text that the waiting rank prints within some seconds."""

    act: str
    words: str
    seconds: int = 10
    waits: int = 0
    wait: str = "accel.barrier()"
    backend: str = "ddp"
    also: bool = False  # the acting rank prints it, too


BARRIER = "^AccelError rank {} can't continue in 'barrier': "
LEFT = r"rank {} \(host \S+\) finished its program or called sys.exit"
STUCK = r"^RankMismatchError .*rank 0 is in 'barrier' \(\S+:\d+.*rank 1 is in (for|back)ward \(\S+:\d+"
STATE = r"model.state_dict\(\) of "
ENDINGS = {
    "under is_main": Ending("step()", STUCK, 20, also=True),
    "raises": Ending("raise ConnectionError('by peer')", BARRIER.format(0) + "rank 1 ended with ConnectionError$"),
    "exits": Ending("sys.exit()", BARRIER.format(0) + LEFT.format(1)),
    "exits before a save": Ending(
        "pass", "'accel.save': " + LEFT.format(1), wait="accel.save(net.state_dict(), '/no')"
    ),
    "exits before a gathering": Ending("pass", f"{STATE}.*{LEFT.format(1)}", wait="model.state_dict()", backend="fsdp"),
    "exits with the store": Ending("sys.exit()", BARRIER.format(1) + LEFT.format(0), waits=1),
    "is killed": Ending("reach('end')", BARRIER.format(0) + r"rank 1 \(host \S+\) did not answer", 15),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_every_rank_has_its_error(name: str) -> None:
    ending, port = ENDINGS[name], free_port()
    ends = [Fault("SIGKILL", at="end", rank=1)] if name == "is killed" else []
    code = PROGRAM.format(**asdict(ending))
    results = scripts(code, by_hand(0, 2, port), by_hand(1, 2, port), check=False, fails=ends)
    for rank in (0, 1) if ending.also else (ending.waits,):
        text = results[rank].stdout
        assert re.search(ending.words, text, re.MULTILINE), text + results[rank].stderr
        assert "gloo" not in text
        assert int(text.split()[-2]) <= ending.seconds, text


def go_slowly(backend: str, folder: Path) -> list[str]:
    """One rank sleeps, or computes, several times as long as ranks wait before they wonder.

    All times are longer than what a busy machine adds to them.
    """
    words: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel").addHandler(handler)

    def sleep() -> None:
        time.sleep(4)

    def compute() -> None:
        end = time.monotonic() + 4
        while time.monotonic() < end:
            torch.ones(100, 100) @ torch.ones(100, 100)

    with group(folder, backend, patience=1.0):
        loop = Loop(backend)
        loop.train(2)
        for act in (sleep, compute):
            on_main(act)  # loading data, say
            loop.train(2)
        with accel.main_first():
            on_main(sleep)
        loop.train()
        accel.barrier()
    logging.getLogger("accel").removeHandler(handler)
    return words


def test_slow_ranks_are_waited_for(tmp_path: Path) -> None:
    slow, waiting = outcomes(2, go_slowly, "fsdp", tmp_path, breaks=True)
    assert not slow.error, slow.trace
    assert not waiting.error, waiting.trace
    assert any("rank 1 is in 'main_first' (test_waiting.py:" in word for word in waiting.value), waiting.value
    assert any("rank 0 is in no collective (test_waiting.py:" in word for word in waiting.value)
    assert slow.value == []


# -- without processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "stuck"),
    [
        (Report("a barrier", waited=5.0), True),
        (Report("", waited=0.0), False),  # computes, or sleeps, and may come
        (Report("a gathering", waited=9.0), False),  # in the same place: a long transfer
        (Report("a barrier", waited=1.0), False),  # has just come
        (Report("recv", waited=9.0), False),  # waits for a single rank, which may come
        (None, False),  # was killed; its connections close
    ],
)
def test_ranks_in_different_places_are_stuck(report: Report | None, stuck: bool) -> None:
    assert are_stuck([Report("a gathering", waited=6.0), report], 4.0) == stuck


def compared(cycles: list[list[str]]) -> list[int]:
    """How many events of each cycle were not expected."""
    order, counts = Order(), []
    for cycle in cycles:
        counts.append(0)
        for name in cycle:
            if not order.expects((name, None)):
                counts[-1] += 1
                order.learn((name, None))
        order.restart()
    return counts


def test_a_repeated_order_compares_nothing() -> None:
    accumulation = ["forward", "gather", "backward", "gather", "reduce"] * 4 + ["step"]
    assert compared([accumulation] * 5)[2:] == [0, 0, 0]
    generation = [["a", "b", "c"] * n + ["back", "step"] for n in (9, 4, 7, 5, 8)]
    assert max(compared(generation)[1:]) <= 3
    gan = ["d", "d back", "d step", "g", "d", "d back", "g back", "g step"]
    assert compared([gan] * 5)[2:] == [0, 0, 0]
