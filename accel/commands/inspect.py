"""Show what a checkpoint holds: files, tensors and values.

Reads the record only; `verify` compares the bytes.
"""

from __future__ import annotations

import argparse
import json
import time

from ..checkpoint import folder, latest
from ..checkpoint.record import read
from ..errors import CheckpointError
from ..picture import file_bytes, save_picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", help="a checkpoint, or a directory of some: then the newest")
    parser.add_argument("--plot", metavar="PATH", help="draw how it lies in its files, too")
    parser.add_argument("--values", action="store_true", help="print the values as JSON instead")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    directory = latest(args.directory) or args.directory
    record, _ = read(folder.absolute(directory))
    if args.values:
        print(json.dumps(record.values, indent=2))
        return 0
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
    print(
        f"{directory}: saved {when} by {record.world_size} processes, {record.nbytes:,} bytes in {len(record.files)} files"
    )
    for file, parts in zip(record.files, file_bytes(record), strict=True):
        print(f"  {file.name}  {file.size:,} bytes: {', '.join(f'{leaf} {size:,}' for leaf, size in parts.items())}")
    width = max(map(len, record.tensors), default=0)
    for name, tensor in record.tensors.items():
        pieces = sum(part[3] for part in tensor.parts)
        print(f"  {name:{width}}  {tensor.dtype:5} {list(tensor.shape)}{f' in {pieces} parts' if pieces > 1 else ''}")
    if not isinstance(record.values, dict):
        raise CheckpointError(f"{directory}: the values are no object")
    for key, value in record.values.items():
        text = json.dumps(value)
        print(f"  {key} = {text if len(text) <= 100 else text[:97] + '...'}")
    if args.plot:
        print(f"picture: {save_picture(record, directory, args.plot)}")
    return 0
