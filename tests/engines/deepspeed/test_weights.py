"""Weights of ZeRO-3 outside of a forward: what reads one sees all of it or raises at once, on two real ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import accel
from accel.engines.deepspeed import DeepSpeed
from tests.distributed import run
from tests.engines.deepspeed.training import Pair, data, zero
from tests.engines.deepspeed.training import momentum as sgd
from tests.models import distance

#: Small weights stay gathered.
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
    lambda m, w: (w.shape, w.size(0), w.dim(), len(w), w.numel(), w.nbytes, w.stride(), w.is_contiguous()),
    lambda m, w: (w.dtype, w.device, w.is_leaf, w.requires_grad, isinstance(w, nn.Parameter), w is m.head.weight),
    lambda m, w: (w in {w}, {w: 1}[w], setattr(w, "grad", None), w.grad, w.requires_grad_(True) is w),
    lambda m, w: (m.to("cpu") is m, m.to(torch.float32) is m, m.float() is m, repr(m)),
]


MESSAGE = r"(head\.weight|scale|body\.0\.weight) is sharded, so .* outside of a forward"


def divided() -> None:
    pair = pair_of(zero(3))
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


def gathered() -> None:
    """All weights, in methods, in the library's own context, and for torch.autograd.grad."""
    pair = pair_of(zero(3))
    pair.train(range(3), more=lambda model: model.penalty())
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(pair.model.parameters())):
        full = [p.detach().clone() for p in pair.model.parameters()]
        copied, value = copy.deepcopy(pair.raw.scale), pair.raw.scale.item()
    assert distance(full, [p.detach() for p in pair.plain.parameters()]) <= 1e-5
    assert type(copied) is nn.Parameter
    assert copied.item() == value
    mine, theirs = (
        torch.autograd.grad(m(data(9)[0]).square().mean(), [m.head.weight, *m.body.parameters()])
        for m in (pair.model, pair.plain)
    )
    torch.testing.assert_close(mine, theirs)
    pair.train(range(6, 8))
    pair.check()


def kept() -> None:
    """Small weights stay gathered between the steps: what reads one is right, and an edit is seen."""
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


@pytest.mark.parametrize("program", [divided, gathered, kept], ids=lambda f: f.__name__)
def test_uses_of_weights(program: Any) -> None:
    run(2, program, timeout=200.0)


class Packed(nn.Module):
    """Integers among the weights, and a list of weights of which one is saved for the backward of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.tensor([2**31 + 3, 2**40 + 5]), requires_grad=False)
        self.listed = nn.ParameterList([torch.ones(5, 5), torch.ones(5, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x @ self.listed[0] @ self.listed[1] * self.code.remainder(7)
        return out


class Attention(nn.Module):
    """A module's forward reads the weights of its submodule, which it needs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(5, 1, 16, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[None])


def strided() -> nn.Module:
    """Weights whose memory is in another order: channels_last and transposed."""
    conv = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)
    linear = nn.Linear(3 * 12, 4)
    linear.weight = nn.Parameter(torch.randn(36, 4).t())
    return nn.Sequential(nn.Unflatten(0, (1, 1, 4)), conv, nn.Flatten(), linear)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "packed": Packed,
    "attention": Attention,
    "strided": strided,
}


def train_model(name: str, backend: Any) -> None:
    """Training goes on after a first forward, and others, in inference mode."""

    def build() -> nn.Module:
        torch.manual_seed(3)
        return MODELS[name]()

    pair = Pair(backend, lambda m: sgd(m), build)
    pair.raw.to(torch.float32)
    for step in range(3):
        with torch.inference_mode():
            torch.testing.assert_close(pair.model(data(9)[0]), pair.plain(data(9)[0]))
        pair.train(range(step, step + 1))
    pair.check()
    accel.teardown(pair.model)


KINDS = [*((name, zero(3)) for name in MODELS), ("strided", zero(2)), ("packed", zero(2)), ("packed", KEPT)]


@pytest.mark.parametrize(("name", "backend"), KINDS)
def test_models_with_other_weights(name: str, backend: Any) -> None:
    run(2, train_model, name, backend)


@dataclass(frozen=True, slots=True)
class Closed:
    y: Any
    n: int = 3


class Returning(nn.Module):
    """Uses its own weights after those of its child, so that backward needs them again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.child = nn.Linear(5, 5)
        self.w = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> Any:
        return [3, {1: (Closed(torch.tanh(self.child(x) @ self.w) @ self.w), "s")}]

    def computed(self, x: torch.Tensor) -> Any:
        return {"out": self.forward(x), 2: None}


def return_tensors() -> None:
    pair = Pair(zero(3), sgd, Returning)
    pair.train(forward=lambda m, x: m(x)[1][1][0].y + m.computed(-x)["out"][1][1][0].y)
    pair.check()


def test_modules_return_tensors_in_anything() -> None:
    run(2, return_tensors)
