"""What a state may hold, and how it meets what was saved."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
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


def rates(*values: torch.Tensor) -> torch.optim.Optimizer:
    model = net(1)
    return torch.optim.AdamW([{"params": model[i].parameters(), "lr": lr} for i, lr in enumerate(values)])


def test_a_learning_rate_of_several_groups_stays_one_tensor(tmp_path: Path) -> None:
    """As with torch's own state dicts: what changes it changes it for all of these groups."""
    one, equal = torch.tensor(0.1), torch.tensor(0.1)
    accel.save({"o": rates(one, equal, one)}, tmp_path / "equal")
    accel.save({"o": rates(one, equal, torch.tensor(0.2))}, tmp_path / "apart")
    optimizer = rates(one, equal, one)
    accel.load(tmp_path / "equal", {"o": optimizer})
    first, second, third = [group["lr"] for group in optimizer.param_groups]
    assert first is third
    assert second is not first
    assert float(first) == float(second) == pytest.approx(0.1)
    accel.load(tmp_path / "apart", {"o": optimizer})
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.1, 0.2])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Rprop])
def test_raw_optimizers_with_and_without_their_module(kind: Any, tmp_path: Path) -> None:
    """Where the names of the parameters are not known on one side, they are met by position."""
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
    with pytest.raises(CheckpointError, match="state of a AdamW, and this is a SGD"):
        accel.load(tmp_path, {"m": other[0], "o": other[1]})
    other = net(2), torch.optim.AdamW(net(2).parameters())
    with pytest.raises(CheckpointError, match=r"groups of \[2, 2\] parameters, and this optimizer has \[6\]"):
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
    with pytest.raises(CheckpointError, match=r'state\["m"\]: this handle.s engine was torn down'):
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


def test_a_load_between_forward_and_backward_is_noticed(tmp_path: Path) -> None:
    """As any change in place is: a backward through weights that are gone would give wrong gradients."""
    model = net(1)
    accel.save({"m": model}, tmp_path)
    loss = model(torch.randn(4, 5)).square().sum()
    accel.load(tmp_path, {"m": model})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
    assert '12 are left out of the containers in it, such as state["o"]["state"][0]["step"]; give it' in caplog.text


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


def test_names_that_look_alike(tmp_path: Path) -> None:
    """Keys with slashes, brackets and tildes lead to tensors of their own."""

    def state(value: float) -> dict[Any, Any]:
        keys: list[Any] = ["a/b", "a%2Fb", "[1]", 1, "~0", "", (1, "x"), "a", None, "None", "b", b"b", "1.5", 1.5]
        keys += [
            Path("1"),
            Path("None"),
            Path("a/b"),
            frozenset("xyz"),
            torch.float32,
            "torch.float32",
            numpy.float32(0.1),
        ]
        keys += [0.1, torch.device("cpu"), "cpu", numpy.datetime64("2020-01-01"), "%5B1]", "%7E0"]
        return {**{key: torch.full((2000,), value + i) for i, key in enumerate(keys)}, "v": {"w": {"a": torch.ones(9)}}}

    accel.save(state(1.0), tmp_path)
    loaded = state(0.0)
    accel.load(tmp_path, loaded)
    assert not differences(state(1.0), loaded)


def test_equal_keys_are_one_key(tmp_path: Path) -> None:
    """1, True, 1.0 and numpy's 1 find what was saved under another of them."""
    keys = [1, True, 1.0, numpy.int64(1), numpy.float32(1)]
    for i, saved in enumerate(keys):
        accel.save({saved: torch.ones(3), "n": {saved: nn.Linear(2, 2)}}, tmp_path / str(i))
        for key in keys:
            state: dict[Any, Any] = {key: torch.zeros(3), "n": {key: nn.Linear(2, 2)}}
            accel.load(tmp_path / str(i), state)
            assert state[1].tolist() == [1, 1, 1]


def test_keys_of_any_type_lead_to_objects(tmp_path: Path) -> None:
    keys = [Path("a/b"), torch.device("cpu"), numpy.float32(0.1), (numpy.int64(3), "q"), (Path("z"), 1), 7, 1.5, "[a]"]

    def state(value: float) -> dict[Any, Any]:
        inner = {key: {"t": torch.full((3,), value + i), key: [net(i + int(value))]} for i, key in enumerate(keys)}
        return {"n": inner, Path("t"): torch.full((2,), value)}

    accel.save(state(1.0), tmp_path)
    loaded = state(50.0)
    accel.load(tmp_path, loaded)
    assert not differences(_flat(state(1.0)), _flat(loaded))


def _flat(state: dict[Any, Any]) -> list[Any]:
    """What the objects in it hold, in order."""
    found = []
    for value in state.values():
        found += _flat(value) if isinstance(value, dict) else [value[0].state_dict() if type(value) is list else value]
    return found


