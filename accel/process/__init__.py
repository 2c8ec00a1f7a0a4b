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

#: Why a rank left. The errors of the ranks that wait for it show this text.
TORN_DOWN: Final = "called accel.teardown() and won't join"
_RETURNED: Final = (
    "finished its program or called sys.exit(). Use accel.join if its loop is shorter, or make "
    "the same accel calls on all ranks"
)

_process: Process | None = None


def init(
    *,
    process_group: str | None = None,
    timeout: float | timedelta | None = None,
    devices: object = "auto",
) -> None:
    """Choose the devices and start the process group. Collective.

    ``accel.setup`` calls this for you. Call it first to choose different settings.
    A later call can't change the settings of a running process group.

    Args:
        process_group: a backend of torch.distributed, such as "gloo" or
            "cpu:gloo,cuda:nccl". None: the backend for the devices.
        timeout: the longest wait for other ranks, in seconds or as a timedelta.
            None: 30 minutes.
        devices: the devices for all processes of this node. See docs/launch.md.

    Raises:
        AccelError: accel runs with different settings, or a variable is invalid.
        DeviceError: a device doesn't exist, or a rank has too few devices.
        LaunchError: the process group can't be started.
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
            f"accel.init(process_group={process_group!r}, timeout={timeout!r}) can't change the "
            f"settings {dict(process.backends)} and {process.timeout.total_seconds():g} s. "
            "Call accel.teardown() first."
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
    """Raise AccelError in a forked process, such as a DataLoader worker."""
    if _process is not None and os.getpid() != _process.pid:
        raise AccelError(
            f"This process was forked from rank {rank()}, like a DataLoader worker, and can't "
            "use its connections. Call accel in the process that called accel.setup."
        )


def current() -> Process:
    """Return the running process. Starting it is collective."""
    refuse_fork()
    process = _process or _start(None, None, "auto")
    if process.ended:
        end_groups(process.ended)
        raise AccelError(
            f"Call accel.teardown() to restart. The process groups were shut down: {process.ended}"
        )
    return process


def running() -> Process | None:
    """Return the process if accel is running. Starts nothing."""
    return None if ended() else _process


def ended() -> str:
    """Return why the process groups were shut down, or an empty string."""
    return "" if _process is None else _process.ended


def use_devices(devices: object) -> None:
    """Use the devices of a ``devices=`` argument. ``"auto"`` changes nothing."""
    process = _process or _start(None, None, devices)
    # Don't resolve "free:2" twice: the GPUs that this process uses are no longer free.
    if devices in ("auto", process.request):
        return
    place = current().place
    chosen = pick(resolve(devices), place.local_rank, place.local_world_size)
    if chosen != process.devices and (process.dependents or process.control is not None):
        raise DeviceError(
            f"devices={devices!r}: this process already uses "
            f"{', '.join(map(str, process.devices))}. Call accel.teardown() first."
        )
    process.request, process.devices = devices, chosen
    process.select()


# -- end -------------------------------------------------------------------------------------------


def shutdown(how: str = TORN_DOWN) -> None:
    """Shut down the groups. Other ranks' errors show ``how``."""
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
        process.release("the process groups were shut down")
        if process.control is not None and dist.group.WORLD is process.group:
            groups = (None,) if process.owns_group else (process.control, *process.subgroups)
            for group in groups:
                dist.destroy_process_group(group)
    # Free the groups now. A gloo thread that frees a tensor during exit aborts the process.
    process.group = process.control = None
    process.meshes.clear()
    process.subgroups.clear()
    gc.collect()
    _process = None


def end_groups(reason: str, *, mismatch: bool = False) -> None:
    """Shut down all process groups. Ranks in a collective raise within two seconds. Local.

    ``current`` raises an error with the reason until ``shutdown``.
    """
    process = _process
    if process is not None:
        process.end(reason, mismatch)
        process.release(process.ended)
    # Don't abort a default group that the user has started since.
    if dist.is_initialized() and (process is None or dist.group.WORLD is process.group):
        distributed_c10d._abort_process_group()


def _at_exit() -> None:
    """Shut down before the interpreter exits, or gloo's threads may abort the process."""
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
    """Shut down. Return the error for a collective that lost a rank."""
    is_late = "imed out" in str(error) and not ended()
    reason = reason_of(error)
    end_groups(reason)
    text = f"rank {rank()} can't continue in {call}: {reason}"
    if _process is not None and _process.mismatch:
        return RankMismatchError(text)
    if is_late:
        advice = "Look for a call under accel.is_main(), or increase accel.init(timeout=...)."
        return TimeoutError(f"{text}. {advice}")
    return AccelError(text)


def reason_of(error: RuntimeError) -> str:
    """Return why a collective failed. Wait up to 3 s for other ranks to report it."""
    watchdog = None if _process is None else _process.watchdog
    reason = "" if watchdog is None else watchdog.reason_of(error)
    return ended() or reason or "a connection between ranks was lost, and no rank reported why"


def who_is_missing(error: BaseException) -> str:
    """Describe the ranks that caused an error. Empty if unknown."""
    watchdog = None if _process is None else _process.watchdog
    return "" if watchdog is None else watchdog.who_is_missing(error)


# -- rank and devices ------------------------------------------------------------------------------


def _place() -> Place:
    return place_now() if _process is None else _process.place


def rank() -> int:
    """Return the rank of this process in the job. Starts nothing."""
    return _place().rank


def world_size() -> int:
    """Return the number of processes in the job. Starts nothing."""
    return _place().world_size


def local_rank() -> int:
    """Return the rank of this process on its node. Starts nothing."""
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
    """Print on rank 0. With ``every_rank``, all ranks print, after their number.

    The other options are passed to Python's ``print``.
    """
    # Write only once, so that lines of different ranks don't mix in the terminal.
    text = sep.join(map(str, values)) + end
    if every_rank:
        text = f"[rank {rank()}] {text}"
    if every_rank or is_main():
        builtins.print(text, end="", **options)
