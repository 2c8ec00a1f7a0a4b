"""What surrounds this process: its place among the ranks, from its launcher's variables, and the devices of its machine.

The grammar of ``devices=``:

None, 0, "cpu"      the CPU
3, -1               the first three accelerators, all of them
[1, 3], "1, 3"      these accelerators ("3" is the one numbered 3)
"-1"                all accelerators
"auto"              all accelerators, else the CPU
"free:2"            two accelerators that no other process occupies
"cuda:1"            one device by its torch name, also as torch.device or in a list
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import AccelError, DeviceError

# -- the place among the ranks -----------------------------------------------------------------------------------------


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
    return _Launcher(
        name, prefix + "RANK", prefix + "SIZE", prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE", job
    )


_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_HOROVODRUN = _prefixed("horovodrun", "HOROVOD_", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_OPENMPI = _prefixed("OpenMPI", "OMPI_COMM_WORLD_", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_MPICH = _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID")
_SLURM = _Launcher(
    "SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", _SLURM_JOB
)


def detect(environ: Mapping[str, str]) -> Place:
    """Reads the place of this process from the variables of its launcher; without any, a world of one.

    AccelError where they are incomplete, not integers, or contradict each other.
    """
    launcher = _find(environ)
    if launcher is None:
        _refuse_missing_agent(environ)
        return ALONE
    names = (launcher.rank, launcher.size, launcher.local_rank, launcher.local_size)
    for name in names[:2]:
        if name not in environ:
            found = ", ".join(f"{other}={environ[other]}" for other in names if other in environ)
            raise AccelError(
                f"{name} is not set, but {found} of {launcher.name} is: set all of its variables, or none"
            )
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
            raise AccelError(
                f"{name}={environ[name]} contradicts {launcher.name}, which says {value}: unset {name}"
            )
    addr, port = _master(
        environ, launcher, single_host=local_world == world and launcher.local_size in environ
    )
    return Place(launcher.name, rank, world, local_rank, local_world, addr, port)


def _find(environ: Mapping[str, str]) -> _Launcher | None:
    """The launcher that started this process: the innermost, where one runs under another."""
    for launcher in (_TORCHRUN, _HOROVODRUN, _OPENMPI):
        if launcher.rank in environ and launcher.size in environ:
            return launcher
    if _MPICH.rank in environ and _MPICH.local_rank in environ:
        return _MPICH
    if _in_slurm_step(environ):
        return _SLURM
    for launcher in (_MPICH, _TORCHRUN, _HOROVODRUN, _OPENMPI):
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
    """Raise if Kubeflow Trainer's PET_* variables configure torchrun, but the script runs without it."""
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
        first = environ.get(name, "1").partition(":")[0]
        if first.isdecimal() and int(first) > 1:
            raise AccelError(
                f"{name}={environ[name]} asks for several processes, but RANK and WORLD_SIZE are not set: "
                "start the script with torchrun, which reads the PET_* variables"
            )


def _integer(environ: Mapping[str, str], name: str) -> int:
    if name not in environ:
        raise AccelError(
            f"{name} is not set, but other variables of the same launcher are: set all or none of them"
        )
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
        raise AccelError(
            f"SLURM_NODEID={node} contradicts SLURM_TASKS_PER_NODE={counts}, which has {len(tasks)} nodes"
        )
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
            raise AccelError(
                f"cannot read the SLURM node list {item!r}: expected a form such as node[01-03,7]"
            )
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(stop) + 1)]
    return [head + number + end for number in numbers for end in _expand(tail)]


def _master(
    environ: Mapping[str, str], launcher: _Launcher, single_host: bool
) -> tuple[str | None, int | None]:
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
    return "127.0.0.1" if single_host and launcher is not _TORCHRUN else None


# -- what a request for devices means ----------------------------------------------------------------------------------

_CPU = (torch.device("cpu"),)
_IDLE_MEMORY = 64  # MiB: less than a CUDA context takes, more than the driver itself