@pytest.mark.parametrize("key", [7, None, (1, "a"), "!"], ids=repr)
def test_a_parameter_group_with_a_key_of_any_type(key: Any, tmp_path: Path) -> None:
    model, optimizer = trained(1)
    optimizer.param_groups[1][key] = ("kept", 1)
    accel.save({"m": model, "o": optimizer}, tmp_path)
    accel.verify(tmp_path)
    other, other_optimizer = trained(2)
    accel.load(tmp_path, {"m": other, "o": other_optimizer})
    assert other_optimizer.param_groups[1][key] == ("kept", 1)
    assert same((model, optimizer), (other, other_optimizer))


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


# -- names that tensors have, and values that are no tensors --------------------------------------------------------


class Renamed(nn.Module):
    """A buffer that is another module's parameter, and one that is saved under its second name only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Module(), nn.Linear(2, 2)
        self.first.register_buffer("weight", self.second.weight)
        self.register_buffer("passing", torch.rand(3), persistent=False)
        self.first.register_buffer("kept", self.passing)
        self.register_parameter("!", nn.Parameter(torch.rand(2)))


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer


def test_names_in_a_module_that_lead_to_one_tensor(tmp_path: Path) -> None:
    one, other = Renamed(), Renamed()
    states = [{"m": model, "o": stepped(model)} for model in (one, other)]
    accel.save(states[0], tmp_path)
    accel.load(tmp_path, states[1])
    assert not differences(one.state_dict(), other.state_dict())
    assert torch.equal(one.passing, other.passing)
    assert not differences(states[0]["o"].state_dict(), states[1]["o"].state_dict())


def tied_parts(directory: str, backend: str) -> list[float]:
    """A part of a model whose weight has its first name in another part."""
    found = []
    for value in (1.0, 2.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, 1))
        model[1].weight = model[0].weight
        nn.init.constant_(model[0].weight, value)
        handle = accel.setup(model, backend=backend).model
        if value == 1.0:
            accel.save({"head": handle[1]}, directory)
        else:
            accel.load(directory, {"head": handle[1]})
        found.append(accel.full_state_dict(handle)["1.weight"].mean().item())
        accel.teardown()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_part_of_a_model_with_a_tied_weight(world: int, tmp_path: Path) -> None:
    assert run(world, tied_parts, str(tmp_path / "c"), "ddp") == [[1.0, 1.0]] * world


class Expanded(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", torch.ones(1).expand(4))


def test_a_buffer_that_no_load_could_fill_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r'state\["m"\], m/mask: its elements share memory.*register its clone'):
        accel.save({"m": Expanded()}, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    accel.save({"m": Expanded()}, tmp_path / "c", filter=lambda name: name != "m/mask")


def test_state_that_belongs_to_no_group_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    optimizer.param_groups.pop()
    with pytest.raises(CheckpointError, match=r"this AdamW has state of 2.weight .* in none of its groups"):
        accel.save({"m": model, "o": optimizer}, tmp_path)
    for parameter in model[2].parameters():
        optimizer.state.pop(parameter)
    accel.save({"m": model, "o": optimizer}, tmp_path)


def test_a_parameter_that_is_not_of_the_model_is_named(tmp_path: Path) -> None:
    """One process may train it; a checkpoint has no name for it."""
    model = net(1)
    temperature = nn.Parameter(torch.ones(1, 3))
    handles = accel.setup(model, torch.optim.AdamW([*model.parameters(), temperature]))
    with pytest.raises(
        CheckpointError, match=r'state\["o"\]: this AdamW holds .* not of its model \(of shape \(1, 3\)\)'
    ):
        accel.save({"m": handles.model, "o": handles.optimizers}, tmp_path)


class Counting(nn.Linear):
    """Counts its forwards where no tensor shows it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.notes: Any = {"n": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes = {"n": self.notes["n"] + 1, "large": torch.full((400,), self.notes["n"] + 1.0)}
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        self.notes = state


def count_in_a_pipeline(directory: str) -> list[Any]:
    """What every rank sees of the counts, after a load and after the teardown; a child's name may have a slash."""
    found: list[Any] = []
    for steps in (3, 1):
        layers = {name: Counting() for name in ("in/a", "in/b", "out/a", "out/b")}
        model = nn.Sequential(OrderedDict(layers))
        handle = accel.setup(model, backend="pipeline").model
        with torch.no_grad():
            for _ in range(steps):
                out = handle(torch.ones(3, 4))
        assert not out.isnan().any()
        if steps == 3:
            accel.save({"m": handle}, directory)
        else:
            accel.load(directory, {"m": handle})
            found.append([layer.notes["n"] for layer in layers.values()])
        accel.teardown(handle)
        found.append([layer.notes["large"].mean().item() for layer in layers.values()])
    return found


def test_the_extra_state_of_a_pipeline_is_that_of_the_rank_that_runs_it(tmp_path: Path) -> None:
    assert run(2, count_in_a_pipeline, str(tmp_path / "c")) == [[[3.0] * 4, [3] * 4, [3.0] * 4]] * 2
