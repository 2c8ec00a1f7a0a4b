"""This process: its rank, its devices and its process groups."""

from __future__ import annotations

import atexit
import builtins
import gc
import logging
import math
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TextIO

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import AccelError, DeviceError, RankMismatchError
from .devices import parse_backend, pick, resolve, why_unserved
from .launchers import Place
from .rendezvous import Rendezvous
from .startup import UNKNOWN, destroy_groups, place_now, select, start
from .startup import Process as Process
from .watchdog import Watchdog, disconnect_all, missing_ranks

logger = logging.getLogger("accel")

#: How long a restart waits for the other ranks, which may be waking up from a collective.
_RESTART: Final = timedelta(minutes=1)
#: How a rank leaves, in the errors of the ranks that wait for it.
TORN_DOWN: Final = "called accel.teardown(), and does not come"
_RETURNED: Final = (
    "ended its program, by its end or sys.exit, and does not come. Its loop was shorter (use "
    "accel.any_rank or accel.join), or the other ranks make a call that it doesn't make"
)


@dataclass
class _State:
    """The process while accel runs, and why its groups were ended.

    Attributes:
        mismatch: the groups were ended because the ranks were at different collectives.
        over: accel has ended at the interpreter's exit.
    """

    process: Process | None = None
    ended: str = ""
    mismatch: bool = False
    over: bool = False
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    start_lock: Any = field(default_factory=threading.RLock)


_state = _State()


# -- start -----------------------------------------------------------------------------------------


def init(
    *,
    process_group: str | None = None,
    timeout: float | timedelta | None = None,
    devices: object = "auto",
) -> None:
    """Start accel in this process: find its rank and devices, and start the process group. Collective.

    ``accel.setup`` calls it for you. Call it first to choose different settings. A second call only
    checks that it asks for the same settings.

    Args:
        process_group: a backend of torch.distributed, such as "gloo" or "cpu:gloo,cuda:nccl". None:
            the backend for the devices.
        timeout: how long a collective waits for other ranks, in seconds or as a timedelta. None:
            30 minutes.
        devices: the devices of this node's processes; see docs/environments.md.

    Raises:
        AccelError: accel runs with different settings, or the launcher's variables are wrong.
        DeviceError: the devices don't exist or are too few, on any rank.
        LaunchError: the process group doesn't start.
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
            f"accel.init(process_group={process_group!r}): the process group runs with "
            f"{dict(process.backends)}. Call accel.teardown() before you change it."
        )
    if limit is not None and limit != process.timeout:
        raise AccelError(
            f"accel.init(timeout={timeout!r}): accel runs with {process.timeout.total_seconds():g} "
            "s. Call accel.teardown() before you change it."
        )
    use_devices(devices)


def _begin(backend: str | None, timeout: timedelta | None, devices: object) -> Process:
    with _state.start_lock:
        if _state.process is not None:  # a different thread was first
            return _state.process
        if _state.over:
            # gloo's threads would outlive the interpreter.
            raise AccelError(
                "The program is ending. To call accel at exit, register with atexit after "
                "accel.setup."
            )
        process = _state.process = start(backend, timeout, devices, _state.rendezvous)
    if process.control is not None:
        process.watchdog = Watchdog(process, _notice)
        process.watchdog.start()
        atexit.register(_at_exit)
    return process


def refuse_fork() -> None:
    """Raise AccelError in a process that was forked from a process in which accel runs."""
    process = _state.process
    if process is not None and os.getpid() != process.pid:
        raise AccelError(
            f"This process was forked from rank {rank()}, as DataLoader workers are, and can't use "
            "its connections to other ranks. Call accel in the process that called accel.setup."
        )


def current() -> Process:
    """Return the running process. Start it from the environment if needed, which is collective.

    Raises:
        AccelError: the process groups were ended or replaced, or this is a forked process.
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
            "torch.distributed's default process group was made or destroyed while accel ran. Call "
            "accel.teardown() before you change it."
        )
    return process


def running() -> Process | None:
    """Return the process if accel runs in it. Start nothing."""
    return None if _state.ended else _state.process


def _duration(timeout: float | timedelta) -> timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not math.isfinite(seconds) or seconds <= 0:
        raise AccelError(f"timeout={timeout!r}: expected a positive number of seconds.")
    return timedelta(seconds=seconds)


