"""Compare every byte of a checkpoint with its checksums."""

from __future__ import annotations

import argparse

from ..checkpoint import folder
from ..checkpoint.failures import explain
from ..checkpoint.record import read
from ..checkpoint.verify import compare_all
from ..errors import CheckpointError
from . import Bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", nargs="+", help="checkpoints")


def run(args: argparse.Namespace) -> int:
    """Raise at the first damage."""
    for directory in args.directory:
        path = folder.absolute(directory)
        with Bar("verify", read(path)[0].nbytes) as progress:
            try:
                compare_all(path, 0, 1, progress)
            except OSError as error:
                raise CheckpointError(explain(error)) from error
        print(f"{directory}: every byte is as it was written")
    return 0
