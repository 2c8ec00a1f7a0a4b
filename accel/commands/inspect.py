"""Show what a checkpoint holds: files, tensors and values.

Reads the record only; `verify` compares the bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint import folder, latest
from ..checkpoint.record import Record, read
from ..checkpoint.safetensors import ITEM_BYTES
from ..errors import CheckpointError
from ..memory import new_figure, write_figure

# -- A picture of how a checkpoint lies in its files -------------------------------------------------------------------

_FILES = 64  # that a picture shows
_OBJECTS = 9


def file_bytes(record: Record) -> list[dict[str, int]]:
    """For each file the bytes of data by the first part of the tensors' names, the largest first in all."""
    found: list[dict[str, int]] = [{} for _ in record.files]
    total: dict[str, int] = {}
    for name, tensor in record.tensors.items():
        leaf = name.partition("/")[0]
        for file, _, count in tensor.overlaps(0, tensor.numel):
            nbytes = count * ITEM_BYTES[tensor.dtype]
            found[file][leaf] = found[file].get(leaf, 0) + nbytes
            total[leaf] = total.get(leaf, 0) + nbytes
    order = sorted(total, key=lambda leaf: -total[leaf])
    return [{leaf: file[leaf] for leaf in order if leaf in file} for file in found]


def save_picture(record: Record, title: str, path: str | os.PathLike[str]) -> Path:
    """A bar for each file, in parts for the objects of the state; the form is by the suffix.

    Raises:
        AccelError: matplotlib is missing, or cannot write such a file.
    """
    files = file_bytes(record)[:_FILES]
    leaves = list(dict.fromkeys(leaf for file in files for leaf in file))
    labels = [file.name for file in record.files[: len(files)]]
    figure = new_figure(path, 9, 1.6 + 0.32 * max(len(files), 1))
    axes = figure.subplots()
    starts = [0.0] * len(files)
    for group in (*((leaf,) for leaf in leaves[:_OBJECTS]), tuple(leaves[_OBJECTS:])):
        sizes = _sizes(files, group)
        if any(sizes):
            axes.barh(labels, sizes, left=starts, label=group[0] if len(group) == 1 else f"{len(group)} more")
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("MiB")
    more = len(record.files) - len(files)
    axes.set_title(
        f"{title}: {len(record.files)} files{f', the first {len(files)} of them' if more else ''}", fontsize=10
    )
    if leaves:
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return write_figure(figure, path)


def _sizes(files: Sequence[dict[str, int]], group: Sequence[str]) -> list[float]:
    return [sum(file.get(leaf, 0) for leaf in group) / 2**20 for file in files]


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
