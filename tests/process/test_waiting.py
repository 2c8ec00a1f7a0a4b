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

#: With weights that are gathered, however small.
ZERO3 = accel.DeepSpeed(config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
BACKENDS: dict[str, Any] = {"zero2": accel.DeepSpeed(stage=2), "zero3": ZERO3}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks of equal size, of which a forward may use one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, only: int | None = None) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks if only is None else [self.blocks[only]]:
            x = block(x)
        return self.head(x)


class Loop:
    """A model and its optimizer, and the parts of loops."""

    def __init__(self, backend: str) -> None:
        torch.manual_seed(0)
        net = Net()
        self.model, self.optimizer, _ = accel.setup(
            net, torch.optim.SGD(net.parameters(), lr=0.1), backend=BACKENDS.get(backend, backend)
        )
        self.x = torch.ones(2, 4)

    def loss(self, only: int | None = None) -> torch.Tensor:
        return F.mse_loss(self.model(self.x, only), torch.zeros(2, 2))

    def train(self, steps: int = 1, backwards: int = 1, only: int | None = None) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            for _ in range(backwards):
                self.loss(only).backward()
            self.optimizer.step()

    def evaluate(self, only: int | None = None) -> None:
        with torch.no_grad():
            self.model(self.x, only)

    def episode(self, forwards: int) -> None:
        self.optimizer.zero_grad()
        torch.stack([self.loss() for _ in range(forwards)]).mean().backward()
        self.optimizer.step()


def one() -> int:
    return int(accel.rank() == 1)


def on_main(act: Callable[[], object]) -> None:
    if accel.is_main():
        act()


# Each ends differently on the ranks; what was trained before has taught them an order, or has not.
CASES: dict[str, Callable[[Loop, Path], object]] = {
    "episodes": lambda loop, _: [loop.episode(2 + i * one()) for i in range(3)],
    "backwards": lambda loop, _: [loop.train(2), loop.train(2, 1 + one())],
    "steps": lambda loop, _: [loop.train(2 + one()), accel.barrier()],
    "steps on main": lambda loop, _: [[loop.loss().backward(), on_main(loop.optimizer.step)] for _ in range(4)],
    "evaluation, then training": lambda loop, _: [loop.train(2), on_main(loop.evaluate), loop.train(2)],
    "evaluation, then barrier": lambda loop, _: [loop.train(2), on_main(loop.evaluate), accel.barrier()],
    "evaluation, then save": lambda loop, path: [
        loop.train(2),
        on_main(loop.evaluate),
        accel.save({"model": loop.model}, path / "checkpoint"),
    ],
    "experts": lambda loop, _: [loop.train(3, only=0), loop.train(only=one())],
    "full state": lambda loop, _: [
        loop.train(2),
        on_main(lambda: loop.model.state_dict()),
        loop.train(2),
    ],
    "state of the optimizer": lambda loop, _: [
        loop.train(),
        on_main(lambda: loop.optimizer.state_dict()),
        loop.train(),
    ],
    "clipping": lambda loop, _: [
        loop.train(2),
        loop.loss().backward(),
        on_main(lambda: accel.clip_grad_norm_(loop.model, 1.0)),
        loop.optimizer.step(),
        loop.train(),
    ],
    "first on main": lambda loop, _: [loop.train(), first(loop)],
}


def first(loop: Loop) -> None:
    with accel.main_first():
        loop.evaluate()


@contextmanager
def group(folder: Path, name: str, patience: float = 0.6) -> Iterator[None]:
    """A process group of its own, which may break; the hang detector is quicker than usual."""
    if dist.is_initialized():
        dist.destroy_process_group()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = folder / name.replace(" ", "-").replace(",", "")
    dist.init_process_group(
        "gloo", init_method=f"file://{path}.store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
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


def endings(backend: str, names: list[str], folder: Path) -> dict[str, tuple[str, str]]:
    """How each case ends on this rank: the error's classes and text."""
    found = {}
    for name in names:
        found[name] = ("", "")
        with group(folder, name):
            try:
                CASES[name](Loop(backend), folder)
            except Exception as error:
                kind = "AccelError" if isinstance(error, accel.AccelError) else type(error).__name__
                found[name] = kind, str(error)
    return found


def refused(backend: str, names: list[str], folder: Path, world: int = 2) -> dict[str, list[str]]:
    """The texts with which every rank refuses each case."""
    results = outcomes(world, endings, backend, names, folder, breaks=True)
    for rank, result in enumerate(results):
        assert not result.error, f"rank {rank}: {result.trace}"
        for name in names:
            kind, text = result.value[name]
            assert kind == "AccelError", f"{backend}, {name}, rank {rank}: {kind or 'no error'} {text}"
            assert "gloo" not in text
            assert "rank 0" in text, text
            assert "rank 1" in text, text
    return {name: [result.value[name][1] for result in results] for name in names}


@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_what_only_one_rank_gathers_ends_on_every_rank_and_names_it(backend: str, tmp_path: Path) -> None:
    texts = refused(backend, [name for name in CASES if name != "steps on main"], tmp_path)
    gathers = {
        "experts": ("the gathering of", "blocks.1"),
        "evaluation, then barrier": ("the gathering of", "'barrier'"),
        "evaluation, then save": ("the gathering of", "'accel.save'"),
        "full state": ("write state = model.state_dict() above", "the gathering of"),
        "state of the optimizer": ("write state = optimizer.state_dict() above",),
        "clipping": ("clip_grad_norm_",),
        "first on main": ("(Net", "'main_first'"),
    }
    for name, words in gathers.items():
        for text in texts[name]:
            assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("ddp", ["steps", "steps on main"]),
        ("sharded", ["steps", "state of the optimizer"]),
        ("zero2", ["backwards", "steps", "clipping"]),
    ],
)
def test_different_numbers_of_steps_end_on_every_rank(backend: str, names: list[str], tmp_path: Path) -> None:
    texts = refused(backend, names, tmp_path)
    assert all("write state = optimizer.state_dict() above" in t for t in texts.get("state of the optimizer", ()))


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
    """What one rank does while the other waits, and what the others then say within some seconds."""

    act: str
    words: str
    seconds: int
    waits: int = 0
    wait: str = "accel.barrier()"
    backend: str = "ddp"
    where: str = "'barrier'"
    on_both: bool = False
    fault: Fault | None = None


