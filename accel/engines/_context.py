"""What an engine is built with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..errors import BackendError
from ..precision import LossScale, Precision
from ..process import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of the backends' options."""

    def __post_init__(self) -> None:
        """Refuse anything but True and False where one of them is expected; subclasses with more to check call it too.

        Raises:
            BackendError: names the option.
        """
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if option.type in (bool, "bool") and type(value) is not bool:
                raise BackendError(f"{type(self).__name__}({option.name}={value!r}): expected True or False")


@dataclass(frozen=True, slots=True)
class Context:
    """What an engine is built with beside its module."""

    process: Process
    precision: Precision
    loss_scale: LossScale
    options: Any
    #: The engine's number, the same on all ranks, and no other engine's.
    serial: int
