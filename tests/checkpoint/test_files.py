"""What lies in the directory: files that other programs read, as the format's page says."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import accel
from tests.distributed import run
from tests.programs import ROOT


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(301, 307) for _ in range(4))
        self.low = nn.Parameter(torch.randn(70_001).to(torch.bfloat16))
        self.channels = nn.Parameter(torch.randn(8, 3, 5, 7).to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(torch.randn(40, 30).t())
        self.frozen = nn.Parameter(torch.randn(1000, 3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.number = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def save_big(directory: str, backend: str = "auto") -> dict[str, torch.Tensor]:
    net = Big().float() if backend == "fsdp" else Big()  # one group has one dtype
    model, _, _ = accel.setup(net, backend=backend)
    accel.save({"model": model, "z": torch.tensor([1 + 2j, 3]), "n": 1}, directory)
    return {n: t.detach().contiguous() for n, t in accel.full_state_dict(model).items()}


def save_cut(directory: str) -> dict[str, torch.Tensor]:
    """The second weight is cut along its columns."""
    torch.manual_seed(0)
    backend = accel.FSDP(tensor_parallel=2, plan={"0": ColwiseParallel(), "1": RowwiseParallel()})
    model = accel.setup(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)), backend=backend).model
    accel.save({"model": model}, directory)
    return accel.full_state_dict(model)


def save_all(directory: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for backend in ("ddp", "fsdp"):
        found[backend] = save_big(f"{directory}/{backend}", backend)
        accel.teardown()
    return {**found, "cut": save_cut(f"{directory}/cut")}


def example() -> Any:
    """The program that reads checkpoints without accel."""
    path = ROOT / "examples" / "read_checkpoint.py"
    assert "accel" not in re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
    spec = importlib.util.spec_from_file_location("read_checkpoint", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_program_without_accel_reads_checkpoints_of_several_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, expected in run(2, save_all, str(tmp_path))[0].items():
        found, values = example().read(tmp_path / name)
        if name != "cut":
            assert found.pop("z").tolist() == [1 + 2j, 3]
            assert values["n"] == 1
        assert found.keys() == {f"model/{n}" for n in expected}
        for key, tensor in expected.items():
            other = found[f"model/{key}"]
            assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype), key
            assert torch.equal(other, tensor), key
        for path in (tmp_path / name).glob("*.*n*"):  # the record and each file, damaged in its last third
            content = path.read_bytes()
            path.write_bytes(content[: -len(content) // 3] + b"\0!?\1" + content[-len(content) // 3 + 4 :])
            with pytest.raises(AssertionError, match=path.name):
                example().read(tmp_path / name)
            path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["read_checkpoint.py", str(tmp_path / "cut")])
        runpy.run_path(str(ROOT / "examples" / "read_checkpoint.py"), run_name="__main__")
    assert "'model/1.weight', tensor(" in capsys.readouterr().out


def test_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        accel.save({"x": torch.zeros(9)}, tmp_path / "c")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "c").iterdir()}
    assert modes == {0o640}


def kilobytes(key: str) -> int:
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


@pytest.mark.parametrize("wait", [True, False])
def test_memory_stays_bounded(wait: bool, tmp_path: Path) -> None:
    """Saving and loading 200 MB take no second copy of it; in the background one, which the next save uses again."""
    state = {f"t{i}": torch.randn(12_500_000) for i in range(4)}
    accel.save({"x": torch.zeros(5)}, tmp_path / "warm")
    accel.load(tmp_path / "warm")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("VmRSS")
    for _ in range(2):
        pending = accel.save(state, tmp_path / "c", wait=wait)
        if pending is not None:
            pending.result(60)
    accel.load(tmp_path / "c", state)
    assert kilobytes("VmHWM") - before < (40 if wait else 260) * 1000
