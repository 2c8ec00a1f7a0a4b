"""What a process started by ``accel.launch`` does; and what it shares with the one that started it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from ..api import teardown
from ..errors import LaunchError
from .pickling import require


@final
class Memory:
    """A file in memory without a name, which workers inherit: nothing is left of it, however the processes end."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("accel") if fd is None else fd

    def close(self) -> None:
        """Free it, once the others have closed it too."""
        os.close(self.fd)

    def write(self, value: object, name: str) -> None:
        """Put ``value`` there: tensors as their bytes, the rest pickled, functions and classes of ``__main__`` by value."""
        import cloudpickle

        try:
            with open(self.fd, "wb", closefd=False) as file:
                torch.save(value, file, pickle_module=cloudpickle)
        except Exception as error:
            require(value, name)
            raise LaunchError(f"{name} cannot be sent to another process: {error}") from error

    def read(self, *, mmap: bool) -> Any:
        """What was put there, on the CPU; with ``mmap`` the tensors' bytes are copied only where they are written to."""
        return torch.load(f"/proc/self/fd/{self.fd}", map_location="cpu", weights_only=False, mmap=mmap)


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception of one worker."""

    rank: int
    moment: float
    trace: str
    #: Pickled; empty where that cannot be done.
    error: bytes


def take_state(obj: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """What ``give_state`` needs: the object's own state, and a module's buffers that are not part of it."""
    state = obj.state_dict()
    buffers = dict(obj.named_buffers()) if isinstance(obj, nn.Module) else {}
    return state, {name: buffer for name, buffer in buffers.items() if name not in state}


def main(*, rank: int, parent: int, argv: list[str], payload: int, states: int, result: int, report: int) -> None:
    """Run the function of the payload on this rank, and end this process.

    Args:
        rank: this rank.
        parent: the process that must live as long as this one.
        argv: its command line.
        payload: file descriptor of a Memory with the function, its arguments, and what in them has a state.
        states: of the Memory where rank 0 leaves that state.
        result: of the Memory where rank 0 leaves the function's result.
        report: of a file for this rank's Failure.
    """
    sys.argv[:] = argv
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # A scheduler loses its mark on the optimizer's step when it is pickled, and would complain of the order of calls.
    warnings.filterwarnings("ignore", message="Seems like `optimizer.step.*has been overridden")
    try:
        fn, args, found = Memory(payload).read(mmap=True)
        _publish(fn, [*args, *found])
        value = fn(*args)
        teardown()
        if rank == 0:
            Memory(states).write([take_state(item) for item in found], "states")
            Memory(result).write(value, "result")
    except BaseException as error:
        failure = Failure(rank, time.time(), traceback.format_exc(), _pickled(error))
        with open(report, "wb") as file:
            pickle.dump(failure, file)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # not through the exit of the interpreter, which may wait for ranks that wait for this one


def _publish(fn: Any, items: list[Any]) -> None:
    """Make functions and classes of the launching ``__main__`` known by their names here, where plain pickle looks."""
    names = vars(sys.modules["__main__"])
    if getattr(fn, "__module__", "") == "__main__":
        names.update(getattr(fn, "__globals__", {}))
    for item in items:
        for part in item.modules() if isinstance(item, nn.Module) else [item]:
            if type(part).__module__ == "__main__":
                names.setdefault(type(part).__qualname__, type(part))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _pickled(error: BaseException) -> bytes:
    import cloudpickle

    with contextlib.suppress(Exception):
        data: bytes = cloudpickle.dumps(error.with_traceback(None))
        return data
    return b""
