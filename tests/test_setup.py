"""The registry: one engine per model by identity. A call that is refused changes nothing and hangs no rank."""

from __future__ import annotations

import copy
import gc
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accel
from accel.engines import ENGINES
from accel.process import current
from accel.registry import registry
from tests.backends import need
from tests.distributed import outcomes, run
from tests.models import adamw, distance, equal_on_all_ranks, normalised, one_step


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2)


# -- identity ---------------------------------------------------------------------------------------------------------


def identities() -> None:
    raw, data = normalised(), loader()
    optimizer = adamw(raw)
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
    raw = normalised()
    model = accel.setup(raw).model
    with torch.no_grad():
        model.eval()(torch.randn(2, 4))
    optimizer = adamw(model.train())
    assert accel.setup(model, optimizer)[0] is model
    before = raw[0].weight.clone()
    one_step(model, optimizer)
    assert not torch.equal(raw[0].weight, before)
    assert equal_on_all_ranks(raw[0])


@pytest.mark.parametrize("program", [identities, evaluate_then_train])
def test_setup_is_idempotent(program: Any) -> None:
    program()
    run(2, program)


def test_optimizers_keep_their_containers() -> None:
    class Both(NamedTuple):
        a: Any
        b: Any

    raw = normalised()
    first, second = sgd(raw[0]), sgd(raw[3])
    for optimizers in ([first, second], {"x": first, "y": [second]}, Both(first, second)):
        assert accel.setup(raw, optimizers).optimizers == optimizers
    assert isinstance(accel.setup(raw, dataloaders=(loader(),)).dataloaders, tuple)


def test_compiled_model_is_the_same_model() -> None:
    raw = normalised()
    compiled = torch.compile(raw, backend="eager")
    model, optimizer, _ = accel.setup(compiled, adamw(raw))
    assert accel.setup(raw).model is accel.setup(compiled).model is model
    assert accel.unwrap(compiled) is raw
    before = raw[0].weight.clone()
    one_step(model, optimizer)
    assert not torch.equal(raw[0].weight, before)
    assert list(model.state_dict()) == list(normalised().state_dict())


# -- refusals ---------------------------------------------------------------------------------------------------------


def frozen_picture(*objects: Any) -> list[Any]:
    """All that a refused call must leave as it was."""
    gc.collect()
    picture: list[Any] = [len(registry.engines), len(_global_optimizer_pre_hooks)]
    for o in objects:
        if isinstance(o, nn.Module):
            picture += [sorted(o.__dict__), [(id(p), p.requires_grad, p.tolist()) for p in o.parameters()]]
            picture += [len(p._post_accumulate_grad_hooks or ()) for p in o.parameters()]
        else:
            picture += [sorted(o.__dict__), len(o._optimizer_step_pre_hooks), repr(o.state_dict())]
    return picture


def refuse(error: type[Exception], match: str, call: Any, *objects: Any) -> None:
    before = frozen_picture(*objects)
    with pytest.raises(error, match=match) as info:
        call()
    assert isinstance(info.value, accel.AccelError)
    assert frozen_picture(*objects) == before


def bad_input() -> None:
    raw, other, setup = normalised(), normalised(), accel.setup
    optimizer = adamw(raw)
    one_step(raw, optimizer)
    distributed = DataLoader(TensorDataset(torch.zeros(4, 1)), sampler=DistributedSampler(range(4), 2, 0))
    with torch.device("meta"):
        unfilled = normalised()
    cases: list[tuple[type[Exception], str, Any]] = [
        (accel.AccelError, r"torch\.nn\.Module", lambda: setup(optimizer, raw)),  # type: ignore[arg-type]
        (accel.PrecisionError, "bf16-mixed", lambda: setup(raw, precision="fp8")),
        (accel.DeviceError, "99", lambda: setup(raw, devices=[99])),
        (accel.OptimizerError, "no parameter of this", lambda: setup(other, optimizer)),
        (accel.LoaderError, "istributed", lambda: setup(raw, optimizer, distributed)),
        (accel.PrecisionError, "fp32", lambda: setup(copy.deepcopy(raw).half(), precision="bf16-mixed")),
        (accel.BackendError, "comm_hook", lambda: setup(raw, backend=accel.DDP(comm_hook="zip"))),
        (accel.AccelError, "meta device", lambda: setup(unfilled)),
    ]
    for error, match, call in cases:
        refuse(error, match, call, raw, optimizer, other)


