"""Activation checkpointing: blocks recompute activations in backward."""

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
from .raw_objects import Function

#: Classes of modules, or a function that selects modules. None means repeated blocks.
Choice = tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None


def chosen(module: nn.Module, choice: Choice) -> list[tuple[str, nn.Module]]:
    """Return the chosen submodules with their names, outer ones first."""
    is_block: Any = choice
    if choice is None:
        is_block = _repeated(module).__contains__
    blocks = []
    for name, child in module.named_modules():
        is_chosen = isinstance(child, choice) if isinstance(choice, tuple) else is_block(child)
        if name and is_chosen:
            blocks.append((name, child))
    return blocks


def _repeated(module: nn.Module) -> set[nn.Module]:
    """Return blocks with submodules and a sibling of the same class."""
    repeated: set[nn.Module] = set()
    for container in module.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        blocks = []
        for child in container.children():
            # Compare the class of the block, not of torch.compile's wrapper around it.
            block = getattr(child, "_orig_mod", child)
            if any(block.children()) and not isinstance(block, nn.ModuleList):
                blocks.append(block)
        counts = Counter(map(type, blocks))
        repeated.update(block for block in blocks if counts[type(block)] > 1)
    return repeated


def checkpointed(module: nn.Module, options: Any) -> contextlib.ExitStack:
    """Checkpoint the selected blocks until the stack is closed."""
    undo = contextlib.ExitStack()
    choice: Any = getattr(options, "activation_checkpointing", False)
    wrap = getattr(options, "wrap", None) if choice is True else choice
    blocks = chosen(module, wrap) if choice else []
    if choice and not blocks:
        raise BackendError(
            f"activation_checkpointing={choice} finds no blocks in "
            f"{type(module).__name__}. Pass their classes: "
            "activation_checkpointing=(Block,)."
        )
    inside: set[nn.Module] = set()
    for _, block in blocks:
        if block not in inside:
            inside.update(block.modules())
            forward = functools.partial(_forward_again, block, block.forward)
            undo.enter_context(replaced(vars(block), "forward", forward))
    return undo


def _forward_again(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    # Nothing to recompute. generate() also needs the empty cache that is removed below.
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # transformers gives each layer an empty cache, which the second forward would fill again.
    for name, value in list(kwargs.items()):
        if hasattr(value, "get_seq_length") and value.get_seq_length() == 0:
            del kwargs[name]
    return run_again(forward, list(block.modules()), args, kwargs)


def run_again(function: Function, modules: Sequence[nn.Module], args: Any, kwargs: Any) -> Any:
    """Call a function of these modules. Backward calls it again."""
    # A compiled graph writes buffers only once, so it needs no copies.
    if not torch.compiler.is_compiling():
        kwargs["context_fn"] = lambda: (contextlib.nullcontext(), _BuffersKept(modules))
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


@final
class _BuffersKept:
    """Copies buffers for a recomputation, so BatchNorm counts once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = [module._buffers for module in modules]

    def __enter__(self) -> None:
        self._buffers = list(map(dict.copy, self._tables))
        for table in self._tables:
            for name, buffer in table.items():
                table[name] = None if buffer is None else buffer.clone()

    def __exit__(self, *_: object) -> None:
        for table, buffers in zip(self._tables, self._buffers, strict=True):
            table.update(buffers)
