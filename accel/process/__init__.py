"""This process: its place among the ranks, its devices, its process groups."""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import AccelError, DeviceError, RankMismatchError
from .devices import parse_backend, pick, resolve, why_unserved
from .hangs import HangDetector, abort_kernels, disconnect, missing_ranks
from .launchers import Place
from .startup import UNKNOWN, Rendezvous, destroy_groups, place_now, select, start
from .startup import Process as Process

logger = logging.getLogger("accel")

#: How long a restart waits for the other ranks, which may be waking up from a collective.
_RESTART = timedelta(minutes=1)
#: Seconds for which this rank waits at its end for exchanges that others may come to, and then for what breaks them off.
_MOMENT = 2.0
#: How a rank ends, as the others hear it.
TORN_DOWN = "called accel.teardown(), and does not come"


@dataclass
class _State:
    """The one process, and why its groups were ended."""

    process: Process | None = None
    ended: str = ""
    #: They were ended because the ranks are in different places.
    mismatch: bool = False
    #: Accel's own function of atexit has run.
    over: bool = False
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    #: One thread at a time starts it.
    starting: Any = field(default_factory=threading.RLock)


_state = _State()


# -- start and end ----------------------------------------------------------------------------------------------------


def init(
    *,
    process_group: str | None = None,
    timeout: float | timedelta | None = None,
    devices: object = "auto",
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
    refuse_fork()
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
    with _state.starting:
        if _state.process is not None:  # another thread was first
            return _state.process
        if _state.over:  # gloo's threads would outlive what is left of the interpreter
            raise AccelError(
                "the program is at its end: register with atexit after accel.setup what is to call accel there"
            )
        process = _state.process = start(backend, timeout, devices, _state.rendezvous)
    if process.control is not None:
        _detect_hangs(process, process.control)
        atexit.register(_at_exit)
    return process


def _detect_hangs(process: Process, control: dist.ProcessGroup) -> None:
    process.detector = HangDetector(process, control, _noticed)
    process.detector.start()


def refuse_fork() -> None:
    """Raise AccelError in a process that was forked from one in which accel runs."""
    process = _state.process
    if process is not None and os.getpid() != process.pid:
        raise AccelError(
            f"This process was forked from rank {rank()}, as DataLoader workers are, and can't use its connections to "
            "other ranks. Call accel in the process that called accel.setup."
        )


def current() -> Process:
    """The running process; started from the environment where it is not, which is collective.

    AccelError where the process groups were ended, replaced outside accel, or are those of a process that this one was forked
    from.
    """
    refuse_fork()
    if _state.ended:
        _finish_end()
        raise AccelError(
            f"the process groups were ended: {_state.ended}; call accel.teardown() to start again"
        )
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


def lost(what: str, error: RuntimeError) -> AccelError:
    """The error of a collective that another rank's end broke; ends the groups."""
    reason = reason_of(error)
    end_groups(reason)
    kind = RankMismatchError if _state.mismatch else AccelError
    return kind(f"rank {rank()} cannot go on in {what}: {reason}")


def reason_of(error: RuntimeError) -> str:
    """Why a collective failed, as far as the ranks tell each other; waits a moment for their word."""
    process, limit = _state.process, time.monotonic() + 2
    left: dict[int, str] = (
        {} if process is None or process.detector is None else process.detector.left
    )
    while not _state.ended and not left and time.monotonic() < limit:
        time.sleep(0.02)
    if _state.ended:
        return _state.ended
    if process is None:
        return "accel does not run"
    if left:
        return "; ".join(
            f"rank {number} (host {process.hosts[number]}) {how}"
            for number, how in sorted(left.items())
        )
    reason = _who_is_missing(process, error)
    return _state.ended or reason or "a connection between the ranks broke, and no rank says why"


def who_is_missing(error: BaseException) -> str:
    """``_who_is_missing`` of this process, for an error that ends it."""
    # One of gloo's is a RuntimeError; what connections of the program's own raise tells of no rank.
    ours = isinstance(error, RuntimeError) and not _state.ended
    return _who_is_missing(_state.process, error) if _state.process is not None and ours else ""


def _who_is_missing(process: Process, error: object) -> str:
    """Which ranks do not say that they failed too; empty where ``error`` is not about other ranks."""
    text = str(error)
    # A closed connection is noticed at once, a timeout by each rank in its own time.
    wait = 4.0 if "imed out" in text else 1.0 if "by peer" in text else 0.0
    if not wait:
        return ""
    missing = missing_ranks(lambda: process.store("failed"), process.place, wait)
    if missing is None:
        return f"rank 0 (host {process.hosts[0]}) cannot be reached, or the host of the launcher's store"
    if not missing:
        return "all ranks waited in vain"
    silent = [f"{rank} (host {process.hosts[rank]})" for rank in missing]
    return f"rank {', '.join(silent)} did not answer: it ended or hangs, or the link to it is cut"


def use_devices(devices: object) -> None:
    """Takes the devices that a call asks for; ``"auto"`` asks for nothing. Local, where accel runs already.

    DeviceError where they do not exist, are too few, or others are in use already.
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
        found, known = (", ".join(map(str, several)) for several in (asked, used))
        raise DeviceError(
            f"devices={devices!r} is {found}, but this process uses {known}; call accel.teardown() before using others"
        )
    if mine != process.devices and process.control is not None:
        if problem := why_unserved(mine[0], process.backends):
            raise DeviceError(f"devices={devices!r}: {problem}")
        if len(asked) < place.local_world_size and not process.shares(mine[0]):
            raise DeviceError(
                f"devices={devices!r}: {len(asked)} for {place.local_world_size} processes of this host"
            )
    process.request, process.asked, process.devices = devices, asked, mine
    select(process.device)


def shutdown(how: str = TORN_DOWN) -> None:
    """Ends accel's control group, and the default group if accel made it; everything can start again. The others hear ``how``."""
    process = _state.process
    atexit.unregister(_at_exit)
    if process is not None:
        if process.detector is not None:
            if not _state.ended:
                process.exchanges_over(
                    _MOMENT
                )  # of this rank's part of them others may not have heard
                process.detector.tell_leave(how)
            process.detector.stop()
            process.detector = None
        # gloo does not wake a thread that sends where the connection has just broken: it waits for as long as the group may.
        stuck = not process.exchanges_over(_MOMENT)
        if _state.ended:
            _finish_end()
        else:
            if process.control is not None:
                _let_go(process, "the processes were shut down")
            if dist.group.WORLD is process.group:
                destroy_groups(process)
        if process.control is not None:
            gc.collect()  # of what held the groups some sits in cycles
        if stuck:  # the end of a group waits for its threads
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(process.control))
        # The last references, so that gloo's threads end here and not at exit, where one that frees a tensor aborts.
        process.begun_exchanges.clear()
        process.group = process.control = None
        process.meshes.clear()
        process.subgroups.clear()
        process.given_groups.clear()
    _state.process, _state.ended, _state.mismatch = None, "", False


