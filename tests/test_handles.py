"""The handle of a model shows the user's module. Optimizers come back as they are."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, StepLR

import accel
from accel.registry import registry
from tests.backends import need
from tests.distributed import run
from tests.models import adamw, mlp, normalised, one_step


class Talker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.engine = "diesel"
        self.options = {"a": 1}

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x if mask is None else x * mask)

    def generate(self, n: int) -> torch.Tensor:
        return self(torch.ones(n, 4))

    def train(self, mode: bool = True) -> Talker:
        self.trained = mode
        return super().train(mode)  # type: ignore[return-value]

    @property
    def width(self) -> int:
        return self.linear.out_features


def test_a_handle_shows_the_module() -> None:
    raw = Talker()
    model = accel.setup(raw).model
    assert list(model.state_dict()) == [n for n, _ in model.named_parameters()] == ["linear.weight", "linear.bias"]
    assert (model.engine, model.width) == ("diesel", 4)
    assert model.options is raw.options
    assert model.generate(3).shape == (3, 4)
    assert model.train(False) is model.eval() is model
    assert [raw.trained, raw.training, model.training] == [False] * 3
    model.color = "red"
    assert raw.color == "red"
    del model.color
    with pytest.raises(AttributeError, match="Talker"):
        _ = model.color
    assert set(dir(model)) == set(dir(raw))
    model.load_state_dict({k: torch.zeros_like(v) for k, v in raw.state_dict().items()})
    assert not raw.linear.weight.any()
    assert list(inspect.signature(model.forward).parameters) == ["x", "mask"]
    x, mask = torch.ones(3, 4), torch.zeros(3, 4)
    assert torch.equal(model.forward(x=x, mask=mask), model(x, mask))


def test_changed_layers_raise() -> None:
    raw = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = accel.setup(raw).model
    assert (len(model), list(model), model[0] in model) == (2, list(raw), True)
    model[1] = nn.Tanh()
    del model[0]
    assert [type(part) for part in raw] == [nn.Tanh]
    with pytest.raises(accel.BackendError, match=r"0\.bias, 0\.weight\. Call raw = accel.teardown"):
        model(torch.ones(1, 2))
    other = accel.setup(normalised()).model
    other[0].weight = other[0].weight
    other(torch.randn(2, 4))
    other.extra = nn.Linear(2, 2)
    with pytest.raises(accel.BackendError, match=r"extra\.weight"):
        other(torch.randn(2, 4))


def test_an_ended_handle_raises() -> None:
    raw = normalised()
    model = accel.setup(raw, adamw(raw)).model
    assert accel.teardown(model) is accel.unwrap(model) is raw
    for use in (accel.setup, accel.teardown, lambda ended: ended(torch.randn(2, 4)), lambda ended: ended.state_dict()):
        with pytest.raises(accel.AccelError, match="was torn down"):
            use(model)
    assert "ended" in repr(model)


# -- optimizers -------------------------------------------------------------------------------------------------------


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes, with the numbers of its hooks."""
    return {name: len(value) if name.endswith("_hooks") else id(value) for name, value in vars(optimizer).items()}


BACKENDS: list[Any] = ["ddp", "sharded", "fsdp", "pipeline", accel.DeepSpeed(stage=1), accel.DeepSpeed(stage=3)]


def optimizer_life(backend: Any) -> None:
    """Schedulers, a step that raises, copies, and everything that setup puts on an optimizer until teardown."""
    raw = mlp(4, 6, 6, 2)
    parameters = list(raw.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.4, momentum=0.9)
    warm = LinearLR(optimizer, 0.5, total_iters=1)
    one_step(raw, optimizer)
    before = attributes(optimizer)
    model, returned, _ = accel.setup(raw, optimizer, backend=backend)
    assert returned is optimizer
    schedulers = [warm, StepLR(optimizer, 1, 0.25)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of schedulers
        one_step(model, optimizer)
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    groups = [[*map(id, group["params"])] for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        one_step(model, optimizer)
    assert [[*map(id, group["params"])] for group in optimizer.param_groups] == groups
    optimizer.param_groups[0]["lr"] = 0.1
    one_step(model, optimizer)
    if registry.find_engine(model).holdings.partial(optimizer):
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(accel.OptimizerError, match=r"accel\.full_state_dict\(optimizer\)"):
                copied(optimizer)
    else:
        assert vars(copy.deepcopy(optimizer)).keys() <= before.keys()
    state = copy.deepcopy(optimizer.state_dict())
    one_step(model, optimizer)
    optimizer.load_state_dict(state)
    for number, values in optimizer.state_dict()["state"].items():
        assert torch.equal(values["momentum_buffer"], state["state"][number]["momentum_buffer"])
    optimizer.zero_grad()
    assert all(p.grad is None for p in raw.parameters())
    accel.teardown(model)
    after = attributes(optimizer)
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in before if name.endswith("_hooks"))
    assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, parameters)]
    one_step(raw, optimizer)
    assert pickle.loads(pickle.dumps(optimizer)).state_dict()["state"].keys() == set(range(len(parameters)))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_an_optimizer_after_teardown(backend: Any) -> None:
    need(backend, 2)
    run(2, optimizer_life, backend)
