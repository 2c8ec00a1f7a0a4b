"""Stage 3 of DeepSpeed: each rank holds a part of every parameter."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any, Final, final

import torch
from torch import nn

from ...errors import BackendError
from ...process import Process
from ...process.control import Waiting, announce, is_lost
from ...trees import walk
from ..base.absent import plainly
from .library import library
from .partitions import Partitions
from .weights import Stage3Weights, promise, set_grad, take_back

# -- DeepSpeed's coordinator of gathers --------------------------------------------------------------------------------
# Where stage 3 decides which weights to gather: what its coordinator and its modules' dicts do otherwise here.

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
    coordinator: Any, model: Any, process: Process, label: str, backward: weakref.WeakMethod[Callable[[], None]]
) -> None:
    """Announce which modules gather weights, theirs or in advance, and tell ``backward`` of one. Small weights stay gathered."""
    fetch, reset = coordinator.fetch_sub_module, coordinator.reset_step
    divided = any(not p.ds_persist for p in model.parameters())
    texts = {id(m): f"the gathering of {n or 'the model itself'}" for n, m in model.named_modules()}
    waits = {
        (key, forward): (what := f"{text} for its {kind} ({label})", Waiting(process, what))
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

    start = f"the start of a forward ({label})"
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


_STAGE3: Final = "_DeepSpeedZeroOptimizer_Stage3__"
_INFLIGHT: Final = "_PartitionedParameterCoordinator__inflight_param_registry"


class _Gradients(dict[int, torch.Tensor]):
    """Where stage 3 adds a reduced gradient, made when it is asked for; a second one is added in the weights' dtype."""

    def __init__(self, sharded: Stage3) -> None:
        super().__init__()
        self._sharded = sharded

    def __getitem__(self, ds_id: int) -> torch.Tensor:
        if ds_id in self:
            self.widen(ds_id)
        else:
            shard, weights = self._sharded.by_id[ds_id].ds_tensor, self._sharded.weights_of(ds_id)
            self[ds_id] = torch.zeros(shard.ds_numel, dtype=shard.dtype, device=weights.device)
        return super().__getitem__(ds_id)

    def widen(self, ds_id: int) -> None:
        """Keep one in the dtype of the weights."""
        self[ds_id] = super().__getitem__(ds_id).to(self._sharded.weights_of(ds_id).dtype)


