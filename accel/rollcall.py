"""Who is missing, where a collective failed: gloo does not tell."""

from __future__ import annotations

import contextlib
import threading
import time

from .startup import Process


def roll_call(process: Process, error: object) -> str:
    """Which ranks do not say that they failed too; empty where ``error`` is not about other ranks."""
    text = str(error)
    # A closed connection is noticed at once, a timeout by each rank in its own time.
    wait = 4.0 if "imed out" in text else 1.0 if "by peer" in text else 0.0
    if not wait:
        return ""
    missing: list[int] = []

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            failed = process.store("failed")
            failed.set(str(process.place.rank), "")
            time.sleep(wait)
            missing.extend(r for r in range(process.place.world_size) if not failed.check([str(r)]))
            missing.append(-1)

    # The store may be on a host that is gone: then even the attempt may never end.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(wait + 4)
    if missing[-1:] != [-1]:
        return f"rank 0 (host {process.hosts[0]}) cannot be reached, or the host of the launcher's store"
    silent = [f"{r} (host {process.hosts[r]})" for r in missing[:-1]]
    if not silent:
        return "all ranks waited in vain"
    return f"rank {', '.join(silent)} did not answer: it ended or hangs, or the link to it is cut"
