"""``python -m accel``: run and env."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel import __main__, engines
from accel.engines import ENGINES
from accel.errors import BackendError
from tests.interpreters import executable
from tests.programs import ROOT, free_port


def accel_command(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment = {**kept, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": executable(), **variables}
    command = [executable(), "-m", "accel", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, cwd=cwd)


SCRIPT = """
import os, sys
import accel
accel.init()
line = [accel.rank(), accel.world_size(), sys.argv[1:], int(os.environ["OMP_NUM_THREADS"]), accel.any_rank(accel.rank() == 1)]
with open(f"rank{accel.rank()}.txt", "w") as file:
    print(line, file=file)
if "--fail" in sys.argv and accel.rank() == 1:
    raise ValueError("boom")
"""


def ranks(folder: Path) -> list[Any]:
    return [eval(path.read_text()) for path in sorted(folder.glob("rank*.txt"))]


def test_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    out = accel_command("run", "--processes", "2", "train.py", "--lr", "0.1", "-n", "x", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ranks(tmp_path) == [[rank, 2, ["--lr", "0.1", "-n", "x"], threads, True] for rank in (0, 1)]
    out = accel_command("run", "-n", "2", "-m", "train", "--fail", cwd=tmp_path, OMP_NUM_THREADS="3")
    assert out.returncode == 1
    assert "ValueError: boom" in out.stderr
    assert [line[3] for line in ranks(tmp_path)] == [3, 3]


def test_run_on_several_hosts(tmp_path: Path) -> None:
    """Two agents on this machine, which has both names. They meet at the first one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": executable()}
    options = ["-n", "1", "--hosts", "localhost,other", "--port", str(free_port())]
    command = [executable(), "-m", "accel", "run", *options, "train.py"]
    agents = [subprocess.Popen(command, env=environment, cwd=tmp_path) for _ in range(2)]
    try:
        assert [agent.wait(240) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    assert [line[:2] for line in ranks(tmp_path)] == [[0, 2], [1, 2]]


@pytest.mark.parametrize("command", ["env", "export", "inspect", "memory", "run", "verify"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main([command, "--help"])
    assert f"\nexample: python -m accel {command}" in capsys.readouterr().out


def test_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = engines.resolve

    def without_dp(backend: object) -> Any:
        if backend == "dp":
            raise BackendError("needs a thing, which is not installed. Run pip install 'thing'.")
        return resolve(backend)

    monkeypatch.setattr("accel.commands.processes.resolve", without_dp)
    monkeypatch.setenv("ACCEL_BACKEND", "ddp")
    monkeypatch.setenv("RANK", "1")
    assert __main__.main(["env"]) == 0
    rows = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["torch"].startswith(torch.__version__)
    assert rows["accel"] == accel.__version__
    assert rows["cloudpickle"][0].isdigit()
    assert "gloo" in rows["process groups"]
    assert rows["backend dp"] == "cannot run: needs a thing, which is not installed. Run pip install 'thing'."
    assert {f"backend {name}" for name in ENGINES} <= rows.keys()
    assert rows["backend ddp"] == "can run"
    assert rows["ACCEL_BACKEND"] == "ddp"
    assert rows["launcher"].startswith("unknown: WORLD_SIZE must be an integer, but is not set.")
    assert "HOME" not in rows
