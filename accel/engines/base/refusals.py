"""Errors for modules and optimizers that a backend can't support."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError


def check_parameters(optimizer: Optimizer, known: Any, module: nn.Module, path: str) -> None:
    """Raise OptimizerError for parameters with an unknown ``id``."""
    for number, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in known:
                raise OptimizerError(
                    f"{path}.param_groups[{number}]['params'][{i}] of shape "
                    f"{tuple(p.shape)} is not in {type(module).__name__}. "
                    "If it trains two models, set up one that contains both: "
                    "nn.ModuleDict({'a': a, 'b': b})."
                )


def refuse_sparse(module: nn.Module, backend: str) -> None:
    """Raise BackendError for embeddings with sparse gradients."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise BackendError(
                f"backend={backend!r} can't shard the sparse gradients of "
                f'{name}. Use sparse=False, or backend="ddp".'
            )


def refuse_quantized(module: nn.Module, backend: str) -> None:
    """Raise BackendError for torchao's quantized weights."""
    for name, p in module.named_parameters():
        if hasattr(p, "__tensor_flatten__"):
            raise BackendError(
                f"backend={backend!r} can't shard the quantized parameter "
                f'{name}. Use backend="ddp" or "sharded".'
            )


def refuse_overlaps(module: nn.Module, backend: str) -> None:
    """Raise BackendError for two parameters with the same memory."""
    names: dict[int, str] = {}
    for name, p in module.named_parameters():
        odd = is_lazy(p) or p.is_meta or p.layout != torch.strided
        if odd or type(p.data) is not Tensor or not p.numel():
            continue
        other = names.setdefault(p.data_ptr(), name)
        if other != name:
            raise BackendError(
                f"{other} and {name} are two Parameters with the same memory, "
                f"which backend={backend!r} would train separately. "
                "Make them one: a.weight = b.weight."
            )
