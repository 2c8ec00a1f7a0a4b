"""``xla``: TPUs, by torch-tpu, or on one device by the older torch_xla."""

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
    """Options of ``xla``: ``broadcast_buffers`` (from rank 0, once a step), and ``auto_refresh`` before each forward."""


@final
class XLAGradients(AveragedGradients):
    """Averaged in flat pieces before a step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """End the recorded graph, which would grow from step to step."""
        if self.process.device.type == "xla":
            sys.modules["torch_xla"].sync()


def _refuse(kind: str, found: str) -> None:
    if kind not in ("tpu", "xla"):
        raise BackendError(
            f"backend 'xla' needs a TPU, but {found} (torch {torch.__version__}): with torch 2.11 to 2.15 pip install "
            "'torch-tpu==0.2.0'; with torch 2.9 pip install 'torch_xla==2.9.0' and set PJRT_DEVICE to TPU or CPU, for one process"
        )


@final
class XLAEngine(AveragingEngine):
    """Sums the flat pieces on the device; torch_xla, which only records operations, runs them after each step."""

    name = "xla"
    options_type = XLA
    gradients_type = XLAGradients

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        _refuse(process.device.type, f"this process uses {process.device}")

    @classmethod
    def probe(cls) -> str:
        kind = available()[0]
        _refuse(kind, f"torch finds {kind} here")
        return ""
