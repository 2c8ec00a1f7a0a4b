"""The registry: one engine per model by identity, and every refusal, which changes nothing and hangs no rank."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accel
from accel.engines import ENGINES
from accel.handles import ModelHandle, OptimizerHandle
from accel.registry import registry
from tests.distributed import outcomes, refusals, run


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2)


def one_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()


@pytest.fixture(autouse=True)
def _teardown() -> Any:
    yield
    accel.teardown()


# -- identity -----------------------------------------------------------------------------------------------------------


def identities() -> None:
    raw, data = net(), loader()
    optimizer = adam(raw)
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
    raw = net()
    model = accel.setup(raw).model
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 4))
    model.train()
    optimizer = adam(model)
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

    raw = net()
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
    raw = net()
    compiled = torch.compile(raw, backend="eager")
    model, optimizer, _ = accel.setup(compiled, adam(raw))
    assert accel.setup(raw).model is model
    assert accel.setup(compiled).model is model
    assert accel.unwrap(compiled) is raw
    before = raw[0].weight.clone()
    one_step(model, optimizer)
    assert not torch.equal(raw[0].weight, before)
    assert list(model.state_dict()) == list(net().state_dict())


def test_copies_and_pickles_carry_no_engine() -> None:
    raw = net()
    model, optimizer, data = accel.setup(raw, adam(raw), loader())
    for other in (copy.deepcopy(raw), copy.deepcopy(model), pickle.loads(pickle.dumps(raw)), copy.copy(raw)):
        assert type(other) is nn.Sequential
        assert registry.engine(other) is None
    again = copy.deepcopy(raw)
    assert accel.setup(again).model is not model
    buffer = io.BytesIO()
    torch.save(raw.state_dict(), buffer)
    for handle in (model, optimizer, data):
        with pytest.raises(accel.AccelError, match="pickle"):
            pickle.dumps(handle)
    with pytest.raises(accel.AccelError, match="deep-copied"):
        copy.deepcopy(optimizer)


# -- handles --------------------------------------------------------------------------------------------------------------


class Talker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.engine = "diesel"
        self.options = {"a": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def generate(self, n: int) -> torch.Tensor:
        return self(torch.ones(n, 4))

    def train(self, mode: bool = True) -> Talker:
        self.trained = mode
        return super().train(mode)  # type: ignore[return-value]

    @property
    def width(self) -> int:
        return self.linear.out_features


def test_a_handle_shows_the_users_module() -> None:
    raw = Talker()
    model = accel.setup(raw).model
    assert list(model.state_dict()) == ["linear.weight", "linear.bias"]
    assert [n for n, _ in model.named_parameters()] == ["linear.weight", "linear.bias"]
    assert model.engine == "diesel"
    assert model.options is raw.options
    assert model.width == 4
    assert model.generate(3).shape == (3, 4)
    assert model.train(False) is model
    assert raw.trained is False
    assert raw.training is False
    assert model.training is False
    model.color = "red"
    assert raw.color == "red"
    del model.color
    assert not hasattr(raw, "color")
    with pytest.raises(AttributeError, match="Talker"):
        _ = model.nothing
    assert set(dir(model)) == set(dir(raw))
    model.load_state_dict({k: torch.zeros_like(v) for k, v in raw.state_dict().items()})
    assert float(raw.linear.weight.detach().abs().sum()) == 0.0
    assert not any(name.startswith("_accel") for name in model.state_dict())


class Ranking(nn.Module):
    """Its ``train`` computes a loss of pairs; torch's is another method."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def train(self, better: torch.Tensor, worse: torch.Tensor) -> Any:  # type: ignore[override]
        return (self.linear(worse) - self.linear(better)).relu()


def test_a_users_method_with_a_name_of_torchs_goes_through_the_engine() -> None:
    raw = Ranking()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), precision="bf16-true")
    loss = model.train(torch.ones(2, 4), torch.zeros(2, 4))  # fp32 inputs meet weights in bfloat16
    assert loss.dtype is torch.float32
    loss.sum().backward()
    optimizer.step()
    talker = accel.setup(Talker()).model
    assert talker.eval() is talker  # which calls train(False)
    assert talker.trained is False


class Scaled(torch.optim.SGD):
    """An optimizer with a step of its own."""

    def step(self, factor: float = 1.0, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1 * factor
        return super().step(closure)


def test_an_optimizer_with_its_own_step() -> None:
    raw = net().eval()
    reference = copy.deepcopy(raw)
    optimizer, plain = Scaled(raw.parameters(), lr=0.1), Scaled(reference.parameters(), lr=0.1)
    model, handle, _ = accel.setup(raw, optimizer)

    def closure(m: Any, o: Any) -> Any:
        o.zero_grad()
        loss = m(torch.ones(4, 4)).square().mean()
        loss.backward()
        return loss

    for m, o in ((model, handle), (reference, plain)):
        closure(m, o)
        o.step(5.0)
        assert float(o.step(2.0, lambda m=m, o=o: closure(m, o)).detach()) > 0
        o.step(closure=lambda m=m, o=o: closure(m, o), factor=0.5)
    assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), reference.parameters(), strict=True))