def use_devices(devices: object) -> None:
    """Use the devices that a call asks for. ``"auto"`` changes nothing.

    Raises:
        DeviceError: the devices don't exist, are too few, or different devices are in use.
    """
    if isinstance(devices, str) and devices == "auto":
        return
    if _state.process is None:
        init(devices=devices)
        return
    process, place = current(), _state.process.place
    if isinstance(devices, str) and devices == process.request:
        return  # "free:2" would find that this process uses the devices
    asked = resolve(devices)
    own = pick(asked, place.local_rank, place.local_world_size)
    in_use = process.asked if process.request != "auto" or process.dependents else asked
    if asked != in_use:
        raise DeviceError(
            f"devices={devices!r} is {', '.join(map(str, asked))}, but this process uses "
            f"{', '.join(map(str, in_use))}. Call accel.teardown() before you change it."
        )
    if own != process.devices and process.control is not None:
        problem = why_unserved(own[0], process.backends)
        if problem:
            raise DeviceError(f"devices={devices!r}: {problem}.")
        if len(asked) < place.local_world_size and not process.shares(own[0]):
            count = f"{len(asked)} devices for {place.local_world_size} processes of this node"
            raise DeviceError(f"devices={devices!r}: {count}. Start fewer processes.")
    process.request, process.asked, process.devices = devices, asked, own
    select(process.device)


# -- end -------------------------------------------------------------------------------------------


def shutdown(how: str = TORN_DOWN) -> None:
    """End accel's process groups, so that accel can start again. The other ranks hear ``how``."""
    process = _state.process
    atexit.unregister(_at_exit)
    if process is not None:
        if process.watchdog is not None:
            if _state.ended:
                process.watchdog.wait_for_others()
            else:
                process.watchdog.tell_leave(how)
            process.watchdog.stop()
            process.watchdog = None
        if _state.ended:
            _finish_end()
        else:
            if process.control is not None:
                _release(process, "the processes were shut down")
            if dist.group.WORLD is process.group:
                destroy_groups(process)
        # The last references must go now. A gloo thread that frees a tensor while the interpreter
        # ends aborts the process.
        process.group = process.control = None
        process.meshes.clear()
        process.subgroups.clear()
        gc.collect()
    _state.process, _state.ended, _state.mismatch = None, "", False


def _release(process: Process, reason: str) -> None:
    for dependent in list(process.dependents):
        dependent.abandon(reason)
    process.dependents.clear()
    for release in process.releases:
        release()
    process.releases.clear()


def end_groups(reason: str, *, mismatch: bool = False) -> None:
    """End all process groups, so that ranks in any collective raise instead of hanging. Local.

    Ranks that wait for this rank raise at once, others within two seconds. ``current`` raises with
    the reason until ``shutdown``.
    """
    process = _state.process
    _mark_ended(reason, mismatch)
    if process is not None:
        _release(process, _state.ended)
    if dist.is_initialized():
        distributed_c10d._abort_process_group()


def _mark_ended(reason: str, mismatch: bool) -> None:
    """Do the part of an end that the watchdog can do while this thread waits in a collective."""
    if not _state.ended:
        _state.mismatch, _state.ended = mismatch, reason
        if _state.process is not None:
            _state.process.ended = reason
            if _state.process.watchdog is not None:
                _state.process.watchdog.tell_end(reason, mismatch)
    disconnect_all()


def _notice(reason: str, mismatch: bool) -> None:
    """Called by the watchdog when the groups have to end."""
    if not _state.ended:
        logger.error("rank %d: the process groups were ended: %s", rank(), reason)
    _mark_ended(reason, mismatch)


def _finish_end() -> None:
    """Do the part of an end that needs the training thread."""
    if _state.process is not None and dist.group.WORLD is _state.process.group:
        end_groups(_state.ended)


def _at_exit() -> None:
    if _state.process is None or os.getpid() != _state.process.pid:
        return
    # The other ranks must not wait for a rank that ends with an error.
    error = getattr(sys, "last_value", None)
    if error is not None:
        reason = f"rank {rank()} ended with {type(error).__name__}"
        missing = who_is_missing(error)
        if missing and not _state.ended:
            reason = f"{reason}: {missing}"
            logger.error(reason)
        end_groups(reason)
    shutdown(_RETURNED)
    _state.over = True


@dataclass(frozen=True)
class StartOptions:
    """The settings with which accel was started."""

    backend: str | None
    timeout: timedelta
    devices: object


def start_options() -> StartOptions | None:
    """Return the settings for ``restart``, or None if accel doesn't run."""
    process = _state.process
    if process is None:
        return None
    served = ",".join(f"{kind}:{name}" for kind, name in process.backends.items())
    return StartOptions(served if process.explicit else None, process.timeout, process.request)


