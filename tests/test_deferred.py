"""Models built without memory whose values come from a directory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import accel
from accel.checkpoint import storage
from accel.errors import CheckpointError
from tests.distributed import refusals, run
from tests.models import distance


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
    original = storage.os.preadv

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
    storage.os.preadv = count
    try:
        model, optimizer, _ = accel.setup(net, raw, backend=options)
    finally:
        storage.os.preadv = original
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
    size = sum(t.nbytes for n, t in net.state_dict().items() if n != "head.weight")
    header = (tmp_path / "model.safetensors").stat().st_size - size
    for _, read in run(2, fill, str(tmp_path), "fsdp"):
        assert size / 3 < read - 3 * header <= size / 2 + 64  # the header is read for the record, by setup and by load


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


def memory() -> tuple[int, int]:
    """Bytes of this process that lie in memory, and the most that did since it was asked to count anew."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) << 10, int(lines["VmHWM"].split()[0]) << 10


def peaks(directory: str, cases: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """For each case by how many bytes setup raised this process's memory at most, and whether all weights are the file's."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 20)  # whatever is larger goes back to the system once it is free
    expected = torch.load(f"{directory}/expected.pt")
    found = []
    for name, precision in cases:
        with accel.deferred_init(weights=directory):
            net = wide()
        raw = torch.optim.SGD(net.parameters(), lr=0.1)
        gc.collect()
        libc.malloc_trim(0)
        before, _ = memory()
        Path("/proc/self/clear_refs").write_text("5")
        model, _, _ = accel.setup(net, raw, backend=HELD[name][0], precision=precision)
        most = memory()[1] - before
        state = accel.full_state_dict(model)
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        found.append((most, all(torch.equal(state[n].flatten()[::997], t.to(dtype)) for n, t in expected.items())))
        del state
        accel.teardown()
    return found


def sharded_files(net: nn.Module, directory: Path, stem: str = "model", variant: str = "") -> None:
    """The weights in two files and an index, as transformers and diffusers write them."""
    state = {n: t.clone() for n, t in net.state_dict().items()}
    parts = [list(state)[i::2] for i in range(2)]
    files = [f"{stem}{variant}-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for file, names in zip(files, parts, strict=True):
        save_file({n: state[n] for n in names}, directory / file)
    places = {n: file for file, names in zip(files, parts, strict=True) for n in names}
    index = json.dumps({"metadata": {}, "weight_map": places})
    (directory / f"{stem}.safetensors.index{variant}.json").write_text(index)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts what Linux counts")
def test_no_rank_has_more_than_its_part_and_a_tensor(tmp_path: Path) -> None:
    """From several files, on every backend; with bf16 converted on the way."""
    cases = [(name, "32-true") for name in HELD] + [("sharded", "bf16-true")]
    torch.manual_seed(0)
    net = wide()
    sharded_files(net, tmp_path)
    torch.save({n: t.flatten()[::997].clone() for n, t in net.state_dict().items()}, tmp_path / "expected.pt")
    whole = sum(t.nbytes for t in net.state_dict().values())
    for found in run(2, peaks, str(tmp_path), cases):
        for (name, precision), (most, equal) in zip(cases, found, strict=True):
            assert equal, name
            held = HELD[name][1] * whole / (2 if precision == "bf16-true" else 1)
            # 32 MiB of buffers, where values are converted, and a margin for all that is small.
            assert most < held + (40 << 20), (name, precision, (most - held) / 2**20)


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


def scale(net: nn.Module) -> None:
    net[1].weight.data.mul_(0.1)  # type: ignore[index,union-attr,operator]


def replace(net: nn.Module) -> None:
    net[1].weight = nn.Parameter(torch.zeros(2, 2))  # type: ignore[index,union-attr]


class Gained(nn.Linear):
    """Calls its own method once more than torch does."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.gain = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "gain"):
            nn.init.ones_(self.gain)


@pytest.mark.parametrize("write", [lambda net: nn.init.zeros_(net[1].weight), scale, replace])
def test_values_that_would_be_lost_are_refused(write: Any) -> None:
    """Values of the author's own, which no ``reset_parameters`` gives."""
    with accel.deferred_init():
        net = nn.Sequential(Gained(), nn.Linear(2, 2))
        write(net)
    with pytest.raises(accel.BackendError, match=r"values of 1\.weight were set inside accel\.deferred_init\(\)"):
        accel.setup(net)
    with accel.deferred_init():
        net = nn.Sequential(Gained(), nn.Linear(2, 2)).requires_grad_(False)
    accel.setup(net)
    assert net[0].gain.tolist() == [1.0, 1.0]


def recurrent(backend: Any) -> list[dict[str, torch.Tensor]]:
    """A model set up and trained for a step, after a setup that failed; the last one on one rank without accel."""
    found = []
    for deferred in (True, False):
        torch.manual_seed(0)
        with accel.deferred_init() if deferred else contextlib.nullcontext():
            net = nn.GRU(4, 8)
        raw = torch.optim.SGD(net.parameters(), lr=0.1)
        model: Any = net
        if deferred:
            with pytest.raises(accel.AccelError):
                accel.setup(net, torch.optim.SGD(nn.Linear(1, 1).parameters()), backend=backend)
            torch.manual_seed(0)
            model, raw, _ = accel.setup(net, raw, backend=backend)
        model(torch.ones(2, 3, 4))[0].square().sum().backward()
        raw.step()
        found.append(accel.full_state_dict(model) if deferred else net.state_dict())
    return found


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_an_rnn_gets_its_values(backend: str) -> None:
    for ours, plain in run(2, recurrent, backend):
        assert distance(ours, plain) < 1e-6


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_a_file_or_an_index_by_its_name(tmp_path: Path, stem: str) -> None:
    """Beside a variant, which transformers and diffusers name in one way; of a directory only the usual names count."""
    net, half = nn.Linear(3, 2), nn.Linear(3, 2)
    sharded_files(half.half(), tmp_path, stem, ".fp16")
    with pytest.raises(CheckpointError, match=f"it holds .*{stem}.safetensors.index.fp16.json"):
        accel.load(tmp_path, {"model": nn.Linear(3, 2)})
    save_file(dict(net.state_dict()), tmp_path / f"{stem}.safetensors")
    save_file(dict(half.state_dict()), tmp_path / f"{stem}.fp16.safetensors")
    for path, expected in (
        (tmp_path, net),
        (tmp_path / f"{stem}.safetensors", net),
        (tmp_path / f"{stem}.fp16.safetensors", half),
        (tmp_path / f"{stem}.safetensors.index.fp16.json", half),
    ):
        with accel.deferred_init(weights=path):
            deferred = nn.Linear(3, 2)
        model = accel.setup(deferred).model
        assert torch.equal(deferred.weight, expected.weight.float())
        loaded = accel.load(path, {"model": nn.Linear(3, 2)}, convert=expected is half)["model"]
        assert torch.equal(loaded.bias, expected.bias.float())
        accel.teardown(model)
    with pytest.raises(CheckpointError, match=r"float16 in the checkpoint, torch.float32 here \(convert=True"):
        accel.load(tmp_path / f"{stem}.fp16.safetensors", {"model": nn.Linear(3, 2)})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="config.json is not an index of weights"):
        accel.load(tmp_path / "config.json", {"model": nn.Linear(3, 2)})


