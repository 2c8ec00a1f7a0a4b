"""Start the process groups of this rank after all ranks have met in a store."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from ..errors import AccelError, DeviceError, LaunchError
from .devices import Devices, available, default_backend, parse_backend, pick, resolve
from .launchers import Place, detect
from .order import Order
from .watchdog import Watchdog, disconnect_all, named

logger = logging.getLogger("accel")

# The maximum number of seconds between two reads of the store.
_LONGEST_PAUSE: Final = 0.5
# Keep every store: a later start uses it again, and other ranks may still read from it.
_stores: Final[dict[tuple[str, int], Store]] = {}


@final
@dataclass(eq=False, kw_only=True)
class Process:
    """The state of this process from ``init`` to ``shutdown``."""

    place: Place
    timeout: timedelta
    # refuse_fork compares it, because a forked child has a different pid.
    pid: int = field(default_factory=os.getpid)
    #: The ``devices=`` argument, and this rank's devices.
    request: object
    devices: Devices
    group: dist.ProcessGroup | None
    owns_group: bool = False
    #: accel's own gloo group for small messages, and the number of messages so far.
    control: dist.ProcessGroup | None = None
    rounds: int = 0
    #: The requested backend (None: the default), and the backend for each device type.
    requested: str | None = None
    backends: Mapping[str, str]
    #: The store of all ranks, this start's key prefix in the store, and every rank's host.
    store: Store | None = None
    token: str = ""
    hosts: list[str] = field(default_factory=list)
    watchdog: Watchdog | None = None
    #: Why the groups were shut down, and True if the ranks were in different collectives.
    ended: str = ""
    mismatch: bool = False
    #: The accel call in which this rank waits for others. The watchdog reports it.
    doing: str = ""
    order: Order = field(default_factory=Order)
    #: Objects that use the groups. Their ``abandon(reason)`` is called at shutdown.
    dependents: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    #: Functions that remove other libraries' references to the groups.
    releases: list[Callable[[], None]] = field(default_factory=list)
    meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)
    #: The groups of the meshes.
    subgroups: list[dist.ProcessGroup] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The first device of this rank."""
        return self.devices[0]

    def select(self) -> None:
        """Make a GPU the current device, which nccl and plain ``"cuda"`` use."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def carrier(self) -> torch.device:
        """The device of the tensors that ranks exchange."""
        # gloo copies GPU tensors to the CPU anyway, so accel does it first.
        if "cpu" in self.backends and self.backends.get(self.device.type) in (None, "gloo"):
            return torch.device("cpu")
        return self.device

    def end(self, reason: str, mismatch: bool) -> None:
        """Disconnect the groups from any thread."""
        if self.ended:
            return
        self.mismatch, self.ended = mismatch, reason
        if self.watchdog is not None:
            self.watchdog.tell_end(reason, mismatch)
        disconnect_all()

    def release(self, reason: str) -> None:
        """Detach engines, checkpoints and libraries from the groups."""
        for dependent in list(self.dependents):
            dependent.abandon(reason)
        self.dependents.clear()
        for release in self.releases:
            release()
        self.releases.clear()


# -- start -----------------------------------------------------------------------------------------


def start(requested: str | None, timeout: timedelta | None, request: object) -> Process:
    """Start this rank with the arguments of ``accel.init``. Collective."""
    place, group, problem = place_now(), dist.group.WORLD, ""
    devices: Devices = (torch.device("cpu"),)
    if group is not None:
        requested = dist.get_backend_config(group)
    backend = requested or "gloo"
    try:
        devices = pick(resolve(request), place.local_rank, place.local_world_size)
        if place.world_size > 1:
            backend = requested or default_backend(devices[0].type)
    except DeviceError as error:
        if place.world_size == 1:
            raise
        problem = str(error)
    process = Process(
        place=place,
        timeout=timeout or distributed_c10d.default_pg_timeout,
        request=request,
        devices=devices,
        group=group,
        requested=requested,
        backends=parse_backend(backend) if place.world_size > 1 or group else {},
    )
    if place.world_size > 1:
        try:
            _connect(process, backend, problem)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"accel could not start process group {backend!r} on {place.world_size} ranks: "
                f"{error}. On several nodes, set GLOO_SOCKET_IFNAME to an interface they share."
            ) from error
    process.select()
    return process


def place_now() -> Place:
    """Return this process's place, from its process group or the environment."""
    if not dist.is_initialized():
        return detect(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(AccelError):
        place = detect(os.environ)
        if (place.rank, place.world_size) == (rank, world):
            return place
    # torch.multiprocessing.spawn sets no variables. Its ranks usually fill the nodes in order.
    count = min(world, available()[1] or world)
    return Place("process group", rank, world, rank % count, count)


def _connect(process: Process, backend: str, problem: str) -> None:
    """Start the groups of this rank, or raise if a rank has a problem."""
    wait = Wait(process.place, process.timeout)
    store = distributed_c10d._get_default_store() if process.group else open_store(wait)
    process.store = store
    kind = process.device.type
    protocol = process.backends.get(kind)
    report = {"host": socket.gethostname(), "kind": f"{kind} by {protocol}", "problem": problem}
    process.token, reports = meet(store, wait, report)
    process.hosts = [report["host"] for report in reports]
    try:
        _check(reports)
    except DeviceError:
        # Rank 0 may host the store, so it waits until the other ranks have read the reports.
        if process.place.rank == 0:
            time.sleep(2 * _LONGEST_PAUSE)
        raise
    if process.group is None:
        # If an optimizer imported this module later, its default arguments would keep the group.
        importlib.import_module("torch.distributed.nn")
        # NCCL connects at once if bound to a device. gloo isn't bound, so ranks may share a GPU.
        binds = kind == "cuda" and protocol != "gloo"
        dist.init_process_group(
            backend,
            store=distributed_c10d.PrefixStore(f"accel/{process.token}", store),
            rank=process.place.rank,
            world_size=process.place.world_size,
            timeout=process.timeout,
            device_id=process.device if binds else None,
        )
        process.group, process.owns_group = dist.group.WORLD, True
    process.control = dist.new_group(
        timeout=process.timeout, backend="gloo", group_desc="accel control"
    )
    # Without this barrier, a rank that exits early breaks connections that others still open.
    dist.barrier(process.control)


def _check(reports: list[dict[str, str]]) -> None:
    """Raise if a rank has a problem or a different device type."""
    expected = reports[0]["kind"]
    for rank, report in enumerate(reports):
        if report["problem"]:
            raise DeviceError(f"rank {rank}: {report['problem']}")
        if report["kind"] != expected:
            raise DeviceError(f"rank {rank} uses {report['kind']}, but rank 0 uses {expected}")


# -- the store in which the ranks meet -------------------------------------------------------------


@dataclass
class Wait:
    """A wait for the other ranks, for at most ``limit``."""

    place: Place
    limit: timedelta
    begin: float = field(default_factory=time.monotonic)
    next_log: float = 10.0

    def left(self) -> float:
        """Return the seconds until the next log line or the limit."""
        due = min(self.next_log, self.limit.total_seconds())
        return self.begin + due - time.monotonic()

    def note(self, missing: list[int]) -> None:
        """Log the missing ranks after 10, 20, 40 s. Raise LaunchError at the limit."""
        place, limit = self.place, self.limit.total_seconds()
        waited = time.monotonic() - self.begin
        text = f"rank {place.rank} has waited {waited:.0f} s (of {limit:g}) for {named(missing)}"
        if place.master_addr is not None:
            text += f" at {place.master_addr}:{place.master_port}"
        if waited >= limit:
            raise LaunchError(
                f"{text}. Start as many processes as WORLD_SIZE says, and call accel.setup or "
                "accel.init on every rank."
            )
        logger.warning("%s. It has not started, has ended, or doesn't call accel.setup.", text)
        self.next_log = 2 * waited


def open_store(wait: Wait) -> Store:
    """Connect to the job's store, on rank 0 or in torchrun's agent."""
    place = wait.place
    if place.master_addr is None or place.master_port is None:
        raise LaunchError(
            f"{place.launcher} started {place.world_size} processes without an address. "
            "Set MASTER_ADDR to the node of rank 0 and MASTER_PORT to a free port."
        )
    address = (place.master_addr, place.master_port)
    is_server = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while address not in _stores:
        try:
            _stores[address] = dist.TCPStore(  # type: ignore[attr-defined]
                *address,
                is_master=is_server,
                timeout=timedelta(seconds=max(0.1, wait.left())),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except dist.DistNetworkError:
            if is_server:
                raise
            wait.note([0])
    _stores[address].set_timeout(wait.limit)
    return _stores[address]


def meet(store: Store, wait: Wait, report: dict[str, str]) -> tuple[str, list[dict[str, str]]]:
    """Return a new name for this start, and the reports of all ranks. Collective."""
    # torchrun keeps its store across restarts, so it has keys of processes that have exited. So
    # rank 0 creates a new name, and a rank accepts a name only if its reports have its ticket.
    rank, ticket = wait.place.rank, uuid.uuid4().hex
    message = json.dumps({"ticket": ticket, **report})
    if rank == 0:
        store.set("accel/start", ticket)
    keys: list[str] = []
    pause = 0.001
    while True:
        if store.check(["accel/start"]):
            name = store.get("accel/start").decode()
            keys = [f"accel/{name}/{other}" for other in range(wait.place.world_size)]
            everything = f"accel/{name}/all"
            store.set(keys[rank], message)
            if name == ticket and store.check(keys):
                messages = b",".join(store.multi_get(keys)).decode()
                store.set(everything, f"[{messages}]")
            if store.check([everything]):
                reports: list[dict[str, str]] = json.loads(store.get(everything))
                if reports[rank]["ticket"] == ticket:
                    return name, reports
        if wait.left() <= 0:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            wait.note(missing or [0])
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)


@contextlib.contextmanager
def unseen_group() -> Iterator[None]:
    """Hide the default process group from imports inside."""
    # Libraries use the group as a default argument. The group and gloo's threads would then live
    # until the interpreter exits, and a thread that frees a tensor at exit aborts the process.
    group, dist.group.WORLD = dist.group.WORLD, None
    try:
        yield
    finally:
        dist.group.WORLD = group


def mesh_of(process: Process, axes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with these axes. Collective if new."""
    key = tuple(axes.items())
    if key in process.meshes:
        return process.meshes[key]
    ranks = torch.arange(process.place.world_size, device="cpu").view(*axes.values())
    groups: Any = []
    # Create the groups here, because init_device_mesh uses torch's default timeout.
    for axis, size in enumerate(axes.values() if len(axes) > 1 else ()):
        lines = ranks.movedim(axis, -1).reshape(-1, size).tolist()
        group, _ = dist.new_subgroups_by_enumeration(lines, process.timeout)
        groups.append(group)
    process.subgroups += groups
    # Each start needs new names: DTensor's caches would reuse an old mesh with destroyed groups.
    names = tuple(f"{name} {process.token[:8]}" for name in axes)
    kind = process.device.type
    mesh = DeviceMesh.from_group(groups or [process.group], kind, mesh=ranks, mesh_dim_names=names)
    # The caches keep the mesh forever. Clear its registry, or the groups stay alive as well.
    process.releases.append(getattr(mesh, "_pg_registry", {}).clear)
    process.meshes[key] = mesh
    return mesh
