"""The commands of ``python -m accel``: the tables ``COMMANDS`` of the modules here, by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple


class Command(NamedTuple):
    """One command."""

    run: Callable[[argparse.Namespace], int]  # returns the exit status; its docstring is the command's help
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def whole_number(text: str) -> int:
    """An argument's type."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}") from None
