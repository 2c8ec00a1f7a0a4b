"""``xla``: TPUs with torch-tpu, or with torch_xla on one device."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import BackendError
from ..process import Process
from ..process.devices import available
from ._averaging import AveragedGradients, AveragingEngine, AveragingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class XLA(AveragingOptions):
    """Options of ``xla``. See ``accel.Horovod``, without ``compression``."""


@final
class XLAGradients(AveragedGradients):
    """Averaged gradients. A step runs torch_xla's recorded graph."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Run the recorded graph, or it would grow with every step."""
        if self.process.device.type == "xla":
            sys.modules["torch_xla"].sync()


def _require_tpu(kind: str, found: str) -> None:
    if kind not in ("tpu", "xla"):
        raise BackendError(
            f"backend 'xla' needs a TPU, but {found} (torch {torch.__version__}). "
            "Install 'torch-tpu==0.2.0', or 'torch_xla==2.9.0' for one process."
        )


@final
class XLAEngine(AveragingEngine):
    """Averages gradients on the device."""

    name = "xla"
    options_type = XLA
    gradients_type = XLAGradients

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        _require_tpu(process.device.type, f"this process uses {process.device}")

    @classmethod
    def probe(cls) -> str:
        _require_tpu(available()[0], f"torch finds {available()[0]} here")
        return ""