def available() -> tuple[str, int]:
    """The kind of accelerator that torch finds on this machine and how many; ``("cpu", 0)`` without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return accelerator.type, torch.accelerator.device_count()
    if os.environ.get("PJRT_DEVICE") and importlib.util.find_spec("torch_xla"):
        torch_xla = importlib.import_module(
            "torch_xla"
        )  # torch.accelerator does not know its devices
        return torch_xla.device().type, torch_xla.device_count()
    return "cpu", 0


def resolve(devices: object) -> tuple[torch.device, ...]:
    """What a request means on this machine; ``"auto"`` is what ACCEL_DEVICES says, where it says something."""
    outside = (
        os.environ.get("ACCEL_DEVICES") if isinstance(devices, str) and devices == "auto" else None
    )
    kind, count = available()
    try:
        return parse_devices(outside or devices, count, kind)
    except DeviceError as error:
        if not outside:
            raise
        raise DeviceError(f"ACCEL_DEVICES={outside!r}: {error}") from None


def parse_devices(
    devices: object, count: int, kind: str = "cuda", probe: Callable[[int], bool] | None = None
) -> tuple[torch.device, ...]:
    """The devices that a request means, among ``count`` accelerators of a kind; DeviceError where there are none such.

    ``probe`` tells whether another process occupies the accelerator of a number; the driver does if None.
    """
    request = _Request(devices, count, kind)
    if devices is None:
        return _CPU
    if isinstance(devices, str):
        return request.text(devices.strip(), probe or _occupied)
    if isinstance(devices, bool):
        raise request.error("a bool says neither how many nor which")
    if isinstance(devices, int):
        return request.first(devices) if devices else _CPU
    if isinstance(devices, torch.device) and devices.type == "cpu":
        return _CPU
    return request.these(
        [request.number(d) for d in (devices if isinstance(devices, list | tuple) else [devices])]
    )


class _Request:
    def __init__(self, devices: object, count: int, kind: str) -> None:
        self.devices, self.count, self.kind = devices, count, kind

    def error(self, reason: str) -> DeviceError:
        names = ", ".join(f"{self.kind}:{index}" for index in range(self.count))
        found = (
            f"this machine has {names} and cpu"
            if names
            else "this machine has no accelerator, only cpu"
        )
        return DeviceError(
            f"devices={self.devices!r}: {reason}; {found}. Ask for a number of devices (2, -1 for all), "
            "a list ([0, 1]), their numbers ('0, 1'), 'free:2', 'cpu' or 'auto'"
        )

    def these(self, indices: list[int]) -> tuple[torch.device, ...]:
        if not indices:
            raise self.error("an empty list")
        for index in indices:
            if not 0 <= index < self.count:
                raise self.error(f"there is no accelerator number {index}")
        if len(set(indices)) < len(indices):
            raise self.error("a device is named twice")
        return tuple(torch.device(self.kind, index) for index in indices)

    def first(self, number: int) -> tuple[torch.device, ...]:
        if number < -1:
            raise self.error("the only negative value is -1, all accelerators")
        if number > self.count or self.count == 0:
            wanted = "all accelerators are" if number == -1 else f"{number} accelerators are"
            raise self.error(f"{wanted} asked for, {self.count} exist")
        return self.these(list(range(self.count if number == -1 else number)))

    def number(self, item: object) -> int:
        if isinstance(item, int) and not isinstance(item, bool):
            return item
        device: Any = None
        with contextlib.suppress(RuntimeError):
            device = torch.device(item) if isinstance(item, str) else item
        if not isinstance(device, torch.device):
            raise self.error(f"{item!r} is no device")
        if device.type != self.kind or self.count == 0:
            raise self.error(
                "give 'cpu' alone"
                if device.type == "cpu"
                else f"there is no {device.type} accelerator"
            )
        index: int | None = device.index
        if index is None and self.count > 1:
            raise self.error(
                f"{str(device)!r} does not say which: name '{device.type}:0', or ask for -1, all of them"
            )
        return index or 0

    def text(self, text: str, probe: Callable[[int], bool]) -> tuple[torch.device, ...]:
        if text in ("cpu", "cpu:0") or (text == "auto" and self.count == 0):
            return _CPU
        if text in ("auto", "-1"):
            return self.first(-1)
        if text.startswith("free:"):
            return self.free(text.removeprefix("free:"), probe)
        if re.fullmatch(r"[0-9]+(\s*,\s*[0-9]+)*", text):
            return self.these([int(number) for number in text.split(",")])
        if re.fullmatch(r"[a-z]+(:[0-9]+)?", text):
            return self.these([self.number(text)])
        raise self.error("not in the known form")

    def free(self, wanted: str, probe: Callable[[int], bool]) -> tuple[torch.device, ...]:
        if not re.fullmatch(r"[1-9][0-9]*", wanted):
            raise self.error("expected free: and how many, as 'free:2'")
        free = [index for index in range(self.count) if not probe(index)]
        if len(free) < int(wanted):
            raise self.error(f"{wanted} free accelerators are asked for, free are {free}")
        return self.these(free[: int(wanted)])


def _occupied(index: int) -> bool:
    """Whether another process occupies this GPU, from the driver: allocating there would itself occupy it."""
    if not torch.cuda.is_available():
        raise DeviceError(
            "devices='free:...' can be told for CUDA devices only: name the devices instead"
        )
    query = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
    try:
        rows = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=30
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(
            f"devices='free:...' needs nvidia-smi, which failed ({error}): name the devices"
        ) from error
    used = {
        name.strip().removeprefix("GPU-"): memory
        for name, memory in (row.split(",") for row in rows)
    }
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    if not used.get(uuid, "").strip().isdecimal():
        raise DeviceError(
            f"nvidia-smi does not tell the used memory of cuda:{index}: name the devices instead"
        )
    return int(used[uuid]) > _IDLE_MEMORY


# -- which of them a rank takes, and what carries their tensors between ranks ------------------------------------------


def pick(
    devices: tuple[torch.device, ...], local_rank: int, local_world_size: int
) -> tuple[torch.device, ...]:
    """The devices of one rank: all where it is alone on its host, else its own one.

    The number wraps round, since a launcher may show each rank nothing but its own device, as the first one.
    """
    return devices if local_world_size == 1 else (devices[local_rank % len(devices)],)


def identity(device: torch.device, host: str) -> str:
    """The physical device, since its number depends on what the process can see."""
    if device.type == "cuda":
        return f"GPU {torch.cuda.get_device_properties(device).uuid}"
    return f"{device} of {host}"


def refuse_shared(owners: Sequence[str]) -> None:
    """Refuses ranks with one physical device; ``owners`` is each rank's ``identity``."""
    for owner in owners:
        ranks = [rank for rank, other in enumerate(owners) if other == owner]
        if len(ranks) > 1:
            raise DeviceError(
                f"ranks {ranks} would share one device ({owner}): start fewer processes, set LOCAL_RANK, show each "
                "process a device of its own, or let them share it with accel.init(process_group='gloo')"
            )


