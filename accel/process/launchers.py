"""Find the rank and rank 0's address in a launcher's environment variables."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import AccelError

Environ: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """The rank in the job and on the node, and the address of rank 0 if known."""

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of a launcher. Those in ``job`` identify a run."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()


def _with_prefix(name: str, prefix: str, *job: str) -> _Launcher:
    local = f"{prefix}LOCAL_"
    return _Launcher(name, f"{prefix}RANK", f"{prefix}SIZE", f"{local}RANK", f"{local}SIZE", job)


# If you set environment variables by hand, use torchrun's names.
_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_HOROVODRUN = _with_prefix("horovodrun", "HOROVOD_", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_OPENMPI = _with_prefix("OpenMPI", "OMPI_COMM_WORLD_", *_MPI_JOB)
_MPICH = _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = _Launcher(
    "SLURM",
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


def detect(env: Environ) -> Place:
    """Return the place of this process. Without a launcher there is only one."""
    launcher = _find_launcher(env)
    if launcher is None:
        return Place()
    rank = _integer(env, launcher.rank)
    world_size = _integer(env, launcher.world_size)
    local_rank, local_size = _local_place(env, launcher, world_size)
    _check_range(launcher.rank, rank, launcher.world_size, world_size)
    _check_range(launcher.local_rank, local_rank, launcher.local_size, local_size)
    one_node = local_size == world_size and launcher.local_size in env
    address = env.get("MASTER_ADDR") or _master_host(env, launcher, one_node)
    port = _master_port(env, launcher)
    return Place(launcher.name, rank, world_size, local_rank, local_size, address, port)


def _find_launcher(env: Environ) -> _Launcher | None:
    """Return the launcher of this process, or the innermost if nested."""
    for launcher in (_TORCHRUN, _HOROVODRUN, _OPENMPI, _MPICH):
        # srun also sets MPICH's rank and size, so check the local rank to detect MPICH.
        other = launcher.local_rank if launcher is _MPICH else launcher.world_size
        if launcher.rank in env and other in env:
            return launcher
    if _in_slurm_step(env):
        return _SLURM
    # If a variable is missing, return the launcher anyway. detect() then names the variable.
    for launcher in (_MPICH, _TORCHRUN, _HOROVODRUN, _OPENMPI):
        if launcher.rank in env or launcher.world_size in env:
            return launcher
    return None


def _in_slurm_step(env: Environ) -> bool:
    """True if ``srun`` started this process as a rank, not as a job's shell."""
    if _SLURM.rank not in env or "SLURM_STEP_ID" not in env:
        return False
    # An interactive shell is a step, too, but a program that you start in it isn't a rank.
    is_shell = env.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if is_shell and _integer(env, _SLURM.rank) > 0:
        raise AccelError(
            "SLURM_JOB_NAME names a shell, but srun started ranks. Rename the job, or use torchrun."
        )
    return not is_shell


def _integer(env: Environ, name: str) -> int:
    value = env.get(name, "not set")
    try:
        return int(value)
    except ValueError:
        text = f"{name} must be an integer, but is {value}."
        raise AccelError(f"{text} Set all variables of your launcher.") from None


def _check_range(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if not 0 <= rank < size:
        raise AccelError(f"{rank_name}={rank} and {size_name}={size} contradict each other.")


def _local_place(env: Environ, launcher: _Launcher, world_size: int) -> tuple[int, int]:
    """Return the local rank and the local world size."""
    # Kubeflow's PyTorchJob sets no local rank, because each node has a single process.
    if launcher.local_rank not in env and env.get(launcher.local_size, "1") == "1":
        return 0, 1
    local_rank = _integer(env, launcher.local_rank)
    counts = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if launcher is _SLURM and counts and "SLURM_NODEID" in env:
        # "2(x3),1" means 2, 2, 2 and 1 tasks on four nodes.
        tasks: list[int] = []
        for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
            tasks += [int(count)] * int(repeats or 1)
        return local_rank, tasks[_integer(env, "SLURM_NODEID")]
    if launcher.local_size in env:
        world_size = _integer(env, launcher.local_size)
    return local_rank, world_size


def first_host(nodes: str) -> str:
    """Return the first node of a SLURM list: ``node01`` of ``node[01-03,7],other``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes


def _master_host(env: Environ, launcher: _Launcher, one_node: bool) -> str | None:
    if launcher is _HOROVODRUN:
        return env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if launcher is not _SLURM:
        return "127.0.0.1" if one_node and launcher is not _TORCHRUN else None
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    return first_host(nodes) if nodes else None


def _master_port(env: Environ, launcher: _Launcher) -> int | None:
    if env.get("MASTER_PORT"):
        return _integer(env, "MASTER_PORT")
    identity = [env[name] for name in launcher.job if name in env]
    if not identity:
        return None
    # Every rank computes the same port, below the ephemeral ports that other programs get.
    return 15000 + zlib.crc32(".".join(identity).encode()) % 10000