def test_a_handle_of_a_container() -> None:
    raw = net().eval()
    model = accel.setup(raw).model
    assert len(model) == 4
    assert model[0] is raw[0]
    assert [type(m) for m in model] == [type(m) for m in raw]
    model[2] = nn.Tanh()
    assert isinstance(raw[2], nn.Tanh)
    model(torch.randn(2, 4))
    with pytest.raises(accel.AccelError, match="before accel.setup"):
        torch.compile(model, backend="eager")


def test_an_optimizer_that_is_kept_does_not_keep_its_model() -> None:
    raw = net()
    optimizer = adam(raw)
    model, handle, _ = accel.setup(raw, optimizer)
    one_step(model, handle)
    engine = weakref.ref(registry.engine(raw))
    del raw, model, handle
    gc.collect()
    assert engine() is None
    optimizer.step()


def test_an_optimizer_handle_shows_the_users_optimizer() -> None:
    raw = net()
    optimizer = adam(raw)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, handle, _ = accel.setup(raw, optimizer)
    late = torch.optim.lr_scheduler.StepLR(handle, 1, 0.5)
    assert handle.param_groups is optimizer.param_groups
    assert handle.state is optimizer.state
    one_step(model, handle)
    early.step()
    late.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.25)
    one_step(model, optimizer)
    early.step()
    late.step()
    assert handle.param_groups[0]["lr"] == pytest.approx(0.01 * 0.0625)
    state = copy.deepcopy(handle.state_dict())
    one_step(model, handle)
    handle.load_state_dict(state)
    assert float(next(iter(optimizer.state.values()))["step"]) == 2.0
    handle.zero_grad()
    assert all(p.grad is None for p in raw.parameters())


def test_ended_handles_raise() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, adam(raw))
    assert accel.teardown(model) is raw
    for use in (
        lambda: model(torch.randn(2, 4)),
        lambda: model.state_dict(),
        lambda: optimizer.step(),
        lambda: optimizer.param_groups,
        lambda: accel.setup(model),
        lambda: accel.teardown(model),
    ):
        with pytest.raises(accel.AccelError, match="torn down"):
            use()
    assert accel.unwrap(model) is raw
    assert "ended" in repr(model)


def test_parameters_changed_after_setup_raise_at_the_next_forward() -> None:
    model = accel.setup(net()).model
    model.train()
    model[0].weight = model[0].weight
    model(torch.randn(2, 4))
    model[0].weight = nn.Parameter(torch.zeros(8, 4))
    with pytest.raises(accel.BackendError, match=r"0\.weight"):
        model(torch.randn(2, 4))
    other = accel.setup(net()).model
    other.extra = nn.Linear(2, 2)
    with pytest.raises(accel.BackendError, match=r"extra\.weight"):
        other(torch.randn(2, 4))


# -- refusals -------------------------------------------------------------------------------------------------------------


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


def bad_input() -> None:
    raw, other = net(), net()
    optimizer = adam(raw)
    one_step(raw, optimizer)

    class Pair(NamedTuple):
        optimizer: Any
        loader: Any

    setup = accel.setup
    every = (raw, optimizer)
    refuse(accel.AccelError, r"torch\.nn\.Module", lambda: setup(optimizer, raw), *every)  # type: ignore[arg-type]
    refuse(accel.AccelError, "expected a torch", lambda: setup("model"), *every)  # type: ignore[arg-type]
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
    refuse(accel.OptimizerError, "order", lambda: setup(raw, loader(), optimizer), *every)
    refuse(accel.LoaderError, "order", lambda: setup(raw, None, optimizer), *every)
    refuse(accel.OptimizerError, "no parameter of this", lambda: setup(other, optimizer), other, *every)
    distributed = DataLoader(TensorDataset(torch.zeros(4, 1)), sampler=DistributedSampler(range(4), 2, 0))
    refuse(accel.LoaderError, "istributed", lambda: setup(raw, optimizer, distributed), *every)
    refuse(accel.PrecisionError, "fp32", lambda: setup(copy.deepcopy(raw).half(), precision="bf16-mixed"), *every)
    refuse(accel.BackendError, "comm_hook", lambda: setup(raw, backend=accel.DDP(comm_hook="zip")), *every)
    refuse(accel.AccelError, "lazy", lambda: setup(nn.LazyLinear(3)), *every)


