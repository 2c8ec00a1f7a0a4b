"""This process: its place among the ranks, its devices, its process groups. The one module with state of its own."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import logging
import os
import pickle
import random
import socket
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol, TextIO, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from .devices import available, default_backend, identity, names, parse_backend, pick, refuse_shared, resolve, unserved
from .environments import ALONE, Place, detect
from .errors import AccelError, DeviceError, LaunchError

logger = logging.getLogger("accel")


class Dependent(Protocol):
    """What uses the process groups, and must let go of them when they are ended."""

    def abandon(self, reason: str) -> None:
        """Let go of the groups; local."""


@final
class Watch(threading.Thread):
    """Passes on from rank to rank why the groups were ended.

    Closed connections tell only those that wait for the rank that ended them; others may wait for each other.
    """

    def __init__(self, control: dist.ProcessGroup, notice: Callable[[str], None]) -> None:
        super().__init__(name="accel-watch", daemon=True)
        self._control, self._notice = control, notice

    def run(self) -> None:
        """Wait for the rank on the left to say it, or for the end of the connection."""
        message = torch.zeros(_FRAME, dtype=torch.uint8)
        left = (self._control.rank() - 1) % self._control.size()
        with contextlib.suppress(RuntimeError):
            self._control.recv([message], left, _WATCH_TAG).wait(timedelta(days=365))
            self._notice(to_bytes(message).rstrip(b"\0").decode(errors="replace"))

    def tell(self, reason: str) -> None:
        """Say it to the rank on the right."""
        message = to_tensor(reason.encode()[:_FRAME].ljust(_FRAME, b"\0"))
        right = (self._control.rank() + 1) % self._control.size()
        with contextlib.suppress(RuntimeError):
            self._control.send([message], right, _WATCH_TAG).wait(timedelta(seconds=1))

    def stop(self) -> None:
        """End the thread, and the control group with it."""
        disconnect(self._control)
        self.join(5)


@final
@dataclass(eq=False, kw_only=True)
class Process:
    """What accel knows of this process. There is one, from ``init`` to ``shutdown``."""

    place: Place
    timeout: timedelta
    #: ``devices=`` as it was asked for, what that means on this host, and what this rank has of it.
    request: object
    asked: tuple[torch.device, ...]
    devices: tuple[torch.device, ...]
    group: dist.ProcessGroup | None
    owns_group: bool = False
    control: dist.ProcessGroup | None = None
    #: Device type to the backend that serves it in ``group``.
    backends: Mapping[str, str] = field(default_factory=dict)
    #: Whether the backend was asked for by name; where that is gloo, ranks may share an accelerator.
    explicit: bool = False
    #: Names this start among all, for keys in the store that all ranks share.
    token: str = ""
    watch: Watch | None = None
    #: How many exchanges the control group has seen.
    rounds: int = 0
    dependents: weakref.WeakSet[Dependent] = field(default_factory=weakref.WeakSet)

    @property
    def device(self) -> torch.device:
        """The device of this rank; the first one where it has several."""
        return self.devices[0]

    def shares(self, device: torch.device) -> bool:
        """Whether ranks may use one such device together."""
        return device.type == "cpu" or (self.explicit and self.backends.get(device.type) == "gloo")

    def store(self, *names: str) -> distributed_c10d.Store:
        """Keys of this start alone, in the store that all ranks share."""
        return distributed_c10d.PrefixStore(
            "/".join(["accel", self.token, *names]), distributed_c10d._get_default_store()
        )


UNKNOWN = -1  # the local rank in a process group made outside accel, until the ranks have told their hosts
_FRAME = 4096  # bytes of one rank's report
_WATCH_TAG, _NO_TAG = 0xACCE1, 0x5EED  # of messages on the control group; nobody sends with the second one


# -- the start --------------------------------------------------------------------------------------------------------


def start(backend: str | None, timeout: timedelta | None, request: object, meeting: Meeting) -> Process:
    """Brings this rank up; what is wrong on one rank is told to all, so that all raise."""
    place, problem = place_now(), ""
    explicit = backend is not None or dist.is_initialized()
    try:
        asked = resolve(request)
        backend = backend or default_backend(asked[0].type)
    except DeviceError as error:
        if place.world_size == 1:
            raise
        asked, problem = (torch.device("cpu"),), str(error)
    group = dist.group.WORLD
    process = Process(
        place=place,
        timeout=timeout or distributed_c10d.default_pg_timeout,
        request=request,
        asked=asked,
        devices=asked,
        group=group,
        backends={} if group is None else parse_backend(dist.get_backend_config(group)),
        explicit=explicit,
    )
    if place.world_size > 1:
        # As the other ranks, which may have no problem, choose it.
        _connect(process, backend or default_backend(available()[0]), problem, meeting)
    select(process.device)
    return process


def _connect(process: Process, backend: str, problem: str, meeting: Meeting) -> None:
    if process.group is None:
        process.group, process.owns_group = meeting.make_group(process.place, backend, process.timeout), True
        process.backends = parse_backend(dist.get_backend_config(process.group))
    try:
        process.control = dist.new_group(timeout=process.timeout, backend="gloo", group_desc="accel control")
        # A store outlives elastic restarts, with the keys of the ranks that failed.
        process.token = _exchange(process, uuid.uuid4().hex)[0]
        _agree_on_devices(process, problem)
    except BaseException as error:
        destroy_groups(process)
        if isinstance(error, RuntimeError):
            raise LaunchError(
                f"accel did not start on all {process.place.world_size} ranks within "
                f"{process.timeout.total_seconds():g} s ({error}): every rank must call accel.setup or accel.init"
            ) from error
        raise


@dataclass
class Meeting:
    """Where the ranks meet. Its store is kept over restarts, so that no rank comes to one that is about to end."""

    store: distributed_c10d.Store | None = None
    where: Place | None = None
    starts: int = 0

    def make_group(self, place: Place, backend: str, timeout: timedelta) -> dist.ProcessGroup:
        """torch's default process group, of all ranks."""
        if place.master_addr is None or place.master_port is None:
            raise LaunchError(
                f"{place.launcher} started {place.world_size} processes but does not tell where rank 0 is: set "
                "MASTER_ADDR to its host and MASTER_PORT to a port that is free there, the same for all processes"
            )
        # torchrun's own store listens at the master port, and only env:// knows it.
        url = "env://" if place.launcher == "torchrun" else f"tcp://{place.master_addr}:{place.master_port}"
        rank, world = place.rank, place.world_size
        try:
            if self.store is None or self.where != place:
                self.store, self.where = next(rendezvous(url, rank, world, timeout=timeout))[0], place
            self.store.set_timeout(timeout)
            self.starts += 1
            store = distributed_c10d.PrefixStore(f"accel/{self.starts}", self.store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"the process group {backend!r} of {world} ranks did not come up at {place.master_addr}:"
                f"{place.master_port} within {timeout.total_seconds():g} s ({error}): start as many processes as "
                "WORLD_SIZE says, and set MASTER_ADDR and MASTER_PORT to a free port of rank 0's host"
            ) from error
        assert dist.group.WORLD is not None
        return dist.group.WORLD


