"""Which tensors of a checkpoint an export writes, and into which files. Writes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ..errors import CheckpointError
from . import record
from .dtypes import BY_NAME, NAMES, element_bytes
from .header import METADATA
from .meeting import Names, children_of
from .reader import Reader
from .record import Record
from .values import TAG, Decoder, Json

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor: its name in the checkpoint and in the file, its dtype there and its shape."""

    source: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    numel: int

    @property
    def nbytes(self) -> int:
        """The size in the file."""
        return self.numel * element_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Job:
    """What is written.

    Args:
        reader: of the checkpoint, comparing checksums.
        files: the tensors of each file, in its order.
    """

    reader: Reader
    files: list[list[Item]]

    @property
    def nbytes(self) -> int:
        """Of all data."""
        return sum(item.nbytes for items in self.files for item in items)


def plan(directory: str, name: str | None, max_shard_size: int | str, dtype: str | torch.dtype | None) -> Job:
    """What an export will write. Writes nothing.

    Raises:
        CheckpointError: as ``export``.
    """
    limit, wanted = parse_size(max_shard_size), _parse_dtype(dtype)
    found, _ = record.read(directory)
    chosen, node = choose(directory, found, name)
    if extra := node.get("extra"):
        raise CheckpointError(
            f"{directory}: {', '.join(list(extra)[:5])} of the model {chosen!r} is state that is no tensor (get_extra_state), "
            "which these files cannot hold"
        )
    own = f"{chosen}/"
    items = []
    for full, stored in found.tensors.items():
        if not full.startswith(own):
            continue
        kind = BY_NAME[stored.dtype]
        if full == own + METADATA:
            raise CheckpointError(f"{directory}: {full} is no name that a tensor of these files can have")
        if kind.is_complex:
            raise CheckpointError(f"{directory}: {full} is {kind}, which these files cannot hold")
        narrow = wanted is not None and kind.is_floating_point and kind.itemsize > 1
        items.append(
            Item(full, full[len(own) :], wanted if narrow and wanted else stored.dtype, stored.shape, stored.numel)
        )
    if not items:
        raise CheckpointError(
            f"{directory}: the model {own[:-1]!r} has no tensors in it (they were filtered when it was saved)"
        )
    return Job(Reader(directory, found, stream=True), divide(items, limit))


def divide(items: Sequence[Item], limit: int) -> list[list[Item]]:
    """The tensors of each file, in order: as many as fit, wide elements first so that all are aligned."""
    files: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if files[-1] and size + item.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(item)
        size += item.nbytes
    return [sorted(file, key=lambda item: -element_bytes(item.dtype)) for file in files]


def parse_size(size: int | str) -> int:
    """``"5GB"`` (10^9 each) or ``"5GiB"`` (2^30) in bytes.

    Raises:
        CheckpointError: it is no size.
    """
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        power = " KMGT".index(match[2].upper() or " ")
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    elif isinstance(size, str) and size.isdecimal():
        size = int(size)
    if type(size) is not int or size < 1:
        raise CheckpointError(f"max_shard_size={size!r}: expected a number of bytes, or text such as '5GB'")
    return size


def _parse_dtype(dtype: str | torch.dtype | None) -> str | None:
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found not in NAMES:
        raise CheckpointError(f"dtype={dtype!r}: expected a floating-point dtype such as 'bfloat16'")
    return NAMES[found]


def models_in(node: Json, decoder: Decoder, names: Names, name: str = "") -> Iterator[tuple[str, dict[str, Json]]]:
    """The models of a saved state, with their names."""
    if isinstance(node, dict) and node.get(TAG) == "module":
        yield name, node
        return
    children = children_of(node, decoder) or {}
    own = names.of(children, name)
    for key, child in children.items():
        yield from models_in(child, decoder, names, own[key])


def choose(directory: str, found: Record, name: str | None) -> tuple[str, dict[str, Json]]:
    """The name and the node of the model that is asked for, or of the only one.

    Raises:
        CheckpointError: there is no such model, or several.
    """

    def refuse(tensor: str) -> torch.Tensor:
        raise CheckpointError(f"{directory}: the key of a dict is the tensor {tensor!r}")

    decoder = Decoder(os.path.join(directory, record.NAME), refuse)
    models = dict(models_in(found.values, decoder, Names(found.tensors)))
    known = ", ".join(map(repr, models)) or "none"
    if not models:
        raise CheckpointError(f"{directory} has no model")
    if name is None and len(models) != 1:
        raise CheckpointError(f"{directory} has {len(models)} models ({known}): say which one with name=...")
    chosen = next(iter(models)) if name is None else name
    if chosen not in models:
        raise CheckpointError(f"{directory} has no model {name!r}; it has {known}")
    return chosen, models[chosen]
