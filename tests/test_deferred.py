"""Models built without memory whose values come from a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accel
from accel.checkpoint import shards
from tests.distributed import refusals, run


class Net(nn.Module):
    """A parameter that nothing initialises, tied weights, both kinds of buffers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))
        self.gain = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("cache", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embed(x)) * self.gain)
        return out


def source() -> Net:
    torch.manual_seed(3)
    net = Net()
    nn.init.normal_(net.gain)
    net.kept += 7
    return net


def refuse_reset(module: nn.Module) -> None:
    raise AssertionError(f"{type(module).__name__} was reset")


def fill(directory: str, backend: str) -> tuple[dict[str, Any], int]:
    """A model set up from a directory, trained for a step; and how many bytes of weights this rank read."""
    read = 0
    original = shards.os.preadv

    def count(fd: int, views: Any, offset: int) -> int:
        nonlocal read
        size = original(fd, views, offset)
        read += size
        return size

    with accel.deferred_init(weights=directory):
        net = Net()
    assert all(p.is_meta for p in net.parameters())
    raw = torch.optim.SGD(net.parameters(), lr=0.1)
    options = accel.DeepSpeed(stage=3) if backend == "deepspeed" else backend
    saved = nn.Linear.reset_parameters, nn.Embedding.reset_parameters
    nn.Linear.reset_parameters = nn.Embedding.reset_parameters = refuse_reset
    shards.os.preadv = count
    try:
        model, optimizer, _ = accel.setup(net, raw, backend=options)
    finally:
        shards.os.preadv = original
        nn.Linear.reset_parameters, nn.Embedding.reset_parameters = saved
    state = {n: t.clone() for n, t in accel.full_state_dict(model).items()}
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(accel.full_state_dict(model)["gain"], state["gain"])
    assert net.cache.tolist() == [0.0, 1.0, 2.0, 3.0]
    return state, read


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed", "ddp", "single"])
def test_values_come_from_the_directory(tmp_path: Path, backend: str) -> None:
    """From weights and from a checkpoint, without any ``reset_parameters``."""
    net = source()
    save_file({n: t for n, t in net.state_dict().items() if n != "head.weight"}, tmp_path / "model.safetensors")
    accel.save({"nets": {"a/b": net}, "epoch": 1}, tmp_path / "c")
    accel.teardown()
    expected = net.state_dict()
    for directory in (tmp_path, tmp_path / "c"):
        for state, _ in run(1 if backend == "single" else 2, fill, str(directory), backend):
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[n], t) for n, t in expected.items())


def test_each_rank_reads_its_part(tmp_path: Path) -> None:
    net = source()
    save_file({n: t for n, t in net.state_dict().items() if n != "head.weight"}, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    header = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    for _, read in run(2, fill, str(tmp_path), "fsdp"):
        data = read - 2 * (header - 8)  # read to check what is there, and to load
        assert 0 < data <= (size - header) / 2 + 64


def build(directory: str, backend: str) -> None:
    with accel.deferred_init(weights=directory):
        net = Net(8)
    try:
        accel.setup(net, backend=backend)
    finally:
        assert all(p.is_meta for p in net.parameters())


@pytest.mark.parametrize("backend", ["fsdp", "ddp"])
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_made(tmp_path: Path, backend: str) -> None:
    state = {n: t for n, t in Net(8).state_dict().items() if n not in ("head.weight", "gain", "kept")}
    save_file({**state, "blocks.0.0.bias": torch.zeros(3), "more": torch.zeros(1)}, tmp_path / "model.safetensors")
    for message in refusals(2, build, str(tmp_path), backend, error="CheckpointError"):
        for part in ("gain", "kept", "more", "[3] in the checkpoint, [8] here"):
            assert part in message
    for message in refusals(2, build, str(tmp_path / "no"), backend, error="CheckpointError"):
        assert "does not exist" in message


def test_what_an_author_says_of_a_parameter_stays() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            gain = nn.Parameter(torch.ones(3))
            gain.no_decay = True  # type: ignore[attr-defined]
            self.gain = gain

    with accel.deferred_init():
        net = Scale()
    assert net.gain.is_meta
    assert net.gain.no_decay


def two_places(directory: str) -> None:
    with accel.deferred_init(weights=directory):
        first = nn.Linear(2, 2)
    with accel.deferred_init():
        net = nn.Sequential(first, nn.Linear(2, 2))
    accel.setup(net)


def test_two_places_are_refused() -> None:
    for message in refusals(1, two_places, "x", error="BackendError"):
        assert "from several places" in message
