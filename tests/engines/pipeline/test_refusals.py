"""What a pipeline cannot do is said on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.process import current
from tests.distributed import outcomes, refusals, run
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
    def refuse(
        match: str, make: Callable[[], nn.Module], error: type[Exception] = accel.BackendError, **given: Any
    ) -> None:
        options = {k: v for k, v in given.items() if k != "precision"}
        raw = make()
        before = {k: v.clone() for k, v in raw.state_dict().items()}
        with pytest.raises(error, match=match):
            accel.setup(raw, sgd(raw), backend=accel.Pipeline(**options), precision=given.get("precision", "auto"))
        torch.testing.assert_close(dict(raw.state_dict()), before)

    refuse("Own has its own forward", Own)
    refuse("has 1 children for 2 ranks", lambda: nn.Sequential(Own()))
    refuse("doesn't fit 6 children and 2 ranks", net, balance=[2, 2, 2])
    refuse("doesn't fit 6 children and 2 ranks", net, balance=[2, 2])
    refuse("0.weight and 2.weight are one tensor", tied)
    refuse("SyncBatchNorm", lambda: net(nn.SyncBatchNorm(16)))
    refuse("Compile the children", lambda: torch.compile(net()))  # type: ignore[return-value]
    for options in ({"balance": []}, {"balance": "time"}, {"chunks": 0}, {"checkpoint": "some"}, {"balance": 3}):
        with pytest.raises(accel.BackendError, match=next(iter(options))):
            accel.Pipeline(**options)
    raw = net()
    with pytest.raises(accel.OptimizerError, match="LBFGS"):
        accel.setup(raw, torch.optim.LBFGS(raw.parameters()), backend="pipeline")
    raw(batch(0)[0])


def test_what_cannot_be_a_pipeline_is_refused_before_anything_changes() -> None:
    run(2, refused_setups)


def test_several_devices_of_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accel.init()
    try:
        monkeypatch.setattr(current(), "devices", (torch.device("cpu"),) * 2)
        monkeypatch.setattr(current(), "request", 2)
        with pytest.raises(accel.BackendError, match="one device per rank, but this process has 2"):
            accel.setup(net(), backend="pipeline")
    finally:
        accel.teardown()


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)


def refused_forwards() -> None:
    def refuse(match: str, module: nn.Sequential, x: Any, **options: Any) -> None:
        model = accel.setup(module, backend=accel.Pipeline(**options)).model
        with pytest.raises(accel.AccelError, match=match):
            model(x)
        accel.teardown(model)

    x = batch(0)[0]
    module = net(nn.BatchNorm1d(16))
    refuse("2 would normalize each micro-batch", module, x, chunks=2)
    refuse("one row for each sample", nn.Sequential(nn.Linear(6, 6), Total()), x, chunks=2)
    refuse("splits inputs along dim 0", net(), [x, x[:3]], chunks=2)
    refuse("it is a set", net(), {"x": {1}})
    refuse("sparse_coo tensor", net(), x.to_sparse())
    model, optimizer, _ = accel.setup(net(), None, None, backend="pipeline")
    with pytest.raises(TypeError):
        model(x, x)
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend="pipeline")
    uses: tuple[Callable[[Any], Any], ...] = (torch.sum, lambda p: p.data.mul_(2), nn.init.zeros_)
    for use in uses:
        with pytest.raises(accel.BackendError, match="which is on rank . of the pipeline"):
            list(map(use, raw.parameters()))
    penalised = x.clone().requires_grad_()
    asked: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "gradient penalties": ([penalised], {"create_graph": True}),
        "gradients for some parameters only": ([*raw.parameters()], {"allow_unused": True}),
    }
    for match, (inputs, how) in asked.items():
        with pytest.raises(accel.BackendError, match=match):
            torch.autograd.grad(model(penalised).sum(), inputs, **how)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).mean()).backward()
    with pytest.raises(accel.PrecisionError, match="GradScaler"):
        scaler.step(optimizer)


def test_what_a_pipeline_cannot_do_is_said_at_the_forward() -> None:
    run(2, refused_forwards)


def differ(how: str) -> None:
    raw, plain = net(), net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=2))
    mine = accel.rank() == 1
    x, y = batch(0)
    optimizer.zero_grad()
    actions: dict[str, Callable[[], Any]] = {
        "other values": lambda: model(x.flip(0) if mine else x),
        "values on rank 1": lambda: model(x.flip(0) if mine else x),  # in evaluation
        "structure of the batch": lambda: model(x[1:] if mine else x),
        "the same loss": lambda: F.mse_loss(model(x), y + mine).backward(),
    }
    raw[5].bias.requires_grad_(mine or how != "requires_grad")  # type: ignore[union-attr]
    model.train(mine or how != "eval")
    with (
        torch.set_grad_enabled((mine or how != "is_grad_enabled") and how != "values on rank 1"),
        pytest.raises(accel.RankMismatchError, match=how),
    ):
        actions.get(how, lambda: model(x))()
    assert all(p.grad is None for p in raw.parameters())
    raw.requires_grad_(True)
    model.train()
    one_step(model, optimizer, 0)
    accel.teardown(model)
    one_step(plain, sgd(plain), 0)
    assert apart(raw, plain) < 1e-5


def all_differences() -> None:
    for how in ("is_grad_enabled", "requires_grad", "eval", "structure of the batch"):
        differ(how)
    for how in ("other values", "values on rank 1", "the same loss"):
        differ(how)


def test_ranks_that_differ_all_raise_and_may_go_on() -> None:
    run(2, all_differences)


def one_rank_alone() -> None:
    accel.init(timeout=timedelta(seconds=4))
    model = accel.setup(net(), backend="pipeline").model
    if accel.is_main():
        model(batch(0)[0])
    else:
        accel.barrier()


def test_a_forward_on_one_rank_raises() -> None:
    messages = refusals(2, one_rank_alone, error="RankMismatchError", breaks=True)
    assert all("different points" in message for message in messages)


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
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(6, 6), Faulty(), nn.Linear(6, 6), nn.Linear(6, 3))
    plain = copy.deepcopy(raw)
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=accel.Pipeline(chunks=3, balance=[1] * 4))
    raw[1].where = where  # type: ignore[union-attr]
    own = accel.rank() == 1
    with pytest.raises(ValueError if own else accel.AccelError, match=f"no {where} today") as caught:
        two_steps(model, optimizer)
    assert own or "failed on rank 1" in str(caught.value)
    if where == "backward":
        with pytest.raises(accel.AccelError, match="no backward today"):
            model(batch(0)[0])
        return
    assert all(p.grad is None for p in raw.parameters())
    raw[1].where = ""  # type: ignore[union-attr]
    one_step(model, optimizer, 0)
    accel.teardown(model)
    one_step(plain, sgd(plain), 0)
    assert apart(raw, plain) < 1e-5


def test_an_error_in_one_stage_is_every_ranks_and_the_engine_goes_on() -> None:
    run(4, failures, "forward")


def test_an_error_in_the_backward_of_one_stage_ends_the_groups() -> None:
    for outcome in outcomes(4, failures, "backward", breaks=True):
        assert not outcome.error, outcome.trace
        assert outcome.seconds < 30
