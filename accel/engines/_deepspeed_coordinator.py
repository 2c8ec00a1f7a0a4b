"""Where stage 3 decides which weights to gather: what its coordinator and its modules' dicts do otherwise here."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Final, final

import torch
from torch import nn

from ..control import Waiting, announce
from ..errors import BackendError
from ..process import Process
from ..trees import walk
from ._deepspeed_library import library
from ._deepspeed_weights import plainly, promise, take_back

_KEPT: Final = object()


@final
class Method:
    """A bound method whose repr is not its owner's: some modules (``EmbeddingBag``) show all of their attributes in theirs."""

    def __init__(self, function: Callable[..., Any], owner: Any) -> None:
        self._function = function
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._owner, *args, **kwargs)


def shorten_methods(modules: Iterable[Any]) -> None:
    """Let no method that the library has bound to a module show the module."""
    for module in modules:
        for name in ("all_parameters", "ds_external_parameters"):
            if isinstance(bound := vars(module).get(name), MethodType):
                vars(module)[name] = Method(bound.__func__, module)


def among_tensors(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of the library's, which gets the tensors of a module's inputs or output and gives others for them.

    By itself it fails at what has neither items nor attributes, and finds no tensor in a dataclass.
    """

    def call(module: Any, *values: Any) -> Any:
        found: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        _exchange(note, values[-1])
        changed = hook(module, *values[:-1], found)
        if changed is None:
            return None
        made = iter(changed)
        return _exchange(lambda _: next(made), values[-1])

    return call


def _exchange(give: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree with another tensor for each; in an object of another kind they are exchanged in place."""

    def visit(_: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return give(leaf)
        if hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            own = vars(leaf)
            own.update({n: give(v) for n, v in own.items() if isinstance(v, torch.Tensor) and v.grad_fn is not None})
        return leaf

    return walk(visit, tree, "")


def watch_order(
    coordinator: Any, model: Any, process: Process, title: str, backward: weakref.WeakMethod[Callable[[], None]]
) -> None:
    """Announce which modules gather weights, theirs or in advance, and tell ``backward`` of one. Small weights stay gathered."""
    fetch, reset = coordinator.fetch_sub_module, coordinator.reset_step
    divided = any(not p.ds_persist for p in model.parameters())
    texts = {id(m): f"the gathering of {n or 'the model itself'}" for n, m in model.named_modules()}
    waits = {
        (key, forward): (what := f"{text} for its {kind} ({title})", Waiting(process, what))
        for key, text in texts.items()
        for forward, kind in ((True, "forward"), (False, "backward"))
    }

    def fetching(module: Any, forward: bool) -> None:
        if not forward and (enter := backward()) is not None:
            enter()
        what, waiting = waits[id(module), forward]
        if divided:
            announce(process, what)
        with waiting:
            fetch(module, forward)

    start = f"the start of a forward ({title})"
    in_start = Waiting(process, start)

    def resetting() -> None:
        if divided:
            announce(process, start)
        with in_start:
            reset()

    coordinator.fetch_sub_module, coordinator.reset_step = fetching, resetting


def adopting(adopt: weakref.WeakMethod[Callable[[Any], None]], partition: Callable[..., Any]) -> Callable[..., Any]:
    """The library's ``partition``, which ``GatheredParameters(..., modifier_rank=...)`` calls for weights that it changed."""

    def call(param_list: Any = None, has_been_updated: bool = False, **options: Any) -> None:
        partition(param_list, has_been_updated=has_been_updated, **options)
        if has_been_updated and (method := adopt()) is not None:
            method(param_list)

    return call


def waiting_dict(kind: type[Any], reveal: Callable[[Any], bool]) -> type[Any]:
    """The library's dict of a module's parameters, which waits for one that is being gathered ahead of its own module.

    Another module that reads such a parameter would find it empty, and compute with that.
    """
    library_get = kind.__getitem__

    def get(parameters: Any, name: str) -> Any:
        parameter = OrderedDict.__getitem__(parameters, name)
        if parameters._in_forward and getattr(getattr(parameter, "ds_status", None), "name", "") == "INFLIGHT":
            reveal(parameter)
        return library_get(parameters, name)

    def put(parameters: Any, name: str, value: Any) -> None:
        if name in parameters and isinstance(value, torch.Tensor) and not hasattr(value, "ds_id"):
            raise BackendError(
                f"another tensor in the place of the parameter {name!r}: DeepSpeed stage 3 gathers the model's own parameters; "
                "for torch.func.functional_call use stage 2, or compute with torch.nn.functional; to replace a parameter, call "
                "raw = accel.teardown(model), and set it up again"
            )
        OrderedDict.__setitem__(parameters, name, value)

    return type(kind.__name__, (kind,), {"__getitem__": get, "__setitem__": put})


def free_coordinator(coordinator: Any) -> None:
    """Its method with a cache keeps every coordinator, and so every model, for good: the cache moves to the object."""
    name = "_PartitionedParameterCoordinator__params_to_release"
    cached = inspect.getclosurevars(getattr(type(coordinator), name)).nonlocals["func"]
    method = inspect.unwrap(cached)
    reference = weakref.ref(coordinator)
    cache: dict[tuple[int, int], set[int]] = {}
    order: list[Any] = [None]

    def params_to_release(module: Any, step: int) -> set[int]:
        owner: Any = reference()
        trace = owner._PartitionedParameterCoordinator__submodule_order
        if trace is not order[0]:  # another trace of the model
            cache.clear()
            order[0] = trace
        key = (module.ds_id, step)
        if key not in cache:
            cache[key] = method(owner, module, step)
        return cache[key]

    setattr(coordinator, name, params_to_release)


@final
class _Weights:
    """The weights that are gathered with a module: those that stay whole, and the others. They are listed once."""

    def __init__(self) -> None:
        self._home = library("deepspeed.runtime.zero.partitioned_param_coordinator")
        self._known: dict[int, tuple[list[Any], list[Any]]] = {}

    def of(self, module: Any) -> tuple[list[Any], list[Any]]:
        """Of one module."""
        if module.ds_id not in self._known:
            weights = list(self._home.iter_params(module, recurse=self._home.z3_leaf_module(module)))
            self._known[module.ds_id] = [w for w in weights if w.ds_persist], [w for w in weights if not w.ds_persist]
        return self._known[module.ds_id]


def watch_library(coordinator: Any) -> None:
    """Let the library's hooks work on plain tensors; a module's weights are promised from its fetch to its release."""
    fetch, release, weights = coordinator.fetch_sub_module, coordinator.release_sub_module, _Weights()

    def fetch_sub_module(module: Any, forward: bool) -> None:
        fetch(module, forward)
        for part in weights.of(module):
            promise(part)

    def release_sub_module(module: Any, forward: bool = False) -> None:
        kept, others = weights.of(module)
        for weight in kept:  # the library releases them too before it knows the order of the modules
            weight.ds_active_sub_modules.add(_KEPT)
        release(module, forward)
        for weight in kept:
            weight.ds_active_sub_modules.discard(_KEPT)
        take_back(others)

    coordinator.fetch_sub_module = plainly(fetch_sub_module)
    coordinator.release_sub_module = plainly(release_sub_module)
    for name in ("reset_step", "trace_prologue", "release_and_reset_all", "release_backward_leftovers"):
        setattr(coordinator, name, plainly(getattr(coordinator, name)))
