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

# -- which modules ---------------------------------------------------------------------------------

#: Classes of modules, or a function that returns True for them. None: ``_repeated``.
Choice = tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None


def chosen(module: nn.Module, choice: Choice) -> list[tuple[str, nn.Module]]:
    """Return the chosen submodules with their names, outer ones first."""
    if choice is None:
        found = _repeated(module)
        return [(n, m) for n, m in module.named_modules() if id(m) in found and m is not module]
    wanted = (lambda m: isinstance(m, choice)) if isinstance(choice, tuple) else choice
    return [(n, m) for n, m in module.named_modules() if m is not module and wanted(m)]


def _repeated(module: nn.Module) -> set[int]:
    """Return children of containers that have submodules, and a sibling of their class."""
    found: set[int] = set()
    for container in module.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            # torch.compile wraps a block in a module, which isn't the block.
            inner = [c._modules.get("_orig_mod") or c for c in container.children()]
            children = [c for c in inner if not is_container(c) and any(True for _ in c.children())]
            kinds = Counter(type(c) for c in children)
            found.update(id(c) for c in children if kinds[type(c)] > 1)
    return found


def is_container(module: nn.Module) -> bool:
    """True if a module has no forward of its own."""
    return type(module).forward in (nn.ModuleList.forward, nn.ModuleDict.forward)


# -- computing activations again -------------------------------------------------------------------


def checkpointed(module: nn.Module, options: Any) -> contextlib.ExitStack:
    """Checkpoint the blocks that the options choose, until the stack is closed.

    Raises:
        BackendError: there are no such blocks.
    """
    undo, inside = contextlib.ExitStack(), set[int]()
    asked: Any = getattr(options, "activation_checkpointing", False)
    choice: Choice = getattr(options, "wrap", None) if asked is True else asked
    blocks = [m for _, m in chosen(module, choice) if not is_container(m)] if asked else []
    if asked and not blocks:
        raise BackendError(
            f"activation_checkpointing={asked} finds no blocks in this {type(module).__name__}: modules that repeat in a "
            "ModuleList or Sequential and have submodules. Pass their classes: activation_checkpointing=(Block,)."
        )
    for block in blocks:
        if id(block) not in inside:
            inside.update(id(m) for m in block.modules())
            undo.enter_context(replaced(vars(block), "forward", Checkpointed(block.forward)))
    return undo


@final
class Checkpointed:
    """A block's forward that keeps only its inputs. Copies of the block have the plain forward."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._forward: Any = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled graph writes buffers once
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        # transformers gives each layer a cache, which the second forward would fill again.
        args = tuple(None if _is_empty_cache(a) else a for a in args)
        kwargs = {name: None if _is_empty_cache(a) else a for name, a in kwargs.items()}
        return run_again(self._forward, list(self._forward.__self__.modules()), args, kwargs)

    def __reduce__(self) -> Any:
        return self._forward.__reduce__()


def run_again(
    function: Callable[..., Any], modules: Sequence[nn.Module], args: Any, kwargs: Any
) -> Any:
    """Call a function of these modules, and compute its activations again in backward."""

    def contexts() -> tuple[Any, Any]:  # of the first forward and the second
        return contextlib.nullcontext(), _BuffersKept(modules)

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@final
class _BuffersKept:
    """Undoes changes of buffers, so that BatchNorm counts a batch once. Reusable."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = [m._buffers for m in modules if m._buffers]
        self._buffers: list[dict[str, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        self._buffers = [dict(table) for table in self._tables]
        copies: dict[int, torch.Tensor] = {}  # what stands in several places stays one tensor
        for table in self._tables:
            for name, buffer in table.items():
                if buffer is not None:
                    table[name] = copies.setdefault(id(buffer), buffer.clone())

    def __exit__(self, *_: object) -> None:
        for table, buffers in zip(self._tables, self._buffers, strict=True):
            table.update(buffers)


def _is_empty_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and value.get_seq_length() == 0
