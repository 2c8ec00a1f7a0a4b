"""Activation checkpointing: chosen blocks keep only their inputs for backward, and compute again."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ...errors import BackendError
from ...gradients.patches import replaced

# -- which modules -----------------------------------------------------------------------------------------------------

#: Classes of modules, or a function that says so of a module; None is the rule of ``repeated``.
Choice = tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None


def chosen(module: nn.Module, choice: Choice) -> list[tuple[str, nn.Module]]:
    """The submodules of a choice, outer ones first."""
    if choice is None:
        found = _repeated(module)
        return [(n, m) for n, m in module.named_modules() if id(m) in found and m is not module]
    wanted = (lambda m: isinstance(m, choice)) if isinstance(choice, tuple) else choice
    return [(n, m) for n, m in module.named_modules() if m is not module and wanted(m)]


def _repeated(module: nn.Module) -> set[int]:
    """Children of ModuleLists and Sequentials that have submodules of their own and a sibling of their class."""
    found: set[int] = set()
    for container in module.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            # Of a block that torch.compile has wrapped, the block.
            inner = [c._modules.get("_orig_mod") or c for c in container.children()]
            children = [c for c in inner if not is_container(c) and any(True for _ in c.children())]
            kinds = Counter(type(c) for c in children)
            found.update(id(c) for c in children if kinds[type(c)] > 1)
    return found


def is_container(module: nn.Module) -> bool:
    """Whether it has no forward of its own."""
    return type(module).forward in (nn.ModuleList.forward, nn.ModuleDict.forward)


# -- computed again ----------------------------------------------------------------------------------------------------


def checkpointed(module: nn.Module, options: Any) -> contextlib.ExitStack:
    """Until it is closed, chosen blocks keep only their inputs and run again in backward; BackendError where there are none."""
    undo, inside = contextlib.ExitStack(), set[int]()
    asked: Any = getattr(options, "activation_checkpointing", False)
    choice: Choice = getattr(options, "wrap", None) if asked is True else asked
    found = [m for _, m in chosen(module, choice) if not is_container(m)] if asked else []
    if asked and not found:
        raise BackendError(
            f"activation_checkpointing={asked} finds no blocks in this {type(module).__name__}: modules that repeat in a "
            "ModuleList or Sequential and have submodules; give their classes, activation_checkpointing=(Block,)"
        )
    for block in found:
        if id(block) not in inside:
            inside.update(id(m) for m in block.modules())
            undo.enter_context(replaced(vars(block), "forward", Recomputed(block.forward, block)))
    return undo


@final
class Recomputed:
    """A block's forward that keeps only its inputs. A copy or a pickle of the block runs its own."""

    def __init__(self, forward: Callable[..., Any], block: nn.Module) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._block = forward, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled graph writes buffers once, and guards the rest
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        return run_again(self._forward, list(self._block.modules()), args, kwargs)

    def of(self, replica: Any) -> Recomputed:
        return Recomputed(self._forward.__func__.__get__(replica), replica)  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        return self._forward.__reduce__()


def run_again(function: Callable[..., Any], modules: Sequence[nn.Module], args: Any, kwargs: Any) -> Any:
    """Call a function of these modules, whose activations are computed again in backward instead of kept."""
    again = _Again(modules)
    contexts = lambda: (contextlib.nullcontext(), again)  # noqa: E731
    # Caches of keys and values, as transformers has them: the first run adds to them.
    caches = {id(a): _structure(a) for a in (*args, *kwargs.values()) if hasattr(a, "get_seq_length")}

    def as_before(argument: Any) -> Any:
        return _structure(caches[id(argument)]) if id(argument) in caches else argument

    def call(*args: Any, **kwargs: Any) -> Any:
        if caches and again.inside:
            args, kwargs = tuple(map(as_before, args)), {key: as_before(value) for key, value in kwargs.items()}
        return function(*args, **kwargs)

    out = checkpoint(call, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    again.forward_ended()
    return out


class _Shared(TorchFunctionMode):
    """Inside, copies of tensors are the tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.Tensor.__deepcopy__ else function(*args, **(kwargs or {}))


def _structure(value: Any) -> Any:
    """A copy of an object down to its tensors, which are the same."""
    with _Shared():
        return copy.deepcopy(value)


_Buffer = tuple[nn.Module, str, torch.Tensor]
#: Bytes of a buffer of which a copy for each forward costs less than to wait for the device to compare it.
_SMALL: Final = 1 << 20


def buffers_of(modules: Iterable[nn.Module]) -> Iterator[_Buffer]:
    """Each buffer with its place."""
    return ((m, name, b) for m in modules for name, b in m._buffers.items() if b is not None)


@final
class _Again:
    """Around a second computation of a forward: it sees the buffers of the first one, and changes none.

    BatchNorm would count a batch twice, and a module that reads what it updates would see another value.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # The very objects: an engine may put others in their places and back.
        parameters = dict.fromkeys(p for m in modules for p in m._parameters.values() if p is not None)
        self._versions = [(p, p._version) for p in parameters]
        self._modes = [(m, m.training) for m in modules]
        self._before = _copied(buffers_of(modules))
        self._undo = contextlib.ExitStack()
        #: Whether it is being computed again.
        self.inside = False

    def forward_ended(self) -> None:
        """Let go of the old values of large buffers that the forward did not change; what is small is kept unread."""
        now = [m._buffers[name] for m, name, _ in self._before]
        same = {
            number: (old == new).all().to(self._before[0][2].device)
            for number, ((_, _, old), new) in enumerate(zip(self._before, now, strict=True))
            if old.nbytes > _SMALL and new is not None and _form(new) == _form(old)
        }
        if same:
            read = zip(same, torch.stack([*same.values()]).tolist(), strict=True)
            unchanged = {number for number, equal in read if equal}
            self._before = [entry for number, entry in enumerate(self._before) if number not in unchanged]

    def __enter__(self) -> None:
        if any(p._version != v for p, v in self._versions) or any(m.training is not t for m, t in self._modes):
            raise BackendError(
                "parameters, or train() and eval(), changed between a forward and its backward, which computes the "
                "activations again: call backward before the step, or do without activation checkpointing"
            )
        self._undo.enter_context(swapped(self._before))
        self.inside = True

    def __exit__(self, *error: object) -> None:
        self.inside = False
        self._undo.close()


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _copied(values: Iterable[_Buffer]) -> list[_Buffer]:
    """Copies of values; of what stands in several places, one."""
    copies: dict[int, torch.Tensor] = {}
    return [(m, name, copies.setdefault(id(v), v.clone())) for m, name, v in values]


@contextlib.contextmanager
def swapped(values: Iterable[_Buffer]) -> Iterator[None]:
    """Inside, copies of values are in buffers' places."""
    copies = _copied(values)
    own = [(m, name, m._buffers[name]) for m, name, _ in copies]
    for module, name, value in copies:
        module._buffers[name] = value
    try:
        yield
    finally:
        for module, name, buffer in own:
            module._buffers[name] = buffer
