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
    """Gradients that are averaged in flat pieces before a step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """End the recorded graph, which would grow from step to step."""
        if self.process.device.type == "xla":
            sys.modules["torch_xla"].sync()


def _require_tpu(kind: str, where: str) -> None:
    if kind not in ("tpu", "xla"):
        raise BackendError(
            f"backend 'xla' needs a TPU, but {where} (torch {torch.__version__}). Install 'torch-tpu==0.2.0' for torch 2.11 "
            "to 2.15, or 'torch_xla==2.9.0' for torch 2.9 (one process, with PJRT_DEVICE)."
        )


@final
class XLAEngine(AveragingEngine):
    """Sums flat gradients on the device. torch_xla records operations and runs them after each step."""

    name = "xla"
    options_type = XLA
    gradients_type = XLAGradients

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        _require_tpu(process.device.type, f"this process uses {process.device}")

    @classmethod
    def probe(cls) -> str:
        kind = available()[0]
        _require_tpu(kind, f"torch finds {kind} here")
        return ""
