"""Which modules FSDP2 gathers as one, and what it cannot shard."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ...errors import BackendError
from ...gradients.patches import replaced

#: Classes of modules to gather as one, or a function that says so of a module; None is the automatic rule.
Wrap = tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None


def blocks(module: nn.Module, wrap: Wrap) -> list[tuple[str, nn.Module]]:
    """The submodules that become groups of their own, inner ones first; ``module`` itself takes what is left."""
    if wrap is None:
        repeated = _repeated(module)
        wanted = [(n, m) for n, m in module.named_modules() if id(m) in repeated]
    elif isinstance(wrap, tuple):
        wanted = [(n, m) for n, m in module.named_modules() if isinstance(m, wrap)]
    else:
        wanted = [(n, m) for n, m in module.named_modules() if m is not module and wrap(m)]
    chosen = {n: m for n, m in wanted if m is not module and any(True for _ in m.parameters())}
    _leave_out_tied(module, chosen)
    return list(reversed(chosen.items()))


def _repeated(module: nn.Module) -> set[int]:
    """Children of ModuleLists and Sequentials that have submodules of their own and a sibling of their class."""
    found: set[int] = set()
    for container in module.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            children = [c for c in container.children() if not _is_container(c) and any(True for _ in c.children())]
            kinds = Counter(type(c) for c in children)
            found.update(id(c) for c in children if kinds[type(c)] > 1)
    return found


def _is_container(module: nn.Module) -> bool:
    """Whether it has no forward of its own, so that nothing would gather it."""
    return type(module).forward in (nn.ModuleList.forward, nn.ModuleDict.forward)


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
    """Refuse what would be lost or fail later.

    Raises:
        BackendError: names the parameters or modules.
    """
    if options.wrap is not None:
        empty = [n for n, m in blocks(module, options.wrap) if _is_container(m)]
        if empty:
            raise BackendError(
                f"FSDP(wrap=...) chose {', '.join(empty[:5])}, which has no forward: choose its children"
            )
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and _is_container(module):
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


def checkpointed(blocks: Iterable[nn.Module]) -> contextlib.ExitStack:
    """Until it is closed, a block's forward keeps only its inputs and runs again in backward; one inside another with that."""
    undo, inside = contextlib.ExitStack(), set[int]()
    for block in reversed(list(blocks)):
        if id(block) not in inside:
            inside.update(id(m) for m in block.modules())
            # Of a bound method, since a copy or a pickle of the block is to run its own.
            run_again = functools.partial(checkpoint, block.forward, use_reentrant=False)
            undo.enter_context(replaced(vars(block), "forward", run_again))
    return undo
