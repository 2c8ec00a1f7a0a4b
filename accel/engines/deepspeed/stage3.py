"""Stage 3 of DeepSpeed: each rank owns a fragment of every parameter, and gathers weights."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch._compile import _disable_dynamo

from ...trees import map_tensors
from ..base.absent import plainly
from .library import OF_COORDINATOR, OF_STAGE3, accelerator, library
from .partitions import Partitions
from .weights import by_library, mark, unmark

if TYPE_CHECKING:
    from . import DeepSpeedEngine


def among_tensors(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of DeepSpeed's that gets a list of the tensors in a module's inputs or output.

    The hook itself fails at numbers, and finds no tensor in a dataclass.
    """

    def call(module: Any, *values: Any) -> Any:
        tree = values[-1]
        single = type(tree) is tuple and len(tree) == 1
        leaf = tree[0] if single else tree
        if isinstance(leaf, torch.Tensor):  # the usual case
            changed = hook(module, *values[:-1], [leaf])
            return changed and (tuple(changed) if single else changed[0])
        # Once each, because attention(x, x, x) computes differently with three tensors.
        tensors: dict[int, torch.Tensor] = {}
        map_tensors(lambda tensor: tensors.setdefault(id(tensor), tensor), tree)
        changed = hook(module, *values[:-1], list(tensors.values()))
        if changed is None:
            return None
        others = dict(zip(tensors, changed, strict=True))
        return map_tensors(lambda tensor: others[id(tensor)], tree)

    return _disable_dynamo(call)


