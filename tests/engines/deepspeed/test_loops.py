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
from tests.engines.deepspeed.training import STAGES, Pair, adamw, data, loss_of, mean_loss, momentum, zero


def several_backwards(stage: int) -> None:
    """Two forwards then two backwards, a graph used twice, the raw module, a method."""
    for make in (adamw, momentum):
        pair = Pair(zero(stage), make)
        rank = accel.rank()
        for step in range(3):
            for model, optimizer, batches in (
                (pair.model, pair.optimizer, [data(step, rank)]),
                (pair.plain, pair.plain_optimizer, list(data(step))),
            ):
                optimizer.zero_grad()
                for x in batches:
                    a, b = model(x)["out"].square().mean(), model(-x, right=False)["out"].square().mean()
                    (b / len(batches)).backward()
                    (a / len(batches)).backward(retain_graph=stage != 3)
                    if stage != 3:
                        (a / len(batches)).backward()
                    raw = accel.unwrap(model) if model is pair.model else model
                    (loss_of(raw(x)) / len(batches)).backward()
                    (model.embed(x).abs().mean() / len(batches)).backward()
                optimizer.step()
        pair.check()


def zero_grad_anywhere(stage: int) -> None:
    """After the forward, of the model, without set_to_none, never; and a backward after a clip."""
    pair = Pair(zero(stage), momentum)
    rank = accel.rank()
    for step in range(8):
        for model, optimizer, clip, batches in (
            (pair.model, pair.optimizer, accel.clip_grad_norm_, [data(step, rank)]),
            (pair.plain, pair.plain_optimizer, lambda m, c: nn.utils.clip_grad_norm_(m.parameters(), c), data(step)),
        ):
            losses = [loss_of(model(x)) / len(batches) for x in batches]
            if step in (0, 5):
                optimizer.zero_grad()
            elif step in (1, 4):
                (accel.unwrap(model) if step == 4 else model).zero_grad()
            elif step == 6:
                model.left.zero_grad()
            elif step == 2:
                optimizer.zero_grad(set_to_none=False)
            for loss in losses:
                loss.backward()
            if step in (3, 5):
                norm = clip(model, 0.05)
                assert norm > 0.05
                for x in batches:
                    (loss_of(model(2 * x)) / len(batches)).backward()
            optimizer.step()
    pair.check()


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


def no_sync(stage: int) -> None:
    pair = Pair(zero(stage))
    for step in range(3):
        pair.zero_grad()
        with accel.no_sync(pair.model):
            x = data(step, accel.rank())
            # A checkpoint's second forward ends by an exception of torch's, which is no error: what waits stays.
            loss_of(checkpoint(pair.model, x, use_reentrant=False) if step else pair.model(x)).backward()
            with accel.no_sync(pair.model):
                loss_of(pair.model(data(step + 10, accel.rank()), left=False)).backward()
        if step:
            loss_of(pair.model(data(step + 20, accel.rank()))).backward()
        for s, left in ((step, True), (step + 10, False), *([(step + 20, True)] if step else [])):
            mean_loss(pair.plain, lambda m, x, left=left: m(x, left=left), s).backward()
        pair.step()
    pair.check()


def hooks_of_the_program(stage: int) -> None:
    """What they return is what counts, and blocks in reentrant checkpoints have their own backwards."""
    pair = Pair(zero(stage), momentum)

    def out(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": model.right(checkpoint(model.body, x.requires_grad_(), use_reentrant=True))}  # type: ignore[operator]

    for p in (*pair.raw.right.parameters(), *pair.plain.right.parameters()):
        p.register_hook(lambda grad: grad / 2)
    for step in range(3):
        pair.zero_grad()
        pair.backward(step, out)
        pair.step()
    pair.check()


LOOPS = [
    *(several_backwards, zero_grad_anywhere, closures, weights_of_another_module),
    *(no_sync, hooks_of_the_program),
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_every_loop_is_exact(stage: int, loop: Callable[[int], None]) -> None:
    run(2, loop, stage)
