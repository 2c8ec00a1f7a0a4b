"""One engine for each model, from setup over freezing and switching to its end; nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import accel
from accel.registry import registry
from tests.distributed import refusals, run
from tests.engines.deepspeed.training import (
    STAGES,
    Net,
    Pair,
    adamw,
    data,
    loss_of,
    mean_loss,
    momentum,
    whole,
    zero,
)
from tests.models import FailingBackward, distance
from tests.programs import by_hand, free_port, scripts


def states(optimizer: Any) -> dict[str, torch.Tensor]:
    """A plain optimizer's state, flat."""
    found = optimizer.state_dict()["state"]
    return {f"{i}/{k}": torch.as_tensor(v) for i, s in found.items() for k, v in s.items()}


# -- one engine for each model ----------------------------------------------------------------------------------------


def evaluate_and_train(stage: int) -> None:
    raw, plain = Net(), Net()
    model, _, _ = accel.setup(raw, backend=zero(stage))
    x = data(99, 0)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x)["out"], plain(x)["out"])
    for _ in range(2):  # then training, with evaluation inside and after
        optimizer = adamw(raw)
        again, handle, _ = accel.setup(raw, optimizer, backend=zero(stage))
        assert again is model
        plain_optimizer = adamw(plain)
        for step in range(3):
            model.train()
            handle.zero_grad()
            plain_optimizer.zero_grad()
            first = loss_of(model(data(step, accel.rank())))
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(x)["out"], plain(x)["out"])
            first.backward()
            mean_loss(plain, lambda m, x: m(x), step).backward()
            with torch.no_grad():
                model(x)
            handle.step()
            plain_optimizer.step()
            with torch.no_grad():
                torch.testing.assert_close(model(x)["out"], plain(x)["out"])
        assert distance(whole(model), plain.state_dict()) <= 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_evaluate_then_train_and_back_on_one_engine(stage: int) -> None:
    run(2, evaluate_and_train, stage)


def two_optimizers(stage: int) -> None:
    """One of each class; then a third, and a group that is added."""
    raw, plain = Net(), Net()
    made = []
    for net in (raw, plain):
        made.append([
            torch.optim.SGD(net.body.parameters(), lr=0.05, momentum=0.9),
            torch.optim.AdamW(net.left.parameters(), lr=0.01, weight_decay=0.1),
        ])  # fmt: skip
    model, handles, _ = accel.setup(raw, made[0], backend=zero(stage))
    for step in range(6):
        if step == 2:
            handles[1].add_param_group({"params": list(raw.right.parameters()), "lr": 0.02})
            made[1][1].add_param_group({"params": list(plain.right.parameters()), "lr": 0.02})
        if step == 4:
            for net, optimizers in zip((raw, plain), made, strict=True):
                optimizers.append(torch.optim.RMSprop([net.scale], lr=0.01))
            handles.append(accel.setup(raw, made[0][2])[1])
        for net, optimizers in ((model, handles), (plain, made[1])):
            for optimizer in optimizers:
                optimizer.zero_grad()
            rank = accel.rank()
            (loss_of(net(data(step, rank))) if net is model else mean_loss(plain, lambda m, x: m(x), step)).backward()
            for optimizer in optimizers[: 1 + step % 3]:
                optimizer.step()
    assert distance(whole(model), plain.state_dict()) <= 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_several_optimizers_and_added_groups(stage: int) -> None:
    run(2, two_optimizers, stage)


def gan(first: Any, second: Any) -> None:
    raw, plain = [Net(1), Net(2)], [Net(1), Net(2)]
    head = nn.Linear(3, 5)
    models, optimizers = [], []
    for net, backend in zip(raw, (first, second), strict=True):
        model, optimizer, _ = accel.setup(net, adamw(net), backend=backend)
        models.append(model)
        optimizers.append(optimizer)
    plain_optimizers = [adamw(net) for net in plain]

    def step(g: Any, d: Any, og: Any, od: Any, batches: Any) -> None:
        od.zero_grad()
        for x in batches:
            fake = F.linear(g(x)["out"], head.weight.detach())
            ((d(fake.detach())["out"].mean() - loss_of(d(x))) / len(batches)).backward()
        od.step()
        og.zero_grad()
        for x in batches:
            (loss_of(d(F.linear(g(x)["out"], head.weight.detach()))) / len(batches)).backward()
        og.step()

    with torch.no_grad():
        dist.broadcast(head.weight, 0)
    for number in range(4):
        step(*models, *optimizers, [data(number, accel.rank())])
        step(*plain, *plain_optimizers, list(data(number)))
    for model, net in zip(models, plain, strict=True):
        assert distance(whole(model), net.state_dict()) <= 1e-5


