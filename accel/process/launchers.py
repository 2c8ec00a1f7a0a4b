"""Find the rank of this process and the address of rank 0 in the variables of its launcher."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import AccelError


@dataclass(frozen=True, slots=True)
class Place:
    """The rank of this process in its job and on its node, and the address of rank 0.

    ``master_addr`` and ``master_port`` are None if the environment doesn't have them.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None


ALONE = Place()


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The names of a launcher's variables. Those in ``job`` identify one start of one job."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: tuple[str, ...] = ()


_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_HOROVODRUN = _Launcher(
    "horovodrun",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    ("HOROVOD_GLOO_RENDEZVOUS_PORT",),
)
_OPENMPI = _Launcher(
    "OpenMPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_MPICH = _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = _Launcher(
    "SLURM",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NTASKS_PER_NODE",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


def detect(environ: Mapping[str, str]) -> Place:
    """Return the place of this process, or ``ALONE`` without a launcher.

    Raises:
        AccelError: a variable is missing, isn't an integer, or contradicts another variable.
    """
    launcher = _find_launcher(environ)
    if launcher is None:
        _check_torchrun_is_used(environ)
        return ALONE
    rank = _integer(environ, launcher.rank)
    world_size = _integer(environ, launcher.world_size)
    local_rank, local_world_size = _local_place(environ, launcher, world_size)
    _check_range(launcher.rank, rank, launcher.world_size, world_size)
    _check_range(launcher.local_rank, local_rank, launcher.local_world_size, local_world_size)
    one_node = local_world_size == world_size and launcher.local_world_size in environ
    address = environ.get("MASTER_ADDR") or _master_host(environ, launcher, one_node)
    port = _master_port(environ, launcher)
    return Place(launcher.name, rank, world_size, local_rank, local_world_size, address, port)


def _find_launcher(environ: Mapping[str, str]) -> _Launcher | None:
    """Return the launcher that started this process, the innermost if they are nested."""
    for launcher in (_TORCHRUN, _HOROVODRUN, _OPENMPI):
        if launcher.rank in environ and launcher.world_size in environ:
            return launcher
    if _MPICH.rank in environ and _MPICH.local_rank in environ:
        return _MPICH
    if _in_slurm_step(environ):
        return _SLURM
    # Only one of the two variables is there. The error for the missing one needs the names.
    for launcher in (_MPICH, _TORCHRUN, _HOROVODRUN, _OPENMPI):
        if launcher.rank in environ or launcher.world_size in environ:
            return launcher
    return None


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """True if ``srun`` started this process. Shells of batch and interactive jobs aren't ranks."""
    if _SLURM.rank not in environ or not {"SLURM_STEP_ID", "SLURM_STEPID"} & set(environ):
        return False
    interactive = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if interactive and _integer(environ, _SLURM.rank) > 0:
        raise AccelError(
            f"SLURM_JOB_NAME={environ['SLURM_JOB_NAME']} names an interactive shell, but "
            f"{_SLURM.rank} is {environ[_SLURM.rank]}. Rename the job, or use torchrun."
        )
    return not interactive


def _check_torchrun_is_used(environ: Mapping[str, str]) -> None:
    """Raise if Kubeflow Trainer's PET_* variables configure torchrun, but the script runs alone."""
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
        count = environ.get(name, "1").partition(":")[0]
        if count.isdecimal() and int(count) > 1:
            raise AccelError(
                f"{name}={environ[name]} asks for several processes, but RANK and WORLD_SIZE "
                "aren't set. Start the script with torchrun."
            )


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except KeyError:
        text = f"{name} is not set, but other variables of its launcher are. Set all or none."
        raise AccelError(text) from None
    except ValueError:
        raise AccelError(f"{name}={environ[name]!r} is not an integer.") from None


def _check_range(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if not 0 <= rank < size:
        raise AccelError(
            f"{rank_name}={rank} and {size_name}={size} contradict each other. "
            "Ranks go from 0 to the number of processes minus 1."
        )


def _local_place(
    environ: Mapping[str, str], launcher: _Launcher, world_size: int
) -> tuple[int, int]:
    """Return the local rank and the local world size.

    Without a local rank, the process is alone on its node, as in Kubeflow's PyTorchJob. With a
    local rank but no local world size, all ranks may share the node.
    """
    if launcher.local_rank not in environ and environ.get(launcher.local_world_size, "1") == "1":
        return 0, 1
    local_rank = _integer(environ, launcher.local_rank)
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if launcher is _SLURM and counts and "SLURM_NODEID" in environ:
        return local_rank, _tasks_on_node(counts, _integer(environ, "SLURM_NODEID"))
    if launcher.local_world_size in environ:
        return local_rank, _integer(environ, launcher.local_world_size)
    return local_rank, world_size


def _tasks_on_node(counts: str, node: int) -> int:
    """Return a node's number of tasks from SLURM's list: ``2(x3),1`` means 2, 2, 2, 1."""
    tasks: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [int(count)] * int(repeats or 1)
    if not 0 <= node < len(tasks):
        raise AccelError(
            f"SLURM_NODEID={node} and SLURM_TASKS_PER_NODE={counts} contradict each other."
        )
    return tasks[node]


def expand_hosts(nodes: str) -> list[str]:
    """Return the nodes of a SLURM list: ``node[01-03,7]`` is node01, node02, node03, node7."""
    hosts = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        hosts += _expand_item(item)
    return hosts


def _expand_item(item: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    ranges, _, tail = rest.partition("]")
    numbers: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        stop = last if dash else first
        if not (first.isdecimal() and stop.isdecimal()):
            raise AccelError(f"The SLURM node list {item!r} is not in the form node[01-03,7].")
        for number in range(int(first), int(stop) + 1):
            numbers.append(str(number).zfill(len(first)))
    tails = _expand_item(tail)
    return [f"{head}{number}{end}" for number in numbers for end in tails]


def _master_host(environ: Mapping[str, str], launcher: _Launcher, one_node: bool) -> str | None:
    if launcher is _SLURM:
        for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
            if environ.get(name):
                return expand_hosts(environ[name])[0]
        return None
    if launcher is _HOROVODRUN:
        return environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    return "127.0.0.1" if one_node and launcher is not _TORCHRUN else None


def _master_port(environ: Mapping[str, str], launcher: _Launcher) -> int | None:
    if environ.get("MASTER_PORT"):
        return _integer(environ, "MASTER_PORT")
    identity = [environ[name] for name in launcher.job if name in environ]
    if not identity:
        return None
    # All ranks derive the same port. It is below the ephemeral ports, which other programs get.
    return 15000 + zlib.crc32(".".join(identity).encode()) % 10000
