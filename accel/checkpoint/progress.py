"""What a person hears of long work: a bar while it goes on, on a terminal or in a notebook, and a line in the log at its end."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

from ..process import rank

logger = logging.getLogger("accel")

#: Hears how many more bytes are done.
Progress = Callable[[int], Any]
_DELAY: Final = 2.0  # seconds; what is done by then has no bar


@contextlib.contextmanager
def progress_bar(what: str, total: int | None = None, *, shown: bool = True) -> Iterator[Progress]:
    """Context: shows how many of ``total`` bytes rank 0 has done, where somebody may watch and tqdm is installed."""
    watched = hasattr(sys, "ps1") or (sys.stderr is not None and sys.stderr.isatty())  # ps1: as in a notebook
    if not (shown and watched and rank() == 0 and os.environ.get("ACCEL_QUIET", "") in ("", "0")):
        yield lambda nbytes: None
        return
    try:
        with warnings.catch_warnings():  # of a notebook without widgets, where the bar is one of text
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    except ImportError:
        yield lambda nbytes: None
        return
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False, delay=_DELAY) as bar:
        yield bar.update


def log_end(directory: str, done: str, nbytes: int, begin: float) -> None:
    """Say what was done to a checkpoint since ``begin``, by ``time.monotonic``; on rank 0."""
    if rank() == 0:
        seconds = time.monotonic() - begin
        rate = nbytes / max(seconds, 1e-9) / 1e6
        logger.info("%s: %s, %.1f MB in %.2f s (%.0f MB/s)", directory, done, nbytes / 1e6, seconds, rate)
