"""Precisions: what the loop needs, what comes out, and fp16's one loss scale."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.precision import all_finite
from accel.registry import registry
from tests.device_reads import DeviceReads
from tests.distributed import run
from tests.models import adamw, distance, mlp, rows, sgd


def net(seed: int = 0) -> nn.Sequential:
    return mlp(6, 16, 3, seed=seed)


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return rows(10 * step + rank, 8, 6)


@dataclass
class Record:
    y: torch.Tensor
    rest: list[Any]


class Net(nn.Module):
    """Return several kinds of outputs. ``inside`` is the dtype of the layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inside: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> list[Any]:
        y = self.encode(x)
        return [y, Record(y, [y, 3, None]), {"y": (y, y.long())}, y.max(1)]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.inside = y.dtype
        return y


INSIDE = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_dtypes(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = INSIDE[precision.partition("-")[0]]
    stored = inside if precision.endswith("true") else torch.float32
    monkeypatch.setenv("ACCEL_PRECISION", precision)
    raw = Net()
    model = accel.setup(raw).model
    y, record, tree, largest = model(torch.randn(2, 4))
    assert raw.inside is inside
    tensors = [y, record.y, record.rest[0], *tree["y"], *largest]
    assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.int64}
    assert [type(record), type(largest)] == [Record, torch.return_types.max]
    raw.inside = None
    assert model.encode(torch.randn(2, 4)).dtype is torch.float32
    assert raw.inside is inside
    assert model.state_dict()["linear.weight"].dtype is stored
    assert accel.teardown(model).linear.weight.dtype is stored


def test_bf16_true() -> None:
    """The same as a bf16 model in plain torch, with the state of earlier steps."""
    raw, reference = net(), net()
    optimizer, plain = adamw(raw), adamw(reference)
    for m, o in ((raw, optimizer), (reference, plain)):
        m(batch(0)).square().mean().backward()
        o.step()
    model = accel.setup(raw, optimizer, precision="bf16-true").model
    assert optimizer.state[raw[0].weight]["exp_avg"].dtype is torch.bfloat16
    reference.bfloat16()
    plain.load_state_dict(plain.state_dict())
    for step in range(5):
        for m, o, x in ((model, optimizer, batch(step)), (reference, plain, batch(step).bfloat16())):
            o.zero_grad()
            m(x).float().square().mean().backward()
            o.step()
    accel.teardown(model)
    assert {p.dtype for p in raw.parameters()} == {torch.bfloat16}
    assert not distance(raw, reference)


# -- fp16 -----------------------------------------------------------------------------------------------------------------


def fp16_distance(accumulation: int, clip: bool, set_to_none: bool) -> float:
    """Return the distance to torch with a GradScaler, on the full batch in micro-batches."""
    world, rank = accel.world_size(), accel.rank()
    raw, reference = net(), net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend="ddp", precision="16-mixed")
    plain, scaler = sgd(reference), torch.amp.GradScaler("cpu")
    for step in range(6):
        plain.zero_grad(set_to_none)
        optimizer.zero_grad(set_to_none)
        for micro in range(accumulation):
            for r in range(world):
                with torch.autocast("cpu", torch.float16):
                    out = reference(batch(10 * step + micro, r)).float()
                scaler.scale(out.square().mean() / world / accumulation).backward()
            accel.backward(model(batch(10 * step + micro, rank)).square().mean() / accumulation)
        if clip:
            scaler.unscale_(plain)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            accel.clip_grad_norm_(model, 0.05)
        scaler.step(plain)
        scaler.update()
        optimizer.step()
    assert distance(reference, net()) > 1e-3
    accel.teardown(model)
    return distance(raw, reference)


@pytest.mark.parametrize("case", [(1, False, True), (3, True, True), (2, False, False)])
def test_fp16_is_torch_with_a_scaler(case: tuple[int, bool, bool]) -> None:
    assert max(fp16_distance(*case), *run(2, fp16_distance, *case)) < 2e-3


def plain_backward() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), precision="16-mixed")
    model(batch(0)).square().mean().backward()
    with pytest.raises(accel.PrecisionError, match=r"accel\.backward"):
        optimizer.step()
    with pytest.raises(accel.PrecisionError, match=r"plain loss\.backward"):
        accel.backward(model(batch(0)).square().mean())
    assert not distance(raw, net())
    optimizer.zero_grad(set_to_none=False)
    accel.backward(model(batch(0)).square().mean())
    optimizer.step()
    assert distance(raw, net()) > 0
    with pytest.raises(accel.PrecisionError, match="closure"):
        optimizer.step(lambda: torch.zeros(()))
    loose = torch.optim.SGD(raw.parameters(), lr=0.1)
    accel.backward(model(batch(0)).square().mean())
    with pytest.raises(accel.OptimizerError, match="not given"):
        loose.step()


def test_a_plain_backward_raises() -> None:
    plain_backward()
    run(2, plain_backward)


