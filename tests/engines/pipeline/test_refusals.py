"""What a pipeline cannot do is said on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from tests.distributed import outcomes, run
from tests.engines.pipeline.training import apart, batch, net, one_step
from tests.models import sgd


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def tied() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].weight = module[0].weight  # type: ignore[union-attr]
    return module


def refused_setups() -> None:
    cases: list[tuple[str, Callable[[], nn.Module], Any]] = [
        ("Own has its own forward", Own, "size"),
        ("doesn't fit 1 children and 2 ranks", lambda: nn.Sequential(Own()), "size"),
        ("doesn't fit 6 children and 2 ranks", net, [2, 2, 2]),
        ("doesn't fit 6 children and 2 ranks", net, [2, 2]),
        ("0.weight and 2.weight are one tensor", tied, "size"),
    ]
    for match, make, balance in cases:
        raw = make()
        before = {k: v.clone() for k, v in raw.state_dict().items()}
        with pytest.raises(accel.BackendError, match=match):
            accel.setup(raw, sgd(raw), backend=accel.Pipeline(balance=balance))
        torch.testing.assert_close(dict(raw.state_dict()), before)
    options: tuple[dict[str, Any], ...] = ({"balance": []}, {"balance": "time"}, {"chunks": 0}, {"checkpoint": "some"})
    for option in options:
        with pytest.raises(accel.BackendError, match=next(iter(option))):
            accel.Pipeline(**option)


def test_setups_that_cannot_be_pipelines() -> None:
    run(2, refused_setups)


def refused_forwards() -> None:
    def refuse(match: str, module: nn.Sequential, x: Any, **options: Any) -> None:
        model = accel.setup(module, backend=accel.Pipeline(**options)).model
        with pytest.raises(accel.AccelError, match=match):
            model(x)
        accel.teardown(model)

    x = batch(0)[0]
    module = net(nn.BatchNorm1d(16))
    refuse("2 would normalize each micro-batch", module, x, chunks=2)
    refuse("can't split inputs with sizes", net(), [x, x[:3]], chunks=2)
    refuse(r"\(set\) to other ranks", net(), {"x": {1}})
    refuse("can't send input", net(), x.to_sparse())
    model, optimizer, _ = accel.setup(net(), None, None, backend="pipeline")
    with pytest.raises(TypeError):
        model(x, x)
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend="pipeline")
    uses: tuple[Callable[[Any], Any], ...] = (torch.sum, lambda p: p.data.mul_(2), nn.init.zeros_)
    for use in uses:
        with pytest.raises(accel.BackendError, match="which is on rank . of the pipeline"):
            list(map(use, raw.parameters()))
    penalized = x.clone().requires_grad_()
    with pytest.raises(accel.BackendError, match="gradient penalties"):
        torch.autograd.grad(model(penalized).sum(), penalized, create_graph=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).mean()).backward()
    with pytest.raises(accel.PrecisionError, match="GradScaler"):
        scaler.step(optimizer)


def test_forwards_that_raise() -> None:
    run(2, refused_forwards)


def differ(match: str, grad: bool, action: Callable[[Any, bool], Any]) -> None:
    raw, plain = net(), net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2))
    with torch.set_grad_enabled(grad), pytest.raises(accel.RankMismatchError, match=match):
        action(model, accel.rank() == 1)
    assert all(p.grad is None for p in raw.parameters())
    one_step(model, optimizer, 0)
    accel.teardown(model)
    one_step(plain, sgd(plain), 0)
    assert apart(raw, plain) < 1e-5


def all_differences() -> None:
    x, y = batch(0)
    differ("a forward .* other values on rank 1", True, lambda m, other: m(x.flip(0) if other else x))
    differ("method forward .* other values on rank 1", False, lambda m, other: m(x.flip(0) if other else x))
    differ("got different inputs .* on rank 1", True, lambda m, other: m(x[1:] if other else x))
    differ("method backward .* other values", True, lambda m, other: F.mse_loss(m(x), y + other).backward())


def test_ranks_that_differ_all_raise() -> None:
    run(2, all_differences)


class Faulty(nn.Module):
    """Fails where it is told to, on its rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise ValueError("no forward today")
        out: torch.Tensor = self.layer(x)
        if self.where == "backward":
            out.register_hook(self._fail)
        return out

    @staticmethod
    def _fail(grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("no backward today")


def two_steps(model: Any, optimizer: Any) -> None:
    """The last ranks hear of a failed backward in the next forward."""
    for _ in range(2):
        one_step(model, optimizer, 0)


def failures(where: str) -> None:
    raw = nn.Sequential(nn.Linear(6, 6), Faulty(), nn.Linear(6, 6), nn.Linear(6, 3))
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=3, balance=[1] * 4))
    raw[1].where = where  # type: ignore[union-attr]
    own = accel.rank() == 1
    with pytest.raises(ValueError if own else accel.AccelError, match=f"no {where} today") as caught:
        two_steps(model, optimizer)
    assert own or "failed on rank 1" in str(caught.value)
    with pytest.raises(accel.AccelError, match=f"no {where} today"):
        model(batch(0)[0])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_reaches_all_ranks(where: str) -> None:
    for outcome in outcomes(4, failures, where, breaks=True):
        assert not outcome.error, outcome.trace
        assert outcome.seconds < 30
