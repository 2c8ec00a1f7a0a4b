"""Compare every byte of a checkpoint with its checksums."""

from __future__ import annotations

import argparse

from ..checkpoint import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", nargs="+", help="checkpoints")


def run(args: argparse.Namespace) -> int:
    """Raise at the first damage."""
    for directory in args.directory:
        verify(directory)
        print(f"{directory}: every byte is as it was written")
    return 0