@pytest.mark.parametrize("pair", [(1, 1), (2, 2), (3, 3), ("ddp", 3), (1, 3), (3, 2)], ids=str)
def test_two_models_that_train_each_other(pair: Any) -> None:
    run(2, gan, *(p if isinstance(p, str) else zero(p) for p in pair))


def rlhf() -> None:
    """Actor and critic train on one joint loss; reference and reward are frozen. All four under ZeRO-3."""
    raw, plain = [Net(i) for i in range(4)], [Net(i) for i in range(4)]
    for net in (*raw[2:], *plain[2:]):
        net.requires_grad_(False)
    optimizers = [adamw(net) for net in raw[:2]]
    handles = [accel.setup(n, o, backend=zero(3)) for n, o in zip(raw[:2], optimizers, strict=True)]
    models = [h.model for h in handles] + [accel.setup(n, backend=zero(3)).model for n in raw[2:]]
    plain_optimizers = [adamw(net) for net in plain[:2]]

    def loss(nets: Any, x: torch.Tensor) -> torch.Tensor:
        actor, critic, reference, reward = (n(x)["out"] for n in nets)
        return (actor - reference.detach()).square().mean() + (critic - reward).abs().mean() + (actor * critic).mean()

    before = whole(models[2])
    for step in range(4):
        for h in handles:
            h.optimizers.zero_grad()
        for o in plain_optimizers:
            o.zero_grad()
        loss(models, data(step, accel.rank())).backward()
        torch.stack([loss(plain, x) for x in data(step)]).mean().backward()
        for h in handles:
            h.optimizers.step()
        for o in plain_optimizers:
            o.step()
    for model, net in zip(models, plain, strict=True):
        assert distance(whole(model), net.state_dict()) <= 1e-5
    assert distance(before, whole(models[2])) == 0


def test_actor_critic_reference_and_reward() -> None:
    run(2, rlhf)


# -- trainability, teardown, switching --------------------------------------------------------------------------------


def freeze_and_unfreeze(stage: int) -> None:
    """Frozen at setup, unfrozen later, and back; what is frozen stays put, its state is kept."""
    pair = Pair(zero(stage))
    for number in range(6):
        for net in (pair.raw, pair.plain):
            for name, p in net.named_parameters():
                p.requires_grad_(name.startswith(("left", "scale")) if number in (0, 3) else number != 4 or "2" in name)
        frozen = {n for n, p in pair.plain.named_parameters() if not p.requires_grad}
        before = whole(pair.model)
        pair.train(range(2 * number, 2 * number + 2))
        after = whole(pair.model)
        for name in before:
            assert torch.equal(before[name], after[name]) == (name in frozen), name
        pair.check()


def frozen_at_setup(stage: int) -> None:
    raw, plain = Net(), Net()
    for net in (raw, plain):
        net.body.requires_grad_(False)
    optimizers = adamw(raw), adamw(plain)
    model, handle, _ = accel.setup(raw, optimizers[0], backend=zero(stage))
    for step in range(6):
        if step == 3:
            model.body.requires_grad_(True)
            plain.body.requires_grad_(True)
        handle.zero_grad()
        optimizers[1].zero_grad()
        loss_of(model(data(step, accel.rank()))).backward()
        mean_loss(plain, lambda m, x: m(x), step).backward()
        handle.step()
        optimizers[1].step()
    assert distance(whole(model), plain.state_dict()) <= 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_trainability_may_change_at_any_time(stage: int) -> None:
    run(2, freeze_and_unfreeze, stage)
    run(2, frozen_at_setup, stage)


