"""What every backend must do: the parity matrix, over each engine that is found, at 1, 2 and 4 ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accel
from accel.engines import ENGINES
from accel.registry import registry
from tests.backends import APPROXIMATE, BACKENDS, engine_of, need
from tests.distributed import run
from tests.engines.matrix import Cell, cells_of, check_cells, in_pairs
from tests.engines.periodic import MISTAKES, Periodic, PeriodicEngine


def chosen(cells: list[Cell], world: int) -> list[Cell]:
    """What settings do together two ranks tell; that each is right on more of them, four."""
    if world < 4:
        return in_pairs(cells, world + 1)
    exact = [cell for cell in cells if cell.precision == "32-true"]
    return [*in_pairs(exact, 1), Cell(cells[0].backend, precision="bf16-mixed")]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_parity(backend: Any, world: int) -> None:
    """N steps on any number of ranks give the weights and optimizer state of one process on the whole batch."""
    need(backend, world)
    cells = cells_of(backend)
    if world > 1 and not engine_of(backend).synchronizes:
        with pytest.raises(AssertionError, match="each process would train a model"):
            run(world, check_cells, cells[:1])
        return
    for rank, failures in enumerate(run(world, check_cells, chosen(cells, world), timeout=240)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures)


# -- state --------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Has of everything that a state can hold: tied, scalar and lonely parameters, both kinds of buffers, extra state."""

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
    """The whole state is one process's, in and out; what does not fit is refused in torch's words, and changes nothing."""
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


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_whole_state(backend: Any) -> None:
    world = 2 if engine_of(backend).synchronizes else 1
    need(backend, world)
    run(world, check_state, backend)


# -- the ranks agree -----------------------------------------------------------------------------------------------------


def train_apart(model: Any, optimizer: Any, steps: range) -> None:
    """Train on a batch of this data-parallel place."""
    for step in steps:
        seed = 100 * step + accel.data_parallel_place(model).rank
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(accel.device())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal_on_ranks(read_state: Callable[[], Any], title: str) -> None:
    """Fail if ranks read different states. Reading may raise AccelError, if it does on every rank."""
    try:
        state, refused = read_state(), False
    except accel.AccelError:
        state, refused = None, True
    states: list[Any] = [None] * accel.world_size()
    dist.all_gather_object(states, (copy.deepcopy(state), refused))
    assert len({refused for _, refused in states}) == 1, f"{title}: refused on some ranks only"
    wrong = [text for other, _ in states for text in differences(other, states[0][0], title, 0.0)]
    assert not wrong, wrong


def check_agreement(backend: Any) -> None:
    """Ranks with different batches have one state after three steps, also in the middle of an interval of two."""
    torch.manual_seed(accel.rank())
    raw = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 3))
    raw_optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
    model, optimizer, _ = accel.setup(raw, raw_optimizer, backend=backend)
    train_apart(model, optimizer, range(3))
    for name, wrapped, original in (("model", model, raw), ("optimizer", optimizer, raw_optimizer)):
        assert_equal_on_ranks(wrapped.state_dict, f"{name}.state_dict()")
        assert_equal_on_ranks(original.state_dict, f"raw {name}'s state_dict()")
        assert_equal_on_ranks(lambda: accel.full_state_dict(wrapped), f"full_state_dict({name})")  # noqa: B023
    parent = nn.ModuleDict({"child": raw})
    assert list(parent.state_dict()) == [f"child.{name}" for name in raw.state_dict()]
    train_apart(model, optimizer, range(3, 5))

    def step_unknown() -> list[torch.Tensor]:
        """Step an optimizer that ``setup`` never saw, twice, and return the weights that this rank holds whole."""
        unknown = torch.optim.SGD(raw.parameters(), lr=0.1)
        train_apart(model, unknown, range(5, 7))
        weights = [p.detach() for p in raw.parameters() if p.device.type != "meta"]
        return [w.clone() for w in weights if type(w) is torch.Tensor and w.numel()]

    assert_equal_on_ranks(step_unknown, "the weights after a step of an optimizer that setup never saw")
    accel.teardown(model)
    assert_equal_on_ranks(raw.state_dict, "the model after teardown")
    assert_equal_on_ranks(raw_optimizer.state_dict, "the optimizer after teardown")


@pytest.mark.parametrize("backend", [*BACKENDS, *APPROXIMATE], ids=str)
def test_ranks_agree(backend: Any) -> None:
    if not engine_of(backend).synchronizes:
        pytest.skip("trains one model per process")
    need(backend, 2)
    run(2, check_agreement, backend)


def check_periodic(kind: type[PeriodicEngine]) -> None:
    """Let ``accel.setup`` find a backend that isn't in ``accel/engines``, and check it."""
    ENGINES[kind.name] = kind
    check_agreement(Periodic(every=2))


def test_a_backend_of_one_file_agrees() -> None:
    run(2, check_periodic, PeriodicEngine)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda kind: kind.__name__)
def test_mistakes_of_a_backend_are_found(mistake: type[PeriodicEngine]) -> None:
    with pytest.raises(AssertionError, match=MISTAKES[mistake]):
        run(2, check_periodic, mistake)
