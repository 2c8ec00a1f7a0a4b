"""Stage 3 of DeepSpeed: each rank owns a fragment of every parameter, and gathers weights for modules."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from types import MethodType
from typing import Any, final

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from ...process.control import Waiting, announce
from ...process.packing import row_of
from ...trees import exchange
from ..base.absent import plainly
from .library import OF_COORDINATOR, OF_STAGE3, accelerator, library
from .partitions import Fragment, Partitions
from .weights import mark, recorded, set_grad, unmark

# -- DeepSpeed's hooks on modules -----------------------------------------------------------------


def among_tensors(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of DeepSpeed's that is called with a list of the tensors in a module's inputs or output.

    The hook itself fails at an output without items and attributes, and finds no tensor in a dataclass.
    """

    def call(module: Any, *values: Any) -> Any:
        tree = values[-1]
        single = type(tree) is tuple and len(tree) == 1
        leaf = tree[0] if single else tree
        if isinstance(leaf, torch.Tensor):  # the usual case
            changed = hook(module, *values[:-1], [leaf])
            return changed and (tuple(changed) if single else changed[0])
        found: dict[int, torch.Tensor] = {}
        _exchange(lambda tensor: found.setdefault(id(tensor), tensor), tree)
        changed = hook(module, *values[:-1], list(found.values()))
        if changed is None:
            return None
        # One for each, because attention(x, x, x) computes differently with three tensors.
        others = dict(zip(found, changed, strict=True))
        return _exchange(lambda tensor: others.get(id(tensor), tensor), tree)

    return _disable_dynamo(call)


