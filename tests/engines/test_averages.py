"""Full values beside shards: averages of weights (EMA), and values that are assigned to shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.utils import vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import accel
from tests.distributed import run
from tests.models import adamw, distance, mlp, rows


def averages(backend: Any) -> float:
    """Return the distance of an average to that of one process. `full` is a copy from before setup."""
    reference, raw = mlp(4, 9, 7, 2), mlp(4, 9, 7, 2)
    full = copy.deepcopy(raw)
    model, optimizer, _ = accel.setup(raw, adamw(raw), backend=backend)
    expected = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    average = AveragedModel(full, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    plain_optimizer = adamw(reference)
    for step in range(3):
        for net, stepped, batch in (
            (reference, plain_optimizer, rows(step, 8, 4)),
            (model, optimizer, rows(step, 8, 4).chunk(2)[accel.rank()]),
        ):
            stepped.zero_grad()
            net(batch).square().mean().backward()
            stepped.step()
        full.load_state_dict(accel.full_state_dict(model))
        average.update_parameters(full)
        expected.update_parameters(reference)
    return distance(average, expected)


@pytest.mark.parametrize("backend", ["ddp", "sharded", "fsdp", "deepspeed:3", accel.FSDP(replicas=2)], ids=str)
def test_an_average_equals_one_process(backend: Any) -> None:
    assert max(run(2, averages, backend)) < 2e-5


def assigned() -> None:
    """Evaluate with averaged weights that are assigned, then continue with the trained weights."""
    reference, raw, x = mlp(4, 9, 2), mlp(4, 9, 2, seed=1), torch.ones(3, 4)
    model = accel.setup(raw, backend="fsdp").model
    trained = {name: p.data.clone() for name, p in model.named_parameters()}
    before = model(x).detach()
    for p in model.parameters():
        p.data = p.data * 0
    assert not model(x).any()
    for name, p in model.named_parameters():
        p.data = trained[name]
    assert torch.equal(model(x), before)
    vector = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    vector_to_parameters(vector, model.parameters())
    assert distance(accel.teardown(model), reference) == 0


def test_full_values_are_assigned_to_shards() -> None:
    run(2, assigned)


def mixed() -> None:
    """A full tensor and a shard in one operator raise torch's own error. Torch is silent for others."""
    model = accel.setup(mlp(4, 9, 2), backend="fsdp").model
    weight, full = model[0].weight, torch.ones(9, 4)
    for use in (lambda: (weight * full).sum(), lambda: weight.data.copy_(full), lambda: full.lerp_(weight.data, 0.1)):
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            use()
    with torch.no_grad():
        silents = [lambda: weight.sum().item(), lambda: weight[0].zero_(), lambda: weight[:4].zero_()]
        silents += [lambda: weight.chunk(2)[0].zero_(), lambda: float(weight.norm())]
        for silent in silents:
            with pytest.raises(accel.BackendError, match=r"Call tensor\.full_tensor\(\)"):
                silent()
        weight[:, 1:].zero_()  # of a dimension that is not sharded
        assert not weight.full_tensor()[:, 1:].any()


def test_tensors_and_shards_never_mix() -> None:
    run(2, mixed)
