"""Stage 3 of DeepSpeed: ranks shard weights and gather them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Sequence
from types import MethodType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ...errors import BackendError
from ...gradients.hooks import runs_backward
from ...trees import map_tensors
from ..base.absent import FOR_AUTOGRAD, Absent, name_of, plainly
from ..base.raw_objects import Function
from .library import OF_COORDINATOR, OF_STAGE3, accelerator, library
from .partitions import BUCKET, Partitions, copy_all


def among_tensors(hook: Function) -> Function:
    """Adapt DeepSpeed's hook to tensors in nested containers."""
    # DeepSpeed's hook fails for numbers, and finds no tensors in a dataclass.

    def call(module: Any, *values: Any) -> Any:
        tree = values[-1]
        single = type(tree) is tuple and len(tree) == 1
        leaf = tree[0] if single else tree
        if isinstance(leaf, Tensor):  # the usual case
            changed = hook(module, *values[:-1], [leaf])
            return changed and (tuple(changed) if single else changed[0])
        # Pass each tensor once, because attention(x, x, x) differs for three distinct tensors.
        tensors: dict[int, Tensor] = {}
        map_tensors(lambda tensor: tensors.setdefault(id(tensor), tensor), tree)
        changed = hook(module, *values[:-1], list(tensors.values()))
        if changed is None:
            return None
        others = dict(zip(tensors, changed, strict=True))
        return map_tensors(lambda tensor: others[id(tensor)], tree)

    return _disable_dynamo(call)


def _nothing(hook: Function) -> Function:
    return lambda *_: None


def by_library(function: Function) -> Function:
    """Return a DeepSpeed function that sees plain tensors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        # Training can't use tensors that were created in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return _disable_dynamo(plainly(call))


@final
class Stage3Weight(Absent, nn.Parameter):
    """A weight of stage 3. Using it in a forward gathers its values."""

    __slots__ = ()
    plain = FOR_AUTOGRAD
    #: DeepSpeed's ``ZeroParamStatus.AVAILABLE``, and its attribute inside ``GatheredParameters``.
    available: Any
    by_user: str

    def is_here(self) -> bool:
        """True if its values are gathered and stay for the caller."""
        # After a forward, values may still be gathered, but they are freed before backward.
        facts = self.__dict__
        if facts["ds_status"] is not self.available:
            return False
        needed = facts["ds_persist"] or facts["ds_active_sub_modules"] or self.by_user in facts
        return bool(needed) or runs_backward()

    def full_shape(self) -> torch.Size:
        return torch.Size(vars(self)["ds_shape"])

    def fetch(self, function: Any) -> None:
        if self.is_here():
            return
        stage3: Stage3 | None = vars(self)["ds_owner"]()
        if stage3 is None or not stage3.gather_for_forward(self):
            raise BackendError(
                f"{vars(self)['ds_name']} is sharded, so {name_of(function)}() can't "
                "use it outside of a forward. Use accel.full_state_dict(model), or a "
                "method of the model."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied


def mark(weight: Any, name: str, stage3: Stage3) -> None:
    """Change a weight's class, and announce its gathers."""
    home = library("deepspeed.runtime.zero.partition_parameters")
    Stage3Weight.available = home.ZeroParamStatus.AVAILABLE
    Stage3Weight.by_user = home.DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR
    facts, partition = vars(weight), vars(weight)["partition"]
    gather = stage3.announced(facts["all_gather"], f"the gathering of {name}")

    def release(param_list: Any = None, **options: Any) -> None:
        # Small weights stay gathered, so that a penalty outside a forward can use them.
        weights = param_list or [weight]
        partition([w for w in weights if not w.ds_persist], **options)

    facts.update(
        ds_owner=weakref.ref(stage3),
        ds_name=name,
        all_gather=by_library(gather),
        all_gather_coalesced=by_library(facts["all_gather_coalesced"]),
        partition=by_library(release),
    )
    # DeepSpeed's item() gathers, so it would hang if one rank prints a number.
    facts.pop("item", None)
    weight.__class__ = Stage3Weight


# -- the model ------------------------------------------------------------------------------------

_REDUCE: Final = f"{OF_STAGE3}reduce_and_partition_ipg_grads"


