"""gather_for_metrics: the rows of all ranks, each sample once."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from ..errors import AccelError, LoaderError, described, text_of_error
from ..process import rank, world_size
from ..process.collectives import gather, walked
from ..process.control import agree, locked
from ..process.transfer import find_difference, sums_of
from ..trees import walk
from .handle import LoaderHandle, latest
from .readers import WHOLE, RealRows
from .sampling import Division, has_parts, length_of

T = TypeVar("T")


@locked
def gather_for_metrics(
    data: T,
    loader: DataLoader[Any] | Any | None = None,
    *,
    pad: float | None = None,
    objects: bool = False,
) -> T:
    """Return ``data`` of all ranks without the padding of the last batch. Collective.

    The rows are in the order of the dataset. If several ranks hold one model together, as the
    stages of a pipeline do, their equal rows come once. In one process ``data`` comes back.

    Args:
        data: nested tensors with this rank's batch as dimension 0.
        loader: the loader that gave the batch, or the items that ``split`` has cut, with one row in
            ``data`` for each. By default the loader that gave the last batch.
        pad: a value that fills the other dimensions to equal sizes, as in ``all_gather``.
        objects: also take lists of any objects, such as texts, with one for each sample.

    Raises:
        LoaderError: no loader gave a batch, or dimension 0 isn't the batch. The other ranks raise
            it too, or an AccelError that names the rank.
    """
    rows, replica, error = data, latest.replica, None
    try:
        real, replica = _real_rows(loader, data, objects)
        if real.pads:
            rows = walked(lambda _, leaf: _trim(leaf, real, objects), data, objects)
    except LoaderError as caught:
        error = caught
    try:
        problem = text_of_error(error)
        if replica is not None and replica[1] < world_size():
            rows, problem = _once(rows, replica[0], objects, problem)
        gathered: T = gather(rows, pad=pad, objects=objects, problem=problem)
    except AccelError as caught:
        raise (error or caught) from None
    return gathered


def _real_rows(loader: Any, data: Any, objects: bool) -> tuple[RealRows, tuple[int, int] | None]:
    """Return the real rows of a batch or of a ``split``, and the replica that it was for."""
    rows, replica = latest.rows, latest.replica
    if isinstance(loader, LoaderHandle):
        loader._accel.check_process()
        rows, replica = loader._accel.rows, loader._accel.place[:2]
    elif loader is not None:
        sizes: list[Any] = []
        walk(lambda path, leaf: sizes.append(length_of(leaf)), loader, "items", has_parts)
        division = _division_of_split(sizes[0], data, objects) if sizes else None
        rows = None
        if division is not None:
            share = division.share(sizes[0])
            rows, replica = RealRows(True, share.size, share.real), (division.rank, division.world)
    if rows is None and world_size() == 1 and not isinstance(loader, DataLoader):
        rows = WHOLE
    if rows is None:
        raise LoaderError(
            "gather_for_metrics: no loader has given these rows since the last accel.split. Pass "
            "the loader of accel.setup or the items of accel.split, or use accel.all_gather."
        )
    return rows, replica


def _division_of_split(size: Any, data: Any, objects: bool) -> Division | None:
    """Return how ``split`` has cut ``size`` items into the rows of ``data``."""
    rows: list[int | None] = []
    walked(lambda path, leaf: rows.append(length_of(leaf)), data, objects)
    padded, plain = (latest.divisions.get((size, pad)) for pad in (True, False))
    if plain is None or (padded is not None and [padded.share(size).size] == rows[:1]):
        return padded
    return plain


def _trim(leaf: Any, real: RealRows, objects: bool) -> Any:
    """Return the rows of a batch that are not padding."""
    if leaf is None and not objects:
        return None
    shape = (len(leaf),) if isinstance(leaf, list) else tuple(getattr(leaf, "shape", ()))
    if not shape or real.rows not in (None, shape[0]):
        size = f" of {real.rows}" if real.rows else ""
        kind = "" if isinstance(leaf, torch.Tensor) else f"{described(leaf)} of "
        raise LoaderError(
            f"gather_for_metrics: expected dim 0 to be this rank's batch{size}, found {kind}shape "
            f"{shape}. Pass a row for each sample, or use accel.all_gather."
        )
    return leaf[: real.real] if real.rows is not None else leaf[: shape[0] * real.real]


def _once(data: Any, replica: int, objects: bool, problem: str) -> tuple[Any, str]:
    """Return no rows on all but the first rank of each replica, and a problem. Collective."""
    tensors: list[torch.Tensor] = []

    def collect(path: str, leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)

    walked(collect, data, objects)
    answers = agree("gather_for_metrics", (replica, problem or sums_of(tensors)))
    sums = {n: sums for n, (place, sums) in enumerate(answers) if place == replica}
    has_problem = any(isinstance(text, str) for text in sums.values())
    if not has_problem and find_difference(sums):
        # With sequence_parallel each rank has a share of the sequence.
        problem = (
            "gather_for_metrics: ranks with the same batch have different rows. Reduce over the "
            "sequence first, or use accel.all_gather."
        )

    def rows_of(path: str, leaf: Any) -> Any:
        rows = leaf[None] if isinstance(leaf, torch.Tensor) and not leaf.dim() else leaf
        is_first = rank() == min(sums)
        return rows if is_first or not isinstance(rows, torch.Tensor | list) else rows[:0]

    return walked(rows_of, data, objects), problem
