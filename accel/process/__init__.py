"""This process: its rank, its devices and its process groups."""

from __future__ import annotations

import atexit
import builtins
import gc
import logging
import os
import sys
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import AccelError, DeviceError, RankMismatchError, TimeoutError
from .devices import Devices, parse_backend, pick, resolve
from .launchers import Place
from .startup import Process as Process
from .startup import place_now, start
from .watchdog import Watchdog

logger = logging.getLogger("accel")

#: How a rank leaves, in the errors of the ranks that wait for it.
TORN_DOWN: Final = "called accel.teardown(), and does not come"
_RETURNED: Final = (
    "ended its program, by its end or sys.exit. Its loop was shorter (use accel.join), or it makes "
    "fewer calls of accel"
)

_process: Process | None = None


def init(
    *,
    process_group: str | None = None,
    timeout: float | timedelta | None = None,
    devices: object = "auto",
) -> None:
    """Choose the devices, and start the process group. Collective.

    ``accel.setup`` calls it for you. Call it first to choose different settings.
    A second call only checks that it asks for the same settings.

    Args:
        process_group: a backend of torch.distributed, such as "gloo" or
            "cpu:gloo,cuda:nccl". None: the backend for the devices.
        timeout: how long a collective waits for other ranks, in seconds or as a
            timedelta. None: 30 minutes.
        devices: the devices of this node's processes; see docs/launch.md.

    Raises:
        AccelError: accel runs with different settings, or a variable is wrong.
        DeviceError: the devices don't exist or are too few, on any rank.
        LaunchError: the process group doesn't start.
    """
    refuse_fork()
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    backends = parse_backend(process_group or "gloo")
    if _process is None:
        _start(process_group, limit, devices)
        return
    process = current()
    is_other = process_group and process.group and backends != process.backends
    if is_other or limit not in (None, process.timeout):
        raise AccelError(
            f"accel.init(process_group={process_group!r}, timeout={timeout!r}): accel runs with "
            f"{dict(process.backends)} and {process.timeout.total_seconds():g} s. Call "
            "accel.teardown() before you change it."
        )
    use_devices(devices)


def _start(requested: str | None, timeout: timedelta | None, devices: object) -> Process:
    global _process
    process = _process = start(requested, timeout, devices)
    if process.control is not None:
        process.watchdog = Watchdog(process)
        atexit.register(_at_exit)
    return process


def refuse_fork() -> None:
    """Raise AccelError in a forked process, such as a worker of a DataLoader."""
    if _process is not None and os.getpid() != _process.pid:
        raise AccelError(
            f"This process was forked from rank {rank()}, like a DataLoader worker, and can't "
            "use its connections. Call accel in the process that called accel.setup."
        )


def current() -> Process:
    """Return the running process. Collective if it must start."""
    refuse_fork()
    process = _process or _start(None, None, "auto")
    if process.ended:
        end_groups(process.ended)
        raise AccelError(
            f"the process groups were ended: {process.ended}; call accel.teardown() to start again"
        )
    return process


def running() -> Process | None:
    """Return the process if accel runs in it. Start nothing."""
    return None if ended() else _process


def ended() -> str:
    """Return why the process groups were ended, or an empty string."""
    return "" if _process is None else _process.ended


def use_devices(devices: object) -> None:
    """Use the devices of a call's ``devices=``. ``"auto"`` changes nothing."""
    process = _process or _start(None, None, devices)
    # "free:2" would find that this process uses the devices.
    if devices in ("auto", process.request):
        return
    place = current().place
    chosen = pick(resolve(devices), place.local_rank, place.local_world_size)
    if chosen != process.devices and (process.dependents or process.control is not None):
        raise DeviceError(
            f"devices={devices!r}: this process uses {', '.join(map(str, process.devices))}. "
            "Call accel.teardown() before you change it."
        )
    process.request, process.devices = devices, chosen
    process.select()


# -- end -------------------------------------------------------------------------------------------


