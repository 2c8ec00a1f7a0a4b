"""Bring all ranks together in a store, and start the default process group there."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous as open_store

from ..errors import LaunchError
from .devices import identity
from .launchers import Place
from .watchdog import accelerator_backends

logger = logging.getLogger("accel")

#: ``accel.launch`` sets this key to the rank that has returned from its function.
RETURNED: Final = "returned"
#: nccl's watchdog ends a process after its timeout. accel's own error has to come before.
MARGIN: Final = timedelta(minutes=1)


@dataclass
class Rendezvous:
    """The store of the job. It is kept when accel stops, so that accel can start again.

    Attributes:
        name: the name of this start of the job, different for each restart by torchrun.
        starts: how often accel has started in it.
    """

    store: distributed_c10d.Store | None = None
    place: Place | None = None
    name: str = ""
    starts: int = 0

    def make_group(
        self, place: Place, backend: str, timeout: timedelta, device: torch.device | None = None
    ) -> dist.ProcessGroup:
        """Start torch's default process group, bound to this rank's accelerator. Collective.

        Raises:
            LaunchError: the ranks don't come together in time.
        """
        if place.master_addr is None or place.master_port is None:
            raise LaunchError(
                f"{place.launcher} started {place.world_size} processes without the address of rank "
                "0. Please set MASTER_ADDR to its node and MASTER_PORT to a free port there."
            )
        address = f"{place.master_addr}:{place.master_port}"
        # torchrun's agent has a store at this address, which only env:// knows.
        url = "env://" if place.launcher == "torchrun" else f"tcp://{address}"
        rank, world, begin = place.rank, place.world_size, time.monotonic()
        done = threading.Event()
        threading.Thread(
            target=_log_waiting, args=(place, done, timeout), name="accel-start", daemon=True
        ).start()
        try:
            if self.store is None or self.place != place:
                store = next(open_store(url, rank, world, timeout=timeout))[0]
                store.set_timeout(timeout)
                self.name = meet(store, rank, world, timeout)
                self.store, self.place, self.starts = store, place, 0
            self.store.set_timeout(timeout)
            self.starts += 1
            prefixed = distributed_c10d.PrefixStore(f"accel/{self.name}/{self.starts}", self.store)
            bound = device if _have_own_devices(prefixed, place, device) else None
            dist.init_process_group(
                backend,
                store=prefixed,
                rank=rank,
                world_size=world,
                timeout=timeout,
                device_id=bound,
            )
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"the process group {backend!r} of {world} ranks did not come up at {address}, "
                f"{elapsed(begin, timeout)} ({error}). Start as many processes as WORLD_SIZE says, "
                f"with the address and a free port of rank 0.{unreachable_hint(place)}"
            ) from error
        finally:
            done.set()
        assert dist.group.WORLD is not None
        give_margin(dist.group.WORLD, timeout)
        return dist.group.WORLD

    def meet_again(self, timeout: timedelta) -> None:
        """Wait until all ranks are ready to start again. Collective."""
        if self.store is None or self.place is None:
            return
        try:
            meet(self.store, self.place.rank, self.place.world_size, timeout)
        except RuntimeError as error:
            raise LaunchError(
                f"not every rank came to start again within {timeout.total_seconds():g} s "
                f"({error}). A rank may have been killed; see the log of torchrun."
            ) from error


def meet(store: distributed_c10d.Store, rank: int, world: int, timeout: timedelta) -> str:
    """Return a new name that only the ranks of this start have. Collective.

    torchrun's store outlives its restarts, with the keys of processes that are gone and earlier
    names. So rank 0 makes a new name, and the others accept it once rank 0 repeats their own keys.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    store = distributed_c10d.PrefixStore("accel", store)

    def wait(seconds: float) -> None:
        if store.check([RETURNED]):
            raise LaunchError(
                f"rank {store.get(RETURNED).decode()} has returned from its function and does not "
                "come to accel.setup. Call it on every rank, not under accel.is_main()."
            )
        if time.monotonic() > end:
            raise dist.DistStoreError("rank 0, or another rank, did not come")
        time.sleep(seconds)

    if rank == 0:
        store.set("start", own)
        keys = [f"{own}/{other}" for other in range(1, world)]
        while not store.check(keys):
            wait(0.01)
        answers = [value.decode() for value in store.multi_get(keys)]
        store.set(f"{own}/all", "".join(answers))
        return own
    pause = 0.001
    while True:
        name = store.get("start").decode()
        store.set(f"{name}/{rank}", own)
        if store.check([f"{name}/all"]) and own in store.get(f"{name}/all").decode():
            return name
        wait(pause)
        pause = min(1.5 * pause, 0.5)


def _have_own_devices(
    store: distributed_c10d.Store, place: Place, device: torch.device | None
) -> bool:
    """True if every rank has a different accelerator. Collective.

    A group that is bound to its device connects at once, and nccl hangs if two ranks share a device.
    If they do, all ranks raise after the start.
    """
    name = "" if device is None else identity(device, socket.gethostname())
    store.set(f"device {place.rank}", name)
    devices = store.multi_get([f"device {rank}" for rank in range(place.world_size)])
    return all(devices) and len(set(devices)) == len(devices)


def give_margin(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let nccl's timeout end after accel's."""
    for backend in accelerator_backends(group):
        set_timeout = getattr(backend, "_set_default_timeout", None)
        set_timeout = set_timeout or getattr(backend, "set_timeout", None)
        if set_timeout is not None:
            set_timeout(timeout + MARGIN)


def _log_waiting(place: Place, done: threading.Event, timeout: timedelta) -> None:
    """Log that ranks are missing, after 10 seconds and each time the wait has doubled."""
    limit = timeout.total_seconds()
    pause = waited = min(10.0, limit / 4)
    while not done.wait(pause):
        logger.warning(
            "rank %d has waited for %.0f s (of %.0f) at %s:%s until all %d ranks come to "
            "accel.setup or accel.init. A process may not have been started, or has ended.",
            place.rank,
            waited,
            limit,
            place.master_addr,
            place.master_port,
            place.world_size,
        )
        pause = waited
        waited *= 2


def elapsed(begin: float, timeout: timedelta) -> str:
    """Return how long a start has taken, as a text."""
    return f"after {time.monotonic() - begin:.2g} of {timeout.total_seconds():g} s"


def unreachable_hint(place: Place) -> str:
    """Return a hint if this node's host name leads to the loopback, as in Debian's /etc/hosts.

    gloo listens at the address of the host name, and other nodes can't reach the loopback.
    """
    address = ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    if place.local_world_size == place.world_size or not address.startswith("127."):
        return ""
    return (
        f" This node's name {socket.gethostname()!r} is {address}, which other nodes don't reach. "
        "Set GLOO_SOCKET_IFNAME to a network interface of `ip addr`."
    )
