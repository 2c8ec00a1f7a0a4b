"""``split`` and ``largest_batch`` on real gloo ranks, one of which runs out of memory."""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import accel
from accel import process
from tests.distributed import outcomes, refusals, run
from tests.models import adamw, mlp
from tests.programs import free_port

TOO_MUCH = 1 << 50  # bytes, which no host has


# -- split ------------------------------------------------------------------------------------------------------------


def split_all() -> None:
    rank, world = accel.rank(), accel.world_size()
    for length in (0, 1, 2, 7):
        items = [f"text {i}" for i in range(length)]
        part, padded = accel.split(items), accel.split(items, pad=True)
        assert accel.all_gather(part, objects=True) == accel.gather_for_metrics(part, items, objects=True) == items
        assert length // world <= len(part) <= math.ceil(length / world) == len(padded)
        assert accel.all_gather(padded, objects=True)[:length] == items
        assert accel.gather_for_metrics(padded, items, objects=True) == items
        rows = torch.arange(2 * length).reshape(length, 2)
        assert torch.equal(accel.all_gather(accel.split(rows)), rows)
        for pad in (False, True):
            share = accel.split(rows, pad=pad)
            both = accel.gather_for_metrics({"rows": share, "first": share[:, 0]}, rows)
            assert torch.equal(both["rows"], rows)
            assert torch.equal(both["first"], rows[:, 0])
    dicts = accel.split({"x": torch.arange(5), "y": {"words": tuple("abcde")}})
    assert dicts["y"]["words"] == tuple("abcde"[i] for i in dicts["x"].tolist())  # type: ignore[index]
    last = "a prompt" if rank == world - 1 else ["a", "b"]
    for wrong, text in (({"x": [1], "y": [1, 2]}, "items have different lengths"), (last, "items is a str")):
        with pytest.raises(accel.AccelError, match=text):
            accel.split(wrong)
    for different in (["a", "b"], torch.arange(6)):
        with pytest.raises(accel.AccelError, match="got different items") if world > 1 else contextlib.nullcontext():
            accel.split(different if rank else different[:1])

    loader: Any = accel.setup(None, dataloaders=DataLoader(range(7), batch_size=2)).dataloaders  # type: ignore[arg-type]
    list(loader)
    rows = torch.tensor(accel.split([0, 1, 2, 3]))
    with pytest.raises(accel.LoaderError, match="No loader gave these rows") if world > 1 else contextlib.nullcontext():
        accel.gather_for_metrics(rows)  # of the loader or of the split


def test_split_and_gather() -> None:
    run(2, split_all)
    split_all()


def split_by_place(backend: Any) -> Any:
    torch.manual_seed(0)
    handle = accel.setup(mlp(4, 4, 4), backend=backend).model
    parts = [accel.split([1, 2, 3], pad=pad) for pad in (False, True)]
    for part in parts:
        assert accel.gather_for_metrics(part, [1, 2, 3], objects=True) == [1, 2, 3]
    accel.teardown(handle)
    return parts


def test_ranks_of_one_place_share_items() -> None:
    assert run(2, split_by_place, "pipeline") == [[[1, 2, 3]] * 2] * 2
    assert run(4, split_by_place, accel.DDP(sequence_parallel=2)) == [[[1, 2]] * 2] * 2 + [[[3], [3, 3]]] * 2


# -- the largest batch -------------------------------------------------------------------------------------------------


FITS = 2


def start_own_groups(port: int) -> None:
    """Let accel create the process group, as under torchrun, instead of using the one of the tests."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def training(backend: Any, where: str, batch_size: int) -> dict[str, Any]:
    """Train a new model. Rank 1 runs out of memory in the second step if the batch is too large."""
    net: Any = mlp(4, 8, 8, 1, seed=1)
    raw, step = adamw(net), 0

    def fail(*args: Any) -> None:
        if batch_size > FITS and process.rank() == 1 and step == 1:
            torch.empty(TOO_MUCH, dtype=torch.uint8)

    hooks = {"step": raw.register_step_pre_hook, "backward": net[2].register_full_backward_pre_hook}
    hooks.get(where, net[2].register_forward_pre_hook)(fail)
    data: Any = torch.arange(64.0).view(16, 4) / 64
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accel.setup(net, raw, loader, backend=backend)
    for step, x in enumerate(loader):  # noqa: B007
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return accel.full_state_dict(model)


def fit(port: int) -> None:
    start_own_groups(port)
    for backend in BACKENDS:
        want = training(backend, "", FITS)
        for where in ("forward", "backward", "step"):
            accel.teardown()
            size, got = accel.largest_batch(lambda n, b=backend, w=where: training(b, w, n), 5)  # type: ignore[misc]
            assert size == FITS
            assert all(torch.equal(want[name], got[name]) for name in want), (backend, where)
        accel.teardown()


BACKENDS = ["ddp", "fsdp", "sharded", "pipeline", "deepspeed:1", "deepspeed:3"]


def in_own_groups(fn: Any) -> None:
    for result in outcomes(2, fn, free_port(), breaks=True):
        assert not result.error, result.trace


def test_one_rank_out_of_memory() -> None:
    in_own_groups(fit)


def fail(port: int) -> None:
    start_own_groups(port)

    def no_memory(batch_size: int) -> None:
        raise MemoryError

    def other_error(batch_size: int) -> None:
        if process.rank() == 1:
            raise KeyError("mine")
        accel.barrier()

    with pytest.raises(accel.AccelError, match="not even a batch of 1 fits: rank 0: MemoryError: ; rank 1"):
        accel.largest_batch(no_memory, 3)
    with pytest.raises(Exception, match="'mine'"):
        accel.largest_batch(other_error, 3)
    assert accel.all_reduce(1) == 2  # in new groups
    model = accel.setup(nn.Linear(1, 1)).model
    with pytest.raises(accel.AccelError, match=r"Linear #\d+ is already set up\. Build the model inside"):
        accel.largest_batch(no_memory, 3)
    assert accel.unwrap(model).weight.isfinite().all()


def test_errors_raise_on_every_rank() -> None:
    in_own_groups(fail)


def test_a_foreign_process_group_raises() -> None:
    for message in refusals(2, accel.largest_batch, print, 4, error="AccelError"):
        assert "can't restart your process group" in message


def test_one_process_halves_until_it_fits() -> None:
    tried = []

    def fn(batch_size: int) -> list[int]:
        tried.append(batch_size)
        torch.empty(TOO_MUCH if batch_size > FITS else 1, dtype=torch.uint8)
        return [int(torch.randint(1000, ()))]

    torch.manual_seed(0)
    assert accel.largest_batch(fn, 9) == (FITS, [44])
    assert tried == [9, 4, 2]
    with pytest.raises(ZeroDivisionError):
        accel.largest_batch(lambda n: 1 // 0, 4)
    with pytest.raises(accel.AccelError, match="start=0 isn't a batch size"):
        accel.largest_batch(print, 0)
