"""DeepSpeed's own optimizers, where their ops are compiled: given by the user, and in the place of torch's Adam under offload."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.engines.deepspeed import DeepSpeed
from accel.engines.deepspeed import offload as choice
from accel.engines.deepspeed.config import Configuration
from accel.engines.deepspeed.library import library
from tests.distributed import run
from tests.engines.deepspeed.training import CONFIG, Pair, data, loss_of, whole, zero
from tests.models import distance

#: Class, module, op, arguments.
OWN = (
    ("DeepSpeedCPUAdam", "adam", "cpu_adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("DeepSpeedCPUAdagrad", "adagrad", "cpu_adagrad", {"lr": 0.01}),
    ("DeepSpeedCPULion", "lion", "cpu_lion", {"lr": 0.001, "weight_decay": 0.1}),
    ("FusedAdam", "adam", "fused_adam", {"lr": 0.01, "weight_decay": 0.1}),
)


def built(op: str) -> bool:
    """Whether an op is there: compiling one takes minutes, which ``python -c 'from deepspeed.ops.adam import ...'`` does."""
    return bool(importlib.util.find_spec("deepspeed")) and choice.is_compiled(op)


needs_adam = pytest.mark.skipif(not built("cpu_adam"), reason="DeepSpeed's op cpu_adam is not compiled here")


def theirs(stage: int) -> None:
    """Each steps fragments as it steps whole parameters in one process; also where some get no gradients."""
    cpuinfo: Any = library("cpuinfo")  # which Adam and Lion ask whenever one is made, by subprocesses
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    for name, module, op, options in OWN:
        if built(op):
            kind = getattr(library(f"deepspeed.ops.{module}"), name)
            pair = Pair(zero(stage), lambda m, kind=kind, options=options: kind(m.parameters(), **options))
            pair.train()
            if name == "FusedAdam":  # it counts the steps of all parameters in the last one's state, and accel in each
                assert distance(whole(pair.model), pair.plain.state_dict()) <= 1e-5
                steps = [state["step"] for state in accel.full_state_dict(pair.optimizer)["state"].values()]
                assert steps == [3] * len(list(pair.plain.parameters()))
            else:
                pair.train(range(3, 6), forward=lambda m, x: m(x, right=False))
                pair.check()
            accel.teardown()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.skipif(not any(built(op) for *_, op, _ in OWN), reason="none of DeepSpeed's ops is compiled here")
def test_deepspeeds_own_optimizers_need_no_opt_in(stage: int) -> None:
    run(2, theirs, stage)


class CountsInTheLast(torch.optim.Optimizer):
    """Counts the steps of a group as DeepSpeed's ``FusedAdam`` does, for which it passes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, seen=torch.zeros_like(p))
                state["seen"].add_(p.grad)
            state["step"] += 1
            for p in group["params"]:
                p.sub_(self.state[p]["seen"], alpha=group["lr"] / state["step"])


CountsInTheLast.__name__, CountsInTheLast.__module__ = "FusedAdam", "deepspeed.ops.adam.fused_adam"


def counted_before(stage: int, folder: str) -> None:
    """State from where an optimizer stepped whole parameters: handed over, loaded from a dict, and from a checkpoint."""
    make = lambda m: CountsInTheLast(m.parameters())  # noqa: E731
    first = Pair("ddp", make)
    first.train()
    accel.save({"model": first.model, "optimizer": first.optimizer}, folder)
    for road in ("hand over", "load_state_dict", "load"):
        pair = first if road == "hand over" else Pair(zero(stage), make)
        if road == "hand over":
            accel.teardown(pair.model)
            pair.model, pair.optimizer, _ = accel.setup(pair.raw, pair.raw_optimizer, backend=zero(stage))
            weights, state = copy.deepcopy((pair.plain.state_dict(), pair.plain_optimizer.state_dict()))
        else:
            pair.plain.load_state_dict(weights)
            pair.plain_optimizer.load_state_dict(copy.deepcopy(state))
        if road == "load_state_dict":
            pair.model.load_state_dict(weights)
            pair.optimizer.load_state_dict(state)
        elif road == "load":
            accel.load(folder, {"model": pair.model, "optimizer": pair.optimizer})
        pair.train(range(3, 5))
        assert distance(whole(pair.model), pair.plain.state_dict()) <= 1e-5
        accel.teardown()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_count_in_the_last_parameter_is_known_to_every_rank(stage: int, tmp_path: Path) -> None:
    run(2, counted_before, stage, str(tmp_path))


def elsewhere() -> None:
    kinds = library("deepspeed.ops.adam")
    weights, cuda = [nn.Parameter(torch.ones(2))], torch.device("cuda")
    kept, offloaded = (Configuration(DeepSpeed(stage=2, offload_optimizer=offload)) for offload in (False, True))
    with pytest.raises(
        accel.OptimizerError, match=r"DeepSpeedCPUAdam cannot step weights on cuda, .*offload_optimizer=False"
    ):
        choice.refuse_optimizer(kinds.DeepSpeedCPUAdam(weights), kept, cuda)
    choice.refuse_optimizer(kinds.DeepSpeedCPUAdam(weights), offloaded, cuda)
    if built("fused_adam"):
        with pytest.raises(
            accel.OptimizerError, match=r"FusedAdam cannot step weights in CPU memory, .*offload_optimizer=True"
        ):
            choice.refuse_optimizer(kinds.FusedAdam(weights), offloaded, cuda)


