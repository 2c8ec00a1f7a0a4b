"""Handles: they show the user's module and optimizer, and nothing of the engine's."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.registry import registry
from tests.models import adamw, normalised, one_step


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


def test_an_override_of_a_method_of_torch_runs_directly() -> None:
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
    raw = normalised().eval()
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
    raw = normalised().eval()
    model = accel.setup(raw).model
    assert len(model) == 4
    assert model[0] is raw[0]
    assert [type(m) for m in model] == [type(m) for m in raw]
    model[2] = nn.Tanh()
    assert isinstance(raw[2], nn.Tanh)
    model(torch.randn(2, 4))
    with pytest.raises(accel.AccelError, match="before accel.setup"):
        inspect.unwrap(torch.compile)(model, backend="eager")


def test_an_optimizer_that_is_kept_does_not_keep_its_model() -> None:
    raw = normalised()
    optimizer = adamw(raw)
    model, handle, _ = accel.setup(raw, optimizer)
    one_step(model, handle)
    engine = weakref.ref(registry.engine(raw))
    del raw, model, handle
    gc.collect()
    assert engine() is None
    optimizer.step()


def test_an_optimizer_handle_shows_the_users_optimizer() -> None:
    raw = normalised()
    optimizer = adamw(raw)
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
    raw = normalised()
    model, optimizer, _ = accel.setup(raw, adamw(raw))
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
    with pytest.raises(accel.AccelError, match="no live engine"):
        accel.full_state_dict(optimizer)
    assert accel.unwrap(model) is raw
    assert "ended" in repr(model)


def test_parameters_changed_after_setup_raise_at_the_next_forward() -> None:
    model = accel.setup(normalised()).model
    model.train()
    model[0].weight = model[0].weight
    model(torch.randn(2, 4))
    model[0].weight = nn.Parameter(torch.zeros(8, 4))
    with pytest.raises(accel.BackendError, match=r"0\.weight"):
        model(torch.randn(2, 4))
    other = accel.setup(normalised()).model
    other.extra = nn.Linear(2, 2)
    with pytest.raises(accel.BackendError, match=r"extra\.weight"):
        other(torch.randn(2, 4))


def test_a_handle_is_as_much_of_a_container_as_its_module() -> None:
    raw = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = accel.setup(raw).model
    assert (len(model), list(model), model[0] in model) == (2, list(raw), True)
    model[1] = nn.Tanh()
    del model[0]
    assert [type(part) for part in raw] == [nn.Tanh]
    with pytest.raises(accel.BackendError, match=r"0\.bias, 0\.weight; call raw = accel.teardown"):
        model(torch.ones(1, 2))
    flat = accel.setup(nn.Linear(2, 2)).model
    for use in (len, iter, lambda handle: handle[0]):
        with pytest.raises(TypeError, match="Linear"):
            use(flat)
    accel.teardown(flat)
    with pytest.raises(accel.AccelError, match=r"handle was torn down. Pass the raw module"):
        accel.clip_grad_norm_(flat, 1.0)


def test_schedulers_of_a_handle_and_of_its_optimizer_are_chained() -> None:
    net = nn.Linear(2, 1)
    raw = torch.optim.SGD(net.parameters(), lr=1.0)
    warm = torch.optim.lr_scheduler.LinearLR(raw, 0.5, total_iters=2)
    model, optimizer, _ = accel.setup(net, raw)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    chained = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])
    rates = []
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        rates.append(raw.param_groups[0]["lr"])
        chained.step()
    assert rates == [0.5, 0.75, 1.0]
    assert (optimizer == raw, raw == optimizer, optimizer != raw) == (True, True, False)
    assert optimizer != torch.optim.SGD(net.parameters(), lr=1.0)
    assert len({optimizer, raw}) == 1


def test_forward_has_the_signature_of_the_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return self.layer(ids if mask is None else ids * mask)

    model = accel.setup(Net()).model
    assert list(inspect.signature(model.forward).parameters) == ["ids", "mask"]
    batch = {"ids": torch.ones(3, 2), "mask": torch.zeros(3, 2), "labels": torch.ones(3)}
    known = {k: v for k, v in batch.items() if k in inspect.signature(model.forward).parameters}
    assert torch.equal(model.forward(**known), model(batch["ids"], batch["mask"]))
