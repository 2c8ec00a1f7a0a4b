"""Show where two checkpoints differ; the exit status is 1 if they do.

World size and backend of the jobs that saved them make no difference.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator

import torch

from ..checkpoint import folder
from ..checkpoint.reader import Reader
from ..checkpoint.record import Record, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("first", help="a checkpoint")
    parser.add_argument("second", help="another")
    parser.add_argument(
        "--tolerance", type=_tolerance, default=0.0, help="largest difference that counts as equal (default 0)"
    )


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, found {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    """Print each difference on a line."""
    args.first, args.second = folder.absolute(args.first), folder.absolute(args.second)
    (first, _), (second, _) = read(args.first), read(args.second)
    lines = [*_tensors(args, first, second), *_values(first.values, second.values, "state")]
    for rank, (one, other) in enumerate(zip(first.ranks, second.ranks, strict=False)):
        lines += _values(one, other, f"rank {rank}")
    for line in lines:
        print(line)
    print(f"{len(lines)} differences" if lines else "no difference")
    return 1 if lines else 0


def _tensors(args: argparse.Namespace, first: Record, second: Record) -> Iterator[str]:
    readers = Reader(args.first, first, stream=True), Reader(args.second, second, stream=True)
    for name in sorted(first.tensors.keys() | second.tensors.keys()):
        one, other = first.tensors.get(name), second.tensors.get(name)
        if one is None or other is None:
            yield f"{name}: only in {args.second if one is None else args.first}"
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            yield f"{name}: {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
        elif one.numel:
            yield from _content(name, readers[0].read(name), readers[1].read(name), args.tolerance)


def _content(name: str, one: torch.Tensor, other: torch.Tensor, tolerance: float) -> Iterator[str]:
    if torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
        return
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    distance = (a - b).abs()
    if one.is_complex() or one.is_floating_point():
        differ = (a != b) & ~(a.isnan() & b.isnan())
    else:
        differ = one.to(torch.int64) != other.to(torch.int64)  # as floats large ones could be equal
    if tolerance > 0:
        differ &= ~(distance <= tolerance)
    if count := int(differ.sum()):
        yield f"{name}: {count} of {one.numel()} elements differ, by at most {float(distance[differ].max()):.3g}"


def _values(one: object, other: object, path: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if key in one and key in other:
                yield from _values(one[key], other[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: only in the {'first' if key in one else 'second'}"
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _values(a, b, f"{path}[{i}]")
    elif json.dumps(one) != json.dumps(other):
        yield f"{path}: {json.dumps(one)[:60]} and {json.dumps(other)[:60]}"
