"""Section ``rivals``: the same programs with accel, Accelerate and Fabric: what comes out, what a step and a rank cost."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import accel

from .contenders import ACCEL, RIVALS, installed_rivals, loops
from .ranks import run
from .section import Data, Panel, Section, Verdict, brief, table
from .steps import Comparison, compare, rows

RIGHT, WRONG = "right", "**silently wrong**"
CLOSE = 1e-5
KILLS = 12
STEPS = {"one process": 1, "DDP, 2 ranks": 2}
#: Of the model whose memory is measured: 201 MB of weights.
WIDTH, LAYERS = 2048, 12
ABOUT = f"""Each program is written as each library's documentation does, on 2 ranks over gloo where it trains, and its \
weights are held against those of one process on the whole batch: *right* within {CLOSE}, *silently wrong* where no error says \
so. An error is an answer as well. Checkpoints: one process, saved by `accel.save`, `accelerator.save_state` and \
`fabric.save`; the kill is a real SIGKILL, {KILLS} times, each at another moment of a save over an earlier checkpoint."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())


class Counter:
    """A part of a loop's state that is neither model nor optimizer."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Raw:
    """One process in plain torch: what the others are held against; ``divided`` asks for FSDP2."""

    def __init__(self, divided: bool = False) -> None:
        self.divided = divided

    def setup(self, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return model, optimizer

    def evaluation(self, model: nn.Module) -> Any:
        return model

    def schedule(self, scheduler: Any) -> Any:
        return scheduler

    def backward(self, loss: torch.Tensor, **options: bool) -> None:
        loss.backward(**options)

    def inner(self, model: Any) -> Any:
        """What gives a submodule to the loop."""
        return model


class Accel(Raw):
    def setup(self, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        backend = accel.FSDP(wrap=(nn.Linear,)) if self.divided else "auto"
        return accel.setup(model, optimizer, backend=backend, devices="cpu")[:2]

    def evaluation(self, model: nn.Module) -> Any:
        return accel.setup(model, devices="cpu").model

    def save(self, folder: Path, model: Any, optimizer: Any) -> None:
        accel.save({"model": model, "optimizer": optimizer, "counter": Counter()}, folder)

    def load(self, folder: Path, model: Any, optimizer: Any) -> None:
        accel.load(folder, {"model": model, "optimizer": optimizer, "counter": Counter()})


class Accelerate(Raw):
    def __init__(self, divided: bool = False) -> None:
        from accelerate import Accelerator

        if divided:
            raise NotImplementedError(
                "Accelerate has no FSDP on CPU: given a plugin for it, it takes DDP and does not say so"
            )
        self.library = Accelerator(cpu=True)
        self.library.register_for_checkpointing(Counter())

    def setup(self, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return self.library.prepare(model, optimizer)

    def evaluation(self, model: nn.Module) -> Any:
        return self.library.prepare_model(model, evaluation_mode=True)

    def schedule(self, scheduler: Any) -> Any:
        return self.library.prepare(scheduler)

    def backward(self, loss: torch.Tensor, **options: bool) -> None:
        self.library.backward(loss, **options)

    def inner(self, model: Any) -> Any:
        return self.library.unwrap_model(model)

    def save(self, folder: Path, model: Any, optimizer: Any) -> None:
        self.library.save_state(str(folder))

    def load(self, folder: Path, model: Any, optimizer: Any) -> None:
        self.library.load_state(str(folder))


class Fabric(Raw):
    def __init__(self, divided: bool = False) -> None:
        super().__init__(divided)
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import ModelParallelStrategy

        world = dist.get_world_size() if dist.is_initialized() else 1
        strategy = (
            ModelParallelStrategy(_shard, data_parallel_size=world, tensor_parallel_size=1)
            if divided
            else "ddp"
            if world > 1
            else "auto"
        )
        self.library = Fabric(accelerator="cpu", devices=world, strategy=strategy)
        self.library.launch()

    def setup(self, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        if not self.divided:
            return self.library.setup(model, optimizer)
        # FSDP2 has parameters of its own: its documentation makes the optimizer afterwards.
        model = self.library.setup(model)
        optimizer = type(optimizer)(model.parameters(), lr=optimizer.defaults["lr"])
        return model, self.library.setup_optimizers(optimizer)

    def evaluation(self, model: nn.Module) -> Any:
        return self.library.setup(model)

    def backward(self, loss: torch.Tensor, **options: bool) -> None:
        self.library.backward(loss, **options)

    def save(self, folder: Path, model: Any, optimizer: Any) -> None:
        self.library.save(folder / "state.ckpt", {"model": model, "optimizer": optimizer, "counter": Counter()})

    def load(self, folder: Path, model: Any, optimizer: Any) -> None:
        self.library.load(folder / "state.ckpt", {"model": model, "optimizer": optimizer, "counter": Counter()})


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in [child for child in model.children() if isinstance(child, nn.Linear)]:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


LIBRARIES: dict[str, type[Any]] = {"accel": Accel, "Accelerate": Accelerate, "Fabric": Fabric}


class Batches:
    """The same batches for everybody; of each a rank has its rows."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def loss(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.randn(8, 8, generator=self.generator)
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        x = x.chunk(world)[rank]
        return F.mse_loss(forward(x), x[:, :4].sin())


