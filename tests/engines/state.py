"""The whole state of a model and its optimizers, in and out, beside that of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.registry import registry


class Odd(nn.Module):
    """Tied, scalar and lonely parameters, both kinds of buffers, extra state."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.second.weight = self.first.weight
        self.scale, self.row = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1, size))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.register_parameter("none", None)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return torch.tanh(self.second(torch.relu(self.first(x)))) * self.scale * self.row + self.passing.sum()

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "tensors": [torch.full((2,), float(self.calls))]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def build_odd() -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), Odd(6), nn.BatchNorm1d(6), Odd(6), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    model[4].requires_grad_(False)  # in no optimizer
    model.register_state_dict_post_hook(lambda module, state, *_: state.__setitem__("total", sum(state["0.bias"])))
    groups = [{"params": [*model[1].parameters(), *model[0].parameters()]}, {"params": [*model[3].parameters()]}]
    groups[1]["lr"] = 0.02  # type: ignore[assignment]
    return model, [torch.optim.AdamW(groups, lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)]


def differences(a: Any, b: Any, path: str, tolerance: float = 1e-5) -> list[str]:
    """Where two states are not the same, in values or in the order of their keys."""
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and a.dtype is b.dtype and a.shape == b.shape
        return [] if alike and torch.allclose(a.cpu(), b.cpu(), rtol=0, atol=tolerance) else [f"{path}: {a} and {b}"]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{path}: {list(a)} and {list(b)}"]
        return [text for key in a for text in differences(a[key], b[key], f"{path}.{key}", tolerance)]
    if isinstance(a, list | tuple):
        return differences(dict(enumerate(a)), dict(enumerate(b)), path, tolerance)
    return [] if a == b else [f"{path}: {a} and {b}"]


def train_odd(model: Any, optimizers: Any, steps: range) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(accel.device())
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def states(model: Any, optimizers: Any) -> list[Any]:
    return [copy.deepcopy(accel.full_state_dict(one)) for one in (model, *optimizers)]


def check_state(backend: Any, tolerance: float = 1e-5) -> None:
    """The whole state is one process's, in and out. What doesn't fit raises torch's error, and changes nothing."""
    plain, references = build_odd()
    plain.to(accel.device())
    train_odd(plain, references, range(3))
    expected = [one.state_dict() for one in (plain, *references)]
    raw, raws = build_odd()
    model, optimizers, _ = accel.setup(raw, raws, backend=backend)
    train_odd(model, optimizers, range(3))
    full = states(model, optimizers)
    assert not [text for a, b in zip(full, expected, strict=True) for text in differences(a, b, "", tolerance)]
    assert full[0]._metadata == expected[0]._metadata
    for one, state in zip((model, raw, *optimizers), (full[0], *full), strict=True):
        assert not differences(one.state_dict(), state, "", 0.0)
    assert full[0]["1.first.weight"].data_ptr() == full[0]["1.second.weight"].data_ptr()

    train_odd(model, optimizers, range(3, 5))
    moved = states(model, optimizers)
    assert differences(moved[0], full[0], "", 0.0)
    weights = {name: value for name, value in full[0].items() if name != "total"}
    if registry.find_engine(model).holdings.partial(None):
        for wrong, message in (
            (weights | {"3.row": torch.ones(7)}, "size mismatch for 3.row: .*torch.Size\\(\\[7\\]\\)"),
            ({name: value for name, value in weights.items() if name != "2.bias"}, 'Missing key.*"2.bias"'),
            (weights | {"more": torch.ones(1)}, 'Unexpected key.*"more"'),
        ):
            with pytest.raises(RuntimeError, match=message):
                model.load_state_dict(wrong)
        now = accel.full_state_dict(model)
        assert not [n for n, value in now.items() if "extra" not in n and differences(value, moved[0][n], n, 0.0)]
    heard: list[bool] = []
    hook = raw.register_load_state_dict_post_hook(
        lambda module, keys: heard.append(type(module[1].row).__name__ != "Target")
    )
    assert model.load_state_dict(weights).missing_keys == []
    hook.remove()
    for optimizer, state in zip(optimizers, full[1:], strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))
    assert heard == [True]
    assert not [
        text for a, b in zip(states(model, optimizers), full, strict=True) for text in differences(a, b, "", 0.0)
    ]

    train_odd(model, optimizers, range(3, 6))
    train_odd(plain, references, range(3, 6))
    accel.teardown(model)
    assert not any("state_dict" in vars(one) for one in (raw, *raws))
    for one, other in zip((raw, *raws), (plain, *references), strict=True):
        assert not differences(one.state_dict(), other.state_dict(), "", tolerance)
    assert torch.equal(raw[1].passing, plain[1].passing)
