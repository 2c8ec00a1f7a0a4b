"""``accel.import_checkpoint``: files and directories that the libraries themselves wrote."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import accel
from accel import CheckpointError
from accel.__main__ import main
from tests.backends import deepspeed_alone
from tests.distributed import outcomes, run


class Net(nn.Module):
    """Odd sizes, two tied names, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.scale = nn.Parameter(torch.ones(1))
        self.second = nn.Linear(13, 5)
        self.third = nn.Linear(13, 5)
        self.third.weight = self.second.weight
        self.frozen = nn.Linear(7, 13).requires_grad_(False)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.scale * torch.tanh(self.first(x) + self.frozen(x))
        out: torch.Tensor = self.second(hidden) + self.third(hidden).square()
        return out


def make(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    return net, make_optimizer(net)


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    heads = [p for n, p in net.named_parameters() if n.startswith(("second", "third"))]
    rest = [p for n, p in net.named_parameters() if n.startswith(("first", "scale"))]
    return torch.optim.AdamW([{"params": rest}, {"params": heads, "lr": 0.02}], lr=0.01)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 7, generator=generator), torch.randn(8, 5, generator=generator)


def train(model: Any, optimizer: Any, steps: range) -> None:
    """Equal batches on all ranks, so that any world size learns the same."""
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def uninterrupted() -> dict[str, torch.Tensor]:
    net, optimizer = make()
    train(net, optimizer, range(5))
    return net.state_dict()


def close(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-5, msg=name)


def go_on(directory: str, backend: str, key: str) -> dict[str, torch.Tensor]:
    """Two more steps from a checkpoint, by a model that began elsewhere."""
    net, raw = make(seed=1)
    model, optimizer, _ = accel.setup(net, raw, backend=backend)
    accel.load(directory, {"model": model, key: optimizer})
    assert not net.frozen.weight.requires_grad
    train(model, optimizer, range(3, 5))
    return {n: t.clone() for n, t in accel.full_state_dict(model).items()}


def test_a_file_of_torch_save(tmp_path: Path) -> None:
    """Model with a wrapper's prefix, optimizer, values: training goes on as if uninterrupted, alone and sharded."""
    net, optimizer = make()
    train(net, optimizer, range(3))
    model = {f"module.{n}": t for n, t in net.state_dict().items()}
    state = {
        "model": model,
        "opt": optimizer.state_dict(),
        "epoch": 3,
        "args": {"lr": (0.01, None)},
        "ema": torch.ones(4),
    }
    torch.save(state, tmp_path / "last.pt")
    found = accel.import_checkpoint(tmp_path / "last.pt", tmp_path / "c")
    assert found["models"] == ["model"]
    assert found["optimizers"] == ["opt"]
    values = accel.load(tmp_path / "c", {"epoch": 0, "args": None, "ema": torch.zeros(4)})
    assert (values["epoch"], values["args"], values["ema"].tolist()) == (3, {"lr": (0.01, None)}, [1.0] * 4)
    close(go_on(str(tmp_path / "c"), "single", "opt"), uninterrupted())
    for state in run(2, go_on, str(tmp_path / "c"), "fsdp", "opt"):
        close(state, uninterrupted())


