"""Safetensors files of transformers and diffusers: read them like a checkpoint, export them."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import torch
from torch import nn

from ..errors import CheckpointError
from ..precision import dtype_of
from ..process.control import locked
from ..shard import Shard, flat_shard
from . import folder, record, shards
from .background import background
from .layout import Run
from .reader import Reader
from .record import Record, Stored
from .shards import BY_NAME, ITEM_BYTES, NAMES, Entry, Written, batched
from .state import State, name_of
from .steps import log_end, on_running_ranks, parsing
from .storage import Content, read_whole, storage_of
from .values import TAG, Decoder, Json, items_of

#: The file is ``<stem>.safetensors``, or ``<stem>-00001-of-00002.safetensors`` with an index.
STEMS: Final = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}
_WEIGHTS: Final = re.compile(
    rf"({'|'.join(STEMS.values())})(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)
#: Bytes that an export reads at a time.
_PIECE: Final = 32 << 20


# -- read ------------------------------------------------------------------------------------------


def open_checkpoint(directory: str, state: Any) -> Record:
    """Return a record, or weights as a record of the only model in ``state``."""
    if not is_weights_alone(directory):
        return record.read(directory)
    name, values = "model", dict[Any, Json]()
    if state is not None:
        models = [leaf for leaf in State(state).leaves if isinstance(leaf.value, nn.Module)]
        if len(models) != 1:
            raise CheckpointError(
                f"{directory} has the weights of one model, and the state has {len(models)} "
                'models. Load them into {"model": model}.'
            )
        name, values = name_of(models[0].keys), {TAG: "module", "extra": {}}
        for key in reversed(models[0].keys):
            values = {key: values}
    files: list[Written] = []
    tensors = {}
    for path, keys in _files(directory):
        size, entries = _read_header(path)
        for key in entries:
            if keys is not None and key not in keys:
                continue
            dtype, shape = entries[key]["dtype"], tuple(entries[key]["shape"])
            if dtype not in BY_NAME:
                raise CheckpointError(f"{path}: {key!r} has dtype {dtype}, which accel can't load.")
            box = ((0, math.prod(shape)),)
            runs = (Run(len(files), box),) if math.prod(shape) else ()
            tensors[f"{name}/{key}"] = Stored(dtype, shape, runs, {(len(files), box): (key, 0)})
        files.append(Written(path, size, ()))
    seen = repr([[(file.name, file.size) for file in files], tensors])
    return Record(
        id="",
        time=0.0,
        world_size=1,
        files=files,
        tensors=tensors,
        values=values,
        version=0,
        digits=shards.checksum(seen.encode()),
    )


def is_weights_alone(path: str) -> bool:
    """True for a directory with weights and no checkpoint, a file of weights, or an index."""
    return not record.exists(path) and _entrance(path) is not None


def _entrance(path: str) -> str | None:
    """Return the file or the index of the weights at a path, or None."""
    storage = storage_of(path)
    if path.endswith((".safetensors", ".json")) and os.path.basename(path) != record.NAME:
        return path if storage.exists(path) and not storage.is_directory(path) else None
    names = [f"{stem}.safetensors{end}" for end in (".index.json", "") for stem in STEMS.values()]
    names = [name for name in names if storage.exists(os.path.join(path, name))]
    if len(names) > 1:
        raise CheckpointError(
            f"{path} has both {names[0]} and {names[1]}. "
            "Pass one of these files, or remove the other."
        )
    return os.path.join(path, names[0]) if names else None


def _files(path: str) -> Iterator[tuple[str, set[str] | None]]:
    """Give the paths of the files, each with the names of the tensors to read. None: all."""
    entrance = _entrance(path)
    assert entrance is not None
    # The cache of the Hugging Face hub consists of links.
    real = storage_of(path).real
    if entrance.endswith(".safetensors"):
        yield real(entrance), None
        return
    by_file: dict[str, set[str]] = {}
    with parsing(f"{entrance} is not an index of weights"):
        for key, name in json.loads(read_whole(real(entrance)))["weight_map"].items():
            by_file.setdefault(os.path.join(os.path.dirname(entrance), name), set()).add(key)
    for name, keys in sorted(by_file.items()):
        yield real(name), keys


def _read_header(path: str) -> tuple[int, Mapping[str, dict[str, Any]]]:
    """Return the size of a file and its entries."""
    with storage_of(path).open(path) as file, parsing(f"{path} is not a whole safetensors file"):
        length = 8 + int.from_bytes(file.read(0, min(8, file.size)), "little")
        entries = shards.parse_header(file.read(0, min(length, file.size)))
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if length + end != file.size:
            raise ValueError(f"its tensors end at byte {length + end}, and the file at {file.size}")
        return file.size, entries


# -- export ----------------------------------------------------------------------------------------


def choose(directory: str, found: Record, name: str | None) -> tuple[str, Mapping[str, Json]]:
    """Return the name and the node of a saved model. ``name`` may be None if there is only one."""
    tensors: dict[str, torch.Tensor] = {}
    models = dict(_models(found.values, Decoder(directory, tensors.__getitem__), ()))
    names = ", ".join(map(repr, models))
    if not models:
        raise CheckpointError(f"{directory} has no model.")
    if name is None and len(models) > 1:
        raise CheckpointError(
            f"{directory} has {len(models)} models ({names}). "
            f"Choose with name={next(iter(models))!r}."
        )
    name = next(iter(models)) if name is None else name
    if name not in models:
        raise CheckpointError(f"{directory} has no model {name!r}. It has {names}.")
    return name, models[name]


def _models(
    node: Json, decoder: Decoder, keys: tuple[object, ...]
) -> Iterator[tuple[str, dict[str, Json]]]:
    """Give the names and nodes of the models in a saved state."""
    if isinstance(node, dict) and node.get(TAG) == "module":
        yield name_of(keys), node
        return
    for key, child in items_of(decoder.children(node) or {}):
        yield from _models(child, decoder, (*keys, key))


@locked
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

    transformers and vLLM load it. A large model becomes several files with an index. Tied weights
    are written once, under their first name. Add the library's ``config.json`` yourself. You can
    call this in one process. On several ranks, rank 0 writes.

    Args:
        dir: a checkpoint.
        out: a directory, which is created if it doesn't exist.
        name: the model, such as ``"model"`` or ``"gan/generator"``, if there are several.
        max_shard_size: bytes of a file, or text such as ``"5GB"``. Tensors are not split.
        dtype: convert floating-point tensors to this dtype, such as ``"bfloat16"``.
        overwrite: replace weights in ``out``.
        library: ``"diffusers"`` writes ``diffusion_pytorch_model.safetensors``.

    Raises:
        CheckpointError: the checkpoint is damaged or has no such model, or ``out`` has weights.
    """

    def act(rank: int, world: int) -> None:
        background.wait()
        if rank == 0:
            begin = time.monotonic()
            model = _Model(folder.absolute(dir), name, dtype)
            contents = model.files(_parse_size(max_shard_size), library)
            _write(folder.absolute(out), contents, overwrite)
            log_end(folder.absolute(out), "exported", model.nbytes, begin)

    on_running_ranks("accel.export", act)


