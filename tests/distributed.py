"""Runs a function on real gloo ranks, in worker processes that the tests share.

``run(world, fn, *args)`` calls ``fn(*args)`` on every rank and returns the ranks' results;
``outcomes`` returns what each rank did, errors included. ``fn`` lives at the top level of a test module.
The timeouts are guards against a hang, long enough for a busy machine, and no measures.
A call that outlives its timeout, and a call that may break the process group (``breaks=True``),
costs the pool its workers, which are killed by pid; the next call gets new ones. After an error
on any rank the pool is kept if its ranks can still exchange values.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests import faults

GUARD = 180.0  # seconds
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


@dataclass(frozen=True)
class Outcome:
    """What one rank did: its value, or its error (class names up to Exception, message, traceback)."""

    value: Any = None
    error: tuple[str, ...] = ()
    message: str = ""
    trace: str = ""
    seconds: float = 0.0


_frozen = 0


def freeze_modules() -> None:
    """Let no later collection look at what has been imported since the last time: that takes longer than most tests."""
    global _frozen
    if len(sys.modules) > _frozen:
        gc.collect()
        gc.freeze()
        _frozen = len(sys.modules)


def _initialise(rank: int, world: int, rendezvous: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )


def _perform(fn: Callable[..., Any], args: tuple[Any, ...], plan: faults.Plan) -> Outcome:
    import torch

    torch.manual_seed(0)  # alike on all ranks, whatever the call before this one left
    start = time.monotonic()
    try:
        with faults.installed(plan):
            value = fn(*args)
    except BaseException as error:
        names = tuple(c.__name__ for c in type(error).__mro__)
        return Outcome(error=names, message=str(error), trace=traceback.format_exc(), seconds=time.monotonic() - start)
    return Outcome(value=value, seconds=time.monotonic() - start)


def _clean() -> None:
    import accel

    with contextlib.suppress(Exception):
        accel.teardown()
    gc.collect()


def _are_connected() -> bool:
    """Return True if all ranks still reach each other through accel and agree on what comes next."""
    import torch
    import torch.distributed as dist

    import accel

    try:
        accel.init(timeout=timedelta(seconds=5))
        token = torch.full((37,), accel.world_size())
        tokens = accel.all_gather(token[None])
        if dist.is_initialized():
            dist.monitored_barrier(timeout=timedelta(seconds=5))
        accel.teardown()
    except Exception:
        return False
    return bool((tokens == accel.world_size()).all())


def _serve(rank: int, world: int, rendezvous: str, connection: Connection) -> None:
    stacks = os.open(f"{rendezvous}.{rank}", os.O_CREAT | os.O_WRONLY)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    _initialise(rank, world, rendezvous)
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        fn, args, clean, plan, test = pickle.loads(message)
        os.environ["PYTEST_CURRENT_TEST"] = test
        freeze_modules()
        outcome = _perform(fn, args, plan)
        if clean:
            _clean()
        connection.send_bytes(pickle.dumps(outcome))


class Pool:
    """``world`` worker processes in one gloo group."""

    def __init__(self, world: int) -> None:
        for _ in range(3):
            self._start(world)
            if self._is_up():
                return
            self.close()
        raise AssertionError(f"{world} ranks did not come up")

    def _start(self, world: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="accel-test-")
        self._rendezvous = rendezvous = os.path.join(self._directory.name, "store")
        self.workers = []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, world, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def _is_up(self) -> bool:
        """Whether all ranks have found each other: on a busy machine gloo may lose a connection while it makes it."""
        with contextlib.suppress(EOFError, ConnectionError):
            return all(connection.poll(GUARD) and connection.recv_bytes() for _, connection in self.workers)
        return False

    def call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, clean: bool, plan: faults.Plan
    ) -> list[Outcome]:
        message = pickle.dumps((fn, args, clean, plan, os.environ.get("PYTEST_CURRENT_TEST", "")))
        for _, connection in self.workers:
            connection.send_bytes(message)
        deadline = time.monotonic() + timeout
        results = []
        for rank, (process, connection) in enumerate(self.workers):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                where = f"within {timeout} s in {fn.__module__}.{fn.__name__}"
                raise AssertionError(f"rank {rank} did not answer {where}:\n{self._stacks()}")
            try:
                results.append(pickle.loads(connection.recv_bytes()))
            except (EOFError, ConnectionError):
                process.join(1)
                results.append(Outcome(error=("Died",), message=f"exit status {process.exitcode}"))
        return results

    def is_connected(self) -> bool:
        """Return True if the ranks can still exchange values after a call that failed."""
        with contextlib.suppress(AssertionError, OSError):
            return all(o.value for o in self.call(_are_connected, (), 10.0, clean=False, plan=faults.Plan("", ())))
        return False

    def _stacks(self) -> str:
        """Where all threads of all ranks are."""
        for process, _ in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        ranks = range(len(self.workers))
        return "\n".join(f"-- rank {rank}\n{Path(f'{self._rendezvous}.{rank}').read_text()}" for rank in ranks)

    def close(self) -> None:
        for process, connection in self.workers:
            process.kill()
            process.join(5)
            connection.close()
        self._directory.cleanup()


_pools: dict[int, Pool] = {}


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Polls until the condition holds; used instead of a sleep where one process waits for another."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {seconds} s"
        time.sleep(0.01)


def live_tensors() -> int:
    """How many tensors this process holds; one that a thread of gloo is about to let go of is not held."""
    import gc

    import torch

    counts = []
    for _ in range(5):
        gc.collect()
        counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
        time.sleep(0.02)
    return min(counts)


def _discard(world: int) -> None:
    pool = _pools.pop(world, None)
    if pool is not None:
        pool.close()


@atexit.register
def close_all() -> None:
    for world in list(_pools):
        _discard(world)


def outcomes(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = GUARD,
    breaks: bool = False,
    fails: Sequence[faults.Fault] = (),
) -> list[Outcome]:
    """What every rank did in ``fn(*args)``; ``breaks=True`` where the process group may not survive."""
    pool = _pools.get(world) or _pools.setdefault(world, Pool(world))
    try:
        with faults.declared(fails) as plan:
            results = pool.call(fn, args, timeout, clean=not breaks, plan=plan)
    except BaseException:
        _discard(world)
        raise
    failed = any(result.error for result in results)
    if breaks or (failed and not pool.is_connected()):
        _discard(world)
    return results


def run(world: int, fn: Callable[..., Any], *args: Any, timeout: float = GUARD) -> list[Any]:
    """The ranks' results of ``fn(*args)``; an error on any rank fails the test with its traceback."""
    results = outcomes(world, fn, *args, timeout=timeout)
    failures = [
        f"rank {rank}:\n{result.trace or result.message}" for rank, result in enumerate(results) if result.error
    ]
    if failures:
        raise AssertionError("\n".join(failures))
    return [result.value for result in results]


def refusals(world: int, fn: Callable[..., Any], *args: Any, error: str, breaks: bool = False) -> list[str]:
    """The messages with which ``fn(*args)`` fails on every rank, all of class ``error``."""
    results = outcomes(world, fn, *args, breaks=breaks)
    for rank, result in enumerate(results):
        assert error in result.error, f"rank {rank}: expected {error}, found {result.error}\n{result.trace}"
    return [result.message for result in results]