def test_a_damaged_file_of_torch_save_is_refused(tmp_path: Path) -> None:
    """torch.load would take the damaged number; how a file is cut short torch tells in many ways."""
    net, optimizer = make()
    train(net, optimizer, range(1))
    path = tmp_path / "last.pt"
    torch.save({"model": net.state_dict(), "opt": optimizer.state_dict()}, path)
    whole = path.read_bytes()
    weight = net.state_dict()["frozen.weight"].numpy().tobytes()
    bits = bytearray(whole)
    bits[whole.index(weight) + 3] ^= 64
    cases = [
        (bytes(bits), "is damaged: last/data/.* in it has another checksum"),
        (b"junk", "is no whole file of torch.save"),
    ]
    cases += [(whole[: len(whole) * n // 8], "is no whole file of torch.save") for n in range(1, 8)]
    for content, message in cases:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"last.pt {message}"):
            accel.import_checkpoint(path, tmp_path / "c")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_item_of_dcp_is_refused(tmp_path: Path) -> None:
    weight = torch.linspace(0, 1, 64)
    dcp.save({"w": weight, "step": 3}, checkpoint_id=tmp_path / "d")
    path = next((tmp_path / "d").glob("*.distcp"))
    bits = bytearray(path.read_bytes())
    accel.import_checkpoint(tmp_path / "d", tmp_path / "c")
    assert torch.equal(accel.load(tmp_path / "c", {"w": torch.zeros(64), "step": 0})["w"], weight)
    bits[bits.index(weight.numpy().tobytes()) + 3] ^= 64
    path.write_bytes(bits)
    with pytest.raises(CheckpointError, match=r"w is damaged: .*/data/0 in it has another checksum"):
        accel.import_checkpoint(tmp_path / "d", tmp_path / "e")


@pytest.mark.parametrize("groups", [[1], ["params"], [{"lr": 0.1}], ({"params": [0]},), "params", []], ids=str)
def test_what_has_only_the_keys_of_an_optimizer_is_a_value(groups: Any, tmp_path: Path) -> None:
    notes = {"state": {}, "param_groups": groups}
    torch.save({"notes": notes}, tmp_path / "last.pt")
    found = accel.import_checkpoint(tmp_path / "last.pt", tmp_path / "c")
    assert found["optimizers"] == (["notes"] if groups == [] else [])
    if groups:
        assert accel.load(tmp_path / "c") == {"notes": notes}


def test_a_flattened_optimizer_is_refused_or_left_out(tmp_path: Path) -> None:
    flat = {"state.0.weight.exp_avg": torch.ones(2), "param_groups.0.weight.lr": 0.1}
    torch.save({"model": {"0.weight": torch.ones(2)}, "optimizer": flat}, tmp_path / "last.pt")
    with pytest.raises(CheckpointError, match="optimizer is an optimizer's state that was flattened"):
        accel.import_checkpoint(tmp_path / "last.pt", tmp_path / "c")
    found = accel.import_checkpoint(tmp_path / "last.pt", tmp_path / "c", optimizer=False)
    assert (found["models"], found["left out"]) == (["model"], ["optimizer"])


def test_a_state_dict_alone_in_either_format(tmp_path: Path) -> None:
    net, _ = make()
    for zipped in (True, False):
        path = tmp_path / f"{zipped}.pt"
        torch.save(net.state_dict(), path, _use_new_zipfile_serialization=zipped)
        accel.import_checkpoint(path, tmp_path / "new" / f"{zipped}")
        other, _ = make(seed=1)
        accel.load(tmp_path / "new" / f"{zipped}", {"model": other})
        close(other.state_dict(), net.state_dict())


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    """The file does not say whose state it is; the options of its groups do."""
    net, optimizer = make()
    train(net, optimizer, range(1))
    torch.save({"model": net.state_dict(), "opt": optimizer.state_dict()}, tmp_path / "f.pt")
    accel.import_checkpoint(tmp_path / "f.pt", tmp_path / "c")
    other, _ = make()
    groups = [{"params": g["params"]} for g in make()[1].param_groups]
    with pytest.raises(CheckpointError, match="the checkpoint's groups have no dampening"):
        accel.load(tmp_path / "c", {"model": other, "opt": torch.optim.SGD(groups, 0.1)})
    found = accel.import_checkpoint(tmp_path / "f.pt", tmp_path / "d", optimizer=False)
    assert (found["optimizers"], found["left out"]) == ([], ["opt"])
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        accel.load(tmp_path / "d", {"opt": make()[1]})
    with pytest.raises(CheckpointError, match="has a checkpoint already: import into another directory$"):
        accel.import_checkpoint(tmp_path / "f.pt", tmp_path / "c")


def test_each_process_of_a_job_in_which_accel_does_not_run_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accel.teardown()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    torch.save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "f.pt")
    accel.import_checkpoint(tmp_path / "f.pt", tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"has a checkpoint already: .*accel\.init\(\) above it lets them do it together"
    ):
        accel.import_checkpoint(tmp_path / "f.pt", tmp_path / "c")


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_nothing_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"model": {"w": torch.zeros(2)}, "x": Evil(str(mark))}, tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match=r"f\.pt holds pickled objects, .*system"):
        accel.import_checkpoint(tmp_path / "f.pt", tmp_path / "c")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Evil(str(mark))))
    with pytest.raises(CheckpointError, match="no whole checkpoint of torch.distributed.checkpoint"):
        accel.import_checkpoint(tmp_path / "d", tmp_path / "c")
    (tmp_path / "g.pt").write_bytes(b"no such file")
    with pytest.raises(CheckpointError):
        accel.import_checkpoint(tmp_path / "g.pt", tmp_path / "c")
    assert not mark.exists()
    assert not (tmp_path / "c").exists()
    assert not list(tmp_path.glob(".accel-import-*"))


