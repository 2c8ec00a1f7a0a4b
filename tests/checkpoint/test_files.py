"""What lies in the directory: files that other programs read, as the format's page says."""

from __future__ import annotations

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
from tests.checkpoint.helpers import memory_below, save_fully
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


def save_all(directory: str) -> dict[str, dict[str, torch.Tensor]]:
    """Also a weight that is cut along its columns."""
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    cases: dict[str, tuple[nn.Module, Any]] = {
        "ddp": (Big(), "ddp"),
        "fsdp": (Big().float(), "fsdp"),  # one group has one dtype
        "cut": (nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)), accel.FSDP(tensor_parallel=2, plan=plan)),
    }
    found = {}
    for name, (net, backend) in cases.items():
        model = accel.setup(net, backend=backend).model
        accel.save({"model": model, "z": torch.tensor([1 + 2j, 3]), "n": 1}, f"{directory}/{name}")
        found[name] = {n: t.detach().contiguous() for n, t in accel.full_state_dict(model).items()}
        accel.teardown()
    return found


def test_a_program_without_accel_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "read_checkpoint.py"
    assert "accel" not in re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
    read = runpy.run_path(str(path))["read"]
    for name, expected in run(2, save_all, str(tmp_path))[0].items():
        found, values = read(tmp_path / name)
        assert found.pop("z").tolist() == [1 + 2j, 3]
        assert values["n"] == 1
        assert found.keys() == {f"model/{n}" for n in expected}
        for key, tensor in expected.items():
            other = found[f"model/{key}"]
            assert other.dtype is tensor.dtype
            assert torch.equal(other, tensor), key
        for file in (tmp_path / name).glob("*.*n*"):  # the record and each file, damaged in its last third
            content = file.read_bytes()
            file.write_bytes(content[: -len(content) // 3] + b"\0!?\1" + content[-len(content) // 3 + 4 :])
            with pytest.raises(AssertionError, match=file.name):
                read(tmp_path / name)
            file.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["read_checkpoint.py", str(tmp_path / "cut")])
        runpy.run_path(str(path), run_name="__main__")
    assert "'model/1.weight', tensor(" in capsys.readouterr().out


def test_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        accel.save({"x": torch.zeros(9)}, tmp_path / "c")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "c").iterdir()}
    assert modes == {0o640}


@pytest.mark.parametrize("wait", [True, False])
def test_memory_stays_bounded(wait: bool, tmp_path: Path) -> None:
    """Saving and loading 200 MB take no second copy of it; in the background one, which the next save uses again."""
    state = {f"t{i}": torch.randn(12_500_000) for i in range(4)}
    accel.save({"x": torch.zeros(5)}, tmp_path / "warm")
    accel.load(tmp_path / "warm")
    with memory_below((40 if wait else 260) * 1_024_000):
        for _ in range(2):
            save_fully(state, tmp_path / "c", wait)
        accel.load(tmp_path / "c", state)
