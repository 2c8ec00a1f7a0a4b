"""``fsdp``: torch's ``fully_shard`` (FSDP2)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import OptimizerError
from ...gradients.totals import average_gradients_
from ...gradients.watch import GRAD, trainable
from ...precision import here
from ...process import Process
from ...process.control import agree
from ...process.rng import put_torch_states, torch_states
from ...shard import Shard, StateEntry, whole
from ..base import refusals
from ..base.activations import Choice
from ..base.engine import Context, Engine, lost_weights
from ..base.gradients import Gradients, refuse_inside_backward
from ..base.holdings import Holdings
from ..base.inputs import SameInputs
from ..base.interruption import Interruption
from ..base.memory import MemoryUse, TensorSize, add_uses
from ..base.options import Options, SequenceOptions
from ..base.parts import LocalSteps, elementwise, local_of, parts_of
from ..base.placement import Placement, Placements
from ..base.raw_objects import Args, Function, Kwargs, Snapshot
from .plan import Mesh, Plan, axes_of, blocks, check_module, planned_layers

if TYPE_CHECKING:
    from .convert import Conversion
    from .shard import ShardedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP(SequenceOptions):
    """Options of ``fsdp``. Names shared with ``fully_shard`` mean the same.

    Args:
        wrap: classes of modules to gather separately, or a function that
            selects them. None: repeated blocks of a ModuleList or
            Sequential, if they have submodules.
        reshard_after_forward: free gathered parameters after the block's
            forward.
        cpu_offload: keep shards, their gradients and optimizer state in CPU
            memory.
        replicas: the number of copies of the model (HSDP), each sharded over
            neighboring ranks. Gradients are averaged over the copies.
        tensor_parallel: the number of neighboring ranks that split each
            planned layer. They compute on the same batches. All weights
            are further sharded over the other ranks.
        plan: styles of ``torch.distributed.tensor.parallel`` by module
            name. ``*`` matches one component of a name.
        param_dtype: gather and compute in this dtype, torch.bfloat16.
        reduce_dtype: reduce gradients in this dtype. None: float32 with
            ``param_dtype``, otherwise the dtype of the parameters.
    """

    # The repr of a function has an address, which differs between ranks.
    wrap: Choice = field(default=None, repr=False)
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    replicas: int = 1
    tensor_parallel: int = 1
    # A notebook cell that runs twice makes new style objects, which are never equal.
    plan: Plan | None = field(default=None, compare=False)
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    choices = {
        "param_dtype": (None, torch.bfloat16),
        "reduce_dtype": (None, torch.float32, torch.bfloat16),
    }

    def check_values(self) -> None:
        valid = self.wrap is None or (callable(self.wrap) and not isinstance(self.wrap, type))
        if isinstance(self.wrap, tuple):
            valid = all(isinstance(c, type) for c in self.wrap)
        self.expect("wrap", valid, "a tuple of module classes, or a function of a module")
        splits = self.tensor_parallel > 1
        valid = not splits or self.sequence_parallel == 1
        self.expect("sequence_parallel", valid, "1, because tensor_parallel divides the heads too")
        valid = isinstance(self.plan, Mapping) if splits else self.plan is None
        self.expect("plan", valid, "a dict of styles by module names, if tensor_parallel > 1")


FSDP.shown = (FSDP(replicas=2),)


@final
class FSDPHoldings(Holdings):
    """Shards of state. Each rank holds rows of each tensor."""

    engine: FSDPEngine
    materializes = True

    def partial(self, optimizer: Optimizer | None) -> bool:
        return self.engine.divided

    @property
    def snapshot(self) -> Snapshot | None:
        return self.engine.sharded.snapshot if self.engine.divided else None

    def prepare(self, *, writing: bool) -> None:
        self.engine.sharded.reshard()

    def part(self, name: str, tensor: Any, key: Any = "") -> Shard | None:
        name = f"{name}/{key}" if key else name
        if not hasattr(tensor, "placements"):
            return whole(name, tensor)
        # A model may have thousands of tensors, and to_local() takes several microseconds.
        local = local_of(tensor).detach()
        if not local.numel():
            return None
        region = self.engine.sharded.mesh.region_of(tensor, local)
        return Shard(name, tuple(tensor.shape), region, local)

    def new_state(
        self, entry: StateEntry, key: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        like = entry.parameter
        if shape == tuple(like.shape):
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=like.device)

    def rebind(self, optimizer: Optimizer) -> None:
        """Put shards into an optimizer's groups and state."""
        canonical: Any = self.engine.gradients.canonical
        for group in optimizer.param_groups:
            # In place, because schedulers hold the groups.
            group["params"][:] = map(canonical, group["params"])
        names, full = self.parameter_names, dict[str, dict[Any, Any]]()
        for p in list(optimizer.state):
            # Some optimizers also store values under strings.
            if isinstance(p, Tensor):
                name = names[id(canonical(p))]
                full[name] = optimizer.state.pop(p)
        self.take(optimizer, full)

    def replicas(self) -> Sequence[tuple[str, Tensor]]:
        """Return replicated tensors. A shard's name has its place."""
        mesh = self.engine.sharded.mesh
        tensors: list[tuple[str, Tensor]] = []
        for name, p in self.engine.named.items():
            copies = mesh.copies(p)
            place = [f"{a} {n}" for a, n in mesh.place.items() if a not in copies]
            if max(map(mesh.sizes.__getitem__, copies)) > 1:
                tensors.append((f"{name} ({', '.join(place)})" if place else name, here(p)))
        return tensors


