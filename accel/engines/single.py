"""``single``: the module itself, on this process's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch.optim import Optimizer

from .engine import Engine, Options
from .memory import Footprint, MemoryUse, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(Options):
    """Options of ``single``: it has none."""


@final
class SingleEngine(Engine):
    """Calls the module."""

    name = "single"
    options_type = Single
    synchronizes = False

    @classmethod
    def predict(cls, footprint: Footprint, options: Any, world_size: int) -> tuple[MemoryUse, ...]:
        """Everything on one device."""
        return whole(footprint, world_size)

    def wrap(self) -> None:
        """Nothing to build."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.entry(*args, **kwargs)

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        """Nothing to undo."""
