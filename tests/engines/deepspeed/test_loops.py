"""DeepSpeed's ZeRO stages on real ranks: every loop is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import accel
from tests.distributed import run
from tests.engines.deepspeed.training import STAGES, Pair, data, loss_of, mean_loss, momentum, zero


def closures(stage: int) -> None:
    """``zero_grad`` inside of a step drops gradients too: the branch that a step does not use is left alone."""
    pair = Pair(zero(stage))
    for step in range(3):

        def forward(model: nn.Module, x: torch.Tensor, right: bool = step % 2 == 0) -> Any:
            return model(x, right=right)

        def closure(step: int = step, forward: Any = forward) -> torch.Tensor:
            pair.optimizer.zero_grad()
            loss = loss_of(forward(pair.model, data(step, accel.rank())))
            loss.backward()
            return loss

        def plain(step: int = step, forward: Any = forward) -> torch.Tensor:
            pair.plain_optimizer.zero_grad()
            loss = mean_loss(pair.plain, forward, step)
            loss.backward()
            return loss

        torch.testing.assert_close(pair.optimizer.step(closure), pair.plain_optimizer.step(plain).detach())
    pair.check()


def weights_of_another_module(stage: int) -> None:
    """A method reads what a submodule owns, while it may be gathered ahead for that submodule."""
    pair = Pair(zero(stage))
    pair.train(forward=lambda m, x: {"out": m(x)["out"] + m.size()})
    with torch.no_grad():
        pair.model(data(0))
        torch.testing.assert_close(pair.model.size(), pair.plain.size())
    pair.check()


def hooks_of_the_program(stage: int) -> None:
    """What they return is what counts, and blocks in reentrant checkpoints have their own backwards."""
    pair = Pair(zero(stage), momentum)

    def out(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": model.right(checkpoint(model.body, x.requires_grad_(), use_reentrant=True))}

    for p in (*pair.raw.right.parameters(), *pair.plain.right.parameters()):
        p.register_hook(lambda grad: grad / 2)
    for step in range(3):
        pair.zero_grad()
        pair.backward(step, out)
        pair.step()
    pair.check()


LOOPS = (closures, weights_of_another_module, hooks_of_the_program)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_every_loop_is_exact(stage: int, loop: Callable[[int], None]) -> None:
    run(2, loop, stage)
