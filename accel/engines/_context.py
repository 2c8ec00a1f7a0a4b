"""What an engine is built with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, final

from ..errors import BackendError
from ..precision import LossScale, Precision
from ..process import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of the backends' options.

    Args:
        drift_check: compare every so many steps what must be equal on all ranks (None: chosen by what it costs, 0: never).
    """

    drift_check: int | None = None

    @final
    def __post_init__(self) -> None:
        """Refuse anything but True and False where one of them is expected, and what ``check_values`` refuses.

        Raises:
            BackendError: names the option.
        """
        every = self.drift_check
        if every is not None and (type(every) is not int or every < 0):
            raise BackendError(f"{type(self).__name__}(drift_check={every!r}): expected a number of steps, 0 or None")
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if option.type in (bool, "bool") and type(value) is not bool:
                raise BackendError(f"{type(self).__name__}({option.name}={value!r}): expected True or False")
        self.check_values()

    def check_values(self) -> None:
        """Refuse other values that these options cannot have.

        Raises:
            BackendError: names the option.
        """


@dataclass(frozen=True, slots=True)
class Context:
    """What an engine is built with beside its module."""

    process: Process
    precision: Precision
    loss_scale: LossScale
    options: Any
    #: The engine's number, the same on all ranks, and no other engine's.
    serial: int