def switching() -> None:
    """Through every stage and other backends, optimizer state and pending gradients included."""
    raw, plain = Net(), Net()
    optimizers = adamw(raw), adamw(plain)
    before = {name: set(vars(m)) for name, m in raw.named_modules()}
    parameters = list(raw.parameters())
    for number, backend in enumerate([zero(3), "ddp", zero(1), zero(2), zero(3), zero(2), "ddp"]):
        model, handle, _ = accel.setup(raw, optimizers[0], backend=backend)
        for step in range(2):
            # The first step of each engine uses gradients that the last one left.
            if step:
                handle.zero_grad()
                optimizers[1].zero_grad()
            loss_of(model(data(2 * number + step, accel.rank()))).backward()
            mean_loss(plain, lambda m, x: m(x), 2 * number + step).backward()
            handle.step()
            optimizers[1].step()
        assert accel.teardown(model) is raw
        assert all(p is q and p.grad is not None for p, q in zip(raw.parameters(), parameters, strict=True))
        assert {name: set(vars(m)) for name, m in raw.named_modules()} == before
        assert not any(vars(p) for p in parameters)
        assert type(raw._parameters) is dict
        for module in raw.modules():
            tables = [v for k, v in vars(module).items() if k.endswith("_hooks")]
            assert tables
            assert not any(tables)
        assert "step" not in vars(optimizers[0])
        assert "zero_grad" not in vars(optimizers[0])
        assert distance(raw.state_dict(), plain.state_dict()) <= 1e-5
        assert distance(states(optimizers[0]), states(optimizers[1])) <= 1e-5
        for p, q in zip(raw.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=0)


def test_switch_to_and_from_every_stage_in_training() -> None:
    run(2, switching)


def collected(stage: int) -> None:
    """The last reference to model and optimizer frees the engine and the weights."""
    pair = Pair(zero(stage))
    pair.train()
    alive = [weakref.ref(pair.raw), weakref.ref(registry.find_engine(pair.model)), weakref.ref(pair.raw.left.weight)]
    del pair
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_dies_with_its_model(stage: int) -> None:
    run(2, collected, stage)


# -- errors, exit, and the library alone ------------------------------------------------------------------------------


def exceptions(stage: int) -> None:
    """In forward, in backward, in step: the engine goes on after zero_grad."""
    pair = Pair(zero(stage))
    pair.train()
    x = data(50, accel.rank())

    def fail(*_: Any) -> None:
        raise ValueError("boom")

    hook = pair.raw.left.register_forward_hook(fail)
    with pytest.raises(ValueError, match="boom"):
        pair.model(x)
    hook.remove()
    pair.train()
    by_handle, around_it = (lambda m, x: m(x)), (lambda m, x: accel.unwrap(m)(x))
    for forward in (by_handle, around_it):  # the next one
        hook = pair.raw.body[1].register_forward_hook(lambda m, a, out: FailingBackward.apply(out))
        loss = loss_of(pair.model(x))
        hook.remove()
        with pytest.raises(ZeroDivisionError, match="this backward fails"):
            loss.backward()
        if stage > 1:  # stage 1 has reduced nothing yet, so nothing is incomplete
            with pytest.raises(accel.BackendError, match="zero_grad"):
                pair.optimizer.step()
        pair.train(forward=forward if stage < 3 else by_handle)
    hook = pair.raw_optimizer.register_step_pre_hook(fail)
    pair.optimizer.zero_grad()
    loss_of(pair.model(x)).backward()
    with pytest.raises(ValueError, match="boom"):
        pair.optimizer.step()
    hook.remove()
    assert pair.raw_optimizer.param_groups[0]["params"][0] is next(pair.raw.parameters())
    pair.train()
    pair.check()


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_leaves_a_usable_engine(stage: int) -> None:
    run(2, exceptions, stage)


def interrupted(stage: int) -> None:
    """Gradients are dropped before the next backward or before its forward; those of a backward that ended well are kept."""
    pair = Pair(zero(stage))
    hook = pair.raw.body[1].register_forward_hook(lambda m, a, out: FailingBackward.apply(out))
    loss = loss_of(pair.model(data(0, accel.rank())))
    hook.remove()
    with pytest.raises(ZeroDivisionError, match="this backward fails"):
        loss.backward()
    loss = loss_of(pair.model(data(0, accel.rank())))
    if stage > 1:
        with pytest.raises(accel.BackendError, match="are incomplete"):
            loss.backward()
        loss = loss_of(pair.model(data(0, accel.rank())))
    pair.optimizer.zero_grad()
    loss.backward()
    mean_loss(pair.plain, lambda m, x: m(x), 0).backward()
    with pytest.raises((TypeError, AttributeError)):
        pair.model(None)
    loss_of(pair.model(data(1, accel.rank()))).backward()
    mean_loss(pair.plain, lambda m, x: m(x), 1).backward()
    pair.optimizer.step()
    pair.plain_optimizer.step()
    pair.check()


