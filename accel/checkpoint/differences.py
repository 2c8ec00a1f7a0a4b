"""Where a state and a checkpoint do not fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from ..errors import CheckpointError
from ..shard import Shard, overlaps_itself
from .dtypes import BY_NAME
from .record import Stored

logger = logging.getLogger("accel")

_FIRST: Final = 10  # differences that a message lists


@dataclass(frozen=True, slots=True)
class Differences:
    """Between the state and the checkpoint, as this rank sees them.

    Args:
        missing: in the checkpoint.
        unfit: with both sides.
        untouched: tensors that the checkpoint has of the state's modules, and this rank does not need.
    """

    missing: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    untouched: set[str] = field(default_factory=set)


def report(directory: str, differences: Sequence[Differences], strict: bool, rank: int) -> None:
    """Raise, or warn of, what does not fit on any rank."""
    lines = []
    missing = dict.fromkeys(name for d in differences for name in d.missing)
    untouched = set.intersection(*(d.untouched for d in differences))
    for what, names in (
        ("in the state, not in the checkpoint", list(missing)),
        ("in the checkpoint, not in the state", sorted(untouched)),
    ):
        if names:
            more = f", and {len(names) - _FIRST} more" if len(names) > _FIRST else ""
            lines.append(f"{what}: {', '.join(names[:_FIRST])}{more}")
    unfit = list(dict.fromkeys(text for d in differences for text in d.unfit))
    lines += unfit[:_FIRST]
    if len(unfit) > _FIRST:
        lines.append(f"and {len(unfit) - _FIRST} more")
    if lines and strict:
        raise CheckpointError(
            f"{directory} does not fit the state, and nothing was changed (strict=False loads what fits):\n  "
            + "\n  ".join(lines)
        )
    if lines and rank == 0:
        logger.warning("%s does not fit the state; skipped:\n  %s", directory, "\n  ".join(lines))


def unfit(stored: Stored, slot: Shard, convert: bool, planned: bool) -> str:
    """Why a saved tensor cannot be read into a range; empty if it can."""
    dtype = BY_NAME[stored.dtype]
    if stored.shape != tuple(slot.shape):
        return f"{list(stored.shape)} in the checkpoint, {list(slot.shape)} here"
    if dtype is not slot.tensor.dtype:
        if not torch.can_cast(dtype, slot.tensor.dtype):
            return f"{dtype} in the checkpoint, {slot.tensor.dtype} here, which cannot hold its values"
        if not convert:
            return f"{dtype} in the checkpoint, {slot.tensor.dtype} here (convert=True converts)"
    if slot.tensor.is_meta and not planned:
        return "it is on the meta device, which holds no values; give it memory first (module.to_empty(device=...))"
    if overlaps_itself(slot.tensor):
        return "its elements share memory (an expanded or overlapping view), so that they cannot be filled; give its clone()"
    return ""


def check_models(what: str, told: Sequence[Mapping[str, str]]) -> None:
    """Refuse, in ``what``, that the ranks give different models: a part of one would pass for a part of the other."""
    for rank, theirs in enumerate(told):
        for path in dict.fromkeys([*told[0], *theirs]):
            first, other = told[0].get(path, "without an engine"), theirs.get(path, "without an engine")
            if first != other:
                raise CheckpointError(
                    f"{what}: {path} is {first} on rank 0 and {other} on rank {rank}: give every rank the same model there"
                )


def check_objects(digests: Sequence[str]) -> None:
    """What is filled on some ranks only would let the others go on with another model, optimizer or position."""
    for rank, one in enumerate(digests):
        if one != digests[0]:
            raise CheckpointError(
                f"accel.load: the state of rank {rank} has other objects than that of rank 0, and nothing was changed; give "
                "every rank the same keys"
            )