def test_a_module_without_values_is_refused() -> None:
    with torch.device("meta"):
        raw = net()
    refuse(accel.AccelError, "meta device", lambda: accel.setup(raw))


def test_bad_input_is_refused_and_changes_nothing() -> None:
    bad_input()
    run(2, bad_input)


def renormed() -> None:
    for kind, backend in ((nn.Embedding, "ddp"), (nn.EmbeddingBag, "fsdp"), (nn.Embedding, "sharded")):
        raw = nn.Sequential(kind(4, 2, max_norm=1.0), nn.Linear(2, 1))
        refuse(
            accel.BackendError,
            "max_norm of 0 changes weights in forward",
            lambda r=raw, b=backend: accel.setup(r, backend=b),
        )


def test_embeddings_that_change_in_forward_are_refused_on_several_processes() -> None:
    run(2, renormed)
    raw = nn.Embedding(4, 2, max_norm=1.0)
    assert accel.unwrap(accel.setup(raw).model) is raw


def test_a_missing_package_gives_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINES["single"], "requires", {"no_such_package": "its_name"})
    for backend in ("single", accel.Single()):
        refuse(accel.BackendError, "pip install 'its_name'", lambda b=backend: accel.setup(net(), backend=b))


def already_set_up() -> None:
    raw = net()
    optimizer = adam(raw)
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
    other = net()
    accel.setup(other)
    refuse(accel.OptimizerError, "belongs to", lambda: accel.setup(other, optimizer), other, optimizer)
    both = torch.optim.SGD([*other.parameters(), *raw.parameters()], lr=0.1)
    refuse(accel.OptimizerError, "two models", lambda: accel.setup(other, both), other, both)
    refuse(accel.BackendError, "DataParallel", lambda: accel.setup(nn.DataParallel(net())))
    accel.teardown(raw)
    assert accel.setup(outer).model is not model


def test_conflicts_are_refused_by_name() -> None:
    already_set_up()
    run(2, already_set_up)


def foreign_wrapper() -> None:
    wrapped = DistributedDataParallel(net())
    refuse(accel.BackendError, "DistributedDataParallel", lambda: accel.setup(wrapped), wrapped)
    refuse(accel.BackendError, "DistributedDataParallel", lambda: accel.setup(nn.Sequential(wrapped)), wrapped)


def stranger_parameters() -> None:
    raw, scale = net(), nn.Parameter(torch.ones(3))
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
        raw = net()
        refuse(accel.BackendError, "of its own", lambda raw=raw, b=backend: accel.setup(raw, adam(raw), backend=b), raw)
        accel.setup(raw, backend=backend)


def test_distributed_refusals() -> None:
    run(2, foreign_wrapper)
    run(2, stranger_parameters)
    run(2, one_model_a_rank)


# -- ranks that differ ----------------------------------------------------------------------------------------------------


def different(what: str) -> None:
    second = accel.rank() == 1
    raw: nn.Module = net()
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
    raw = net()
    optimizer = torch.optim.SGD([{"params": raw.parameters(), "tag": Tagged(), "lr": torch.tensor(0.1)}])
    with torch.inference_mode():
        model, handle, _ = accel.setup(raw, optimizer)
    one_step(model, handle)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    with pytest.raises(accel.OptimizerError, match=r"\(3,\)"):
        one_step(model, handle)


def test_what_is_the_same_on_all_ranks_is_accepted() -> None:
    run(2, same_everywhere)


# -- weights, lifetime ----------------------------------------------------------------------------------------------------


def different_seeds() -> tuple[list[Any], list[Any]]:
    torch.manual_seed(accel.rank())
    raw = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    raw[1].running_mean.fill_(accel.rank())  # type: ignore[operator, union-attr]
    before = [t.tolist() for t in raw.state_dict().values()]
    accel.setup(raw)
    return before, [t.tolist() for t in raw.state_dict().values()]


def test_all_ranks_start_from_rank_0() -> None:
    results = run(4, different_seeds)
    assert results[0][0] != results[1][0]
    assert all(after == results[0][0] for _, after in results)


def count_reducers() -> int:
    gc.collect()
    return sum(type(o) is DistributedDataParallel for o in gc.get_objects())


