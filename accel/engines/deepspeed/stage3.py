"""Stage 3 of DeepSpeed: each rank holds a part of every parameter."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from types import MethodType
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from ...process import Process
from ...process.control import Waiting, announce, is_lost
from ...process.packing import row_of
from ...trees import exchange
from ..base.absent import plainly, recorded, refuse_other_tensor
from .library import OF_COORDINATOR, OF_STAGE3, accelerator, library
from .partitions import Fragment, Partitions
from .weights import Method, Stage3Weights, promise, set_grad, take_back

# -- What DeepSpeed's coordinator of gathers, and its modules' dicts, do otherwise here --------------------------------

_KEPT: Final = object()


def tidy(module: Any) -> None:
    """Let no method that the library has bound to a module show it, and torch know the signatures of its functions."""
    for name in ("all_parameters", "ds_external_parameters"):
        if isinstance(bound := vars(module).get(name), MethodType):
            vars(module)[name] = Method(bound.__func__, module)
    for kind in filter(None, map(vars(module).get, ("pre_bwd_fn", "post_bwd_fn"))):
        kind.forward.__signature__ = inspect.signature(kind.forward)  # else found anew whenever one is applied


def among_tensors(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of the library's, which gets the tensors of a module's inputs or output and gives others for them.

    By itself it fails at what has neither items nor attributes, and finds no tensor in a dataclass.
    """

    def call(module: Any, *values: Any) -> Any:
        tree = values[-1]
        single = type(tree) is tuple and len(tree) == 1
        leaf = tree[0] if single else tree
        if isinstance(leaf, torch.Tensor):  # as most modules have it
            changed = hook(module, *values[:-1], [leaf])
            return changed and (tuple(changed) if single else changed[0])
        found: dict[int, torch.Tensor] = {}
        _exchange(lambda tensor: found.setdefault(id(tensor), tensor), tree)
        changed = hook(module, *values[:-1], list(found.values()))
        if changed is None:
            return None
        made = dict(zip(found, changed, strict=True))  # attention(x, x, x) computes otherwise with three tensors
        return _exchange(lambda tensor: made.get(id(tensor), tensor), tree)

    return _disable_dynamo(call)


