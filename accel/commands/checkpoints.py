"""The commands on checkpoints: convert, diff, export, inspect and verify."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import checkpoint
from ..checkpoint import folder
from ..checkpoint.reader import Reader
from ..checkpoint.record import Record, Stored, read
from ..checkpoint.safetensors import BY_NAME, ITEM_BYTES
from ..checkpoint.values import TAG, items_in
from ..checkpoint.weights import STEMS
from ..engines.base.memory import human
from ..errors import CheckpointError
from ..memory import COLOURS, Panel, save_panels, scale
from . import Command

# -- convert -----------------------------------------------------------------------------------------------------------


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a file of torch.save, or a directory")
    parser.add_argument("directory", help="where the checkpoint goes")
    parser.add_argument("--no-optimizer", action="store_true", help="leave the state of optimizers out")


def convert(args: argparse.Namespace) -> int:
    """Write a checkpoint of torch.save, torch.distributed.checkpoint or a backend's own library (ZeRO) as one of accel.

    Pickled objects in it are refused, not run.
    """
    found = checkpoint.import_checkpoint(args.source, args.directory, optimizer=not args.no_optimizer)
    for kind, names in found.items():
        if names:
            print(f"{kind}: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}")
    return 0


# -- diff --------------------------------------------------------------------------------------------------------------


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="a checkpoint")
    parser.add_argument("second", help="another")
    parser.add_argument(
        "--tolerance", type=_tolerance, default=0.0, help="largest difference that counts as equal (default 0)"
    )


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, found {text!r}")
    return value


def diff(args: argparse.Namespace) -> int:
    """Show where two checkpoints differ; the exit status is 1 if they do.

    World size and backend of the jobs that saved them make no difference.
    """
    args.first, args.second = folder.absolute(args.first), folder.absolute(args.second)
    lines = _differences(args)
    for line in lines:
        print(line)
    print(f"{len(lines)} differences" if lines else "no difference")
    return 1 if lines else 0


def _differences(args: argparse.Namespace) -> list[str]:
    (first, _), (second, _) = read(args.first), read(args.second)
    folder.check_sizes(args.first, first)
    folder.check_sizes(args.second, second)
    lines = [*_tensors(args, first, second), *_values(first.values, second.values, "state", args.tolerance)]
    for rank, (one, other) in enumerate(zip(first.ranks, second.ranks, strict=False)):
        lines += _values(one, other, f"rank {rank}", args.tolerance)
    return lines


def _tensors(args: argparse.Namespace, first: Record, second: Record) -> Iterator[str]:
    names = sorted(n for n, t in first.tensors.items() if n in second.tensors and _form(second.tensors[n]) == _form(t))
    ranges = [(name, 0, first.tensors[name].numel, BY_NAME[first.tensors[name].dtype]) for name in names]
    opened = (
        Reader(directory, found, stream=True) for directory, found in ((args.first, first), (args.second, second))
    )
    contents = zip(*(reader.in_turn(ranges) for reader in opened), strict=True)
    for name in sorted(first.tensors.keys() | second.tensors.keys()):
        one, other = first.tensors.get(name), second.tensors.get(name)
        if one is None or other is None:
            yield f"{name}: only in {args.second if one is None else args.first}"
        elif _form(one) != _form(other):
            yield f"{name}: {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
        else:
            mine, theirs = next(contents)
            yield from _content(name, mine, theirs, args.tolerance)


def _form(tensor: Stored) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _content(name: str, one: torch.Tensor, other: torch.Tensor, tolerance: float) -> Iterator[str]:
    if torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
        return
    if one.is_complex() or one.is_floating_point():
        count, largest = _difference(one, other, tolerance)
    else:
        count, largest = _whole_difference(one, other, tolerance)
    if count:
        yield f"{name}: {count} of {one.numel()} elements differ, by at most {largest:.3g}"


def _difference(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> tuple[int, float]:
    """How many elements differ by more, and by how much."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    distance = (a - b).abs()
    differ = (a != b) & ~(a.isnan() & b.isnan()) & ~(distance <= tolerance)
    return int(differ.sum()), float(distance[differ].max()) if bool(differ.any()) else 0.0


