"""Safetensors files of transformers and diffusers: read them like a checkpoint, export them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

from ..errors import CheckpointError
from ..precision import dtype_of
from ..process.control import locked
from ..shard import Box, Shard
from . import folder, record
from .background import background
from .layout import Run
from .match import children_of
from .reader import Reader
from .record import Record, Stored
from .shards import (
    BY_NAME,
    ITEM_BYTES,
    NAMES,
    Entry,
    Written,
    batched,
    blocks,
    build_header,
    checksum,
    memory,
    parse_header,
)
from .state import Branch, Leaf, State, Tree, component, join, leaves
from .steps import log_end, on_running_ranks, parsing
from .storage import Content, read_whole, storage_of
from .values import TAG, Decoder, Json

#: The file is ``<stem>.safetensors``, or ``<stem>-00001-of-00002.safetensors`` with an index.
STEMS: Final = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}
#: Bytes that an export reads at a time.
_PIECE: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A record, and a checksum that is equal if two ranks see the same files."""

    directory: str
    record: Record
    digits: str

    @property
    def path(self) -> str:
        """The path that errors name."""
        name = record.NAME if self.record.version else ""
        return os.path.join(self.directory, name).rstrip("/")


# -- read ------------------------------------------------------------------------------------------


def open_checkpoint(directory: str, state: Any) -> Checkpoint:
    """Return a checkpoint, or weights as a checkpoint of the only model in ``state``."""
    if not is_weights_alone(directory):
        return Checkpoint(directory, *record.read(directory))
    name, values = "model", {}
    if state is not None:
        tree = State(state).tree
        models = [leaf for leaf in leaves(tree) if isinstance(leaf.value, nn.Module)]
        if len(models) != 1:
            raise CheckpointError(
                f"{directory} has the weights of one model, and the state has {len(models)} "
                'models. Load them into {"model": model}.'
            )
        name, values = models[0].name, _only_model(tree, models[0])
    files, tensors = [], {}
    for number, (path, keys) in enumerate(_files(directory)):
        size, entries = _read_header(path)
        files.append(Written(path, size, ()))
        for key, entry in entries.items():
            if keys is None or key in keys:
                shape = tuple(entry["shape"])
                box: Box = ((0, math.prod(shape)),)
                runs = (Run(number, box),) if math.prod(shape) else ()
                aliases = {(number, box): (key, 0)}
                tensors[f"{name}/{key}"] = Stored(entry["dtype"], shape, runs, aliases)
    found = Record(
        id="", time=0.0, world_size=1, files=files, tensors=tensors, values=values, version=0
    )
    seen = repr([[(file.name, file.size) for file in files], tensors])
    return Checkpoint(directory, found, checksum(seen.encode()))


def is_weights_alone(path: str) -> bool:
    """True for a directory with weights and no checkpoint, a file of weights, or an index."""
    return not record.exists(path) and _entrance(path) is not None


def _entrance(path: str) -> str | None:
    """Return the file or the index of the weights at a path, or None."""
    storage = storage_of(path)
    if path.endswith((".safetensors", ".json")) and os.path.basename(path) != record.NAME:
        return path if storage.exists(path) and not storage.is_directory(path) else None
    names = [f"{stem}.safetensors{end}" for end in (".index.json", "") for stem in STEMS.values()]
    found = [name for name in names if storage.exists(os.path.join(path, name))]
    if len(found) > 1:
        raise CheckpointError(
            f"{path} has both {found[0]} and {found[1]}. "
            "Pass one of these files, or remove the other."
        )
    return os.path.join(path, found[0]) if found else None


def _only_model(tree: Tree | None, model: Leaf) -> dict[str, Json]:
    """Return the JSON of a state that has nothing except the model."""
    if tree is model:
        return {TAG: "module", "extra": {}}
    if isinstance(tree, Branch) and isinstance(tree.container, dict):
        for key, child in tree.children.items():
            if model in leaves(child):
                return {key: _only_model(child, model)}
    return {}


def _files(path: str) -> Iterator[tuple[str, set[str] | None]]:
    """Give the paths of the files, each with the names of the tensors to take. None: all."""
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
        entries = parse_header(file.read(0, min(length, file.size)))
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if length + end != file.size:
            raise ValueError(f"its tensors end at byte {length + end}, and the file at {file.size}")
        for key, entry in entries.items():
            if entry["dtype"] not in BY_NAME:
                raise CheckpointError(
                    f"{path}: {key!r} has dtype {entry['dtype']}, which accel can't load."
                )
        return file.size, entries


# -- choose what to export -------------------------------------------------------------------------


def _entries(found: Record, name: str, dtype: str | None) -> list[Entry]:
    """Return the tensors of a model, under their names in it."""
    entries = []
    for full_name, stored in found.tensors.items():
        if full_name.startswith(f"{name}/"):
            kind, converted = BY_NAME[stored.dtype], stored.dtype
            # 8-bit formats belong to a library, and are kept.
            if dtype and kind.is_floating_point and kind.itemsize > 1:
                converted = dtype
            box = ((0, stored.numel),)
            entries.append(Entry(full_name[len(name) + 1 :], converted, stored.shape, box))
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
    found = None if dtype is None else dtype_of(dtype)
    if dtype is not None and (found is None or not found.is_floating_point or found not in NAMES):
        raise CheckpointError(
            f"dtype={dtype!r}: expected a floating-point dtype such as 'bfloat16'."
        )
    return None if found is None else NAMES[found]


