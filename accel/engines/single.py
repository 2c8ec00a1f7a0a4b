"""``single``: the module itself, on this process's device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from .base.engine import Engine
from .base.options import LayerOptions
from .base.raw_objects import Args, Function, Kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(LayerOptions):
    """Options of ``single``."""


@final
class SingleEngine(Engine):
    """Calls the module."""

    name = "single"
    options_type = Single
    synchronizes = False

    def run(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        return function(*args, **kwargs)
