"""Modules and optimizers that a backend can't train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError


def check_parameters(optimizer: Optimizer, known: Any, module: nn.Module, path: str) -> None:
    """Raise OptimizerError for an optimizer's parameters that are not ``known`` by identity."""
    strangers = [
        f"param_groups[{g}]['params'][{i}] of shape {tuple(p.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if id(p) not in known
    ]
    if strangers:
        raise OptimizerError(
            f"{path} holds parameters that {type(module).__name__} doesn't have: "
            f"{', '.join(strangers[:3])}. If it trains two models, set up one that contains both: "
            'accel.setup(nn.ModuleDict({"a": a, "b": b}), optimizer).'
        )


def refuse_sparse(module: nn.Module, backend: str) -> None:
    """Raise BackendError for embeddings with sparse gradients."""
    kinds = nn.Embedding | nn.EmbeddingBag
    names = [n for n, m in module.named_modules() if isinstance(m, kinds) and m.sparse]
    if names:
        raise BackendError(
            f"backend={backend!r} can't shard the sparse gradients of {', '.join(names[:5])}. "
            'Use sparse=False, or backend="ddp".'
        )


def refuse_quantized(module: nn.Module, backend: str) -> None:
    """Raise BackendError for a parameter of several tensors, such as torchao's quantized weights."""
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "__tensor_flatten__"):
            raise BackendError(
                f"backend={backend!r} can't shard the quantized parameter {name} "
                f'({type(parameter.data).__name__}). Use backend="ddp" or "sharded".'
            )


def refuse_scripts(module: nn.Module, backend: str) -> None:
    """Raise BackendError for scripted modules, which take no hooks."""
    scripted = torch.jit.ScriptModule
    names = [n or "the model" for n, m in module.named_modules() if isinstance(m, scripted)]
    if names:
        raise BackendError(
            f"backend={backend!r} needs hooks, which the scripted modules {', '.join(names[:5])} "
            'don\'t take. Set up the model before torch.jit.script, or use backend="ddp".'
        )


def refuse_overlaps(module: nn.Module, backend: str) -> None:
    """Raise BackendError if two parameters begin at the same place in memory."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        odd = is_lazy(parameter) or parameter.is_meta or parameter.layout != torch.strided
        if odd or type(parameter.data) is not torch.Tensor or not parameter.numel():
            continue
        other = names.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise BackendError(
                f"{other} and {name} are two Parameters with the same memory, which would train "
                f"apart with backend={backend!r}. Make them one: a.weight = b.weight."
            )