def unserved(device: torch.device, backends: Mapping[str, str]) -> str:
    """Why the process group cannot carry this device's tensors; empty where it can."""
    if device.type in backends:
        return ""
    return f"the process group has no backend for {device.type} tensors, only {dict(backends)}"


def default_backend(kind: str) -> str:
    """The backend of torch.distributed for a type of device; CPU tensors always have theirs."""
    if kind == "cpu" or (kind == "cuda" and not dist.is_nccl_available()):
        return "gloo"
    if kind not in dist.Backend.default_device_backend_map:
        raise DeviceError(
            f"torch.distributed has no backend for {kind} devices: use devices='cpu', or one process"
        )
    return f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map[kind]}"


def parse_backend(text: str) -> dict[str, str]:
    """Device type to backend, from torch's form: ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``; AccelError for another one."""
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    asked = (
        [part.rpartition(":")[2] for part in text.lower().split(",")]
        if isinstance(text, str)
        else []
    )
    if not asked or not set(asked) <= set(known):
        raise AccelError(
            f"process_group={text!r}: expected one of {', '.join(known)}, or a form 'cpu:gloo,cuda:nccl'"
        )
    try:
        served = dist.BackendConfig(dist.Backend(text)).get_device_backend_map()
    except ValueError as error:
        raise AccelError(f"process_group={text!r}: {' '.join(str(error).split())}") from error
    return {device: str(name) for device, name in served.items()}
