"""``accel.launch``: run a function in worker processes.

They read the function from a temporary directory, and write its result or error there.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from .data import raw_loader
from .errors import LaunchError, whole_number
from .handles import ModelHandle, raw
from .pickling import find_stateful, save_by_value
from .process import who_is_missing
from .process.devices import resolve
from .process.startup import place_now
from .trees import map_leaves
from .verbs import shut_down

T = TypeVar("T")

# Set sys.path first, because accel may be importable only from there.
_WORKER_CODE: Final = (
    "import json, sys; options = json.loads(sys.argv[1]); sys.path[:] = options.pop('path');"
    "from accel.launch import work; work(**options)"
)
_POLL_SECONDS = 0.02
_TERMINATE_SECONDS = 3.0  # from SIGTERM to SIGKILL


def launch(fn: Callable[..., T], *args: Any, num_processes: int | None = None) -> T:
    """Run ``fn(*args)`` in a new process per rank, and return rank 0's result.

    You can call it from a script or a notebook cell, and define ``fn`` there. If ``fn``
    gets or uses objects with ``state_dict`` and ``load_state_dict``, accel loads rank 0's
    final states into your objects. Tensors in the result are on the CPU.

    Args:
        fn: calls ``accel.setup`` like any training script.
        args: raw objects. Each rank gets a copy. For keyword arguments, use
            ``functools.partial``.
        num_processes: the number of ranks. None: one per device.

    Raises:
        LaunchError: an argument can't be pickled, or a worker raised or died. The error
            has the rank and traceback. Your objects are unchanged.
    """
    count = len(resolve("auto")) if num_processes is None else whole_number(num_processes)
    if count < 1:
        raise LaunchError(f"num_processes={num_processes!r} must be None or an int of at least 1.")
    if not callable(fn):
        raise LaunchError(f"{fn!r} isn't a function. To start a script, use python -m accel run.")
    rank, world_size = place_now().rank, place_now().world_size
    if world_size > 1:
        text = f"This process is already rank {rank} of {world_size}."
        raise LaunchError(f"{text} Call the function directly.")
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    title = f"of {count} in accel.launch({name})"
    stateful = [*find_stateful(fn, name), *find_stateful(args, "args")]
    with tempfile.TemporaryDirectory(prefix="accel-launch-") as directory:
        folder = Path(directory)
        save_by_value((fn, args, stateful), folder / "arguments", "the arguments")
        _run_workers(title, count, folder)
        if not (folder / "result").exists():
            ended = "ended with exit status 0 before its function returned"
            raise LaunchError(f"rank 0 {title} {ended}.")
        states = torch.load(folder / "states", "cpu", weights_only=False)
        for item, state in zip(stateful, states, strict=True):
            item.load_state_dict(state)
        result: T = torch.load(folder / "result", "cpu", weights_only=False)
        return result


# -- the launching process -------------------------------------------------------------------------


def _run_workers(title: str, count: int, folder: Path) -> None:
    # The ranks meet in this store. Port 0 means a free port, and no other program gets it.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in range(count):
            running[rank] = _start(rank, count, store.port, folder)
        failed: dict[int, int] = {}
        while running and not failed:
            time.sleep(_POLL_SECONDS)
            failed = _collect_ended(running)
        if failed:
            time.sleep(1)  # collect failures with the same cause
            _raise_first(title, failed | _collect_ended(running), folder)
    finally:
        for process in running.values():
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + _TERMINATE_SECONDS
        for process in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0, deadline - time.monotonic()))
            _signal(process, signal.SIGKILL)
            process.wait()
        del store  # or an exception's traceback would keep it open


def _start(rank: int, count: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    options = {"rank": rank, "parent": os.getpid(), "folder": str(folder)}
    options |= {"path": sys.path, "argv": sys.argv}
    environment = {
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count)),
        **os.environ,
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # This process hosts the store, as torchrun's agent does, so rank 0 must not open it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    # Each worker leads a process group, so that signals also reach its child processes.
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER_CODE, json.dumps(options)],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _collect_ended(running: dict[int, subprocess.Popen[bytes]]) -> dict[int, int]:
    """Remove exited workers from ``running``. Return the exit statuses of failed workers."""
    failed = {}
    for rank, process in list(running.items()):
        if process.poll() is not None:
            _signal(process, signal.SIGKILL)  # ends the child processes that it left behind
            del running[rank]
            if process.returncode:
                failed[rank] = process.returncode
    return failed


def _raise_first(title: str, failed: dict[int, int], folder: Path) -> None:
    """Raise LaunchError for the first failed worker, not for its victims."""
    raised: dict[int, _Failure] = {}
    for rank in failed:
        with suppress(FileNotFoundError):
            raised[rank] = pickle.loads((folder / f"failure-{rank}").read_bytes())
    for rank in failed.keys() - raised.keys():
        status = failed[rank]
        end = f"exit status {status}" if status > 0 else signal.Signals(-status).name
        hint = " Perhaps the machine is out of memory." if end == "SIGKILL" else ""
        # gloo aborts a process if a different process raises and closes its connections.
        if not raised or end != "SIGABRT":
            raise LaunchError(f"rank {rank} {title} ended with {end}.{hint}")
    first = min(raised, key=lambda rank: raised[rank].time)
    if raised[first].about in raised:
        first = raised[first].about
    cause = None
    with suppress(Exception):  # an __init__ with other arguments can't be unpickled
        cause = pickle.loads(raised[first].error)
    text = f"rank {first} {title} raised an exception:\n\n{raised[first].trace}"
    raise LaunchError(text) from cause


class _Failure(NamedTuple):
    """A worker's exception, and the rank ``about`` that caused it."""

    time: float
    trace: str
    about: Any
    error: bytes = b""


