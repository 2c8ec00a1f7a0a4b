"""Temporary patches of torch and other libraries.

Each one is made while an engine needs it, and tolerates that another library patches the same function.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, final

import torch

from ..errors import BackendError
from ..process.control import raise_lost
from ..trees import all_tensors, map_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_ABSENT: Final = object()
#: One thread at a time makes and removes patches: an engine may be collected in any thread.
changing: Final = threading.RLock()
os.register_at_fork(after_in_child=changing._at_fork_reinit)  # type: ignore[attr-defined]


#: Has ``get`` and items: ``vars`` of a module, another dict, or one of the classes below.
Table: TypeAlias = Any


@final
class _Layer:
    """A value that was put in the place of another one."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.value: Any = None
        #: False once nobody needs it, although another library may have kept it inside its own.
        self.active = True

    def is_at(self, current: Any) -> bool:
        # os.environ makes its strings anew.
        return self.value is current or (isinstance(current, str) and self.value == current)


@final
class Patch:
    """A replacement in a table, while an object needs it or inside of ``with``.

    ``make`` returns the replacement, from the layer that it is for.
    """

    def __init__(self, table: Table, name: Any, make: Callable[[_Layer], Any]) -> None:
        self._table = table
        self._name = name
        self._make = make
        self._layer: _Layer | None = None
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    def need(self, user: Any) -> None:
        """Keep the patch until ``user`` is collected, or ``drop(user)``."""
        with changing:
            if user not in self._users:
                self._users.add(user)
                weakref.finalize(user, self._prune).atexit = False
            self.__enter__()

    def drop(self, user: Any) -> None:
        """Remove the patch if nobody else needs it."""
        with changing:
            self._users.discard(user)
            self._prune()

    def users(self) -> list[Any]:
        """Return the objects that need the patch now."""
        return list(self._users)

    def _prune(self) -> None:
        with changing:
            if not self.users():
                self.__exit__()

    def __enter__(self) -> None:
        if self._layer is None:
            self._layer = _Layer(self._table.get(self._name, _ABSENT))
            self._layer.value = self._make(self._layer)
            self._table[self._name] = self._layer.value

    def __exit__(self, *error: object) -> None:
        """Put back the value from before, unless another library has put its own there since."""
        layer, self._layer = self._layer, None
        if layer is None:
            return
        layer.active = False
        if not layer.is_at(self._table.get(self._name, _ABSENT)):
            return
        if layer.before is _ABSENT:
            del self._table[self._name]
        else:
            self._table[self._name] = layer.before


def around(
    table: Table, name: Any, act: Callable[..., Any], default: Callable[..., Any] | None = None
) -> Patch:
    """Return a patch that calls ``act(original, *args, **kwargs)`` instead of a function.

    ``default`` is the original if the table has none.
    """

    def make(layer: _Layer) -> Callable[..., Any]:
        original: Any = default if layer.before is _ABSENT else layer.before

        def patched(*args: Any, **kwargs: Any) -> Any:
            return act(original, *args, **kwargs) if layer.active else original(*args, **kwargs)

        return functools.wraps(original)(patched)

    return Patch(table, name, make)


def replaced(table: Table, name: Any, value: Any) -> Patch:
    """Return a patch that puts ``value`` into the table."""
    return Patch(table, name, lambda layer: value)


def ignored(message: str = "", category: type[Warning] = Warning) -> Patch:
    """Return a patch that drops warnings that begin with the regular expression ``message``."""
    pattern = re.compile(message, re.IGNORECASE) if message else None
    entry: Any = ("ignore", pattern, category, None, 0)
    return replaced(_Filters(), entry, entry)


@final
class _Filters:
    """The filters of warnings as a table. ``warnings.catch_warnings`` replaces their list."""

    def get(self, entry: Any, default: Any) -> Any:
        return next((one for one in warnings.filters if one is entry), default)

    def __setitem__(self, entry: Any, value: Any) -> None:
        warnings.filters.insert(0, value)  # type: ignore[attr-defined, unused-ignore]

    def __delitem__(self, entry: Any) -> None:
        filters: Any = warnings.filters
        filters[:] = [one for one in filters if one is not entry]


# -- the begin and the end of each backward ----------------------------------------------------------------------------


class BackwardListener(Protocol):
    """The gradients of an engine, which follow each backward that leaves gradients in leaves."""

    def backward_begins(self) -> None:
        """Called before an outermost backward."""

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        """Called after any backward. ``completed`` is False if it raised."""


_dereference: Final = operator.methodcaller("__call__")
#: What torch's reducer says if a parameter gets two gradients in one backward.
_TWICE: Final = re.compile("mark a variable ready only once|undefined, but still allreduced")
_REENTRANT: Final = (
    "torch's reducer met a parameter twice in one backward. Use checkpoint(..., use_reentrant=False), or run "
    "forward and backward inside accel.no_sync(model)."
)