def _exchange(give: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return the tree with another tensor for each, except for leaves in objects."""
    return exchange(give, tree, lambda tensor: tensor if tensor.grad_fn is None else give(tensor))


def tidy(module: Any) -> None:
    """Hide the module in the reprs of its attributes, and give its autograd functions signatures."""
    for name in ("all_parameters", "ds_external_parameters"):
        if isinstance(bound := vars(module).get(name), MethodType):
            # EmbeddingBag shows all of its attributes in its own repr.
            vars(module)[name] = _call_with(bound.__func__, module)
    for kind in filter(None, map(vars(module).get, ("pre_bwd_fn", "post_bwd_fn"))):
        # torch asks for it in each forward.
        kind.forward.__signature__ = inspect.signature(kind.forward)


def _call_with(function: Callable[..., Any], module: Any) -> Callable[[], Any]:
    return lambda: function(module)


# -- gradients -----------------------------------------------------------------------------------


class _Gradients(dict[int, torch.Tensor]):
    """Where DeepSpeed adds a reduced gradient, in memory that is made when DeepSpeed asks for it.

    The second gradient of a parameter is added in the dtype of the weights that the optimizer updates.
    """

    def __init__(self, owned: dict[int, tuple[Any, Fragment]]) -> None:
        super().__init__()
        self._owned = owned

    def __getitem__(self, ds_id: int) -> torch.Tensor:
        shard, fragment = self._owned[ds_id]
        weights, pinned = fragment.weights, fragment.pinned
        if ds_id not in self:
            self[ds_id] = torch.zeros(
                shard.ds_numel, dtype=shard.dtype, device=weights.device, pin_memory=pinned
            )
        elif (grad := super().__getitem__(ds_id)).dtype is not weights.dtype:
            if pinned:  # the CPU reads it, and it may still be copied
                accelerator().synchronize()
            self[ds_id] = grad.to(weights.dtype)
        return super().__getitem__(ds_id)

    def hand_out(self) -> None:
        """Give each fragment what DeepSpeed has added, without the padding."""
        for ds_id, grad in self.items():
            fragment = self._owned[ds_id][1]
            fragment.grad = grad.narrow(0, 0, fragment.home.numel())


# -- the engine's side ---------------------------------------------------------------------------


@final
class Stage3(Partitions):
    """The parameters of a model at stage 3."""

    divides_weights = True
    #: Forwards that run, inside of each other.
    _running = 0
    _versions: list[int]

    # -- building ---------------------------------------------------------------------------------

    def start(self, config: dict[str, Any], device: torch.device) -> None:
        for parameter in self.parameters:
            # DeepSpeed sends a weight's memory in the order in which it lies there.
            if not parameter.is_contiguous() or parameter.stride()[-1:] not in ((), (1,)):
                parameter.data = row_of(parameter.data.contiguous()).view(parameter.shape)
        super().start(config, device)
        self._note_versions()
        self._order_gathers()

    def arrange(self) -> None:
        self._coordinator = self.zero.parameter_offload.get_param_coordinator()
        self._find_fragments()
        self._take_over_gradients()
        self._watch_coordinator()
        self._free_coordinator()
        for module in self.module.modules():
            tidy(module)
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            self.snapshot.change_hooks(name, among_tensors)
        #: Modules and the weights that they read from other modules, by DeepSpeed's numbers.
        self._external: set[tuple[int, int]] = set()
        self._tables: list[Any] = [module._parameters for module in self.module.modules()]
        # A module that stays on DeepSpeed's global stack would never be freed.
        self._stack = library("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
        self._stack[:] = [m for m in self._stack if m is not self.module]
        for name, weight in zip(self.names, self.parameters, strict=True):
            mark(weight, name, self)

    def _find_fragments(self) -> None:
        """Own a fragment of each parameter of which this rank's shard isn't padding only."""
        owned = {}
        parameters: Sequence[Any] = self.parameters
        for index, parameter in enumerate(parameters):
            shard, shape = parameter.ds_tensor, self.shapes[index]
            start = shard.ds_numel * parameter.ds_zero_partition_rank
            parameter.ds_shape = shape  # a scalar was shown with one dimension
            numel = min(shard.ds_numel, shape.numel() - start)
            if numel > 0:
                self.own(index, start, shard.data.narrow(0, 0, numel))
                owned[parameter.ds_id] = shard, self.fragments[index]
        self._gradients = _Gradients(owned)

    def _take_over_gradients(self) -> None:
        """Let DeepSpeed add gradients to the fragments', and announce its reductions."""
        zero = self.zero
        setattr(zero, f"{OF_STAGE3}param_id_to_grad_partition", self._gradients)
        zero.micro_step_id = 1  # not 0, at which it overwrites
        # The memory of its own gradients and master weights.
        zero.grad_partitions_flat_buffer = None
        zero.offload_optimizer = False
        for flat in zero.fp32_partitioned_groups_flat:
            flat.grad = None
        zero.fp32_partitioned_groups_flat = []
        name = f"{OF_STAGE3}reduce_and_partition_ipg_grads"
        numbers, buckets = self.numbers, zero.ipg_buckets

        def in_bucket(dtype: torch.dtype) -> tuple[int, ...]:
            return tuple(numbers[id(p)] for p in buckets[dtype].params)

        setattr(zero, name, self.announced(getattr(zero, name), in_bucket))

    def _watch_coordinator(self) -> None:
        """Announce what the coordinator gathers, notice backward passes, and let it see plain tensors."""
        coordinator, process, label = self._coordinator, self.process, self.label
        owner = weakref.ref(self)
        fetch, release = coordinator.fetch_sub_module, coordinator.release_sub_module
        reset = coordinator.reset_step
        names = {id(m): name or "the model itself" for name, m in self.module.named_modules()}
        sharded = any(not weight.ds_persist for weight in self.parameters)  # type: ignore[attr-defined]

        def announced(what: str, act: Callable[..., None], *args: Any) -> None:
            if sharded:  # else nothing is gathered
                announce(process, what)
            with Waiting(process, what):
                act(*args)

        def fetch_sub_module(module: Any, forward: bool) -> None:
            if not forward and (stage3 := owner()) is not None:
                stage3.enter_backward()
            kind = "forward" if forward else "backward"
            what = f"the gathering of {names[id(module)]} for its {kind} ({label})"
            announced(what, fetch, module, forward)

        def release_sub_module(module: Any, forward: bool = False) -> None:
            # A second backward of one graph has gathered nothing.
            if forward or getattr(coordinator, f"{OF_COORDINATOR}active_backward_submodules"):
                release(module, forward)

        def reset_step() -> None:
            announced(f"the start of a forward ({label})", reset)

        for method in (fetch_sub_module, release_sub_module, reset_step):
            # Outside of compiled graphs, as DeepSpeed's own methods are.
            setattr(coordinator, method.__name__, _disable_dynamo(recorded(plainly(method))))
        for name in ("trace_prologue", "release_and_reset_all", "release_backward_leftovers"):
            setattr(coordinator, name, plainly(getattr(coordinator, name)))

    def _free_coordinator(self) -> None:
        """Give the coordinator a cache of its own. DeepSpeed's would keep it and its model for good."""
        name = f"{OF_COORDINATOR}params_to_release"
        cached = inspect.getclosurevars(getattr(type(self._coordinator), name)).nonlocals["func"]
        method = MethodType(inspect.unwrap(cached), weakref.proxy(self._coordinator))
        setattr(self._coordinator, name, functools.cache(method))

    # -- gradients --------------------------------------------------------------------------------

    @plainly
    def take(self, index: int) -> None:
        parameter = self.parameters[index]
        if parameter.grad is None:
            zeros = torch.zeros(self.shapes[index], dtype=parameter.dtype, device=parameter.device)
            set_grad(parameter, zeros)
        self.zero.reduce_independent_p_g_buckets_and_remove_grads(parameter)

    @plainly
    def finish(self) -> None:
        """Reduce what is in the buckets, and release modules whose own hook did not fire."""
        zero = self.zero
        for dtype in list(zero.ipg_buckets):
            getattr(zero, f"{OF_STAGE3}reduce_and_partition_ipg_grads")(dtype)
        if (stream := zero.reduce_and_partition_stream) is not None:
            stream.synchronize()
        self._gradients.hand_out()
        # The backward around that of a reentrant checkpoint still needs its weights.
        if len(self.interruption.running) <= 1:
            zero.parameter_offload.release_backward_leftovers()

    def gradients(self, indices: Container[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors themselves to which DeepSpeed adds."""
        for ds_id in list(self._gradients):
            self._gradients[ds_id]  # converts it to the dtype of the weights
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
        self._stack.clear()
        for bucket in self.zero.ipg_buckets.values():
            bucket.clear_params()
            bucket.elements = 0
        for module in self.module.modules():
            for name in ("ds_grads_remaining", "applied_pre_backward_ref_cnt"):
                if name in vars(module):
                    setattr(module, name, 0)
        self.gather()
        self._forget_trace()  # ranks may have come to different modules

    # -- weights ----------------------------------------------------------------------------------

    @plainly
    def take_edits(self) -> list[int]:
        """Return the parameters that the program has changed. The next step would undo that."""
        versions = [p._version for p in self.parameters]
        return [i for i, version in enumerate(versions) if version != self._versions[i]]

    @plainly
    def _note_versions(self) -> None:
        self._versions = [p._version for p in self.parameters]

    def spread(self) -> None:
        super().spread()
        self._note_versions()

    @plainly
    def gather(self) -> None:
        """Release gathered weights, which are old now, but gather small weights again, in buckets."""
        self._end_gathers()
        weights: Sequence[Any] = self.parameters
        for weight in weights:
            weight.ds_active_sub_modules.clear()
            if not weight.ds_persist:
                getattr(self._coordinator, f"{OF_COORDINATOR}release_param")(weight)
            # The second copy that `zero_hpz_partition_size` keeps for backward.
            weight.ds_secondary_tensor = None
        buckets: dict[Any, list[Any]] = {}
        end = 0
        for weight in self.zero.persistent_parameters:
            end += weight.ds_numel
            place = end // self.zero.reduce_bucket_size, weight.ds_tensor.dtype
            buckets.setdefault(place, []).append(weight)
        for bucket in buckets.values():
            self._gather_bucket(bucket)
        self._order_gathers()

    def _end_gathers(self) -> None:
        """Wait for weights that are being gathered."""
        underway = getattr(self._coordinator, f"{OF_COORDINATOR}inflight_param_registry")
        while underway:
            # A gather may have ended half-way. If its connections are lost for good, what follows fails.
            with contextlib.suppress(RuntimeError, AssertionError):
                underway.popitem()[1].wait()
        weights: Sequence[Any] = self.parameters
        for weight in weights:
            if weight.ds_status is type(weight._available).INFLIGHT:
                weight.ds_status = weight._available

    def _gather_bucket(self, weights: Sequence[Any]) -> None:
        what = f"the gathering of small weights ({self.label})"
        world = weights[0].ds_zero_partition_world_size
        shard = torch.cat([weight.ds_tensor for weight in weights])
        full = shard.new_empty(world * shard.numel())
        announce(self.process, what, len(weights))
        with Waiting(self.process, what):
            dist.all_gather_into_tensor(full, shard, group=weights[0].ds_process_group)
        columns = full.view(world, -1).split([weight.ds_tensor.ds_numel for weight in weights], 1)
        for weight, values in zip(weights, columns, strict=True):
            weight.data = values.reshape(-1)[: weight.ds_numel].view(weight.ds_shape)
            weight.ds_status = weight._available

    def _order_gathers(self) -> None:
        """Let gathers wait for what has been written. DeepSpeed's stream for them waits for none."""
        if (stream := getattr(self._coordinator, f"{OF_COORDINATOR}allgather_stream")) is not None:
            stream.wait_stream(accelerator().current_stream())

    @plainly
    def gather_for_forward(self, weight: Any) -> bool:
        """Gather a weight that a module reads from another one, or return False if no forward runs."""
        if not self._running:
            return False
        module = self._stack[-1]
        underway = getattr(self._coordinator, f"{OF_COORDINATOR}inflight_param_registry")
        if (gathering := underway.pop(weight, None)) is not None:
            gathering.wait()
        # From now on DeepSpeed gathers it with this module, in backward too.
        library("deepspeed.runtime.zero").register_external_parameter(module, weight)
        if weight.ds_status is not weight._available:
            weight.all_gather()  # announced by its own method
        weight.ds_active_sub_modules.add(module.ds_id)
        if (module.ds_id, weight.ds_id) not in self._external:
            self._external.add((module.ds_id, weight.ds_id))
            self._forget_trace()
        return True

    def _forget_trace(self) -> None:
        """Let DeepSpeed trace the model again. It raises an error if a module needs more than in its trace."""
        if not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()

    # -- forwards ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _forward(self) -> Iterator[None]:
        """Inside, a weight that a module reads from another one is gathered."""
        depth = len(self._stack)
        self._stack.append(self.module)
        self._running += 1
        for table in self._tables:
            table._in_forward = True
        try:
            yield
        finally:
            self._running -= 1
            del self._stack[depth:]
            for table in self._tables:
                table._in_forward = self._running > 0

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: bool,
    ) -> Any:
        """Call a forward, or a method with DeepSpeed's hooks around it, and none of the program's."""
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
        plainly(self._end_gathers)()
        for weight in self.parameters:
            unmark(weight)
        super().end(full)
