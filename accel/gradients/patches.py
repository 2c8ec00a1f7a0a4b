"""Temporary patches of torch and other libraries.

A patch exists while an engine needs it. Other libraries may patch the same name.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor

from ..errors import BackendError
from ..process.control import raise_lost
from ..trees import map_tensors
from .hooks import runs_backward

#: A dict such as ``vars`` of a module, or ``Attributes``.
Table: TypeAlias = Any
_ABSENT: Final = object()
#: One thread at a time changes patches, because any thread may collect an engine as garbage.
changing: Final = threading.RLock()


@final
class Patch:
    """A replacement of ``table[name]`` while it is needed, or in ``with``.

    ``make(old_value)`` returns the new value.
    """

    def __init__(self, table: Table, name: Any, make: Callable[[Any], Any]) -> None:
        self._table, self._name, self._make = table, name, make
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._before: Any = None
        #: The new value in the table, or ``_ABSENT`` while nobody needs it.
        self._value: Any = _ABSENT

    def need(self, user: Any) -> None:
        """Install the patch until ``drop(user)``, or ``user`` is collected."""
        with changing:
            self._users.add(user)
            weakref.finalize(user, self._prune).atexit = False
            self.__enter__()

    def drop(self, user: Any) -> None:
        """Remove the patch if nobody else needs it."""
        self._users.discard(user)
        self._prune()

    def _prune(self) -> None:
        with changing:
            if not list(self._users):  # `len` would count a user that is being collected
                self.__exit__()

    def __enter__(self) -> None:
        if self._value is _ABSENT:
            self._before = self._table.get(self._name, _ABSENT)
            self._value = self._make(self._before)
            self._table[self._name] = self._value

    def __exit__(self, *error: object) -> None:
        """Put back the old value, unless a library has replaced ours."""
        value, self._value = self._value, _ABSENT
        now = self._table.get(self._name, _ABSENT)
        # os.environ returns a new string each time, so `is` doesn't find our value there.
        if now is not value and not (isinstance(now, str) and now == value):
            return
        if self._before is not _ABSENT:
            self._table[self._name] = self._before
        elif now is not _ABSENT:
            del self._table[self._name]


def around(table: Table, name: Any, act: Callable[..., Any]) -> Patch:
    """Return a patch to call ``act(original, ...)`` instead of a function.

    Libraries may wrap and keep it, so ``act`` must be harmless after removal.
    """
    return Patch(table, name, lambda original: functools.wraps(original)(partial(act, original)))


def replaced(table: Table, name: Any, value: Any) -> Patch:
    """Return a patch to put ``value`` into the table."""
    return Patch(table, name, lambda before: value)


@final
class Attributes:
    """An object's attributes as a table, such as those of a closure cell."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, name: str, default: Any) -> Any:
        return getattr(self._owner, name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)


# -- the start and the end of each backward --------------------------------------------------------


#: The engines' ``Gradients``, with methods ``backward_begins`` and ``backward_ends``.
Listeners: TypeAlias = list[weakref.ref[Any]]
_dereference: Final = weakref.ref.__call__
_INPUTS: Final = 4  # the index of ``inputs`` in the arguments of a backward


def backward_patches(listeners: Listeners, leaf: Callable[[Tensor], Tensor]) -> tuple[Patch, ...]:
    """Return patches of the function behind ``backward()`` and ``grad()``.

    ``leaf`` maps a parameter in ``inputs`` to autograd's leaf for it.
    """
    # One count for all threads: re-entrant checkpointing runs a backward in autograd's thread.
    depth = 0

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if args[_INPUTS]:  # VQGAN asks for the gradient of its last layer
            inputs = map_tensors(leaf, args[_INPUTS])
            args = (*args[:_INPUTS], inputs, *args[_INPUTS + 1 :])
        if not kwargs.get("accumulate_grad", True):  # torch.autograd.grad writes no p.grad
            return original(*args, **kwargs)
        # Strong references, because an engine could be collected during the backward. This runs in
        # every backward, so it uses map, which is faster than a comprehension.
        listening: list[Any] = list(filter(None, map(_dereference, listeners)))
        outermost, completed = depth == 0, False
        depth += 1
        try:
            for listener in listening if outermost else ():
                listener.backward_begins()
            result = original(*args, **kwargs)
            completed = True
            for listener in listening:
                listener.backward_ends(True, outermost)
            return result
        except BaseException as error:
            for listener in () if completed else listening:
                listener.backward_ends(False, outermost)
            raise_lost("a backward", error)
            raise
        finally:
            depth -= 1

    # Patch both, because torch.autograd imports the function's name from torch.autograd.graph.
    modules = (torch.autograd, torch.autograd.graph)
    return tuple(around(vars(module), "_engine_run_backward", run) for module in modules)


