"""Where this process stands among the ranks, read from the variables that its launcher sets."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import AccelError


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one process among all processes of a job.

    ``master_addr`` and ``master_port`` are where rank 0 can be met, None where the environment does not tell.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None


ALONE = Place()


class _Launcher(NamedTuple):
    """The names of a launcher's variables; ``job`` are those that name this start and no other one."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()


def _prefixed(name: str, prefix: str, *job: str) -> _Launcher:
    return _Launcher(name, prefix + "RANK", prefix + "SIZE", prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE", job)


_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_HOROVODRUN = _prefixed("horovodrun", "HOROVOD_", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_JSRUN = _prefixed("jsrun", "JSM_NAMESPACE_", "LSB_JOBID")
_OPENMPI = _prefixed("OpenMPI", "OMPI_COMM_WORLD_", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_MPICH = _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID")
_SLURM = _Launcher("SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", _SLURM_JOB)


def detect(environ: Mapping[str, str]) -> Place:
    """Reads the place of this process from the variables of its launcher; without any, a world of one.

    Args:
        environ: The environment variables, as ``os.environ``.

    Raises:
        AccelError: The variables are incomplete, not integers, or contradict each other.
    """
    launcher = _find(environ)
    if launcher is None:
        _refuse_missing_agent(environ)
        return ALONE
    rank, world = _integer(environ, launcher.rank), _integer(environ, launcher.size)
    local_rank, local_world = _local(environ, launcher, world)
    places = (
        (launcher.rank, rank, launcher.size, world),
        (launcher.local_rank, local_rank, launcher.local_size, local_world),
    )
    for rank_name, number, size_name, size in places:
        if not 0 <= number < size:
            raise AccelError(
                f"{rank_name}={number} and {size_name}={size} contradict each other ({launcher.name}): "
                "expected 0 <= rank < number of processes"
            )
    if local_world > world:
        raise AccelError(
            f"{launcher.local_size}={local_world} is more than {launcher.size}={world}: "
            f"the variables of {launcher.name} contradict each other"
        )
    for name, value in ((_TORCHRUN.rank, rank), (_TORCHRUN.size, world)):
        if name in environ and _integer(environ, name) != value:
            raise AccelError(f"{name}={environ[name]} contradicts {launcher.name}, which says {value}: unset {name}")
    addr, port = _master(environ, launcher, single_host=local_world == world and launcher.local_size in environ)
    return Place(launcher.name, rank, world, local_rank, local_world, addr, port)


def _find(environ: Mapping[str, str]) -> _Launcher | None:
    """The launcher that started this process: the innermost, where one runs under another."""
    for launcher in (_TORCHRUN, _HOROVODRUN, _JSRUN, _OPENMPI):
        if launcher.rank in environ and launcher.size in environ:
            return launcher
    if _MPICH.rank in environ and _MPICH.local_rank in environ:
        return _MPICH
    if _in_slurm_step(environ):
        return _SLURM
    for launcher in (_MPICH, _TORCHRUN, _HOROVODRUN, _JSRUN, _OPENMPI):
        if launcher.rank in environ or launcher.size in environ:
            return launcher
    return None


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process; the shell of a batch or interactive job is no rank."""
    if _SLURM.rank not in environ or not {"SLURM_STEP_ID", "SLURM_STEPID"} & set(environ):
        return False
    if environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return True
    if _integer(environ, _SLURM.rank) > 0:
        raise AccelError(
            f"SLURM_JOB_NAME={environ['SLURM_JOB_NAME']} says an interactive shell, which is one process, but "
            f"{_SLURM.rank}={environ[_SLURM.rank]}: set SLURM_JOB_NAME to another name before srun, or use torchrun"
        )
    return False


def _refuse_missing_agent(environ: Mapping[str, str]) -> None:
    """PET_* of Kubeflow Trainer configure torchrun: without it every pod would train its own model."""
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
        first = environ.get(name, "1").partition(":")[0]
        if first.isdecimal() and int(first) > 1:
            raise AccelError(
                f"{name}={environ[name]} asks for several processes, but RANK and WORLD_SIZE are not set: "
                "start the script with torchrun, which reads the PET_* variables"
            )


def _integer(environ: Mapping[str, str], name: str) -> int:
    if name not in environ:
        raise AccelError(f"{name} is not set, but other variables of the same launcher are: set all or none of them")
    try:
        return int(environ[name])
    except ValueError:
        raise AccelError(f"{name}={environ[name]!r}: expected an integer") from None


def _local(environ: Mapping[str, str], launcher: _Launcher, world: int) -> tuple[int, int]:
    """Local rank and local world size.

    Without a local rank the process is taken to be alone on its host. With a local rank but no local size
    every rank may be on this host: then each takes one device, which is right on one host and on many.
    """
    if launcher.local_rank not in environ and environ.get(launcher.local_size, "1") == "1":
        return 0, 1
    local_rank = _integer(environ, launcher.local_rank)
    if launcher is _SLURM:
        counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
        if counts and "SLURM_NODEID" in environ:
            return local_rank, _tasks_on_node(counts, _integer(environ, "SLURM_NODEID"))
    if launcher.local_size in environ:
        return local_rank, _integer(environ, launcher.local_size)
    return local_rank, world


def _tasks_on_node(counts: str, node: int) -> int:
    """The tasks on one node from SLURM's run-length list: ``2(x3),1`` is 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise AccelError(f"SLURM_TASKS_PER_NODE={counts!r}: expected counts such as 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node < len(tasks):
        raise AccelError(f"SLURM_NODEID={node} contradicts SLURM_TASKS_PER_NODE={counts}, which has {len(tasks)} nodes")
    return tasks[node]


def expand_hosts(nodes: str) -> list[str]:
    """The hosts of a SLURM node list: ``node[01-03,7]`` is node01, node02, node03, node7."""
    return [host for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes) for host in _expand(item)]


def _expand(item: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    ranges, _, tail = rest.partition("]")
    numbers: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        stop = last if dash else first
        if not (first.isdecimal() and stop.isdecimal()):
            raise AccelError(f"cannot read the SLURM node list {item!r}: expected a form such as node[01-03,7]")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(stop) + 1)]
    return [head + number + end for number in numbers for end in _expand(tail)]


def _master(environ: Mapping[str, str], launcher: _Launcher, single_host: bool) -> tuple[str | None, int | None]:
    """Where rank 0 is met: MASTER_ADDR and MASTER_PORT where set, else what the launcher lets derive."""
    addr = environ.get("MASTER_ADDR") or _master_host(environ, launcher, single_host)
    if environ.get("MASTER_PORT"):
        port: int | None = _integer(environ, "MASTER_PORT")
        if not 0 < int(environ["MASTER_PORT"]) < 65536:
            raise AccelError(f"MASTER_PORT={port}: expected a port from 1 to 65535")
        return addr, port
    identity = [environ[name] for name in launcher.job if name in environ]
    # Below the ephemeral ports, and the same on every rank.
    return addr, 15000 + zlib.crc32(".".join(identity).encode()) % 10000 if identity else None


def _master_host(environ: Mapping[str, str], launcher: _Launcher, single_host: bool) -> str | None:
    if launcher is _SLURM:
        names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        hosts = expand_hosts(next((environ[name] for name in names if name in environ), ""))
        return hosts[0] if hosts else None
    if launcher is _HOROVODRUN:
        return environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if launcher is _JSRUN:
        path = Path(environ.get("LSB_DJOB_RANKFILE", ""))
        # The first line is the launch node, which runs no rank.
        hosts = path.read_text().split() if path.is_file() else []
        return hosts[1] if len(hosts) > 1 else None
    return "127.0.0.1" if single_host and launcher is not _TORCHRUN else None
