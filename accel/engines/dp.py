"""``dp``: ``torch.nn.DataParallel`` in one process, for notebooks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from ..process.devices import available
from .base.engine import Engine
from .base.options import LayerOptions
from .base.raw_objects import Args, Function, Kwargs

logger = logging.getLogger("accel")


@dataclass(frozen=True, slots=True, kw_only=True)
class DP(LayerOptions):
    """Options of ``dp``."""


@final
class Replicas(nn.DataParallel[nn.Module]):
    """``nn.DataParallel`` with the caller's autocast in its threads."""

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        # Otherwise torch's threads would use autocast's default dtype, not the caller's.
        kind = self.src_device_obj.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        cached = torch.is_autocast_cache_enabled()

        def call(replica: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(kind, dtype, enabled, cached):
                return replica(*args, **kwargs)

        modules: list[Any] = [functools.partial(call, replica) for replica in replicas]
        return super().parallel_apply(modules, inputs, kwargs)


@final
class DPEngine(Engine):
    """Splits batches over devices, and gathers outputs on the first."""

    name = "dp"
    options_type = DP
    synchronizes = False

    @classmethod
    def probe(cls) -> str:
        return "on one device as 'single'" if available()[1] < 2 else ""

    def wrap(self) -> None:
        self._parallel: nn.Module = self.entry
        if len(self.process.devices) > 1:
            self._parallel = Replicas(self.entry, list(self.process.devices))
        else:
            text = "backend 'dp' with one device (%s) runs as 'single': no batch is split"
            logger.warning(text, self.process.device)

    def run(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        return (self._parallel if function is self.entry else function)(*args, **kwargs)
