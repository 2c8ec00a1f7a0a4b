"""State of optimizers that does not fit in part, or is of another age or form than the optimizer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accel
from accel.errors import CheckpointError
from tests.backends import need
from tests.distributed import refusals, run
from tests.models import distance

BACKENDS = ["single", "ddp", "sharded", "fsdp", "deepspeed:1", "deepspeed:2", "deepspeed:3"]


def build(classes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, classes))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).sum().backward()
    optimizer.step()


def another_head(backend: str, folder: Path, trained: bool) -> float:
    """Load into a model with a different head. Return the distance from the same made by hand with the optimizer as it was."""
    first = build(2)
    model, optimizer, _ = accel.setup(first, torch.optim.AdamW(first.parameters(), lr=0.1), backend=backend)
    train(model, optimizer)
    accel.save({"model": model, "optimizer": optimizer}, folder)
    whole = accel.full_state_dict(model)
    accel.teardown()

    second, plain = build(4), build(4)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.2)
    model, optimizer, _ = accel.setup(second, torch.optim.AdamW(second.parameters(), lr=0.2), backend=backend)
    if trained:
        train(model, optimizer)
        train(plain, expected)
    accel.load(folder, {"model": model, "optimizer": optimizer}, strict=False)
    plain[0].load_state_dict({"weight": whole["0.weight"], "bias": whole["0.bias"]})
    for _ in range(2):
        train(model, optimizer)
        train(plain, expected)
    return distance(accel.full_state_dict(model), plain.state_dict())


@pytest.mark.parametrize(("backend", "trained"), [(b, i % 2 == 0) for i, b in enumerate(BACKENDS)] + [("fsdp", True)])
def test_an_optimizer_that_does_not_fit_is_left_whole(backend: str, trained: bool, tmp_path: Path) -> None:
    assert max(run(1 if backend == "single" else 2, another_head, backend, tmp_path, trained)) < 1e-5


class Recording(torch.optim.AdamW):
    """Adds an option in ``__setstate__``, as torch's optimizers do for checkpoints of older versions."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("added_later", 3)


@pytest.mark.parametrize("backend", [None, "ddp"], ids=["raw", "ddp"])
def test_hooks_and_setstate_run_after_a_load(backend: str | None, tmp_path: Path) -> None:
    net = build(2)
    saved = Recording(net.parameters(), lr=0.1)
    train(net, saved)
    accel.save({"model": net, "optimizer": saved}, tmp_path)
    calls: list[Any] = []
    other = build(2)
    optimizer: Any = Recording(other.parameters(), lr=0.2)
    # Hooks see the loaded values.
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append((o.param_groups[0]["lr"], len(o.state))))
    other[0].register_load_state_dict_post_hook(lambda module, keys: calls.append((module, keys.missing_keys)))
    state = {"model": other, "optimizer": optimizer}
    if backend is not None:
        model, handle, _ = accel.setup(other, optimizer, backend=backend)
        state = {"model": model, "optimizer": handle}
    accel.load(tmp_path, state)
    assert calls == [(other[0], []), (0.1, 4)]
    assert [group["added_later"] for group in optimizer.param_groups] == [3]
    accel.teardown()


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_state_has_the_dtype_of_its_parameter(dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path) -> None:
    saved, loaded = (build(2).to(dtype) for dtype in dtypes)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in (saved, loaded)]
    saved.forward = lambda x, f=saved.forward: f(x.to(dtypes[0]))  # type: ignore[method-assign]
    loaded.forward = lambda x, f=loaded.forward: f(x.to(dtypes[1]))  # type: ignore[method-assign]
    train(saved, optimizers[0])
    accel.save({"model": saved, "optimizer": optimizers[0]}, tmp_path)
    state = {"model": loaded, "optimizer": optimizers[1]}
    with pytest.raises(CheckpointError, match="convert=True converts"):
        accel.load(tmp_path, {"optimizer": optimizers[1]})
    assert not optimizers[1].state
    accel.load(tmp_path, state, convert=True)
    assert {value.dtype for own in optimizers[1].state.values() for k, value in own.items() if k != "step"} == {
        dtypes[1]
    }
    train(loaded, optimizers[1])


def test_what_was_not_saved_is_no_part_of_the_state(tmp_path: Path) -> None:
    """And a load that is refused leaves nothing behind."""
    nets = [build(2) for _ in range(2)]
    with_more, without = (
        torch.optim.Adam(net.parameters(), lr=0.1, amsgrad=amsgrad)
        for net, amsgrad in zip(nets, (True, False), strict=True)
    )
    for net, optimizer in zip(nets, (with_more, without), strict=True):
        train(net, optimizer)
    accel.save({"o": with_more}, tmp_path / "more")
    accel.save({"o": without}, tmp_path / "less")
    keys = set(without.state[nets[1][0].weight])
    with pytest.raises(CheckpointError, match="does not fit"):
        accel.load(tmp_path / "more", {"o": without, "other": torch.ones(3)})
    assert set(without.state[nets[1][0].weight]) == keys
    accel.load(tmp_path / "less", {"o": with_more})
    assert set(with_more.state[nets[0][0].weight]) == keys
    train(nets[0], with_more)


class Aged(torch.optim.SGD):
    """Has an entry of its own in its state dict."""

    age = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "age": self.age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.age = state.pop("age")
        super().load_state_dict(state)


def resume_aged(backend: str, folder: Path) -> int:
    found = []
    for age in (3, 0):
        net = build(2)
        raw = Aged(net.parameters(), lr=0.1)
        raw.age = age
        model, optimizer, _ = accel.setup(net, raw, backend=backend)
        state = {"model": model, "optimizer": optimizer}
        train(**state)
        accel.load(folder, state) if found else accel.save(state, folder)
        found.append(raw.age)
        accel.teardown()
    return found[1]


def test_entries_of_an_optimizers_own_state_dict_are_saved(tmp_path: Path) -> None:
    need("sharded")
    assert run(2, resume_aged, "sharded", tmp_path / "c") == [3, 3]
    for message in refusals(2, resume_aged, "fsdp", tmp_path / "d", error="CheckpointError"):
        assert "Aged has its own entries ['age'], which backend 'fsdp' can't shard" in message


def test_an_export_waits_for_the_save(tmp_path: Path) -> None:
    class Large(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((2000, 2000), value))

    for value in (1.0, 2.0):
        accel.save({"model": Large(value)}, tmp_path / "c", wait=False)
        if value == 1.0:
            accel.verify(tmp_path / "c")  # there is none before its end
            with accel.deferred_init(weights=tmp_path / "c"):
                model = Large(0.0)
            assert accel.setup(model, backend="single").model.weight[0, 0].item() == 1.0
    accel.export(tmp_path / "c", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].unique().tolist() == [2.0]
