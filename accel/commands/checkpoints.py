"""The commands for checkpoints: export, inspect and verify."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from .. import checkpoint
from ..checkpoint import folder
from ..checkpoint.record import read
from ..checkpoint.values import TAG
from ..checkpoint.weights import STEMS
from ..errors import CheckpointError
from . import Command


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="a checkpoint")
    parser.add_argument("out", help="the directory for the safetensors files")
    parser.add_argument("--name", help="the model, if the checkpoint has several")
    parser.add_argument("--max-shard-size", default="50GB", help="bytes per file (%(default)s)")
    parser.add_argument("--dtype", help="convert floating-point tensors, for example to bfloat16")
    parser.add_argument(
        "--library", choices=tuple(STEMS), default="transformers", help="file names (%(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace weights in OUT")


def export(args: argparse.Namespace) -> int:
    """Write a model of a checkpoint as safetensors files for transformers, vLLM and diffusers."""
    options = vars(args)
    names = ("name", "max_shard_size", "dtype", "library", "overwrite")
    checkpoint.export(args.directory, args.out, **{name: options[name] for name in names})
    print(f"{args.directory}: exported to {args.out}")
    return 0


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="a checkpoint, or a directory with checkpoints")
    parser.add_argument("--values", action="store_true", help="print the values as JSON instead")


def inspect(args: argparse.Namespace) -> int:
    """Show the files, tensors and values of a checkpoint.

    This reads the record only. Use `verify` to compare the bytes.
    """
    directory = folder.latest(args.directory) or args.directory
    record = read(folder.absolute(directory))
    if args.values:
        print(json.dumps(record.values, indent=2))
        return 0
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
    processes = f"{record.world_size} process{'es' if record.world_size > 1 else ''}"
    files = f"{len(record.files)} file{'s' if len(record.files) > 1 else ''}"
    print(f"{directory}: saved {when} by {processes}, {record.nbytes:,} bytes in {files}")
    for file in record.files:
        print(f"  {file.name}  {file.size:,} bytes")
    width = max(map(len, record.tensors), default=0)
    for name, tensor in record.tensors.items():
        count = sum(run.count for run in tensor.runs)
        parts = f" in {count} parts" if count > 1 else ""
        print(f"  {name:{width}}  {tensor.dtype:5} {list(tensor.shape)}{parts}")
    items = record.values.items()
    if record.values.get(TAG) == "dict":
        items = record.values["items"]
    for key, node in items:
        print(f"  {key if isinstance(key, str) else json.dumps(key)}{_describe(node)}")
    return 0


def _describe(node: Any) -> str:
    kind = node.get(TAG) if isinstance(node, dict) else None
    if kind == "module":
        backend = f" saved with backend {node['backend']}" if "backend" in node else ""
        return f": a model{backend}. Loads with any backend"
    if kind == "optimizer":
        return f": an optimizer. Loads only into {node['class']}"
    if kind == "ranks":
        return ": separate state for each rank"
    text = json.dumps(node)
    return f" = {text if len(text) <= 100 else text[:97] + '...'}"


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", nargs="+", help="a checkpoint")


def verify(args: argparse.Namespace) -> int:
    """Compare every byte of checkpoints with their checksums.

    The exit status is 1 if a checkpoint is damaged.
    """
    status = 0
    for directory in args.directory:
        try:
            checkpoint.verify(directory)
            print(f"{directory}: every byte matches its checksum")
        except CheckpointError as error:
            print(f"accel verify: {error}", file=sys.stderr)
            status = 1
    return status


COMMANDS = {
    "export": Command(export, "checkpoints/step-100 weights --dtype bfloat16", _export_arguments),
    "inspect": Command(inspect, "checkpoints", _inspect_arguments),
    "verify": Command(verify, "checkpoints/step-100 checkpoints/step-200", _verify_arguments),
}