def _write(out: str, contents: Mapping[str, Content], overwrite: bool) -> None:
    """Write files, and remove the weights that are there."""
    storage = storage_of(out)
    names = storage.names(out) if storage.is_directory(out) else []
    # The names that libraries look for are first.
    old = sorted(filter(_WEIGHTS.fullmatch, names), key=lambda name: "-of-" in name)
    if old and not overwrite:
        raise CheckpointError(
            f"{out} has weights already ({old[0]}). overwrite=True replaces them."
        )
    storage.make(out)
    temporary = {os.path.join(out, f".{new}.tmp"): new for new in contents}
    for path, new in temporary.items():
        storage.remove(path)  # of an export that failed
        storage.create(path, 0, contents[new])
    storage.sync(out)
    # A library never sees old files next to new ones: the name that it opens is removed first
    # and added last.
    for new in old:
        storage.remove(os.path.join(out, new))
    for path, new in temporary.items():
        storage.rename(path, os.path.join(out, new))
    storage.sync(out)


class _Model:
    """A model in a checkpoint, as the content of files."""

    def __init__(self, directory: str, name: str | None, dtype: str | torch.dtype | None) -> None:
        saved = record.read(directory)
        folder.check_sizes(directory, saved)
        name, node = choose(directory, saved, name)
        self._reader, self._prefix = Reader(directory, saved), f"{name}/"
        self._entries = _entries(saved, self._prefix, _parse_dtype(dtype))
        self.nbytes = sum(entry.nbytes for entry in self._entries)
        if node["extra"] or not self._entries:
            problem = "extra state, which these files can't hold" if node["extra"] else "no tensors"
            raise CheckpointError(f"{directory}: the model {name!r} has {problem}.")

    def files(self, limit: int, library: str) -> dict[str, Content]:
        """Return the content of each file, the index last."""
        if library not in STEMS:
            raise CheckpointError(f"library={library!r}: expected {' or '.join(map(repr, STEMS))}.")
        stem = STEMS[library]
        files = list(batched(self._entries, lambda entry: entry.nbytes, limit))
        contents: dict[str, Content] = {}
        weight_map: dict[str, str] = {}
        for number, entries in enumerate(files):
            end = f"-{number + 1:05d}-of-{len(files):05d}" if len(files) > 1 else ""
            # Wide elements are first, so all are aligned.
            entries.sort(key=lambda entry: -ITEM_BYTES[entry.dtype])
            contents[f"{stem}{end}.safetensors"] = self._content_of(entries)
            weight_map |= {entry.name: f"{stem}{end}.safetensors" for entry in entries}
        if len(files) > 1:
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
            text = f"{json.dumps(index, indent=2, sort_keys=True)}\n".encode()
            contents[f"{stem}.safetensors.index.json"] = lambda: [text]
        return contents

    def _content_of(self, entries: list[Entry]) -> Content:
        def parts() -> Iterator[memoryview]:
            yield memoryview(shards.build_header(entries))
            for batch in batched(self._pieces(entries), lambda one: one.tensor.nbytes, _PIECE):
                self._reader.fill(batch)
                yield from (shards.memory(piece.tensor) for piece in batch)

        return lambda: shards.blocks(parts())

    def _pieces(self, entries: list[Entry]) -> Iterator[Shard]:
        for entry in entries:
            dtype, total = BY_NAME[entry.dtype], math.prod(entry.shape)
            step = _PIECE // dtype.itemsize
            for start in range(0, total, step):
                room = torch.empty(min(step, total - start), dtype=dtype, device="cpu")
                yield flat_shard(self._prefix + entry.name, entry.shape, start, room)


