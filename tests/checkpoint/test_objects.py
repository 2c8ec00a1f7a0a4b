"""The objects and values of a state: how they are saved, matched and filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import CheckpointError
from tests.checkpoint.helpers import Extra, body_of, differences
from tests.distributed import run


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(seed)
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 5)).sum().backward()
        optimizer.step()
    return model, optimizer


def same(a: tuple[nn.Module, torch.optim.Optimizer], b: tuple[nn.Module, torch.optim.Optimizer]) -> bool:
    return not differences([a[0].state_dict(), a[1].state_dict()], [b[0].state_dict(), b[1].state_dict()])


def compiled_and_plain(directory: str) -> None:
    for saved, loaded in ((0, 1), (1, 0)):
        one, other = trained(1), trained(2)
        states = [{"m": torch.compile(one[0]), "o": one[1]}, {"m": other[0], "o": other[1]}]
        accel.save(states[saved], directory)
        accel.load(directory, states[loaded])
        assert same(one, other)


def test_compiled_modules_have_equal_keys(tmp_path: Path) -> None:
    run(1, compiled_and_plain, str(tmp_path))


def test_optimizers_without_their_module(tmp_path: Path) -> None:
    """If the names of the parameters are not known on one side, parameters are matched by position."""
    one = trained(1)
    accel.save({"m": one[0], "o": one[1]}, tmp_path / "named")
    accel.save({"o": one[1]}, tmp_path / "unnamed")
    for directory in ("named", "unnamed"):
        other = trained(2)
        accel.load(tmp_path / directory, {"o": other[1]})
        assert same(one, (one[0], other[1]))
        other = trained(3)
        accel.load(tmp_path / directory, {"m": other[0], "o": other[1]}, strict=directory == "named")
        assert same(one, (one[0], other[1]))


def test_freezing_travels_with_the_optimizer(tmp_path: Path) -> None:
    """Parameters in a group are frozen as saved. Others stay as the program made them."""

    def trainable(model: nn.Module) -> str:
        return "".join("-+"[p.requires_grad] for p in model.parameters())

    model, other, unnamed = net(1), net(2), net(3)
    model[:2].requires_grad_(False)
    accel.save({"m": model, "o": torch.optim.AdamW(model[1:].parameters())}, tmp_path)
    assert body_of(tmp_path)["values"]["o"]["frozen"] == ["1.bias", "1.weight"]
    held = torch.optim.AdamW(other[1:].parameters())
    other[2].requires_grad_(False)
    accel.load(tmp_path, {"m": other})
    assert trainable(other) == "++++--"
    accel.load(tmp_path, {"m": other, "o": held})
    assert trainable(other) == "++--++"
    accel.load(tmp_path, {"o": torch.optim.AdamW(unnamed[1:].parameters())})  # by position
    assert trainable(unnamed) == "++--++"


def part_of_an_engine(directory: str) -> bool:
    one, other = trained(1)[0], trained(2)[0]
    model, target = accel.setup(one).model, accel.setup(other).model
    accel.save({"body": model[0], "raw": one[2]}, directory)
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
        ({"m": Strange(2, 2)}, r"'twice' \(Tensor\), which isn't a parameter or buffer"),
        ({"m": nn.Sequential(nn.LazyLinear(3))}, "uninitialized parameter"),
        ({"m": model, "o": optimizer}, r'state\["o"\].* not in the model'),
    ]
    for state, message in refused:
        with pytest.raises(CheckpointError, match=message):
            accel.save(state, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    accel.teardown()
    with pytest.raises(CheckpointError, match="This model was torn down"):
        accel.save({"m": model}, tmp_path / "c")


def test_extra_state_and_tied_weights(tmp_path: Path) -> None:
    def model(inner: Any) -> nn.Module:
        net = nn.ModuleDict({"b": nn.Sequential(Extra(inner)), "c": nn.Linear(3, 3), "d": nn.Linear(3, 3)})
        net["d"].weight = net["c"].weight
        return net

    first, other, untied = model({1: ("x", torch.ones(500))}), model(None), model(None)
    accel.save({"m": first, "n": net(1), "o": net(2)}, tmp_path)
    accel.load(tmp_path, {"m": other})
    assert not differences(other["b"][0].extra, {1: ("x", torch.ones(500))})
    assert torch.equal(other["d"].weight, first["c"].weight)
    untied["d"].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: state\[\"m\"\], d.weight"):
        accel.load(tmp_path, {"m": untied})
    more: Any = model(None)
    more["e"] = Extra(None)
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: state\[\"m\"\], e._extra_state"):
        accel.load(tmp_path, {"m": more})
    one, two = net(3), net(4)
    two[0].weight = one[0].weight
    accel.load(tmp_path, {"n": one, "o": two})
    assert torch.equal(two[0].weight, net(1)[0].weight)  # the first name counts


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    model, optimizer, _ = accel.setup(*trained(1), precision="16-mixed")
    scale = object.__getattribute__(model, "_accel_engine").loss_scale
    scale.restore(512.0, 7)
    accel.save({"m": model, "o": optimizer}, tmp_path)
    scale.restore(65536.0, 0)
    accel.load(tmp_path, {"m": model, "o": optimizer})
    assert scale.state() == (512.0, 7)


def test_containers_are_walked_and_values_replaced(tmp_path: Path) -> None:
    one, two, three, four = (nn.Linear(2, 2) for _ in range(4))
    inner = {"n": 1, "list": [1, 2], 3: {"best": True}}
    saved = {"nets": [one, {"more": (two, 5)}], "t": (torch.ones(3), "a"), "d": inner, 7: {"x": 2}, "extra": 9}
    accel.save(saved, tmp_path)
    tensor = torch.zeros(3)
    target: dict[Any, Any] = {"n": 0, "list": "other"}
    state = {"nets": [three, {"more": (four, 0)}], "t": (tensor, "b"), "d": target, 7: {}}
    assert accel.load(tmp_path, state) is state
    assert not differences([one.state_dict(), two.state_dict()], [three.state_dict(), four.state_dict()])
    assert tensor.tolist() == [1, 1, 1]
    assert state["t"][0] is tensor
    assert state == {"nets": [three, {"more": (four, 5)}], "t": (tensor, "a"), "d": inner, 7: {"x": 2}}
    assert state["d"] is target
    plain = accel.load(tmp_path)
    assert plain.pop("t")[0].tolist() == [1, 1, 1]
    assert plain == {"nets": [None, {"more": (None, 5)}], "d": inner, 7: {"x": 2}, "extra": 9}
    assert accel.load(tmp_path, {}) == {}
    for wrong, message in (
        ({"nets": [three]}, r'state\["nets"\] is a list of 1, but a list of 2 in the checkpoint'),
        ({"extra": three}, r'state\["extra"\] is a module, but the value 9 in the checkpoint'),
        ({"nets": {}}, r'state\["nets"\] is a dict of 0, but a list of 2 in the checkpoint'),
        ({"d": {"acc": 0}}, r'state\["d"\]\["acc"\]'),
    ):
        with pytest.raises(CheckpointError, match=message):
            accel.load(tmp_path, wrong)
    accel.save({"ema": {"w": one}}, tmp_path)
    with pytest.raises(accel.CheckpointError, match=r'state\["ema"\] is an empty dict.*state\["ema"\]\["w"\]'):
        accel.load(tmp_path, {"ema": {}})


def test_tensors_replace_plain_values(tmp_path: Path) -> None:
    """A program starts with numbers and empty lists, and puts tensors there."""
    model, optimizer = trained(1)
    values = {"best": torch.tensor(0.5), "losses": [torch.ones(2)] * 2, "metrics": {"a": torch.zeros(3)}, "t": 1}
    accel.save(values | {"m": model, "o": optimizer.state_dict()}, tmp_path)
    start = {"best": float("inf"), "losses": [], "metrics": {}, "t": 0}
    for state in (dict(start), None):
        found = accel.load(tmp_path, state)
        assert not differences({key: found[key] for key in values}, values)
    assert not differences(accel.load(tmp_path)["o"], optimizer.state_dict())
    assert "m" not in accel.load(tmp_path)
    with pytest.raises(CheckpointError, match='"best".* is a optimizer, but a tensor'):
        accel.load(tmp_path, {"best": optimizer})


def test_filter(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    accel.save({"m": model, "o": optimizer}, tmp_path, filter=lambda name: name.startswith("m/0."))
    other, other_optimizer = trained(2)
    state = {"m": other, "o": other_optimizer}
    with pytest.raises(CheckpointError, match="2.weight"):
        accel.load(tmp_path, state)
    accel.load(tmp_path, state, strict=False)
    assert torch.equal(model[0].weight, other[0].weight)
    assert not torch.equal(model[2].weight, other[2].weight)
    assert not differences(optimizer.state_dict(), other_optimizer.state_dict())
