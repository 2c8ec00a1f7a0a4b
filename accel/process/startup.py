"""How this process comes up: its place, its devices, its process groups; and how the groups come down."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import pickle
import socket
import threading
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
from torch.distributed.rendezvous import rendezvous as rendezvous_at

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
from .packing import begin_gather, gather_framed, to_bytes
from .watchdog import Watchdog, accelerator_backends

logger = logging.getLogger("accel")


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

    def begin_exchange(self, message: bytes) -> tuple[Any, list[torch.Tensor]]:
        """Start to gather all ranks' messages of equal lengths on the control group."""
        assert self.control is not None
        return begin_gather(message, self.control)

    def shares(self, device: torch.device) -> bool:
        """True if several ranks may use this device."""
        return device.type == "cpu" or (self.explicit and self.backends.get(device.type) == "gloo")

    def store(self, *names: str, aside: bool = False) -> distributed_c10d.Store:
        """Return the keys of this start in the store that all ranks share.

        Args:
            aside: use the connection for threads other than the training thread.
        """
        store = self._aside if aside else distributed_c10d._get_default_store()
        return distributed_c10d.PrefixStore("/".join(("accel", self.token, *names)), store)

    def new_store(self, name: str) -> distributed_c10d.Store:
        """Return a store with its own connection. Connects while all ranks are there."""
        store: Any = distributed_c10d._get_default_store()
        return distributed_c10d.PrefixStore(f"accel/{self.token}/{name}", store.clone())

    @functools.cached_property
    def _aside(self) -> Any:
        # A connection does one thing at a time, and the training thread's may be waiting.
        store: Any = distributed_c10d._get_default_store()
        return store.clone()


UNKNOWN = (
    -1
)  # the local rank in a process group made outside accel, until the ranks have told their hosts


def start(
    backend: str | None, timeout: timedelta | None, request: object, rendezvous: Rendezvous
) -> Process:
    """Brings this rank up; what is wrong on one rank is told to all, so that all raise."""
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
        timeout=timeout or _patience(group),
        request=request,
        asked=asked,
        devices=asked,
        group=group,
        backends={} if group is None else parse_backend(dist.get_backend_config(group)),
        explicit=explicit,
    )
    if place.world_size > 1:
        # As the other ranks, which may have no problem, choose it.
        _connect(process, backend or default_backend(available()[0]), problem, rendezvous)
    select(process.device)
    return process


#: nccl's watchdog ends a process whose collective times out: accel's own error must come before, on every rank.
_MARGIN: Final = timedelta(minutes=1)


def _give_margin(group: dist.ProcessGroup, timeout: timedelta) -> None:
    for backend in accelerator_backends(group):
        set_timeout = getattr(backend, "_set_default_timeout", None) or getattr(
            backend, "set_timeout", None
        )
        if set_timeout is not None:
            set_timeout(timeout + _MARGIN)


def _patience(group: dist.ProcessGroup | None) -> timedelta:
    """Return torch's default timeout, or less if an accelerator's backend in the user's group has a shorter one."""
    limits = [distributed_c10d.default_pg_timeout]
    for backend in accelerator_backends(group) if group is not None else ():
        limit = getattr(getattr(backend, "options", None), "_timeout", None)
        if limit is not None:
            limits.append(max(limit - _MARGIN, limit / 2))
    return min(limits)


def _connect(process: Process, backend: str, problem: str, rendezvous: Rendezvous) -> None:
    begin = time.monotonic()
    if process.group is None:
        # Optimizers would import it when there is a group, which it would hold: `unseen_group`.
        importlib.import_module("torch.distributed.nn")
        device = None if problem else _accelerator_of(process)
        process.group = rendezvous.make_group(process.place, backend, process.timeout, device)
        process.owns_group = True
        process.backends = parse_backend(dist.get_backend_config(process.group))
    try:
        process.control = dist.new_group(
            timeout=process.timeout, backend="gloo", group_desc="accel control"
        )
        # A store outlives elastic restarts, with the keys of the ranks that failed.
        process.token = exchange(process, uuid.uuid4().hex)[0]
        _agree_on_devices(process, problem)
    except BaseException as error:
        destroy_groups(process)
        if isinstance(error, RuntimeError):
            raise LaunchError(
                f"accel did not start on all {process.place.world_size} ranks, {_after(begin, process.timeout)} ({error}): "
                "every rank must call accel.setup or accel.init"
                f"{_unreachable(process.place)}"
            ) from error
        raise


def _accelerator_of(process: Process) -> torch.device | None:
    """Return the accelerator of this rank with its index. torch_xla's is none to ``torch.accelerator``."""
    device = pick(process.asked, process.place.local_rank, process.place.local_world_size)[0]
    accelerator = torch.accelerator.current_accelerator()
    known = accelerator is not None and device.type == accelerator.type and device.index is not None
    return device if known else None


