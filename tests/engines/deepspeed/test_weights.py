"""Weights of ZeRO-3 outside of a forward: what reads one sees all of it or raises at once, on two real ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import accel
from accel.engines.deepspeed import DeepSpeed
from tests.distributed import run
from tests.engines.deepspeed.training import Pair, data
from tests.engines.deepspeed.training import momentum as sgd
from tests.measured import measured
from tests.models import distance

#: No weight stays whole, however small.
DIVIDED = DeepSpeed(stage=3, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}})
#: Each of these small ones does.
KEPT = DeepSpeed(stage=3)


class Net(nn.Module):
    """Weights that the forward reads by name, in a loop over all, and from a list; one is tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh())
        self.head = nn.Linear(7, 5)
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.listed = [self.body[2].bias, self.scale]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(self.body(x), self.head.weight.t())
        return self.tied(h) * sum(w.mean() for w in self.listed)

    def penalty(self) -> torch.Tensor:
        return 0.1 * sum(p.pow(2).sum() for p in self.parameters())


def pair_of(backend: Any) -> Pair:
    return Pair(backend, sgd, Net)


Use = Callable[[Any, nn.Parameter], Any]
#: What users do with a weight; ``m`` is a handle or a module, ``w`` its ``head.weight``.
READS: list[Use] = [
    lambda m, w: sum(p.pow(2).sum() for p in m.parameters()),
    lambda m, w: torch.zeros(5, 7).lerp_(w, 0.1),
    lambda m, w: m.scale.item(),
    lambda m, w: copy.deepcopy(w),
    lambda m, w: F.linear(torch.ones(2, 7), w),
]
#: What would be lost.
EDITS: list[Use] = [
    lambda m, w: nn.init.ones_(w),
    lambda m, w: w.data.clamp_(-0.1, 0.1),
    lambda m, w: setattr(w, "data", torch.zeros(5, 7)),
    lambda m, w: m.double(),
    lambda m, w: dist.all_reduce(w),
]
#: What does not look at values.
FACTS: list[Use] = [
    lambda m, w: (w.shape, w.size(), w.size(0), w.dim(), w.ndim, len(w), w.numel(), w.nelement(), w.nbytes),
    lambda m, w: (w.dtype, w.device, w.layout, w.is_leaf, w.requires_grad, w.is_floating_point()),
    lambda m, w: (w.stride(), w.is_contiguous(), w.element_size(), isinstance(w, nn.Parameter)),
    lambda m, w: (sum(p.numel() for p in m.parameters()), [tuple(p.shape) for p in m.parameters()]),
    lambda m, w: (torch.zeros_like(w).tolist(), torch.full_like(w, 2.0).device, w.new_zeros(3).tolist()),
    lambda m, w: (torch.randn_like(w, dtype=torch.float64).dtype, torch.empty_like(w).shape),
    lambda m, w: torch.optim.Adagrad(m.parameters()).state[w]["sum"].shape,
    lambda m, w: (w in {w}, {w: 1}[w], w is m.head.weight),
    lambda m, w: (setattr(w, "grad", None), w.grad, w.requires_grad_(True) is w, w.register_hook(print).remove()),
    lambda m, w: (m.to("cpu") is m, m.to(torch.float32) is m, m.float() is m),
    lambda m, w: repr(m),
]


MESSAGE = r"(head\.weight|scale|body\.0\.weight) is sharded, so .* outside of a forward"


def divided() -> None:
    pair = pair_of(DIVIDED)
    pair.train(range(2))
    raw, weight = pair.raw, pair.raw.head.weight
    if accel.rank() == 0:  # alone: nothing here waits for the other rank
        for use in READS + EDITS:
            with pytest.raises(accel.BackendError, match=MESSAGE):
                use(raw, weight)
        for number, use in enumerate(FACTS):
            assert use(raw, weight) == use(pair.plain, pair.plain.head.weight), number
    with torch.no_grad(), pytest.raises(accel.BackendError, match=MESSAGE):
        raw.body(torch.ones(5)) * raw.scale.sum()
    pair.train(range(2, 4))
    pair.check()


def test_a_use_of_a_divided_weight_raises_and_facts_about_it_are_right() -> None:
    run(2, divided, timeout=200.0)


