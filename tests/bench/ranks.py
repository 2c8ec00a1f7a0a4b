"""Runs a function in fresh processes, as the only one or as the ranks of a gloo group."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("spawn")
LIMIT_SECONDS = 600.0
GROUP_SECONDS = 120.0


def _serve(rank: int, world: int, store: str, answer: Connection, work: bytes) -> None:
    # What torchrun would set; one process alone has none of it.
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    if world > 1:
        os.environ.update({k: str(v) for k, v in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if world > 1:
            limit = timedelta(seconds=GROUP_SECONDS)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
        fn, args = pickle.loads(work)
        answer.send((True, fn(*args)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    answer.close()
    # Threads of the libraries must not keep the process.
    os._exit(0)


def run(world: int, fn: Callable[..., Any], *args: Any, seconds: float = LIMIT_SECONDS) -> list[Any]:
    """The results of ``fn(*args)`` on each rank, within ``seconds``; ``fn`` lives at the top level of a module.

    Raises:
        RuntimeError: a rank failed (with its traceback) or was late.
    """
    work = pickle.dumps((fn, args))
    deadline = time.monotonic() + seconds
    processes, pipes = [], []
    with tempfile.TemporaryDirectory(prefix="accel-bench-") as folder:
        try:
            for rank in range(world):
                ours, theirs = _context.Pipe(duplex=False)
                process = _context.Process(
                    target=_serve, args=(rank, world, os.path.join(folder, "store"), theirs, work), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            results = [_receive(rank, pipe, deadline) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(2)
                process.kill()
    return results


def _receive(rank: int, pipe: Connection, deadline: float) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise RuntimeError(f"rank {rank} of a benchmark gave nothing in time")
    try:
        good, value = pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} of a benchmark died") from None
    if not good:
        raise RuntimeError(f"rank {rank} of a benchmark failed:\n{value}")
    return value