def _after(begin: float, timeout: timedelta) -> str:
    return f"after {time.monotonic() - begin:.2g} of {timeout.total_seconds():g} s"


def _unreachable(place: Place) -> str:
    """A hint where gloo, which listens at the address of this host's name, cannot be reached there from another host."""
    address = ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    if place.local_world_size == place.world_size or not address.startswith("127."):
        return ""
    return (
        f"; this host's name {socket.gethostname()!r} is {address}, where other hosts do not reach it: set GLOO_SOCKET_IFNAME to "
        "the network interface that leads to them, as `ip addr` names it"
    )


@dataclass
class Rendezvous:
    """Where the ranks meet. Its store is kept over restarts, so that no rank comes to one that is about to end."""

    store: distributed_c10d.Store | None = None
    where: Place | None = None
    name: str = ""
    starts: int = 0

    def make_group(
        self, place: Place, backend: str, timeout: timedelta, device: torch.device | None = None
    ) -> dist.ProcessGroup:
        """Create torch's default process group, bound to this rank's accelerator if it has one. Collective."""
        if place.master_addr is None or place.master_port is None:
            raise LaunchError(
                f"{place.launcher} started {place.world_size} processes but does not tell where rank 0 is: set "
                "MASTER_ADDR to its host and MASTER_PORT to a port that is free there, the same for all processes"
            )
        # torchrun's own store listens at the master port, and only env:// knows it.
        url = (
            "env://"
            if place.launcher == "torchrun"
            else f"tcp://{place.master_addr}:{place.master_port}"
        )
        rank, world, begin = place.rank, place.world_size, time.monotonic()
        done = threading.Event()
        threading.Thread(
            target=_tell_of_waiting, args=(place, done, timeout), name="accel-start", daemon=True
        ).start()
        try:
            if self.store is None or self.where != place:
                found = next(rendezvous_at(url, rank, world, timeout=timeout))[0]
                found.set_timeout(timeout)
                self.name = meet(found, rank, world, timeout)
                self.store, self.where, self.starts = found, place, 0
            self.store.set_timeout(timeout)
            self.starts += 1
            store = distributed_c10d.PrefixStore(f"accel/{self.name}/{self.starts}", self.store)
            bound = device if _have_a_device_each(store, place, device) else None
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=bound
            )
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"the process group {backend!r} of {world} ranks did not come up at {place.master_addr}:"
                f"{place.master_port}, {_after(begin, timeout)} ({error}): start as many processes as "
                "WORLD_SIZE says, and set MASTER_ADDR and MASTER_PORT to a free port of rank 0's host"
                f"{_unreachable(place)}"
            ) from error
        finally:
            done.set()
        assert dist.group.WORLD is not None
        _give_margin(dist.group.WORLD, timeout)
        return dist.group.WORLD

    def meet_again(self, timeout: timedelta) -> None:
        """Wait until all ranks are ready to start again. Collective."""
        if self.store is not None and self.where is not None:
            try:
                meet(self.store, self.where.rank, self.where.world_size, timeout)
            except RuntimeError as error:
                raise LaunchError(
                    f"not every rank came to start again within {timeout.total_seconds():g} s ({error}). A rank may have "
                    "been killed or have ended; see the log of torchrun."
                ) from error


def _have_a_device_each(
    store: distributed_c10d.Store, place: Place, device: torch.device | None
) -> bool:
    """Return True if every rank has a different accelerator: nccl connects at once then, and would hang otherwise.

    If not, all ranks raise after the start. Collective.
    """
    store.set(
        f"device {place.rank}", "" if device is None else identity(device, socket.gethostname())
    )
    devices = store.multi_get([f"device {rank}" for rank in range(place.world_size)])
    return all(devices) and len(set(devices)) == len(devices)


def _tell_of_waiting(place: Place, done: threading.Event, timeout: timedelta) -> None:
    """Log after 10 seconds, sooner with a short timeout, and then after twice the time each, that ranks are missing."""
    first = waited = min(10.0, timeout.total_seconds() / 4)
    while not done.wait(waited if waited == first else waited / 2):
        logger.warning(
            "rank %d has waited for %.0f s (of %.0f) at %s:%s until all %d ranks have come to accel.setup or accel.init: a "
            "process that was not started, or has ended before that, does not come",
            *(
                place.rank,
                waited,
                timeout.total_seconds(),
                place.master_addr,
                place.master_port,
                place.world_size,
            ),
        )
        waited *= 2


#: Under this key of the job's store ``accel.launch`` says which rank has ended well, in the first place of its own store.
RETURNED: Final = "returned"