def _built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _ready(library: Any) -> tuple[Any, Any, Any]:
    """The raw model, and what the library made of it and of its optimizer."""
    raw, optimizer = _built()
    return raw, *library.setup(raw, optimizer)


def _train(library: Any, model: Any, optimizer: Any, batches: Batches, steps: int = 2, inner: bool = False) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        forward = partial(_by_parts, library.inner(model)) if inner else model
        library.backward(batches.loss(forward))
        optimizer.step()


def _by_parts(model: Any, x: torch.Tensor) -> Any:
    return model.head(model.body(x).tanh())


def two_forwards(library: Any) -> Any:
    raw, model, optimizer = _ready(library)
    batches = Batches()
    for _ in range(2):
        optimizer.zero_grad()
        losses = [batches.loss(model), batches.loss(model)]
        for loss in losses:
            library.backward(loss)
        optimizer.step()
    return raw


def second_backward(library: Any) -> Any:
    raw, model, optimizer = _ready(library)
    batches = Batches()
    for _ in range(2):
        optimizer.zero_grad()
        loss = batches.loss(model)
        library.backward(loss, retain_graph=True)
        library.backward(loss)
        optimizer.step()
    return raw


def submodules(library: Any) -> Any:
    raw, model, optimizer = _ready(library)
    _train(library, model, optimizer, Batches(), inner=True)
    return raw


def freezing(library: Any) -> Any:
    raw, model, optimizer = _ready(library)
    batches = Batches()
    for trained in (True, False, True):
        raw.body.requires_grad_(trained)
        _train(library, model, optimizer, batches)
    return raw


def unfreezing(library: Any) -> Any:
    raw, optimizer = _built()
    raw.body.requires_grad_(False)
    model, optimizer = library.setup(raw, optimizer)
    batches = Batches()
    _train(library, model, optimizer, batches)
    raw.body.requires_grad_(True)
    _train(library, model, optimizer, batches)
    return raw


def evaluated_first(library: Any) -> Any:
    raw, optimizer = _built()
    evaluated = library.evaluation(raw)
    with torch.no_grad():
        evaluated(torch.zeros(2, 8))
    model, optimizer = library.setup(raw, optimizer)
    _train(library, model, optimizer, Batches())
    return raw


def scheduled(library: Any) -> Any:
    raw, model, optimizer = _ready(library)
    scheduler = library.schedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    batches = Batches()
    for _ in range(3):
        _train(library, model, optimizer, batches, steps=1)
        scheduler.step()
    return raw


def other_weights(library: Any) -> Any:
    """Each rank's own weights at the start, on FSDP2: rank 0's are meant."""
    raw, _ = _built()
    if dist.is_initialized() and dist.get_rank() > 0:
        nn.init.zeros_(raw.body.weight)
    model, optimizer = library.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    _train(library, model, optimizer, Batches())
    return model


def _weights(model: Any) -> list[float]:
    values = []
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        values.append(whole.detach().flatten())
    return torch.cat(values).tolist()


