"""A picture of how a checkpoint lies in its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .checkpoint.dtypes import element_bytes
from .checkpoint.record import Record
from .drawing import new_figure, write_figure

_FILES = 64  # that a picture shows
_OBJECTS = 9


def file_bytes(record: Record) -> list[dict[str, int]]:
    """For each file the bytes of data by the first part of the tensors' names, the largest first in all."""
    found: list[dict[str, int]] = [{} for _ in record.files]
    total: dict[str, int] = {}
    for name, tensor in record.tensors.items():
        leaf = name.partition("/")[0]
        for file, _, count in tensor.overlaps(0, tensor.numel):
            nbytes = count * element_bytes(tensor.dtype)
            found[file][leaf] = found[file].get(leaf, 0) + nbytes
            total[leaf] = total.get(leaf, 0) + nbytes
    order = sorted(total, key=lambda leaf: -total[leaf])
    return [{leaf: file[leaf] for leaf in order if leaf in file} for file in found]


def save_picture(record: Record, title: str, path: str | os.PathLike[str]) -> Path:
    """A bar for each file, in parts for the objects of the state; the form is by the suffix.

    Raises:
        AccelError: matplotlib is missing, or cannot write such a file.
    """
    files = file_bytes(record)[:_FILES]
    leaves = list(dict.fromkeys(leaf for file in files for leaf in file))
    labels = [file.name for file in record.files[: len(files)]]
    figure = new_figure(path, 9, 1.6 + 0.32 * max(len(files), 1))
    axes = figure.subplots()
    starts = [0.0] * len(files)
    for group in (*((leaf,) for leaf in leaves[:_OBJECTS]), tuple(leaves[_OBJECTS:])):
        sizes = _sizes(files, group)
        if any(sizes):
            axes.barh(labels, sizes, left=starts, label=group[0] if len(group) == 1 else f"{len(group)} more")
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("MiB")
    more = len(record.files) - len(files)
    axes.set_title(
        f"{title}: {len(record.files)} files{f', the first {len(files)} of them' if more else ''}", fontsize=10
    )
    if leaves:
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return write_figure(figure, path)


def _sizes(files: Sequence[dict[str, int]], group: Sequence[str]) -> list[float]:
    return [sum(file.get(leaf, 0) for leaf in group) / 2**20 for file in files]
