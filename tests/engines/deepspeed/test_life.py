"""One engine for each model, from setup to its end, beside other models; nothing is left behind."""

from __future__ import annotations

import gc
import importlib
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.process import end_groups
from tests.distributed import refusals, run
from tests.engines.deepspeed.training import STAGES, Net, Pair, adamw, data, forward_of, loss_of, mean_loss, whole, zero
from tests.models import distance
from tests.programs import by_hand, free_port, scripts


def evaluate_and_train(stage: int) -> None:
    """One engine for each model: optimizers are set up after an evaluation, which comes in the middle too."""
    raw, plain, x = Net(), Net(), data(99, 0)
    model, _, _ = accel.setup(raw, backend=zero(stage))

    @torch.no_grad()
    def evaluate() -> None:
        torch.testing.assert_close(model.eval()(x)["out"], plain(x)["out"])
        model.train()

    evaluate()
    for _ in range(2):
        optimizer, plain_optimizer = adamw(raw), adamw(plain)
        again, handle, _ = accel.setup(raw, optimizer, backend=zero(stage))
        assert again is model
        for step in range(3):
            handle.zero_grad()
            plain_optimizer.zero_grad()
            loss = loss_of(model(data(step, accel.rank())))
            evaluate()
            loss.backward()
            mean_loss(plain, forward_of, step).backward()
            handle.step()
            plain_optimizer.step()
            evaluate()
        assert distance(whole(model), plain.state_dict()) <= 1e-5
    with pytest.raises(accel.OptimizerError, match="not given to accel.setup"):
        adamw(raw).step()


@pytest.mark.parametrize("stage", STAGES)
def test_evaluate_then_train_and_back(stage: int) -> None:
    run(2, evaluate_and_train, stage)


def joint_loss(backends: list[Any]) -> None:
    """Actor and critic train on one loss; the reference is frozen."""
    raw, plain = [Net(i) for i in range(3)], [Net(i) for i in range(3)]
    for net in (raw[2], plain[2]):
        net.requires_grad_(False)
    pairs = [accel.setup(n, adamw(n), backend=b)[:2] for n, b in zip(raw[:2], backends, strict=True)]
    models = [*(model for model, _ in pairs), accel.setup(raw[2], backend=zero(3)).model]
    optimizers: list[Any] = [*(optimizer for _, optimizer in pairs), *(adamw(net) for net in plain[:2])]

    def loss(nets: Any, x: torch.Tensor) -> torch.Tensor:
        actor, critic, frozen = (net(x)["out"] for net in nets)
        return (actor - frozen.detach()).square().mean() + (critic - frozen).abs().mean() + (actor * critic).mean()

    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(models, data(step, accel.rank())).backward()
        torch.stack([loss(plain, x) for x in data(step)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for model, net in zip(models, plain, strict=True):
        assert distance(whole(model), net.state_dict()) <= 1e-5


@pytest.mark.parametrize("stages", [(1, 2), (3, 3), (0, 3)], ids=str)
def test_models_with_one_loss(stages: tuple[int, int]) -> None:
    run(2, joint_loss, [zero(stage) if stage else "ddp" for stage in stages])


def ended_in_backward() -> None:
    """The weights are gathered when the process groups end, as if another rank was killed."""
    pair = Pair(zero(3))
    pair.train()
    loss = loss_of(pair.model(data(0, accel.rank())))

    def end(_: torch.Tensor) -> None:
        end_groups("rank 7 is gone")
        raise ValueError("boom")

    pair.raw.body[2].weight.register_hook(end)
    with pytest.raises((ValueError, RuntimeError, accel.AccelError)):
        loss.backward()
    try:
        accel.teardown(pair.model)
    finally:
        assert all(p.isnan().all() for p in pair.raw.parameters())


def test_teardown_after_the_groups_ended() -> None:
    for message in refusals(2, ended_in_backward, error="AccelError", breaks=True):
        assert "are lost (now NaN)" in message


def without_a_local_rank(variables: dict[str, str]) -> None:
    accel.init()
    others = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
    with mock.patch.dict(os.environ, {**others, **variables}, clear=True):
        before = dict(os.environ)
        pair = Pair(zero(2))
        assert dict(os.environ) == before
        pair.train()
        pair.check()


@pytest.mark.parametrize("variables", [{}, {"LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}], ids=str)
def test_launchers_without_a_local_rank(variables: dict[str, str]) -> None:
    run(2, without_a_local_rank, variables)


def other_linears() -> None:
    """DeepSpeed alone replaces ``torch.nn.functional.linear`` for every model, and leaves it so."""
    before = F.linear
    pair = Pair(zero(3))
    own = importlib.import_module("deepspeed.runtime.zero.linear")
    with mock.patch.object(own, "zero3_linear_wrap", wraps=own.zero3_linear_wrap) as counted:
        pair.train(range(1))
        assert counted.call_count == 4  # of the model
        nn.Linear(2, 1)(torch.ones(1, 2))
        assert counted.call_count == 4
    accel.teardown(pair.model)
    del pair
    gc.collect()
    assert F.linear is before


def test_other_models_keep_their_linear_function() -> None:
    run(2, other_linears)


SCRIPT = """
import sys, torch, accel
from torch import nn
assert not any(name.startswith("deepspeed") for name in sys.modules)
for stage in (1, 2, 3):
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    model, optimizer, _ = accel.setup(net, optimizer, backend=accel.DeepSpeed(stage=stage))
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        if stage == {stage} and step and accel.rank() == 0:
            raise KeyError("in the middle")
        optimizer.step()
    print("trained", stage)
"""


def start(stage: int) -> list[tuple[int, str, str]]:
    """Status, output and errors of two processes that end without a clean-up; one fails at ``stage``."""
    port = free_port()
    environs = [by_hand(rank, 2, port) | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
    results = scripts(SCRIPT.format(stage=stage), *environs, check=False)
    return [(result.returncode, result.stdout, result.stderr) for result in results]


def test_scripts_end_quietly_or_everywhere() -> None:
    """Hashes of objects differ between such processes, which ranks must not compare."""
    assert start(0) == [(0, "trained 1\ntrained 2\ntrained 3\n", "")] * 2
    first, second = start(3)
    assert first[0] != 0
    assert "KeyError: 'in the middle'" in first[2]
    assert second[0] != 0
    assert "rank 0 ended with KeyError" in second[2]
