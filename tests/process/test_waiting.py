"""Ranks that wait for each other in different places end with an error that says where; slow ones go on."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import accel
from accel import process
from accel.process.hangs import _LIBRARIES, Report, stuck
from accel.process.startup import Order
from tests.distributed import outcomes, run
from tests.faults import Fault
from tests.programs import by_hand, free_port, scripts

#: With weights that are gathered, however small.
ZERO3 = accel.DeepSpeed(config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
BACKENDS: dict[str, Any] = {
    "fsdp": "fsdp",
    "zero1": accel.DeepSpeed(stage=1),
    "zero2": accel.DeepSpeed(stage=2),
    "zero3": ZERO3,
    "ddp": "ddp",
    "sharded": "sharded",
    "copies": accel.FSDP(replicas=2),
    "layers": accel.FSDP(
        tensor_parallel=2, replicas=2, plan={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    ),
}


def backend_of(name: str) -> Any:
    if name != "mesh":
        return BACKENDS[name]
    return accel.FSDP(mesh=dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


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
            net, torch.optim.SGD(net.parameters(), lr=0.1), backend=backend_of(backend)
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
    "first episodes": lambda loop, _: loop.episode(2 + one()),
    "later episodes": lambda loop, _: [loop.episode(2 + i * one()) for i in range(3)],
    "backwards": lambda loop, _: [loop.train(2), loop.train(2, 1 + one())],
    "steps": lambda loop, _: [loop.train(2 + one()), accel.barrier()],
    "second step": lambda loop, _: [
        loop.train(1 + one()),
        accel.barrier(),
    ],  # where DDP's reducer makes its buckets anew
    "steps on main": lambda loop, _: [[loop.loss().backward(), on_main(loop.optimizer.step)] for _ in range(4)],
    "evaluation, then training": lambda loop, _: [loop.train(2), on_main(loop.evaluate), loop.train(2)],
    "evaluation, then barrier": lambda loop, _: [loop.train(2), on_main(loop.evaluate), accel.barrier()],
    "evaluation, then save": lambda loop, path: [
        loop.train(2),
        on_main(loop.evaluate),
        accel.save({"model": loop.model}, path / "checkpoint"),
    ],
    "experts": lambda loop, _: loop.train(only=one()),
    "later experts": lambda loop, _: [loop.train(3, only=0), loop.train(only=one())],
    "experts in evaluation": lambda loop, _: [loop.train(2, only=0), loop.evaluate(one()), loop.train()],
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
def group(folder: Path, name: str, first_word: float = 1.0) -> Iterator[None]:
    """A process group of its own, which may break; the hang detector is quicker than usual."""
    if dist.is_initialized():
        dist.destroy_process_group()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = folder / name.replace(" ", "-").replace(",", "")
    dist.init_process_group(
        "gloo", init_method=f"file://{path}.store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    detector = process.current().detector
    assert detector is not None
    detector._patience, detector._first_warning = 0.4, first_word
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
    texts = refused(backend, [name for name in CASES if name not in ("second step", "steps on main")], tmp_path)
    gathers = {
        "experts": ("the gathering of", "blocks.1"),
        "later experts": ("the gathering of", "blocks.1"),
        "experts in evaluation": ("the gathering of", "blocks.1"),
        "evaluation, then barrier": ("the gathering of", "'barrier'"),
        "evaluation, then save": ("the gathering of", "'accel.save'"),
        "full state": ("write state = model.state_dict() above", "the gathering of"),
        "state of the optimizer": ("write state = optimizer.state_dict() above",),
        "clipping": ("accel.clip_grad_norm_",),
        "first on main": ("(Net", "'main_first'"),
    }
    for name, words in gathers.items():
        for text in texts[name]:
            assert all(word in text for word in words), text


def norm_on_main(folder: Path) -> tuple[str, float]:
    """How it ends on this rank, and after how many seconds."""
    began = time.monotonic()
    with group(folder, "norm on main"):
        loop = Loop("fsdp")
        loop.train()
        norm = loop.model.head.weight.grad.norm()
        with pytest.raises((RuntimeError, accel.AccelError)) as info:
            norm.full_tensor() if accel.is_main() else loop.train()
    return str(info.value), time.monotonic() - began


def test_a_rank_that_waits_for_a_dtensor_alone_is_found(tmp_path: Path) -> None:
    """On that rank DTensor's own error comes, on the others accel's, and in the log it is said on all."""
    results = outcomes(2, norm_on_main, tmp_path, breaks=True)
    text, _ = results[1].value
    assert "rank 0 is in wait_tensor (test_waiting.py" in text
    assert "the gathering of" in text
    assert all(seconds < 30 for _, seconds in (result.value for result in results))


def test_the_ranks_that_wait_together_are_named_together(tmp_path: Path) -> None:
    for text in refused("fsdp", ["evaluation, then barrier"], tmp_path, world=3)["evaluation, then barrier"]:
        assert "rank 1, 2 is in 'barrier'" in text


@pytest.mark.parametrize("backend", ["copies", "layers", "mesh"])
def test_a_wait_in_a_group_of_some_ranks_is_found(backend: str, tmp_path: Path) -> None:
    for text in refused(backend, ["evaluation, then barrier"], tmp_path, world=4)["evaluation, then barrier"]:
        assert "rank 1, 2, 3 is in 'barrier'" in text


@pytest.mark.parametrize("backend", ["zero1", "zero2"])
def test_different_numbers_of_backwards_end_on_every_rank(backend: str, tmp_path: Path) -> None:
    refused(backend, ["backwards", "steps", "clipping"] if backend == "zero2" else ["steps", "clipping"], tmp_path)


@pytest.mark.parametrize("backend", ["ddp", "sharded"])
def test_different_numbers_of_steps_end_on_every_rank(backend: str, tmp_path: Path) -> None:
    texts = refused(
        backend,
        ["steps", "second step", "steps on main"] if backend == "ddp" else ["steps", "state of the optimizer"],
        tmp_path,
    )
    assert all("write state = optimizer.state_dict() above" in t for t in texts.get("state of the optimizer", ()))


def forwards_of_its_own(backend: str) -> dict[str, torch.Tensor]:
    """Each rank with its own number of forwards, where the backend gathers nothing in them."""
    loop = Loop(backend)
    for i in range(3):
        loop.episode(2 + i * one())
        on_main(loop.evaluate)
    return {n: t.clone() for n, t in accel.full_state_dict(loop.model).items()}


@pytest.mark.parametrize("backend", ["ddp", "zero1", "zero2"])
def test_different_numbers_of_forwards_are_right_where_nothing_is_gathered(backend: str) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):  # the same input in each forward, so that the mean is that of one
        optimizer.zero_grad()
        F.mse_loss(net(torch.ones(2, 4)), torch.zeros(2, 2)).backward()
        optimizer.step()
    for found in run(2, forwards_of_its_own, backend):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(found[name], value)


ENDING = """
import accel, torch
accel.init(process_group="gloo")
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
model, optimizer, _ = accel.setup(net, torch.optim.SGD(net.parameters(), lr=.1), backend="{backend}")
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
try:
    if accel.is_main():
        {act}
