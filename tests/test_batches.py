"""Each rank's part of items, and the largest batch that fits: on real gloo ranks, of which one runs out of memory."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel import batches, process
from tests.distributed import refusals, run

TOO_MUCH = 1 << 50  # bytes, which no host has


# -- split ------------------------------------------------------------------------------------------------------------


def split_all() -> None:
    rank, world = accel.rank(), accel.world_size()
    for length in (0, 1, 2, 7):
        items = [f"text {i}" for i in range(length)]
        part = accel.split(items)
        assert accel.all_gather(part, objects=True) == items
        sizes = [len(theirs) for theirs in accel.all_gather([part], objects=True)]
        assert sum(sizes) == length
        assert max(sizes) - min(sizes) <= 1
        padded = accel.split(items, pad=True)
        assert len(padded) == math.ceil(length / world)
        assert accel.all_gather(padded, objects=True)[:length] == items
        rows = torch.arange(2 * length).reshape(length, 2)
        assert torch.equal(accel.all_gather(accel.split(rows)), rows)
        assert torch.equal(accel.all_gather(accel.split(rows, pad=True))[:length], rows)
    both = accel.split({"x": torch.arange(5), "y": {"words": tuple("abcde")}})
    assert both["y"]["words"] == tuple("abcde"[i] for i in both["x"].tolist())  # type: ignore[index]
    assert list(accel.split(range(5), pad=True)) == [min(3 * rank + i, 4) for i in range(3)][: math.ceil(5 / world)]


def split_wrongly(case: str) -> None:
    if case == "other":
        accel.split(["a", "b"] if accel.rank() else ["b", "a"])
    accel.split({"text": "a prompt", "lengths": {"x": [1], "y": [1, 2]}}[case])


def split_by_place() -> list[int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle, _, _ = accel.setup(model, backend="pipeline")
    part = accel.split([1, 2, 3])
    del handle, model
    return part


def test_split_gives_each_rank_its_part_and_gathering_brings_back_the_order() -> None:
    run(2, split_all)
    assert run(2, split_by_place) == [[1, 2, 3]] * 2  # the stages of a pipeline have one batch
    for case, what in (("text", "is a str"), ("lengths", "equal lengths"), ("other", "the ranks have other items")):
        assert all(what in message for message in refusals(2, split_wrongly, case, error="AccelError"))


# -- the largest batch -------------------------------------------------------------------------------------------------


TRAINED = 2  # what fits


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def start_with(where: str, net: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> Any:
    """In the second step of too large a batch, rank 1 runs out of memory; what notes the steps."""
    steps: list[None] = []

    def fail(*args: Any) -> None:
        if batch_size > TRAINED and process.rank() == 1 and len(steps) == 1:
            torch.empty(TOO_MUCH, dtype=torch.uint8)

    if where == "forward":
        net[2].register_forward_pre_hook(fail)  # type: ignore[index]
    elif where == "backward":
        net[2].register_full_backward_pre_hook(fail)  # type: ignore[index]
    elif where == "step":
        optimizer.register_step_pre_hook(fail)
    return steps


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def train(handles: Any, where: str, batch_size: int) -> dict[str, Any]:
    model, optimizer, raw, loader = handles
    steps = start_with(where, accel.unwrap(model), raw, batch_size)
    for _ in range(3):
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            steps.append(None)
    return accel.full_state_dict(model)


def training(backend: Any, where: str, batch_size: int) -> dict[str, Any]:
    """As a user's function does it: all that it trains is made in it."""
    net, raw = made()
    data: Any = torch.arange(32.0).view(8, 4) / 32
    loader = torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accel.setup(net, raw, loader, backend=backend)
    return train((model, optimizer, raw, loader), where, batch_size)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def fit(backends: list[Any], places: list[str]) -> None:
    batches._PATIENCE = timedelta(seconds=0.1)  # type: ignore[misc]
    for backend in backends:
        torch.manual_seed(1)
        want = training(backend, "", TRAINED)
        for where in places:
            torch.manual_seed(1)
            size, got = accel.largest_batch(lambda n, b=backend, w=where: training(b, w, n), 4)  # type: ignore[misc]
            assert (size, same(want, got)) == (TRAINED, True), (backend, where)


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "sharded", "pipeline", accel.DeepSpeed(stage=3)], ids=lambda b: getattr(b, "name", b))
def test_all_ranks_begin_again_where_one_has_no_memory(backend: Any) -> None:
    run(2, fit, [backend], ["forward", "backward", "step"])