@needs_adam
def test_deepspeeds_own_optimizers_are_refused_where_they_cannot_step() -> None:
    run(1, elsewhere)


class Heard(logging.Handler):
    """What accel says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> None:
        logger = logging.getLogger("accel")
        self._level = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def __exit__(self, *error: object) -> None:
        logger = logging.getLogger("accel")
        logger.removeHandler(self)
        logger.setLevel(self._level)


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[int, float]]]:
    """The calls of DeepSpeed's op: the number of the step, and the learning rate."""
    op: Any = choice.cpu_adam(False)
    update, calls = op.adam_update, []

    def count(*args: Any) -> None:
        calls.append(args[1:3])
        update(*args)

    op.adam_update = count
    try:
        yield calls
    finally:
        op.adam_update = update


def grouped(kind: Any, model: Any) -> torch.optim.Optimizer:
    groups = [{"params": model.body.parameters()}, {"params": [*model.left.parameters(), model.scale], "lr": 0.02}]
    return kind(groups, lr=0.01, weight_decay=0.1)


def chosen(stage: int, kind: Any) -> None:
    """The arithmetic is DeepSpeed's, everything else the user's: groups, schedules, freezing, state, hooks, closures."""
    heard, seen = Heard(), []
    with heard, counted() as calls:
        backend = DeepSpeed(stage=stage, config=CONFIG, offload_optimizer=True)
        pair = Pair(backend, functools.partial(grouped, kind))
        for model in (pair.raw, pair.plain):
            model.right.requires_grad_(False)
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (pair.optimizer, pair.plain_optimizer)]
        pair.raw_optimizer.register_step_post_hook(lambda o, *_: seen.append(len(o.state)))
        for step in range(4):
            for model in (pair.raw, pair.plain):
                model.body[0].requires_grad_(step != 2)
            pair.train(range(step, step + 1))
            for scheduler in schedulers:
                scheduler.step()
        pair.check()
        assert {lr for _, lr in calls} == {lr * 0.5**i for i in range(4) for lr in (0.01, 0.02)}
        assert all(type(entry["step"]) is torch.Tensor for entry in pair.raw_optimizer.state.values())
        calls.clear()

        def closure() -> torch.Tensor:
            pair.optimizer.zero_grad()
            loss = loss_of(pair.model(data(9, accel.rank())))
            loss.backward()
            return loss

        pair.optimizer.step(closure)
        assert calls
        assert len(seen) == 5
    said = [
        text for text in heard.texts if text.startswith(f"DeepSpeed's CPU Adam computes the steps of {kind.__name__} ")
    ]
    assert len(said) == (1 if accel.rank() == 0 else 0)
    accel.teardown()


def kept() -> None:
    """Not where the configuration says so, nor for what the op does not have."""
    with counted() as calls:
        for config, options in (
            ({"zero_force_ds_cpu_optimizer": False}, {}),
            ({}, {"amsgrad": True}),
            ({}, {"maximize": True}),
            ({}, {"fused": True}),
        ):
            backend = DeepSpeed(stage=2, config=config, offload_optimizer=True)
            pair = Pair(backend, lambda m, options=options: torch.optim.Adam(m.parameters(), lr=0.01, **options))
            pair.train()
            pair.check()
            accel.teardown()
        assert not calls


@pytest.mark.parametrize("stage", [1, 3])
@needs_adam
def test_offload_computes_by_deepspeeds_adam_and_leaves_the_optimizer_the_users(stage: int) -> None:
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        run(2, chosen, stage, kind)


@needs_adam
def test_offload_keeps_torchs_adam_where_asked_and_where_deepspeed_has_none() -> None:
    run(2, kept)


def unbuilt() -> None:
    """No op, which is not compiled unasked, and a compiler that fails: torch's own steps, which is said once of each."""
    heard = Heard()
    loaded: Any = library("deepspeed.ops.op_builder.builder").OpBuilder._loaded_ops
    kept = loaded.pop("cpu_adam", None)
    choice.cpu_adam.cache_clear()
    with heard, tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", folder)
        patch.setenv("CXX", "/bin/false")
        for config in ({}, {"zero_force_ds_cpu_optimizer": True}, {"zero_force_ds_cpu_optimizer": True}):
            pair = Pair(DeepSpeed(stage=2, offload_optimizer=True, config=config))
            pair.train()
            pair.check()
            accel.teardown()
    for what in ("is not compiled on this machine: torch's own", "cannot be built"):
        assert len([text for text in heard.texts if what in text]) == 1
    choice.cpu_adam.cache_clear()
    if kept is not None:
        loaded["cpu_adam"] = kept


def test_without_a_compiler_the_users_own_adam_steps() -> None:
    run(2, unbuilt)
