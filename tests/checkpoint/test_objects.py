"""The objects and values of a state: how they are saved, matched and filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import CheckpointError
from tests.checkpoint.helpers import differences
from tests.distributed import run


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(seed: int, kind: Any = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(seed)
    optimizer = kind([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 5)).sum().backward()
        optimizer.step()
    return model, optimizer


def same(a: tuple[nn.Module, torch.optim.Optimizer], b: tuple[nn.Module, torch.optim.Optimizer]) -> bool:
    return not differences([a[0].state_dict(), a[1].state_dict()], [b[0].state_dict(), b[1].state_dict()])


def raw_and_handle(directory: str, saved_by: str) -> bool:
    one, other = trained(1), trained(2)
    with_handle, raw = (one, other) if saved_by == "handle" else (other, one)
    model, optimizer, _ = accel.setup(*with_handle, backend="ddp")
    states = [{"m": model, "o": optimizer}, {"m": torch.compile(raw[0]), "o": raw[1]}]
    if saved_by == "raw":
        states.reverse()
    accel.save(states[0], directory)
    accel.load(directory, states[1])
    return same(one, other)


@pytest.mark.parametrize("saved_by", ["handle", "raw"])
@pytest.mark.parametrize("world", [1, 2])
def test_compiled_modules_and_handles_have_equal_keys(saved_by: str, world: int, tmp_path: Path) -> None:
    assert all(run(world, raw_and_handle, str(tmp_path / "c"), saved_by))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_raw_optimizers_with_and_without_their_module(kind: Any, tmp_path: Path) -> None:
    """If the names of the parameters are not known on one side, parameters are matched by position."""
    one = trained(1, kind)
    accel.save({"m": one[0], "o": one[1]}, tmp_path / "named")
    accel.save({"o": one[1]}, tmp_path / "unnamed")
    for directory in ("named", "unnamed"):
        other = trained(2, kind)
        other[0].load_state_dict(one[0].state_dict())
        accel.load(tmp_path / directory, {"o": other[1]})
        assert same(one, other)
        other = trained(3, kind)
        accel.load(tmp_path / directory, {"m": other[0], "o": other[1]}, strict=directory == "named")
        assert same(one, (one[0], other[1]))


def part_of_an_engine(directory: str) -> bool:
    one, other = trained(1)[0], trained(2)[0]
    model, _, _ = accel.setup(one)
    accel.save({"body": model[0], "raw": one[2]}, directory)
    target, _, _ = accel.setup(other)
    accel.load(directory, {"body": target[0], "raw": other[2]})
    equal = [torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    return equal in ([True, True, False, False, True, True], [True] * 6)


def test_a_part_of_a_model(tmp_path: Path) -> None:
    assert all(run(2, part_of_an_engine, str(tmp_path / "c")))


class Strange(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "twice"] = self.weight * 2


def test_modules_that_no_load_can_fill(tmp_path: Path) -> None:
    inner, temperature = net(0), nn.Parameter(torch.ones(1, 3))
    model, optimizer, _ = accel.setup(inner, torch.optim.AdamW([*inner.parameters(), temperature]))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"m": nn.Sequential(inner, nn.Linear(2, 2))}, "holds parameters of a model that is set up"),
        ({"m": nn.ModuleDict({"a": inner[0]})}, "holds parameters of a model that is set up"),
        ({"m": Strange(2, 2)}, r"'twice' \(Tensor\), which is not one of its parameters"),
        ({"m": nn.Sequential(nn.LazyLinear(3))}, "uninitialized parameter"),
        ({"m": model, "o": optimizer}, r'state\["o"\].* not of its model'),
    ]
    for state, message in refused:
        with pytest.raises(CheckpointError, match=message):
            accel.save(state, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    accel.teardown()
    with pytest.raises(CheckpointError, match="This model was torn down"):
        accel.save({"m": model}, tmp_path / "c")


class Extra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("lost", torch.ones(2), persistent=False)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_and_tied_weights(tmp_path: Path) -> None:
    def model(extra: Any, inner: Any) -> nn.Module:
        net = nn.ModuleDict({"a": Extra(extra), "b": nn.Sequential(Extra(inner))})
        net["c"], net["d"] = nn.Linear(3, 3), nn.Linear(3, 3)
        net["d"].weight = net["c"].weight
        return net

    accel.save({"m": model({1: ("x", torch.ones(500))}, torch.arange(3.0))}, tmp_path)
    other = model(None, None)
    nn.init.zeros_(other["c"].weight)
    accel.load(tmp_path, {"m": other})
    assert other["a"].extra[1][0] == "x"
    assert other["a"].extra[1][1].tolist() == [1.0] * 500
    assert other["b"][0].extra.tolist() == [0, 1, 2]
    assert other["d"].weight.abs().sum() > 0
    untied = model(None, None)
    untied["d"].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: state\[\"m\"\], d.weight"):
        accel.load(tmp_path, {"m": untied})


def test_one_tensor_in_two_objects(tmp_path: Path) -> None:
    accel.save({"a": net(1), "b": net(2)}, tmp_path)
    a, b = net(3), net(4)
    b[0].weight = a[0].weight
    accel.load(tmp_path, {"a": a, "b": b})
    assert torch.equal(b[0].weight, net(1)[0].weight)  # the first name counts


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    handles = accel.setup(model, optimizer, precision="16-mixed")
    scale = object.__getattribute__(handles.model, "_accel_engine").loss_scale
    scale.restore(512.0, 7)
    accel.save({"m": handles.model, "o": handles.optimizers}, tmp_path)
    scale.restore(65536.0, 0)
    accel.load(tmp_path, {"m": handles.model, "o": handles.optimizers})
    assert scale.state() == (512.0, 7)


def test_containers_are_walked_and_values_replaced(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    inner = {"n": 1, "list": [1, 2]}
    saved = {"nets": [one, {"more": (two, 5)}], "t": (torch.ones(3), "a"), "d": inner, 7: {"x": 2}, "extra": 9}
    accel.save(saved, tmp_path)
    three, four, tensor = nn.Linear(2, 2), nn.Linear(2, 2), torch.zeros(3)
    target: dict[Any, Any] = {"n": 0, "list": "other"}
    state = {"nets": [three, {"more": (four, 0)}], "t": (tensor, "b"), "d": target, 7: {"x": 0}}
    assert accel.load(tmp_path, state) is state
    assert torch.equal(one.weight, three.weight)
    assert torch.equal(two.weight, four.weight)
    assert tensor.tolist() == [1, 1, 1]
    assert state["t"][0] is tensor
    assert state == {"nets": [three, {"more": (four, 5)}], "t": (tensor, "a"), "d": inner, 7: {"x": 2}}
    assert state["d"] is target
    plain = {"nets": [None, {"more": (None, 5)}], "t": (None, "a"), "d": inner, 7: {"x": 2}, "extra": 9}
    assert accel.load(tmp_path) == plain
    for wrong, message in (
        ({"nets": [three]}, r'state\["nets"\] is a list of 1, and in the checkpoint a list of 2'),
        ({"extra": three}, r'state\["extra"\] is a module, and in the checkpoint the value 9'),
        ({"nets": {}}, r'state\["nets"\] is a dict of 0, and in the checkpoint a list of 2'),
    ):
        with pytest.raises(CheckpointError, match=message):
            accel.load(tmp_path, wrong)


def test_a_dict_of_values_gets_all_saved_keys(tmp_path: Path) -> None:
    saved = {"history": {"loss": [1.0, 2.0], 3: {"best": True}}, "ema": {"w": torch.ones(2)}, "epoch": 4}
    accel.save(saved, tmp_path)
    history: dict[Any, Any] = {}
    state = accel.load(tmp_path, {"history": history, "epoch": 0})
    assert state == {"history": saved["history"], "epoch": 4}
    assert state["history"] is history
    assert accel.load(tmp_path, {"history": {"loss": []}})["history"] == saved["history"]
    assert accel.load(tmp_path, {}) == {}
    with pytest.raises(accel.CheckpointError, match=r'state\["ema"\] is an empty dict.*state\["ema"\]\["w"\]'):
        accel.load(tmp_path, {"ema": {}})
    with pytest.raises(accel.CheckpointError, match=r'state\["history"\]\["acc"\]'):
        accel.load(tmp_path, {"history": {"acc": 0}})


def test_a_load_without_state_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torch's optimizers take a state dict without its tensors."""
    model, optimizer = trained(1)
    accel.save({"m": [model], "o": optimizer, "t": torch.ones(2), "n": {"a": 1}}, tmp_path)
    assert accel.load(tmp_path)["n"] == {"a": 1}
    assert not caplog.text
    accel.save({"o": optimizer.state_dict()}, tmp_path)
    assert accel.load(tmp_path)["o"]["state"][0] == {}
    assert '12 are left out, such as state["o"]["state"][0]["step"]. Pass' in caplog.text


def test_filter(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    accel.save({"m": model, "o": optimizer}, tmp_path, filter=lambda name: name.startswith("m/0."))
    other, other_optimizer = trained(2)
    with pytest.raises(CheckpointError, match="2.weight"):
        accel.load(tmp_path, {"m": other, "o": other_optimizer})
    accel.load(tmp_path, {"m": other, "o": other_optimizer}, strict=False)
    assert torch.equal(model[0].weight, other[0].weight)
    assert not torch.equal(model[2].weight, other[2].weight)
    assert not differences(optimizer.state_dict(), other_optimizer.state_dict())


def buffers(directory: str) -> list[float]:
    """A training-mode forward without gradients leaves each rank its own statistics until the next step."""
    model, _, _ = accel.setup(net(1))
    with torch.no_grad():
        model(torch.full((4, 5), float(accel.rank())) + torch.randn(4, 5))
    accel.save({"m": model}, directory)
    accel.load(directory, {"m": model})
    values: list[float] = accel.unwrap(model)[1].running_mean.tolist()
    return values


def test_buffers_are_those_of_one_rank(tmp_path: Path) -> None:
    first, second = run(2, buffers, str(tmp_path / "c"))
    assert first == second