def _let_go(process: Process, reason: str) -> None:
    for dependent in list(process.dependents):
        dependent.abandon(reason)
    process.dependents.clear()
    for release in process.releases:
        release()
    process.releases.clear()


def end_groups(reason: str, *, mismatch: bool = False) -> None:
    """Ends all process groups, so that ranks blocked in any collective fail instead of hanging. Local.

    Those that wait for this rank fail at once, the others within a second or two.
    ``current`` then raises with the reason, until ``shutdown``.
    """
    process = _state.process
    _note_end(reason, mismatch)
    if process is not None:
        _let_go(process, _state.ended)
    if dist.is_initialized():
        distributed_c10d._abort_process_group()


@dataclass(frozen=True)
class StartOptions:
    """How accel was started in this process."""

    backend: str | None
    timeout: timedelta
    devices: object


def start_options() -> StartOptions | None:
    """Return how accel was started, to start it alike after ``shutdown``; None if it does not run."""
    process = _state.process
    if process is None:
        return None
    served = ",".join(f"{kind}:{name}" for kind, name in process.backends.items())
    return StartOptions(served if process.explicit else None, process.timeout, process.request)


def restart(options: StartOptions | None) -> None:
    """Start accel again after ``shutdown``. Collective.

    Raises LaunchError if a rank does not arrive within a minute: it may have been killed.
    """
    if options is not None:
        _state.rendezvous.meet_again(min(options.timeout, _RESTART))
        _begin(options.backend, options.timeout, options.devices)


def _note_end(reason: str, mismatch: bool) -> None:
    """The first part of an end, also done by the hang detector while this thread waits in a collective."""
    if not _state.ended:
        _state.mismatch, _state.ended = mismatch, reason
        if _state.process is not None:
            _state.process.ended = reason
            if _state.process.detector is not None:
                _state.process.detector.tell_end(reason, mismatch)
    for group in list(distributed_c10d._world.pg_map):
        disconnect(group)
    abort_kernels()


def _noticed(reason: str, mismatch: bool) -> None:
    if not _state.ended:
        logger.error("rank %d: the process groups were ended: %s", rank(), reason)
    _note_end(reason, mismatch)


def _finish_end() -> None:
    """What the hang detector leaves to this thread, because this thread may be using it."""
    if _state.process is not None and dist.group.WORLD is _state.process.group:
        end_groups(_state.ended)


def _at_exit() -> None:
    if _state.process is not None and os.getpid() != _state.process.pid:
        return
    # An error ends this process: the other ranks must not wait for what its last collectives still wait for.
    error = getattr(sys, "last_value", None)
    if error is not None:
        reason = f"rank {rank()} ended with {type(error).__name__}"
        missing = who_is_missing(error)
        if (
            missing and not _state.ended
        ):  # the hang detector may have heard a better reason in the meantime
            reason = f"{reason}: {missing}"
            logger.error(reason)
        end_groups(reason)
    why = "its loop was shorter, for which there are accel.any_rank and accel.join, or others make a call that it does not"
    shutdown(f"ended its program, by its end or sys.exit, and does not come ({why})")
    _state.over = True


def _duration(timeout: float | timedelta) -> timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0.001 <= seconds < 1e9
    ):
        raise AccelError(
            f"timeout={timeout!r}: expected a number of seconds above 0, or a timedelta"
        )
    return timedelta(seconds=seconds)


# -- the place of this process ----------------------------------------------------------------------------------------


def _here() -> Place:
    return place_now() if _state.process is None else _state.process.place


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
        raise AccelError(
            "the local rank is known only after accel.init() or accel.setup(), or set LOCAL_RANK"
        )
    return number


def is_main() -> bool:
    """Whether this is rank 0. Starts nothing."""
    return rank() == 0


def device() -> torch.device:
    """The device of this rank. Starts nothing: before the start, the device that it would take.

    Raises:
        DeviceError: ``ACCEL_DEVICES`` asks for devices that do not exist.
    """
    return own_devices()[0]


def own_devices() -> tuple[torch.device, ...]:
    """All devices of this rank, of which some engines use more than the first; otherwise as ``device``."""
    if _state.process is not None:
        return _state.process.devices
    return pick(resolve("auto"), local_rank(), _here().local_world_size)


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