def test_bad_input_changes_nothing() -> None:
    bad_input()
    run(2, bad_input)


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
    cut, part = nn.Sequential(nn.Linear(2, 2)), normalised()
    cut[0].weight = nn.Parameter(distribute_tensor(cut[0].weight, init_device_mesh("cpu", (2,)), [Shard(0)]))
    part[0].weight.allreduce = False  # as DeepSpeed-MoE marks an expert
    for module, match in (
        (wrapped, "DistributedDataParallel"),
        (nn.Sequential(wrapped), "DistributedDataParallel"),
        (sharded, "already wrapped by FSDPModule"),
        (cut, "0.weight is already sharded"),
        (part, "different experts in 0.weight"),
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


def one_model_per_rank() -> None:
    for backend in ("single", "dp"):
        raw = normalised()
        refuse(accel.BackendError, "of its own", lambda r=raw, b=backend: accel.setup(r, adamw(r), backend=b), raw)
        accel.setup(raw, backend=backend)


@pytest.mark.parametrize("program", [foreign_wrappers, stranger_parameters, one_model_per_rank])
def test_distributed_refusals(program: Any) -> None:
    run(2, program)


# -- ranks --------------------------------------------------------------------------------------------------------------


def wrong_model_on_rank_1() -> None:
    raw = normalised()
    try:
        accel.setup("not a model" if accel.rank() == 1 else raw)  # type: ignore[type-var]
    finally:
        assert not registry.engines


def test_an_error_raises_on_all_ranks() -> None:
    first, second = outcomes(2, wrong_model_on_rank_1)
    assert "RankMismatchError" in first.error
    assert "rank 1" in first.message
    assert "AccelError" in second.error
    assert "Module" in second.message


def equal_groups() -> None:
    """Sets have a different order on each rank, and a default repr has an address."""
    raw = normalised()
    tags = {8, 0} if accel.rank() else {0, 8}
    group = {"params": raw.parameters(), "lr": torch.tensor(0.1), "tag": nn.Tanh, "object": object(), "tags": tags}
    optimizer = torch.optim.SGD([group])
    one_step(accel.setup(raw, optimizer).model, optimizer)


def test_equal_groups_are_accepted() -> None:
    run(2, equal_groups)


def two_layers(same_memory: bool) -> nn.Sequential:
    """Return two layers with weights in one buffer."""
    torch.manual_seed(0)
    net, pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 8)
    net[0].weight = nn.Parameter(pair[:, :4])
    net[1].weight = nn.Parameter(pair[:, :4].t() if same_memory else pair[:, 4:])
    return net


def train_views(backend: str) -> None:
    """Compare views of different memory with a raw loop. Views of the same memory raise."""
    message = r"0\.weight and 1\.weight are two Parameters with the same memory"
    with pytest.raises(accel.BackendError, match=message):
        accel.setup(two_layers(same_memory=True), backend=backend)
    raw, net = two_layers(same_memory=False), two_layers(same_memory=False)
    raw_optimizer, optimizer = sgd(raw), sgd(net)
    model = accel.setup(net, optimizer, backend=backend).model
    for stepped, each in ((raw, raw_optimizer), (model, optimizer)):
        for _ in range(3):
            stepped(torch.arange(8.0).view(2, 4)).tanh().sum().backward()
            each.step()
            each.zero_grad()
    assert distance(accel.full_state_dict(model), raw.state_dict()) < 1e-6


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed:1", "deepspeed:3", "pipeline", "sharded"])
def test_parameters_in_one_buffer(backend: str) -> None:
    need(backend.split(":")[0])
    run(2, train_views, backend)
