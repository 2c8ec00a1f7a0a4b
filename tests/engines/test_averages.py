"""Full values that are assigned to shards, and operators that would mix the two."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import vector_to_parameters

import accel
from tests.distributed import run
from tests.models import distance, mlp


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
