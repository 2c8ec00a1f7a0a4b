"""Precisions: what the loop needs, what comes out, and fp16's one loss scale."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.precision import all_finite
from accel.registry import registry
from tests.device_reads import DeviceReads
from tests.distributed import run
from tests.models import distance, mlp, rows, sgd


def net(seed: int = 0) -> nn.Sequential:
    return mlp(6, 16, 3, seed=seed)


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return rows(10 * step + rank, 8, 6)


# -- outputs --------------------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    y: torch.Tensor
    label: str


@dataclass
class Record:
    y: torch.Tensor
    rest: list[Any]


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> list[Any]:
        y = self.encode(x)
        return [y, Named(y, "a"), Record(y, [y, 3, None]), {"y": (y, y.long())}, y.max(1)]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.seen = y.dtype
        return y

    def weight(self) -> torch.Tensor:
        return self.linear.weight


@pytest.mark.parametrize(
    ("precision", "inside", "stored"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("16-mixed", torch.float16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("16-true", torch.float16, torch.float16),
    ],
)
def test_dtypes(precision: str, inside: torch.dtype, stored: torch.dtype) -> None:
    raw = Many()
    model = accel.setup(raw, precision=precision).model
    y, named, record, tree, largest = model(torch.randn(2, 4))
    assert raw.seen is inside
    tensors = [y, named.y, record.y, record.rest[0], *tree["y"], *largest]
    assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.int64}
    assert [type(named), type(record), type(largest)] == [Named, Record, torch.return_types.max]
    raw.seen = None
    assert model.encode(torch.randn(2, 4)).dtype is torch.float32
    assert raw.seen is inside
    assert model.weight() is raw.linear.weight
    assert model.state_dict()["linear.weight"].dtype is stored
    assert accel.teardown(model).linear.weight.dtype is stored


def test_the_environment_is_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_PRECISION", "bf16-mixed")
    monkeypatch.setenv("ACCEL_BACKEND", "ddp")
    engine = registry.find_engine(accel.setup(net()).model)
    assert (engine.name, engine.precision.name) == ("ddp", "bf16-mixed")
    engine = registry.find_engine(accel.setup(net(), backend="single", precision="32-true").model)
    assert (engine.name, engine.precision.name) == ("single", "32-true")
    monkeypatch.setenv("ACCEL_BACKEND", "auto")
    assert registry.find_engine(accel.setup(net()).model).name == "single"
    monkeypatch.setenv("ACCEL_BACKEND", "dpd")
    with pytest.raises(accel.BackendError, match="dpd"):
        accel.setup(net())
    monkeypatch.delenv("ACCEL_BACKEND")
    monkeypatch.setenv("ACCEL_PRECISION", "fp4")
    with pytest.raises(accel.PrecisionError, match="fp4"):
        accel.setup(net())


def test_bf16_true() -> None:
    """The same as a bf16 model in plain torch, with the state of earlier steps."""
    raw, reference = net(), net()
    optimizer, plain = torch.optim.AdamW(raw.parameters(), lr=0.01), torch.optim.AdamW(reference.parameters(), lr=0.01)
    for m, o in ((raw, optimizer), (reference, plain)):
        m(batch(0)).square().mean().backward()
        o.step()
    model, handle, _ = accel.setup(raw, optimizer, precision="bf16-true")
    assert optimizer.state[raw[0].weight]["exp_avg"].dtype is torch.bfloat16
    reference.bfloat16()
    plain.load_state_dict(plain.state_dict())
    for step in range(5):
        handle.zero_grad()
        model(batch(step)).square().mean().backward()
        handle.step()
        plain.zero_grad()
        reference(batch(step).bfloat16()).float().square().mean().backward()
        plain.step()
    accel.teardown(model)
    assert {p.dtype for p in raw.parameters()} == {torch.bfloat16}
    assert not distance(raw, reference)


# -- fp16 -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A loop with ``accel.backward``, or with the user's own GradScaler."""

    accumulation: int = 1
    clip: bool = False
    set_to_none: bool = True
    own_scaler: bool = False


LOOPS = [
    Loop(),
    Loop(accumulation=3, clip=True),
    Loop(accumulation=2, set_to_none=False),
    Loop(own_scaler=True, clip=True),
    Loop(own_scaler=True, accumulation=3, set_to_none=False),
]


def fp16_beside_torch(loop: Loop) -> float:
    """Return the distance to torch with a GradScaler, on the full batch in micro-batches."""
    world, rank = accel.world_size(), accel.rank()
    raw, reference = net(), net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), backend="ddp", precision="16-mixed")
    plain, scaler, users = sgd(reference), torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for step in range(6):
        plain.zero_grad(set_to_none=loop.set_to_none)
        optimizer.zero_grad(set_to_none=loop.set_to_none)
        for micro in range(loop.accumulation):
            for r in range(world):
                with torch.autocast("cpu", torch.float16):
                    out = reference(batch(10 * step + micro, r)).float()
                scaler.scale(out.square().mean() / world / loop.accumulation).backward()
            loss = model(batch(10 * step + micro, rank)).square().mean() / loop.accumulation
            users.scale(loss).backward() if loop.own_scaler else accel.backward(loss)
        if loop.clip:
            scaler.unscale_(plain)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            if loop.own_scaler:
                users.unscale_(optimizer)
                nn.utils.clip_grad_norm_(raw.parameters(), 0.05)
            else:
                accel.clip_grad_norm_(model, 0.05)
        scaler.step(plain)
        scaler.update()
        if loop.own_scaler:
            users.step(optimizer)
            users.update()
        else:
            optimizer.step()
    assert distance(reference, net()) > 1e-3
    accel.teardown(model)
    return distance(raw, reference)


