"""What a state may hold, and how it meets what was saved."""

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
    handles = accel.setup(*(one if saved_by == "handle" else other), backend="ddp")
    saved: Any = {"m": handles.model, "o": handles.optimizers} if saved_by == "handle" else {"m": one[0], "o": one[1]}
    loaded: Any = (
        {"m": other[0], "o": other[1]} if saved_by == "handle" else {"m": handles.model, "o": handles.optimizers}
    )
    accel.save(saved, directory)
    accel.load(directory, loaded)
    return same(one, other)


@pytest.mark.parametrize("saved_by", ["handle", "raw"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_module_and_its_handle_have_the_same_keys(saved_by: str, world: int, tmp_path: Path) -> None:
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


def test_an_optimizer_of_another_kind_or_form_is_refused(tmp_path: Path) -> None:
    one = trained(1)
    accel.save({"m": one[0], "o": one[1]}, tmp_path)
    other = trained(2, torch.optim.SGD)
    with pytest.raises(CheckpointError, match="AdamW.* SGD"):
        accel.load(tmp_path, {"m": other[0], "o": other[1]})
    other = net(2), torch.optim.AdamW(net(2).parameters())
    with pytest.raises(CheckpointError, match=r"groups of \[2, 2\]"):
        accel.load(tmp_path, {"o": other[1]})


def test_state_that_a_fresh_optimizer_does_not_have_is_dropped(tmp_path: Path) -> None:
    fresh = net(1)
    accel.save({"m": fresh, "o": torch.optim.AdamW(fresh.parameters())}, tmp_path)
    other = net(2)
    optimizer = torch.optim.AdamW(other.parameters())
    other(torch.randn(3, 5)).sum().backward()
    optimizer.step()
    assert optimizer.state
    accel.load(tmp_path, {"m": other, "o": optimizer})
    assert not optimizer.state


def part_of_an_engine(directory: str) -> bool:
    one, other = trained(1)[0], trained(2)[0]
    model, _, _ = accel.setup(one)
    accel.save({"body": model[0], "raw": one[2]}, directory)
    target, _, _ = accel.setup(other)
    accel.load(directory, {"body": target[0], "raw": other[2]})
    equal = [torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    return equal == [True, True, False, False, True, True] or equal == [True] * 6


@pytest.mark.parametrize("world", [1, 2])
def test_a_part_of_a_model(world: int, tmp_path: Path) -> None:
    assert all(run(world, part_of_an_engine, str(tmp_path / "c")))


def test_a_model_around_one_that_is_set_up_is_refused(tmp_path: Path) -> None:
    inner = net(0)
    model, _, _ = accel.setup(inner)
    for around in (nn.Sequential(inner, nn.Linear(2, 2)), nn.ModuleDict({"a": inner[0]})):
        with pytest.raises(CheckpointError, match="holds parameters of a model that is set up"):
            accel.save({"m": around}, tmp_path / "c")
    accel.save({"m": model}, tmp_path / "c")
    accel.teardown()
    with pytest.raises(CheckpointError, match="This model was torn down"):
        accel.save({"m": model}, tmp_path / "c")


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extra: Any = None
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("lost", torch.ones(2), persistent=False)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_and_tied_weights(tmp_path: Path) -> None:
    def model(extra: Any) -> nn.Module:
        net = nn.ModuleDict({"a": Extra(), "b": nn.Sequential(Extra()), "c": nn.Linear(3, 3), "d": nn.Linear(3, 3)})
        net["a"].extra, net["b"][0].extra = extra, torch.arange(3.0)
        net["d"].weight = net["c"].weight
        return net

    accel.save({"m": model({1: ("x", torch.ones(500))})}, tmp_path)
    other = model(None)
    other["b"][0].extra = None
    nn.init.zeros_(other["c"].weight)
    accel.load(tmp_path, {"m": other})
    assert other["a"].extra[1][0] == "x"
    assert other["a"].extra[1][1].tolist() == [1.0] * 500
    assert other["b"][0].extra.tolist() == [0, 1, 2]
    assert other["d"].weight.abs().sum() > 0
    untied = model(None)
    untied["d"].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: state\[\"m\"\], d.weight"):
        accel.load(tmp_path, {"m": untied})


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    handles = accel.setup(model, optimizer, precision="16-mixed")
    scale = object.__getattribute__(handles.model, "_accel_engine").loss_scale
    scale.restore(512.0, 7)
    accel.save({"m": handles.model, "o": handles.optimizers}, tmp_path)
    scale.restore(65536.0, 0)
    accel.load(tmp_path, {"m": handles.model, "o": handles.optimizers})
    assert scale.state() == (512.0, 7)


class Strange(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "twice"] = self.weight * 2


def test_a_state_dict_that_cannot_be_filled_in_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'twice' \(Tensor\), which is not one of its parameters"):
        accel.save({"m": Strange(2, 2)}, tmp_path)


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
    assert state["nets"][1]["more"][1] == 5
    assert state["t"][1] == "a"
    assert state["t"][0] is tensor
    assert state["d"] is target
    assert target == inner
    assert state[7] == {"x": 2}
    assert "extra" not in state
    assert accel.load(tmp_path) == {
        "nets": [None, {"more": (None, 5)}],
        "t": (None, "a"),
        "d": inner,
        7: {"x": 2},
        "extra": 9,
    }
    with pytest.raises(CheckpointError, match=r'state\["nets"\] is a list of 1, and in the checkpoint a list of 2'):
        accel.load(tmp_path, {"nets": [three]})
    with pytest.raises(CheckpointError, match=r'state\["extra"\] is a module, and in the checkpoint the value 9'):
        accel.load(tmp_path, {"extra": three})


def test_a_load_without_a_state_says_which_tensors_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's optimizers take a state dict without its tensors."""
    model, optimizer = trained(1)
    accel.save({"m": [model], "o": optimizer, "t": torch.ones(2), "n": {"a": 1}}, tmp_path)
    assert accel.load(tmp_path)["n"] == {"a": 1}
    assert not caplog.text
    accel.save({"o": optimizer.state_dict()}, tmp_path)
    assert accel.load(tmp_path)["o"]["state"][0] == {}
    assert '12 are left out, such as state["o"]["state"][0]["step"]. Pass' in caplog.text


def test_one_tensor_in_two_objects(tmp_path: Path) -> None:
    accel.save({"a": net(1), "b": net(2), "x": torch.ones(2)}, tmp_path / "two")
    a, b = net(3), net(4)
    b[0].weight = a[0].weight
    accel.load(tmp_path / "two", {"a": a, "b": b})
    assert torch.equal(b[0].weight, net(1)[0].weight)  # the first name counts
    accel.save({"a": a, "b": b, "w": a[0].weight}, tmp_path / "one")
    before = a[0].weight.clone()
    nn.init.zeros_(a[0].weight)
    accel.load(tmp_path / "one", {"a": a, "b": b, "w": a[0].weight})
    assert torch.equal(b[0].weight, before)


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


def compiled(directory: str) -> bool:
    one, other = net(1), net(2)
    accel.save({"m": torch.compile(one)}, directory)
    accel.load(directory, {"m": other})
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_compiled_module_has_the_names_of_its_raw_one(tmp_path: Path) -> None:
    assert all(run(1, compiled, str(tmp_path / "c")))


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


def test_an_inner_dict_of_plain_values_takes_all_that_was_saved_of_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    saved = {
        "model": model,
        "history": {"loss": [1.0, 2.0], 3: {"best": True}},
        "ema": {"w": torch.ones(2)},
        "epoch": 4,
    }
    accel.save(saved, tmp_path / "c")
    history: dict[Any, Any] = {}
    state = accel.load(tmp_path / "c", {"model": model, "history": history, "epoch": 0})
    assert state == {"model": model, "history": saved["history"], "epoch": 4}
    assert state["history"] is history
    assert accel.load(tmp_path / "c", {"history": {"loss": []}})["history"] == saved["history"]
    assert accel.load(tmp_path / "c", {}) == {}
    with pytest.raises(accel.CheckpointError, match=r'state\["ema"\] is an empty dict.*state\["ema"\]\["w"\]'):
        accel.load(tmp_path / "c", {"ema": {}})
    with pytest.raises(accel.CheckpointError, match=r'state\["history"\]\["acc"\]'):
        accel.load(tmp_path / "c", {"history": {"acc": 0}})


def test_a_parameter_that_is_not_of_the_model_is_named(tmp_path: Path) -> None:
    """One process may train it; a checkpoint has no name for it."""
    model = net(1)
    temperature = nn.Parameter(torch.ones(1, 3))
    handles = accel.setup(model, torch.optim.AdamW([*model.parameters(), temperature]))
    with pytest.raises(CheckpointError, match=r'state\["o"\].* not of its model'):
        accel.save({"m": handles.model, "o": handles.optimizers}, tmp_path)