def _whole_difference(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> tuple[int, int]:
    """The same of integers, which are not all numbers of a float; a distance may need one bit more than they have."""
    flip = torch.iinfo(torch.int64).min if one.dtype is torch.uint64 else 0  # so that they are in order as signed ones
    a, b = (t.view(torch.int64) ^ flip if flip else t.to(torch.int64) for t in (one, other))
    unsigned = torch.maximum(a, b) - torch.minimum(a, b)
    far = unsigned < 0
    differ = (far & (unsigned.double() + 2.0**64 > tolerance)) | (
        ~far & (unsigned > min(math.floor(tolerance), 2**63 - 1))
    )
    chosen = unsigned[differ & far] if bool((differ & far).any()) else unsigned[differ]
    largest = int(chosen.max()) if chosen.numel() else 0
    return int(differ.sum()), largest + 2**64 if largest < 0 else largest


def _values(one: object, other: object, path: str, tolerance: float) -> Iterator[str]:
    one, other = _items(one), _items(other)
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if key in one and key in other:
                yield from _values(one[key], other[key], f"{path}.{key}", tolerance)
            else:
                yield f"{path}.{key}: only in the {'first' if key in one else 'second'}"
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _values(a, b, f"{path}[{i}]", tolerance)
    elif type(one) is type(other) is float and abs(one - other) <= tolerance:
        return
    elif json.dumps(one) != json.dumps(other):
        yield f"{path}: {json.dumps(one)[:60]} and {json.dumps(other)[:60]}"


def _items(node: Any) -> Any:
    """A dict's values by its keys; those that are no strings are there as JSON."""
    if isinstance(node, dict) and node.get(TAG) == "dict":
        return {key if isinstance(key, str) else json.dumps(key): value for key, value in items_in(node)}
    return node


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
    """A bar for each file, in parts for the objects of the state; the form is by the suffix."""
    files = file_bytes(record)[:_FILES]
    leaves = list(dict.fromkeys(leaf for file in files for leaf in file))
    shown = {leaf: leaf if i < _OBJECTS else f"{len(leaves) - _OBJECTS} more" for i, leaf in enumerate(leaves)}
    unit, size = scale(max((sum(file.values()) for file in files), default=0))
    bars = []
    for stored, file in zip(record.files, files, strict=False):
        sizes: dict[str, float] = {}
        for leaf, nbytes in file.items():
            sizes[shown[leaf]] = sizes.get(shown[leaf], 0) + nbytes / size
        bars.append((stored.name, sizes, human(sum(file.values()))))
    more = f", the first {len(files)} of them" if len(record.files) > len(files) else ""
    title = f"{title}: {len(record.files)} file{'s' * (len(record.files) != 1)}{more}"
    return save_panels([Panel(title, unit, {"": bars}, dict(zip(shown.values(), COLOURS, strict=False)))], path)


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="a checkpoint, or a directory of some: then the newest")
    parser.add_argument("--plot", metavar="PATH", help="draw how it lies in its files, too")
    parser.add_argument("--values", action="store_true", help="print the values as JSON instead")


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
            other = (
                f"loads into {node['class']} only"
                if node["class"]
                else "of another library, which does not tell its class"
            )
            yield f"{path}: an optimizer; {other}"
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
    if args.plot:
        print(f"picture: {save_picture(record, directory, args.plot)}")
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
    "convert": Command(convert, _convert_arguments),
    "diff": Command(diff, _diff_arguments),
    "export": Command(export, _export_arguments),
    "inspect": Command(inspect, _inspect_arguments),
    "verify": Command(verify, _verify_arguments),
}
