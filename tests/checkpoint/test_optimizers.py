"""Optimizers: state that does not fit, of other dtypes, and with own entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import CheckpointError
from tests.backends import need
from tests.distributed import refusals, run
from tests.models import distance

BACKENDS = ["single", "ddp", "sharded", "fsdp", "deepspeed:1", "deepspeed:2", "deepspeed:3"]


def build(classes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, classes))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).sum().backward()
    optimizer.step()


def trained(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = build(2).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return net, optimizer


def another_head(backend: str, folder: Path, trained: bool) -> float:
    """The distance of a load into a model with another head from the same made by hand with the optimizer as it was."""
    first = build(2)
    model, optimizer, _ = accel.setup(first, torch.optim.AdamW(first.parameters(), lr=0.1), backend=backend)
    train(model, optimizer)
    accel.save({"model": model, "optimizer": optimizer}, folder)
    whole = accel.full_state_dict(model)
    accel.teardown()

    second, plain = build(4), build(4)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.2)
    model, optimizer, _ = accel.setup(second, torch.optim.AdamW(second.parameters(), lr=0.2), backend=backend)
    if trained:
        train(model, optimizer)
        train(plain, expected)
    accel.load(folder, {"model": model, "optimizer": optimizer}, strict=False)
    plain[0].load_state_dict({"weight": whole["0.weight"], "bias": whole["0.bias"]})
    for _ in range(2):
        train(model, optimizer)
        train(plain, expected)
    return distance(accel.full_state_dict(model), plain.state_dict())


@pytest.mark.parametrize(("backend", "trained"), [(b, i % 2 == 0) for i, b in enumerate(BACKENDS)] + [("fsdp", True)])
def test_another_head(backend: str, trained: bool, tmp_path: Path) -> None:
    assert max(run(1 if backend == "single" else 2, another_head, backend, tmp_path, trained)) < 1e-5


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_state_has_its_parameter_s_dtype(dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path) -> None:
    (saved, first), (loaded, second) = (trained(dtype) for dtype in dtypes)
    second.state.clear()
    accel.save({"model": saved, "optimizer": first}, tmp_path)
    with pytest.raises(CheckpointError, match=r"\(pass convert=True\)"):
        accel.load(tmp_path, {"optimizer": second})
    assert not second.state
    accel.load(tmp_path, {"model": loaded, "optimizer": second}, convert=True)
    for own in second.state.values():
        assert own["exp_avg"].dtype is own["exp_avg_sq"].dtype is dtypes[1]
    second.step()


def test_optimizers_that_do_not_fit(tmp_path: Path) -> None:
    net, optimizer = trained()
    accel.save({"m": net, "o": optimizer}, tmp_path)
    accel.save({"o": optimizer}, tmp_path / "unnamed")
    parameters = list(build(2).parameters())
    turned = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
    other = build(2)
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path, {"o": torch.optim.SGD(parameters)}, "AdamW.* SGD"),
        (tmp_path, {"o": turned}, r"groups of \[4\] parameters instead of \[2, 2\]"),
        (tmp_path, {"m": other, "o": torch.optim.AdamW(reversed(list(other.parameters())))}, "is 0.weight in the"),
        (tmp_path / "unnamed", {"o": torch.optim.AdamW(reversed(parameters))}, r"0/exp_avg: \[8, 4\] in the"),
        (tmp_path, {"o": torch.optim.AdamW(parameters), "x": torch.ones(3)}, "does not fit"),
    ]
    for directory, state, message in refused:
        with pytest.raises(CheckpointError, match=message):
            accel.load(directory, state)
        assert not any(state["o"].state.values())


class Aged(torch.optim.SGD):
    age = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "age": self.age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.age = state.pop("age")
        super().load_state_dict(state)


def resume_aged(backend: str, folder: Path) -> int:
    found = []
    for age in (3, 0):
        net = build(2)
        raw = Aged(net.parameters(), lr=0.1)
        raw.age = age
        model, optimizer, _ = accel.setup(net, raw, backend=backend)
        state = {"model": model, "optimizer": optimizer}
        train(**state)
        accel.load(folder, state) if found else accel.save(state, folder)
        found.append(raw.age)
        accel.teardown()
    return found[1]


def test_own_entries_of_state_dicts(tmp_path: Path) -> None:
    need("sharded")
    assert run(2, resume_aged, "sharded", tmp_path / "c") == [3, 3]
    for message in refusals(2, resume_aged, "fsdp", tmp_path / "d", error="CheckpointError"):
        assert "Aged has extra entries ['age'], which backend 'fsdp' can't shard" in message