@final
class Stage3(Partitions):
    """Stage 3: every rank holds a part of each parameter, and gathers the rest when a module runs."""

    divides_weights = True
    eager = True
    _running = 0
    _versions: list[int]

    def start(self, config: dict[str, Any], device: torch.device) -> None:
        """Divide the model."""
        super().start(config, device)
        self._note_versions()

    def arrange(self) -> None:
        """A fragment for each parameter of which this rank's part is not padding only."""
        zero = self.zero
        for hook in (*zero._grad_acc_hooks, *zero._leaf_module_hooks):
            hook.remove()
        zero._grad_acc_hooks.clear()
        zero._leaf_module_hooks.clear()
        self.by_id: dict[int, Any] = {p.ds_id: p for p in self.divided.values()}  # type: ignore[attr-defined]
        for index, parameter in enumerate(self.parameters):
            shard = parameter.ds_tensor  # type: ignore[attr-defined]
            start = shard.ds_numel * parameter.ds_zero_partition_rank  # type: ignore[attr-defined]
            num = min(shard.ds_numel, self.shapes[index].numel() - start)
            if num > 0:
                self.own(index, start, shard.data.narrow(0, 0, num))
        setattr(zero, f"{_STAGE3}param_id_to_grad_partition", gradients := _Gradients(self))
        self._gradients = gradients
        zero.grad_partitions_flat_buffer = None
        zero.offload_optimizer = False
        zero.micro_step_id = 1  # anything but 0 adds
        for flat in zero.fp32_partitioned_groups_flat:
            flat.grad = None
        zero.fp32_partitioned_groups_flat = []
        free_coordinator(zero.parameter_offload.get_param_coordinator())
        # The module is only pushed while it runs: a module on the library's global stack would never be freed.
        self._stack = library("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
        self._stack[:] = [m for m in self._stack if m is not self.module]
        coordinator = zero.parameter_offload.get_param_coordinator()
        name, numbers, buckets = f"{_STAGE3}reduce_and_partition_ipg_grads", self.numbers, zero.ipg_buckets
        came = lambda dtype: tuple(numbers[id(p)] for p in buckets[dtype].params)  # noqa: E731
        setattr(zero, name, self.announced(getattr(zero, name), came))
        watch_order(coordinator, self.module, self.process, self.label, weakref.WeakMethod(self.enter_backward))
        watch_library(coordinator)
        method = weakref.WeakMethod(self.reveal)
        reveal = lambda weight: (bound := method()) is not None and bound(weight)  # noqa: E731
        kind = waiting_dict(type(self.module._parameters), reveal)
        for module in self.module.modules():
            module._parameters.__class__ = kind
        shorten_methods(self.module.modules())
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            self.snapshot.change_hooks(name, among_tensors)
        self.weights = Stage3Weights(self.module, reveal, self.process, self.label)
        adopt = weakref.WeakMethod(self.adopt)
        for weight in self.parameters:
            vars(weight)["partition"] = adopting(adopt, vars(weight)["partition"])

    @plainly
    @torch.no_grad()
    def adopt(self, weights: Sequence[Any]) -> None:
        """Give the optimizer the values that the library has taken over."""
        for weight in weights:
            index = self.numbers[id(weight)]
            self._versions[index] = weight._version
            fragment = self.fragments.get(index)
            if fragment is not None and fragment.weights.data_ptr() != fragment.home.data_ptr():
                fragment.weights.copy_(fragment.home)

    @plainly
    def take_edits(self) -> list[int]:
        """The library's own copies would undo them."""
        return [i for i, (p, old) in enumerate(zip(self.parameters, self._versions, strict=True)) if p._version != old]

    @plainly
    def _note_versions(self) -> None:
        self._versions = [p._version for p in self.parameters]

    def spread(self) -> None:
        """Take the weights as they are then."""
        super().spread()
        self._note_versions()

    def make_scalar(self, parameter: Any) -> None:
        """In what the library remembers of it."""
        parameter.ds_shape = torch.Size(())
        if parameter.data.numel():
            super().make_scalar(parameter)

    def weights_of(self, ds_id: int) -> torch.Tensor:
        """The weights that a gradient is for."""
        index = self.numbers[id(self.by_id[ds_id])]
        return self.fragments[index].weights

    def buckets(self) -> list[torch.Tensor]:
        """The library's flat buffers."""
        return [bucket.buffer for bucket in self.zero.ipg_buckets.values() if bucket.buffer is not None]

    @plainly
    def offer(self, index: int) -> None:
        """Zeros where this rank has no gradient."""
        parameter = self.parameters[index]
        if parameter.grad is None:
            set_grad(parameter, torch.zeros(self.shapes[index], dtype=parameter.dtype, device=parameter.device))

    @plainly
    def take(self, index: int) -> None:
        """Into the library's bucket."""
        self.zero.reduce_independent_p_g_buckets_and_remove_grads(self.parameters[index])

    @plainly
    def finish(self) -> None:
        """Reduce what is in the buckets, and let go of modules whose own hook did not fire."""
        zero = self.zero
        for dtype in list(zero.ipg_buckets):
            getattr(zero, f"{_STAGE3}reduce_and_partition_ipg_grads")(dtype)
        stream = zero.reduce_and_partition_stream
        if stream is not None:
            stream.synchronize()
        for number in zero.params_already_reduced:
            zero.params_already_reduced[number] = False
        self._hand_out()
        if len(self.backwards) <= 1:  # the backward around a reentrant checkpoint's still needs its weights
            zero.parameter_offload.release_backward_leftovers()

    def widen(self) -> None:
        """Of what the library adds to."""
        for ds_id in self._gradients:
            self._gradients.widen(ds_id)
        self._hand_out()

    def _hand_out(self) -> None:
        """A fragment's gradient is what the library has added, without the padding."""
        for ds_id, grad in self._gradients.items():
            fragment = self.fragments[self.numbers[id(self.by_id[ds_id])]]
            fragment.grad = grad.narrow(0, 0, fragment.home.numel())

    @plainly
    def drop(self, indices: Sequence[int], set_to_none: bool) -> None:
        """Also what the library adds to."""
        super().drop(indices, set_to_none)
        if set_to_none:
            for index in indices:
                self._gradients.pop(self.parameters[index].ds_id, None)  # type: ignore[attr-defined]

    def reset(self) -> None:
        """Empty the buckets and gather nothing but what always is."""
        super().reset()
        zero = self.zero
        self._stack.clear()
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
            bucket.elements = 0
        for module in self.module.modules():
            for name in ("ds_grads_remaining", "applied_pre_backward_ref_cnt"):
                if name in vars(module):
                    setattr(module, name, 0)
        for parameter in self.by_id.values():
            parameter.ds_active_sub_modules.clear()
        zero.parameter_offload.release_backward_leftovers()
        self.gather()

    def gather(self) -> None:
        """Forget gathered weights, which are old now; small ones are gathered for good."""
        self.scatter()
        always = self.zero.persistent_parameters
        if always:
            always[0].all_gather(always)

    def scatter(self) -> None:
        """Keep this rank's shards only."""
        self.zero._partition_all_parameters()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A parameter that a module reads from another one is gathered while the model runs."""
        depth = len(self._stack)
        self._stack.append(self.module)
        for module in self.module.modules():
            module._parameters._in_forward = True  # type: ignore[attr-defined]
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            del self._stack[depth:]
            for module in self.module.modules():
                module._parameters._in_forward = self._running > 0  # type: ignore[attr-defined]

    def reveal(self, weight: Any) -> bool:
        """Gather a weight that the running forward reads beside its modules' own; False where none runs. Collective."""
        if not self._running:
            return False
        handle = getattr(self.zero.parameter_offload.get_param_coordinator(), _INFLIGHT).pop(weight, None)
        if handle is not None:
            plainly(handle.wait)()
        library("deepspeed.runtime.zero").register_external_parameter(self._stack[-1], weight)
        weight.all_gather()  # announced by its own method
        return True

    def call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """With the library's hooks of a forward around it, and none of the user's."""
        with self.forward():
            for hook in self.snapshot.hooks("_forward_pre_hooks"):
                if (changed := hook(self.module, args)) is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
            out = method(*args, **kwargs)
            for hook in self.snapshot.hooks("_forward_hooks"):
                if (changed := hook(self.module, args, out)) is not None:
                    out = changed
            return out

    def is_divided(self, index: int) -> bool:
        """All are."""
        return True

    def here(self, index: int) -> torch.Tensor:
        """No rank has one."""
        parameter = self.parameters[index]
        blank = float("nan") if parameter.is_floating_point() else 0
        return torch.full(self.shapes[index], blank, dtype=parameter.dtype, device=parameter.device)

    def end(self, full: Sequence[torch.Tensor]) -> None:
        """Let go of the shards as well."""
        try:
            self.scatter()
        except (
            RuntimeError
        ) as error:  # of a gathering that other ranks never came to: it goes with the library's objects
            if not is_lost(error):
                raise
        self.weights.open()
        super().end(full)
