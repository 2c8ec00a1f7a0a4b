"""Raw objects of which this rank holds a part: a state dict, a copy or a pickle of one would look whole, and is refused."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, final

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...errors import AccelError, BackendError, OptimizerError

#: How ``copy`` and ``pickle`` ask an object for what they take; of the instance, since the class is the user's.
_COPIES: Final = ("__deepcopy__", "__getstate__")


@final
class Guard:
    """Refuses ``state_dict()``, ``load_state_dict()``, copies and pickles of raw modules and optimizers, unless opened.

    It knows no engine: an optimizer that is kept does not keep its model, and what is a part stays one without it.
    """

    def __init__(self) -> None:
        self._open = False
        self._watched: dict[int, tuple[weakref.ref[Any], list[RemovableHandle]]] = {}

    def watch(self, raw: nn.Module | Optimizer, load: Callable[..., Any] | None = None) -> None:
        """Refuse from now on; ``load`` is called instead before a raw optimizer loads a state, and may give another one."""
        self.release(raw)
        before_load = functools.partial(self._check, "load_state_dict()")
        hooks = [
            raw.register_state_dict_pre_hook(functools.partial(self._check, "state_dict()")),
            raw.register_load_state_dict_pre_hook(load or before_load),
        ]
        self._watched[id(raw)] = weakref.ref(raw), hooks
        refused = _refusal(
            raw, f"a copy or pickle of this {type(raw).__name__}", "a copy or pickle would miss the rest"
        )
        for name in _COPIES:
            vars(raw)[name] = functools.partial(_raise, *refused)

    def watch_modules(self, module: nn.Module, holds_part: Callable[[nn.Module], bool]) -> None:
        """Refuse it of a module and of those in it of which this rank holds a part."""
        for child in filter(holds_part, module.modules()):
            self.watch(child)

    def release_modules(self) -> None:
        """The end of ``watch_modules``, also for those that were taken out of the module since."""
        for reference, _ in list(self._watched.values()):
            if isinstance(raw := reference(), nn.Module):
                self.release(raw)

    def release(self, raw: nn.Module | Optimizer) -> None:
        """Refuse no more."""
        _, hooks = self._watched.pop(id(raw), (None, ()))
        for hook in hooks:
            hook.remove()
        for name in _COPIES:
            if getattr(vars(raw).get(name), "func", None) is _raise:
                del vars(raw)[name]

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let state dicts through inside."""
        before, self._open = self._open, True
        try:
            yield
        finally:
            self._open = before

    def _check(self, what: str, raw: nn.Module | Optimizer, *_: object) -> None:
        if not self._open:
            loading = "every rank loads a whole one by load_state_dict(full) of the handle, or by accel.load"
            lead = loading if what.startswith("load") else "it would miss the rest"
            _raise(*_refusal(raw, f"{what} of this {type(raw).__name__}", lead))


def _refusal(raw: nn.Module | Optimizer, what: str, why: str) -> tuple[type[AccelError], str]:
    """The error, which says what to do instead; that works on every backend."""
    kind, error = ("model", BackendError) if isinstance(raw, nn.Module) else ("optimizer", OptimizerError)
    ended = "returns it whole" if kind == "model" else "gives it back with its whole state"
    return error, (
        f"{what}: this rank holds only its own part of it, and {why}; use what accel.full_state_dict({kind}) returns, which "
        f"every rank calls; accel.teardown(model) {ended}; accel.save writes a checkpoint"
    )


def _raise(error: type[AccelError], text: str, *_: object) -> NoReturn:
    raise error(text)
