"""Processes that are forked while a save goes on in the background, as a loader's workers are."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import threading
from pathlib import Path

import pytest

from accel.checkpoint import storage
from tests.interpreters import executable

SCRIPT = """
import contextlib, os, signal, sys, threading, time
import accel
from accel.checkpoint import storage
from accel.checkpoint.background import background

gate, stack = threading.Event(), contextlib.ExitStack()
stack.callback(storage.Lock(sys.argv[1]).release)
background.start(lambda: gate.wait() and None, stack)
leaves = os.fork()
if leaves == 0:
    sys.exit(7)  # runs what is registered for the exit
print(os.waitstatus_to_exitcode(os.waitpid(leaves, 0)[1]), flush=True)
lives = os.fork()
if lives == 0:
    signal.pause()
print(lives, flush=True)
if sys.argv[2] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
gate.set()
background.wait()
"""


@pytest.mark.parametrize("end", ["ends", "dies"])
def test_a_child_neither_hangs_nor_keeps_the_lock_of_a_save(end: str, tmp_path: Path) -> None:
    """A lock of the parent ends with its save or its process, though a child lives on."""
    script = textwrap.dedent(SCRIPT)
    job = subprocess.Popen([executable(), "-c", script, tmp_path, end], stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(60, job.kill)
    timer.start()
    assert job.stdout is not None
    try:
        assert job.stdout.readline() == "7\n"
        child = int(job.stdout.readline())
        try:
            assert job.wait(30) == (-signal.SIGKILL if end == "dies" else 0)
            storage.Lock(str(tmp_path)).release()
        finally:
            os.kill(child, signal.SIGKILL)
            job.stdout.close()
    finally:
        timer.cancel()