@dataclass(frozen=True)
class Program:
    title: str
    run: Callable[[Any], Any]
    divided: bool = False


PROGRAMS = (
    Program("two forwards, then two backwards, then a step", two_forwards),
    Program("a second backward of one graph (`retain_graph`)", second_backward),
    Program("submodules called by the loop", submodules),
    Program("a layer frozen and thawed in training", freezing),
    Program("a layer frozen at setup, thawed later", unfreezing),
    Program("set up for evaluation, then for training", evaluated_first),
    Program("a learning rate schedule", scheduled),
    Program("FSDP2, ranks that start from different weights", other_weights, divided=True),
)


def _on_rank(number: int, name: str) -> list[float] | str:
    warnings.simplefilter("ignore")
    try:
        program = PROGRAMS[number]
        return _weights(program.run(LIBRARIES[name](program.divided)))
    except Exception as error:
        return brief(error)


def _trained(number: int, name: str) -> str:
    reference = torch.tensor(_weights(PROGRAMS[number].run(Raw())))
    try:
        found = run(2, _on_rank, number, name, seconds=60)
    except RuntimeError as error:
        return f"error: {brief(error)}"
    errors = [answer for answer in found if isinstance(answer, str)]
    if errors:
        return f"error: {errors[0]}"
    far = max(float((torch.tensor(weights) - reference).abs().max()) for weights in found)
    return RIGHT if far < CLOSE else f"{WRONG}, off by {far:.2g}"


def _saved(name: str, folder: Path, size: int = 64) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(size, size)
    library = LIBRARIES[name]()
    handle, optimizer = library.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    library.backward(handle(torch.randn(4, size)).sum())
    optimizer.step()
    library.save(folder, handle, optimizer)
    return library, handle, optimizer


def _held(model: Any, optimizer: Any) -> list[float]:
    momentum = [state["momentum_buffer"].flatten() for state in optimizer.state.values()]
    return _weights(model) + torch.cat(momentum).tolist()


def flipped(name: str, folder: Path) -> str:
    library, model, optimizer = _saved(name, folder)
    right = _held(model, optimizer)
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x40
    largest.write_bytes(content)
    try:
        library.load(folder, model, optimizer)
    except Exception as error:
        return f"error: {brief(error).replace(f'{folder}/', '')}"
    return RIGHT if _held(model, optimizer) == right else WRONG


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def planted(name: str, folder: Path) -> str:
    library, model, optimizer = _saved(name, folder)
    ran = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content, mark = path.read_bytes(), folder.parent / "ran"
        path.write_bytes(pickle.dumps(Payload(mark)))
        with suppress(Exception):
            library.load(folder, model, optimizer)
        if mark.exists():
            ran.append(path.name)
            mark.unlink()
        path.write_bytes(content)
    return f"**runs the code** in {', '.join(ran)}" if ran else "no code runs"