# -- torch.compile of a handle ---------------------------------------------------------------------


def compile_patch(kind: type[torch.nn.Module]) -> Patch:
    """Return a patch for ``torch.compile`` to compile a handle's model.

    Without it, torch would compile the engine's code around the model.
    """

    def compile(original: Callable[..., Any], model: Any = None, **options: Any) -> Any:
        if type(model) is not kind:
            return original(model, **options)
        model.compile(**options)
        return model

    return around(vars(torch), "compile", compile)


# -- sharded tensors of torch (DTensor) ------------------------------------------------------------

_aten: Final = torch.ops.aten
_NUMBER: Final = _aten._local_scalar_dense.default
#: By operator: the argument index of each dimension, and the default dimension.
_CUTS: Final[Mapping[Any, Mapping[int, int]]] = {
    _aten.select.int: {1: 0},
    _aten.slice.Tensor: {1: 0},
    _aten.split.Tensor: {2: 0},
    _aten.split_with_sizes.default: {2: 0},
    _aten.diagonal.default: {2: 0, 3: 1},
}


def shard_patches() -> tuple[Patch, ...]:
    """Return patches to raise for ``item()`` and writable slices of shards.

    Torch would silently return this rank's number, or a copy.
    """
    from torch.distributed.tensor import DTensor  # heavy

    # DTensor looks up an operator in this table before it does anything else.
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers

    def handle(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if _is_silent(op, args):
            raise BackendError(
                f"item() or indexing of a sharded tensor of shape {tuple(args[0].shape)} would "
                "use only this rank's shard. Call tensor.full_tensor() on every rank first."
            )
        handler = handlers.pop(op)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = handler

    return tuple(replaced(handlers, op, handle) for op in (_NUMBER, *_CUTS))


def _is_silent(op: Any, args: tuple[Any, ...]) -> bool:
    tensor = args[0]
    if op is _NUMBER:
        return not all(placement.is_replicate() for placement in tensor.placements)
    # Autograd itself raises for writes to views of a leaf, and creates views in a backward.
    is_leaf = torch.is_grad_enabled() and tensor.requires_grad
    if is_leaf or runs_backward():
        return False
    for at, default in _CUTS[op].items():
        dim = args[at] if at < len(args) else default
        if any(placement.is_shard(dim % tensor.ndim) for placement in tensor.placements):
            return True
    return False


def muon_patch() -> Patch:
    """Return a patch for Muon to gather each momentum before its step.

    Matrix products of DTensors would round differently in bfloat16.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    def orthogonalize(original: Callable[..., Any], update: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(update, DTensor):
            return original(update, *args, **kwargs)
        full = original(update.full_tensor(), *args, **kwargs)
        return distribute_tensor(full, update.device_mesh, update.placements, src_data_rank=None)

    module = sys.modules["torch.optim._muon"]
    return around(vars(module), "_zeropower_via_newtonschulz", orthogonalize)


def data_patch() -> Patch:
    """Return a patch for ``p.data = value`` to call ``p.set_data(value)``."""
    from torch.distributed.tensor import DTensor

    data: Any = Tensor.data

    def put(tensor: Any, value: Tensor) -> None:
        vars(tensor).get("set_data", partial(data.__set__, tensor))(value)

    return replaced(Attributes(DTensor), "data", property(data.__get__, put))


# -- attention and cross entropy of sharded sequences ---------------------------------------------


@functools.cache
def _function_patch(place: str, name: str, act: Callable[..., Any]) -> Patch:
    return around(vars(sys.modules[place]), name, act)


def sequence_patches(
    module: torch.nn.Module, attention: Callable[..., Any], cross_entropy: Callable[..., Any]
) -> list[Patch]:
    """Return patches to call these instead of torch's functions."""
    functional = torch.nn.functional
    acts = {}
    for function, act in (
        (functional.scaled_dot_product_attention, attention),
        (functional.cross_entropy, cross_entropy),
    ):
        acts[id(function)] = acts[id(inspect.unwrap(function))] = act
    # ``from torch.nn.functional import cross_entropy`` creates a name in the model's module.
    places = {functional.__name__}
    for child in module.modules():
        for cls in type(child).__mro__:
            if not cls.__module__.startswith("torch."):
                places.add(cls.__module__)
    patches = []
    for place in sorted(places & sys.modules.keys()):
        for key, value in vars(sys.modules[place]).items():
            if id(value) in acts:
                patches.append(_function_patch(place, key, acts[id(value)]))
    return patches
