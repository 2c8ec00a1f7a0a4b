"""Which rank has what: stages, states, data and balance."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.engines.pipeline import stages_by_weight
from tests.distributed import run
from tests.engines.pipeline.training import batch, net, one_step
from tests.models import adamw


def bytes_of(module: nn.Module) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in module.parameters()}
    return sum(storages.values())


def where_things_lie() -> int:
    raw, plain = net(), net()
    whole = bytes_of(raw)
    own_optimizer = adamw(raw)
    model, optimizer, _ = accel.setup(raw, own_optimizer, backend="pipeline")
    reference = adamw(plain)
    for step in range(2):
        one_step(model, optimizer, step)
        one_step(plain, reference, step)
    part = bytes_of(raw)
    assert part < 0.8 * whole
    assert 0 < len(own_optimizer.state) < len(list(raw.parameters()))
    assert [tuple(p.shape) for p in raw.parameters()] == [tuple(p.shape) for p in plain.parameters()]
    elsewhere = raw[-1] if accel.rank() == 0 else raw[0]
    for refused in (pickle.dumps, copy.deepcopy):
        with pytest.raises(accel.BackendError, match="which is on rank"):
            refused(elsewhere)
    for kind in (torch.ones(1), "cpu", torch.float32):  # as it is already
        assert model.to(kind) is model
    with pytest.raises(accel.BackendError, match="which is on rank"):
        raw(batch(0)[0])
    accel.teardown(model)
    assert bytes_of(raw) == whole
    torch.testing.assert_close(raw.state_dict(), plain.state_dict())
    torch.testing.assert_close(own_optimizer.state_dict()["state"], reference.state_dict()["state"])
    raw(batch(0)[0])
    return part


def test_each_rank_holds_its_stage() -> None:
    parts = run(2, where_things_lie)
    assert sum(parts) < 1.1 * bytes_of(net())


def loaders() -> list[list[int]]:
    data = TensorDataset(torch.arange(22.0).repeat(6, 1).T.contiguous(), torch.arange(22))
    loader = DataLoader(data, batch_size=5, shuffle=True)
    model, _, loader = accel.setup(net(), None, loader, backend="pipeline")
    seen = []
    for x, y in loader:
        F.cross_entropy(model(x / 22), y % 3).backward()
        seen.append(y.tolist())
        assert accel.gather_for_metrics({"y": y}, loader)["y"].tolist() == y.tolist()
        assert accel.gather_for_metrics(y).tolist() == y.tolist()
    assert len(loader) == 5
    assert sorted(sum(seen, [])) == list(range(22))
    return seen


def test_ranks_share_a_batch() -> None:
    first, second = run(2, loaders)
    assert first == second


def test_stages_are_about_equally_heavy() -> None:
    assert stages_by_weight([9, 1, 1, 1], 2) == [0, 1, 1, 1]
    assert stages_by_weight([70, 10, 10, 10], 4) == [0, 1, 2, 3]
    assert stages_by_weight([0, 0, 0], 2) == [0, 0, 1]
    assert stages_by_weight([4, 1, 3, 2, 2, 4], 3) == [0, 0, 1, 1, 2, 2]
