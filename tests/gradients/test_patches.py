"""What accel changes in other libraries goes with the last engine that needs it."""

from __future__ import annotations

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
from tests.backends import need
from tests.distributed import run

CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
RUN = "_engine_run_backward"
ALL: list[tuple[Any, str]] = [(torch.autograd, RUN)]


def places() -> dict[str, Any]:
    """Return the values that an engine may patch."""
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    muon: Any = torch.optim._muon  # type: ignore[attr-defined]
    found = {name: getattr(module, name) for module, name in ALL}
    found |= {name: inspect.getclosurevars(getattr(clip_grad, name)).nonlocals["func"] for name in CLIPPING}
    found |= {"data": DTensor.data, "orthogonalise": muon._zeropower_via_newtonschulz}
    found |= {"compile": torch.compile, "environment": dict(os.environ), "filters": list(warnings.filters)}
    deepspeed = sys.modules.get("deepspeed.ops")
    return found | {"handlers": dict(handlers), "ops": vars(deepspeed).get("__compatible_ops__") if deepspeed else None}


def changed_places(backend: Any, torn_down: bool) -> tuple[set[str], set[str]]:
    """Return the places that are changed while an engine lives, and those that stay changed."""
    if isinstance(backend, accel.DeepSpeed):
        # The first start of DeepSpeed in a process adds filters of warnings for good.
        first = nn.Linear(3, 3)
        accel.teardown(accel.setup(first, torch.optim.SGD(first.parameters(), 0.1), backend=backend).model)
    before = places()

    def changed() -> set[str]:
        return {name for name, now in places().items() if now is not before[name] and now != before[name]}

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


STEPS = {RUN, *CLIPPING, "compile"}
#: The backend, the number of ranks, and the places that are patched.
PATCHED: list[tuple[Any, int, set[str]]] = [
    ("ddp", 1, {"compile"}),
    ("ddp", 2, STEPS),
    ("fsdp", 2, {*STEPS, "handlers", "orthogonalise"}),
    ("pipeline", 2, STEPS),
    (accel.DeepSpeed(stage=1), 2, STEPS),
    (accel.DeepSpeed(stage=3), 2, STEPS),
]


@pytest.mark.parametrize("torn_down", [True, False])
@pytest.mark.parametrize(("backend", "world", "patched"), PATCHED, ids=lambda v: "" if isinstance(v, set) else str(v))
def test_patches_live_with_an_engine(backend: Any, world: int, patched: set[str], torn_down: bool) -> None:
    need(backend, world)
    for changed, left in run(world, changed_places, backend, torn_down):
        assert patched <= changed
        assert changed - patched <= {"filters", "data"}
        assert not left