@final
class Stage3(Partitions):
    """The parameters of a model at stage 3."""

    def arrange(self) -> None:
        #: The number of running forwards, which may be nested.
        self._forwards = 0
        #: Pairs of a module and a weight of another module that it uses, by DeepSpeed's ids.
        self._external: set[tuple[int, int]] = set()
        self._coordinator = self.zero.parameter_offload.get_param_coordinator()
        #: The handles of unfinished gathers, by weight.
        self._inflight: Any = self.module.ds_inflight_param_registry
        for index, p in enumerate(self.parameters):
            shard, shape = p.ds_tensor, self.shapes[index]
            start = shard.ds_numel * p.ds_zero_partition_rank
            # `start` gave DeepSpeed scalars as one-dimensional tensors.
            p.ds_shape = shape
            numel = min(shard.ds_numel, shape.numel() - start)
            # The last ranks' shards may be padding only.
            if numel > 0:
                self.own(index, start, shard.data.narrow(0, 0, numel))
        self._take_over_gradients()
        self._watch_modules()
        # A module that stays on DeepSpeed's global stack would never be freed.
        self._stack = library("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
        self._stack[:] = [m for m in self._stack if m is not self.module]
        for name, weight in zip(self.names, self.parameters, strict=True):
            mark(weight, name, self)
        self.snapshot.changed()
        # If all weights are small, they stay gathered, and modules need no hooks.
        change = _nothing if all(p.ds_persist for p in self.parameters) else among_tensors
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            self.snapshot.change_hooks(name, change)
        self.gather()

    def _take_over_gradients(self) -> None:
        """Collect reduced gradients in the fragments."""
        zero = self.zero
        zero.partition_grads = self._collect
        # Free the memory of DeepSpeed's own gradients and master weights.
        setattr(zero, f"{OF_STAGE3}param_id_to_grad_partition", {})
        zero.grad_partitions_flat_buffer = None
        zero.offload_optimizer = False
        for flat in zero.fp32_partitioned_groups_flat:
            flat.grad = None
        zero.fp32_partitioned_groups_flat = []
        setattr(zero, _REDUCE, self.announced(getattr(zero, _REDUCE), BUCKET))

    def _watch_modules(self) -> None:
        """Announce gathers for modules, and detect backwards."""
        offload, coordinator = self.zero.parameter_offload, self._coordinator
        names = {id(m): name or "the model itself" for name, m in self.module.named_modules()}

        def describe(module: Any) -> str:
            return f"the gathering of {names[id(module)]}"

        def before_backward(module: Any) -> None:
            self.enter_backward()
            gather_for_backward(module)

        before_forward = self.announced(offload.pre_sub_module_forward_function, describe)
        gather_for_backward = self.announced(offload.pre_sub_module_backward_function, describe)
        offload.pre_sub_module_forward_function = by_library(before_forward)
        offload.pre_sub_module_backward_function = by_library(before_backward)
        for name in ("post_sub_module_forward_function", "post_sub_module_backward_function"):
            setattr(offload, name, by_library(getattr(offload, name)))
        coordinator.reset_step = by_library(coordinator.reset_step)
        # DeepSpeed caches this method in a way that keeps the model alive forever.
        name = f"{OF_COORDINATOR}params_to_release"
        method = getattr(type(coordinator), name)
        cached = inspect.getclosurevars(method).nonlocals["func"]
        uncached = MethodType(inspect.unwrap(cached), weakref.proxy(coordinator))
        setattr(coordinator, name, functools.cache(uncached))

    @plainly
    def take(self, index: int) -> None:
        self.zero.reduce_independent_p_g_buckets_and_remove_grads(self.parameters[index])

    def _collect(self, parameters: Sequence[Any], shards: Sequence[Tensor]) -> None:
        """Take this rank's reduced gradients, without the padding."""
        stream = self.zero.reduce_and_partition_stream
        for p, shard in zip(parameters, shards, strict=True):
            fragment = self.fragment_of(p)
            if fragment is not None:
                fragment.accumulate(shard.reshape(-1)[: fragment.home.numel()])
            if stream is not None:
                # Backward allocated this memory on its own stream, and DeepSpeed's still reads it.
                p.grad.record_stream(stream)
            p.grad = None

    @plainly
    def finish(self) -> None:
        """Reduce the buckets, and release modules that no hook released."""
        zero = self.zero
        for dtype in list(zero.ipg_buckets):
            getattr(zero, _REDUCE)(dtype)
        stream = zero.reduce_and_partition_stream
        if stream is not None:
            stream.synchronize()
        # When a reentrant checkpoint's backward ends, the outer backward still needs weights.
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
        # Ranks may have been interrupted in different modules.
        self._forget_trace()

    @plainly
    def take_homes(self) -> None:
        homes, values = [], []
        # DeepSpeed keeps small weights in full, so WGAN's clamping writes to the full tensors.
        for weight in self.zero.persistent_parameters:
            fragment = self.fragment_of(weight)
            if fragment is not None and weight.ds_status is weight.available:
                homes.append(fragment.home)
                values.append(fragment.range_of(weight))
        copy_all(homes, values)
        self._order_gathers()

    def _order_gathers(self) -> None:
        """Let DeepSpeed's gather stream wait for writes."""
        stream = getattr(self._coordinator, f"{OF_COORDINATOR}allgather_stream")
        if stream is not None:
            stream.wait_stream(accelerator().current_stream())

    @plainly
    def gather(self) -> None:
        """Release old gathered weights, and gather small weights again."""
        self._release_weights()
        small = self.zero.persistent_parameters
        for weight in small:
            weight.ds_status = type(weight.available).NOT_AVAILABLE
        if small:
            gather = small[0].all_gather_coalesced
            self.announced(gather, "the gathering of small weights")(small).wait()
        self._order_gathers()

    def _wait_for_gathers(self) -> None:
        while self._inflight:
            # The process groups may have ended.
            with contextlib.suppress(RuntimeError, AssertionError):
                self._inflight.popitem()[1].wait()

    def _release_weights(self) -> None:
        """Release all but small weights, even during a gather."""
        self._wait_for_gathers()
        for weight in self.parameters:
            states = type(weight.available)
            # An exception interrupted the gather.
            if weight.ds_status is states.INFLIGHT:
                weight.ds_status = states.NOT_AVAILABLE
            weight.ds_active_sub_modules.clear()
            if weight.ds_status is weight.available:
                weight.partition()
            # With `zero_hpz_partition_size`, DeepSpeed keeps a second shard for backward.
            weight.ds_secondary_tensor = None

    @plainly
    def gather_for_forward(self, weight: Any) -> bool:
        """Gather another module's weight. False outside a forward."""
        if not self._forwards:
            return False
        module = self._stack[-1]
        gathering = self._inflight.pop(weight, None)
        if gathering is not None:
            gathering.wait()
        # From now on DeepSpeed gathers it with this module, in backward too.
        library("deepspeed.runtime.zero").register_external_parameter(module, weight)
        pair = module.ds_id, weight.ds_id
        if pair not in self._external:
            self._external.add(pair)
            self._forget_trace()
        if weight.ds_status is not weight.available:
            weight.all_gather()  # announced by its own method
        weight.ds_active_sub_modules.add(module.ds_id)
        return True

    def _forget_trace(self) -> None:
        """Let DeepSpeed trace the model again, because gathers changed."""
        if not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()

    def call(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Call a forward or method. Other modules' weights are gathered."""
        depth = len(self._stack)
        self._stack.append(self.module)
        self._forwards += 1
        try:
            if isinstance(function, nn.Module):  # which calls the hooks
                return function(*args, **kwargs)
            return self._call_method(function, args, kwargs)
        except BaseException:
            # Activation checkpointing stops its recomputation with an exception in backward.
            self.stale |= not runs_backward()
            raise
        finally:
            self._forwards -= 1
            del self._stack[depth:]

    def _call_method(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Call a method between DeepSpeed's forward hooks."""
        for hook in self.snapshot.hooks("_forward_pre_hooks"):
            changed = hook(self.module, args)
            args = args if changed is None else changed
        out = function(*args, **kwargs)
        for hook in self.snapshot.hooks("_forward_hooks"):
            changed = hook(self.module, args, out)
            out = out if changed is None else changed
        return out

    @plainly
    def end(self, full: Sequence[Tensor]) -> None:
        self._wait_for_gathers()
        super().end(full)
