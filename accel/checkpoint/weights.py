"""Weights of transformers and diffusers: read them like a checkpoint, or export them."""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import nn

from ..errors import CheckpointError
from ..precision import dtype_of
from . import folder, record, shards
from .background import background
from .layout import Run
from .reader import BoxReader
from .record import Record, Stored
from .shards import BY_NAME, ITEM_BYTES, NAMES, Entry, Written, batched
from .state import State, name_of
from .steps import log_end, on_running_ranks, parsing
from .storage import read_whole, storage_of
from .values import TAG, Decoder, Json, items_of

#: The file is ``<stem>.safetensors``, or ``<stem>-00001-of-00002.safetensors`` with an index.
STEMS: Final = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}
_WEIGHTS: Final = re.compile(
    rf"({'|'.join(STEMS.values())})(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)
Content = Iterator[memoryview]
#: Bytes of tensors that an export reads at a time.
_BATCH: Final = 32 << 20
size_of: Final = operator.attrgetter("nbytes")


def open_checkpoint(directory: str, state: Any) -> Record:
    """Return a checkpoint's record, or build one from weights for the model in ``state``."""
    entrance = weights_at(directory)
    if entrance is None:
        return record.read(directory)
    leaves = State({} if state is None else state).leaves
    models = [leaf.keys for leaf in leaves if isinstance(leaf.value, nn.Module)]
    if len(models) != 1 and state is not None:
        text = f"{directory} has the weights of one model, but the state has {len(models)}."
        raise CheckpointError(f'{text} Load them into {{"model": model}}.')
    keys = models[0] if models else ()
    name = name_of(keys)
    values: Json = {TAG: "module", "extra": {}}
    for key in reversed(keys):
        values = {key: values}
    files: list[Written] = []
    tensors = {}
    for path in _files(entrance):
        problem = f"{path} is not a complete safetensors file"
        with storage_of(path).open(path) as file, parsing(problem):
            header = shards.read_header(file)
            entries = shards.parse_header(header)
        for key, entry in entries.items():
            dtype = entry["dtype"]
            shape = tuple(entry["shape"])
            if dtype not in BY_NAME:
                raise CheckpointError(f"{path}: accel can't load {key!r} of dtype {dtype}.")
            count = math.prod(shape)
            run = Run(len(files), ((0, count),))
            names = {(run.file, run.box): (key, 0)}
            tensors[f"{name}/{key}"] = Stored(dtype, shape, (run,) if count else (), names)
        files.append(Written(path, file.size, ()))
    digits = shards.checksum(repr((files, tensors)).encode())
    return Record(files=files, tensors=tensors, values=values, digits=digits)


def weights_at(path: str) -> str | None:
    """Return the file or index of weights at a path, or None."""
    storage = storage_of(path)
    if record.exists(path):
        return None
    is_file = path.endswith((".safetensors", ".json"))
    if is_file and os.path.basename(path) != record.NAME:
        return path if storage.version(path) else None
    # This is the order of transformers: the single file before the index.
    for stem in STEMS.values():
        for name in (f"{stem}.safetensors", f"{stem}.safetensors.index.json"):
            entrance = os.path.join(path, name)
            if storage.version(entrance):
                return entrance
    return None


def _files(entrance: str) -> list[str]:
    """Return the paths of the files with weights."""
    if entrance.endswith(".safetensors"):
        return [entrance]
    with parsing(f"{entrance} is not an index of weights"):
        names = set(json.loads(read_whole(entrance))["weight_map"].values())
        return [os.path.join(os.path.dirname(entrance), name) for name in sorted(names)]


def choose(directory: str, saved: Record, name: str | None) -> tuple[str, Mapping[str, Json]]:
    """Return a saved model's name and node. None chooses the only model."""
    tensors: dict[str, torch.Tensor] = {}
    models = dict(_models(saved.values, Decoder(directory, tensors.__getitem__), ()))
    first = next(iter(models), None)
    chosen = first if name is None and len(models) == 1 else name
    if chosen is None or chosen not in models:
        problem = f"{len(models)} models" if name is None else f"no model {name!r}"
        names = ", ".join(map(repr, models)) or "none"
        raise CheckpointError(f"{directory} has {problem} ({names}). Choose with name={first!r}.")
    return chosen, models[chosen]


def _models(
    node: Json, decoder: Decoder, keys: tuple[object, ...]
) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield the names and nodes of the models in a saved state."""
    if isinstance(node, dict) and node.get(TAG) == "module":
        yield name_of(keys), node
        return
    for key, child in items_of(decoder.children(node) or {}):
        yield from _models(child, decoder, (*keys, key))


def export(
    dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    max_shard_size: int | str = "50GB",
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    library: Literal["transformers", "diffusers"] = "transformers",
) -> None:
    """Write a model of the checkpoint ``dir`` as ``out/model.safetensors``.

    transformers and vLLM can load it once you add ``config.json``. A large model is split
    into several files with an index. Tied weights are stored under their first name. Call
    this in one process or on all ranks. On several ranks, only rank 0 writes.

    Args:
        dir: the directory of a checkpoint.
        out: a directory, which is created if it doesn't exist.
        name: the model if there are several, such as ``"model"`` or ``"gan/generator"``.
        max_shard_size: the maximum bytes per file, or a string such as ``"5GB"``.
        dtype: convert floating-point tensors to this dtype, such as ``"bfloat16"``.
        overwrite: if True, replace weights in ``out``.
        library: ``"diffusers"`` writes ``diffusion_pytorch_model.safetensors``.

    Raises:
        CheckpointError: ``dir`` is damaged or lacks the model, or ``out`` has weights.
    """

    def act(rank: int, world: int) -> None:
        background.wait()
        if rank:
            return
        begin, directory = time.monotonic(), folder.absolute(dir)
        saved = record.read(directory)
        model, node = choose(directory, saved, name)
        entries = _entries(saved, f"{model}/", dtype)
        if node["extra"] or not entries:
            raise CheckpointError(f"{model!r} can't be exported. It has extra state or no tensors.")
        batches = list(batched(entries, size_of, _parse_size(max_shard_size)))
        reader = BoxReader(directory, saved)
        content = functools.partial(_content, reader, f"{model}/")
        target = folder.absolute(out)
        _write(target, _named(batches, STEMS[library], content), overwrite)
        log_end(target, "exported", sum(map(size_of, entries)), begin)

    on_running_ranks("accel.export", act)


def _named(
    batches: Sequence[list[Entry]], stem: str, content_of: Callable[[list[Entry]], Content]
) -> dict[str, Content]:
    """Return the content of each file. The index of several files comes last."""
    files, weight_map, count, nbytes = {}, {}, len(batches), 0
    for number, entries in enumerate(batches, 1):
        part = f"-{number:05d}-of-{count:05d}" if count > 1 else ""
        file = f"{stem}{part}.safetensors"
        files[file] = content_of(entries)
        for entry in entries:
            weight_map[entry.name] = file
            nbytes += entry.nbytes
    if count > 1:
        index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
        text = f"{json.dumps(index, indent=2, sort_keys=True)}\n".encode()
        files[f"{stem}.safetensors.index.json"] = iter([memoryview(text)])
    return files


def _content(reader: BoxReader, prefix: str, entries: list[Entry]) -> Content:
    """Yield the bytes of a file with tensors of a checkpoint."""
    # safetensors requires alignment, so wide dtypes go first.
    entries = sorted(entries, key=lambda entry: -ITEM_BYTES[entry.dtype])
    yield memoryview(shards.build_header(entries))
    for batch in batched(entries, size_of, _BATCH):
        tensors = reader.read(prefix + entry.name for entry in batch)
        for tensor, entry in zip(tensors.values(), batch, strict=True):
            yield shards.memory(tensor.to(BY_NAME[entry.dtype]))


def _entries(saved: Record, prefix: str, dtype: str | torch.dtype | None) -> list[Entry]:
    """Return the tensors of a model, named as in the model."""
    given = dtype_of(dtype) if dtype is not None else torch.float32
    if given is None or not given.is_floating_point or given not in NAMES:
        raise CheckpointError(f"dtype={dtype!r} isn't floating-point. Pass one such as 'bfloat16'.")
    entries = []
    for name, stored in saved.tensors.items():
        if name.startswith(prefix):
            old, new = BY_NAME[stored.dtype], stored.dtype
            # Keep 8-bit floats, because only the library that quantized them knows the scales.
            if dtype is not None and old.is_floating_point and old.itemsize > 1:
                new = NAMES[given]
            name = name.removeprefix(prefix)
            entries.append(Entry(name, new, stored.shape, ((0, stored.numel),)))
    return entries


def _write(out: str, files: Mapping[str, Content], overwrite: bool) -> None:
    """Write files, and remove the weights already in ``out``."""
    storage = storage_of(out)
    names = storage.names(out) if storage.is_directory(out) else []
    # Sort the file or index that a library opens before the files of an index.
    old = sorted(filter(_WEIGHTS.fullmatch, names), key=lambda name: "-of-" in name)
    if old and not overwrite:
        raise CheckpointError(f"{out} has weights already ({old[0]}). Use the option overwrite.")
    storage.make(out)
    for name, content in files.items():
        path = os.path.join(out, f".{name}.tmp")
        storage.remove(path)  # left by a failed export
        storage.create(path, 0, functools.partial(shards.blocks, content))
    storage.sync(out)
    # Remove the file or index that a library opens first, and add it last. So a library never
    # sees old files next to new ones.
    for name in old:
        storage.remove(os.path.join(out, name))
    for name in files:
        storage.rename(os.path.join(out, f".{name}.tmp"), os.path.join(out, name))
    storage.sync(out)


def _parse_size(size: int | str) -> int:
    """Return the bytes of ``"5GB"`` (10^9 each) or ``"5GiB"`` (2^30 each)."""
    match = re.fullmatch(r"(\d+\.?\d*) ?([KMGT]?)(I?)B?", str(size).upper())
    if match is None:
        raise CheckpointError(
            f"max_shard_size={size!r}: expected a number of bytes, or text such as '5GB'."
        )
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2] or " "))
