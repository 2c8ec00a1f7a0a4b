"""An engine that averages gradients at the step over gloo, as Horovod and XLA do in their own ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist

import accel
from accel.engines import ENGINES
from accel.engines._averaging import AveragingEngine, AveragingOptions


@final
class GlooEngine(AveragingEngine):
    name = "deferred"
    options_type = AveragingOptions

    def add(self, flat: torch.Tensor) -> None:
        dist.all_reduce(flat, group=self.process.group)


@contextmanager
def known() -> Iterator[None]:
    ENGINES["deferred"] = GlooEngine
    try:
        yield
    finally:
        accel.teardown()
        del ENGINES["deferred"]
