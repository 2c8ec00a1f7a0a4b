"""What a module was before a library changed it, beside its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from torch import nn

_HOOKS: Final = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
#: An owner, its class, names of attributes and keys of hooks: as they are; or its own class where the library changed that, and
#: what the library added.
_Owned = tuple[Any, type[Any] | None, set[str], dict[str, set[int]]]


def _owned(owner: Any) -> _Owned:
    return owner, type(owner), set(vars(owner)), {name: set(getattr(owner, name, None) or ()) for name in _HOOKS}


@final
class Snapshot:
    """The classes, attributes and hooks of a module, its children and its parameters; holds no tensor's values.

    What the library adds while it runs begins with one of ``later``.
    """

    def __init__(self, module: nn.Module, later: tuple[str, ...] = ()) -> None:
        self._module, self._later = module, later
        self._before = [_owned(owner) for owner in (*module.modules(), *module.parameters())]
        self._containers = [(m, type(m._parameters)) for m in module.modules()]
        self._added: list[_Owned] = []

    def changed(self) -> None:
        """Call it when the library has made its changes: later ones are the user's."""
        for owner, kind, names, hooks in self._before:
            _, kind_now, names_now, hooks_now = _owned(owner)
            changed = None if kind is kind_now else kind
            self._added.append((owner, changed, names_now - names, {k: hooks_now[k] - hooks[k] for k in hooks}))
        self._before.clear()

    def hooks(self, name: str) -> list[Any]:
        """The library's hooks of the root module, which comes first."""
        keys = self._added[0][3][name]
        return [hook for key, hook in getattr(self._module, name).items() if key in keys]

    def change_hooks(self, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let the library's hooks of all modules be others."""
        for owner, _, _, hooks in self._added:
            for key in hooks[name]:
                kept = getattr(owner, name, {})
                if key in kept:  # one of the library's own may be removed again
                    kept[key] = change(kept[key])

    def restore(self) -> None:
        """Undo the library's changes, also where it failed half-way: hooks that it has left would run in the user's model."""
        self.changed()
        for module, container in self._containers:
            if type(module._parameters) is not container:
                vars(module)["_parameters"] = container(module._parameters.items())
        for owner, kind, names, hooks in self._added:
            own: Any = vars(owner)
            for name in names | {n for n in own if self._later and n.startswith(self._later)}:
                own.pop(name, None)
            for name, keys in hooks.items():
                for key in keys:
                    getattr(owner, name).pop(key, None)
            if kind is not None:
                owner.__class__ = kind
        self._added.clear()
