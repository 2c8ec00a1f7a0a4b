"""The registry: one engine per model by identity, and every refusal, which changes nothing and hangs no rank."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
from typing import Any, NamedTuple
from unittest import mock

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
from accel.engines.base import holdings
from accel.handles import OptimizerHandle
from accel.registry import registry
from tests.backends import need
from tests.distributed import outcomes, refusals, run
from tests.models import adamw, normalised, one_step


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2)


# -- identity ---------------------------------------------------------------------------------------------------------


def identities() -> None:
    raw, data = normalised(), loader()
    optimizer = adamw(raw)
    first = accel.setup(raw, optimizer, data)
    assert isinstance(first.model, nn.Module)
    assert isinstance(first.optimizers, torch.optim.Optimizer)
    for again in (
        accel.setup(raw, optimizer, data),
        accel.setup(first.model, first.optimizers, first.dataloaders),
        accel.setup(raw, first.optimizers, data, backend="auto"),
        accel.setup(first.model, optimizer, data, precision="32-true"),
    ):
        assert all(a is b for a, b in zip(first, again, strict=True))
    assert len(registry.engines) == 1
    assert accel.unwrap(first.model) is raw
    assert accel.unwrap(raw) is raw
    assert accel.teardown(raw) is raw
    assert not registry.engines
    one_step(raw, optimizer)


def test_setup_is_idempotent() -> None:
    identities()
    run(2, identities)


def evaluate_then_train() -> None:
    raw = normalised()
    model = accel.setup(raw).model
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 4))
    model.train()
    optimizer = adamw(model)
    again, handle, none = accel.setup(model, optimizer)
    assert again is model
    assert none is None
    before = [p.clone() for p in raw.parameters()]
    one_step(model, handle)
    assert any(not torch.equal(p, q) for p, q in zip(raw.parameters(), before, strict=True))
    everywhere = accel.all_gather(raw[0].weight.detach()[None])
    assert all(torch.equal(w, everywhere[0]) for w in everywhere)
    assert accel.setup(raw, optimizer).optimizers is handle


def test_evaluate_then_train_on_one_engine() -> None:
    evaluate_then_train()
    run(2, evaluate_then_train)


def test_forms_of_the_arguments_come_back() -> None:
    class Both(NamedTuple):
        a: Any
        b: Any

    raw = normalised()
    first, second = torch.optim.SGD(raw[0].parameters(), lr=0.1), torch.optim.SGD(raw[3].parameters(), lr=0.1)
    assert isinstance(accel.setup(raw, [first, second]).optimizers, list)
    found = accel.setup(raw, {"x": first, "y": [second]}, (loader(),))
    assert list(found.optimizers) == ["x", "y"]
    assert type(found.optimizers["y"][0]) is OptimizerHandle
    assert isinstance(found.dataloaders, tuple)
    both = accel.setup(raw, Both(first, second)).optimizers
    assert type(both) is Both
    assert both.a is found.optimizers["x"]


def test_compiled_model_is_the_same_model() -> None:
    raw = normalised()
    compiled = torch.compile(raw, backend="eager")
    model, optimizer, _ = accel.setup(compiled, adamw(raw))
    assert accel.setup(raw).model is model
    assert accel.setup(compiled).model is model
    assert accel.unwrap(compiled) is raw
    before = raw[0].weight.clone()
    one_step(model, optimizer)
    assert not torch.equal(raw[0].weight, before)
    assert list(model.state_dict()) == list(normalised().state_dict())


def test_copies_and_pickles_carry_no_engine() -> None:
    raw = normalised()
    model, optimizer, data = accel.setup(raw, adamw(raw), loader())
    for other in (copy.deepcopy(raw), copy.deepcopy(model), pickle.loads(pickle.dumps(raw)), copy.copy(raw)):
        assert type(other) is nn.Sequential
        assert registry.engine(other) is None
    again = copy.deepcopy(raw)
    assert accel.setup(again).model is not model
    buffer = io.BytesIO()
    torch.save(raw.state_dict(), buffer)
    assert type(pickle.loads(pickle.dumps(model))) is nn.Sequential
    for handle in (optimizer, data):
        with pytest.raises(accel.AccelError, match="pickle"):
            pickle.dumps(handle)
    with pytest.raises(accel.AccelError, match="deep-copied"):
        copy.deepcopy(optimizer)


# -- refusals ---------------------------------------------------------------------------------------------------------


def frozen_picture(*objects: Any) -> list[Any]:
    """All that a refused call must leave as it was."""
    gc.collect()  # what nobody holds is not left by the call
    picture: list[Any] = [len(registry.engines), len(_global_optimizer_pre_hooks)]
    for o in objects:
        if isinstance(o, nn.Module):
            picture += [sorted(o.__dict__), [(id(p), p.requires_grad, p.tolist()) for p in o.parameters()]]
            picture += [len(p._post_accumulate_grad_hooks or ()) for p in o.parameters()]
        elif isinstance(o, torch.optim.Optimizer):
            picture += [sorted(o.__dict__), len(o._optimizer_step_pre_hooks), repr(o.state_dict())]
    return picture


def refuse(error: type[Exception], match: str, call: Any, *objects: Any) -> None:
    before = frozen_picture(*objects)
    with pytest.raises(error, match=match) as info:
        call()
    assert isinstance(info.value, accel.AccelError)
    assert frozen_picture(*objects) == before


@pytest.mark.parametrize("devices", [[99], "99"], ids=str)
def test_a_live_model_stays_on_its_devices(devices: Any) -> None:
    net = nn.Linear(2, 2)
    accel.setup(net)
    with pytest.raises(accel.DeviceError, match="99"):
        accel.setup(net, devices=devices)


def bad_input() -> None:
    raw, other = normalised(), normalised()
    optimizer = adamw(raw)
    one_step(raw, optimizer)

    class Pair(NamedTuple):
        optimizer: Any
        loader: Any

    setup = accel.setup
    every = (raw, optimizer)
    refuse(accel.AccelError, r"torch\.nn\.Module", lambda: setup(optimizer, raw), *every)  # type: ignore[arg-type]
    refuse(accel.AccelError, "Expected a torch", lambda: setup("model"), *every)  # type: ignore[arg-type]
    refuse(accel.BackendError, "'ddp'.*'single'", lambda: setup(raw, backend="ddpp"), *every)
    refuse(accel.BackendError, "known|expected", lambda: setup(raw, backend=3), *every)
    refuse(accel.PrecisionError, "bf16-mixed", lambda: setup(raw, precision="fp8"), *every)
    refuse(accel.DeviceError, "99", lambda: setup(raw, devices=[99]), *every)
    refuse(
        accel.OptimizerError,
        r"optimizers\.loader is a .*DataLoader",
        lambda: setup(raw, Pair(optimizer, loader())),
        *every,
    )
    refuse(accel.OptimizerError, "DataLoader", lambda: setup(raw, loader(), optimizer), *every)
    refuse(accel.LoaderError, "AdamW", lambda: setup(raw, None, optimizer), *every)
    refuse(accel.OptimizerError, "no parameter of this", lambda: setup(other, optimizer), other, *every)
    distributed = DataLoader(TensorDataset(torch.zeros(4, 1)), sampler=DistributedSampler(range(4), 2, 0))
    refuse(accel.LoaderError, "istributed", lambda: setup(raw, optimizer, distributed), *every)
    refuse(accel.PrecisionError, "fp32", lambda: setup(copy.deepcopy(raw).half(), precision="bf16-mixed"), *every)
    refuse(accel.BackendError, "comm_hook", lambda: setup(raw, backend=accel.DDP(comm_hook="zip")), *every)
    refuse(accel.AccelError, "lazy", lambda: setup(nn.LazyLinear(3)), *every)


def test_a_module_without_values_is_refused() -> None:
    with torch.device("meta"):
        raw = normalised()
    refuse(accel.AccelError, "meta device", lambda: accel.setup(raw))


def test_bad_input_is_refused_and_changes_nothing() -> None:
    bad_input()
    run(2, bad_input)


def renormed() -> None:
    for kind, backend in ((nn.Embedding, "ddp"), (nn.EmbeddingBag, "fsdp"), (nn.Embedding, "sharded")):
        raw = nn.Sequential(kind(4, 2, max_norm=1.0), nn.Linear(2, 1))
        refuse(
            accel.BackendError,
            "max_norm of 0 changes weights in forward|0 has max_norm, which writes to its weight in forward",
            lambda r=raw, b=backend: accel.setup(r, backend=b),
        )


def test_embeddings_that_change_in_forward_are_refused_on_several_processes() -> None:
    run(2, renormed)
    raw = nn.Embedding(4, 2, max_norm=1.0)
    assert accel.unwrap(accel.setup(raw).model) is raw


def test_a_missing_package_gives_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINES["single"], "requires", {"no_such_package": "its_name"})
    for backend in ("single", accel.Single()):
        refuse(accel.BackendError, "pip install 'its_name'", lambda b=backend: accel.setup(normalised(), backend=b))


def already_set_up() -> None:
    raw = normalised()
    optimizer = adamw(raw)
    backend = "ddp" if accel.world_size() > 1 else "single"
    model, handle, _ = accel.setup(raw, optimizer, backend=backend)
    for change in (
        {"backend": accel.DDP(bucket_cap_mb=1.0)},
        {"backend": "dp"},
        {"precision": "bf16-mixed"},
    ):
        refuse(accel.AlreadySetUpError, "teardown", lambda change=change: accel.setup(raw, **change), raw, optimizer)
    assert accel.setup(raw, optimizer, backend=backend, precision="32-true").model is model
    one_step(model, handle)
    inner, outer = raw[0], nn.Sequential(raw, nn.Linear(2, 2))
    refuse(accel.SharedParametersError, "weight", lambda: accel.setup(inner), inner)
    refuse(accel.SharedParametersError, r"0\.0\.weight", lambda: accel.setup(outer), outer)
    refuse(accel.SharedParametersError, "handle", lambda: accel.setup(nn.Sequential(model)))
    other = normalised()
    accel.setup(other)
    refuse(accel.OptimizerError, "belongs to", lambda: accel.setup(other, optimizer), other, optimizer)
    both = torch.optim.SGD([*other.parameters(), *raw.parameters()], lr=0.1)
    refuse(accel.OptimizerError, "two models", lambda: accel.setup(other, both), other, both)
    refuse(accel.BackendError, "DataParallel", lambda: accel.setup(nn.DataParallel(normalised())))
    accel.teardown(raw)
    assert accel.setup(outer).model is not model


def test_conflicts_are_refused_by_name() -> None:
    already_set_up()


def foreign_wrapper() -> None:
    wrapped = DistributedDataParallel(normalised())
    refuse(accel.BackendError, "DistributedDataParallel", lambda: accel.setup(wrapped), wrapped)
    refuse(accel.BackendError, "DistributedDataParallel", lambda: accel.setup(nn.Sequential(wrapped)), wrapped)
    divided, cut = fully_shard(normalised()), nn.Sequential(nn.Linear(2, 2))
    refuse(accel.BackendError, "torch.distributed.fsdp.FSDPModule", lambda: accel.setup(divided))
    cut[0].weight = nn.Parameter(distribute_tensor(cut[0].weight, init_device_mesh("cpu", (2,)), [Shard(0)]))
    refuse(
        accel.BackendError, "0.weight is a DTensor. Call accel.setup instead of fully_shard", lambda: accel.setup(cut)
    )
    model = accel.setup(normalised()).model
    refuse(accel.AccelError, "already distributed this model", lambda: DistributedDataParallel(model))


def stranger_parameters() -> None:
    raw, scale = normalised(), nn.Parameter(torch.ones(3))
    mixed = torch.optim.SGD([*raw.parameters(), scale], lr=0.1)
    refuse(accel.OptimizerError, r"shape \(3,\)", lambda: accel.setup(raw, mixed), raw, mixed)
    model, handle, _ = accel.setup(raw, torch.optim.SGD(raw[0].parameters(), lr=0.1))
    with pytest.raises(accel.OptimizerError, match=r"\(3,\)"):
        handle.add_param_group({"params": [scale]})
    assert len(handle.param_groups) == 1
    handle.add_param_group({"params": raw[3].parameters(), "lr": 0.2})
    one_step(model, handle)
    accel.unwrap(model)
    object.__getattribute__(handle, "_accel_raw").add_param_group({"params": [scale]})
    with pytest.raises(accel.OptimizerError, match=r"\(3,\)"):
        one_step(model, handle)


def one_model_a_rank() -> None:
    for backend in ("single", "dp"):
        raw = normalised()
        refuse(
            accel.BackendError, "of its own", lambda raw=raw, b=backend: accel.setup(raw, adamw(raw), backend=b), raw
        )
        accel.setup(raw, backend=backend)


def test_distributed_refusals() -> None:
    run(2, foreign_wrapper)
    run(2, stranger_parameters)
    run(2, one_model_a_rank)


# -- ranks that differ ------------------------------------------------------------------------------------------------


def different(what: str) -> None:
    second = accel.rank() == 1
    raw: nn.Module = normalised()
    kwargs: dict[str, Any] = {}
    if what == "shape" and second:
        raw[3] = nn.Linear(8, 3)  # type: ignore[index]
    if what == "name" and second:
        raw.add_module("tail", nn.Linear(2, 2))
    if what == "dtype" and second:
        raw[0].double()  # type: ignore[index]
    if what == "mask" and second:
        raw[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    if what == "backend" and second:
        kwargs["backend"] = accel.DDP(bucket_cap_mb=2.0)
    if what == "precision" and second:
        kwargs["precision"] = "bf16-mixed"
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.2 if what == "lr" and second else 0.1)
    if what == "order":
        parameters = list(raw.parameters())[:: -1 if second else 1]
        return accel.setup(raw, torch.optim.SGD(parameters, lr=0.1)) and None
    if what == "bad input" and second:
        accel.setup("not a model")  # type: ignore[arg-type]
    before = [p.clone() for p in raw.parameters()]
    try:
        accel.setup(raw, None if what == "optimizer" and second else optimizer, **kwargs)
    finally:
        assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), before, strict=True))
        assert not registry.engines


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shape", "3.weight"),
        ("name", "tail.weight"),
        ("dtype", "0.weight"),
        ("mask", "0.weight"),
        ("backend", "bucket_cap_mb"),
        ("precision", "bf16-mixed"),
        ("optimizer", "optimizers"),
        ("lr", "0.2"),
        ("order", "group 0"),
    ],
)
def test_ranks_that_differ_all_raise(what: str, named: str) -> None:
    for message in refusals(2, different, what, error="RankMismatchError"):
        assert named in message
        assert "rank" in message


def test_an_error_on_one_rank_is_an_error_on_all() -> None:
    first, second = outcomes(2, different, "bad input")
    assert "RankMismatchError" in first.error
    assert "rank 1" in first.message
    assert "AccelError" in second.error
    assert "Module" in second.message


class Tagged:
    """A value whose text is its address."""


def same_everywhere() -> None:
    raw = normalised()
    kinds = {"kinds": {8, 0} if accel.rank() else {0, 8}}  # two orders
    optimizer = torch.optim.SGD([{"params": raw.parameters(), "tag": Tagged(), "lr": torch.tensor(0.1), "tags": kinds}])
    with torch.inference_mode():
        model, handle, _ = accel.setup(raw, optimizer)
    one_step(model, handle)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    with pytest.raises(accel.OptimizerError, match=r"\(3,\)"):
        one_step(model, handle)


def test_what_is_the_same_on_all_ranks_is_accepted() -> None:
    run(2, same_everywhere)


def made_in_inference(backend: str) -> float:
    with torch.inference_mode():
        raw = nn.Linear(3, 2)
        model = accel.setup(raw, backend=backend).model
        return float((model(torch.ones(2, 3)) - raw(torch.ones(2, 3))).abs().max())


@pytest.mark.parametrize("backend", ["ddp", "sharded"])
def test_a_model_that_was_made_in_inference_mode_is_called(backend: str) -> None:
    need(backend)
    assert run(2, made_in_inference, backend) == [0, 0]


def views(second: str) -> nn.Sequential:
    """Two layers in one buffer, the columns of the first beside each other; ``second``: where the other's weight lies."""
    torch.manual_seed(0)
    net, flat = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), torch.randn(48)
    pair = flat[:32].view(4, 8)
    place = {"same": pair[:, :4], "transposed": pair[:, :4].t(), "beside": pair[:, 4:]}[second]
    net[0].weight, net[1].weight = nn.Parameter(pair[:, :4]), nn.Parameter(place)
    net[0].bias = nn.Parameter(flat[32:36])
    return net