def _nothing(hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *_: None


@final
class Stage3(Partitions):
    """The parameters of a model at stage 3."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__(engine)
        #: Forwards that run, inside of each other.
        self._forwards = 0
        #: Modules and the weights that they read from other modules, by DeepSpeed's numbers.
        self._external: set[tuple[int, int]] = set()

    # -- building ---------------------------------------------------------------------------------

    def arrange(self) -> None:
        self._coordinator = self.zero.parameter_offload.get_param_coordinator()
        #: Weights that are being gathered, with what to wait for.
        self._inflight: Any = self.module.ds_inflight_param_registry
        parameters: Sequence[Any] = self.parameters
        for index, parameter in enumerate(parameters):
            shard, shape = parameter.ds_tensor, self.shapes[index]
            start = shard.ds_numel * parameter.ds_zero_partition_rank
            parameter.ds_shape = shape  # a scalar was shown with one dimension
            numel = min(shard.ds_numel, shape.numel() - start)
            if numel > 0:  # the last shards may be padding only
                self.own(index, start, shard.data.narrow(0, 0, numel))
        self._take_over_gradients()
        self._watch_modules()
        # If all weights are small, they stay gathered, and nothing has to be done for a module.
        change = _nothing if all(p.ds_persist for p in parameters) else among_tensors
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            self.snapshot.change_hooks(name, change)
        # A module that stays on DeepSpeed's global stack would never be freed.
        self._stack = library("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
        self._stack[:] = [m for m in self._stack if m is not self.module]
        for name, weight in zip(self.names, self.parameters, strict=True):
            mark(weight, name, self)
        self.gather()

    def _take_over_gradients(self) -> None:
        """Collect reduced gradients in the fragments, and announce DeepSpeed's reductions."""
        zero = self.zero
        zero.partition_grads = self._collect
        # The memory of its own gradients and master weights.
        setattr(zero, f"{OF_STAGE3}param_id_to_grad_partition", {})
        zero.grad_partitions_flat_buffer = None
        zero.offload_optimizer = False
        for flat in zero.fp32_partitioned_groups_flat:
            flat.grad = None
        zero.fp32_partitioned_groups_flat = []
        name = f"{OF_STAGE3}reduce_and_partition_ipg_grads"
        setattr(zero, name, self.announced(getattr(zero, name), "the reduction of a bucket"))

    def _watch_modules(self) -> None:
        """Announce the gathers for each module, and notice backward passes."""
        offload, coordinator, owner = (
            self.zero.parameter_offload,
            self._coordinator,
            weakref.ref(self),
        )
        names = {id(m): name or "the model itself" for name, m in self.module.named_modules()}

        def describe(module: Any) -> str:
            return f"the gathering of {names[id(module)]}"

        def before_backward(module: Any) -> None:
            if (stage3 := owner()) is not None:
                stage3.enter_backward()
            gather_for_backward(module)

        before_forward = self.announced(offload.pre_sub_module_forward_function, describe)
        gather_for_backward = self.announced(offload.pre_sub_module_backward_function, describe)
        offload.pre_sub_module_forward_function = by_library(before_forward)
        offload.pre_sub_module_backward_function = by_library(before_backward)
        for name in ("post_sub_module_forward_function", "post_sub_module_backward_function"):
            setattr(offload, name, by_library(getattr(offload, name)))
        reset_step = self.announced(coordinator.reset_step, "the start of a forward")
        coordinator.reset_step = by_library(reset_step)
        # A cache of its own, because DeepSpeed's would keep the coordinator and its model for good.
        name = f"{OF_COORDINATOR}params_to_release"
        cached = inspect.getclosurevars(getattr(type(coordinator), name)).nonlocals["func"]
        uncached = MethodType(inspect.unwrap(cached), weakref.proxy(coordinator))
        setattr(coordinator, name, functools.cache(uncached))

    # -- gradients --------------------------------------------------------------------------------

    @plainly
    def take(self, index: int) -> None:
        self.zero.reduce_independent_p_g_buckets_and_remove_grads(self.parameters[index])

    def _collect(self, parameters: Sequence[Any], shards: Sequence[torch.Tensor]) -> None:
        """Take this rank's shards of gradients that DeepSpeed has reduced, without the padding."""
        stream = self.zero.reduce_and_partition_stream
        for parameter, shard in zip(parameters, shards, strict=True):
            fragment = self.fragment_of(parameter)
            if fragment is not None:
                fragment.accumulate(shard.reshape(-1).narrow(0, 0, fragment.home.numel()))
            if stream is not None:
                # DeepSpeed's stream still reads the memory, which backward has allocated.
                parameter.grad.record_stream(stream)
            parameter.grad = None

    @plainly
    def finish(self) -> None:
        """Reduce the buckets, and release modules whose own hook did not fire."""
        zero = self.zero
        for dtype in list(zero.ipg_buckets):
            getattr(zero, f"{OF_STAGE3}reduce_and_partition_ipg_grads")(dtype)
        if (stream := zero.reduce_and_partition_stream) is not None:
            stream.synchronize()
        # The backward around that of a reentrant checkpoint still needs its weights.
        if len(self.running) <= 1:
            zero.parameter_offload.release_backward_leftovers()

    @plainly
    def reset(self) -> None:
        self._stack.clear()
        for bucket in self.zero.ipg_buckets.values():
            bucket.clear_params()
        for module in self.module.modules():
            for name in ("ds_grads_remaining", "applied_pre_backward_ref_cnt"):
                if name in vars(module):
                    setattr(module, name, 0)
        self._release_weights()
        self._forget_trace()  # ranks may have come to different modules

    # -- weights ----------------------------------------------------------------------------------

    @plainly
    def take_homes(self) -> None:
        homes, values = [], []
        # DeepSpeed keeps small weights in full, so WGAN's clamping writes to their full values.
        for weight in self.zero.persistent_parameters:
            fragment = self.fragment_of(weight)
            if fragment is not None and weight.ds_status is weight.available:
                homes.append(fragment.home)
                values.append(weight.reshape(-1).narrow(0, fragment.start, fragment.home.numel()))
        if homes:
            torch._foreach_copy_(homes, values)
        self._order_gathers()

    def _order_gathers(self) -> None:
        """Let DeepSpeed's stream for gathers wait for writes, which it doesn't by itself."""
        if (stream := getattr(self._coordinator, f"{OF_COORDINATOR}allgather_stream")) is not None:
            stream.wait_stream(accelerator().current_stream())

    @plainly
    def gather(self) -> None:
        """Release old gathered weights, and gather small weights again."""
        self._release_weights()
        small = self.zero.persistent_parameters
        for weight in small:
            weight.ds_status = type(weight.available).NOT_AVAILABLE
        if small:
            gather = self.announced(small[0].all_gather_coalesced, "the gathering of small weights")
            gather(small).wait()
        self._order_gathers()

    def _release_weights(self) -> None:
        """Release all but the small weights, also those that are being gathered."""
        while self._inflight:
            # If its connections are lost for good, what follows fails.
            with contextlib.suppress(RuntimeError, AssertionError):
                self._inflight.popitem()[1].wait()
        weights: Sequence[Any] = self.parameters
        for weight in weights:
            if weight.ds_status is type(weight.available).INFLIGHT:  # a gather ended half-way
                weight.ds_status = type(weight.available).NOT_AVAILABLE
            weight.ds_active_sub_modules.clear()
            if weight.ds_status is weight.available:
                weight.partition()
            # The second copy that `zero_hpz_partition_size` keeps for backward.
            weight.ds_secondary_tensor = None

    @plainly
    def gather_for_forward(self, weight: Any) -> bool:
        """Gather a weight of a different module, or return False if no forward runs."""
        if not self._forwards:
            return False
        module = self._stack[-1]
        if (gathering := self._inflight.pop(weight, None)) is not None:
            gathering.wait()
        # From now on DeepSpeed gathers it with this module, in backward too.
        library("deepspeed.runtime.zero").register_external_parameter(module, weight)
        if weight.ds_status is not weight.available:
            weight.all_gather()  # announced by its own method
        weight.ds_active_sub_modules.add(module.ds_id)
        if (module.ds_id, weight.ds_id) not in self._external:
            self._external.add((module.ds_id, weight.ds_id))
            self._forget_trace()
        return True

    def _forget_trace(self) -> None:
        """Let DeepSpeed trace the model again, because it raises for unexpected weights."""
        if not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()

    # -- forwards ---------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a forward, or a method. Modules may read each other's weights."""
        depth = len(self._stack)
        self._stack.append(self.module)
        self._forwards += 1
        try:
            if isinstance(function, nn.Module):  # which calls the hooks
                return function(*args, **kwargs)
            return self._call_method(function, args, kwargs)
        except BaseException:
            # In a backward, activation checkpointing ends its forward early by an exception.
            self.stale |= torch._C._current_graph_task_id() == -1
            raise
        finally:
            self._forwards -= 1
            del self._stack[depth:]

    def _call_method(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method with DeepSpeed's hooks of a forward around it."""
        for hook in self.snapshot.hooks("_forward_pre_hooks"):
            if (changed := hook(self.module, args)) is not None:
                args = changed
        out = function(*args, **kwargs)
        for hook in self.snapshot.hooks("_forward_hooks"):
            if (changed := hook(self.module, args, out)) is not None:
                out = changed
        return out

    def end(self, full: Sequence[torch.Tensor]) -> None:
        plainly(self._release_weights)()
        for weight in self.parameters:
            unmark(weight)
        super().end(full)
