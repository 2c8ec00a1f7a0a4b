"""Start the process groups of this rank, and end them."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ..errors import AccelError, DeviceError, LaunchError
from .devices import default_backend, identity, parse_backend, pick, resolve
from .launchers import Place, detect
from .order import Order
from .rendezvous import LONGEST_PAUSE, StartReport, Wait, meet, open_store
from .watchdog import Watchdog, accelerator_backends, disconnect_all

#: The local rank if you started the process group, until the ranks have exchanged their hosts.
UNKNOWN: Final = -1
_MARGIN: Final = timedelta(minutes=1)


@final
@dataclass(eq=False, kw_only=True)
class Process:
    """This process as accel knows it, from ``init`` to ``shutdown``."""

    place: Place
    timeout: timedelta
    pid: int = field(default_factory=os.getpid)  # a forked child has a different number
    request: object  # devices= as the user passed it
    asked: tuple[torch.device, ...]  # the devices of this node that the request means
    devices: tuple[torch.device, ...]  # the devices of this rank among them
    group: dist.ProcessGroup | None
    owns_group: bool = False
    control: dist.ProcessGroup | None = None  # accel's own gloo group, for small messages
    requested: str | None = None  # the backend of ``group``, if the user named it
    backends: Mapping[str, str]  # of ``group``, by device type
    token: str = ""  # the name of this start, for keys in the store that all ranks share
    watchdog: Watchdog | None = None
    ended: str = ""  # why the groups were ended. The watchdog sets it while this thread waits
    mismatch: bool = False  # they were ended because the ranks were at different collectives
    hosts: tuple[str, ...] = ()  # of all ranks
    rounds: int = 0  # messages exchanged on the control group
    doing: str = ""  # the accel call in which this rank waits for others, for the watchdog
    order: Order = field(default_factory=Order)  # predicts the next collective of the engines
    #: Objects that use the groups. ``abandon(reason)`` tells them of the end.
    dependents: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)
    subgroups: list[dist.ProcessGroup] = field(default_factory=list)  # of the meshes
    #: Functions that make other libraries let go of the groups.
    releases: list[Callable[[], None]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The first device of this rank."""
        return self.devices[0]

    @property
    def carrier(self) -> torch.device:
        """The device on which tensors travel between ranks."""
        through_gloo = self.backends.get(self.device.type) in (None, "gloo")
        return torch.device("cpu") if "cpu" in self.backends and through_gloo else self.device

    def shares(self, device: torch.device) -> bool:
        """True if several ranks may use this device."""
        through_gloo = self.requested is not None and self.backends.get(device.type) == "gloo"
        return device.type == "cpu" or through_gloo

    def end(self, reason: str, mismatch: bool) -> None:
        """Do the part of an end that works while the training thread waits in a collective."""
        if not self.ended:
            self.mismatch, self.ended = mismatch, reason
            if self.watchdog is not None:
                self.watchdog.tell_end(reason, mismatch)
        disconnect_all()


# -- start -----------------------------------------------------------------------------------------


def start(requested: str | None, timeout: timedelta | None, request: object) -> Process:
    """Start this rank. Collective. If a rank has a problem with its devices, all ranks raise it.

    Args:
        requested: a backend for the process group. None: the backend for the devices.
        request: the devices of this node's processes, as in ``accel.setup``.
    """
    place, group, problem = place_now(), dist.group.WORLD, ""
    asked: tuple[torch.device, ...] = (torch.device("cpu"),)
    if group is not None:
        requested = dist.get_backend_config(group)
    backend = requested or "gloo"
    try:
        asked = resolve(request)
        if place.world_size > 1:
            backend = requested or default_backend(asked[0].type)
    except DeviceError as error:
        if place.world_size == 1:
            raise
        problem = str(error)
    process = Process(
        place=place,
        timeout=timeout or distributed_c10d.default_pg_timeout,
        request=request,
        asked=asked,
        devices=pick(asked, place.local_rank, place.local_world_size),
        group=group,
        requested=requested,
        backends=parse_backend(backend) if place.world_size > 1 or group else {},
    )
    if place.world_size > 1:
        try:
            _connect(process, backend, problem)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"accel did not start process group {backend!r} on {place.world_size} ranks: "
                f"{error}. On several nodes, set GLOO_SOCKET_IFNAME to a network that they share."
            ) from error
    select(process.device)
    return process


