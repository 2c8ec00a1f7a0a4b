"""Weights that move outside of ``optimizer.step()``: by hand in the loop, or by other methods of an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from tests.backends import need
from tests.distributed import run
from tests.engines.deferred import known
from tests.models import distance, mlp

WHOLE = ["ddp", "sharded", "deferred"]
STEPS = 3


class Pair:
    """A model on all ranks, and one process's on the whole batch, trained by the same loop."""

    def __init__(self, backend: Any, optimizer: Callable[[nn.Module], Any] | None = None) -> None:
        self.raw, self.reference = mlp(4, 6, 6, 3), mlp(4, 6, 6, 3)
        self.raw_optimizer = optimizer(self.raw) if optimizer else None
        self.model, handle, _ = accel.setup(self.raw, self.raw_optimizer, backend=backend)
        self.optimizers = [handle, optimizer(self.reference) if optimizer else None]
        self.replica, self.replicas = accel.data_parallel_place(self.model)
        self.step = 0

    def both(self) -> Iterator[tuple[Any, Any, torch.Tensor]]:
        """Model, optimizer and part of the next batch."""
        self.step += 1
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.step))
        yield self.reference, self.optimizers[1], x
        yield self.model, self.optimizers[0], x.chunk(self.replicas)[self.replica]

    def check(self) -> None:
        full, x = accel.full_state_dict(self.model), torch.ones(2, 4)
        assert distance(full, dict(self.reference.state_dict())) <= 1e-6
        with torch.no_grad():
            torch.testing.assert_close(self.model(x), self.reference(x), rtol=0, atol=1e-5)


def loss_of(model: nn.Module, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return F.mse_loss(model(x * scale), x[:, :3].sin())


@contextlib.contextmanager
def backend_of(backend: Any) -> Iterator[Any]:
    with known() if backend == "deferred" else contextlib.nullcontext():
        yield backend
        accel.teardown()


def update(model: nn.Module, how: str) -> None:
    for p in model.parameters():
        if p.grad is None:  # in a pipeline each rank has its stage
            continue
        if how == "in place":
            with torch.no_grad():
                p -= 0.3 * p.grad
            p.grad.zero_()
        elif how == "replaced":
            p.data = p.data - 0.3 * p.grad
        else:
            p.data.add_(-0.3 * p.grad)
    if how != "in place":
        model.zero_grad()


def train_by_hand(backend: Any) -> None:
    for how in ("accumulated", "no_sync", "clipped", "in place", "replaced"):
        with backend_of(backend):
            pair = Pair(backend)
            for _ in range(STEPS):
                for model, _, x in pair.both():
                    quiet = how == "no_sync" and type(model) is not nn.Sequential
                    with accel.no_sync(model) if quiet else contextlib.nullcontext():
                        loss_of(model, x).backward()
                    if how in ("accumulated", "no_sync"):
                        loss_of(model, x, 2.0).backward()
                    if how == "clipped":
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    update(model, how)
            pair.check()


@pytest.mark.parametrize("backend", [*WHOLE, *(accel.DeepSpeed(stage=s) for s in (1, 2)), "fsdp", "pipeline"], ids=str)
def test_updates_by_hand(backend: Any) -> None:
    need("sharded" if backend == "deferred" else backend, 2)
    run(2, train_by_hand, backend)


OFFLOAD = accel.DeepSpeed(stage=1, offload_optimizer=True)


def write(model: nn.Module, how: str) -> None:
    for p in model.parameters():
        if how == "data":
            p.data.clamp_(-0.2, 0.2)
        elif how == "in place":
            with torch.no_grad():
                p.mul_(0.9)
        else:
            p.data = p.data * 0.9


def written(backend: Any, how: str) -> None:
    with backend_of(backend):
        pair = Pair(backend, lambda m: torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9))
        for _ in range(STEPS):
            for model, optimizer, x in pair.both():
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                write(model, how)
        pair.check()
        accel.teardown(pair.model)
        assert distance(pair.raw, pair.reference) <= 1e-6


@pytest.mark.parametrize("backend", ["fsdp", accel.DeepSpeed(stage=1), OFFLOAD], ids=str)
def test_weights_written_between_steps(backend: Any) -> None:
    for how in ("data", "in place", *(() if backend == "fsdp" else ("replaced",))):
        run(2, written, backend, how)
