"""What accel changes in other libraries: it goes when the last engine that needs it goes, and others may change the same."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

import accel
from accel.engines import ENGINES
from accel.errors import BackendError
from tests.distributed import run

CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "_get_total_norm")
RUN = "_engine_run_backward"
ALL: list[tuple[Any, str]] = [(torch.autograd, RUN)]


def places() -> dict[str, Any]:
    """What stands where an engine may patch; the values of a table by their keys."""
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    muon: Any = torch.optim._muon  # type: ignore[attr-defined]
    found = {name: getattr(module, name) for module, name in ALL}
    found |= {name: inspect.getclosurevars(getattr(clip_grad, name)).nonlocals["func"] for name in CLIPPING}
    found |= {"data": vars(torch.Tensor).get("data"), "orthogonalise": muon._zeropower_via_newtonschulz}
    found |= {"compile": torch.compile, "environment": dict(os.environ), "filters": list(warnings.filters)}
    deepspeed = sys.modules.get("deepspeed.ops")
    return found | {"handlers": dict(handlers), "ops": vars(deepspeed).get("__compatible_ops__") if deepspeed else None}


def which_are_patched(backend: Any, torn_down: bool) -> tuple[set[str], set[str]]:
    """What is other while an engine lives, and after it was torn down, or nobody holds it any more."""
    before = places()

    def changed() -> set[str]:
        now = places()
        return {name for name, value in before.items() if now[name] is not value and now[name] != value}

    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    kind = torch.optim.Muon if backend == "fsdp" else torch.optim.SGD
    bias = torch.optim.SGD([p for p in net.parameters() if p.dim() < 2], 0.1)
    optimizers = [kind([p for p in net.parameters() if p.dim() == 2], 0.1), bias]
    model, held, _ = accel.setup(net, optimizers, backend=backend)
    while_it_lives = changed()
    if torn_down:
        accel.teardown(model)
    del net, model, held, optimizers, bias
    gc.collect()
    return while_it_lives, changed()


EVERY = {"compile"}
STEPS = {RUN, *CLIPPING, *EVERY}


@pytest.mark.parametrize(
    ("backend", "world", "patched", "torn_down"),
    [
        ("single", 1, EVERY, True),
        ("ddp", 1, EVERY, False),
        ("ddp", 2, STEPS, True),
        ("ddp2", 2, STEPS, True),
        ("sharded", 2, STEPS, False),
        ("fsdp", 2, {*STEPS, "filters", "handlers", "orthogonalise"}, True),
        ("fsdp", 2, {*STEPS, "filters", "handlers", "orthogonalise"}, False),
        ("pipeline", 2, STEPS, True),
        (accel.DeepSpeed(stage=1), 2, {*STEPS, "filters"}, True),
        (accel.DeepSpeed(stage=3), 2, {*STEPS, "filters"}, False),
    ],
    ids=lambda value: ",".join(sorted(value)) if isinstance(value, set) else str(value),  # the same in each worker
)
def test_only_what_an_engine_needs_is_patched_while_it_lives(
    backend: Any, world: int, patched: set[str], torn_down: bool
) -> None:
    pytest.importorskip("deepspeed" if isinstance(backend, accel.DeepSpeed) else "torch")
    assert run(world, which_are_patched, backend, torn_down) == [(patched, set())] * world


def test_options_that_are_true_or_false_are_nothing_else() -> None:
    for engine in ENGINES.values():
        for field in dataclasses.fields(engine.options_type):
            if field.type in (bool, "bool"):
                with pytest.raises(BackendError, match=f"{field.name}='no'.: expected True or False"):
                    engine.options_type(**{field.name: "no"})
