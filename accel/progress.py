"""How far long work has come, for a person who watches a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Context: a function that is told how many more bytes are done; draws a bar where stderr is a terminal and tqdm is there."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda nbytes: None
        return
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as shown:
        yield shown.update