def all_loops() -> list[float]:
    return [fp16_beside_torch(loop) for loop in LOOPS]


@pytest.mark.parametrize("world", [1, 2])
def test_fp16_is_torch_with_a_scaler(world: int) -> None:
    for distances in run(world, all_loops):
        assert max(distances) < 2e-3, distances


def plain_backward() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, sgd(raw), precision="16-mixed")
    inner = optimizer
    before = copy.deepcopy(raw.state_dict())
    for stepped in (optimizer, inner):
        optimizer.zero_grad()
        model(batch(0)).square().mean().backward()
        with pytest.raises(accel.PrecisionError, match=r"accel\.backward"):
            stepped.step()
    with pytest.raises(accel.PrecisionError, match=r"plain loss\.backward"):
        accel.backward(model(batch(0)).square().mean())
    assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items())
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


def test_a_plain_backward_raises_at_the_step() -> None:
    plain_backward()
    run(2, plain_backward)


def overflow() -> None:
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters(), lr=0.01), precision="16-mixed")
    inner = optimizer

    def train(factor: float, stepped: Any) -> None:
        optimizer.zero_grad()
        accel.backward(model(batch(0)).square().mean() * factor)
        nn.utils.clip_grad_value_(raw.parameters(), 0.5)  # which makes 0.5 of inf
        stepped.step()

    train(1.0, optimizer)
    scale = registry.loss_scale.value
    before = copy.deepcopy((raw.state_dict(), optimizer.state_dict()))
    # Only one rank overflows; all skip.
    for stepped in (optimizer, inner):
        train(1e35 if accel.rank() == 0 else 1.0, stepped)
        stepped.step()  # once more with what overflowed
        assert all(torch.equal(v, before[0][k]) for k, v in raw.state_dict().items())
        assert repr(optimizer.state_dict()) == repr(before[1])
        assert raw[0].weight.grad is not None
        assert optimizer.step_was_skipped
    train(1.0, inner)
    assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (False, 4)
    assert registry.loss_scale.value == scale / 4
    assert distance(raw, net()) > 0
    assert all(bool(p.isfinite().all()) for p in raw.parameters())


def test_an_overflow_on_one_rank() -> None:
    overflow()
    run(2, overflow)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_one_read_finds_an_overflow(bad: float) -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(24)]
    optimizer = torch.optim.SGD([*parameters, nn.Parameter(torch.ones(0))], lr=0.1)
    for parameter in parameters[:20]:
        parameter.grad = torch.full_like(parameter, 3e38)
    with DeviceReads() as reads:
        assert all_finite(optimizer)
    assert reads.places.total() == 1
    for parameter in parameters[:20]:
        before, parameter.grad = parameter.grad, torch.tensor([1.0, bad, 1.0])
        assert not all_finite(optimizer)
        parameter.grad = before
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    wide.grad = torch.full_like(wide, 1e300)  # it would overflow in the dtype of the others
    optimizer.add_param_group({"params": [wide]})
    assert all_finite(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_is_seen_on_the_handle(fused: bool) -> None:
    raw = net()
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01, fused=fused)
    model, handle, _ = accel.setup(raw, optimizer, precision="16-mixed")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor, seen in ((1.0, (False, 0)), (1e38, (True, 1)), (1.0, (False, 1)), (1e38, (True, 2))):
        before = copy.deepcopy(raw.state_dict())
        handle.zero_grad()
        scaler.scale(model(batch(0)).square().mean() * factor).backward()
        scaler.step(handle)
        scaler.update()
        assert (handle.step_was_skipped, handle.skipped_steps) == seen
        assert all(torch.equal(v, before[k]) for k, v in raw.state_dict().items()) == seen[0]


