"""The registry: one engine per model by identity. A call that is refused changes nothing and hangs no rank."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.engines import ENGINES
from accel.process import current
from accel.registry import registry
from tests.backends import need
from tests.distributed import run
from tests.models import adamw, equal_on_all_ranks, normalised, one_step


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2)


# -- identity ---------------------------------------------------------------------------------------------------------


def identities() -> None:
    raw, data = normalised(), loader()
    # Sets have a different order on each rank, and a default repr has an address.
    tags = {8, 0} if accel.rank() else {0, 8}
    group = {"params": raw.parameters(), "lr": torch.tensor(0.1), "tag": nn.Tanh, "object": object(), "tags": tags}
    optimizer = torch.optim.SGD([group])
    first = accel.setup(raw, optimizer, data)
    assert first.optimizers is optimizer
    rounds = current().rounds
    for again in (
        accel.setup(raw, optimizer, data),
        accel.setup(*first),
        accel.setup(first.model, optimizer, data, backend="auto", precision="32-true"),
    ):
        assert all(a is b for a, b in zip(first, again, strict=True))
    assert current().rounds == rounds  # no collective
    assert len(registry.engines) == 1
    assert accel.unwrap(first.model) is accel.unwrap(raw) is raw
    assert accel.teardown(raw) is raw
    assert not registry.engines
    one_step(raw, optimizer)


def evaluate_then_train() -> None:
    """Set up a compiled model, and later its optimizers in containers."""
    raw = normalised()
    compiled = torch.compile(raw, backend="eager")
    model = accel.setup(compiled).model
    with torch.no_grad():
        model.eval()(torch.randn(2, 4))
    model.train()
    assert accel.setup(raw).model is accel.setup(compiled).model is model
    assert accel.unwrap(compiled) is raw
    first, second = sgd(raw[0]), sgd(raw[3])
    for optimizers in ([first, second], {"x": first, "y": [second]}):
        assert accel.setup(model, optimizers)[:2] == (model, optimizers)
    assert isinstance(accel.setup(raw, dataloaders=(loader(),)).dataloaders, tuple)
    before = raw[0].weight.clone()
    one_step(model, first)
    assert not torch.equal(raw[0].weight, before)
    assert equal_on_all_ranks(raw[0])
    assert list(model.state_dict()) == list(normalised().state_dict())


@pytest.mark.parametrize("program", [identities, evaluate_then_train])
def test_setup_is_idempotent(program: Any) -> None:
    program()
    run(2, program)


# -- refusals ---------------------------------------------------------------------------------------------------------


def facts(*objects: Any) -> list[Any]:
    """Return everything that a call must not change if it raises."""
    gc.collect()
    found: list[Any] = [len(registry.engines), len(_global_optimizer_pre_hooks)]
    for o in objects:
        found += [sorted(vars(o)), repr(o.state_dict()), len(getattr(o, "_optimizer_step_pre_hooks", ()))]
        for p in o.parameters() if isinstance(o, nn.Module) else ():
            found += [id(p), p.requires_grad, len(p._post_accumulate_grad_hooks or ())]
    return found


def refuse(error: type[Exception], match: str, call: Any, *objects: Any) -> None:
    before = facts(*objects)
    with pytest.raises(error, match=match) as info:
        call()
    assert isinstance(info.value, accel.AccelError)
    assert facts(*objects) == before


def test_a_missing_package_names_pip_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINES["single"], "requires", {"no_such_package": "its_name"})
    for backend in ("single", accel.Single()):
        refuse(accel.BackendError, "pip install 'its_name'", lambda b=backend: accel.setup(normalised(), backend=b))


def test_conflicts_are_refused_by_name() -> None:
    raw, other = normalised(), normalised()
    optimizer = adamw(raw)
    model, _, _ = accel.setup(raw, optimizer, backend="single")
    for change in ({"backend": accel.DDP(bucket_cap_mb=1.0)}, {"backend": "dp"}, {"precision": "bf16-mixed"}):
        refuse(accel.AlreadySetUpError, "teardown", lambda change=change: accel.setup(raw, **change), raw, optimizer)
    refuse(accel.DeviceError, "99", lambda: accel.setup(raw, devices="99"), raw)
    assert accel.setup(raw, optimizer, backend="single", precision="32-true").model is model
    one_step(model, optimizer)
    inner, outer = raw[0], nn.Sequential(raw, nn.Linear(2, 2))
    refuse(accel.SharedParametersError, "weight", lambda: accel.setup(inner), inner)
    refuse(accel.SharedParametersError, r"0\.0\.weight", lambda: accel.setup(outer), outer)
    refuse(accel.SharedParametersError, r"0\.0\.weight", lambda: accel.setup(nn.Sequential(model)))
    accel.setup(other)
    refuse(accel.OptimizerError, "no parameter of this", lambda: accel.setup(other, optimizer), other, optimizer)
    both = sgd(other, raw)
    refuse(accel.OptimizerError, "two models", lambda: accel.setup(other, both), other, both)
    refuse(accel.BackendError, "DataParallel", lambda: accel.setup(nn.DataParallel(normalised())))
    accel.teardown(raw)
    assert accel.setup(outer).model is not model


def foreign_wrappers() -> None:
    wrapped, sharded = DistributedDataParallel(normalised()), fully_shard(normalised())
    cut = nn.Sequential(nn.Linear(2, 2))
    cut[0].weight = nn.Parameter(distribute_tensor(cut[0].weight, init_device_mesh("cpu", (2,)), [Shard(0)]))
    for module, match in (
        (wrapped, "DistributedDataParallel"),
        (nn.Sequential(wrapped), "DistributedDataParallel"),
        (sharded, "already wrapped by FSDPModule"),
        (cut, "0.weight is already sharded"),
    ):
        refuse(accel.BackendError, match, lambda module=module: accel.setup(module))


def stranger_parameters() -> None:
    raw, scale = normalised(), nn.Parameter(torch.ones(3))
    mixed = torch.optim.SGD([*raw.parameters(), scale], lr=0.1)
    refuse(accel.OptimizerError, r"shape \(3,\)", lambda: accel.setup(raw, mixed), raw, mixed)
    model, optimizer, _ = accel.setup(raw, sgd(raw[0]))
    with pytest.raises(accel.OptimizerError, match=r"\(3,\)"):
        optimizer.add_param_group({"params": [scale]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": raw[3].parameters(), "lr": 0.2})
    one_step(model, optimizer)


@pytest.mark.parametrize("program", [foreign_wrappers, stranger_parameters])
def test_distributed_refusals(program: Any) -> None:
    run(2, program)


def two_parameters_with_one_memory(backend: str) -> None:
    net, memory = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    net[0].weight, net[1].weight = nn.Parameter(memory), nn.Parameter(memory.t())
    message = r"0\.weight and 1\.weight are two Parameters with the same memory"
    refuse(accel.BackendError, message, lambda: accel.setup(net, backend=backend), net)


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed:1", "deepspeed:3", "pipeline", "sharded"])
def test_one_memory_of_two_parameters(backend: str) -> None:
    need(backend)
    run(2, two_parameters_with_one_memory, backend)


# -- ranks --------------------------------------------------------------------------------------------------------------


def wrong_model_on_rank_1() -> None:
    raw = normalised()
    message, model = ("Pass a torch.nn.Module", "model") if accel.rank() else ("rank 1", raw)
    with pytest.raises(accel.AccelError, match=message):
        accel.setup(model)  # type: ignore[type-var]
    assert not registry.engines


def test_an_error_raises_on_all_ranks() -> None:
    run(2, wrong_model_on_rank_1)
