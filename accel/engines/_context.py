"""What an engine is built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..precision import LossScale, Precision
from ..process import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of the backends' options."""


@dataclass(frozen=True, slots=True)
class Context:
    """What an engine is built with beside its module."""

    process: Process
    precision: Precision
    loss_scale: LossScale
    options: Any
