"""Write a model of a checkpoint as safetensors files for transformers, vLLM and diffusers."""

from __future__ import annotations

import argparse

from ..checkpoint import folder
from ..checkpoint.export import write_export
from ..checkpoint.weights import STEMS
from . import Bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", help="a checkpoint")
    parser.add_argument("out", help="where the weights go, in one file, or its parts and their index")
    parser.add_argument("--name", help="which model, where the checkpoint has several")
    parser.add_argument("--max-shard-size", default="50GB", help="of a file (%(default)s)")
    parser.add_argument("--dtype", help="convert floating-point tensors, such as to bfloat16")
    parser.add_argument("--library", choices=tuple(STEMS), default="transformers", help="whose names (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace weights that are there")


def run(args: argparse.Namespace) -> int:
    """Write it."""
    directory, out = folder.absolute(args.directory), folder.absolute(args.out)
    with Bar("export") as progress:
        write_export(
            directory,
            out,
            name=args.name,
            max_shard_size=args.max_shard_size,
            dtype=args.dtype,
            overwrite=args.overwrite,
            library=args.library,
            progress=progress,
            begin=progress.begin,
        )
    print(f"{args.directory}: exported to {args.out}")
    return 0
