"""Reads a checkpoint without accel, by docs/checkpoint_format.md: python read_checkpoint.py DIRECTORY."""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from xxhash import xxh3_64_hexdigest as digest

DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "C128": "complex128",
}
DTYPES |= {f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)}


def read(directory: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Return all tensors by name, and the values as they are written."""
    content = (directory / "accel.json").read_bytes()
    if digest(content[:-27]).encode() != content[-18:-2] or b'"accel-checkpoint","version":3,' not in content[:50]:
        raise ValueError(f"{directory / 'accel.json'} is damaged, or has another version")
    record, files, tensors = json.loads(content), [], {}
    for file in record["files"]:
        with (directory / file["name"]).open("rb") as opened:
            if [digest(chunk) for chunk in iter(lambda: opened.read(4 << 20), b"")] != file["xxh3"]:
                raise ValueError(f"{directory / file['name']} is damaged")
        files.append(safe_open(directory / file["name"], "pt"))
    for name, tensor in record["tensors"].items():
        whole = tensors[name] = torch.empty(tensor["shape"], dtype=getattr(torch, DTYPES[tensor["dtype"]]))
        for file, low, high, *rule in tensor["parts"]:
            view = whole.view(-1) if len(low) == 1 else whole
            count, step, dim, shift = rule or (1, 0, 0, 0)
            for _ in range(count):
                target = view[tuple(map(slice, low, high))]
                box = ",".join(f"{a}:{b}" for a, b in zip(low, high, strict=True))
                key = name if target.numel() == whole.numel() else f"{name}[{box}]"
                part = files[file].get_tensor(key)
                target.copy_((part.view(whole.dtype) if part.dtype != whole.dtype else part).view(target.shape))
                file, low[dim], high[dim] = file + step, low[dim] + shift, high[dim] + shift
    return tensors, record["values"]


if __name__ == "__main__":
    for name, tensor in read(Path(sys.argv[1]))[0].items():
        print(name, tensor.dtype, list(tensor.shape))