def overflow() -> None:
    """Only rank 0 overflows. All ranks skip, and so does an fp32 model before the fp16 one."""
    raws = nn.Linear(6, 6), net()
    first, first_optimizer, _ = accel.setup(raws[0], sgd(raws[0]))
    model, optimizer, _ = accel.setup(raws[1], adamw(raws[1]), precision="16-mixed")

    def train(factor: float) -> None:
        optimizer.zero_grad()
        first_optimizer.zero_grad()
        accel.backward(model(first(batch(0))).square().mean() * factor)
        nn.utils.clip_grad_value_(raws[1].parameters(), 0.5)  # replaces inf by 0.5
        optimizer.step()
        first_optimizer.step()

    train(1.0)
    scale = registry.loss_scale.value
    before = copy.deepcopy([each.state_dict() for each in (*raws, first_optimizer, optimizer)])
    train(1e35 if accel.rank() == 0 else 1.0)
    optimizer.step()  # the same gradients once more
    assert not distance([each.state_dict() for each in (*raws, first_optimizer, optimizer)], before)
    assert raws[1][0].weight.grad is not None
    assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (True, 2)
    train(1.0)
    assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (False, 2)
    assert registry.loss_scale.value == scale / 2
    assert distance(raws[1].state_dict(), before[1]) > 0


def test_an_overflow_on_one_rank() -> None:
    overflow()
    run(2, overflow)


def test_one_read_finds_an_overflow() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    optimizer = torch.optim.SGD([*parameters, nn.Parameter(torch.ones(0))], lr=0.1)
    for parameter in parameters[:3]:
        parameter.grad = torch.full_like(parameter, 3e38)  # their sum overflows
    with DeviceReads() as reads:
        assert all_finite(optimizer)
    assert reads.places.total() == 1
    for bad in (float("inf"), -float("inf"), float("nan")):
        parameters[1].grad = torch.tensor([1.0, bad, 1.0])
        assert not all_finite(optimizer)


def user_scaler(backend: str, precision: str) -> None:
    """A loop with a GradScaler, like a loop of raw torch. The second step overflows."""
    fused = precision == "16-mixed"
    pairs = [(raw, torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9, fused=fused)) for raw in (net(), net())]
    (raw, optimizer), (reference, _) = pairs
    model = accel.setup(raw, optimizer, backend=backend, precision=precision).model
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in pairs]
    for factor, skipped in ((1.0, 0), (1e38, 1), (1.0, 1)):
        for each, (_, stepped), scaler in zip((model, reference), pairs, scalers, strict=True):
            stepped.zero_grad(set_to_none=False)
            for micro_batch in batch(0).split(4):
                scaler.scale(each(micro_batch).square().mean() * factor / 2).backward()
            scaler.unscale_(stepped)
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            scaler.step(stepped)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert getattr(optimizer, "skipped_steps", skipped) == skipped
    assert scaler.get_scale() == 4.0
    assert distance(accel.full_state_dict(model), reference.state_dict()) < (1e-4 if fused else 1e-6)


@pytest.mark.parametrize(("backend", "precision"), [("ddp", "16-mixed"), ("ddp", "32-true"), ("fsdp", "32-true")])
def test_a_user_scaler_skips_steps(backend: str, precision: str) -> None:
    run(2, user_scaler, backend, precision)


def joint_loss() -> float:
    """A GAN whose generator step also leaves gradients in the critic. Models of 32-true take part in its loss."""
    torch.manual_seed(0)
    raws = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
    plain = copy.deepcopy(raws)
    kinds = ("16-mixed", "16-mixed", "32-true", "32-true")
    pairs: Any = [accel.setup(m, sgd(m), precision=k)[:2] for m, k in zip(raws, kinds, strict=True)]
    plain_pairs: Any = [(m, sgd(m)) for m in plain]

    def play(pairs: Any, backward: Any, rank: int, world: int) -> None:
        (g, g_opt), (c, c_opt), (e, e_opt), (frozen, _) = pairs
        for step in range(5):
            c_opt.zero_grad()
            e_opt.zero_grad(set_to_none=False)
            z = torch.cat([batch(step, r) for r in range(2)]).chunk(world)[rank]
            backward(F.softplus(c(e(frozen(g(z).detach())))).mean())
            c_opt.step()
            g_opt.zero_grad()
            backward(F.softplus(-c(e(frozen(g(z))))).mean())
            g_opt.step()
            e_opt.step()

    play(pairs, accel.backward, accel.rank(), accel.world_size())
    play(plain_pairs, lambda loss: loss.backward(), 0, 1)
    assert distance(raws[2], copy.deepcopy(plain[0])) > 1e-3
    return max(distance(m, p) for m, p in zip(raws, plain, strict=True))


def test_a_gan_beside_other_models() -> None:
    assert max(joint_loss(), *run(2, joint_loss)) < 5e-3


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_backward_takes_the_arguments_of_torch(precision: str) -> None:
    """All leaves get their true gradient: inputs and parameters that setup doesn't know."""
    raw, reference = net(), net()
    model = accel.setup(raw, sgd(raw), precision=precision).model
    x, z = (batch(0).requires_grad_(True) for _ in range(2))
    scale, true = (nn.Parameter(torch.ones(())) for _ in range(2))
    weights = torch.linspace(0.1, 1, 8)
    accel.backward((model(x) * scale).square().mean(1), weights, inputs=[x, scale, raw[0].weight])
    (reference(z) * true).square().mean(1).backward(weights, inputs=[z, true, reference[0].weight])
    found = [x.grad, scale.grad, raw[0].weight.grad]
    assert distance(found, [z.grad, true.grad, reference[0].weight.grad]) < 2e-3
    assert sum(p.grad is not None for p in raw.parameters()) == 1
    if precision == "16-mixed":
        with pytest.raises(accel.PrecisionError, match="loss scale"):
            accel.backward(model(batch(1)).square().mean(), create_graph=True)


def test_gradients_of_other_leaves_are_not_scaled() -> None:
    raw, weight = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    model, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), precision="16-mixed")
    for _ in range(2):
        accel.backward(model(torch.ones(1, 2)).sum() + (2 * weight).sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [4, 4]
