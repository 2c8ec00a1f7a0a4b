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
from tests.backends import APPROXIMATE, BACKENDS, engine_of, need
from tests.distributed import run
from tests.engines.matrix import Cell, cells_of, check_cells, in_pairs
from tests.engines.periodic import MISTAKES, Periodic, PeriodicEngine
from tests.engines.state import check_state, differences


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
        with pytest.raises(AssertionError, match="each rank would train a separate model"):
            run(world, check_cells, cells[:1])
        return
    for rank, failures in enumerate(run(world, check_cells, chosen(cells, world), timeout=240)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_whole_state(backend: Any) -> None:
    world = 2 if engine_of(backend).synchronizes else 1
    need(backend, world)
    run(world, check_state, backend)


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
