"""Jobs that save into an S3 server on the loopback and are killed at any moment: `python -m tests.checkpoint.kills 200`.

With `--on-disk` they save into a directory. After each kill the last commit must be there, whole, and at least what the job
knew to be saved. One job in four has two ranks, of which one or both are killed; half of the saves go on in the background;
every fifth job of a store meets a server that is busy at times.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import accel
from accel.checkpoint.storage import storage_of
from tests.checkpoint import stores
from tests.checkpoint.helpers import filled, value_of


def state(value: float) -> dict[str, Any]:
    """Every third one is uploaded in several parts."""
    return filled(value, 70_000, 1000, 4_500_000 if value % 3 == 0 else 7)


def job(url: str, begin: int, rank: int, world: int, wait: bool, meeting: str, told: int) -> None:
    """Saves for ever; tells of each value that is surely there."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    if world > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    accel.init()
    for value in itertools.count(begin):
        accel.save(state(float(value)), url, wait=wait)
        os.write(told, f"{value if wait else value - 1}\n".encode())


def forked(*args: Any) -> int:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            job(*args)
        os._exit(1)
    return child


def one_round(number: int, url: str, begin: int) -> tuple[int, str]:
    """The last value that a job surely saved, and what was done to it."""
    numbers = random.Random(number)
    world, wait = 2 if number % 4 == 3 else 1, number % 2 == 0 if number % 4 != 3 else number % 8 == 3
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        children = [forked(url, begin, rank, world, wait, f"{folder}/meet", write) for rank in range(world)]
        os.close(write)
        first = os.read(read, 100) if numbers.random() < 0.7 else b""
        time.sleep(numbers.uniform(0, 1.2 if first else 3))
        victims = children if world == 1 or numbers.random() < 0.5 else [numbers.choice(children)]
        for child in victims:
            os.kill(child, signal.SIGKILL)
        if len(victims) < world:
            time.sleep(numbers.uniform(0, 0.5))  # the other one goes on, as far as it can
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    rest = first
    while part := os.read(read, 65536):
        rest += part
    os.close(read)
    lines = rest.decode().split("\n")[:-1]
    return max(map(int, lines), default=0), f"{world} ranks, {'wait' if wait else 'background'}"


def attack(rounds: int, url: str, prepare: Callable[[int], None]) -> int:
    """How many of so many kills lost a commit; ``prepare`` is told which one is next, and -1 before it is looked at."""
    lost, done, saved, value = 0, Counter[str](), 0, 0
    start = time.monotonic()
    for number in range(rounds):
        prepare(number)
        sure, kind = one_round(number, url, value + 1)
        done[kind] += 1
        prepare(-1)
        if accel.latest(url) is None:
            lost += max(sure, value) > 0
            continue
        try:
            accel.verify(url)
            found = value_of(url)
            accel.teardown()
            assert found >= max(sure, value), f"{found} is there, {max(sure, value)} was saved"
            saved += int(found) - value
            value = int(found)
        except Exception as error:
            lost += 1
            print(f"round {number} ({kind}): {type(error).__name__}: {error}", flush=True)
        if number % 20 == 19:
            print(f"{number + 1} kills, {lost} lost, {saved} commits, {time.monotonic() - start:.0f} s", flush=True)
    accel.save(state(-1.0), url)
    accel.teardown()
    print(f"{rounds} kills ({dict(done)}): {lost} lost; {saved} commits; then {len(storage_of(url).names(url))} files")
    return lost


def in_store(rounds: int) -> None:
    with stores.server() as endpoint, stores.proxy(endpoint) as (busy, proxy):
        proxy.faults.append(stores.Fault("PUT|GET", (503, stores.BUSY), times=0))

        def prepare(number: int) -> None:
            proxy.faults[0].times = 2 if number % 5 == 4 else 0
            if number >= 0:
                stores.use(busy if number % 5 == 4 else endpoint)

        attack(rounds, f"s3://{stores.BUCKET}/kills", prepare)


def on_disk(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        attack(rounds, f"{folder}/run", lambda _: None)


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:] if text.isdecimal()]
    (on_disk if "--on-disk" in sys.argv else in_store)(*numbers or [200])
