"""``single``: the module itself, on this process's device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from .base.engine import Engine
from .base.options import LayerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(LayerOptions):
    """Options of ``single``."""


@final
class SingleEngine(Engine):
    """Calls the module."""

    name = "single"
    options_type = Single
    synchronizes = False

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return function(*args, **kwargs)
