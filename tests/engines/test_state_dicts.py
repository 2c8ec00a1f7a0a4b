"""``state_dict()`` of what is divided: the whole, on every rank, for handles and for the user's own objects."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests.backends import need
from tests.checkpoint.helpers import differences
from tests.distributed import run

DIVIDED: list[Any] = ["sharded", "fsdp", "pipeline", *(accel.DeepSpeed(stage=stage) for stage in (1, 3))]


class Counted(nn.Tanh):
    """Has a state of its own that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"seen": 3}


def build(backend: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), Counted(), nn.Linear(5, 3))
    own = torch.optim.AdamW(raw.parameters(), lr=0.1)
    model, optimizer, _ = accel.setup(raw, own, backend=backend)
    step(model, optimizer)
    return raw, own, model, optimizer


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(16.0).view(4, 4).sin()).square().sum().backward()
    optimizer.step()


def one_process() -> Any:
    raw, own, _, _ = build("single")
    step(raw, own)
    return copy.deepcopy((raw.state_dict(), own.state_dict()))


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def verbs(backend: Any) -> Any:
    raw, own, model, optimizer = build(backend)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(model, optimizer)
    result = through_a_file((model.state_dict(), optimizer.state_dict()))
    for one, other in ((model, raw), (optimizer, own)):
        assert not differences(other.state_dict(), one.state_dict())
        assert not differences(accel.full_state_dict(one), one.state_dict())
    parent = nn.ModuleDict({"child": raw})
    assert list(parent.state_dict()) == [f"child.{name}" for name in result[0]]
    assert set(parent.state_dict()._metadata) > {"child", "child.0"}  # type: ignore[attr-defined]
    if accel.registry.registry.find_engine(model).holdings.partial(None):  # type: ignore[attr-defined]
        assert set(raw.state_dict()._metadata) == {"", "0", "1", "2", "3"}  # type: ignore[attr-defined]
        assert isinstance(raw.state_dict(keep_vars=True)["0.weight"], nn.Parameter)
    # Weights that were kept come back, and training goes on from them.
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    step(model, optimizer)
    assert not differences(through_a_file((model.state_dict(), optimizer.state_dict())), result, tolerance=1e-6)
    assert accel.teardown(model) is raw
    assert "state_dict" not in vars(raw)
    assert "state_dict" not in vars(own)
    raw.state_dict()["0.weight"].zero_()
    assert not raw.get_parameter("0.weight").any()
    return result


@pytest.mark.parametrize("backend", DIVIDED, ids=lambda backend: getattr(backend, "stage", backend))
def test_every_rank_gets_full_state(backend: Any) -> None:
    need(backend, 2)
    expected = run(1, one_process)[0]
    for found in run(2, verbs, backend):
        assert not differences(found, expected, tolerance=1e-5)


def own_function() -> None:
    """A program's own ``state_dict``, of some of the weights, put on the model before or after."""
    for before in (True, False):
        raw = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        torch_own = raw.state_dict
        made = accel.setup(raw, backend="fsdp").model if not before else None
        whole = torch_own if before else made.state_dict  # type: ignore[union-attr]
        chosen = lambda whole=whole: {n: t for n, t in whole().items() if n.startswith("1.")}  # noqa: E731
        vars(raw)["state_dict"] = chosen
        model = made or accel.setup(raw, backend="fsdp").model
        assert [tuple(t.shape) for t in model.state_dict().values()] == [(3, 5), (3,)]
        accel.teardown(model)
        assert vars(raw)["state_dict"] is chosen


def orphaned() -> None:
    """An optimizer that outlives its model has a part, and says so."""
    own = build("fsdp")[1]
    gc.collect()
    with pytest.raises(accel.OptimizerError, match="holds only this rank's shard"):
        own.state_dict()


def test_own_state_dict_and_orphans() -> None:
    run(2, own_function)
    run(2, orphaned)
