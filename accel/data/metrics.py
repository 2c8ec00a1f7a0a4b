"""gather_for_metrics: gather each sample of all ranks once."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from ..errors import AccelError, LoaderError, described, text_of_error
from ..process import rank, world_size
from ..process.collectives import gather, walked
from ..process.control import agree
from ..process.transfer import find_difference, sums_of
from ..trees import all_tensors, walk
from .handle import LoaderHandle
from .iteration import Rows, latest
from .sampling import WHOLE, Share, has_parts, length_of

T = TypeVar("T")


def gather_for_metrics(
    data: T,
    loader: DataLoader[Any] | Any | None = None,
    *,
    pad: float | None = None,
    objects: bool = False,
) -> T:
    """Gather ``data`` from all ranks without the last batch's padding. Collective.

    The rows are in the order of the sampler. If several ranks hold a model together, their
    equal rows are gathered once. A single process gets ``data`` back.

    Args:
        data: nested tensors with this rank's batch as dimension 0.
        loader: the loader of the batch, or the items passed to ``split``. None: the
            source of the last batch.
        pad: the value to pad the other dimensions with, as in ``all_gather``.
        objects: also gather lists of objects, such as strings, with an item per sample.

    Raises:
        LoaderError: no loader gave a batch, or dimension 0 isn't the batch.
    """
    rows, place, error = data, latest.rows, None
    try:
        place = _rows_of(loader, data, objects)
        share = place.share
        if share is not WHOLE:
            rows = walked(lambda _, leaf: _trim(leaf, share, objects), data, objects)
    except LoaderError as caught:
        error = caught
    try:
        problem = text_of_error(error)
        if place is not None and place.replicas < world_size():
            rows, problem = _once(rows, place.replica, objects, problem)
        gathered: T = gather(rows, pad=pad, objects=objects, problem=problem)
    except AccelError as caught:
        raise (error or caught) from None
    return gathered


def _rows_of(loader: Any, data: Any, objects: bool) -> Rows:
    rows = latest.rows
    if isinstance(loader, LoaderHandle):
        rows = loader._accel.rows
    elif loader is not None:
        sizes: list[Any] = []
        walk(lambda _, leaf: sizes.append(length_of(leaf)), loader, "", has_parts)
        del sizes[1:]
        walked(lambda _, leaf: sizes.append(length_of(leaf)), data, objects)
        rows = latest.split.get(tuple(sizes[:2]))
    if rows is None and world_size() == 1 and not isinstance(loader, DataLoader):
        rows = Rows(WHOLE, 0, 1)
    if rows is None:
        raise LoaderError("No loader gave these rows. Pass the loader or the items of split().")
    return rows


def _trim(leaf: Any, share: Share, objects: bool) -> Any:
    if leaf is None and not objects:
        return None
    shape = (len(leaf),) if isinstance(leaf, list) else tuple(getattr(leaf, "shape", ()))
    size = share.size
    if not shape or shape[0] != size >= 0:
        text = f"expected dim 0 to be this rank's batch, found {described(leaf)} of shape {shape}."
        raise LoaderError(f"gather_for_metrics: {text} Call it for each batch.")
    return leaf[: share.real if size >= 0 else shape[0] * share.real]


def _once(data: Any, replica: int, objects: bool, problem: str) -> tuple[Any, str]:
    """Return the rows of each replica's first rank, and any problem. Collective."""
    tensors = [tensor for _, tensor in all_tensors(data)]
    answers = agree("gather_for_metrics", (replica, problem or sums_of(tensors)))
    sums = {n: sums for n, (place, sums) in enumerate(answers) if place == replica}
    has_problem = any(isinstance(text, str) for text in sums.values())
    if not has_problem and find_difference(sums):
        # For example, each rank has a share of the sequence with sequence_parallel.
        problem = "Ranks with the same batch have different rows. Use accel.all_gather."

    def rows_of(path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not leaf.dim():
            leaf = leaf[None]
        is_cut = rank() != min(sums) and isinstance(leaf, torch.Tensor | list)
        return leaf[:0] if is_cut else leaf

    return walked(rows_of, data, objects), problem