def zeroed_after_an_exception(stage: int) -> None:
    """What ``zero_grad(set_to_none=False)`` leaves of a backward that failed is dropped too."""
    pair = Pair(zero(stage))
    for fails in (True, False):
        pair.optimizer.zero_grad(set_to_none=False)
        hook = pair.raw.body[1].register_forward_hook(lambda m, a, out: FailingBackward.apply(out))
        if not fails:
            hook.remove()
        loss = loss_of(pair.model(data(0, accel.rank())))
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            loss.backward()
        hook.remove()
    mean_loss(pair.plain, lambda m, x: m(x), 0).backward()
    pair.optimizer.step()
    pair.plain_optimizer.step()
    pair.check()


def zeroed_without_a_forward(stage: int, steps: bool) -> None:
    """What a backward that failed left half-way is cleared also where no forward comes before a step or the end."""
    pair = Pair(zero(stage))
    pair.train()
    hook = pair.raw.body[1].register_forward_hook(lambda m, a, out: FailingBackward.apply(out))
    loss = loss_of(pair.model(data(0, accel.rank())))
    hook.remove()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.zero_grad(set_to_none=False)
        if steps:
            optimizer.step()
    raw = accel.teardown(pair.model)
    assert distance(raw.state_dict(), pair.plain.state_dict()) <= 1e-5
    assert not any(p.grad is not None and p.grad.any() for p in raw.parameters())


def stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def cut_reduction(stage: int) -> None:
    """A reduction is stopped, in the step at stage 1: its gradients are refused until they are dropped."""
    pair = Pair(zero(stage))
    pair.train(range(1))
    loss_of(pair.model(data(1, accel.rank()))).backward()
    pair.optimizer.zero_grad()
    parts = registry.find_engine(pair.model).zero
    loss = loss_of(pair.model(data(1, accel.rank())))
    if stage == 1:
        loss.backward()
    with mock.patch.object(type(parts), "finish", stop), pytest.raises(KeyboardInterrupt):
        (loss.backward if stage > 1 else pair.optimizer.step)()
    loss = loss_of(pair.model(data(2, accel.rank())))
    if stage == 1:
        loss.backward()
    with pytest.raises(accel.BackendError, match="are incomplete"):
        (loss.backward if stage > 1 else pair.optimizer.step)()
    pair.optimizer.zero_grad()
    pair.train(range(1, 3))
    pair.check()


def cut_spread(stage: int) -> None:
    """A step is stopped while the ranks give each other what they have stepped: the next forward has all of it."""
    pair = Pair(zero(stage))
    pair.train(range(1))
    parts = registry.find_engine(pair.model).zero
    with mock.patch.object(type(parts), "gather", stop), pytest.raises(KeyboardInterrupt):
        pair.train(range(1, 2))
    pair.plain_optimizer.step()
    pair.train(range(2, 4))
    pair.check()


