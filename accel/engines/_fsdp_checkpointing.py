"""Activation checkpointing of whole blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, final

from torch import nn
from torch.utils.checkpoint import checkpoint


@final
class Checkpointed:
    """Blocks whose forward keeps only its inputs and runs again in backward."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Any]] = []

    def wrap(self, blocks: Iterable[nn.Module]) -> None:
        """Checkpoint these; a block inside another recomputes with it."""
        inner: set[int] = set()
        for block in reversed(list(blocks)):
            if id(block) in inner:
                continue
            inner.update(id(m) for m in block.modules())
            self._before.append((block, block.__dict__.get("forward")))
            block.__dict__["forward"] = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def unwrap(self) -> None:
        """Give the blocks their own forward back."""
        for block, forward in self._before:
            del block.__dict__["forward"]
            if forward is not None:
                block.__dict__["forward"] = forward
        self._before.clear()