def gathered() -> None:
    """All weights, in a forward, in methods, and in the library's own context, where they can be changed."""
    pair = pair_of(DIVIDED)
    pair.train(range(4), more=lambda model: model.penalty())
    with torch.no_grad():
        torch.testing.assert_close(pair.model.penalty(), pair.plain.penalty())
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(pair.model.parameters())):
        full = [p.detach().clone() for p in pair.model.parameters()]
        copied, value = copy.deepcopy(pair.raw.scale), pair.raw.scale.item()
    for mine, theirs in zip(full, pair.plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-5)
    assert type(copied) is nn.Parameter
    assert copied.item() == value
    mine, theirs = (
        torch.autograd.grad(m(data(9)[0]).square().mean(), [m.head.weight, *m.body.parameters()])
        for m in (pair.model, pair.plain)
    )
    torch.testing.assert_close(mine, theirs)
    pair.train(range(4, 6))
    pair.check()
    with deepspeed.zero.GatheredParameters([pair.raw.scale, pair.raw.head.weight], modifier_rank=0):
        if accel.rank() == 0:
            pair.raw.scale.data.mul_(2.0)
            pair.raw.head.weight.data.mul_(0.5)
    with torch.no_grad():
        pair.plain.scale.mul_(2.0)
        pair.plain.head.weight.mul_(0.5)
    pair.train(range(6, 8))
    pair.check()


def test_a_forward_a_method_and_deepspeeds_own_context_see_all_of_a_weight() -> None:
    run(2, gathered, timeout=200.0)


def kept() -> None:
    """Small weights stay whole between the steps: what reads one is right, and an edit is seen."""
    pair = pair_of(KEPT)
    pair.train(range(1))
    outside = lambda model: 0.1 * sum(p.pow(2).sum() for p in model.parameters())  # noqa: E731
    pair.train(range(1, 4), more=outside)
    torch.testing.assert_close(outside(pair.raw), outside(pair.plain))
    group = pair.raw.head.weight.ds_process_group
    before = group._get_sequence_number_for_group()
    pair.train(range(4, 5))
    # One for the gradients and one for all the weights.
    assert group._get_sequence_number_for_group() - before == 2
    pair.check()
    for model in (pair.raw, pair.plain):
        # WGAN clips like this, and an EMA is swapped in and out.
        model.head.weight.data.clamp_(-0.1, 0.1)
        model.scale.data = torch.ones(1)
        with torch.no_grad():
            model.body[0].weight.mul_(0.5)
    torch.testing.assert_close(pair.model(data(0)[0]), pair.plain(data(0)[0]))
    pair.check()
    pair.train(range(5, 7))
    pair.check()


def attention() -> None:
    """A module's forward reads the weights of its submodule, which it needs again in backward."""
    torch.manual_seed(0)
    plain, raw = (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
    raw.load_state_dict(plain.state_dict())
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=DIVIDED)
    reference = sgd(plain)
    for step in range(3):
        x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(step))
        for one in (optimizer, reference):
            one.zero_grad()
        model(x[accel.rank()]).square().mean().backward()
        plain(x.flatten(0, 1)).square().mean().backward()
        for one in (optimizer, reference):
            one.step()
    torch.testing.assert_close(dict(accel.full_state_dict(model)), dict(plain.state_dict()), atol=1e-5, rtol=0)


def test_weights_that_a_module_reads_from_its_submodule_are_there_in_backward() -> None:
    run(2, attention)


def test_weights_that_stay_whole_are_right_and_an_edit_of_their_data_is_seen() -> None:
    run(2, kept, timeout=200.0)


class Marked(nn.Parameter):
    """A class of the user's own."""


def classes() -> None:
    """The classes of weights are as before when the engine has gone, and a module can be divided again."""
    raw = Net()
    raw.mark = Marked(torch.ones(3))
    before = [(type(p), vars(p).copy()) for p in raw.parameters()]
    for backend in (DIVIDED, KEPT, DIVIDED):
        model, _, _ = accel.setup(raw, sgd(raw), backend=backend)
        model(data(0)[0])
        assert measured(model).parameters >= sum(p.nbytes for p in raw.parameters()) // 2
        accel.teardown(model)
        assert [(type(p), vars(p)) for p in raw.parameters()] == before
        assert raw.mark.sum() == 3


def test_classes_of_weights_are_as_before_after_teardown() -> None:
    run(2, classes, timeout=200.0)