def shutdown(how: str = TORN_DOWN) -> None:
    """End accel's process groups. The other ranks hear ``how``."""
    global _process
    process = _process
    if process is None:
        return
    atexit.unregister(_at_exit)
    if process.watchdog is not None:
        process.watchdog.leave("" if process.ended else how)
        process.watchdog = None
    if process.ended:
        end_groups(process.ended)
    else:
        process.release("the processes were shut down")
        if process.control is not None and dist.group.WORLD is process.group:
            groups = (None,) if process.owns_group else (process.control, *process.subgroups)
            for group in groups:
                dist.destroy_process_group(group)
    # A gloo thread that frees a tensor while the interpreter ends aborts the process.
    process.group = process.control = None
    process.meshes.clear()
    process.subgroups.clear()
    gc.collect()
    _process = None


def end_groups(reason: str, *, mismatch: bool = False) -> None:
    """End all process groups. Ranks in any collective raise within two seconds. Local.

    ``current`` raises with the reason until ``shutdown``.
    """
    process = _process
    if process is not None:
        process.end(reason, mismatch)
        process.release(process.ended)
    # You may have started a new default group.
    if dist.is_initialized() and (process is None or dist.group.WORLD is process.group):
        distributed_c10d._abort_process_group()


def _at_exit() -> None:
    """End the groups before the interpreter, or gloo's threads may abort the process."""
    process = _process
    if process is None or os.getpid() != process.pid:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        reason = f"rank {rank()} ended with {type(error).__name__}"
        missing = who_is_missing(error)
        if missing and not process.ended:
            reason = f"{reason}: {missing}"
            logger.error(reason)
        end_groups(reason)
    shutdown(_RETURNED)


def lost(call: str, error: RuntimeError) -> AccelError:
    """End the groups. Return the error for a collective that lost a rank."""
    is_late = "imed out" in str(error) and not ended()
    reason = reason_of(error)
    end_groups(reason)
    text = f"rank {rank()} cannot go on in {call}: {reason}"
    if _process is not None and _process.mismatch:
        return RankMismatchError(text)
    if is_late:
        advice = "Look for a call under accel.is_main(), or raise accel.init(timeout=...)."
        return TimeoutError(f"{text}. {advice}")
    return AccelError(text)


def reason_of(error: RuntimeError) -> str:
    """Return why a collective failed. Wait up to 3 s for other ranks to tell it."""
    watchdog = None if _process is None else _process.watchdog
    reason = "" if watchdog is None else watchdog.reason_of(error)
    return ended() or reason or "a connection between the ranks broke, and no rank says why"


def who_is_missing(error: BaseException) -> str:
    """Return the ranks because of which an error ends this rank, or an empty string."""
    watchdog = None if _process is None else _process.watchdog
    return "" if watchdog is None else watchdog.who_is_missing(error)


# -- rank and devices ------------------------------------------------------------------------------


def _place() -> Place:
    return place_now() if _process is None else _process.place


def rank() -> int:
    """Return the number of this process in the job. Starts nothing."""
    return _place().rank


def world_size() -> int:
    """Return the number of processes in the job. Starts nothing."""
    return _place().world_size


def local_rank() -> int:
    """Return the number of this process on its node. Starts nothing."""
    return _place().local_rank


def is_main() -> bool:
    """True on rank 0. Starts nothing."""
    return rank() == 0


def device() -> torch.device:
    """Return the device of this rank. Starts nothing."""
    return own_devices()[0]


def own_devices() -> Devices:
    """Return all devices of this rank. Some engines use several."""
    if _process is not None:
        return _process.devices
    return pick(resolve("auto"), local_rank(), _place().local_world_size)


def print(
    *values: object, sep: str = " ", end: str = "\n", every_rank: bool = False, **options: Any
) -> None:
    """Print on rank 0 only. ``every_rank`` prints the rank's number, too.

    Other options are those of Python's ``print``.
    """
    # One write, because the ranks write to the same terminal.
    text = sep.join(map(str, values)) + end
    if every_rank:
        text = f"[rank {rank()}] {text}"
    if every_rank or is_main():
        builtins.print(text, end="", **options)
