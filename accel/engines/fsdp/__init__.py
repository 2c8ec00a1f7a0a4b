"""``fsdp``: torch's ``fully_shard`` (FSDP2) shards the model and its optimizers over the ranks."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import AccelError, BackendError, OptimizerError
from ...gradients.patches import muon_patch
from ...precision import here
from ...process import Process, reason_of
from ...process.control import agree
from ...process.rng import put_torch_states, torch_states
from ...shard import Shard, StateEntry, parameters_of
from ..base.activations import Choice
from ..base.engine import Context, Engine, lost_weights
from ..base.gradients import (
    Gradients,
    refuse_inside_backward,
    refuse_overlaps,
    refuse_quantized,
    refuse_scripts,
    refuse_sparse,
)
from ..base.holdings import Holdings
from ..base.inputs import SameInputs
from ..base.memory import MemoryUse, TensorSize, add_uses
from ..base.options import Options, SequenceOptions
from ..base.parts import LocalSteps, elementwise
from ..base.placement import Placement, Placements
from ..base.raw_objects import Snapshot
from ..base.sequence import sequence_size
from ..base.step import refuse_steps
from .plan import (
    Mesh,
    Plan,
    axes_in,
    axes_of,
    blocks,
    check_module,
    check_plan,
    is_mesh,
    is_plan,
    split_dims,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .convert import Conversion

logger = logging.getLogger("accel")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FSDP(SequenceOptions):
    """Options of ``fsdp``. Names and meanings are those of ``fully_shard`` if it has them.

    Args:
        wrap: classes of the modules that are gathered one by one, or a function that returns True
            for them. None: blocks that repeat in a ModuleList or Sequential and have submodules.
        reshard_after_forward: free gathered parameters after the forward of their block. False
            keeps them until backward.
        cpu_offload: keep shards, their gradients and optimizer state in CPU memory.
        replicas: HSDP: the number of copies of the model, each sharded over neighboring ranks.
            Blocks are gathered within a copy, and gradients are averaged over the copies.
        tensor_parallel: the number of neighboring ranks that split each layer named by the plan.
            They compute on the same batches, and their shards are sharded over the other ranks.
        plan: styles of ``torch.distributed.tensor.parallel`` by the names of modules, in which
            ``*`` stands for one part of a name. None: the ``tp_plan`` of a transformers model.
        mesh: a mesh of all ranks, instead of ``replicas`` and ``tensor_parallel``. Its axes are
            "replicate", "shard" and "tensor", of which "shard" is required.
        param_dtype: FSDP2's mixed precision: gather and compute in this dtype (torch.bfloat16).
        reduce_dtype: reduce gradients in this dtype. None: float32 with ``param_dtype``, else the
            dtype of the parameters.
    """

    wrap: Choice = None
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    replicas: int = 1
    tensor_parallel: int = 1
    plan: Plan = None
    mesh: DeviceMesh | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    choices = {
        "param_dtype": (None, torch.bfloat16),
        "reduce_dtype": (None, torch.float32, torch.bfloat16),
    }

    def check_values(self) -> None:
        wrap, mesh, plan = self.wrap, self.mesh, self.plan
        classes = isinstance(wrap, tuple) and all(isinstance(c, type) for c in wrap)
        valid = wrap is None or classes or (callable(wrap) and not isinstance(wrap, type))
        self.expect("wrap", valid, "a tuple of module classes, or a function of a module")
        valid = mesh is None or (is_mesh(mesh) and self.replicas == self.tensor_parallel == 1)
        names = "named 'replicate', 'shard' and 'tensor', in this order"
        self.expect("mesh", valid, f"a DeviceMesh with dimensions {names}, instead of replicas")
        valid = plan is None or is_plan(plan)
        self.expect("plan", valid, 'styles by module names: {"layers.*.up": ColwiseParallel()}')
        splits = self.tensor_parallel > 1 or "tensor" in axes_in(mesh)
        self.expect("plan", plan is None or splits, "tensor_parallel=n or a mesh with 'tensor' too")

    # A notebook cell that runs twice makes new style objects, so texts are compared.
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self) and other.wrap == self.wrap

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        """Return a text that is the same on every rank, unlike that of a function."""
        kinds = self.wrap if isinstance(self.wrap, tuple) else (self.wrap,)
        names = self.wrap and [getattr(kind, "__qualname__", type(kind).__name__) for kind in kinds]
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["wrap"] = names
        return f"FSDP({', '.join(f'{name}={value}' for name, value in values.items())})"


FSDP.shown = FSDP(replicas=2), FSDP(tensor_parallel=8)


@final
class FSDPHoldings(Holdings):
    """Each rank holds rows of each tensor."""

    engine: FSDPEngine
    offloads = True
    materializes = True

    @property
    def mesh(self) -> DeviceMesh | None:
        return self.engine.parts.sharded.mesh.whole

    def partial(self, optimizer: Optimizer | None) -> bool:
        return self.engine.divided

    @property
    def snapshot(self) -> Snapshot | None:
        return self.engine.parts.sharded.snapshot if self.engine.divided else None

    def prepare(self, *, writing: bool) -> None:
        self.engine.parts.sharded.reshard()

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        return self.engine.parts.part(f"{name}/{key}" if key else name, tensor)

    def new_state(
        self, entry: StateEntry, key: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return self.engine.parts.new(entry.parameter, shape, dtype)

    def full(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the full values of a shard. Collective."""
        value: torch.Tensor = self.gather("first values", [("", "", parameter)])["", ""]
        return value

    def rebind(self, optimizer: Optimizer, parts: Conversion) -> None:
        """Put shards into an optimizer's groups, which schedulers hold, and shard its state."""
        for group in optimizer.param_groups:
            group["params"][:] = [parts.canonical(p) for p in group["params"]]
        names, groups = self.parameter_names, self.groups(optimizer)
        for parameter in [p for p in optimizer.state if isinstance(p, torch.Tensor)]:
            shard, state = parts.canonical(parameter), optimizer.state.pop(parameter)
            entry = StateEntry(names[id(shard)], tuple(shard.shape), shard, {})
            settings = groups.get(entry.name, {})
            optimizer.state[shard] = {
                key: self.own_part(entry, key, value, settings) for key, value in state.items()
            }

    def restore(self, parts: Conversion, optimizers: Sequence[Optimizer]) -> None:
        """Put full values into the old parameters: NaN if a rank can't be reached. Collective."""
        engine, what = self.engine, "the end of a sharded model"
        old = {name: p for name, (p, _) in parts.replaced.items()}
        full: dict[tuple[str, Any], torch.Tensor] = {}
        try:
            if old and not engine.ended:
                shards = [(name, "", engine.named[name]) for name in old]
                gradients = [item for item in self.gradients() if item[0] in old]
                full = self.gather(what, [*shards, *gradients])
                for optimizer in optimizers:
                    self.give_back(what, optimizer, engine.named | old)
        except (RuntimeError, AccelError) as error:
            engine.ended = str(error) if isinstance(error, AccelError) else reason_of(error)
        lost = bool(old and engine.ended)
        parts.restore(None if lost else full, optimizers)
        for optimizer in optimizers if lost else ():
            refuse_steps(optimizer, engine.ended)

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Return tensors that other ranks hold too. A shard has its place in its name."""
        mesh = self.engine.parts.sharded.mesh
        tensors: list[tuple[str, torch.Tensor]] = []
        for name, p in self.engine.named.items():
            copies = mesh.copies(p)
            place = [f"{axis} {n}" for axis, n in mesh.place.items() if axis not in copies]
            if any(mesh.sizes[axis] > 1 for axis in copies):
                tensors.append((f"{name} ({', '.join(place)})" if place else name, here(p)))
        return tensors


@final
class FSDPGradients(Gradients):
    """FSDP2 reduces gradients in its hooks during every backward, inside ``no_sync`` too."""

    reduced = before_any_step = True
    engine: FSDPEngine

    def canonical(self, parameter: nn.Parameter) -> nn.Parameter:
        return self.engine.parts.canonical(parameter) if self.engine.divided else parameter

    def check(self, optimizer: Optimizer) -> None:
        """Refuse parameters of other models, and replace old parameters by their shards."""
        super().check(optimizer)
        if self.engine.divided:
            self.engine.holdings.rebind(optimizer, self.engine.parts)

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        return self.engine.parts.leaf(parameter)

    def backward_begins(self) -> None:
        super().backward_begins()
        if self.engine.divided and self.engine.parts.interruption.incomplete:
            self.engine.parts.forget_dropped()

    def backward_ends(self, completed: bool, outermost: bool) -> None:
        if completed and outermost and self.engine.divided and not self.engine.ended:
            self.engine.parts.average_replicated()
        super().backward_ends(completed, outermost)

    def settle(self, optimizer: Optimizer | None = None) -> None:
        parts = self.engine.parts
        if optimizer is not None:  # it would free what the backward still needs
            refuse_inside_backward()
        parts.notice_exception()
        parts.interruption.refuse()
        parts.sharded.reshard()
        if self.buffers.stale:
            self.announce("the broadcast of buffers")
            self.buffers.synchronize()

    def parts(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self.engine.parts.gradients(parameters)

    def before_step(self, optimizer: Optimizer) -> None:
        self.announce_step(optimizer)
        # A backward of an earlier forward then raises, as it does in one process.
        stepped = [self.leaf(p) for p in parameters_of(optimizer) if p.grad is not None]
        torch.autograd.graph.increment_version(stepped)


#: Optimizers that don't compute with shards, or not as they would with full tensors.
_REFUSED = ("Adafactor", "LBFGS", "SparseAdam")
#: Packages whose optimizers pass addresses of full tensors to their kernels.
_OWN_KERNELS = {"apex", "bitsandbytes", "deepspeed"}


class FSDPEngine(Engine):
    """Replaces parameters by shards, which FSDP2 gathers and frees in its hooks."""

    name = "fsdp"
    options_type: ClassVar[type[Options]] = FSDP
    placements = Placements(Placement.BY_ELEMENT, Placement.BY_ELEMENT, Placement.BY_ELEMENT)
    gradients_type: Any = FSDPGradients
    gradients: FSDPGradients
    holdings_type: Any = FSDPHoldings
    holdings: FSDPHoldings
    options: Any
    #: True between ``start`` and ``unwrap`` at world size > 1. Then there are ``parts``.
    divided = False
    parts: Conversion

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        if context.process.place.world_size == 1:  # nothing is sharded
            self.gradients_type, self.holdings_type = Gradients, Holdings
        super().__init__(module, entry, context)
        #: With tensor parallelism.
        self._same_inputs: SameInputs | None = None
        #: By the identity of elementwise optimizers.
        self._local_steps: dict[int, LocalSteps] = {}

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        sizes = axes_of(options, process.place.world_size)
        if process.place.world_size > 1:
            check_module(module)
            for refuse in (refuse_scripts, refuse_overlaps, refuse_sparse, refuse_quantized):
                refuse(module, cls.name)
        if sizes["tensor"] > 1:
            if sequence_size(options, process) > 1:
                raise BackendError(
                    "sequence_parallel and tensor_parallel both divide the heads. Use one of them."
                )
            check_plan(module, options.plan, sizes["tensor"])

    @classmethod
    def replica(cls, options: Any, process: Process) -> tuple[int, int]:
        """Let ranks that split a layer read the same batches."""
        place, size = process.place, axes_of(options, process.place.world_size)["tensor"]
        if size == 1:
            return super().replica(options, process)
        return place.rank // size, place.world_size // size

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse | None:
        """Shard everything evenly along the first dimension, with padding, once layers are split."""
        try:
            sizes = axes_of(options, world_size)
            if sizes["tensor"] > 1:
                check_plan(module, options.plan, sizes["tensor"])
        except BackendError:
            return None
        dims = split_dims(module, options.plan) if sizes["tensor"] > 1 else {}
        uses: list[MemoryUse] = []
        for tensor in tensors:
            rows, dim = next(iter(tensor.shape), 1), dims.get(tensor.name)
            rows //= sizes["tensor"] if dim == 0 else 1
            fraction = 1.0 if dim is None else 1 / sizes["tensor"]
            if rows > 0:
                fraction *= math.ceil(rows / sizes["shard"]) / rows
            uses.append(tensor.use(fraction, fraction, fraction))
        return add_uses(uses)

    def attach(self, optimizer: Optimizer) -> None:
        kind = type(optimizer)
        packages = {cls.__module__.partition(".")[0] for cls in kind.__mro__}
        refused = kind.__name__ in _REFUSED or packages & _OWN_KERNELS
        if self.distributed and refused:
            raise OptimizerError(
                f"{kind.__name__} cannot train sharded parameters. "
                'Use an optimizer like AdamW or SGD, or backend="ddp".'
            )
        super().attach(optimizer)
        if self.distributed and isinstance(optimizer, torch.optim.Muon):
            muon_patch().need(optimizer)
        if self.distributed and elementwise(optimizer):
            written = torch.autograd.graph.increment_version
            self._local_steps[id(optimizer)] = LocalSteps(optimizer, written)

    def detach(self, optimizer: Optimizer) -> None:
        if self.distributed and isinstance(optimizer, torch.optim.Muon):
            muon_patch().drop(optimizer)
        if (steps := self._local_steps.pop(id(optimizer), None)) is not None:
            steps.close()
        super().detach(optimizer)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Take rank 0's weights, and replace parameters by shards, in the optimizers too."""
        if not self.distributed:
            return
        if not self.divided:
            self._shard()
        for optimizer in optimizers:
            self.holdings.rebind(optimizer, self.parts)

    def _shard(self) -> None:
        from .convert import Conversion  # slow to import, because torch's own code is

        self.holdings.synchronize()
        names = [name for name, _ in blocks(self.module, self.options.wrap)]
        self.compare("the choice of FSDP(wrap=...)", names)
        if self.options.wrap is not None and not names and self.process.place.rank == 0:
            logger.warning(
                "FSDP(wrap=...) chooses no module of this %s, so it is gathered as a whole. "
                "Is a class missing?",
                self.kind,
            )
        self.parts, self.divided = Conversion(self), True
        self.parts.shard(names, self.holdings.full)
        self._read_parameters()
        self.known = self.parts.known
        if self.parts.sharded.mesh.parallel:
            self._match_ranks(self.parts.sharded.mesh)
        self.started = True

    def _match_ranks(self, mesh: Mesh) -> None:
        """Give ranks that split a layer equal random numbers, and compare inputs. Collective."""
        place = mesh.place["replicate"], mesh.place["shard"]
        self._same_inputs = SameInputs(self.label, place)
        states = torch_states() if mesh.place["tensor"] == 0 else None
        for other, values in agree(f"the random numbers of {self.label}", (place, states)):
            if other == place and values is not None:
                put_torch_states(values)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.divided:
            return function(*args, **kwargs)
        sharded = self.parts.sharded
        self.parts.notice_exception()
        name = ""
        compute = functools.partial(function, *args, **kwargs)
        if function is not self.entry:
            name = getattr(function, "__name__", type(function).__name__)
            compute = functools.partial(sharded.compute, function, args, kwargs)
        try:
            if self._same_inputs is not None:
                out = self._same_inputs.call(compute, args, kwargs, name)
            else:
                out = compute()
        except BaseException:
            sharded.reset()
            raise
        if torch.is_grad_enabled():
            self.gradients.buffers.touch()
        elif torch._C._current_graph_task_id() == -1:  # with reshard_after_forward=False
            sharded.reshard()
        return out

    def rebuild(self) -> None:
        if self.divided:
            self.parts.sharded.refresh_dtypes()

    def abandon(self, reason: str) -> None:
        super().abandon(reason)
        if self.divided:
            self.parts.sharded.release_groups()

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        if self.divided:
            self.holdings.restore(self.parts, optimizers)
            lost = self.ended and self.parts.replaced
            self.divided = False
            del self.parts
            self._read_parameters()
            self.gradients.close()
            if lost:
                raise lost_weights(self)
