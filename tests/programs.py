"""Programs in processes of their own, as launchers start them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests import faults
from tests.distributed import GUARD
from tests.interpreters import executable

ROOT = Path(__file__).parent.parent
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "SLURM",
    "OMPI_",
    "PMI",
    "HOROVOD_",
    "ACCEL_",
    "PET_",
    "TORCHELASTIC",
)


def free_port() -> int:
    """A port that nobody listens at, below those that the system gives to connections: they could take it before its use."""
    while True:
        port = random.SystemRandom().randrange(25_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            return port


def clean_environ() -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def scripts(
    code: str,
    *environs: Mapping[str, str],
    timeout: float = GUARD,
    check: bool = True,
    fails: Sequence[faults.Fault] = (),
) -> list[subprocess.CompletedProcess[str]]:
    """Runs ``code`` in one process per environment, together."""
    results = []
    with faults.declared(fails) as plan, contextlib.ExitStack() as ends:
        command = [executable(), "-c", f"from tests import faults; faults.begin()\n{code}" if fails else code]
        workers = []
        for environ in environs:
            whole = clean_environ() | plan.environ | dict(environ)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            workers.append(psutil.Popen(command, env=whole, text=True, **pipes))
            ends.callback(kill, workers[-1])
        for worker in workers:
            out, err = worker.communicate(timeout=timeout)
            assert not check or worker.returncode == 0, err
            results.append(subprocess.CompletedProcess("script", worker.returncode, out, err))
    return results


def by_hand(rank: int, world: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]], environs: Sequence[dict[str, str]], folder: Path
) -> Iterator[list[psutil.Popen]]:
    """The commands, each with its output in ``folder/<index>.log``; they and their children are killed at the end."""
    processes: list[psutil.Popen] = []
    try:
        for index, (command, environ) in enumerate(zip(commands, environs, strict=True)):
            with (folder / f"{index}.log").open("w") as log:
                environ = clean_environ() | {"PYTHON_EXEC": executable()} | environ
                processes.append(psutil.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))
        yield processes
    finally:
        for process in processes:
            kill(process)


def kill(process: psutil.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait(10)