def _exchange(give: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree with another tensor for each, but for leaves in objects, which are somebody's own."""
    return exchange(give, tree, lambda tensor: tensor if tensor.grad_fn is None else give(tensor))


def _lister() -> Callable[[Any], tuple[list[Any], list[Any]]]:
    """Lists the weights that are gathered with a module: those that stay whole, and the others; again if it reads another's."""
    home = library("deepspeed.runtime.zero.partitioned_param_coordinator")

    @functools.cache
    def listed(module: Any, _: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
        weights = list(home.iter_params(module, recurse=home.z3_leaf_module(module)))
        return [w for w in weights if w.ds_persist], [w for w in weights if not w.ds_persist]

    return lambda module: listed(module, tuple(module._external_params))


def _announcer(model: Any, process: Process, label: str) -> Callable[[Any, str], Waiting]:
    """Announces, where weights are divided, that a module gathers its own for a forward or backward, or that None starts one."""
    divided = any(not p.ds_persist for p in model.parameters())
    texts = {id(m): f"the gathering of {name or 'the model itself'} for its" for name, m in model.named_modules()}
    texts[id(None)] = "the start of a"

    @functools.cache
    def at(key: int, kind: str) -> tuple[str, Waiting]:
        what = f"{texts[key]} {kind} ({label})"
        return what, Waiting(process, what)

    def announced(module: Any, kind: str) -> Waiting:
        what, waiting = at(id(module), kind)
        if divided:
            announce(process, what)
        return waiting

    return announced


def watch(coordinator: Any, announced: Callable[[Any, str], Waiting], backward: weakref.WeakMethod[Any]) -> None:
    """Announce what gathers weights, theirs or in advance, and tell ``backward`` of one; hooks work on plain tensors.

    A module's weights are promised from its fetch to its release. Small weights stay gathered.
    """
    fetch, release, reset = coordinator.fetch_sub_module, coordinator.release_sub_module, coordinator.reset_step
    weights_of = _lister()

    def fetch_sub_module(module: Any, forward: bool) -> None:
        if not forward and (enter := backward()) is not None:
            enter()
        with announced(module, "forward" if forward else "backward"):
            fetch(module, forward)
        kept, others = weights_of(module)
        promise(kept)
        promise(others)

    def release_sub_module(module: Any, forward: bool = False) -> None:
        if not (forward or getattr(coordinator, f"{OF_COORDINATOR}active_backward_submodules")):
            return  # a second backward of one graph, which has gathered nothing
        kept, others = weights_of(module)
        for weight in kept:  # the library releases them too before it knows the order of the modules
            weight.ds_active_sub_modules.add(_KEPT)
        release(module, forward)
        for weight in kept:
            weight.ds_active_sub_modules.discard(_KEPT)
        take_back(others)

    def reset_step() -> None:
        with announced(None, "forward"):
            reset()

    for method in (fetch_sub_module, release_sub_module, reset_step):
        # Outside of compiled graphs, as the library's own are.
        setattr(coordinator, method.__name__, _disable_dynamo(recorded(plainly(method))))
    for name in ("trace_prologue", "release_and_reset_all", "release_backward_leftovers"):
        setattr(coordinator, name, plainly(getattr(coordinator, name)))


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
            refuse_other_tensor(name, "DeepSpeed stage 3")
        OrderedDict.__setitem__(parameters, name, value)

    return type(kind.__name__, (kind,), {"__getitem__": get, "__setitem__": put})


def free_coordinator(coordinator: Any) -> None:
    """Its method with a cache keeps every coordinator, and so every model, for good: the cache moves to the object."""
    name, trace = f"{OF_COORDINATOR}params_to_release", None
    method = inspect.unwrap(inspect.getclosurevars(getattr(type(coordinator), name)).nonlocals["func"])
    reference = weakref.ref(coordinator)
    cached = functools.cache(lambda module, step: method(reference(), module, step))

    def params_to_release(module: Any, step: int) -> Any:
        nonlocal trace
        before, trace = trace, getattr(reference(), f"{OF_COORDINATOR}submodule_order")
        if trace is not before:  # another trace of the model
            cached.cache_clear()
        return cached(module, step)

    setattr(coordinator, name, params_to_release)


class _Gradients(dict[int, torch.Tensor]):
    """Where stage 3 adds a reduced gradient, made when it is asked for; a second one is added in the weights' dtype."""

    def __init__(self, owned: dict[int, tuple[Any, Fragment]]) -> None:
        super().__init__()
        self._owned = owned

    def __getitem__(self, ds_id: int) -> torch.Tensor:
        shard, fragment = self._owned[ds_id]
        weights, pinned = fragment.weights, fragment.pinned
        if ds_id not in self:
            self[ds_id] = torch.zeros(shard.ds_numel, dtype=shard.dtype, device=weights.device, pin_memory=pinned)
        elif (grad := super().__getitem__(ds_id)).dtype is not weights.dtype:
            if pinned:  # the host reads it, and it may be on its way
                accelerator().synchronize()
            self[ds_id] = grad.to(weights.dtype)
        return super().__getitem__(ds_id)

    def hand_out(self) -> None:
        """A fragment's gradient is what the library has added, without the padding."""
        for ds_id, grad in self.items():
            fragment = self._owned[ds_id][1]
            fragment.grad = grad.narrow(0, 0, fragment.home.numel())


@final
class Stage3(Partitions):
    """Stage 3: every rank holds a part of each parameter, and gathers the rest when a module runs."""

    divides_weights = True
    _running = 0
    _versions: list[int]

    def start(self, config: dict[str, Any], device: torch.device) -> None:
        for parameter in self.parameters:
            # Of channels_last, or of one element: the library sends a weight's memory.
            if not parameter.is_contiguous() or parameter.stride()[-1:] not in ((), (1,)):
                parameter.data = row_of(parameter.data.contiguous()).view(parameter.shape)
        super().start(config, device)
        self._note_versions()
        self._order_gathers()

    def arrange(self) -> None:
        """A fragment for each parameter of which this rank's part is not padding only."""
        zero, owned = self.zero, {}
        parameters: Sequence[Any] = self.parameters
        for index, parameter in enumerate(parameters):
            shard = parameter.ds_tensor
            start = shard.ds_numel * parameter.ds_zero_partition_rank
            parameter.ds_shape = self.shapes[index]  # a scalar was shown with one dimension
            num = min(shard.ds_numel, self.shapes[index].numel() - start)
            if num > 0:
                self.own(index, start, shard.data.narrow(0, 0, num))
                owned[parameter.ds_id] = shard, self.fragments[index]
        self._gradients = _Gradients(owned)
        setattr(zero, f"{OF_STAGE3}param_id_to_grad_partition", self._gradients)
        zero.grad_partitions_flat_buffer = None
        zero.offload_optimizer = False
        zero.micro_step_id = 1  # anything but 0 adds
        for flat in zero.fp32_partitioned_groups_flat:
            flat.grad = None
        zero.fp32_partitioned_groups_flat = []
        # The module is only pushed while it runs: a module on the library's global stack would never be freed.
        self._stack = library("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
        self._stack[:] = [m for m in self._stack if m is not self.module]
        free_coordinator(coordinator := zero.parameter_offload.get_param_coordinator())
        name, numbers, buckets = f"{OF_STAGE3}reduce_and_partition_ipg_grads", self.numbers, zero.ipg_buckets
        came = lambda dtype: tuple(numbers[id(p)] for p in buckets[dtype].params)  # noqa: E731
        setattr(zero, name, self.announced(getattr(zero, name), came))
        announced = _announcer(self.module, self.process, self.label)
        watch(coordinator, announced, weakref.WeakMethod(self.enter_backward))
        method = weakref.WeakMethod(self.reveal)
        reveal = lambda weight: (bound := method()) is not None and bound(weight)  # noqa: E731
        kind = waiting_dict(type(self.module._parameters), reveal)
        self._tables: list[Any] = [module._parameters for module in self.module.modules()]
        for module, table in zip(self.module.modules(), self._tables, strict=True):
            table.__class__ = kind
            tidy(module)
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
            if fragment is not None and self.apart:
                fragment.weights.copy_(fragment.home)
        self._order_gathers()

    @plainly
    def take_edits(self) -> list[int]:
        """The library's own copies would undo them."""
        return [i for i, (p, old) in enumerate(zip(self.parameters, self._versions, strict=True)) if p._version != old]

    @plainly
    def _note_versions(self) -> None:
        self._versions = [p._version for p in self.parameters]

    def spread(self) -> None:
        super().spread()
        self._note_versions()

    def enter_backward(self) -> None:
        """Refuse one whose forward was called around the engine, which would have cleared what an exception left."""
        self.interruption.incomplete |= self.interruption.cut
        super().enter_backward()

    @plainly
    def take(self, index: int) -> None:
        parameter = self.parameters[index]
        if parameter.grad is None:
            set_grad(parameter, torch.zeros(self.shapes[index], dtype=parameter.dtype, device=parameter.device))
        self.zero.reduce_independent_p_g_buckets_and_remove_grads(parameter)

    @plainly
    def finish(self) -> None:
        """Reduce what is in the buckets, and let go of modules whose own hook did not fire."""
        zero = self.zero
        for dtype in list(zero.ipg_buckets):
            getattr(zero, f"{OF_STAGE3}reduce_and_partition_ipg_grads")(dtype)
        if (stream := zero.reduce_and_partition_stream) is not None:
            stream.synchronize()
        self._gradients.hand_out()
        if len(self.interruption.running) <= 1:  # the backward around a reentrant checkpoint's still needs its weights
            zero.parameter_offload.release_backward_leftovers()

    def gradients(self, indices: Container[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The very ones that the library adds to."""
        for ds_id in list(self._gradients):
            self._gradients[ds_id]  # asked for again, it is of the weights' dtype
        self._gradients.hand_out()
        return super().gradients(indices)

    @plainly
    def drop(self, indices: Sequence[int], set_to_none: bool) -> None:
        super().drop(indices, set_to_none)
        if set_to_none:
            for index in indices:
                self._gradients.pop(self.parameters[index].ds_id, None)  # type: ignore[attr-defined]

    def reset(self) -> None:
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
        for parameter in self.divided.values():
            parameter.ds_active_sub_modules.clear()  # type: ignore[attr-defined]
        self.gather()
        coordinator = zero.parameter_offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():  # ranks may have come to other modules
            coordinator._invalidate_trace()

    @plainly
    def gather(self) -> None:
        """Forget gathered weights, which are old now; small ones stay, and are filled by the bucket, not each by itself."""
        coordinator = self.zero.parameter_offload.get_param_coordinator()
        underway = getattr(coordinator, f"{OF_COORDINATOR}inflight_param_registry")
        release = getattr(coordinator, f"{OF_COORDINATOR}release_param")
        while underway:
            # Its connections closed (where they are lost for good, what follows fails), or it came to an end half-way.
            with contextlib.suppress(RuntimeError, AssertionError):
                underway.popitem()[1].wait()
        weights: Sequence[Any] = self.parameters
        for weight in weights:
            if weight.ds_status is type(weight._available).INFLIGHT:
                weight.ds_status = weight._available
            weight.ds_active_sub_modules.clear()
            if not weight.ds_persist:
                release(weight)
            weight.ds_secondary_tensor = None  # the second copy that `zero_hpz_partition_size` has for backward
        small = self.zero.persistent_parameters
        ends = itertools.accumulate(weight.ds_numel for weight in small)
        size = self.zero.reduce_bucket_size
        for _, bucket in itertools.groupby(
            zip(small, ends, strict=True), lambda w: (w[1] // size, w[0].ds_tensor.dtype)
        ):
            self._refill([weight for weight, _ in bucket])
        self._order_gathers()

    def _refill(self, weights: Sequence[Any]) -> None:
        what, world = f"the gathering of small weights ({self.label})", weights[0].ds_zero_partition_world_size
        part = torch.cat([weight.ds_tensor for weight in weights])
        whole = part.new_empty(world * part.numel())
        announce(self.process, what, len(weights))
        with Waiting(self.process, what):
            dist.all_gather_into_tensor(whole, part, group=weights[0].ds_process_group)
        parts = whole.view(world, -1).split([weight.ds_tensor.ds_numel for weight in weights], 1)
        for weight, values in zip(weights, parts, strict=True):
            weight.data = values.reshape(-1)[: weight.ds_numel].view(weight.ds_shape)
            weight.ds_status = weight._available

    def _order_gathers(self) -> None:
        """Let gathers from now on come after what has been written: the stream on which the library gathers waits for none."""
        coordinator = self.zero.parameter_offload.get_param_coordinator()
        if (stream := getattr(coordinator, f"{OF_COORDINATOR}allgather_stream")) is not None:
            stream.wait_stream(accelerator().current_stream())

    @contextlib.contextmanager
    def _forward(self) -> Iterator[None]:
        """A parameter that a module reads from another one is gathered while the model runs."""
        depth = len(self._stack)
        self._stack.append(self.module)
        for table in self._tables:
            table._in_forward = True
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            del self._stack[depth:]
            for table in self._tables:
                table._in_forward = self._running > 0

    def reveal(self, weight: Any) -> bool:
        """Gather a weight that the running forward reads beside its modules' own; False where none runs. Collective."""
        if not self._running:
            return False
        coordinator = self.zero.parameter_offload.get_param_coordinator()
        handle = getattr(coordinator, f"{OF_COORDINATOR}inflight_param_registry").pop(weight, None)
        if handle is not None:
            plainly(handle.wait)()
        library("deepspeed.runtime.zero").register_external_parameter(self._stack[-1], weight)
        weight.all_gather()  # announced by its own method
        return True

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], forward: bool) -> Any:
        """A method with the library's hooks of a forward around it, and none of the user's."""
        with self._forward():
            if forward:
                return function(*args, **kwargs)
            for hook in self.snapshot.hooks("_forward_pre_hooks"):
                if (changed := hook(self.module, args)) is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
            out = function(*args, **kwargs)
            for hook in self.snapshot.hooks("_forward_hooks"):
                if (changed := hook(self.module, args, out)) is not None:
                    out = changed
            return out

    def end(self, full: Sequence[torch.Tensor]) -> None:
        try:
            self.zero._partition_all_parameters()
        except RuntimeError as error:
            if not is_lost(error):  # of a gathering that other ranks never came to: it goes with the library's objects
                raise
        self.weights.open()
        super().end(full)