# -- a worker --------------------------------------------------------------------------------------


def work(*, rank: int, parent: int, argv: list[str], folder: str) -> None:
    """Run the function from ``folder``, and save its result or exception there."""
    sys.argv[:] = argv
    threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True).start()
    # A scheduler wraps optimizer.step, and pickling drops the wrapper. torch then warns needlessly.
    warnings.filterwarnings("ignore", message="Seems like `optimizer.step.*has been overridden")
    try:
        arguments = Path(folder, "arguments")
        fn, args, stateful = torch.load(arguments, "cpu", weights_only=False, mmap=True)
        _publish_main(fn)
        value = fn(*args)
        shut_down("has returned from its function and won't join")
        if rank == 0:
            states = [item.state_dict() for item in stateful]
            save_by_value(states, Path(folder, "states"), "states")
            result = map_leaves(_unwrapped, value, "result")
            save_by_value(result, Path(folder, "result"), "result")
    except BaseException as error:
        Path(folder, f"failure-{rank}").write_bytes(_pickled_failure(error))
        sys.stdout.flush()
        # A normal exit could wait for ranks that wait for this rank.
        os._exit(1)


def _end_with_parent(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _unwrapped(value: Any, path: str) -> Any:
    return raw(value) if isinstance(value, ModelHandle) else raw_loader(value)


def _publish_main(fn: Any) -> None:
    """Copy the function's globals into ``__main__``, where pickle looks up classes."""
    main = vars(sys.modules["__main__"])
    while isinstance(fn, functools.partial):
        fn = fn.func
    for function in (inspect.unwrap(fn), type(fn).__call__):
        names = getattr(function, "__globals__", {})
        if names.get("__name__") == "__main__":
            main.update(names)


def _pickled_failure(error: BaseException) -> bytes:
    import cloudpickle

    trace = "\n".join(filter(None, [traceback.format_exc(), who_is_missing(error)]))
    failure = _Failure(time.time(), trace, getattr(error, "failed_rank", None))
    with suppress(Exception):
        failure = failure._replace(error=cloudpickle.dumps(error.with_traceback(None)))
    return pickle.dumps(failure)
