"""What a module was before a library changed it, beside its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from torch import nn

_HOOKS: Final = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
#: Attributes that the library adds while it runs.
_LATER: Final = ("ds_", "applied_pre_backward_ref_cnt")


def _hooks(module: nn.Module) -> dict[str, set[int]]:
    return {name: set(getattr(module, name)) for name in _HOOKS}


@final
class Snapshot:
    """The attributes and hooks of a module, its children and its parameters; holds no tensor's values."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[int, tuple[set[str], Any]] = {id(m): (set(vars(m)), _hooks(m)) for m in module.modules()}
        self._before.update((id(p), (set(vars(p)), None)) for p in module.parameters())
        self._containers = [(m, type(m._parameters)) for m in module.modules()]
        self._added: list[tuple[Any, set[str], dict[str, set[int]]]] = []

    def changed(self) -> None:
        """Call it when the library has made its changes: later ones are the user's."""
        for module in self._module.modules():
            names, hooks = self._before[id(module)]
            now = _hooks(module)
            self._added.append((module, set(vars(module)) - names, {k: now[k] - hooks[k] for k in now}))
        for parameter in self._module.parameters():
            self._added.append((parameter, set(vars(parameter)) - self._before[id(parameter)][0], {}))

    def hooks(self, name: str) -> list[Any]:
        """The library's hooks of the root module."""
        keys = next((added[name] for owner, _, added in self._added if owner is self._module), set())
        return [hook for key, hook in getattr(self._module, name).items() if key in keys]

    def change_hooks(self, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let the library's hooks of all modules be others."""
        for owner, _, hooks in self._added:
            for key in hooks.get(name, ()):
                kept = getattr(owner, name)
                if key in kept:  # one of the library's own may be removed again
                    kept[key] = change(kept[key])

    def restore(self) -> None:
        """Undo the library's changes."""
        for module, container in self._containers:
            if type(module._parameters) is not container:
                vars(module)["_parameters"] = container(module._parameters.items())
        for owner, names, hooks in self._added:
            for name in names | {n for n in vars(owner) if n.startswith(_LATER)}:
                vars(owner).pop(name, None)
            for name, keys in hooks.items():
                for key in keys:
                    getattr(owner, name).pop(key, None)
        self._added.clear()
