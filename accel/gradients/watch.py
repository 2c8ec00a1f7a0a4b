"""Detect a backward's writes to gradients, and trainable parameters."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final, TypeAlias

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

GRAD: Final = operator.attrgetter("grad")
REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")


#: Gradients, and the version counter of each, which in-place writes increment.
Look: TypeAlias = tuple[list[Tensor | None], list[int]]


def look(holders: Sequence[Any]) -> Look:
    """Return the gradients of ``holders`` as they are now."""
    # A parameter's class may have a __torch_function__, which would be slow and isn't needed.
    with DisableTorchFunctionSubclass():
        gradients = list(map(GRAD, holders))
        return gradients, list(map(getattr, gradients, repeat("_version"), repeat(0)))


def written(before: Look, after: Look) -> list[int]:
    """Return the indices of gradients written between two looks."""
    indices = []
    pairs = zip(*before, *after, strict=True)
    for index, (old, old_version, new, new_version) in enumerate(pairs):
        if new is not None and (new is not old or new_version != old_version):
            indices.append(index)
    return indices


def trainable(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return ``requires_grad`` of every parameter."""
    with DisableTorchFunctionSubclass():
        return list(map(REQUIRES_GRAD, parameters))