def _agree_on_devices(process: Process, problem: str) -> None:
    """Picks this rank's device; where a rank has a problem, or two ranks one device, all raise."""
    host, first = socket.gethostname(), process.asked[0]
    problem = problem or unserved(first, process.backends)
    reports = _exchange(process, (problem[:1500], host, f"{first.type} by {process.backends.get(first.type)}"))
    for rank, (text, *_) in enumerate(reports):
        if text:
            raise DeviceError(f"rank {rank}: {text}")
    kinds = [kind for _, _, kind in reports]
    if len(set(kinds)) > 1:
        raise DeviceError(f"the ranks use different kinds of devices: {', '.join(kinds)}; ask for the same on all")
    if process.place.local_rank == UNKNOWN:
        mates = [rank for rank, (_, other, _) in enumerate(reports) if other == host]
        local_rank = mates.index(process.place.rank)
        process.place = replace(process.place, local_rank=local_rank, local_world_size=len(mates))
    process.devices = pick(process.asked, process.place.local_rank, process.place.local_world_size)
    if not process.shares(first):
        refuse_shared(_exchange(process, identity(process.device, host)))


def _exchange(process: Process, value: object) -> list[Any]:
    """Every rank's value; torch's own all_gather_object needs NumPy."""
    mine = to_tensor(pickle.dumps(value).ljust(_FRAME, b"\0"))
    theirs = [torch.empty_like(mine) for _ in range(process.place.world_size)]
    dist.all_gather(theirs, mine, group=process.control)
    return [pickle.loads(to_bytes(tensor)) for tensor in theirs]


