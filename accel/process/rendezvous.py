"""Bring all ranks together in a store, before their process groups start."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import LaunchError
from .launchers import Place

logger = logging.getLogger("accel")

#: The seconds between two looks at the store, at most.
LONGEST_PAUSE: Final = 0.5

# accel can start again in the store of an earlier start, which other ranks may still use.
_stores: Final[dict[tuple[str, int], distributed_c10d.Store]] = {}


@dataclass(frozen=True)
class StartReport:
    """The facts about a rank that the others need before the start.

    Attributes:
        kind: the type of its devices, and the process group backend for them.
        devices: the identities of the devices that it may use.
        problem: why it can't start.
    """

    host: str
    kind: str
    devices: list[str]
    problem: str


@dataclass
class Wait:
    """The wait of a start for the other ranks. It logs who is missing, and ends after ``limit``."""

    place: Place
    limit: timedelta
    begin: float = field(default_factory=time.monotonic)
    next_log: float = 10.0

    def left(self) -> float:
        """Return the seconds until the next log line or the end."""
        due = min(self.next_log, self.limit.total_seconds())
        return self.begin + due - time.monotonic()

    def note(self, missing: list[int]) -> None:
        """Log the missing ranks after 10 s, and again each time the wait has doubled.

        Raises:
            LaunchError: the time is over.
        """
        waited, limit = time.monotonic() - self.begin, self.limit.total_seconds()
        who = f"rank {', '.join(map(str, missing[:8]))}{', ...' if len(missing) > 8 else ''}"
        if self.place.master_addr is not None:
            who += f" at {self.place.master_addr}:{self.place.master_port}"
        text = f"rank {self.place.rank} has waited {waited:.0f} s (of {limit:g}) for {who}"
        if waited >= limit:
            raise LaunchError(
                f"{text}. Start as many processes as WORLD_SIZE says, and call accel.setup or "
                "accel.init on every rank."
            )
        logger.warning("%s. It has not started, has ended, or doesn't call accel.setup.", text)
        self.next_log = 2 * waited


def open_store(wait: Wait) -> distributed_c10d.Store:
    """Connect to the job's store. It is in rank 0, or in torchrun's agent.

    Raises:
        LaunchError: the launcher gives no address, or nobody answers there.
    """
    place = wait.place
    if place.master_addr is None or place.master_port is None:
        raise LaunchError(
            f"{place.launcher} started {place.world_size} processes without the address of rank 0. "
            "Please set MASTER_ADDR to its node and MASTER_PORT to a free port there."
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
        except dist.DistNetworkError as error:
            if is_server:
                text = f"rank 0 can't listen at {address[0]}:{address[1]} ({error})"
                raise LaunchError(f"{text}. Set MASTER_PORT to a free port.") from error
            wait.note([0])
    _stores[address].set_timeout(wait.limit)
    return _stores[address]


def meet(
    store: distributed_c10d.Store, wait: Wait, report: StartReport
) -> tuple[str, list[StartReport]]:
    """Return a new name for this start, and the reports of all ranks. Collective.

    torchrun's store outlives its restarts, with the keys of processes that are gone. So rank 0
    makes a new name, and the other ranks accept a name if its reports include their own.
    """
    ticket = uuid.uuid4().hex
    message = json.dumps([ticket, *astuple(report)])
    if wait.place.rank == 0:
        store.set("accel/start", ticket)
    keys: list[str] = []
    pause = 0.001
    while True:
        if store.check(["accel/start"]):
            name = store.get("accel/start").decode()
            keys = [f"accel/{name}/{rank}" for rank in range(wait.place.world_size)]
            store.set(keys[wait.place.rank], message)
            if name == ticket and store.check(keys):
                messages = [store.get(key).decode() for key in keys]
                store.set(f"accel/{name}/all", f"[{','.join(messages)}]")
            if store.check([f"accel/{name}/all"]):
                reports: list[Any] = json.loads(store.get(f"accel/{name}/all"))
                if reports[wait.place.rank][0] == ticket:
                    return name, [StartReport(*values) for _, *values in reports]
        if wait.left() <= 0:
            wait.note([rank for rank, key in enumerate(keys) if not store.check([key])] or [0])
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)