ENDED = r"rank {} \(host \S+\) ended its program, by its end or sys.exit"
ENDINGS = {
    "under is_main": Ending("step()", r"rank 0 is in 'barrier' \(\S+:\d+.*rank 1 is in (for|back)ward", 20, on_both=True),
    "raises": Ending("raise ConnectionError('reset by peer')", "rank 1 ended with ConnectionError$", 10),
    "exits": Ending("sys.exit()", ENDED.format(1), 10),
    "returns in a save": Ending("sys.exit()", ENDED.format(1), 10, wait="accel.save({'m': model}, '/no/where')", where="'accel.save'"),
    "returns in a gathering": Ending("sys.exit()", ENDED.format(1), 10, wait="model.state_dict()", backend="fsdp", where="write state = model.state_dict() above"),
    "rank 0 exits": Ending("sys.exit()", ENDED.format(0), 10, waits=1),  # the store ends with it
    "is killed": Ending("reach('end')", r"rank 1 \(host \S+\) did not answer", 15, fault=Fault("SIGKILL", at="end", rank=1)),
    "sleeps": Ending("time.sleep(6); accel.barrier()", "^after", 10, where=""),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_every_rank_has_its_error(name: str) -> None:
    ending = ENDINGS[name]
    port = free_port()
    code = PROGRAM.format(**asdict(ending))
    fails = [ending.fault] if ending.fault else []
    results = scripts(code, by_hand(0, 2, port), by_hand(1, 2, port), check=False, fails=fails)
    for rank in (0, 1) if ending.on_both else (ending.waits,):
        text = results[rank].stdout
        assert re.search(ending.words, text, re.MULTILINE), text + results[rank].stderr
        assert ending.where in text, text
        assert "gloo" not in text
        assert int(text.split()[-2]) <= ending.seconds, text
    log = results[0].stderr
    assert name != "sleeps" or re.search(r"rank 0 is in 'barrier' \(.*; rank 1 is in no collective \(", log), log


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


def test_slow_ranks_are_waited_for_and_named(tmp_path: Path) -> None:
    slow, waiting = outcomes(2, go_slowly, "fsdp", tmp_path, breaks=True)
    assert not slow.error, slow.trace
    assert not waiting.error, waiting.trace
    assert any("rank 1 is in 'main_first' (test_waiting.py:" in word for word in waiting.value), waiting.value
    assert any("rank 0 is in no collective (test_waiting.py:" in word for word in waiting.value)
    assert slow.value == []


# -- judging, without processes ---------------------------------------------------------------------------------------


STUCK = [
    (Report("a barrier", waited=5.0), True),
    (Report("", waited=0.0), False),  # computes, or sleeps, and may come
    (Report("a gathering", waited=9.0), False),  # in the same place: a long transfer
    (Report("a barrier", waited=1.0), False),  # has just come
    (Report("recv", waited=9.0), False),  # waits for a single rank, which may come
]


def test_ranks_are_stuck_if_all_wait_in_different_places() -> None:
    for report, expected in STUCK:
        assert are_stuck([Report("a gathering", waited=6.0), report], 4.0) == expected, report


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


def test_a_program_that_repeats_itself_compares_nothing() -> None:
    accumulation = ["forward", "gather", "backward", "gather", "reduce"] * 4 + ["step"]
    assert compared([accumulation] * 5)[2:] == [0, 0, 0]
    generation = [["a", "b", "c"] * n + ["back", "step"] for n in (9, 4, 7, 5, 8)]
    assert max(compared(generation)[1:]) <= 3
    gan = ["d", "d back", "d step", "g", "d", "d back", "g back", "g step"]
    assert compared([gan] * 5)[2:] == [0, 0, 0]