def joint_loss() -> float:
    """A GAN whose generator step also leaves gradients in the critic; 32-true models take part in the same loss."""
    torch.manual_seed(0)
    raws = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 6)
    plain = copy.deepcopy(raws)
    kinds = ("16-mixed", "16-mixed", "32-true")
    pairs = [accel.setup(m, sgd(m), precision=k)[:2] for m, k in zip(raws, kinds, strict=True)]
    plain_pairs = [(m, sgd(m)) for m in plain]

    def play(pairs: Any, backward: Any, rank: int, world: int) -> None:
        (g, g_opt), (c, c_opt), (e, e_opt) = pairs
        for step in range(5):
            c_opt.zero_grad()
            e_opt.zero_grad(set_to_none=False)
            z = torch.cat([batch(step, r) for r in range(2)]).chunk(world)[rank]
            backward(F.softplus(c(e(g(z).detach()))).mean())
            c_opt.step()
            g_opt.zero_grad()
            backward(F.softplus(-c(e(g(z)))).mean())
            g_opt.step()
            e_opt.step()

    play(pairs, accel.backward, accel.rank(), accel.world_size())
    play(plain_pairs, lambda loss: loss.backward(), 0, 1)
    assert distance(raws[2], copy.deepcopy(plain[0])) > 1e-3
    return max(distance(m, p) for m, p in zip(raws, plain, strict=True))


def test_one_loss_scale_serves_several_models() -> None:
    assert joint_loss() < 5e-3
    assert max(run(2, joint_loss)) < 5e-3


def test_every_leaf_gets_its_true_gradient() -> None:
    raw, reference = net(), net()
    model = accel.setup(raw, sgd(raw), precision="16-mixed").model
    temperature, latent = nn.Parameter(torch.ones(())), torch.ones(8, 6, requires_grad=True)
    own = torch.optim.SGD([temperature], lr=0.1)
    accel.backward((model(batch(0) + latent) * temperature).square().mean())
    t, z = torch.ones((), requires_grad=True), torch.ones(8, 6, requires_grad=True)
    (reference(batch(0) + z) * t).square().mean().backward()
    for mine, true in ((temperature, t), (latent, z), (raw[0].weight, reference[0].weight)):
        assert mine.grad is not None
        assert true.grad is not None
        assert torch.allclose(mine.grad, true.grad, atol=2e-3)
    own.step()
    assert 0 < float((temperature - 1).detach().abs()) < 1


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # torch's, about create_graph
def test_backward_takes_the_arguments_of_torchs() -> None:
    for precision in ("32-true", "16-mixed"):
        raw, reference = net(), net()
        model, optimizer, _ = accel.setup(raw, sgd(raw), precision=precision)
        x, z = batch(0).requires_grad_(True), batch(0).requires_grad_(True)
        weights = torch.linspace(0.1, 1, 8)
        accel.backward(model(x).square().mean(1), weights, inputs=[x, raw[0].weight])
        reference(z).square().mean(1).backward(weights, inputs=[z, reference[0].weight])
        for mine, true in ((x, z), (raw[0].weight, reference[0].weight)):
            assert mine.grad is not None
            assert true.grad is not None
            assert torch.allclose(mine.grad, true.grad, atol=2e-3)
        assert sum(p.grad is not None for p in raw.parameters()) == 1
        optimizer.zero_grad()
        loss = model(batch(1)).square().mean()
        if precision == "16-mixed":
            with pytest.raises(accel.PrecisionError, match="loss scale"):
                accel.backward(loss, create_graph=True)
            assert all(p.grad is None for p in raw.parameters())
        else:
            accel.backward(loss, create_graph=True)
            assert raw[0].weight.grad is not None
            assert raw[0].weight.grad.requires_grad
            for p in raw.parameters():
                p.grad = None
        accel.teardown(model)


def overflow_beside_fp32() -> None:
    raws = nn.Linear(6, 6), nn.Linear(6, 1)
    (g, g_opt, _), (d, d_opt, _) = (
        accel.setup(m, sgd(m), precision=k) for m, k in zip(raws, ("32-true", "16-mixed"), strict=True)
    )
    before = copy.deepcopy([m.state_dict() for m in raws])
    accel.backward(d(g(batch(0) * 1e4)).square().mean())
    d_opt.step()
    g_opt.step()
    for m, state in zip(raws, before, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())


def test_an_overflow_spares_fp32_models() -> None:
    overflow_beside_fp32()
    run(2, overflow_beside_fp32)


# -- 8 bits by torchao ---------------------------------------------------------------------------------------------------


def wide() -> nn.Sequential:
    """Convert a model as docs/precision.md does. Without a GPU the 8 bits are emulated."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, 3))

    def fits(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and module.out_features % 16 == 0

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=fits)
    return model


def eight_bits() -> None:
    """Train the weights of one process that takes the ranks' batches one by one."""
    for backend in ("ddp", "fsdp"):
        raw, plain = wide(), wide()
        optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (raw, plain))
        model, optimizer, _ = accel.setup(raw, optimizer, backend=backend, precision="bf16-mixed")
        for step in range(3):
            parts = rows(step, 8, 16).chunk(2)
            model(parts[accel.rank()]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for part in parts:
                with torch.autocast("cpu", torch.bfloat16):
                    y = plain(part)
                (y.float().square().mean() / 2).backward()
            reference.step()
            reference.zero_grad()
        accel.teardown(model)
        assert [type(m).__name__ for m in raw] == ["Float8Linear", "GELU", "Float8Linear", "Linear"]
        assert distance(raw, plain) < 1e-6


def test_eight_bits_by_torchao() -> None:
    pytest.importorskip("torchao")
    run(2, eight_bits, timeout=240)
