"""Right uses of accel, and mistakes that type checkers find. ``make types`` checks this file. Nothing runs it.

A comment on each wrong line silences mypy and pyright. Both report comments that aren't needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import accel
from accel.handles import LoaderHandle


class Net(nn.Module):
    def generate(self, length: int) -> Tensor:
        return torch.zeros(length)


def train(model: Net, epochs: int, rate: float = 0.1) -> float:
    return rate * epochs


def numbers() -> None:
    assert_type(accel.all_reduce(3), int)
    assert_type(accel.split(range(3)), range)
    assert_type(accel.split(range(3), pad=True), list[int])


def right(net: Net, one: AdamW, two: SGD, loader: DataLoader[Tensor], batch: dict[str, Tensor]) -> None:
    model, optimizer, batches = accel.setup(net, one, loader)
    assert_type(model, Net)
    assert_type(optimizer, AdamW)
    assert_type(batches, DataLoader[Tensor])
    assert_type(model.generate(3), Tensor)
    assert_type(accel.setup(net, [one]).optimizers, list[AdamW])
    assert_type(accel.setup(net, (one, two), {"train": loader}).optimizers, tuple[AdamW, SGD])
    assert_type(accel.setup(net, one, {"train": loader}).dataloaders, dict[str, DataLoader[Tensor]])
    assert_type(accel.setup(None, dataloaders=loader), accel.Handles[None, None, DataLoader[Tensor]])
    for group in accel.accumulate(batches, 4):
        assert_type(len(group), int)
        for part in group:
            assert_type(part, Tensor)
    accel.setup(torch.compile(net), one, backend=accel.FSDP(replicas=2), precision="bf16-mixed")
    with accel.no_sync(model):
        accel.backward(model.generate(1).sum())
    accel.clip_grad_norm_(model, 1.0)
    assert_type(accel.gather_for_metrics(batch, batches), dict[str, Tensor])
    assert_type(accel.all_gather((batch["x"], batch["x"])), tuple[Tensor, Tensor])
    assert_type(accel.all_reduce(batch["x"], "mean"), Tensor)
    assert_type(accel.all_reduce(1.5), float)
    assert_type(accel.all_gather("name", objects=True), Any)
    assert_type(accel.broadcast(["name"], objects=True), list[str])
    assert_type(accel.largest_batch(lambda size: [size], 64), tuple[int, list[int]])
    assert_type(accel.effective_batch_size(batches), int)
    assert_type(accel.shard_sequence(model, batch), dict[str, Tensor])
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 1}
    accel.save(state, "run/step-1", wait=False).result()
    accel.save(state, "run/step-2", keep=2).result()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
    accel.load("run/step-1", state)
    assert_type(accel.unwrap(model), Net)
    assert_type(accel.teardown(model), Net)
    assert_type(accel.launch(train, net, 3, num_processes=2), float)
    accel.teardown()


def handle(loader: DataLoader[Tensor]) -> None:
    assert isinstance(loader, LoaderHandle)
    assert_type(loader.is_last, bool)
    assert_type(loader.batch_size, int | None)
    loader.skip(3)
    loader.skip("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    loader.is_lost  # type: ignore[attr-defined]  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def wrong(net: Net, one: AdamW, loader: DataLoader[Tensor]) -> None:
    accel.DDP(find_unused=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    accel.DPP()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    accel.setup(net, backend=accel.FSDP)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    accel.setup(net, precison="bf16-mixed")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    accel.setup(one, net)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    accel.setup(None, loader)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    accel.accumulate(net, 4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    accel.save("run/step-1", {"model": net})  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    accel.load("run/step-1", strict="never")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    accel.setup(net)[0].generat(3)  # type: ignore[operator]  # pyright: ignore[reportCallIssue]
    model, optimizer = accel.setup(net, one)  # type: ignore[misc]  # pyright: ignore[reportAssignmentType]