def _entries(saved: Record, prefix: str, dtype: str | None) -> list[Entry]:
    """Return the tensors of a model, under their names in it."""
    entries = []
    for name, stored in saved.tensors.items():
        if name.startswith(prefix):
            kind, new_dtype = BY_NAME[stored.dtype], stored.dtype
            # 8-bit formats belong to a library, and are kept.
            if dtype and kind.is_floating_point and kind.itemsize > 1:
                new_dtype = dtype
            box = ((0, stored.numel),)
            entries.append(Entry(name[len(prefix) :], new_dtype, stored.shape, box))
    return entries


def _parse_size(size: int | str) -> int:
    """Return ``"5GB"`` (10^9 each) or ``"5GiB"`` (2^30 each) in bytes."""
    match = re.fullmatch(r"(\d+\.?\d*) ?([KMGT]?)(I?)B?", str(size).upper())
    number = 0.0
    if match and type(size) in (int, str):
        number = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")
    if number < 1:
        raise CheckpointError(
            f"max_shard_size={size!r}: expected a number of bytes, or text such as '5GB'."
        )
    return int(number)


def _parse_dtype(dtype: str | torch.dtype | None) -> str | None:
    if dtype is None:
        return None
    parsed = dtype_of(dtype)
    if parsed is None or not parsed.is_floating_point or parsed not in NAMES:
        raise CheckpointError(
            f"dtype={dtype!r}: expected a floating-point dtype such as 'bfloat16'."
        )
    return NAMES[parsed]
