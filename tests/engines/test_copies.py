"""Copies and pickles of handles and of raw objects: whole, or an error that says what to do; and doing that works."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from tests.backends import BACKENDS, need
from tests.distributed import run
from tests.models import sgd


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 1))


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    """As ``torch.save`` and ``torch.load`` give it back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return len(one) == len(other) and all(map(equal, one, other)) if isinstance(one, list) else bool(one == other)


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(accel.AccelError) as caught:
        act()
    return str(caught.value)


def answer(way: Callable[[Any], Any], raw: Any) -> Any:
    try:
        return way(raw)
    except accel.AccelError as error:
        return str(error)


def check_whole(raw: Any, full: dict[str, Any]) -> None:
    """Every way to copy a raw object gives all of it, or is refused with words that lead on."""
    for way in (pickled, saved, copy.deepcopy):
        made = answer(way, raw)
        if isinstance(made, str):
            assert "accel.full_state_dict" in made or "accel.teardown" in made
        else:
            assert equal(made.state_dict(), full)


def follow_the_advice(backend: Any) -> None:
    data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)))
    raw = net()
    raw_optimizer, raw_loader = sgd(raw), DataLoader(data, 2)
    model, optimizer, loader = accel.setup(raw, raw_optimizer, raw_loader, backend=backend)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    text = refusal(lambda: pickle.dumps(model))
    assert "accel.full_state_dict(model)" in text
    assert "accel.teardown(model)" in text
    full, other = pickled(accel.full_state_dict(model)), net()
    other.load_state_dict(full)
    assert equal(other.state_dict(), full)
    check_whole(raw, full)

    text = refusal(lambda: pickle.dumps(optimizer))
    assert "accel.full_state_dict(optimizer)" in text
    assert "accel.teardown(model)" in text
    full_state, other_optimizer = pickled(accel.full_state_dict(optimizer)), sgd(other)
    other_optimizer.load_state_dict(full_state)
    assert equal(other_optimizer.state_dict()["state"], full_state["state"])
    check_whole(raw_optimizer, full_state)

    assert "copy.deepcopy(handle)" in refusal(lambda: pickle.dumps(loader))
    assert len(pickled(copy.deepcopy(loader))) == 4
    assert type(pickled(copy.deepcopy(loader))) is DataLoader
    assert pickled(loader.state_dict()) == loader.state_dict()

    assert accel.teardown(model) is raw
    for way in (pickled, saved, copy.deepcopy):
        assert equal(way(raw).state_dict(), full)
        assert equal(way(raw_optimizer).state_dict()["state"], full_state["state"])
    assert "the raw model" in refusal(lambda: pickle.dumps(model))
    assert "the raw optimizer" in refusal(lambda: pickle.dumps(optimizer))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_the_advice_of_a_handle_works(backend: Any) -> None:
    world = 1 if backend in ("single", "dp") else 2
    need(backend, world)
    run(world, follow_the_advice, backend)