except accel.AccelError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("backend", "act", "where"),
    [
        ("ddp", "accel.save({'model': model}, '/nowhere/at/all')", "'accel.save'"),
        ("fsdp", "model.state_dict()", "write state = model.state_dict() above"),
    ],
)
def test_a_rank_that_ends_its_program_is_named(backend: str, act: str, where: str) -> None:
    port = free_port()
    code = ENDING.format(backend=backend, act=act)
    first, second = scripts(code, by_hand(0, 2, port), by_hand(1, 2, port))
    assert re.search(r"rank 1 \(host \S+\) ended its program, by its end or sys.exit", first.stdout)
    assert where in first.stdout
    assert "gloo" not in first.stdout
    assert second.stdout == ""


def test_a_rank_that_is_killed_is_named() -> None:
    port = free_port()
    code = ENDING.format(backend="ddp", act="accel.barrier()") + "faults.reach('end')\n"
    end = Fault("exit 9", at="end", rank=1)
    first, _ = scripts(code, by_hand(0, 2, port), by_hand(1, 2, port), check=False, fails=[end])
    assert re.search(r"rank 0 cannot go on in 'barrier': rank 1 \(host \S+\) is gone without a word", first.stdout)


BEHIND_A_KERNEL = """
import torch, accel
from tests import faults
from tests.distributed import wait_for
from tests.models import mlp, sgd

faults.begin()
raw = mlp(4, 8, 2)
model, optimizer, _ = accel.setup(raw, sgd(raw), backend="ddp")
model(torch.ones(4, 4)).sum().backward()
process = accel.process.current()
process.detector._deaf = {deaf}  # as with nccl
if accel.is_main():
    open({ready!r}, "w").close()
faults.reach("end")
weights = [p.clone() for p in raw.parameters()]
heard = (lambda: process.ended) if {deaf} else (lambda: process.detector.left)
wait_for(heard)  # as item() waits for its device, and hears of no connection
try:
    optimizer.step()
except accel.AccelError as error:
    print(type(error).__name__, error)
print("changed", any(not torch.equal(p, q) for p, q in zip(raw.parameters(), weights)))
"""


@pytest.mark.parametrize("deaf", [True, False])
def test_a_killed_rank_ends_a_wait_for_a_device(deaf: bool, tmp_path: Path) -> None:
    """The step after it is refused; with gloo, by the drift check of the first step."""
    port, ready = free_port(), str(tmp_path / "ready")
    code = BEHIND_A_KERNEL.format(deaf=deaf, ready=ready)
    end = Fault("SIGKILL", at="end", rank=1, when=ready)
    first, _ = scripts(code, by_hand(0, 2, port), by_hand(1, 2, port), check=False, fails=[end])
    named = re.search(r"AccelError .*were ended: rank 1 is gone without a word", first.stdout)
    assert bool(named) == deaf, first.stdout
    assert "changed False" in first.stdout


