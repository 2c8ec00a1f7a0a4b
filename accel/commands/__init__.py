"""The commands of ``python -m accel``, by name in the table ``COMMANDS`` of each module."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple


class Command(NamedTuple):
    """A command of ``python -m accel``."""

    #: Returns the exit status. Its docstring is the text of ``--help``.
    run: Callable[[argparse.Namespace], int]
    #: Arguments of the command that ``--help`` shows as an example.
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