def test_every_layout_is_filled(tmp_path: Path) -> None:
    """Numbers, empty ones, channels last, transposed; and a file whose values would not fit their dtype."""
    values = {
        "number": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "image": torch.randn(2, 3, 4, 5),
        "turned": torch.randn(4, 6),
        "counts": torch.arange(5),
    }
    save_file(values, tmp_path / "model.safetensors")
    model = nn.Module()
    for name, value in values.items():
        model.register_buffer(name, torch.zeros_like(value))
    model.image = model.image.to(memory_format=torch.channels_last)
    model.turned = torch.zeros(6, 4).t()
    accel.load(tmp_path, {"model": model})
    assert all(torch.equal(getattr(model, name), value) for name, value in values.items())
    model.image = model.image.to(torch.int64)
    with pytest.raises(CheckpointError, match=r"torch.float32 in the checkpoint, torch.int64 here, which cannot hold"):
        accel.load(tmp_path, {"model": model}, convert=True)


def test_one_model_of_several(tmp_path: Path) -> None:
    """By its name, as a training checkpoint has a model and its average."""
    models = {"net": nn.Linear(2, 2), "average": nn.Linear(2, 2)}
    accel.save({**models, 3: nn.Linear(2, 2)}, tmp_path)
    for name, model in models.items():
        with accel.deferred_init(weights=tmp_path, name=name):
            raw = nn.Linear(2, 2)
        accel.setup(raw)
        assert torch.equal(raw.weight, model.weight)
    refused = {
        None: r"has 3 models .*Choose with name='net'",
        "other": "has no model 'other'",
        "[3]": "or under a key that is no string",
    }
    for wrong, text in refused.items():
        with accel.deferred_init(weights=tmp_path, name=wrong):
            raw = nn.Linear(2, 2)
        with pytest.raises(accel.CheckpointError, match=text):
            accel.setup(raw)
    with pytest.raises(accel.CheckpointError, match="of which checkpoint"), accel.deferred_init(name="net"):
        pass


def loosely(directory: str, backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with accel.deferred_init(weights=directory, strict=False):
        net = Net(8)
    options = accel.DeepSpeed(stage=3) if backend == "deepspeed" else backend
    model, _, _ = accel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), backend=options)
    return dict(accel.full_state_dict(model)), {"cache": net.cache.tolist()}


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "deepspeed"])
def test_weights_that_have_more_or_lack_buffers(backend: str, tmp_path: Path) -> None:
    """Heads of larger models, buffers that older versions saved: ``strict=False`` leaves them out, but no parameter."""
    expected = dict(Net(8).state_dict())
    files = {name: value for name, value in expected.items() if name not in ("head.weight", "kept")}
    save_file({**files, "lm_head.bias": torch.ones(4)}, tmp_path / "model.safetensors")
    for state, _ in run(2, loosely, str(tmp_path), backend):
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    for message in refusals(2, build, str(tmp_path), backend, error="CheckpointError"):
        assert "deferred_init(weights, strict=False) takes one that has more, or lacks buffers" in message
    del files["gain"]
    save_file(
        {**files, "lm_head.bias": torch.ones(4), "blocks.0.0.bias": torch.zeros(3)}, tmp_path / "model.safetensors"
    )
    for message in refusals(2, loosely, str(tmp_path), backend, error="CheckpointError"):
        assert "gain" in message
        assert "[3] in the checkpoint, [8] here" in message
        assert "kept" not in message
        assert "lm_head" not in message


def test_integers_are_no_weights(tmp_path: Path) -> None:
    """Of a quantised file, whose numbers alone are not the weights."""
    save_file({"weight": torch.ones(2, 2, dtype=torch.int8), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    with accel.deferred_init(weights=tmp_path):
        net = nn.Linear(2, 2)
    with pytest.raises(
        CheckpointError,
        match="weight: torch.int8 in the checkpoint, torch.float32 here. Quantized weights need",
    ):
        accel.setup(net)
