"""Start the process groups of this rank, and end them."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
import uuid
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
from .devices import (
    available,
    check_not_shared,
    default_backend,
    identity,
    parse_backend,
    pick,
    resolve,
    why_unserved,
)
from .launchers import ALONE, Place, detect
from .order import Order
from .packing import gather_values
from .rendezvous import MARGIN, Rendezvous, elapsed, give_margin, unreachable_hint
from .watchdog import Watchdog, accelerator_backends

#: The local rank if you started the process group, until the ranks have exchanged their hosts.
UNKNOWN: Final = -1


@final
@dataclass(eq=False, kw_only=True)
class Process:
    """This process as accel knows it, from ``init`` to ``shutdown``.

    Attributes:
        pid: a forked child has a different number.
        request: ``devices=`` as the user passed it.
        asked: the devices of this node that the request means.
        devices: the devices of this rank among them.
        group: the default process group. accel destroys it if ``owns_group``.
        control: accel's own gloo group, for small messages.
        backends: the backend of ``group`` for each device type.
        explicit: the user named the backend. Ranks may then share an accelerator through gloo.
        token: the name of this start, for keys in the store that all ranks share.
        ended: why the groups were ended. The watchdog sets it while this thread waits.
        hosts: the host names of all ranks.
        rounds: the number of messages exchanged on the control group.
        doing: the accel call in which this rank waits for others, for the watchdog.
        order: the collectives of the engines, to predict the next.
        dependents: objects that use the groups. ``abandon(reason)`` tells them of the end.
        meshes: device meshes of all ranks, by their axes.
        subgroups: the process groups along the axes of the meshes.
        releases: functions that make other libraries let go of the groups.
    """

    place: Place
    timeout: timedelta
    pid: int = field(default_factory=os.getpid)
    request: object
    asked: tuple[torch.device, ...]
    devices: tuple[torch.device, ...]
    group: dist.ProcessGroup | None
    owns_group: bool = False
    control: dist.ProcessGroup | None = None
    backends: Mapping[str, str] = field(default_factory=dict)
    explicit: bool = False
    token: str = ""
    watchdog: Watchdog | None = None
    ended: str = ""
    hosts: tuple[str, ...] = ()
    rounds: int = 0
    doing: str = ""
    order: Order = field(default_factory=Order)
    dependents: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)
    subgroups: list[dist.ProcessGroup] = field(default_factory=list)
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
        return device.type == "cpu" or (self.explicit and self.backends.get(device.type) == "gloo")

    def store(self, *names: str, own_connection: bool = False) -> distributed_c10d.Store:
        """Return the keys of this start in the store that all ranks share.

        Args:
            own_connection: for a thread beside the training thread, because a connection does one
                thing at a time. Connect while all ranks are there.
        """
        store: Any = distributed_c10d._get_default_store()
        path = "/".join(("accel", self.token, *names))
        return distributed_c10d.PrefixStore(path, store.clone() if own_connection else store)


# -- start -----------------------------------------------------------------------------------------


def start(
    backend: str | None, timeout: timedelta | None, request: object, rendezvous: Rendezvous
) -> Process:
    """Start this rank. Collective. If a rank has a problem with its devices, all ranks raise it."""
    place, problem = place_now(), ""
    explicit = backend is not None or dist.is_initialized()
    try:
        asked = resolve(request)
        if place.world_size > 1:
            backend = backend or default_backend(asked[0].type)
    except DeviceError as error:
        if place.world_size == 1:
            raise
        asked, problem = (torch.device("cpu"),), str(error)
    group = dist.group.WORLD
    process = Process(
        place=place,
        timeout=timeout or _default_timeout(group),
        request=request,
        asked=asked,
        devices=asked,
        group=group,
        backends={} if group is None else parse_backend(dist.get_backend_config(group)),
        explicit=explicit,
    )
    if place.world_size > 1:
        # A rank with a problem must choose the same backend as the others, to tell them.
        backend = backend or default_backend(available()[0])
        _connect(process, backend, problem, rendezvous)
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
    return replace(
        ALONE, launcher="process group", rank=rank, world_size=world, local_rank=local_rank
    )


def select(device: torch.device) -> None:
    """Make a GPU the current device, which nccl and plain ``"cuda"`` use."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _default_timeout(group: dist.ProcessGroup | None) -> timedelta:
    """Return torch's default timeout, or less if your own process group has a shorter one."""
    limits = [distributed_c10d.default_pg_timeout]
    for backend in [] if group is None else accelerator_backends(group):
        limit = getattr(getattr(backend, "options", None), "_timeout", None)
        if limit is not None:
            limits.append(max(limit - MARGIN, limit / 2))
    return min(limits)


