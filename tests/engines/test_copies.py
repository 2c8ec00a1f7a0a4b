"""Copies and pickles of models are full raw modules, or an error that says what to do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.registry import registry
from tests.backends import BACKENDS, need
from tests.distributed import refusals, run
from tests.models import distance, sgd


class Net(nn.Sequential):
    """A buffer that is not saved, a hook, a reference to itself, an attribute of a weight."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1))
        self[0].register_buffer("scale", torch.tensor([2.0, 3.0]), persistent=False)
        self[2].parents = [self]
        self[3].weight.tag = "head"  # type: ignore[attr-defined]
        self[2].register_forward_hook(halved, with_kwargs=True)


def halved(module: nn.Module, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
    return out / 2


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    """Return what ``torch.save`` and ``torch.load`` make of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    assert b"accel" not in file.getvalue()
    file.seek(0)
    classes = {type(part) for part in net().modules()}
    with torch.serialization.safe_globals([*classes, halved]):
        return torch.load(file)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return distance(*({k: v.cpu() for k, v in each.items()} for each in (one, other))) == 0


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(accel.AccelError) as caught:
        act()
    return str(caught.value)


def check_copy(made: Any, plain: Any, full: dict[str, Any]) -> None:
    """A copy is the module that its author made, without a trace of accel, and works."""
    assert type(made) is Net
    assert torch.equal(made[0].scale.cpu(), plain[0].scale)
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in plain.parameters()]
    for one, other in zip(made.modules(), plain.modules(), strict=True):
        assert (type(one), one.training, type(one._parameters)) == (type(other), other.training, dict)
        assert vars(one).keys() == vars(other).keys()
        for name in vars(one):
            assert not name.endswith("_hooks") or len(vars(one)[name]) == len(vars(other)[name])
    assert all(type(p) is nn.Parameter and p.is_leaf and p.grad is None for p in made.parameters())
    assert equal(made.state_dict(), full)
    made, x = made.cpu(), torch.ones(5, 3)
    assert torch.equal(made(x), plain(x))
    made(x).sum().backward()
    made.load_state_dict(net().state_dict())


def copies(backend: Any) -> None:
    data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)))
    raw: Any = net()
    optimizer, raw_loader = sgd(raw), DataLoader(data, 2)
    model, _, loader = accel.setup(raw, optimizer, raw_loader, backend=backend)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    raw[2].eval()
    full, plain = accel.full_state_dict(model), net()
    plain.load_state_dict(full)
    plain[2].eval()  # type: ignore[index, operator]
    assert equal(copy.deepcopy(raw).state_dict(), full)
    made: list[Any] = [copy.deepcopy(model), copy.deepcopy([model])[0], AveragedModel(model).module]
    assert all(each[2].parents[0] is each for each in made)
    made += [saved(model), saved({"model": model, "again": [model]})["again"][0]]
    if not registry.find_engine(model).holdings.partial(None):
        assert equal(pickled(raw).state_dict(), full)
    for each in made:
        check_copy(each, plain, full)
    assert equal(accel.full_state_dict(model), full)  # it has its own memory
    assert "Pickle its state_dict()" in refusal(lambda: pickle.dumps(loader))
    assert accel.teardown(model) is raw
    for way in (pickled, saved, copy.deepcopy):
        assert equal(way(raw).state_dict(), full)
    assert "Use the raw module" in refusal(lambda: pickle.dumps(model))
    assert set(vars(raw)) == set(vars(net()))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_copies_are_full_raw_modules(backend: Any) -> None:
    world = 1 if backend in ("single", "dp") else 2
    need(backend, world)
    run(world, copies, backend)


class Tied(nn.Module):
    """Tied weights, and an LSTM, which keeps lists of its weights, in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.block(self.embed(x))[0])
        return out


def tied(backend: Any) -> None:
    x = torch.arange(6).view(2, 3) % 5
    model = accel.setup(Tied(), backend=backend).model
    model(x).square().mean().backward()
    made: Any = copy.deepcopy(model)
    assert made.out.weight is made.embed.weight
    made.block[1].flatten_parameters()
    assert torch.allclose(made(x), model(x))


@pytest.mark.parametrize("kind", [accel.DDP, accel.FSDP, accel.DeepSpeed])
def test_tied_weights_and_checkpointed_blocks(kind: Any) -> None:
    need(kind.__name__.lower(), 2)
    run(2, tied, kind(activation_checkpointing=(nn.Sequential,), **({"stage": 3} if kind is accel.DeepSpeed else {})))


def on_one_rank(backend: Any) -> None:
    model = accel.setup(net(), backend=backend).model
    if accel.is_main():
        copy.deepcopy(model)
    accel.all_gather(torch.ones(1))


@pytest.mark.parametrize("backend", ["fsdp", "pipeline"])
def test_a_copy_on_one_rank(backend: Any) -> None:
    for message in refusals(2, on_one_rank, backend, error="AccelError", breaks=True):
        assert "copy.deepcopy(model) or pickle (call it on every rank, not under an `if`)" in message
