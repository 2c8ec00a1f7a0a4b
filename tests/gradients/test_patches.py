"""What accel changes in other libraries goes with the last engine that needs it."""

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


def changed_places(backend: Any, torn_down: bool) -> tuple[dict[str, int], set[str]]:
    """Return the numbers of changed entries while an engine lives, and the places that stay changed."""
    before = places()

    def changed() -> dict[str, int]:
        found = {}
        for name, now in places().items():
            old = before[name]
            if isinstance(now, dict) and name == "handlers":
                found[name] = sum(old.get(key) is not value for key, value in now.items())
            else:
                found[name] = int(now is not old and now != old)
        return {name: count for name, count in found.items() if count}

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
    return while_it_lives, set(changed())


STEPS = {RUN, *CLIPPING, "compile"}
#: The backend, the number of ranks, the places that are patched, and the most entries.
PATCHED = [
    ("single", 1, {"compile"}, 1),
    ("ddp", 1, {"compile"}, 1),
    ("ddp", 2, STEPS, 8),
    ("sharded", 2, STEPS, 8),
    ("fsdp", 2, {*STEPS, "handlers", "orthogonalise"}, 16),
    ("pipeline", 2, STEPS, 8),
    (accel.DeepSpeed(stage=1), 2, STEPS, 10),
    (accel.DeepSpeed(stage=3), 2, STEPS, 10),
]


@pytest.mark.parametrize("torn_down", [True, False])
@pytest.mark.parametrize(
    ("backend", "world", "patched", "most"), PATCHED, ids=lambda v: str(len(v) if isinstance(v, set) else v)
)
def test_patches_live_as_long_as_an_engine(
    backend: Any, world: int, patched: set[str], most: int, torn_down: bool
) -> None:
    pytest.importorskip("deepspeed" if isinstance(backend, accel.DeepSpeed) else "torch")
    for changed, left in run(world, changed_places, backend, torn_down):
        assert patched <= set(changed)
        assert set(changed) - patched <= {"filters", "data"}
        assert sum(changed.values()) + (RUN in changed) <= most  # torch has the run in two modules
        assert not left


def test_options_that_are_true_or_false_are_nothing_else() -> None:
    for engine in ENGINES.values():
        for field in dataclasses.fields(engine.options_type):
            if field.type in (bool, "bool"):
                with pytest.raises(BackendError, match=f"{field.name}='no'.: expected True or False"):
                    engine.options_type(**{field.name: "no"})
