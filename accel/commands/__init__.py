"""The commands of ``python -m accel``: each module is one, named as its file.

A command has a docstring (its help), ``add_arguments(parser)`` and ``run(args) -> int``, the exit status.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

# -- How far long work has come, for a person who watches a terminal ---------------------------------------------------


class Bar:
    """Is called with how many more bytes are done, and draws a bar where stderr is a terminal and tqdm is there. A context.

    Args:
        what: is done.
        total: how many bytes it will be; None where ``begin`` tells.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False)

    def __call__(self, nbytes: int) -> None:
        if self._bar is not None:
            self._bar.update(nbytes)

    def begin(self, total: int) -> None:
        """Learn how many bytes it will be."""
        if self._bar is not None:
            self._bar.reset(total)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
