"""The commands on checkpoints: export, inspect and verify."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from .. import checkpoint
from ..checkpoint import folder
from ..checkpoint.record import Record, read
from ..checkpoint.safetensors import ITEM_BYTES
from ..checkpoint.values import TAG
from ..checkpoint.weights import STEMS
from ..errors import CheckpointError
from . import Command

# -- export ------------------------------------------------------------------------------------------------------------


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="a checkpoint")
    parser.add_argument("out", help="where the weights go, in one file, or its parts and their index")
    parser.add_argument("--name", help="which model, where the checkpoint has several")
    parser.add_argument("--max-shard-size", default="50GB", help="of a file (%(default)s)")
    parser.add_argument("--dtype", help="convert floating-point tensors, such as to bfloat16")
    parser.add_argument("--library", choices=tuple(STEMS), default="transformers", help="whose names (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace weights that are there")


def export(args: argparse.Namespace) -> int:
    """Write a model of a checkpoint as safetensors files for transformers, vLLM and diffusers."""
    options = {name: getattr(args, name) for name in ("name", "max_shard_size", "dtype", "library", "overwrite")}
    checkpoint.export(args.directory, args.out, **options)
    print(f"{args.directory}: exported to {args.out}")
    return 0


# -- inspect -----------------------------------------------------------------------------------------------------------


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


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="a checkpoint, or a directory of some: then the newest")
    parser.add_argument("--values", action="store_true", help="print the values as JSON instead")


def _items(node: Any) -> Any:
    """Return a saved dict as a dict. Keys that are not strings become their JSON."""
    if isinstance(node, dict) and node.get(TAG) == "dict":
        return {key if isinstance(key, str) else json.dumps(key): value for key, value in node["items"]}
    return node


_STEPS = ("step", "global_step", "epoch")


def _limits(record: Record) -> Iterator[str]:
    """Which backend saved it, and at which step, as far as it says; and what of it is bound to a class or to each process."""
    values = _items(record.values)
    steps = [f"{key} {values[key]}" for key in _STEPS if type(values.get(key)) is int]
    if steps:
        yield f"at {', '.join(steps)}"
    todo: list[tuple[str, Any]] = [("", values)]
    while todo:
        path, node = todo.pop(0)
        node = _items(node)
        kind = node.get(TAG) if isinstance(node, dict) else None
        if kind == "module":
            backend = f" of backend {node['backend']}" if "backend" in node else ""
            yield f"{path}: a model{backend}; loads with any backend"
        elif kind == "optimizer":
            yield f"{path}: an optimizer; loads into {node['class']} only"
        elif kind == "ranks":
            yield f"{path}: of each of {record.world_size} processes; further ones begin with their own"
        elif isinstance(node, dict | list):
            pairs = node.items() if isinstance(node, dict) else enumerate(node)
            todo += [(f"{path}/{key}" if path else str(key), child) for key, child in pairs]


def inspect(args: argparse.Namespace) -> int:
    """Show what a checkpoint holds: files, tensors and values.

    Reads the record only; `verify` compares the bytes.
    """
    directory = folder.latest(args.directory) or args.directory
    record, _ = read(folder.absolute(directory))
    if args.values:
        print(json.dumps(record.values, indent=2))
        return 0
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
    print(
        f"{directory}: saved {when} by {_number(record.world_size, 'process', 'es')}, {record.nbytes:,} bytes in "
        f"{_number(len(record.files), 'file')}"
    )
    for file, parts in zip(record.files, file_bytes(record), strict=True):
        print(f"  {file.name}  {file.size:,} bytes: {', '.join(f'{leaf} {size:,}' for leaf, size in parts.items())}")
    width = max(map(len, record.tensors), default=0)
    for name, tensor in record.tensors.items():
        pieces = sum(part[3] for part in tensor.parts)
        print(f"  {name:{width}}  {tensor.dtype:5} {list(tensor.shape)}{f' in {pieces} parts' if pieces > 1 else ''}")
    for line in _limits(record):
        print(f"  {line}")
    for key, value in _items(record.values).items():
        text = json.dumps(value)
        print(f"  {key} = {text if len(text) <= 100 else text[:97] + '...'}")
    return 0


def _number(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


# -- verify ------------------------------------------------------------------------------------------------------------


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", nargs="+", help="checkpoints")


def verify(args: argparse.Namespace) -> int:
    """Compare every byte of checkpoints with their checksums; the exit status is 1 if any is not as it was written."""
    status = 0
    for directory in args.directory:
        try:
            checkpoint.verify(directory)
        except CheckpointError as error:
            print(f"accel verify: {error}", file=sys.stderr)
            status = 1
        else:
            print(f"{directory}: every byte is as it was written")
    return status


COMMANDS = {
    "export": Command(export, _export_arguments),
    "inspect": Command(inspect, _inspect_arguments),
    "verify": Command(verify, _verify_arguments),
}