class Slow:
    """Something with a state that takes its time on one rank."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def state_dict(self) -> dict[str, int]:
        on_main(self._act)
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def go_slowly(backend: str, folder: Path) -> tuple[int, list[str]]:
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

    with group(folder, backend, first_word=2.0):
        loop = Loop(backend)
        loop.train(2)
        for act in (sleep, compute):
            on_main(act)  # loading data, say
            loop.train(2)
        on_main(sleep)
        accel.barrier()
        with accel.main_first():
            on_main(sleep)
        accel.save({"model": loop.model, "slow": Slow(sleep)}, folder / "slow")
        loop.train()
        accel.barrier()
    logging.getLogger("accel").removeHandler(handler)
    return len(words), words


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_slow_ranks_are_waited_for_and_named(backend: str, tmp_path: Path) -> None:
    slow, waiting = outcomes(2, go_slowly, backend, tmp_path, breaks=True)
    assert not slow.error, slow.trace
    assert not waiting.error, waiting.trace
    words = waiting.value[1]
    for place in ("'barrier' (test_waiting.py:", "'main_first' (test_waiting.py:"):
        assert any(f"rank 1 is in {place}" in word and "waits for rank 0" in word for word in words), words
    assert any("rank 0 is in no collective (test_waiting.py:" in word for word in words)
    assert slow.value == (0, [])


def go_slowly_on_a_mesh(backend: str, folder: Path) -> None:
    """Two ranks in turn, which are waited for in groups that not all are in."""
    with group(folder, backend):
        loop = Loop(backend)
        loop.train(2)
        for slow in (1, 2):
            if accel.rank() == slow:
                time.sleep(4)
            loop.train(2)
        accel.barrier()


@pytest.mark.parametrize("backend", ["copies", "layers"])
def test_a_slow_rank_of_a_mesh_is_waited_for(backend: str, tmp_path: Path) -> None:
    for result in outcomes(4, go_slowly_on_a_mesh, backend, tmp_path, breaks=True):
        assert not result.error, result.trace


GARBAGE = """
import gc, threading
from accel.process.hangs import stack_of

class Garbage:
    def __init__(self):
        self.local, self.itself = threading.local(), self

gc.collect()
gc.freeze()
for objects in range(100):
    Garbage()
    gc.set_threshold(gc.get_count()[0] + objects)
    stack = stack_of(threading.get_ident())
    gc.set_threshold(700)
    assert gc.isenabled() and stack[1].f_code.co_name == "<module>", stack
    gc.collect()
gc.disable()
assert stack_of(threading.get_ident()) and not gc.isenabled()
"""


def test_no_garbage_is_collected_where_a_thread_is_looked_at() -> None:
    """Whichever object would begin it: Python 3.11 waits for itself where a ``threading.local`` is among the garbage."""
    scripts(GARBAGE, {}, timeout=60)


# -- judging, without processes ---------------------------------------------------------------------------------------


def place(doing: str = "x", call: str = "", cpu: float = 0.0, **begun: int) -> Report:
    return Report(begun, cpu, doing, call, "")


def test_only_ranks_that_wait_for_each_other_are_stuck() -> None:
    gather, barrier = place(world=5, own=2), place(world=4, own=3)
    computing, elsewhere = place("", cpu=9.0, world=4, own=2), place("", world=4, own=2)
    assert stuck([gather, barrier], [gather, barrier]) == [0, 1]
    assert stuck([gather, elsewhere], [gather, elsewhere]) == []  # it may come
    assert stuck([gather, barrier, elsewhere], [gather, barrier, elsewhere]) == [0, 1]
    assert stuck([gather, gather, barrier], [gather, gather, barrier]) == [0, 1, 2]
    assert stuck([gather, place(cpu=1.0, world=4, own=3)], [gather, place(cpu=9.0, world=4, own=3)]) == []
    assert stuck([gather, place(world=3, own=3)], [gather, barrier]) == []  # it has moved
    assert stuck([gather, computing], [gather, computing]) == []
    assert stuck([gather, gather], [gather, gather]) == []  # a long transfer
    reduce, broadcast = place("", "all_reduce", world=5), place("", "broadcast", world=5)
    assert stuck([reduce, broadcast], [reduce, broadcast]) == [0, 1]
    message = place("", "recv", world=9)
    assert stuck([message, barrier], [message, barrier]) == []  # from a rank that may come


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


def test_no_file_of_accel_passes_for_the_users_program() -> None:
    files = list(Path(accel.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    assert all(str(path).startswith(_LIBRARIES) for path in files)
    assert not __file__.startswith(_LIBRARIES)