def _fill(model: Any, optimizer: Any, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
        for state in optimizer.state.values():
            state["momentum_buffer"].fill_(value)


def killed(name: str, folder: Path) -> str:
    """Kills in a fork of this process, which has everything loaded, over the time that a save takes."""
    library, model, optimizer = _saved(name, folder, 1024)
    found = []
    for number in range(KILLS + 1):
        _fill(model, optimizer, 1.0)
        library.save(folder, model, optimizer)
        _fill(model, optimizer, 2.0)
        start = time.perf_counter()
        child = os.fork()
        if child == 0:
            try:
                library.save(folder, model, optimizer)
            finally:
                os._exit(0)
        if number == 0:  # the first one tells how long a save takes
            os.waitpid(child, 0)
            seconds = time.perf_counter() - start
            continue
        time.sleep(seconds * number / (KILLS + 1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found.append(_loaded(library, model, optimizer, folder))
    counts = {answer: found.count(answer) for answer in dict.fromkeys(found)}
    if set(counts) <= {"old", "new"}:
        return f"{RIGHT}: old or new, whole"
    return ", ".join(f"{answer} {count} of {KILLS}" for answer, count in counts.items() if answer not in ("old", "new"))


def _loaded(library: Any, model: Any, optimizer: Any, folder: Path) -> str:
    _fill(model, optimizer, 0.0)
    try:
        library.load(folder, model, optimizer)
    except Exception:
        return "cannot be loaded"
    values = tuple(set(_held(model, optimizer)))
    return {(1.0,): "old", (2.0,): "new"}.get(values, "**a mixture of old and new**")


CHECKPOINTS = {
    "a byte of a checkpoint flipped": flipped,
    "pickled code planted in a checkpoint": planted,
    "killed while saving over the last checkpoint": killed,
}


def _checkpoint(title: str, name: str) -> str:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="accel-bench-") as folder:
        (Path(folder) / "saved").mkdir()
        return CHECKPOINTS[title](name, Path(folder) / "saved")


def _resident() -> int:
    """Anonymous bytes of this process in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _memory(name: str, divided: bool) -> float:
    """What a rank keeps after two steps, in multiples of the parameters' bytes."""
    warnings.simplefilter("ignore")
    # Each tensor a mapping of its own (M_MMAP_THRESHOLD), which glibc gives back when it is freed.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    library = LIBRARIES[name](divided)
    warm = nn.Sequential(nn.Linear(8, 8))
    kept = library.setup(warm, torch.optim.AdamW(warm.parameters()))  # loads what the library loads late
    before = _resident()
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    nbytes = sum(4 * p.numel() for p in model.parameters())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = library.setup(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        library.backward(model(torch.ones(2, WIDTH)).square().mean())
        optimizer.step()
    del kept
    return (_resident() - before) / nbytes


def _measure(quick: bool) -> Data:
    names = ["accel", *installed_rivals()]
    answers: dict[str, dict[str, str]] = {}
    for number, program in enumerate(PROGRAMS):
        answers[program.title] = {name: _trained(number, name) for name in names}
    for title in CHECKPOINTS:
        answers[title] = {name: run(1, _checkpoint, title, name)[0] for name in names}
    memory = {name: [_fullest(name, divided) for divided in (False, True)] for name in names}
    steps = {title: Comparison(title, world, loops, ("tiny", world), 20) for title, world in STEPS.items()}
    return {"answers": answers, "memory": memory, **compare(steps, 2.0 if quick else 20.0)}


def _fullest(name: str, divided: bool) -> float | None:
    try:
        return max(run(2, _memory, name, divided))
    except RuntimeError:
        return None


def _tell(data: Data) -> list[str]:
    names = list(data["memory"])
    held = [[name, *("failed" if n is None else f"{n:.2f} N" for n in data["memory"][name])] for name in names]
    return [
        ABOUT,
        table(["", *names], [[title, *(row[name] for name in names)] for title, row in data["answers"].items()]),
        f"Memory of a rank of 2, {LAYERS} `Linear({WIDTH}, {WIDTH})` with AdamW after two steps: what the process keeps in "
        "memory beyond what it had before the model was made (RssAnon), in multiples of N, the bytes of the parameters.",
        table(["", "DDP", "FSDP2"], held),
        "Time that a library adds to a step of a model of 2 Linear layers with SGD (thread time over raw torch), in the picture: "
        "from the same comparison as in the sections above, shorter.",
    ]


def _judge(data: Data) -> Iterator[Verdict]:
    bad = [title for title, row in data["answers"].items() if "**" in row["accel"]]
    verdict = f"**missed**: {', '.join(bad)}" if bad else "met"
    yield Verdict("programs that go wrong silently with accel", "0", f"{len(bad)} of {len(data['answers'])}", verdict)


def _draw(data: Data) -> list[Panel]:
    added = {name: [_added(data, title, name) for title in STEPS] for name in (ACCEL, *RIVALS)}
    return [
        Panel("Added to a step of a tiny model", "us over raw torch", list(STEPS), added),
        Panel("Memory of a rank of 2", "multiple of the parameters' bytes", ["DDP", "FSDP2"], data["memory"]),
    ]


def _added(data: Data, title: str, name: str) -> float | None:
    found = rows(data, title)
    return found[name].thread_over if name in found else None


SECTION = Section("rivals", "Beside Accelerate and Fabric", _measure, _tell, _judge, _draw)
