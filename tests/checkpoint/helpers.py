"""What the tests of checkpoints train and compare."""

from __future__ import annotations

import shutil
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from tests.backends import BACKENDS, engine_of, replica_of

ROWS = 72
GLOBAL_BATCH = 12


class Middle(nn.Module):
    """A parameter that is one number, one that is never trained, and a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.5))
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return torch.tanh(x) * self.scale


class Net(nn.Sequential):
    """Weights of several shapes and sizes, in four parts, which a pipeline can have in four places."""

    def __init__(self) -> None:
        parts = {"first": nn.Linear(6, 17), "middle": Middle(), "wide": nn.Linear(17, 11), "head": nn.Linear(11, 3)}
        super().__init__(OrderedDict(parts))


class Counter:
    """An object with a state dict."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "mean": torch.arange(1000.0) * len(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["mean"], torch.arange(1000.0) * len(state["counts"]))
        self.counts = state["counts"]


class Run:
    """A training run: model, optimizer of two groups, scheduler, loader, values."""

    def __init__(self, backend: Any, seed: int, precision: str = "auto") -> None:
        torch.manual_seed(seed)
        self.net = Net()
        heads = [*self.net.head.parameters(), self.net.middle.scale]
        rest = [p for p in self.net.parameters() if all(p is not q for q in heads)]
        replicas = replica_of(backend)[1]
        self.raw = torch.optim.AdamW([{"params": rest}, {"params": heads, "lr": 0.02}], lr=0.05, weight_decay=0.1)
        generator = torch.Generator().manual_seed(5)
        data = TensorDataset(torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 3, generator=generator))
        loader = DataLoader(data, batch_size=GLOBAL_BATCH // replicas, shuffle=True)
        self.model, self.optimizer, self.loader = accel.setup(
            self.net,
            self.raw,
            loader,
            backend=backend,
            precision=precision,
            loader_options=accel.LoaderOptions(seed=seed),
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.counter = Counter()
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "loader": self.loader,
            "schedulers": [self.scheduler, {"n": 0}],
            "counter": self.counter,
            "step": 0,
            "ema": torch.zeros(7, 3),
            "notes": {"best": {3: (1, 2.5)}, "tags": {"a"}},
            "rng": accel.rng_state(),
        }
        self.batches: Iterator[Any] = iter(())

    def step(self) -> None:
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        x, y = batch
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x), y).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state["step"] += 1
        self.state["schedulers"][1]["n"] += 2
        self.state["ema"].add_(1.25)
        self.counter.counts[self.state["step"]] = -1
        if self.state["step"] in (3, 6):  # frozen when it is saved, trained again after that
            self.net.first.bias.requires_grad_(self.state["step"] == 6)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def result(self) -> dict[str, Any]:
        """All that a resumed run must have in common with one that was never interrupted."""
        optimizer = accel.full_state_dict(self.optimizer)
        return {
            "model": {n: t.clone() for n, t in accel.full_state_dict(self.model).items()},
            "state": optimizer["state"],
            "groups": optimizer["param_groups"],
            "scheduler": self.scheduler.state_dict(),
            "counts": self.counter.counts,
            "trainable": [p.requires_grad for p in self.net.parameters()],
            "plain": {k: self.state[k] for k in ("step", "notes", "ema")} | {"n": self.state["schedulers"][1]},
        }


def differences(a: Any, b: Any, path: str = "", tolerance: float = 0.0) -> list[str]:
    """Where two results differ, with the types that must be equal too."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype is b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance)
        return [] if same else [f"{path}: {a} {b}"]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for k in a for d in differences(a[k], b[k], f"{path}/{k}", tolerance)]
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return [d for i in range(len(a)) for d in differences(a[i], b[i], f"{path}/{i}", tolerance)]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} {b!r}"]


def distance(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two values differ, types included."""
    alike = type(a) is type(b) and all(
        getattr(a, n, None) == getattr(b, n, None) for n in ("maxlen", "default_factory")
    )
    parts = parts_of(a, b) if alike else None
    if parts is not None:
        return [d for key, x, y in parts for d in distance(x, y, f"{path}/{key}")]
    return [] if alike and facts(a) == facts(b) else [f"{path}: {a!r} {b!r}"]


def parts_of(a: Any, b: Any) -> list[tuple[Any, Any, Any]] | None:
    """What two containers of one form consist of; None if they are none."""
    if isinstance(a, SimpleNamespace):
        a, b = vars(a), vars(b)
    if isinstance(a, dict) and a.keys() == b.keys() and (type(a) is dict or list(a) == list(b)):
        return [(key, a[key], b[key]) for key in a]
    if isinstance(a, list | tuple | deque) and not isinstance(a, torch.Size) and len(a) == len(b):
        return [(i, x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    return None


def facts(value: Any) -> Any:
    """All there is to a value that has no parts, to be compared."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().contiguous().reshape(-1)
        return value.dtype, value.shape, bytes(plain.view(torch.uint8).tolist()) if plain.numel() else b""
    if isinstance(value, numpy.ndarray | numpy.generic):
        return value.dtype, value.shape, value.tobytes()
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)


def engines(world: int) -> list[Any]:
    """The backends that are worth a test at a world size: on one process nearly all of them only call the module."""
    if world == 1:
        return ["single"]
    return [b for b in BACKENDS if engine_of(b).synchronizes and b not in ("ddp2", "horovod", "xla")]


def fresh(path: Path) -> str:
    """A directory that does not exist."""
    shutil.rmtree(path, ignore_errors=True)
    return str(path)