def assigned(backend: Any) -> None:
    """Gradients that the loop computed by itself are stepped: the ranks' mean."""
    pair = pair_of(backend)
    pair.train(range(2))
    for optimizer, model, rank in ((pair.optimizer, pair.model, accel.rank()), (pair.plain_optimizer, pair.plain, 0.5)):
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.full(p.shape, 1.0 + rank)
        optimizer.step()
    pair.check()
    pair.train(range(2, 4))
    pair.check()


@pytest.mark.parametrize("backend", [DeepSpeed(stage=1), DeepSpeed(stage=2), KEPT], ids=lambda b: f"stage {b.stage}")
def test_assigned_gradients_are_stepped(backend: Any) -> None:
    run(2, assigned, backend, timeout=200.0)


def inputs(backend: Any) -> None:
    pair = pair_of(backend)
    for step in range(2):
        pair.optimizer.zero_grad()
        pair.plain_optimizer.zero_grad()
        pair.model(data(step)[accel.rank()]).square().mean().backward(inputs=[pair.model.head.weight])
        loss = torch.stack([pair.plain(x).square().mean() for x in data(step)]).mean()
        loss.backward(inputs=[pair.plain.head.weight])
        pair.optimizer.step()
        pair.plain_optimizer.step()
    pair.check()


@pytest.mark.parametrize("backend", [DIVIDED, KEPT], ids=["divided", "kept"])
def test_a_backward_for_some_weights_only(backend: Any) -> None:
    run(2, inputs, backend)