def _raise_meant(error: BaseException) -> None:
    """Raise accel's error for one of a lost rank, or of the reducer."""
    raise_lost("a backward", error)
    if _TWICE.search(str(error)) and not isinstance(error, BackendError):
        raise BackendError(_REENTRANT) from error


_INPUTS: Final = 4  # the place of ``inputs`` among the arguments of a backward


def backward_patches(
    listeners: Sequence[weakref.ref[BackwardListener]], leaf: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Patch, ...]:
    """Return patches of the function that torch.autograd.backward, Tensor.backward and checkpoints call.

    Two modules have it, because one imports it from the other. ``leaf`` returns the tensor that autograd knows in
    the place of a parameter among ``inputs``: VQGAN asks for the gradient of its last layer.
    """
    # Counted per process: a re-entrant checkpoint runs its backward in a thread of autograd's.
    depth = 0

    def make(layer: _Layer) -> Callable[..., Any]:
        original = layer.before

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if layer.active and args[_INPUTS]:
                inputs = map_tensors(leaf, args[_INPUTS], others=True)
                args = (*args[:_INPUTS], inputs, *args[_INPUTS + 1 :])
            # torch.autograd.grad leaves no gradients.
            if not layer.active or not kwargs.get("accumulate_grad", True):
                return original(*args, **kwargs)
            # Strong references, because an engine may be collected meanwhile.
            listening = list(filter(None, map(_dereference, listeners)))
            outermost = depth == 0
            depth += 1
            completed = False
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
                _raise_meant(error)
                raise
            finally:
                depth -= 1

        return patched

    modules = (torch.autograd, torch.autograd.graph)
    return tuple(Patch(vars(module), "_engine_run_backward", make) for module in modules)


# -- torch.compile of a handle -----------------------------------------------------------------------------------------


def compile_patch(kind: type[torch.nn.Module]) -> Patch:
    """Return a patch with which torch.compile compiles a handle's own model in place.

    Without it torch would compile the engine's code around the model, and return a module that is no handle.
    """

    def compile(original: Callable[..., Any], model: Any = None, **options: Any) -> Any:
        if type(model) is not kind:
            return original(model, **options)
        model.compile(**options)
        return model

    return around(vars(torch), "compile", compile)


# -- p.data = values of a shard ----------------------------------------------------------------------------------------


@final
class _ClassAttributes:
    """The attributes of a class itself, as a table."""

    def __init__(self, owner: type[Any]) -> None:
        self._owner = owner

    def get(self, name: str, default: Any) -> Any:
        return vars(self._owner).get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._owner, name)


def data_patch(take: Callable[[Any, torch.Tensor], bool]) -> Patch:
    """Let ``take`` handle ``p.data = values`` of a DTensor, unless it returns False.

    FSDP2 would silently keep the old values. Loops assign averaged weights like this.
    """
    from torch.distributed.tensor import DTensor

    def make(layer: _Layer) -> property:
        original: Any = torch.Tensor.data if layer.before is _ABSENT else layer.before

        def put(tensor: Any, value: torch.Tensor) -> None:
            if not (layer.active and take(tensor, value)):
                original.__set__(tensor, value)

        return property(original.__get__, put, doc=original.__doc__)

    return Patch(_ClassAttributes(DTensor), "data", make)


# -- operators of DTensor ----------------------------------------------------------------------------------------------
# Two kinds are silently wrong in torch: one number of a shard is this rank's, and an index along the sharded dimension
# is a copy, so writes to it are lost. Averages of weights (EMA) read shards into full tensors.

_aten: Final = torch.ops.aten
_NUMBER: Final = _aten._local_scalar_dense.default
#: The places of the dimensions among the arguments, with their defaults.
_CUTS: Final[Mapping[Any, Mapping[int, int]]] = {
    _aten.select.int: {1: 0},
    _aten.slice.Tensor: {1: 0},
    _aten.split.Tensor: {2: 0},
    _aten.split_with_sizes.default: {2: 0},
    _aten.diagonal.default: {2: 0, 3: 1},
}
#: The operators of torch's ``AveragedModel`` and of ``ema.lerp_(p, 0.1)``.
_AVERAGES: Final = (
    *(_aten.copy_.default, _aten.lerp.Scalar, _aten.lerp_.Scalar),
    *(_aten.add.Tensor, _aten.add_.Tensor, _aten.sub.Tensor, _aten.sub_.Tensor),
    *(_aten._foreach_add_.List, _aten._foreach_sub.List, _aten._foreach_lerp_.Scalar),
)