@final
class FSDPGradients(Gradients):
    """Gradients reduced in every backward, even inside ``no_sync``."""

    reduced = before_any_step = True
    engine: FSDPEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._interruption = Interruption()
        #: Parameters that every rank holds, because FSDP2 doesn't shard them, by name.
        self._replicated: dict[str, nn.Parameter] = {}
        #: The ``id`` of each shard that a different rank counts in a norm.
        self._uncounted: set[int] = set()

    def start(self, mesh: Mesh) -> None:
        """Record the parameters that ranks replicate."""
        for name, p in self.engine.named.items():
            copies = mesh.copies(p)
            if len(copies) == len(mesh.sizes):
                self._replicated[name] = p
            if any(map(mesh.place.get, copies)):
                self._uncounted.add(id(p))

    def canonical(self, parameter: nn.Parameter) -> nn.Parameter:
        if not self.engine.divided:
            return parameter
        return self.engine.conversion.known.get(id(parameter), parameter)

    def check(self, optimizer: Optimizer) -> None:
        """Raise for unknown parameters, and replace the others."""
        super().check(optimizer)
        if self.engine.divided:
            self.engine.holdings.rebind(optimizer)

    def leaf(self, parameter: Any) -> Any:
        # VQGAN calls torch.autograd.grad for its last layer. The graph has the gathered tensor.
        shard = self.canonical(parameter)
        return self.engine.conversion.gathered.get(id(shard), parameter)

    def backward_begins(self) -> None:
        super().backward_begins()
        if self._interruption.incomplete:
            gradients = self.engine.holdings.gradients()
            # Zeros count as dropped, because zero_grad(set_to_none=False) writes them.
            self._interruption.incomplete = any(bool(here(grad).any()) for *_, grad in gradients)

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        # FSDP2 doesn't shard a scalar such as CLIP's logit_scale, so accel averages its gradient.
        names, parameters = list(self._replicated), list(self._replicated.values())
        reduces = completed and outermost and not self.engine.ended
        if reduces and any(trainable(parameters)):
            what = f"the reduction of scalars ({self.engine.label})"
            average_gradients_(what, parameters, names, self.process)
        super().backward_ends(completed, outermost)

    def notice_exception(self) -> None:
        """Clear FSDP2's state if a backward has raised. Local."""
        if self.engine.sharded.interrupted():
            self._interruption.incomplete = True
            self.engine.sharded.reset()

    def settle(self, optimizer: Optimizer | None = None) -> None:
        if optimizer is not None:
            # Resharding inside a backward would free parameters that the backward still needs.
            refuse_inside_backward()
        self.notice_exception()
        self._interruption.refuse()
        self.engine.sharded.reshard()
        if self.buffers.stale:
            self.announce("the broadcast of buffers")
            self.buffers.synchronize()

    def parts(self, parameters: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        counted, rest = list[Tensor](), list[Tensor]()
        for p, grad in zip(parameters, map(GRAD, parameters), strict=True):
            if grad is not None:
                is_rest = self._uncounted and id(self.canonical(p)) in self._uncounted
                (rest if is_rest else counted).append(grad)
        return parts_of(counted), parts_of(rest)

    def before_step(self, optimizer: Optimizer) -> None:
        self.announce_step(optimizer)


#: Optimizers of these packages pass addresses of full tensors to their own kernels.
_OWN_KERNELS = ("apex.", "bitsandbytes.", "deepspeed.")


class FSDPEngine(Engine):
    """Replaces parameters by shards. FSDP2's hooks gather and free them."""

    name = "fsdp"
    options_type: ClassVar[type[Options]] = FSDP
    placements = Placements(Placement.BY_ELEMENT, Placement.BY_ELEMENT, Placement.BY_ELEMENT)
    gradients_type: Any = FSDPGradients
    gradients: FSDPGradients
    holdings_type: Any = FSDPHoldings
    holdings: FSDPHoldings
    options: Any
    #: True between ``start`` and ``unwrap`` at world size > 1.
    divided = False
    sharded: ShardedModule
    conversion: Conversion
    #: Compares the inputs of ranks that split a layer. None without tensor parallelism.
    _same_inputs: SameInputs | None = None

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        if context.process.place.world_size == 1:
            self.gradients_type, self.holdings_type = Gradients, Holdings
        super().__init__(module, entry, context)
        #: For elementwise optimizers, by the optimizer's ``id``.
        self._local_steps: dict[int, LocalSteps] = {}

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        sizes = axes_of(options, process.place.world_size)
        if process.place.world_size > 1:
            check_module(module)
            refusals.refuse_overlaps(module, cls.name)
            refusals.refuse_sparse(module, cls.name)
            refusals.refuse_quantized(module, cls.name)
        if sizes["tensor"] > 1:
            planned_layers(module, options.plan)

    @classmethod
    def replica(cls, options: Any, process: Process) -> tuple[int, int]:
        """Return one place for ranks that split a layer."""
        place = process.place
        size = axes_of(options, place.world_size)["tensor"]
        if size == 1:
            return super().replica(options, process)
        return place.rank // size, place.world_size // size

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse | None:
        if world_size > 1 and world_size % (options.replicas * options.tensor_parallel):
            return None
        ranks, uses = axes_of(options, world_size)["shard"], list[MemoryUse]()
        for tensor in tensors:
            # FSDP2 pads dim 0, so that every rank holds the same number of rows.
            rows = next(iter(tensor.shape), 1) or 1
            fraction = math.ceil(rows / ranks) / rows
            uses.append(tensor.use(fraction, fraction, fraction))
        return add_uses(uses)

    def attach(self, optimizer: Optimizer) -> None:
        kind = type(optimizer)
        if self.distributed and kind.__module__.startswith(_OWN_KERNELS):
            raise OptimizerError(
                f"{kind.__name__} cannot train sharded parameters. "
                'Use an optimizer of torch.optim, or backend="ddp".'
            )
        super().attach(optimizer)
        if self.distributed and elementwise(optimizer):
            written = torch.autograd.graph.increment_version
            self._local_steps[id(optimizer)] = LocalSteps(optimizer, written)

    def detach(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._local_steps:
            self._local_steps.pop(id(optimizer)).close()
        super().detach(optimizer)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Shard rank 0's weights, also in optimizers. Collective."""
        if not self.distributed:
            return
        if not self.divided:
            self._shard()
        for optimizer in optimizers:
            self.holdings.rebind(optimizer)

    def _shard(self) -> None:
        # Imported here, because these import slow modules of torch.
        from .convert import Conversion
        from .shard import ShardedModule

        self.holdings.synchronize()
        separate = dict(blocks(self.module, self.options.wrap))
        self.compare("the choice of FSDP(wrap=...)", list(separate))
        what = f"gradients before accel.setup ({self.label})"
        average_gradients_(what, self.parameters, self.names, self.process)
        gradients = list(self.holdings.gradients())
        self.sharded = ShardedModule(self.module, self.process, self.options)
        self.mesh = self.sharded.mesh.whole
        self.conversion, self.divided = Conversion(self), True
        self.conversion.shard(separate)
        self._read_parameters()
        self.known = self.conversion.known
        self.gradients.start(self.sharded.mesh)
        # Keep the gradients, so that a loop may call teardown and setup between backward and step.
        for name, key, grad in gradients:
            shard = self.named[name]
            entry = StateEntry(name, tuple(shard.shape), shard, {})
            shard.grad = self.holdings.own_part(entry, key, grad, {})
        if self.sharded.mesh.parallel:
            self._match_ranks(self.sharded.mesh)
        self.started = True

    def _match_ranks(self, mesh: Mesh) -> None:
        """Give ranks that split a layer equal random states. Collective."""
        place = mesh.place["replicate"], mesh.place["shard"]
        self._same_inputs = SameInputs(self.label, place)
        states = torch_states() if mesh.place["tensor"] == 0 else None
        for other, values in agree(f"the random numbers of {self.label}", (place, states)):
            if other == place and values is not None:
                put_torch_states(values)

    def run(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        if not self.divided:
            return function(*args, **kwargs)
        sharded, same = self.sharded, self._same_inputs
        self.gradients.notice_exception()
        name = ""
        compute = functools.partial(function, *args, **kwargs)
        if function is not self.entry:
            name = getattr(function, "__name__", type(function).__name__)
            compute = functools.partial(sharded.compute, function, *args, **kwargs)
        try:
            out = compute() if same is None else same.call(compute, args, kwargs, name)
        except BaseException:
            sharded.reset()
            raise
        if torch.is_grad_enabled():
            self.gradients.buffers.touch()
        else:
            # With reshard_after_forward=False, FSDP2 would keep parameters gathered.
            sharded.reshard()
        return out

    def rebuild(self) -> None:
        # FSDP2 has recorded no dtype for a block that was frozen until now.
        for group in self.sharded.groups.values() if self.divided else ():
            group._init_mp_dtypes()

    def abandon(self, reason: str) -> None:
        super().abandon(reason)
        for group in self.sharded.groups.values() if self.divided else ():
            group.mesh_info.shard_process_group = group.mesh_info.replicate_process_group = None

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        if not self.divided:
            return
        self.conversion.restore(optimizers)
        lost = self.ended and self.conversion.old
        self.divided = False
        del self.conversion, self.sharded, self.mesh
        self._read_parameters()
        if lost:
            raise lost_weights(self)