def _connect(process: Process, backend: str, problem: str, rendezvous: Rendezvous) -> None:
    begin = time.monotonic()
    if process.group is None:
        # Optimizers import it later. Imported now, it can't hold on to the group: `unseen_group`.
        importlib.import_module("torch.distributed.nn")
        device = None if problem else _accelerator_of(process)
        process.group = rendezvous.make_group(process.place, backend, process.timeout, device)
        process.owns_group = True
        process.backends = parse_backend(dist.get_backend_config(process.group))
    try:
        process.control = dist.new_group(
            timeout=process.timeout, backend="gloo", group_desc="accel control"
        )
        # torchrun's store outlives restarts, with the keys of the ranks that failed.
        process.token = exchange(process, uuid.uuid4().hex)[0]
        _agree_on_devices(process, problem)
    except BaseException as error:
        destroy_groups(process)
        if not isinstance(error, RuntimeError):
            raise
        world = process.place.world_size
        raise LaunchError(
            f"accel did not start on all {world} ranks, {elapsed(begin, process.timeout)} "
            f"({error}): every rank must call accel.setup or accel.init."
            f"{unreachable_hint(process.place)}"
        ) from error


def _accelerator_of(process: Process) -> torch.device | None:
    """Return this rank's accelerator with its index. None for XLA, unknown to torch.accelerator."""
    place = process.place
    device = pick(process.asked, place.local_rank, place.local_world_size)[0]
    accelerator = torch.accelerator.current_accelerator()
    known = accelerator is not None and device.type == accelerator.type and device.index is not None
    return device if known else None


def _agree_on_devices(process: Process, problem: str) -> None:
    """Choose this rank's device. All ranks raise if a rank has a problem or two share a device."""
    host, first = socket.gethostname(), process.asked[0]
    problem = problem or why_unserved(first, process.backends)
    kind = f"{first.type} by {process.backends.get(first.type)}"
    reports = exchange(process, (problem, host, kind))
    for rank, (text, *_) in enumerate(reports):
        if text:
            raise DeviceError(f"rank {rank}: {text}")
    process.hosts = tuple(host for _, host, _ in reports)
    kinds = [kind for _, _, kind in reports]
    if len(set(kinds)) > 1:
        names = ", ".join(kinds)
        raise DeviceError(f"The ranks use different devices: {names}. Use the same kind on all.")
    if process.place.local_rank == UNKNOWN:
        neighbors = [rank for rank, other in enumerate(process.hosts) if other == host]
        local_rank = neighbors.index(process.place.rank)
        process.place = replace(
            process.place, local_rank=local_rank, local_world_size=len(neighbors)
        )
    process.devices = pick(process.asked, process.place.local_rank, process.place.local_world_size)
    if not process.shares(first):
        check_not_shared(exchange(process, identity(process.device, host)))


def exchange(process: Process, value: object) -> list[Any]:
    """Return every rank's value, before ``agree`` works. Collective."""
    assert process.control is not None
    return gather_values(value, process.control, process.timeout)


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


# The tokens of the starts of this process that made a mesh.
_starts: Final[list[str]] = []


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


def _new_mesh(process: Process, axes: Mapping[str, int]) -> DeviceMesh:
    assert process.group is not None
    kind = process.device.type
    if len(axes) == 1:
        return DeviceMesh.from_group(process.group, kind, mesh_dim_names=tuple(axes))
    ranks = torch.arange(process.place.world_size, device="cpu").view(*axes.values())
    groups = []
    for axis, name in enumerate(axes):
        lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
        group, _ = dist.new_subgroups_by_enumeration(
            lines, process.timeout, group_desc=f"accel {name}"
        )
        give_margin(group, process.timeout)
        groups.append(group)
    process.subgroups += groups
    # DTensor's caches compare meshes, and an earlier start's mesh names groups that are gone.
    if process.token not in _starts:
        _starts.append(process.token)
    number = len(_starts)
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
