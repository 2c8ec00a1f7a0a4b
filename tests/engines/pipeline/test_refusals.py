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
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def tied() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].weight = module[0].weight  # type: ignore[union-attr]
    return module


#: What setup refuses, and its balance.
SETUPS: list[tuple[str, Callable[[], nn.Module], Any]] = [
    ("Own has its own forward", Own, "size"),
    ("doesn't fit 1 children and 2 ranks", lambda: nn.Sequential(nn.Linear(2, 2)), "size"),
    ("doesn't fit 6 children and 2 ranks", net, [2, 2]),
    ("0.weight and 2.weight are one tensor", tied, "size"),
]
X, Y = batch(0)
#: What a forward refuses, and its input.
FORWARDS: list[tuple[str, Callable[[], nn.Sequential], Any]] = [
    ("2 would normalize each micro-batch", lambda: net(nn.BatchNorm1d(16)), X),
    ("can't split inputs with sizes", net, [X, X[:3]]),
    (r"\(set\) to other ranks", net, {"x": {1}}),
]


def refused() -> None:
    for match, make, balance in SETUPS:
        raw = make()
        before = {k: v.clone() for k, v in raw.state_dict().items()}
        with pytest.raises(accel.BackendError, match=match):
            accel.setup(raw, backend=accel.Pipeline(balance=balance))
        torch.testing.assert_close(dict(raw.state_dict()), before)
    for match, build, x in FORWARDS:
        model = accel.setup(build(), backend=accel.Pipeline(chunks=2)).model
        with pytest.raises(accel.AccelError, match=match):
            model(x)
        accel.teardown(model)
    raw = net()
    model = accel.setup(raw, backend="pipeline").model
    uses: tuple[Callable[[Any], Any], ...] = (torch.sum, lambda p: p.data.mul_(2), nn.init.zeros_)
    for use in uses:
        with pytest.raises(accel.BackendError, match="which is on rank . of the pipeline"):
            list(map(use, raw.parameters()))
    penalized = X.clone().requires_grad_()
    with pytest.raises(accel.BackendError, match="gradient penalties"):
        torch.autograd.grad(model(penalized).sum(), penalized, create_graph=True)


def test_refusals_on_every_rank() -> None:
    run(2, refused)


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
    differ("a forward .* different values on rank 1", True, lambda m, other: m(X.flip(0) if other else X))
    differ("method forward .* different values on rank 1", False, lambda m, other: m(X.flip(0) if other else X))
    differ("got different inputs .* on rank 1", True, lambda m, other: m(X[1:] if other else X))
    differ("method backward .* different values", True, lambda m, other: F.mse_loss(m(X), Y + other).backward())


def test_ranks_that_differ_all_raise() -> None:
    run(2, all_differences)


class Faulty(nn.Linear):
    """Fails where it is told to, on its rank only."""

    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise ValueError("no forward today")
        out = super().forward(x)
        if self.where == "backward":
            out.register_hook(self.fail)
        return out

    def fail(self, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("no backward today")


def failures(where: str) -> None:
    raw = nn.Sequential(nn.Linear(6, 6), Faulty(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=3, balance=[1] * 4))
    raw[1].where = where  # type: ignore[assignment]
    own = accel.rank() == 1
    with pytest.raises(ValueError if own else accel.AccelError, match=f"no {where} today") as caught:  # noqa: PT012
        for _ in range(2):  # the last ranks hear of a failed backward in the next forward
            one_step(model, optimizer, 0)
    assert own or "failed on rank 1" in str(caught.value)
    with pytest.raises(accel.AccelError, match=f"no {where} today"):
        model(X)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_reaches_all_ranks(where: str) -> None:
    for outcome in outcomes(4, failures, where, breaks=True):
        assert not outcome.error, outcome.trace
        assert outcome.seconds < 30
