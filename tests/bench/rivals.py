"""Section ``rivals``: the same programs with accel, Accelerate and Fabric: their results, and the cost of a step and a rank."""

from __future__ import annotations

import os
import pickle
import signal
import time
import warnings
from collections import Counter as Count
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.measured import status

from .contenders import LIBRARIES, Counter, Torch, installed_rivals
from .memory import give_back
from .report import Data, Panel, Section, Verdict, brief, judged, table
from .steps import compare, rows_of
from .timing import run, scratch
from .training import library_table
from .workloads import TINY

RIGHT, WRONG = "right", "**silently wrong**"
CLOSE = 1e-5
KILLS = 12
STEPS = {"one process": 1, "DDP, 2 ranks": 2}
#: Of the model whose memory is measured: 201 MB of weights.
WIDTH, LAYERS = 2048, 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())


@dataclass(frozen=True)
class Program:
    """A training loop: two steps in each phase of ``trained``, which says whether its first layer trains."""

    title: str
    forwards: int = 1
    backwards: int = 1
    trained: tuple[bool, ...] = (True,)
    evaluated: bool = False
    sharded: bool = False

    def run(self, library: Any) -> list[float]:
        """Train by a library, and return the weights."""
        torch.manual_seed(0)
        raw: Any = Net()
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if self.sharded and rank > 0:
            # Rank 0's weights count.
            nn.init.zeros_(raw.body.weight)
        raw.body.requires_grad_(self.trained[0])
        if self.evaluated:
            with torch.no_grad():
                library.evaluation(raw)(torch.zeros(2, 8))
        model, optimizer = library.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        batches = torch.Generator().manual_seed(1)

        def loss() -> torch.Tensor:
            x = torch.randn(8, 8, generator=batches).chunk(world)[rank]
            return F.mse_loss(model(x), x[:, :4].sin())

        for trained in self.trained:
            raw.body.requires_grad_(trained)
            for _ in range(2):
                optimizer.zero_grad()
                losses = [loss() for _ in range(self.forwards)]
                for one in losses:
                    for _ in range(self.backwards - 1):
                        library.backward(one, retain_graph=True)
                    library.backward(one)
                optimizer.step()
        return _weights(model if self.sharded else raw)


PROGRAMS = (
    Program("two forwards, then two backwards, then a step", forwards=2),
    Program("a second backward of one graph (`retain_graph`)", backwards=2),
    Program("a layer frozen and thawed in training", trained=(True, False, True)),
    Program("a layer frozen at setup, thawed later", trained=(False, True)),
    Program("set up for evaluation, then for training", evaluated=True),
    Program("FSDP2, ranks that start from different weights", sharded=True),
)


def _weights(model: Any) -> list[float]:
    values = []
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        values.append(whole.detach().flatten())
    return torch.cat(values).tolist()


def _on_rank(program: Program, name: str) -> list[float] | str:
    warnings.simplefilter("ignore")
    try:
        return program.run(LIBRARIES[name](program.sharded))
    except Exception as error:
        return brief(error)


def _trained(program: Program, name: str) -> str:
    reference = torch.tensor(program.run(Torch()))
    try:
        ranks = run(2, _on_rank, program, name, seconds=120)
    except RuntimeError as error:
        return f"error: {brief(str(error))}"
    errors = [answer for answer in ranks if isinstance(answer, str)]
    if errors:
        return f"error: {errors[0]}"
    far = max(float((torch.tensor(weights) - reference).abs().max()) for weights in ranks)
    return RIGHT if far < CLOSE else f"{WRONG}, off by {far:.2g}"


class Saved:
    """A small trained model in a checkpoint of a library."""

    def __init__(self, name: str, folder: Path, size: int = 64) -> None:
        torch.manual_seed(0)
        model = nn.Linear(size, size)
        self.library, self.folder = LIBRARIES[name](), folder
        raw = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.library.setup(model, raw)
        self.state = {"model": self.model, "optimizer": self.optimizer, "counter": Counter()}
        self.library.backward(self.model(torch.randn(4, size)).sum())
        self.optimizer.step()
        self.save()

    def save(self) -> None:
        self.library.save(self.folder, self.state)

    def load(self) -> None:
        self.library.load(self.folder, self.state)

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def tensors(self) -> list[torch.Tensor]:
        momentum = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [*(p.detach() for p in self.model.parameters()), *momentum]

    def values(self) -> list[float]:
        return torch.cat([t.flatten() for t in self.tensors()]).tolist()

    def fill(self, value: float) -> None:
        for tensor in self.tensors():
            tensor.fill_(value)