def to_tensor(data: bytes) -> torch.Tensor:
    """The bytes in memory of torch's own: a thread of gloo may be the last to let go, and must not need Python then."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def to_bytes(tensor: torch.Tensor) -> bytearray:
    """What a tensor of bytes holds."""
    data = bytearray(len(tensor))
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return data


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
    return replace(ALONE, launcher="process group", rank=rank, world_size=world, local_rank=local_rank)


def select(device: torch.device) -> None:
    """Makes it the current device of its kind, which nccl and plain ``"cuda"`` go by."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def disconnect(group: dist.ProcessGroup) -> None:
    """Closes the connections of a gloo group, also of one that reducers and pending work still hold.

    Aborting or destroying a group lets go of it, but it stays connected as long as anything else holds it.
    A receive that times out makes gloo close every connection of the group, which the waiting ranks notice;
    one from a rank that is gone already fails without closing the others, so all are tried.
    """
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def destroy_groups(process: Process) -> None:
    """Destroys the groups that accel made."""
    if process.owns_group:
        dist.destroy_process_group()
    elif process.control is not None:
        dist.destroy_process_group(process.control)


# -- the state --------------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """The one process, and why its groups were ended."""

    process: Process | None = None
    ended: str = ""
    meeting: Meeting = field(default_factory=Meeting)


_state = _State()


# -- start and end ----------------------------------------------------------------------------------------------------


def init(
    *, process_group: str | None = None, timeout: float | timedelta | None = None, devices: object = "auto"
) -> None:
    """Starts accel in this process: finds its place and devices and brings the process group up. Collective.

    ``accel.setup`` does it by itself; call it to say more. Called again, it only checks that nothing else is asked.

    Args:
        process_group: The backend of torch.distributed, such as "gloo" or "cpu:gloo,cuda:nccl"; by the devices if None.
        timeout: Seconds (or a timedelta) after which a collective that misses a rank fails; 30 minutes if None.
        devices: The devices of this host's processes; see docs/environments.md.

    Raises:
        AccelError: accel runs already with another process group or timeout, or the launcher's variables are wrong.
        DeviceError: the devices do not exist, are too few, or others are in use already; on every rank.
        LaunchError: the process group cannot come up.
    """
    served = None if process_group is None else parse_backend(process_group)
    limit = None if timeout is None else _duration(timeout)
    if _state.process is None and not _state.ended:
        _begin(process_group, limit, devices)
        return
    process = current()
    if served is not None and process.group is not None and served != process.backends:
        raise AccelError(
            f"accel.init(process_group={process_group!r}): the process group runs with {dict(process.backends)}; "
            "call accel.teardown() before another one"
        )
    if limit is not None and limit != process.timeout:
        raise AccelError(
            f"accel.init(timeout={timeout!r}): accel runs with {process.timeout.total_seconds():g} s; "
            "call accel.teardown() before changing it"
        )
    use_devices(devices)


def _begin(backend: str | None, timeout: timedelta | None, devices: object) -> Process:
    process = _state.process = start(backend, timeout, devices, _state.meeting)
    if process.control is not None:
        process.watch = Watch(process.control, _noticed)
        process.watch.start()
        atexit.register(_at_exit)
    return process


def current() -> Process:
    """The running process; started from the environment where it is not, which is collective.

    Raises:
        AccelError: the process groups were ended, or replaced outside accel.
    """
    if _state.ended:
        _finish_end()
        raise AccelError(f"the process groups were ended: {_state.ended}; call accel.teardown() to start again")
    process = _state.process or _begin(None, None, "auto")
    if dist.group.WORLD is not process.group:
        raise AccelError(
            "torch.distributed's default process group was made or destroyed while accel ran; call accel.teardown() "
            "before that, and accel.setup after it"
        )
    return process


def running() -> Process | None:
    """The process if accel runs in it and its groups are whole; starts nothing."""
    return None if _state.ended else _state.process


def ended() -> str:
    """Why the process groups were ended; empty where they were not."""
    return _state.ended


def use_devices(devices: object) -> None:
    """Takes the devices that a call asks for; ``"auto"`` asks for nothing. Local, where accel runs already.

    Raises:
        DeviceError: they do not exist, are too few, or others are in use already.
    """
    if isinstance(devices, str) and devices == "auto":
        return
    if _state.process is None:
        init(devices=devices)
        return
    process, place = current(), _state.process.place
    if isinstance(devices, str) and devices == process.request:
        return  # "free:2" would find the devices taken, by this process
    asked = resolve(devices)
    mine = pick(asked, place.local_rank, place.local_world_size)
    used = process.asked if process.request != "auto" or process.dependents else asked
    if asked != used:
        raise DeviceError(
            f"devices={devices!r} is {names(asked)}, but this process uses {names(used)}; "
            "call accel.teardown() before using others"
        )
    if mine != process.devices and process.control is not None:
        if problem := unserved(mine[0], process.backends):
            raise DeviceError(f"devices={devices!r}: {problem}")
        if len(asked) < place.local_world_size and not process.shares(mine[0]):
            raise DeviceError(f"devices={devices!r}: {len(asked)} for {place.local_world_size} processes of this host")
    process.request, process.asked, process.devices = devices, asked, mine
    select(process.device)


