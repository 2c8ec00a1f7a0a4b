"""Where a state and a checkpoint do not fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ..errors import CheckpointError

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