def flipped(name: str, folder: Path) -> str:
    saved = Saved(name, folder)
    right = saved.values()
    largest = max(saved.files(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x40
    largest.write_bytes(content)
    try:
        saved.load()
    except Exception as error:
        return f"error: {brief(error).replace(f'{folder}/', '')}"
    return RIGHT if saved.values() == right else WRONG


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def planted(name: str, folder: Path) -> str:
    saved, mark, ran = Saved(name, folder), folder.parent / "ran", []
    for path in saved.files():
        content = path.read_bytes()
        path.write_bytes(pickle.dumps(Payload(mark)))
        with suppress(Exception):
            saved.load()
        if mark.exists():
            ran.append(path.name)
            mark.unlink()
        path.write_bytes(content)
    return f"**runs the code** in {', '.join(ran)}" if ran else "no code runs"


def killed(name: str, folder: Path) -> str:
    """Kill a fork of this process, which has everything loaded, at moments of the time that a save takes."""
    saved, found = Saved(name, folder, 1024), []
    for number in range(KILLS + 1):
        saved.fill(1.0)
        saved.save()
        saved.fill(2.0)
        start = time.perf_counter()
        child = os.fork()
        if child == 0:
            try:
                saved.save()
            finally:
                os._exit(0)
        if number == 0:
            # The first save tells how long one takes.
            os.waitpid(child, 0)
            seconds = time.perf_counter() - start
            continue
        time.sleep(seconds * number / (KILLS + 1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found.append(_loaded(saved))
    bad = Count(answer for answer in found if answer not in ("old", "new"))
    return ", ".join(f"{answer} {count} of {KILLS}" for answer, count in bad.items()) or f"{RIGHT}: old or new, whole"


def _loaded(saved: Saved) -> str:
    saved.fill(0.0)
    try:
        saved.load()
    except Exception:
        return "cannot be loaded"
    values = tuple(set(saved.values()))
    return {(1.0,): "old", (2.0,): "new"}.get(values, "**a mixture of old and new**")


CHECKPOINTS = {
    "a byte of a checkpoint flipped": flipped,
    "pickled code planted in a checkpoint": planted,
    "killed while saving over the last checkpoint": killed,
}


def _checkpoint(title: str, name: str) -> str:
    warnings.simplefilter("ignore")
    with scratch() as folder:
        (Path(folder) / "saved").mkdir()
        return CHECKPOINTS[title](name, Path(folder) / "saved")


def _memory(name: str, sharded: bool) -> float:
    """Return the memory of a rank after two steps, in multiples of the parameters' bytes."""
    warnings.simplefilter("ignore")
    give_back()
    library = LIBRARIES[name](sharded)
    warm = nn.Sequential(nn.Linear(8, 8))
    handles = library.setup(warm, torch.optim.AdamW(warm.parameters()))  # Loads the late imports of the library.
    before = status("RssAnon")
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    nbytes = sum(4 * p.numel() for p in model.parameters())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = library.setup(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        library.backward(model(torch.ones(2, WIDTH)).square().mean())
        optimizer.step()
    del handles
    return (status("RssAnon") - before) / nbytes


def _fullest(name: str, sharded: bool) -> float | None:
    try:
        return max(run(2, _memory, name, sharded))
    except RuntimeError:
        return None


def _measure(quick: bool) -> Data:
    names = ["accel", "raw torch", *installed_rivals()]
    answers = {program.title: {name: _trained(program, name) for name in names} for program in PROGRAMS}
    for title in CHECKPOINTS:
        answers[title] = {name: run(1, _checkpoint, title, name)[0] for name in names}
    memory = {name: [_fullest(name, sharded) for sharded in (False, True)] for name in names}
    steps = {title: library_table(TINY, world) for title, world in STEPS.items()}
    return {"answers": answers, "memory": memory, **compare(steps, 2.0 if quick else 20.0)}


def _tell(data: Data) -> list[str]:
    names = list(data["memory"])
    lines = [[name, *("failed" if n is None else f"{n:.2f} N" for n in data["memory"][name])] for name in names]
    answers = [[title, *(row[name] for name in names)] for title, row in data["answers"].items()]
    return [table(["", *names], answers), table(["", "DDP", "FSDP2"], lines)]


def _judge(data: Data) -> Iterator[Verdict]:
    bad = [title for title, row in data["answers"].items() if "**" in row["accel"]]
    yield judged("programs that go wrong silently with accel", len(bad), 0, "{:.0f}", cause=", ".join(bad))


def _draw(data: Data) -> list[Panel]:
    tables = [rows_of(data, title) for title in STEPS]
    added: dict[str, list[float | None]] = {}
    for name in data["memory"]:
        added[name] = [1e6 * rows[name]["thread"]["over"] if name in rows else None for rows in tables]
    return [
        Panel("Added to a step of a tiny model", "us over raw torch", list(STEPS), added),
        Panel("Memory of a rank of 2", "multiple of the parameters' bytes", ["DDP", "FSDP2"], data["memory"]),
    ]


SECTION = Section("rivals", "Beside Accelerate and Fabric", _measure, _tell, _judge, _draw)