def meet(store: distributed_c10d.Store, rank: int, world: int, timeout: timedelta) -> str:
    """A name that all ranks of this start have, and no other start. Collective.

    torchrun's store outlives its restarts: there lie the addresses of processes that are gone, and names like this one. So rank
    0 makes a new one, and the others go by it only once rank 0 tells what they themselves have just written.
    """
    own, pause, end = uuid.uuid4().hex, 0.001, time.monotonic() + timeout.total_seconds()
    store = distributed_c10d.PrefixStore("accel", store)

    def wait(most: float) -> None:
        nonlocal pause
        if store.check([RETURNED]):
            raise LaunchError(
                f"rank {store.get(RETURNED).decode()} has returned from its function and does not come to accel.setup or "
                "accel.init, which every rank calls: not under accel.is_main()"
            )
        if time.monotonic() > end:
            raise dist.DistStoreError("rank 0, or another rank, did not come")
        time.sleep(pause)
        pause = min(1.5 * pause, most)

    if rank == 0:
        store.set("start", own)
        keys = [f"{own}/{other}" for other in range(1, world)]
        while not store.check(keys):
            wait(0.02)
        store.set(f"{own}/all", "".join(value.decode() for value in store.multi_get(keys)))
        return own
    while True:
        start = store.get("start").decode()
        store.set(f"{start}/{rank}", own)
        if store.check([f"{start}/all"]) and own in store.get(f"{start}/all").decode():
            return start
        wait(0.5)


def _agree_on_devices(process: Process, problem: str) -> None:
    """Picks this rank's device; where a rank has a problem, or two ranks one device, all raise."""
    host, first = socket.gethostname(), process.asked[0]
    problem = problem or why_unserved(first, process.backends)
    reports = exchange(
        process, (problem, host, f"{first.type} by {process.backends.get(first.type)}")
    )
    for rank, (text, *_) in enumerate(reports):
        if text:
            raise DeviceError(f"rank {rank}: {text}")
    process.hosts = tuple(other for _, other, _ in reports)
    kinds = [kind for _, _, kind in reports]
    if len(set(kinds)) > 1:
        raise DeviceError(
            f"the ranks use different kinds of devices: {', '.join(kinds)}; ask for the same on all"
        )
    if process.place.local_rank == UNKNOWN:
        mates = [rank for rank, (_, other, _) in enumerate(reports) if other == host]
        local_rank = mates.index(process.place.rank)
        process.place = replace(process.place, local_rank=local_rank, local_world_size=len(mates))
    process.devices = pick(process.asked, process.place.local_rank, process.place.local_world_size)
    if not process.shares(first):
        check_not_shared(exchange(process, identity(process.device, host)))


def exchange(process: Process, value: object) -> list[Any]:
    """Every rank's value; torch's own all_gather_object needs NumPy."""

    def gather(message: bytes) -> list[bytearray]:
        assert process.control is not None
        work, theirs = begin_gather(message, process.control)
        work.wait()
        return list(map(to_bytes, theirs))

    return list(map(pickle.loads, gather_framed(pickle.dumps(value), gather)))


def place_now() -> Place:
    """From the default process group where there is one, else from the environment."""
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
    """Makes it the current device of its kind, which nccl and plain ``"cuda"`` go by."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextlib.contextmanager
def unseen_group() -> Iterator[None]:
    """Imports inside see no default process group.

    Libraries have it as the default of parameters, which would hold it to the end of the interpreter. So would its threads
    live on, and one that then is the last to let go of a tensor ends the process by SIGABRT.
    """
    group, dist.group.WORLD = dist.group.WORLD, None
    try:
        yield
    finally:
        dist.group.WORLD = group


#: The tokens of the starts of this process that had a mesh.
_starts: Final[list[str]] = []


def mesh_of(process: Process, axes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all ranks with these axes, by name and length, the last of which neighbours lie along.

    Collective where it is a new one: the process groups of a mesh live as long as accel's other groups do.
    """
    key = tuple(axes.items())
    if key not in process.meshes:
        mesh = process.meshes[key] = _new_mesh(process, axes)
        # DTensor's caches keep it for ever, and with it the groups that it registers.
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
        _give_margin(group, process.timeout)
        groups.append(group)
    process.subgroups += groups
    # Not equal to the mesh of an earlier start: what DTensor's caches have of that one names groups that are gone.
    if process.token not in _starts:
        _starts.append(process.token)
    number = len(_starts)
    names = tuple(axes) if number == 1 else tuple(f"{name} (start {number})" for name in axes)
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)


def destroy_groups(process: Process) -> None:
    """Destroys the groups that accel made."""
    if process.owns_group:
        dist.destroy_process_group()
        return
    for group in (process.control, *process.subgroups):
        if group is not None:
            dist.destroy_process_group(group)