def place_now() -> Place:
    """Return this process's place, from the default process group or else the environment."""
    if not dist.is_initialized():
        return detect(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(AccelError):
        place = detect(os.environ)
        if (place.rank, place.world_size) == (rank, world):
            return place
    local_rank = 0 if world == 1 else UNKNOWN
    return Place("process group", rank, world, local_rank)


def select(device: torch.device) -> None:
    """Make a GPU the current device, which nccl and plain ``"cuda"`` use."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _connect(process: Process, backend: str, problem: str) -> None:
    """Start the groups of this rank, after all ranks have told that they can."""
    wait = Wait(process.place, process.timeout)
    store = distributed_c10d._get_default_store() if process.group else open_store(wait)
    process.token, reports = meet(store, wait, _report(process, problem))
    _check_devices(process, reports)
    if process.group is None:
        # Optimizers import it later. Imported now, it can't hold on to the group.
        importlib.import_module("torch.distributed.nn")
        dist.init_process_group(
            backend,
            store=distributed_c10d.PrefixStore(f"accel/{process.token}", store),
            rank=process.place.rank,
            world_size=process.place.world_size,
            timeout=process.timeout,
            device_id=_device_to_bind(process),
        )
        group = process.group = dist.group.WORLD
        assert group is not None
        process.owns_group = True
        give_margin(group, process.timeout)
    try:
        process.control = dist.new_group(
            timeout=process.timeout, backend="gloo", group_desc="accel control"
        )
        # A rank that ends now would close connections that other ranks still make.
        dist.barrier(process.control)
    except RuntimeError:
        destroy_groups(process)
        raise


def _report(process: Process, problem: str) -> StartReport:
    kind, host = process.asked[0].type, socket.gethostname()
    # Without a local rank, this rank's place among those of its host says which device it gets.
    devices = process.asked if process.place.local_rank == UNKNOWN else process.devices[:1]
    names = [] if problem else [identity(device, host) for device in devices]
    if not problem and kind not in process.backends:
        problem = f"the process group sends no {kind} tensors, only {dict(process.backends)}"
    return StartReport(host, f"{kind} by {process.backends.get(kind)}", names, problem)


def _check_devices(process: Process, reports: list[StartReport]) -> None:
    """Choose the rank's device. All ranks raise if a rank has a problem or two share a device."""
    hosts = process.hosts = tuple(report.host for report in reports)
    place = process.place
    problems: list[str] = []
    owners: dict[str, int] = {}
    for rank, report in enumerate(reports):
        if report.problem:
            problems.append(f"rank {rank}: {report.problem}")
            continue
        device = report.devices[hosts[:rank].count(report.host) % len(report.devices)]
        other = owners.setdefault(device, rank)
        if report.kind != reports[0].kind:
            problems.append(f"rank {rank} uses {report.kind}, but rank 0 {reports[0].kind}")
        elif other != rank and not process.shares(process.device):
            problems.append(
                f"ranks {other} and {rank} would share one device ({device}). Start fewer "
                'processes, set LOCAL_RANK, or call accel.init(process_group="gloo") to share it.'
            )
    if problems:
        if place.rank == 0:  # the store may end with this process, and the others still read it
            time.sleep(2 * LONGEST_PAUSE)
        raise DeviceError(problems[0])
    if place.local_rank == UNKNOWN:
        host = hosts[place.rank]
        local_rank, local_world_size = hosts[: place.rank].count(host), hosts.count(host)
        process.place = replace(place, local_rank=local_rank, local_world_size=local_world_size)
        process.devices = pick(process.asked, local_rank, local_world_size)


def _device_to_bind(process: Process) -> torch.device | None:
    """Return this rank's accelerator. A group that is bound to its device connects at once.

    Return None for XLA, unknown to torch.accelerator, and for ranks that share a GPU through gloo.
    """
    accelerator, device = torch.accelerator.current_accelerator(), process.device
    known = accelerator is not None and device.type == accelerator.type and device.index is not None
    return device if known and not process.shares(device) else None


def give_margin(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let nccl's timeout, after which it ends the process, come after accel's error."""
    for backend in accelerator_backends(group):
        set_timeout = getattr(backend, "_set_default_timeout", None)
        set_timeout = set_timeout or getattr(backend, "set_timeout", None)
        if set_timeout is not None:
            set_timeout(timeout + _MARGIN)


# -- meshes, and the end ---------------------------------------------------------------------------


@contextlib.contextmanager
def unseen_group() -> Iterator[None]:
    """Hide the default process group from the imports inside.

    Libraries have the group as a default argument. It would live until the interpreter ends, and
    with it gloo's threads: a thread that then frees a tensor aborts the process.
    """
    group, dist.group.WORLD = dist.group.WORLD, None
    try:
        yield
    finally:
        dist.group.WORLD = group


def mesh_of(process: Process, axes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with these named axes. Collective if it is new.

    Neighboring ranks are along the last axis.
    """
    key = tuple(axes.items())
    if key not in process.meshes:
        mesh = process.meshes[key] = _new_mesh(process, axes)
        # DTensor's caches keep the mesh forever, and with it the groups that it registers.
        process.releases.append(getattr(mesh, "_pg_registry", {}).clear)
    return process.meshes[key]


# The starts of this process that made a mesh.
_tokens: Final[list[str]] = []


def _new_mesh(process: Process, axes: Mapping[str, int]) -> DeviceMesh:
    kind = process.device.type
    if len(axes) == 1:
        assert process.group is not None
        return DeviceMesh.from_group(process.group, kind, mesh_dim_names=tuple(axes))
    ranks = torch.arange(process.place.world_size, device="cpu").view(*axes.values())
    groups = []
    # init_device_mesh would give the groups torch's timeout.
    for axis, name in enumerate(axes):
        lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
        group, _ = dist.new_subgroups_by_enumeration(
            lines, process.timeout, group_desc=f"accel {name}"
        )
        give_margin(group, process.timeout)
        groups.append(group)
    process.subgroups += groups
    # DTensor's caches compare meshes by name, and an earlier start's mesh has groups that are gone.
    if process.token not in _tokens:
        _tokens.append(process.token)
    number = len(_tokens)
    names = tuple(axes) if number == 1 else tuple(f"{name} (start {number})" for name in axes)
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)


def destroy_groups(process: Process) -> None:
    """Destroy the groups that accel made."""
    if process.owns_group:
        dist.destroy_process_group()
        return
    for group in (process.control, *process.subgroups):
        if group is not None:
            dist.destroy_process_group(group)