def shutdown() -> None:
    """Ends accel's control group, and the default group if accel made it; everything can start again."""
    process = _state.process
    atexit.unregister(_at_exit)
    if process is not None:
        if process.watch is not None:
            process.watch.stop()
        if _state.ended:
            _finish_end()
        elif dist.group.WORLD is process.group:
            destroy_groups(process)
        process.group = process.control = None  # the last reference, so that gloo's threads end here and not at exit
    _state.process, _state.ended = None, ""


def end_groups(reason: str) -> None:
    """Ends all process groups, so that ranks blocked in any collective fail instead of hanging. Local.

    Those that wait for this rank fail at once, the others within a second or two.
    ``current`` then raises with the reason, until ``shutdown``.
    """
    process = _state.process
    _note_end(reason)
    if process is not None:
        for dependent in list(process.dependents):
            dependent.abandon(_state.ended)
        process.dependents.clear()
    if dist.is_initialized():
        getattr(distributed_c10d, "_abort_process_group", dist.destroy_process_group)()


def _note_end(reason: str) -> None:
    """The first part of an end, also done by the watch while this thread waits in a collective."""
    if not _state.ended:
        _state.ended = reason
        if _state.process is not None and _state.process.watch is not None:
            _state.process.watch.tell(reason)
    _disconnect_all()


def _noticed(reason: str) -> None:
    logger.error("rank %d: the process groups were ended: %s", rank(), reason)
    _note_end(reason)


def _finish_end() -> None:
    """What the watch leaves to this thread, because this thread may be using it."""
    if _state.process is not None and dist.group.WORLD is _state.process.group:
        end_groups(_state.ended)


def _disconnect_all() -> None:
    for group in list(distributed_c10d._world.pg_map):
        disconnect(group)


def _at_exit() -> None:
    # An error ends this process: the other ranks must not wait for what its last collectives still wait for.
    if hasattr(sys, "last_value"):
        end_groups(f"rank {rank()} ended with {type(sys.last_value).__name__}")
    shutdown()


def _duration(timeout: float | timedelta) -> timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.001 <= seconds < 1e9:
        raise AccelError(f"timeout={timeout!r}: expected a number of seconds above 0, or a timedelta")
    return timedelta(seconds=seconds)


# -- the place of this process ----------------------------------------------------------------------------------------


def _here() -> Place:
    return _state.process.place if _state.process is not None else place_now()


def rank() -> int:
    """The number of this process among all of the job. Starts nothing."""
    return _here().rank


def world_size() -> int:
    """The number of processes of the job. Starts nothing."""
    return _here().world_size


def local_rank() -> int:
    """The number of this process among those of its host. Starts nothing.

    Raises:
        AccelError: a process group made outside accel does not tell before ``accel.init``.
    """
    number = _here().local_rank
    if number == UNKNOWN:
        raise AccelError("the local rank is known only after accel.init() or accel.setup(), or set LOCAL_RANK")
    return number


def is_main() -> bool:
    """Whether this is rank 0. Starts nothing."""
    return rank() == 0


def device() -> torch.device:
    """The device of this rank. Starts nothing: before the start, the device that it would take.

    Raises:
        DeviceError: ``ACCEL_DEVICES`` asks for devices that do not exist.
    """
    if _state.process is not None:
        return _state.process.device
    return pick(resolve("auto"), local_rank(), _here().local_world_size)[0]


def print(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: TextIO | None = None,
    flush: bool = False,
    every_rank: bool = False,
) -> None:
    """Prints on rank 0 only; with ``every_rank`` on all, each with its rank in front."""
    if every_rank:
        # One write, since the ranks write to one terminal.
        text = (" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end)
        builtins.print(f"[rank {rank()}] {text}", end="", file=file, flush=flush)
    elif is_main():
        builtins.print(*values, sep=sep, end=end, file=file, flush=flush)


def seed(n: int, *, per_rank: bool = False) -> None:
    """Seeds Python, NumPy where it is installed, and torch on all devices.

    Args:
        n: From 0 to 2**32 - 1.
        per_rank: Gives each rank numbers of its own, from ``n`` plus its rank.

    Raises:
        AccelError: ``n`` is not such a number.
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**32:
        raise AccelError(f"seed({n!r}): expected an integer from 0 to 2**32 - 1")
    number = (n + rank()) % 2**32 if per_rank else n
    random.seed(number)
    torch.manual_seed(number)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(number)