def rounds(n: int) -> tuple[int, int, int]:
    import psutil

    raw = nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.01)
    sizes = []
    for i in range(n):
        model, handle, _ = accel.setup(raw, optimizer)
        handle.zero_grad()
        model(torch.randn(4, 256)).mean().backward()
        handle.step()
        assert i % 10 or count_reducers() == (1 if accel.world_size() > 1 else 0)
        accel.teardown(model)
        handle = model = None
        assert i % 10 or count_reducers() == 0
        sizes.append(psutil.Process().memory_info().rss)
    return sizes[4], sizes[-1], sum(p.numel() * 4 for p in raw.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_fifty_rounds_of_setup_and_teardown_leave_memory_flat(world: int) -> None:
    for early, late, model_bytes in run(world, rounds, 50):
        # One leaked copy a round would be 45 times the model; the allocator alone is good for a few.
        assert late - early < 10 * model_bytes


def unreferenced(steps: int, backend: Any = "auto") -> list[bool]:
    raw = net()
    model, optimizer, _ = accel.setup(raw, adam(raw), backend=backend)
    for _ in range(steps):
        one_step(model, optimizer)
    model(torch.randn(4, 4)).mean().backward()
    alive = [weakref.ref(raw), weakref.ref(registry.engine(raw)), weakref.ref(raw[0].weight)]
    del raw, model, optimizer
    gc.collect()
    return [r() is not None for r in alive]


def test_an_unreferenced_model_is_collected() -> None:
    assert unreferenced(2) == [False, False, False]
    for backend in ("ddp", accel.DDP(comm_hook="bf16"), accel.DDP(find_unused_parameters=True)):
        for found in run(2, unreferenced, 2, backend):
            assert found == [False, False, False]
    assert not registry.engines


def test_a_reused_id_never_matches() -> None:
    for _ in range(12):
        raw = net()
        handle = accel.setup(raw).model
        assert accel.unwrap(handle) is raw
        del raw, handle
        gc.collect()


def switch_backends() -> None:
    raw = net()
    optimizer = adam(raw)
    reference = copy.deepcopy(raw)
    plain = adam(reference)
    accel.teardown()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for backend in ("ddp", accel.DDP(gradient_as_bucket_view=False), "ddp"):
        model, handle, _ = accel.setup(raw, optimizer, backend=backend)
        model.eval()
        for m, o in ((model, handle), (reference.eval(), plain)):
            o.zero_grad()
            m(x).square().mean().backward()
            o.step()
        assert accel.teardown(model) is raw
        assert not optimizer._optimizer_step_pre_hooks
        assert not any(p._post_accumulate_grad_hooks for p in raw.parameters())
    for p, q in zip(raw.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    assert float(optimizer.state[raw[0].weight]["step"]) == 3.0


def test_teardown_gives_everything_back_and_setup_works_again() -> None:
    switch_backends()
    run(2, switch_backends)


def test_torch_is_as_before_when_all_engines_are_gone() -> None:
    from torch.nn.utils import clip_grad

    helper = clip_grad._group_tensors_by_device_and_dtype
    hooks = len(_global_optimizer_pre_hooks)
    raw = net()
    accel.setup(raw, adam(raw), precision="16-mixed")
    assert clip_grad._group_tensors_by_device_and_dtype is not helper
    accel.teardown()
    assert clip_grad._group_tensors_by_device_and_dtype is helper
    assert len(_global_optimizer_pre_hooks) == hooks


def several_models() -> None:
    torch.manual_seed(accel.rank())
    generator, critic, frozen = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 4).requires_grad_(False)
    g, g_opt, _ = accel.setup(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    c, c_opt, _ = accel.setup(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    f = accel.setup(frozen).model
    assert len(registry.engines) == 3
    ref_g, ref_c, ref_f = copy.deepcopy((generator, critic, frozen))
    ref_g_opt, ref_c_opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ref_g, ref_c))
    world, rank = accel.world_size(), accel.rank()

    def play(g: Any, c: Any, f: Any, g_opt: Any, c_opt: Any, z: torch.Tensor, real: torch.Tensor) -> None:
        for _ in range(4):
            c_opt.zero_grad()
            fake = g(z)
            (F.softplus(-c(real)).mean() + F.softplus(c(f(fake.detach()))).mean()).backward()
            c_opt.step()
            g_opt.zero_grad()
            F.softplus(-c(f(fake))).mean().backward()
            g_opt.step()

    generator_ = torch.Generator().manual_seed(5)
    z, real = torch.randn(8, 3, generator=generator_), torch.randn(8, 4, generator=generator_)
    play(ref_g, ref_c, ref_f, ref_g_opt, ref_c_opt, z, real)
    play(g, c, f, g_opt, c_opt, z.chunk(world)[rank], real.chunk(world)[rank])
    for m, r in ((generator, ref_g), (critic, ref_c), (frozen, ref_f)):
        for p, q in zip(m.parameters(), r.parameters(), strict=True):
            assert torch.allclose(p, q, atol=1e-5)


def test_a_gan_and_a_frozen_model_side_by_side() -> None:
    several_models()
    run(2, several_models)
    run(4, several_models)


def test_handle_of_a_model_is_its_type() -> None:
    assert type(accel.setup(net()).model) is ModelHandle
