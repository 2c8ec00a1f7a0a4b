"""Which gradients a backward has written, and which parameters may get one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn

GRAD: Final = operator.attrgetter("grad")
REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")


class Look(NamedTuple):
    """The gradients of some tensors, and the numbers of writes in place to each."""

    gradients: list[torch.Tensor | None]
    versions: list[int]


def look(holders: Sequence[Any]) -> Look:
    """Return the gradients of ``holders`` as they are now."""
    # A parameter's class may watch its uses, which takes time.
    with torch._C.DisableTorchFunctionSubclass():
        gradients = list(map(GRAD, holders))
        return Look(gradients, list(map(getattr, gradients, repeat("_version"), repeat(0))))


def written(before: Look, after: Look) -> list[int]:
    """Return the indices of the gradients that autograd replaced or added to between two looks."""
    pairs = zip(*before, *after, strict=True)
    return [
        index
        for index, (old, old_version, new, new_version) in enumerate(pairs)
        if new is not None and (new is not old or new_version != old_version)
    ]


@final
class TrainableMask:
    """``requires_grad`` of every parameter: now, and when the engine was built for it.

    The idea of a comparison before each forward, on by default, is fairscale's (pull request 369).
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.known = self.now()

    def now(self) -> list[bool]:
        """Return ``requires_grad`` of every parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(REQUIRES_GRAD, self._parameters))


def explain(masks: Sequence[Sequence[bool]], names: Sequence[str]) -> str:
    """Return the first parameter on which the ranks' masks differ, as text."""
    for name, flags in zip(names, zip(*masks, strict=True), strict=True):
        if len(set(flags)) > 1:
            ranks = [rank for rank, trainable in enumerate(flags) if trainable]
            return f"{name} is trainable on ranks {ranks} and frozen on the others"
    return "they agree"
