"""Which modules FSDP2 gathers as one, and what it cannot shard."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, final

from torch import nn
from torch.utils.checkpoint import checkpoint

from ...errors import BackendError

#: Classes of modules to gather as one, or a function that says so of a module; None is the automatic rule.
Wrap = tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None


def blocks(module: nn.Module, wrap: Wrap) -> list[tuple[str, nn.Module]]:
    """The submodules that become groups of their own, inner ones first; ``module`` itself takes what is left."""
    chosen = {name: child for name, child in module.named_modules() if child is not module and _wanted(child, wrap)}
    if wrap is None:
        repeated = _repeated(module)
        chosen = {n: m for n, m in module.named_modules() if id(m) in repeated and m is not module}
    chosen = {name: child for name, child in chosen.items() if any(True for _ in child.parameters())}
    _leave_out_tied(module, chosen)
    return list(reversed(chosen.items()))


def _wanted(child: nn.Module, wrap: Wrap) -> bool:
    if wrap is None:
        return False
    return isinstance(child, wrap) if isinstance(wrap, tuple) else wrap(child)


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


def owners(module: nn.Module) -> dict[int, list[tuple[str, str]]]:
    """By the identity of each parameter, the modules (by name) that have it and the names that it has there."""
    found: dict[int, list[tuple[str, str]]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for name, parameter in child._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((path, name))
    return found


def _leave_out_tied(module: nn.Module, chosen: dict[str, nn.Module]) -> None:
    """Drop the groups that would split a tied parameter: it must lie in one."""
    everything = owners(module)
    again = True
    while again:
        again = False
        for places in everything.values():
            groups = {_group(module, path, chosen) for path, _ in places}
            if len(groups) > 1:
                for name in groups - {""}:
                    del chosen[name]
                    again = True


def _group(module: nn.Module, path: str, chosen: dict[str, nn.Module]) -> str:
    """The name of the innermost chosen module at or above ``path``; "" is the whole."""
    names = {id(child): name for name, child in chosen.items()}
    parts = path.split(".") if path else []
    for end in range(len(parts), 0, -1):
        name = names.get(id(module.get_submodule(".".join(parts[:end]))))
        if name is not None:
            return name
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
            dtypes.setdefault(_group(module, places[0][0], chosen), {}).setdefault(parameter.dtype, name)
    for found in dtypes.values():
        if len(found) > 1:
            listed = ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in found.items())
            raise BackendError(
                f"trainable parameters of one group have different dtypes: {listed}; convert the model first"
            )


# -- Activation checkpointing of whole blocks --------------------------------------------------------------------------


@final
class Checkpointed:
    """Blocks whose forward keeps only its inputs and runs again in backward."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Any]] = []

    def wrap(self, blocks: Iterable[nn.Module]) -> None:
        """Checkpoint these; a block inside another recomputes with it."""
        inner: set[int] = set()
        for block in reversed(list(blocks)):
            if id(block) in inner:
                continue
            inner.update(id(m) for m in block.modules())
            self._before.append((block, block.__dict__.get("forward")))
            block.__dict__["forward"] = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def unwrap(self) -> None:
        """Give the blocks their own forward back."""
        for block, forward in self._before:
            del block.__dict__["forward"]
            if forward is not None:
                block.__dict__["forward"] = forward
        self._before.clear()
