"""Models built without memory whose values come from a directory."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import accel
from accel.errors import CheckpointError
from tests.backends import need
from tests.distributed import refusals, run
from tests.measured import restart_peak, status
from tests.models import distance


class Net(nn.Module):
    """A parameter of its own, tied weights, both kinds of buffers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))
        self.gain = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("cache", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embed(x)) * self.gain)
        return out


def source() -> Net:
    torch.manual_seed(3)
    net = Net()
    nn.init.normal_(net.gain)
    net.kept += 7
    return net


def fill(directory: str, backend: str) -> dict[str, Any]:
    """Return the state of a model that is set up from a directory."""
    with accel.deferred_init(weights=directory):
        net = Net()
    assert all(p.is_meta for p in net.parameters())
    raw = torch.optim.SGD(net.parameters(), lr=0.1)
    with mock.patch.object(nn.Linear, "reset_parameters", side_effect=AssertionError):
        model, optimizer, _ = accel.setup(net, raw, backend=backend)
    state = {n: t.clone() for n, t in accel.full_state_dict(model).items()}
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(accel.full_state_dict(model)["gain"], state["gain"])
    assert net.cache.tolist() == [0.0, 1.0, 2.0, 3.0]
    return state


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed:3", "ddp", "single"])
def test_values_of_a_directory(tmp_path: Path, backend: str) -> None:
    """From weights, and from a checkpoint."""
    net = source()
    files = {n: t for n, t in net.state_dict().items() if n != "head.weight"}
    save_file(files, tmp_path / "model.safetensors")
    accel.save({"nets": {"a/b": net}, "epoch": 1}, tmp_path / "c")
    accel.teardown()
    for directory in (tmp_path, tmp_path / "c"):
        for state in run(1 if backend == "single" else 2, fill, str(directory), backend):
            assert state.keys() == net.state_dict().keys()
            assert all(torch.equal(state[n], t) for n, t in net.state_dict().items())


# -- Memory -----------------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 1448, 16
PLAN = {str(i): (RowwiseParallel if i % 2 else ColwiseParallel)() for i in range(LAYERS)}
#: How much of the model a rank of two holds, and what else its backend takes while it starts.
HELD: dict[str, tuple[Any, float]] = {
    "ddp": ("ddp", 1),
    "sharded": ("sharded", 1),
    "tensor_parallel": (accel.FSDP(tensor_parallel=2, plan=PLAN), 0.5),
    "pipeline": ("pipeline", 0.5),
    # DeepSpeed makes copies of this rank's half for an optimizer, and as many gradients, which accel drops.
    "zero-3": (accel.DeepSpeed(stage=3), 0.5 + 1),
}