def _models(node: Json, decoder: Decoder, name: str = "") -> Iterator[tuple[str, dict[str, Json]]]:
    """Give the names and nodes of the models in a saved state."""
    if isinstance(node, dict) and node.get(TAG) == "module":
        yield name, node
        return
    for key, child in (children_of(node, decoder) or {}).items():
        yield from _models(child, decoder, join(name, component(key)))


def choose(directory: str, found: Record, name: str | None) -> tuple[str, Mapping[str, Json]]:
    """Return the name and the node of a saved model. ``name`` may be None if there is only one."""
    tensors: dict[str, torch.Tensor] = {}
    models = dict(_models(found.values, Decoder(directory, tensors.__getitem__)))
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


# -- export ----------------------------------------------------------------------------------------


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

    def arguments() -> dict[str, object]:
        places = {"dir": folder.named(dir), "out": folder.named(out)}
        options = {"max_shard_size": _parse_size(max_shard_size), "dtype": _parse_dtype(dtype)}
        return {**places, **options, "name": name, "overwrite": overwrite, "library": library}

    def act(rank: int, world: int) -> None:
        if rank == 0:
            background.wait()
            with folder.reporting_replacement(dir):
                _export(
                    folder.absolute(dir),
                    folder.absolute(out),
                    name,
                    _parse_size(max_shard_size),
                    _parse_dtype(dtype),
                    overwrite,
                    library,
                )

    on_running_ranks("accel.export", arguments, act)


def _export(
    directory: str,
    out: str,
    name: str | None,
    limit: int,
    dtype: str | None,
    overwrite: bool,
    library: str,
) -> None:
    begin, storage = time.monotonic(), storage_of(out)
    found, _ = record.read(directory)
    folder.check_sizes(directory, found)
    name, node = choose(directory, found, name)
    entries = _entries(found, name, dtype)
    if node["extra"] or not entries:
        problem = "extra state, which these files can't hold" if entries else "no tensors"
        raise CheckpointError(f"{directory}: the model {name!r} has {problem}.")
    if library not in STEMS:
        raise CheckpointError(f"library={library!r}: expected {' or '.join(map(repr, STEMS))}.")
    if record.exists(out):
        raise CheckpointError(f"{out} is a checkpoint itself. Export into a different directory.")
    # The names that libraries look for are first.
    pattern = re.compile(
        rf"({'|'.join(STEMS.values())})(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
    )
    names = storage.names(out) if storage.is_directory(out) else []
    old = sorted((one for one in names if pattern.fullmatch(one)), key=lambda one: "-of-" in one)
    if old and not overwrite:
        raise CheckpointError(
            f"{out} has weights already ({old[0]}). overwrite=True replaces them."
        )
    contents = _contents(Reader(directory, found), f"{name}/", entries, limit, STEMS[library])
    temporary = {name: os.path.join(out, f".{name}.tmp") for name in contents}
    storage.make(out)
    try:
        for name, content in contents.items():
            storage.remove(temporary[name])  # of an export that was killed
            storage.create(temporary[name], 0, content)
    except BaseException:
        for path in temporary.values():
            with contextlib.suppress(OSError):
                storage.remove(path)
        raise
    storage.sync(out)
    # A library never sees old files next to new ones: the name that it opens is removed first
    # and added last.
    for name in old:
        storage.remove(os.path.join(out, name))
    for name, path in temporary.items():
        storage.rename(path, os.path.join(out, name))
    storage.sync(out)
    log_end(out, "exported", sum(entry.nbytes for entry in entries), begin)


def _contents(
    reader: Reader, prefix: str, entries: Sequence[Entry], limit: int, stem: str
) -> dict[str, Content]:
    """Return the content of each file, the index last."""
    files = list(batched(entries, lambda entry: entry.nbytes, limit))
    contents: dict[str, Content] = {}
    weight_map: dict[str, str] = {}
    for number, own in enumerate(files):
        end = f"-{number + 1:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        name = f"{stem}{end}.safetensors"
        # Wide elements are first, so all are aligned.
        own.sort(key=lambda entry: -ITEM_BYTES[entry.dtype])
        contents[name] = _file_content(reader, prefix, own)
        weight_map |= {entry.name: name for entry in own}
    if len(files) > 1:
        metadata = {"total_size": sum(entry.nbytes for entry in entries)}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        text = f"{json.dumps(index, indent=2)}\n".encode()
        contents[f"{stem}.safetensors.index.json"] = lambda: [text]
    return contents


def _file_content(reader: Reader, prefix: str, entries: Sequence[Entry]) -> Content:
    def pieces() -> Iterator[Shard]:
        for entry in entries:
            dtype, total = BY_NAME[entry.dtype], math.prod(entry.shape)
            step = _PIECE // dtype.itemsize
            for start in range(0, total, step):
                room = torch.empty(min(step, total - start), dtype=dtype, device="cpu")
                yield Shard(f"{prefix}{entry.name}", entry.shape, start, room)

    def parts() -> Iterator[memoryview]:
        yield memoryview(build_header(entries))
        for batch in batched(pieces(), lambda piece: piece.tensor.nbytes, _PIECE):
            reader.fill(batch)
            yield from (memory(piece.tensor) for piece in batch)

    return lambda: blocks(parts())
