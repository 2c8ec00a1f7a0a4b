"""Stage 3 of DeepSpeed: ranks own fragments of weights, and gather."""

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
    """Return DeepSpeed's hook for tensors in inputs or an output."""
    # The hook itself fails at numbers, and finds no tensor in a dataclass.

    def call(module: Any, *values: Any) -> Any:
        tree = values[-1]
        single = type(tree) is tuple and len(tree) == 1
        leaf = tree[0] if single else tree
        if isinstance(leaf, Tensor):  # the usual case
            changed = hook(module, *values[:-1], [leaf])
            return changed and (tuple(changed) if single else changed[0])
        # Once each, because attention(x, x, x) computes differently with three tensors.
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
    """Return a function of DeepSpeed's, which finds plain tensors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        # Training can't go on with tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return _disable_dynamo(plainly(call))


@final
class Stage3Weight(Absent, nn.Parameter):
    """A weight of stage 3. Its use in a forward gathers the values."""

    __slots__ = ()
    plain = FOR_AUTOGRAD
    #: DeepSpeed's ``ZeroParamStatus.AVAILABLE``, and its mark inside of ``GatheredParameters``.
    available: Any
    by_user: str

    def is_here(self) -> bool:
        """True if its values are here, and stay for the code around."""
        # After a forward, unneeded values may still be here, but a backward finds them gone.
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
    """Give a weight its class and announce each gathering of it."""
    home = library("deepspeed.runtime.zero.partition_parameters")
    Stage3Weight.available = home.ZeroParamStatus.AVAILABLE
    Stage3Weight.by_user = home.DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR
    facts, partition = vars(weight), vars(weight)["partition"]
    gather = stage3.announced(facts["all_gather"], f"the gathering of {name}")

    def release(param_list: Any = None, **options: Any) -> None:
        # Small weights stay gathered, for a penalty outside of forward.
        weights = param_list or [weight]
        partition([w for w in weights if not w.ds_persist], **options)

    facts.update(
        ds_owner=weakref.ref(stage3),
        ds_name=name,
        all_gather=by_library(gather),
        all_gather_coalesced=by_library(facts["all_gather_coalesced"]),
        partition=by_library(release),
    )
    # It gathers, which hangs if one rank asks for a number to print.
    facts.pop("item", None)
    weight.__class__ = Stage3Weight


# -- the model ------------------------------------------------------------------------------------

_REDUCE: Final = f"{OF_STAGE3}reduce_and_partition_ipg_grads"


@final
class Stage3(Partitions):
    """The parameters of a model at stage 3."""

    def arrange(self) -> None:
        #: Forwards that run, inside of each other.
        self._forwards = 0
        #: Modules and their weights of other modules, by DeepSpeed's numbers.
        self._external: set[tuple[int, int]] = set()
        self._coordinator = self.zero.parameter_offload.get_param_coordinator()
        #: Weights that are being gathered, with what to wait for.
        self._inflight: Any = self.module.ds_inflight_param_registry
        for index, p in enumerate(self.parameters):
            shard, shape = p.ds_tensor, self.shapes[index]
            start = shard.ds_numel * p.ds_zero_partition_rank
            # A scalar was shown with a dimension.
            p.ds_shape = shape
            numel = min(shard.ds_numel, shape.numel() - start)
            # The last shards may be padding only.
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
        # If all weights are small, they stay gathered, and modules need nothing.
        change = _nothing if all(p.ds_persist for p in self.parameters) else among_tensors
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            self.snapshot.change_hooks(name, change)
        self.gather()

    def _take_over_gradients(self) -> None:
        """Collect reduced gradients in the fragments."""
        zero = self.zero
        zero.partition_grads = self._collect
        # The memory of its own gradients and master weights.
        setattr(zero, f"{OF_STAGE3}param_id_to_grad_partition", {})
        zero.grad_partitions_flat_buffer = None
        zero.offload_optimizer = False
        for flat in zero.fp32_partitioned_groups_flat:
            flat.grad = None
        zero.fp32_partitioned_groups_flat = []
        setattr(zero, _REDUCE, self.announced(getattr(zero, _REDUCE), BUCKET))

    def _watch_modules(self) -> None:
        """Announce gathers for modules, and notice backward passes."""
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
        # DeepSpeed's cache would keep the coordinator and its model for good.
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
                # DeepSpeed's stream still reads the memory, which backward has allocated.
                p.grad.record_stream(stream)
            p.grad = None

    @plainly
    def finish(self) -> None:
        """Reduce the buckets, and release modules which no hook released."""
        zero = self.zero
        for dtype in list(zero.ipg_buckets):
            getattr(zero, _REDUCE)(dtype)
        stream = zero.reduce_and_partition_stream
        if stream is not None:
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
        # Ranks may have come to different modules.
        self._forget_trace()

    @plainly
    def take_homes(self) -> None:
        homes, values = [], []
        # DeepSpeed keeps small weights in full, and WGAN's clamping writes there.
        for weight in self.zero.persistent_parameters:
            fragment = self.fragment_of(weight)
            if fragment is not None and weight.ds_status is weight.available:
                homes.append(fragment.home)
                values.append(fragment.range_of(weight))
        copy_all(homes, values)
        self._order_gathers()

    def _order_gathers(self) -> None:
        """Let DeepSpeed's stream for gathers wait for writes."""
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
        """Release all but the small weights, also during a gather."""
        self._wait_for_gathers()
        for weight in self.parameters:
            states = type(weight.available)
            # A gather ended half-way.
            if weight.ds_status is states.INFLIGHT:
                weight.ds_status = states.NOT_AVAILABLE
            weight.ds_active_sub_modules.clear()
            if weight.ds_status is weight.available:
                weight.partition()
            # The second copy of `zero_hpz_partition_size`, for backward.
            weight.ds_secondary_tensor = None

    @plainly
    def gather_for_forward(self, weight: Any) -> bool:
        """Gather another module's weight. False outside of a forward."""
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
        """Let DeepSpeed trace the model again, for unexpected weights."""
        if not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()

    def call(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Call a forward or method, with gathers of other modules' weights."""
        depth = len(self._stack)
        self._stack.append(self.module)
        self._forwards += 1
        try:
            if isinstance(function, nn.Module):  # which calls the hooks
                return function(*args, **kwargs)
            return self._call_method(function, args, kwargs)
        except BaseException:
            # In a backward, activation checkpointing ends its forward by an exception.
            self.stale |= not runs_backward()
            raise
        finally:
            self._forwards -= 1
            del self._stack[depth:]

    def _call_method(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Call a method with DeepSpeed's hooks of a forward around it."""
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
