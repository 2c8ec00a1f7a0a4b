"""Read a checkpoint without accel: read_checkpoint.py DIRECTORY. See docs/checkpoint_format.md."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load
from xxhash import xxh3_64_hexdigest as checksum

DTYPES = dict(BOOL="bool", BF16="bfloat16", F8_E4M3="float8_e4m3fn", F="float", I="int", U="uint", C="complex")


def read(directory):
    """Return the tensors by name, and the saved state as JSON."""
    content = (directory / "accel.json").read_bytes()
    assert checksum(content[:-27]).encode() == content[-18:-2], "accel.json is damaged"
    index, files, tensors = json.loads(content), [], {}
    for file in index["files"]:
        data = (directory / file["name"]).read_bytes()
        sums = [checksum(data[i : i + (4 << 20)]) for i in range(0, len(data), 4 << 20)]
        assert sums == file["xxh3"], f"{file['name']} is damaged"
        files.append(load(data))
    for name, entry in index["tensors"].items():
        code = entry["dtype"]
        dtype = getattr(torch, DTYPES.get(code) or DTYPES[code[0]] + code[1:].lower())
        full = tensors[name] = torch.empty(entry["shape"], dtype=dtype)
        for file, low, high, *rule in entry["parts"]:
            count, step, dim, shift = rule or (1, 0, 0, 0)
            for _ in range(count):
                target = (full.view(-1) if len(low) == 1 else full)[tuple(map(slice, low, high))]
                box = ",".join(f"{a}:{b}" for a, b in zip(low, high, strict=True))
                part = files[file].get(f"{name}[{box}]", files[file].get(name))
                target.copy_(part.view(dtype).view(target.shape))
                file, low[dim], high[dim] = file + step, low[dim] + shift, high[dim] + shift
    return tensors, index["values"]


if __name__ == "__main__":
    print(*read(Path(sys.argv[1]))[0].items(), sep="\n")