def with_views(backend: str, second: str) -> float:
    """How far training is from that of the raw loop, whose batch every rank has."""

    def train(model: Any, optimizer: Any) -> None:
        for _ in range(3):
            model(torch.arange(8.0).view(2, 4)).tanh().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    raw, net = views(second), views(second)
    train(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    model, optimizer = accel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), backend=backend)[:2]
    train(model, optimizer)
    ours = accel.full_state_dict(model)
    accel.teardown(model)
    return max(float((weight - ours[name]).abs().max()) for name, weight in raw.state_dict().items()) if ours else 0.0


DIVIDING = ["fsdp", "deepspeed:1", "deepspeed:3", "pipeline"]


@pytest.mark.parametrize(("backend", "second"), [*itertools.product([*DIVIDING, "sharded"], ["same", "transposed"])])
def test_parameters_with_the_same_memory_are_not_parted(backend: str, second: str) -> None:
    need(backend.split(":")[0])
    for message in refusals(2, with_views, backend, second, error="BackendError"):
        assert "0.weight and 1.weight are two Parameters with the same memory" in message


@pytest.mark.parametrize("backend", [*DIVIDING, "sharded"])
def test_parameters_in_one_buffer_that_stay_together_train(backend: str) -> None:
    need(backend.split(":")[0])
    assert max(run(2, with_views, backend, "beside")) < 1e-6


def first_weights(shift: int, zero: float) -> tuple[int, list[float], bool]:
    """How often they are sent, and what comes of them; on the other rank with other numbers, or another sign of a zero."""
    raw = normalised()
    next(raw.parameters()).data.add_(shift * accel.rank())
    raw.register_buffer("sign", torch.tensor([0.0, zero][accel.rank()]))
    with mock.patch.object(holdings, "broadcast_", wraps=holdings.broadcast_) as sent:
        accel.setup(raw)
    return sent.call_count, [p.sum().item() for p in raw.parameters()], bool(raw.sign.signbit())


def all_first_weights() -> list[tuple[int, list[float], bool]]:
    return list(map(first_weights, (0, 0, 1), (0.0, -0.0, 0.0)))


def test_only_weights_that_differ_are_sent() -> None:
    """Bit for bit."""
    one, other = run(2, all_first_weights)
    assert one == other
    assert [times for times, *_ in one] == [0, 1, 1]
    assert not any(negative for *_, negative in one)
