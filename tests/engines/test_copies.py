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
from accel.engines.base.holdings import Holdings
from accel.precision import convert_batchnorms, restore_batchnorms
from accel.registry import registry
from tests.backends import BACKENDS, engine_of, need
from tests.distributed import refusals, run
from tests.models import sgd


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
    """Every way to copy a raw object gives all of it, or raises with a line that works."""
    for way in (pickled, saved, copy.deepcopy):
        made = answer(way, raw)
        if isinstance(made, str):
            assert "accel.full_state_dict" in made
        else:
            assert equal(made.state_dict(), full)


def check_handle(model: Any, raw: Any, backend: Any) -> None:
    """Copies of a handle are the full module that its author made, without a trace of accel, and can be pickled."""
    raw[2].eval()
    full = {name: value.cpu() for name, value in accel.full_state_dict(model).items()}
    if registry.of_handle(model).holdings.partial(None):
        assert "copy.deepcopy(model)" in refusal(lambda: pickle.dumps(model))
        pickles = copy.deepcopy(model)
    else:
        pickles = model
    file = io.BytesIO()
    torch.save({"model": pickles, "again": [pickles]}, file)
    assert b"accel" not in file.getvalue()
    file.seek(0)
    kept = torch.load(file, weights_only=False)
    assert kept["again"][0] is kept["model"]
    plain = net()
    plain[2].eval()
    plain.load_state_dict(full)
    x = torch.ones(5, 3)
    copies = [kept["model"], copy.deepcopy(model), copy.deepcopy([model])[0]]
    if engine_of(backend).holdings_type.partial is not Holdings.partial:
        copies.append(copy.deepcopy(raw))
    for made in copies:
        assert type(made) is Net
        assert made[2].parents[0] is made
        assert torch.equal(made[0].scale.cpu(), plain[0].scale)
        assert [m.training for m in made.modules()] == [m.training for m in plain.modules()]
        assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in plain.parameters()]
        for one, other in zip(made.modules(), plain.modules(), strict=True):
            assert type(one) is type(other)
            assert vars(one).keys() == vars(other).keys()
            assert type(one._parameters) is dict
            for name in vars(one):
                assert not name.endswith("_hooks") or len(vars(one)[name]) == len(vars(other)[name])
        assert all(type(p) is nn.Parameter and p.is_leaf and p.grad is None for p in made.parameters())
        assert equal({n: t.cpu() for n, t in made.state_dict().items()}, full)
        made = made.cpu()
        assert torch.equal(made(x), plain(x))
        made(x).sum().backward()
        made.load_state_dict(net().state_dict())
    assert equal(
        {name: value.cpu() for name, value in accel.full_state_dict(model).items()}, full
    )  # it is another's memory
    raw[2].train()


def follow_the_advice(backend: Any) -> None:
    data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)))
    raw = net()
    raw_optimizer, raw_loader = sgd(raw), DataLoader(data, 2)
    model, optimizer, loader = accel.setup(raw, raw_optimizer, raw_loader, backend=backend)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    check_handle(model, raw, backend)
    full, other = pickled(accel.full_state_dict(model)), net()
    other.load_state_dict(full)
    assert equal(other.state_dict(), full)
    check_whole(raw, full)

    assert "accel.full_state_dict(optimizer)" in refusal(lambda: pickle.dumps(optimizer))
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
    assert "use the raw object" in refusal(lambda: pickle.dumps(model))
    assert set(vars(raw)) == set(vars(net()))
    assert "use the raw object" in refusal(lambda: pickle.dumps(optimizer))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_the_advice_of_a_handle_works(backend: Any) -> None:
    world = 1 if backend in ("single", "dp") else 2
    need(backend, world)
    run(world, follow_the_advice, backend)


class Words(nn.Module):
    """Tied weights, an LSTM that keeps lists of its weights, blocks, and a graph that a forward leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(5, 4), nn.LSTM(4, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.register_buffer("seen", torch.zeros(()))
        self.sums: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.rnn(self.embed(x))[0].flatten(0, 1)
        for block in self.blocks:
            y = block(y)
        self.seen += 1
        self.sums = [y.sum()]
        return self.out(y)


def check_words(made: Any, expected: dict[str, torch.Tensor]) -> None:
    assert equal(made.state_dict(), expected)
    assert made.out.weight is made.embed.weight
    assert {type(m) for m in made.modules()} == {type(m) for m in Words().modules()}
    assert not made.training
    assert [p.requires_grad for p in made.blocks.parameters()] == [True] * 4 + [False] * 4
    fields = [{name for m in net.modules() for name in vars(m)} for net in (made, Words())]
    assert fields[0] == fields[1]
    twin = Words().eval()
    twin.load_state_dict(expected)
    made.rnn.flatten_parameters()
    x = torch.arange(6).view(2, 3) % 5
    assert torch.equal(made(x), twin(x))


def check_synchronized(raw: Any, model: Any) -> None:
    """A SyncBatchNorm, which is built on any device, and computes on a GPU."""
    engine: Any = registry.of_handle(model)
    engine.replaced_modules = convert_batchnorms(raw, engine.process.group)
    for made in (pickled(model), copy.deepcopy(model)):
        assert {type(block[1]) for block in made.blocks} == {nn.BatchNorm1d}
        assert vars(made.blocks[0][1]).keys() == vars(nn.BatchNorm1d(4)).keys()
    restore_batchnorms(engine.replaced_modules)


def kinds(*backends: Any) -> None:
    x = torch.arange(6).view(2, 3) % 5
    for backend in backends:
        torch.manual_seed(0)
        raw = Words()
        raw.blocks[1].requires_grad_(False)
        model, optimizer, _ = accel.setup(raw, sgd(raw), backend=backend)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for _ in range(2):
            step()
        model.eval()
        with torch.no_grad():  # torch can't copy the graph that a training step leaves in `sums`
            model(x)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        check_words(copy.deepcopy([model])[0], expected)
        if isinstance(backend, accel.DDP):
            check_synchronized(raw, model)
        model.train()
        step()
        assert not equal(dict(model.state_dict()), expected)
        accel.teardown(model)


def test_of_tied_weights_lists_of_weights_blocks_and_other_classes() -> None:
    blocks = (nn.Sequential,)
    run(
        2,
        kinds,
        accel.DDP(activation_checkpointing=blocks),
        accel.FSDP(activation_checkpointing=blocks),
        accel.DeepSpeed(stage=3, activation_checkpointing=blocks),
    )


def alone(backend: Any) -> None:
    model, _, _ = accel.setup(net(), backend=backend)
    if accel.is_main():
        copy.deepcopy(model)
    accel.all_gather(torch.ones(1))


@pytest.mark.parametrize("backend", ["fsdp", "pipeline"])
def test_a_copy_on_one_rank(backend: Any) -> None:
    for message in refusals(2, alone, backend, error="AccelError", breaks=True):
        assert "write full = copy.deepcopy(model) above an `if` of one rank" in message
