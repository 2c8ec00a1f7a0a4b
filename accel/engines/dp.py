"""``dp``: ``torch.nn.DataParallel`` over this process's devices, for notebooks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from ..errors import BackendError
from ..process import Process
from ..process.environments import available
from .base.engine import Engine, LayerOptions

logger = logging.getLogger("accel")


@dataclass(frozen=True, slots=True, kw_only=True)
class DP(LayerOptions):
    """Options of ``dp``: those that every engine of whole layers has."""


@final
class Replicas(nn.DataParallel[nn.Module]):
    """Each device's replica computes under the caller's autocast: torch's threads know whether it is on, and not its dtype."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__(module, list(devices), devices[0])

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        kind = self.src_device_obj.type
        modules: list[Any] = [_as_here(replica, kind) for replica in replicas]
        return super().parallel_apply(modules, inputs, kwargs)


def _as_here(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """The function, which computes under this thread's autocast for devices of a kind in whichever thread it is called."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cached = torch.is_autocast_cache_enabled()

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype, enabled, cached):
            return function(*args, **kwargs)

    return call


@final
class DPEngine(Engine):
    """Splits each batch over the devices and gathers the outputs, so that a loss sees the whole batch.

    Everything lies on the first device; the others hold copies during a step.
    """

    name = "dp"
    options_type = DP
    synchronizes = False

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        """Refuse checkpointed blocks: a replica's would compute with the weights of the first device."""
        if options.activation_checkpointing and len(process.devices) > 1:
            raise BackendError(
                'backend="dp" can\'t use activation_checkpointing on several devices. Use backend="ddp".'
            )

    @classmethod
    def probe(cls) -> str:
        return "on one device as 'single'" if available()[1] < 2 else ""

    def wrap(self) -> None:
        self._parallel: nn.Module = self.entry
        devices = self.process.devices
        if len(devices) > 1:
            self._parallel = Replicas(self.entry, devices)
        else:
            _say_single(str(self.process.device))

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (self._parallel if function is self.entry else function)(*args, **kwargs)


@functools.cache
def _say_single(device: str) -> None:
    logger.warning("backend 'dp' with one device (%s) runs as 'single': no batch is split", device)
