"""Write a checkpoint of torch.save, torch.distributed.checkpoint or a backend's own library (ZeRO) as one of accel.

Pickled objects in it are refused, not run.
"""

from __future__ import annotations

import argparse

from ..checkpoint import folder
from ..checkpoint.foreign import convert
from . import Bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("source", help="a file of torch.save, or a directory")
    parser.add_argument("directory", help="where the checkpoint goes")
    parser.add_argument("--no-optimizer", action="store_true", help="leave the state of optimizers out")


def run(args: argparse.Namespace) -> int:
    """Write it, and say what was found."""
    with Bar("convert") as progress:
        found = convert(
            folder.absolute(args.source),
            folder.absolute(args.directory),
            optimizer=not args.no_optimizer,
            progress=progress,
        )
    for kind, names in found.items():
        if names:
            print(f"{kind}: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}")
    return 0
