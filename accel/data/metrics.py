"""gather_for_metrics: the rows of all ranks, each sample once."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from ..errors import AccelError, LoaderError, described, text_of_error
from ..process import rank, world_size
from ..process.collectives import gather, walked
from ..process.control import agree, locked, raise_together
from ..process.transfer import Prints, Read, other_values
from ..trees import walk
from .handle import LoaderHandle
from .iteration import latest
from .readers import WHOLE, RealRows
from .sampling import Division, has_parts

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
    problem: LoaderError | None = None
    rows, replica = data, latest.replica
    try:
        real, replica = _real_rows(loader, data, objects)
        if real.pads:
            rows = walked(lambda _, leaf: _trim(leaf, real, objects), data, objects)
    except LoaderError as error:
        problem = error
    text = text_of_error(problem)
    try:
        if replica is not None and replica[1] < world_size():
            rows = _once(rows, replica[0], objects, text)
        gathered: T = gather(rows, pad=pad, objects=objects, problem=text)
    except AccelError as error:
        raise (problem or error) from None
    return gathered


def _real_rows(loader: Any, data: Any, objects: bool) -> tuple[RealRows, tuple[int, int] | None]:
    """Return the real rows of a batch or of a ``split``, and the replica that it was for."""
    rows, replica = latest.rows, latest.replica
    if isinstance(loader, LoaderHandle):
        state = loader._accel
        state.check_process()
        rows, replica = state.rows, state.place[:2]
    elif loader is not None:
        division, length = _division_of_split(loader, data, objects)
        share = None if division is None else division.share(length)
        rows = None if share is None else RealRows(True, share.size, share.real)
        replica = replica if division is None else (division.rank, division.world)
    if rows is None and world_size() == 1 and (loader is None or isinstance(loader, LoaderHandle)):
        rows = WHOLE
    if rows is None:
        raise LoaderError(
            "gather_for_metrics: no loader has given these rows since the last accel.split. Pass "
            "the loader of accel.setup or the items of accel.split, or use accel.all_gather."
        )
    return rows, replica


def _division_of_split(items: Any, data: Any, objects: bool) -> tuple[Division | None, int]:
    """Return how ``split`` has cut items into the rows of ``data``, and the number of items."""
    parts: list[Any] = []
    walk(lambda _, leaf: parts.append(leaf), items, "items", has_parts)
    length = len(parts[0]) if parts and has_parts(parts[0]) else -1
    divisions = [latest.divisions.get((length, padded)) for padded in (False, True)]
    if world_size() == 1 and length >= 0:
        divisions = [Division(rank=0, world=1, batch=0, even=False, drop_last=False)]
    size = next((_shape(leaf)[:1] for leaf in _leaves(data, objects)), ())
    known = [division for division in divisions if division is not None]
    for division in known:
        if size == (division.share(length).size,):
            return division, length
    return (known[0] if known else None), length


def _leaves(data: Any, objects: bool) -> list[Any]:
    leaves: list[Any] = []
    walked(lambda _, leaf: leaves.append(leaf), data, objects)
    return leaves


def _once(data: Any, replica: int, objects: bool, problem: str) -> Any:
    """Return no rows on all but the first rank of each replica. Collective."""
    tensors = [leaf for leaf in _leaves(data, objects) if isinstance(leaf, torch.Tensor)]
    answers = agree("gather_for_metrics", (replica, Prints(tensors).read(), problem))
    raise_together("gather_for_metrics", None, [text for *_, text in answers], LoaderError)
    prints: dict[int, dict[int, Read]] = {}
    for number, (place, sums, _) in enumerate(answers):
        prints.setdefault(place, {})[number] = sums
    if any(map(other_values, prints.values())):
        # With sequence_parallel each rank has a share of the sequence.
        raise LoaderError(
            "gather_for_metrics: ranks with the same batch have different rows. Reduce over the "
            "sequence first, or use accel.all_gather."
        )
    is_first = min(prints[replica]) == rank()

    def keep(_: str, leaf: Any) -> Any:
        rows = leaf[None] if isinstance(leaf, torch.Tensor) and not leaf.dim() else leaf
        return rows if is_first or not isinstance(rows, torch.Tensor | list) else rows[:0]

    return walked(keep, data, objects)


def _shape(leaf: Any) -> tuple[int, ...]:
    if isinstance(leaf, list):
        return (len(leaf),)
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()


def _trim(leaf: Any, real: RealRows, objects: bool) -> Any:
    """Return the rows of a batch that are not padding."""
    if leaf is None and not objects:
        return None
    shape = _shape(leaf)
    if not shape or real.rows not in (None, shape[0]):
        size = f" of {real.rows}" if real.rows else ""
        kind = "" if isinstance(leaf, torch.Tensor) else f"{described(leaf)} of "
        raise LoaderError(
            f"gather_for_metrics: expected dim 0 to be this rank's batch{size}, found {kind}shape "
            f"{shape}. Pass a row for each sample, or use accel.all_gather."
        )
    return leaf[: real.real] if real.rows is not None else leaf[: shape[0] * real.real]
