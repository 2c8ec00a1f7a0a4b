"""Reads a checkpoint of accel without accel, by docs/checkpoint_format.md alone: python read_checkpoint.py DIRECTORY."""

import json
import math
import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from xxhash import xxh3_64_hexdigest as digest

CHUNK = 4 << 20
NAMES = "BOOL U8 I8 I16 U16 I32 U32 I64 U64 F8_E4M3 F8_E5M2 F16 BF16 F32 F64 C64 C128"
OF_TORCH = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32 float64"
)
TYPES = dict(zip(NAMES.split(), [*OF_TORCH.split(), "complex64", "complex128"], strict=True))


def check(right: bool, what: Any) -> None:
    if not right:
        raise ValueError(f"{what} is damaged, or nothing that this program reads")


def open_file(path: Path, told: dict[str, Any]) -> Any:
    """A shard file, once its size and the checksums of its header and data are as they should be."""
    with path.open("rb") as file:
        header = (length := file.read(8)) + file.read(int.from_bytes(length, "little"))
        check([digest(header[i : i + CHUNK]) for i in range(0, len(header), CHUNK)] == told["header"], path)
        found = "".join(map(digest, iter(lambda: file.read(CHUNK), b"")))
    check(found == json.loads(header[8:])["__metadata__"]["xxh3"] and path.stat().st_size == told["size"], path)
    return safe_open(path, "pt")


def read_tensor(
    files: list[Any], name: str, dtype: str, shape: list[int], parts: list[Any], cuts: Any = ()
) -> torch.Tensor:
    """A tensor: its blocks, of which it is the only one where it has no cuts, are one line of elements, which lies in parts."""
    starts = {
        start + i * count: (files[file + i], count) for file, start, count, number in parts for i in range(number)
    }
    whole, at = torch.empty(shape, dtype=getattr(torch, TYPES[dtype])), 0
    for block in product(*(pairwise([0, *own, n]) for n, own in zip(shape, cuts or [()] * len(shape), strict=True))):
        sizes = [end - begin for begin, end in block]
        line, first = torch.empty(math.prod(sizes), dtype=whole.dtype), at
        own = f"{name}[{','.join(f'{begin}:{end}' for begin, end in block)}]" if cuts else name
        while at < first + len(line):
            file, count = starts[at]
            part = file.get_tensor(own if count == len(line) else f"{own}[{at - first}:{at - first + count}]")
            part = (torch.view_as_complex(part) if whole.is_complex() else part).reshape(-1)
            check(len(part) == count > 0 and part.dtype is whole.dtype, name)
            line[at - first : at - first + count] = part
            at += count
        whole[tuple(slice(*side) for side in block)] = line.view(sizes)
    return whole


def read(directory: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """All tensors by name, and the values as they are written."""
    content = (directory / "accel.json").read_bytes()
    check(digest(content[:9] + b"0" * 16 + content[25:]).encode() == content[9:25], directory / "accel.json")
    record = json.loads(content)
    check(record["format"] == "accel-checkpoint" and record["version"] in (1, 2), directory)
    files = [open_file(directory / told["name"], told) for told in record["files"]]
    return {name: read_tensor(files, name, **told) for name, told in record["tensors"].items()}, record["values"]


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "accel.json").is_file():
        sys.exit("usage: python read_checkpoint.py DIRECTORY, which accel.save has written")
    for name, tensor in read(Path(sys.argv[1]))[0].items():
        print(name, tensor.dtype, list(tensor.shape))
