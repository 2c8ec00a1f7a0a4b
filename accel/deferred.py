"""Modules that are built without memory, and get their values when they are set up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .errors import BackendError


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Context: parameters of modules built inside lie on the meta device, without memory or values; buffers are real.

    ``accel.setup`` gives them values by each module's ``reset_parameters()`` (or ``_reset_parameters()``), the same on
    all ranks; a backend that shards makes one such module whole at a time. It refuses, by name, a parameter
    that no such method covers.
    """
    hook = register_module_parameter_registration_hook(_without_memory)
    try:
        yield
    finally:
        hook.remove()


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
    if parameter is None or parameter.is_meta:
        return None
    meta = parameter.detach().to("meta")
    made = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    made.__class__ = type(parameter)
    made.__dict__.update(parameter.__dict__)
    return made


def resetting(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    """The submodules that can give themselves values, children first as in a constructor, with the method that does."""
    seen: set[int] = set()

    def visit(child: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
        if id(child) in seen:
            return
        seen.add(id(child))
        for inner in child.children():
            yield from visit(inner)
        reset = getattr(child, "reset_parameters", None) or getattr(child, "_reset_parameters", None)
        if callable(reset) and any(True for _ in child.parameters()):
            yield child, reset

    return visit(module)


def check_deferred(module: nn.Module) -> None:
    """Refuse what would never get values.

    Raises:
        BackendError: names the parameters or buffers.
    """
    buffers = [name for name, b in module.named_buffers() if b.is_meta]
    if buffers:
        raise BackendError(
            f"buffers on the meta device have no values: {', '.join(buffers[:5])}; build the module inside "
            "accel.deferred_init(), which keeps buffers"
        )
    if not any(p.is_meta for p in module.parameters()):
        return
    covered = {id(p) for child, _ in resetting(module) for p in child._parameters.values()}
    bare = [
        f"{path}.{name}".lstrip(".")
        for path, child in module.named_modules()
        for name, p in child._parameters.items()
        if p is not None and p.is_meta and id(p) not in covered
    ]
    if bare:
        raise BackendError(
            f"parameters on the meta device whose module has no reset_parameters(): {', '.join(bare[:5])}; add the method, "
            "which gives them their first values, or build the model outside accel.deferred_init()"
        )


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, undo: contextlib.ExitStack) -> None:
    """Give every parameter on the meta device memory on ``device`` and its first values; ``undo`` takes them away again."""
    waiting = {id(p) for p in module.parameters() if p.is_meta}
    for parameter in module.parameters():
        if id(parameter) in waiting:
            real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            swap(parameter, real)
            undo.callback(swap, parameter, real)
    for child, reset in resetting(module):
        if any(id(p) in waiting for p in child._parameters.values()):
            reset()


def swap(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Exchange what two parameter objects hold; each keeps its identity, which optimizers know it by."""
    other.__class__ = type(parameter)
    for name, value in parameter.__dict__.items():
        other.__dict__.setdefault(name, value)
    torch.utils.swap_tensors(parameter, other)