def restart(options: StartOptions | None) -> None:
    """Start accel again after ``shutdown``. Collective.

    Raises:
        LaunchError: a rank doesn't arrive within a minute. It may have been killed.
    """
    if options is not None:
        _state.rendezvous.meet_again(min(options.timeout, _RESTART))
        _begin(options.backend, options.timeout, options.devices)


# -- why a collective failed -----------------------------------------------------------------------


def ended() -> str:
    """Return why the process groups were ended, or an empty string."""
    return _state.ended


def lost(call: str, error: RuntimeError) -> AccelError:
    """Return the error for a collective that failed because of a different rank. Ends the groups."""
    reason = reason_of(error)
    end_groups(reason)
    kind = RankMismatchError if _state.mismatch else AccelError
    return kind(f"rank {rank()} cannot go on in {call}: {reason}")


def reason_of(error: RuntimeError) -> str:
    """Return why a collective failed. Waits some seconds for a word of the other ranks."""
    process = _state.process
    watchdog = None if process is None else process.watchdog
    deadline = time.monotonic() + 3
    while not _state.ended and watchdog is not None and time.monotonic() < deadline:
        if watchdog.left or not watchdog.is_alive():
            break
        time.sleep(0.02)
    if _state.ended:
        return _state.ended
    if process is None:
        return "accel does not run"
    if watchdog is not None and watchdog.left:
        texts = []
        for number, how in sorted(watchdog.left.items()):
            texts.append(f"rank {number} (host {process.hosts[number]}) {how}")
        return "; ".join(texts)
    missing = _who_is_missing(process, error)
    return _state.ended or missing or "a connection between the ranks broke, and no rank says why"


def who_is_missing(error: BaseException) -> str:
    """Return the ranks because of which an error ends this rank, or an empty string."""
    # gloo raises RuntimeErrors. Connections of the program itself raise other classes.
    process = _state.process
    if process is None or _state.ended or not isinstance(error, RuntimeError):
        return ""
    return _who_is_missing(process, error)


def _who_is_missing(process: Process, error: BaseException) -> str:
    text = str(error)
    # All ranks notice a closed connection at once, but each has its own timeout.
    wait = 4.0 if "imed out" in text else 1.0 if "by peer" in text else 0.0
    if not wait:
        return ""
    missing = missing_ranks(process)
    if missing is None:
        return f"rank 0 (host {process.hosts[0]}) can't be reached, or the launcher's node"
    if not missing:
        return "all ranks waited in vain"
    silent = ", ".join(f"{rank} (host {process.hosts[rank]})" for rank in missing)
    return f"rank {silent} did not answer: it ended or hangs, or the link to it is cut"


# -- rank and devices ------------------------------------------------------------------------------


def _place() -> Place:
    return place_now() if _state.process is None else _state.process.place


def rank() -> int:
    """Return the number of this process in the job. Starts nothing."""
    return _place().rank


def world_size() -> int:
    """Return the number of processes in the job. Starts nothing."""
    return _place().world_size


def local_rank() -> int:
    """Return the number of this process on its node. Starts nothing.

    Raises:
        AccelError: you started the process group, LOCAL_RANK isn't set, and accel doesn't run yet.
    """
    number = _place().local_rank
    if number == UNKNOWN:
        raise AccelError(
            "The local rank is unknown before accel.init(). Call it, or set LOCAL_RANK."
        )
    return number


def is_main() -> bool:
    """True on rank 0. Starts nothing."""
    return rank() == 0


def device() -> torch.device:
    """Return the device of this rank. Starts nothing.

    Raises:
        DeviceError: ``ACCEL_DEVICES`` asks for devices that don't exist.
    """
    return own_devices()[0]


def own_devices() -> tuple[torch.device, ...]:
    """Return all devices of this rank. Some engines use several."""
    if _state.process is not None:
        return _state.process.devices
    return pick(resolve("auto"), local_rank(), _place().local_world_size)


def print(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: TextIO | None = None,
    flush: bool = False,
    every_rank: bool = False,
) -> None:
    """Print on rank 0 only, or with ``every_rank`` on all ranks, with the rank in front."""
    if every_rank:
        # One write, because the ranks write to the same terminal.
        text = (" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end)
        builtins.print(f"[rank {rank()}] {text}", end="", file=file, flush=flush)
    elif is_main():
        builtins.print(*values, sep=sep, end=end, file=file, flush=flush)
