"""``dp``: ``torch.nn.DataParallel`` over this process's devices, for notebooks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from .base.engine import Engine, Options

logger = logging.getLogger("accel")


@dataclass(frozen=True, slots=True, kw_only=True)
class DP(Options):
    """Options of ``dp``: it has none."""


@final
class DPEngine(Engine):
    """Splits each batch over the devices and gathers the outputs, so that a loss sees the whole batch.

    Everything lies on the first device; the others hold copies during a step.
    """

    name = "dp"
    options_type = DP
    synchronizes = False

    def wrap(self) -> None:
        """Build the DataParallel where there are devices for it."""
        self._parallel: nn.Module = self.entry
        devices = self.process.devices
        if len(devices) > 1:
            self._parallel = nn.DataParallel(self.entry, device_ids=list(devices), output_device=devices[0])
        else:
            _say_single(str(self.process.device))

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (self._parallel if function is self.entry else function)(*args, **kwargs)


@functools.cache
def _say_single(device: str) -> None:
    """Once for each device."""
    logger.warning("backend 'dp' with one device (%s) runs as 'single': no batch is split", device)