@pytest.mark.parametrize("stage", STAGES)
def test_steps_that_are_interrupted(stage: int) -> None:
    run(2, cut_reduction, stage)
    run(2, cut_spread, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_after_an_exception(stage: int) -> None:
    run(2, interrupted, stage)
    run(2, zeroed_after_an_exception, stage)
    run(2, zeroed_without_a_forward, stage, False)
    run(2, zeroed_without_a_forward, stage, True)


def other_branches(stage: int) -> None:
    pair = Pair(zero(stage))
    left = accel.rank() == 0
    loss_of(pair.model(data(0, accel.rank()), left=left, right=not left)).backward()
    pair.optimizer.step()
    mean = torch.stack([loss_of(pair.plain(x, left=i == 0, right=i != 0)) for i, x in enumerate(data(0))]).mean()
    mean.backward()
    pair.plain_optimizer.step()
    pair.check()


def test_processes_that_use_other_parameters() -> None:
    """Exact at stage 1; an error on every rank where gradients are reduced as they come."""
    run(2, other_branches, 1)
    refusals(2, other_branches, 2, error="RankMismatchError", breaks=True)


def validate_then_fit() -> None:
    """Lightning #17523: a validation before training sets the model up, the training sets it up again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    plain = copy.deepcopy(net)
    optimizers = momentum(net), momentum(plain)
    with torch.no_grad():
        accel.setup(net, backend=zero(3)).model(data(0, 0))
    model, optimizer, _ = accel.setup(net, optimizers[0], backend=zero(3))
    for step in range(3):
        optimizer.zero_grad()
        optimizers[1].zero_grad()
        model(data(step, accel.rank())).square().mean().backward()
        mean_loss(plain, lambda m, x: m(x), step).backward()
        optimizer.step()
        optimizers[1].step()
        with torch.no_grad():
            torch.testing.assert_close(model(data(9, 0)), plain(data(9, 0)))


def test_validation_before_training() -> None:
    run(2, validate_then_fit)


def other_linears() -> None:
    """DeepSpeed alone replaces ``torch.nn.functional.linear`` for every model, and leaves it so."""
    before = F.linear
    pair = Pair(zero(3))
    own = importlib.import_module("deepspeed.runtime.zero.linear")
    with mock.patch.object(own, "zero3_linear_wrap", wraps=own.zero3_linear_wrap) as counted:
        pair.train(range(1))
        assert counted.call_count == 4  # of the model
        nn.Linear(2, 1)(torch.ones(1, 2))
        assert counted.call_count == 4
    accel.teardown(pair.model)
    del pair
    gc.collect()
    assert F.linear is before


def test_other_models_keep_their_linear_function() -> None:
    run(2, other_linears)


SCRIPT = """
import sys, torch, accel
from torch import nn
assert not any(name.startswith("deepspeed") for name in sys.modules)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(net.parameters())
model, optimizer, _ = accel.setup(net, optimizer, backend=accel.DeepSpeed(stage=3))
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    if step == {step} and accel.rank() == 0:
        raise KeyError("in the middle")
    optimizer.step()
print("done")
"""


def start(step: int) -> list[tuple[int, str, str]]:
    """Status, output and errors of two processes that end without a clean-up; one fails in ``step``."""
    port = free_port()
    environs = [by_hand(rank, 2, port) | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
    results = scripts(SCRIPT.format(step=step), *environs, check=False)
    return [(result.returncode, result.stdout, result.stderr) for result in results]


def test_a_script_ends_quietly_and_a_failing_one_on_every_rank() -> None:
    assert start(-1) == [(0, "done\n", "")] * 2
    first, second = start(1)
    assert first[0] != 0
    assert "KeyError: 'in the middle'" in first[2]
    assert second[0] != 0
    assert "rank 0 ended with KeyError" in second[2]


def count_groups() -> list[int]:
    counts = []
    for _ in range(2):
        raw = Net()
        model, optimizer, _ = accel.setup(raw, adamw(raw), backend=zero(2))
        loss_of(model(data(0, dist.get_rank()))).backward()
        optimizer.step()
        accel.teardown()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_a_process_group_of_the_users_own_is_all_that_is_left() -> None:
    """DeepSpeed makes a copy of it for good, and each has threads that wake up a hundred times a second."""
    assert run(2, count_groups) == [[1, 1]] * 2


SEPARATE = """
import accel, torch
from torch import nn
for stage in (1, 2, 3):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model, optimizer, _ = accel.setup(net, torch.optim.AdamW(net.parameters()), backend=accel.DeepSpeed(stage=stage))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    accel.teardown(model)
    accel.print("trained", stage)
"""


def test_processes_without_a_common_parent_train() -> None:
    """Hashes of objects differ between such processes, and ranks must not compare them."""
    port = free_port()
    first, _ = scripts(SEPARATE, by_hand(0, 2, port), by_hand(1, 2, port))
    trained = [line for line in first.stdout.splitlines() if line.startswith("trained")]
    assert trained == ["trained 1", "trained 2", "trained 3"]
