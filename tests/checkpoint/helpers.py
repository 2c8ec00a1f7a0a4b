"""What the tests of checkpoints train and compare."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.checkpoint import record
from accel.checkpoint.shards import checksum
from tests.backends import BACKENDS, engine_of, replica_of
from tests.measured import restart_peak, status

ROWS = 72
GLOBAL_BATCH = 12
BEFORE, AFTER = 4, 5  # mid-epoch, then over its end


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


class Extra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Counter:
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


def train_and_save(backend: Any, directory: str, wait: bool = True, precision: str = "auto") -> dict[str, Any]:
    training = Run(backend, 1, precision)
    training.steps(BEFORE)
    pending = accel.save(training.state, directory, wait=wait)
    training.steps(AFTER)
    if pending is not None:
        pending.result(60)
    return training.result()


def resume(backend: Any, directories: list[str], precision: str = "auto") -> list[dict[str, Any]]:
    """What training goes on to from each of the checkpoints."""
    training = Run(backend, 2, precision)
    training.steps(2)  # a state that must be replaced, as is that of the checkpoint before
    results = []
    for directory in directories:
        assert accel.load(directory, training.state) is training.state  # type: ignore[arg-type]
        training.batches = iter(())
        assert training.state["step"] == BEFORE
        training.steps(AFTER)
        results.append(training.result())
    return results


def differences(a: Any, b: Any, path: str = "", tolerance: float | None = None) -> list[str]:
    """Where two values differ in types, or in bits; or, of tensors, by more than the tolerance."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        near = tolerance is not None and a.shape == b.shape and torch.allclose(a.to(b.dtype), b, rtol=0, atol=tolerance)
        return [] if facts(a) == facts(b) or (near and a.dtype is b.dtype) else [f"{path}: {a} {b}"]
    attributes = ("maxlen", "default_factory")
    alike = type(a) is type(b) and all(getattr(a, n, None) == getattr(b, n, None) for n in attributes)
    parts = parts_of(a, b) if alike else None
    if parts is not None:
        return [d for key, x, y in parts for d in differences(x, y, f"{path}/{key}", tolerance)]
    return [] if alike and facts(a) == facts(b) else [f"{path}: {a!r} {b!r}"]


def parts_of(a: Any, b: Any) -> list[tuple[Any, Any, Any]] | None:
    """What two containers of one form consist of; None if they are none."""
    if isinstance(a, SimpleNamespace | Namespace):
        a, b = vars(a), vars(b)
    if isinstance(a, dict) and a.keys() == b.keys() and (type(a) is dict or list(a) == list(b)):
        return [(key, a[key], b[key]) for key in a]
    if isinstance(a, list | tuple | deque) and not isinstance(a, torch.Size) and len(a) == len(b):
        return [(i, x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    return None


def facts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().reshape(-1).clone(memory_format=torch.contiguous_format)
        return value.dtype, value.shape, bytes(plain.view(torch.uint8).tolist()) if plain.numel() else b""
    if isinstance(value, numpy.ndarray | numpy.generic):
        return value.dtype, value.shape, value.tobytes()
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)


def engines(world: int) -> list[Any]:
    """The backends that are worth a test at a world size: on one process nearly all of them only call the module."""
    if world == 1:
        return ["single"]
    return [b for b in BACKENDS if engine_of(b).synchronizes and b not in ("ddp2", "horovod", "xla")]


def save_fully(state: Any, directory: str | Path, wait: bool) -> None:
    """Save, and wait for the end of what goes on in the background."""
    pending = accel.save(state, directory, wait=wait)
    assert (pending is None) is wait
    if pending is not None:
        pending.result(60)


def filled(value: float, *sizes: int) -> dict[str, Any]:
    return {"n": value, "x": {str(i): torch.full((size,), float(value)) for i, size in enumerate(sizes or [1000])}}


def value_of(directory: str | Path) -> float:
    """The value of a checkpoint of ``filled``, which all of its tensors must have."""
    stored = record.read(str(directory)).tensors
    found = filled(-1.0, *(stored[f"x/{i}"].numel for i in range(len(stored))))
    accel.load(directory, found)
    values = {found["n"], *(float(v) for x in found["x"].values() for v in (x.min(), x.max()))}
    assert len(values) == 1, f"a mixture: {values}"
    return float(found["n"])


@contextlib.contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Context: it takes fewer bytes at any time."""
    before = restart_peak()
    yield
    assert status("VmHWM") - before < limit


def shard_of(directory: Path) -> Path:
    return next(directory.glob("*.safetensors"))


def body_of(directory: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((directory / "accel.json").read_bytes())
    del body["xxh3"]
    return body


def rewrite(directory: Path, **changes: Any) -> None:
    """Change the record, with the checksum that it should have."""
    content = json.dumps({**body_of(directory), **changes}, separators=(",", ":")).encode()[:-1]
    (directory / "accel.json").write_bytes(content + f',"xxh3":"{checksum(content)}"}}'.encode())


def flipped(content: bytes, at: int, bit: int = 0) -> bytes:
    at %= len(content)
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of bytes that each ``preadv`` gives from now on."""
    counts, preadv = list[int](), os.preadv

    def counted(*args: Any) -> int:
        counts.append(preadv(*args))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return counts


def fresh(path: Path) -> str:
    shutil.rmtree(path, ignore_errors=True)
    return str(path)