def save_dcp(directory: str) -> None:
    """By torch alone: sharded on both ranks, under the names that its own helper gives."""
    net, _ = make()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    optimizer = make_optimizer(net)
    train(net, optimizer, range(3))
    states = get_state_dict(net, optimizer)
    dcp.save({"model": states[0], "optim": states[1], "epoch": 3}, checkpoint_id=directory)


def claims_too_much(directory: Path) -> None:
    """A tensor of terabytes is refused before memory is made for it, and so are parts that are not as large as their whole."""
    path = directory / ".metadata"
    before = path.read_bytes()
    for factor, whole in ((10**9, True), (2, False)):
        metadata = pickle.loads(before)
        stored = metadata.state_dict_metadata["model.first.weight"]
        stored.size = torch.Size([stored.size[0] * factor, *stored.size[1:]])
        if whole:
            stored.chunks[0].sizes = torch.Size([stored.chunks[0].sizes[0] * factor, *stored.size[1:]])
            stored.chunks[1].sizes = torch.Size([stored.chunks[1].sizes[0] * factor, *stored.size[1:]])
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match="do not make it up"):
            accel.import_checkpoint(directory, directory.parent / "e")
    path.write_bytes(before)


def test_a_directory_of_dcp(tmp_path: Path) -> None:
    run(2, save_dcp, str(tmp_path / "d"))
    assert main(["convert", str(tmp_path / "d"), str(tmp_path / "c")]) == 0
    assert accel.load(tmp_path / "c")["epoch"] == 3
    close(go_on(str(tmp_path / "c"), "single", "optim"), uninterrupted())
    claims_too_much(tmp_path / "d")
    path = next((tmp_path / "d").glob("*.distcp"))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        accel.import_checkpoint(tmp_path / "d", tmp_path / "e")


def save_zero(directory: str, stage: int) -> None:
    """By the library alone, from its own engine."""
    net, raw = make()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "zero_allow_untrusted_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, _, _, _ = deepspeed_alone(model=net, optimizer=raw, config=config, dist_init_required=False)
    for step in range(3):
        x, y = batch(step)
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
    engine.save_checkpoint(directory, tag="three", client_state={"epoch": 3})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_zero_checkpoint(tmp_path: Path, stage: int) -> None:
    pytest.importorskip("deepspeed")
    source, directory = str(tmp_path / "z"), str(tmp_path / "c")
    for outcome in outcomes(2, save_zero, source, stage, breaks=True):
        assert not outcome.error, outcome.trace
    found = accel.import_checkpoint(source, directory)
    assert (found["models"], found["optimizers"]) == (["model"], ["optimizer"])
    assert accel.load(directory)["epoch"] == 3
    close(go_on(directory, "single", "optimizer"), uninterrupted())
    if stage:
        for name in os.listdir(f"{source}/three"):
            if "rank_1" in name:
                os.unlink(f"{source}/three/{name}")
        with pytest.raises(CheckpointError, match=r"1 ranks, and 2 saved"):
            accel.import_checkpoint(source, tmp_path / "d")


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")  # torch 2.15
def test_tensors_that_are_not_dense_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"net": {"a": torch.ones(2), "b": torch.eye(3).to_sparse()}}, tmp_path / "old.pt")
    with pytest.raises(CheckpointError, match=r"old.pt: net, b: a tensor of layout torch.sparse_coo"):
        accel.import_checkpoint(tmp_path / "old.pt", tmp_path / "c")
    assert not (tmp_path / "c").exists()
