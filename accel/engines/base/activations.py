"""Activation checkpointing: chosen blocks keep their inputs, and compute activations again."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...errors import BackendError
from ...gradients.patches import replaced

#: Classes of modules, or a function that returns True for them. None means repeated blocks.
Choice = tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None


def chosen(module: nn.Module, choice: Choice) -> list[tuple[str, nn.Module]]:
    """Return the chosen submodules with their names, outer ones first."""
    if choice is None:
        picked = _repeated(module)
    elif isinstance(choice, tuple):
        picked = {child for child in module.modules() if isinstance(child, choice)}
    else:
        picked = set(filter(choice, module.modules()))
    return [(name, child) for name, child in module.named_modules() if name and child in picked]


def _repeated(module: nn.Module) -> set[nn.Module]:
    """Return children of containers that have submodules, and a sibling of their class."""
    repeated: set[nn.Module] = set()
    for container in module.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            # torch.compile wraps a block in a module, which isn't the block.
            blocks = [c._modules.get("_orig_mod") or c for c in container.children()]
            blocks = [c for c in blocks if c._modules and not isinstance(c, nn.ModuleList)]
            kinds = Counter(map(type, blocks))
            repeated.update(block for block in blocks if kinds[type(block)] > 1)
    return repeated


def checkpointed(module: nn.Module, options: Any) -> contextlib.ExitStack:
    """Checkpoint the blocks that the options choose, until the stack is closed."""
    undo = contextlib.ExitStack()
    choice: Any = getattr(options, "activation_checkpointing", False)
    wrap = getattr(options, "wrap", None) if choice is True else choice
    blocks = chosen(module, wrap) if choice else []
    if choice and not blocks:
        raise BackendError(
            f"activation_checkpointing={choice} finds no blocks in {type(module).__name__}. Pass "
            "their classes: activation_checkpointing=(Block,)."
        )
    inside: set[nn.Module] = set()
    for _, block in blocks:
        if block not in inside:
            inside.update(block.modules())
            forward = functools.partial(_forward_again, block, block.forward)
            undo.enter_context(replaced(vars(block), "forward", forward))
    return undo


def _forward_again(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():  # generate() fills a cache
        return forward(*args, **kwargs)
    # transformers gives each layer an empty cache, which the second forward would fill again.
    for name, value in list(kwargs.items()):
        if hasattr(value, "get_seq_length") and value.get_seq_length() == 0:
            del kwargs[name]
    return run_again(forward, list(block.modules()), args, kwargs)


def run_again(
    function: Callable[..., Any], modules: Sequence[nn.Module], args: Any, kwargs: Any
) -> Any:
    """Call a function of these modules, and compute its activations again in backward."""
    if not torch.compiler.is_compiling():  # a compiled graph writes buffers once
        kwargs["context_fn"] = lambda: (contextlib.nullcontext(), _BuffersKept(modules))
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


@final
class _BuffersKept:
    """Lets the second forward write to copies of buffers, so that BatchNorm counts a batch once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = [module._buffers for module in modules]

    def __enter__(self) -> None:
        self._buffers = list(map(dict.copy, self._tables))
        for table in self._tables:
            table.update({k: b if b is None else b.clone() for k, b in table.items()})

    def __exit__(self, *_: object) -> None:
        for table, buffers in zip(self._tables, self._buffers, strict=True):
            table.update(buffers)