def wide() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def peaks(directory: str, cases: list[tuple[str, str]]) -> list[int]:
    """Return by how many bytes ``setup`` raised this process's memory."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 20)  # larger blocks go back to the system once they are free
    expected = torch.load(f"{directory}/expected.pt")
    found = []
    for name, precision in cases:
        with accel.deferred_init(weights=directory):
            net = wide()
        raw = torch.optim.SGD(net.parameters(), lr=0.1)
        gc.collect()
        libc.malloc_trim(0)
        before = restart_peak()
        model, _, _ = accel.setup(net, raw, backend=HELD[name][0], precision=precision)
        found.append(status("VmHWM") - before)
        state = accel.full_state_dict(model)
        assert all(torch.equal(state[n].flatten()[::997], t.to(state[n].dtype)) for n, t in expected.items()), name
        del state
        accel.teardown()
    return found


def sharded_files(state: dict[str, torch.Tensor], directory: Path) -> None:
    """Write the weights as two files and an index, as transformers does."""
    places: dict[str, str] = {}
    for i in range(2):
        file, names = f"model-0000{i + 1}-of-00002.safetensors", list(state)[i::2]
        save_file({n: state[n] for n in names}, directory / file)
        places.update(dict.fromkeys(names, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts what Linux counts")
def test_the_peak_of_memory(tmp_path: Path) -> None:
    """From several files, on every backend; with bf16 converted on the way."""
    cases = [(name, "32-true") for name in HELD] + [("sharded", "bf16-true")]
    torch.manual_seed(0)
    state = wide().state_dict()
    sharded_files(state, tmp_path)
    torch.save({n: t.flatten()[::997].clone() for n, t in state.items()}, tmp_path / "expected.pt")
    whole = sum(t.nbytes for t in state.values())
    for found in run(2, peaks, str(tmp_path), cases):
        for (name, precision), most in zip(cases, found, strict=True):
            held = HELD[name][1] * whole / (2 if precision == "bf16-true" else 1)
            # 32 MiB of buffers in which values are converted, and a margin for small things.
            assert most < held + (40 << 20), (name, precision, (most - held) / 2**20)


def build(directory: str, backend: str) -> None:
    with accel.deferred_init(weights=directory):
        net = Net(8)
    try:
        accel.setup(net, backend=backend)
    finally:
        assert all(p.is_meta for p in net.parameters())


@pytest.mark.parametrize("backend", ["fsdp", "ddp"])
def test_weights_that_do_not_fit(tmp_path: Path, backend: str) -> None:
    state = {n: t for n, t in Net(8).state_dict().items() if n not in ("head.weight", "gain", "kept")}
    save_file({**state, "blocks.0.0.bias": torch.zeros(3), "more": torch.zeros(1)}, tmp_path / "model.safetensors")
    for message in refusals(2, build, str(tmp_path), backend, error="CheckpointError"):
        for part in ("gain", "kept", "more", "[3] in the checkpoint, [8] here"):
            assert part in message
    for message in refusals(2, build, str(tmp_path / "no"), backend, error="CheckpointError"):
        assert "does not exist" in message


def scaled() -> nn.Module:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers[1].weight.data.mul_(0.1)
    return layers


def applied() -> nn.Module:
    """Initialize as nanoGPT does."""
    layers = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2))
    return layers.apply(lambda m: nn.init.normal_(m.weight, 0, 0.02) if hasattr(m, "weight") else None)


class Bare(nn.Linear):
    """Initializes only its weight."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


LOST = "Values of 1.weight that were set inside accel.deferred_init"


WITHOUT_VALUES: list[tuple[Any, str]] = [
    (scaled, LOST),
    (applied, LOST.replace("1", "0")),
    (lambda: Bare(2, 2), "gives values to bias"),
    (lambda: nn.ParameterList([torch.ones(2)]), "gives values to 0"),
]


def test_models_without_values_raise() -> None:
    for build, text in WITHOUT_VALUES:
        with accel.deferred_init():
            net = build()
        with pytest.raises(accel.BackendError, match=text):
            accel.setup(net)


def train_initialized(backend: str, is_gru: bool) -> None:
    """Initialize on the ranks after a setup that raised, and compare with a plain model."""
    torch.manual_seed(0)
    plain: nn.Module = nn.GRU(4, 8) if is_gru else Net()
    with accel.deferred_init():
        net: nn.Module = nn.GRU(4, 8) if is_gru else Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(accel.AccelError):
        accel.setup(net, torch.optim.SGD(nn.Linear(1, 1).parameters()), backend=backend)
    torch.manual_seed(0)
    model = accel.setup(net, optimizer, backend=backend).model
    x = torch.ones(2, 3, 4) if is_gru else torch.arange(8)
    for each, stepped in ((model, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.1))):
        each(x)[0].square().sum().backward()
        stepped.step()
    assert distance(accel.full_state_dict(model), plain.state_dict()) < 1e-6


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "deepspeed:3"])
def test_values_of_reset_parameters(backend: str) -> None:
    need(backend)
    run(2, train_initialized, backend, False)
    if backend == "fsdp":
        run(2, train_initialized, backend, True)


def filled(path: Path, name: str | None) -> nn.Linear:
    """Return a layer with the weights of a path."""
    with accel.deferred_init(weights=path, name=name):
        layer = nn.Linear(2, 2)
    accel.teardown(accel.setup(layer).model)
    return layer


def test_one_model_of_several(tmp_path: Path) -> None:
    """A training checkpoint may also have the average of a model."""
    models = {"net": nn.Linear(2, 2), "average": nn.Linear(2, 2)}
    accel.save(models, tmp_path)
    for name, model in models.items():
        assert torch.equal(filled(tmp_path, name).weight, model.weight)
    for wrong, text in {None: r"has 2 models .*Choose with name='net'", "other": "has no model 'other'"}.items():
        with pytest.raises(CheckpointError, match=text):
            filled(tmp_path, wrong)