class Checkpointed(nn.Module):
    """Its own weight is needed before and after the backward that a reentrant checkpoint runs inside of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.inner, torch.tanh(x @ self.weight), use_reentrant=True)
        x = checkpoint(lambda v: self.inner(v) @ self.weight, x, use_reentrant=True)
        return x @ self.weight.T


def reentrant() -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 5), Checkpointed(), Checkpointed(), nn.Linear(5, 2))
    raw = copy.deepcopy(plain)
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=DIVIDED)
    plain_optimizer = sgd(plain)
    for step in range(3):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        model(data(step)[accel.rank()]).square().mean().backward()
        torch.stack([plain(x).square().mean() for x in data(step)]).mean().backward()
        optimizer.step()
        plain_optimizer.step()
    for name, value in accel.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=1e-5)


def test_a_reentrant_checkpoint_leaves_the_weights_of_the_backward_around_it() -> None:
    run(2, reentrant)


def strided() -> None:
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    net = nn.Sequential(conv, nn.Flatten(), nn.Linear(3 * 9, 4))
    net[2].weight = nn.Parameter(torch.randn(27, 4).t())  # type: ignore[union-attr]
    plain = copy.deepcopy(net)
    model, optimizer, _ = accel.setup(net, sgd(net), backend=DIVIDED)
    for one, its in ((plain, sgd(plain)), (model, optimizer)):
        for step in range(2):
            its.zero_grad()
            one(torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
            its.step()
    accel.teardown(model)
    assert distance(net.state_dict(), plain.state_dict()) < 1e-6


def test_weights_whose_memory_is_in_another_order_are_divided() -> None:
    run(2, strided)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.code = nn.Parameter(torch.tensor([2**31 + 3, 2**40 + 5]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * self.code.remainder(7)
        return out


def packed() -> None:
    net = Packed()
    plain = copy.deepcopy(net)
    model, optimizer, _ = accel.setup(net, sgd(net.inner), backend=accel.DeepSpeed(stage=3))
    for one, its in ((plain, sgd(plain.inner)), (model, optimizer)):
        one(torch.ones(2, 4)).square().mean().backward()
        its.step()
    assert net.code.dtype is torch.int64
    assert distance(accel.full_state_dict(model), plain.state_dict()) < 1e-6


def test_small_weights_of_integers_stay_what_they_are() -> None:
    run(2, packed)


def inferred() -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    plain = copy.deepcopy(net)
    model, optimizer, _ = accel.setup(net, sgd(net), backend=DIVIDED)
    for one, its in ((plain, sgd(plain)), (model, optimizer)):
        for step in range(3):
            its.zero_grad()
            one(data(step)).pow(2).mean().backward()
            its.step()
            with torch.inference_mode():
                one(data(step))
    accel.teardown(model)
    assert distance(net.state_dict(), plain.state_dict()) < 1e-6


def test_training_goes_on_after_a_forward_in_inference_mode() -> None:
    run(2, inferred)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(5, 5), torch.ones(5, 5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x @ self.weights[0] @ self.weights[1]  # whose backward needs the second one
        return out


def inferred_first() -> None:
    net = Listed()
    plain = copy.deepcopy(net)
    model, optimizer, _ = accel.setup(net, sgd(net), backend=accel.DeepSpeed(stage=3))
    with torch.inference_mode():
        model(data(0))
    for one, its in ((plain, sgd(plain)), (model, optimizer)):
        one(data(0)).pow(2).mean().backward()
        its.step()
    accel.teardown(model)
    assert distance(net.state_dict(), plain.state_dict()) < 1e-6


def test_a_list_of_weights_is_first_read_in_inference_mode() -> None:
    run(2, inferred_first)


def shown() -> None:
    raw = nn.Sequential(nn.EmbeddingBag(10, 5), nn.Linear(5, 2))
    plain = repr(nn.Sequential(nn.EmbeddingBag(10, 5), nn.Linear(5, 2)))
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend=DeepSpeed(stage=2))
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    assert repr(raw) == plain


def test_embedding_bag_can_be_shown() -> None:
    run(2, shown)


# -- what modules and methods return --------------------------------------------------------------------------------------


class Color(Enum):
    RED = 1


class Named(NamedTuple):
    y: Any
    n: int = 3


class Two(tuple[Any, ...]):
    def __new__(cls, y: Any, n: int) -> Two:
        return super().__new__(cls, (y, n))


@dataclass
class Open:
    y: Any
    n: int = 3


@dataclass(frozen=True, slots=True)
class Closed:
    y: Any
    n: int = 3


class Own:
    def __init__(self, y: Any) -> None:
        self.y = y


#: Without a tensor: every one comes back as it is.
VALUES: tuple[Any, ...] = (5, 0.5, "s", True, None, b"x", {1}, frozenset({2}), range(3), torch.float32, torch.device("cpu"),
    numpy.ones(2), {1: 2, (3,): {4}}, Color.RED, Closed(1), len, int, object(), torch.Size([2]))  # fmt: skip


#: Around a tensor, and how to get at it.
AROUND: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "numbers": (lambda y: {1: y, 2: None}, lambda out: out[1]),
    "named": (Named, lambda out: out.y),
    "subclass": (lambda y: Two(y, 2), lambda out: out[0]),
    "dataclass": (Open, lambda out: out.y),
    "frozen": (Closed, lambda out: out.y),
    "object": (Own, lambda out: out.y),
    "nested": (lambda y: [3, {"a": (Closed(y), "s")}], lambda out: out[1]["a"][0].y),
}


class Returning(nn.Module):
    """Its own weights are used after those of its child, so that they must be there again when backward comes to them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.child = nn.Linear(5, 5)
        self.w = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor, give: Callable[[Any], Any]) -> Any:
        return give(torch.tanh(self.child(x) @ self.w) @ self.w)

    def value(self, number: int) -> Any:
        return VALUES[number]

    def computed(self, x: torch.Tensor, give: Callable[[Any], Any]) -> Any:
        return self.forward(x, give)

    def estimate_mfu(self, seconds: float) -> float:
        return 6 * sum(p.numel() for p in self.parameters()) / seconds


def return_values() -> None:
    model, _, _ = accel.setup(Returning(), backend=DIVIDED)
    for number, value in enumerate(VALUES):
        assert model.value(number) is value
        assert model(torch.ones(2, 5), lambda y, value=value: value) is value
    assert model.estimate_mfu(0.5) == 12 * (25 + 5 + 25)


def return_tensors(name: str) -> None:
    (make, get), plain = AROUND[name], Returning()
    raw = Returning()
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), 0.1), backend=DIVIDED)
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(3):
        for module, opt in ((model, optimizer), (plain, reference)):
            opt.zero_grad()
            outs = [module(data(step)[0], make), module.computed(data(step)[1], make)]
            assert all(type(out) is type(make(0)) for out in outs)
            sum(get(out).square().mean() for out in outs).backward()
            opt.step()
    found = accel.full_state_dict(model)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5)


def test_modules_and_methods_return_any_value() -> None:
    run(2, return_values)


@pytest.mark.parametrize("name", AROUND)
def test_modules_and_methods_return_tensors_in_anything(name: str) -> None:
    run(2, return_tensors, name)