def shard_patches(
    backend: Callable[[DTensor], str],
    gather: Callable[[str, Sequence[DTensor]], list[torch.Tensor]],
) -> tuple[Patch, ...]:
    """Raise for ``item()`` and for writable cuts of a sharded tensor. Gather shards for an average of weights.

    Args:
        backend: returns the name of the backend that shards a tensor, or "".
        gather: returns the full tensors of shards. Collective; the text names the operation.
    """
    from torch.distributed.tensor import DTensor  # heavy

    def number(
        original: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        tensor = args[0]
        full = all(placement.is_replicate() for placement in tensor.placements)
        if full or not (name := backend(tensor)):
            return original(op, args, kwargs)
        raise BackendError(
            f"item(), float() or bool() of a tensor that backend {name!r} shards would see this rank's shard. "
            "Call tensor.full_tensor() on every rank first."
        )

    def cut(
        original: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        tensor = args[0]
        # Autograd refuses writes to a view of what requires gradients, and makes views itself in backward.
        safe = (
            torch.is_grad_enabled() and tensor.requires_grad
        ) or torch._C._current_graph_task_id() != -1
        if safe or not _cuts_shards(op, args) or not (name := backend(tensor)):
            return original(op, args, kwargs)
        raise BackendError(
            f"An index or slice of a tensor of shape {tuple(tensor.shape)} that backend {name!r} shards is a copy, so "
            "that writes to it are lost. Index tensor.full_tensor(), called on every rank."
        )

    def average(
        original: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        tensors = [tensor for _, tensor in all_tensors((args, kwargs))]
        shards = [t for t in tensors if isinstance(t, DTensor)]
        mixed = any(t.dim() and not isinstance(t, DTensor) for t in tensors)
        target = args[0] if op._schema.is_mutable else None
        into_shards = any(isinstance(t, DTensor) for _, t in all_tensors(target))
        graph = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        name = backend(shards[0]) if mixed and not into_shards and not graph else ""
        if not name:
            return original(op, args, kwargs)
        text = f"{op} of a full tensor and a shard of {tuple(shards[0].shape)} (backend {name!r})"
        full = dict(zip(map(id, shards), gather(text, shards), strict=True))
        args, kwargs = map_tensors(lambda t: full.get(id(t), t), (args, {**kwargs}), others=True)
        return op(*args, **kwargs)

    acts = {_NUMBER: number, **dict.fromkeys(_CUTS, cut), **dict.fromkeys(_AVERAGES, average)}
    # DTensor looks into this table before it does anything else.
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers

    def without_handler(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        handler = handlers.pop(op)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = handler

    return tuple(around(handlers, op, act, without_handler) for op, act in acts.items())


def _cuts_shards(op: Any, args: tuple[Any, ...]) -> bool:
    tensor = args[0]
    dims = [
        (args[at] if at < len(args) else default) % tensor.ndim for at, default in _CUTS[op].items()
    ]
    if op is _aten.slice.Tensor:
        defaults: tuple[Any, ...] = (None, None, 1)
        start, end, step = args[2:] + defaults[len(args) - 2 :]
        if not start and (end is None or end >= tensor.shape[dims[0]]) and step == 1:
            return False  # all of it
    return any(placement.is_shard(dim) for placement in tensor.placements for dim in dims)


# -- torch.optim.Muon --------------------------------------------------------------------------------------------------


@functools.cache
def muon_patch() -> Patch:
    """Return a patch with which Muon computes with full momenta, one at a time.

    DTensor would cut the products up, which rounds differently in bfloat16 and fails for a rank without rows.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    def orthogonalize(
        original: Callable[..., torch.Tensor], update: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(update, DTensor):
            return original(update, *args, **kwargs)
        full = original(update.full_tensor(), *args, **kwargs)
        return distribute_tensor(full, update.device_mesh, update.placements, src_data_rank=None)

    module: Any = torch.optim._muon
    return around(vars(module), "_zeropower_via_newtonschulz", orthogonalize)


# -- Attention and the mean of a loss see full sequences, of which each rank has a shard ---------------------------------
# They are also replaced under the names in the modules that define the model's classes: ``from torch.nn.functional import
# scaled_dot_product_attention`` makes a name of its own.


@functools.cache
def _function_patch(place: str, name: str, act: Callable[..., Any]) -> Patch:
    return around(vars(sys.modules[place]), name, act)


def sequence_patches(
    module: torch.nn.Module, attention: Callable[..., Any], cross_entropy: Callable[..., Any]
) -> list[Patch]:
    """Return patches that call ``attention`` and ``cross_entropy`` in the places of torch's functions."""
    places = {cls.__module__ for part in module.modules() for cls in type(part).__mro__}
    places = {p for p in places if p in sys.modules and not p.startswith("torch.")}
    patches = []
    for name, act in (
        ("scaled_dot_product_attention", attention),
        ("cross_entropy", cross_entropy),
    ):
        function = getattr(torch.nn.functional, name)
        known = {id(function), id(inspect.unwrap(function))}
        for place in sorted({torch.nn.functional.__name__, *places}):
            keys = [key for key, value in vars(sys.modules[place]).items() if id(value) in known]
            patches += [_function_patch(place, key, act) for key in keys]
    return patches
