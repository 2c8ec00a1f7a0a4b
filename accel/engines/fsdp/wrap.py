"""Which modules FSDP2 gathers as one, and what it cannot shard."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import BackendError
from ..base.activations import Choice, chosen, is_container


def blocks(module: nn.Module, wrap: Choice) -> list[tuple[str, nn.Module]]:
    """The submodules that become groups of their own, inner ones first; ``module`` itself takes what is left."""
    groups = {n: m for n, m in chosen(module, wrap) if any(True for _ in m.parameters())}
    _leave_out_tied(module, groups)
    return list(reversed(groups.items()))


def owners(module: nn.Module) -> dict[int, list[str]]:
    """By the identity of each parameter, the names of the modules that have it."""
    found: dict[int, list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for parameter in child.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(path)
    return found


def _leave_out_tied(module: nn.Module, chosen: dict[str, nn.Module]) -> None:
    """Drop the groups that would split a tied parameter: it must lie in one."""
    everything, before = owners(module), None
    while before != chosen.keys():
        before = set(chosen)
        for places in everything.values():
            groups = {_group(module, path, chosen) for path in places}
            for name in groups - {""} if len(groups) > 1 else ():
                del chosen[name]


def _group(module: nn.Module, path: str, chosen: dict[str, nn.Module]) -> str:
    """The name of the innermost chosen module at or above ``path``; "" is the whole."""
    names = {id(child): name for name, child in chosen.items()}
    while path:
        if (name := names.get(id(module.get_submodule(path)))) is not None:
            return name
        path = path.rpartition(".")[0]
    return ""


def check_module(module: nn.Module, options: Any) -> None:
    """Refuse (BackendError) what would be lost or fail later."""
    if options.wrap is not None:
        empty = [n for n, m in blocks(module, options.wrap) if is_container(m)]
        if empty:
            raise BackendError(
                f"FSDP(wrap=...) chose {', '.join(empty[:5])}, which has no forward: choose its children"
            )
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and is_container(module):
        raise BackendError(
            f"a {type(module).__name__} has no forward, where its weights would be gathered: give accel.setup a module with "
            "one, which calls these children, or choose backend='ddp'"
        )
    hooked = [n for n, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise BackendError(
            f"{', '.join(hooked[:5])} has gradient hooks, which would be lost when its shard takes its place: "
            "register hooks after accel.setup, on model.parameters()"
        )
    _check_dtypes(module, options)


def _check_dtypes(module: nn.Module, options: Any) -> None:
    chosen = dict(blocks(module, options.wrap))
    dtypes: dict[str, dict[Any, str]] = {}
    named = {id(p): (n, p) for n, p in module.named_parameters()}
    for identity, places in owners(module).items():
        name, parameter = named[identity]
        if parameter.requires_grad and parameter.dim() and parameter.numel():
            dtypes.setdefault(_group(module, places[0], chosen), {}).setdefault(parameter.dtype, name)
    for found in dtypes.values():
        if len(found) > 1:
            listed = ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in found.items())
            raise BackendError(
                f"trainable parameters of one group have different dtypes: {listed}; convert the model first"
            )
