"""``fsdp``: torch's ``fully_shard`` (FSDP2) shards the model and its optimizers over the ranks."""

from __future__ import annotations

import logging
import math
import weakref
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
from .plan import (
    Mesh,
    Plan,
    axes_of,
    blocks,
    check_cut,
    check_mesh,
    check_module,
    check_plan,
    cut_dims,
    text_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .convert import Conversion

logger = logging.getLogger("accel")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FSDP(SequenceOptions):
    """Options of ``fsdp``. Names and meanings are those of ``fully_shard`` if it has them.

    Args:
        wrap: classes of the modules that are gathered alone, or a function that returns True for
            them. None: blocks that repeat in a ModuleList or Sequential and have submodules.
        reshard_after_forward: free gathered parameters after the forward of their block. False
            keeps them until backward.
        cpu_offload: keep shards, their gradients and optimizer state in CPU memory.
        replicas: HSDP: the number of copies of the model, each sharded over neighbouring ranks.
            Blocks are gathered within a copy, and gradients are averaged over the copies.
        tensor_parallel: the number of neighbouring ranks that split each layer named by the plan.
            They compute on the same batches, and their parts are sharded over the other ranks.
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

    def check_values(self) -> None:
        classes = isinstance(self.wrap, tuple) and all(isinstance(c, type) for c in self.wrap)
        if not (self.wrap is None or classes or callable(self.wrap)) or isinstance(self.wrap, type):
            raise BackendError(
                f"FSDP(wrap={self.wrap!r}): expected a tuple of module classes, or a function of a module"
            )
        check_plan(self.plan)
        check_mesh(self)
        if self.plan is not None and self.tensor_parallel == 1 and self.mesh is None:
            raise BackendError(
                "FSDP(plan=...) cuts nothing with tensor_parallel=1. Pass tensor_parallel=n too."
            )
        for name, allowed in (
            ("param_dtype", (torch.bfloat16,)),
            ("reduce_dtype", (torch.float32, torch.bfloat16)),
        ):
            value = getattr(self, name)
            if value not in (None, *allowed):
                raise BackendError(
                    f"FSDP({name}={value!r}): expected None or {' or '.join(map(str, allowed))}"
                )

    # A notebook cell that runs twice makes new style objects, so texts are compared.
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self) and other.wrap == self.wrap

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        """Return a text that is the same on every rank, unlike that of a function."""
        kinds = self.wrap if isinstance(self.wrap, tuple) else (self.wrap,)
        names = self.wrap and [getattr(kind, "__qualname__", type(kind).__name__) for kind in kinds]
        texts = {"wrap": names, "plan": text_of(self.plan)}
        values = texts | {f.name: getattr(self, f.name) for f in fields(self)} | texts
        return f"FSDP({', '.join(f'{name}={value}' for name, value in values.items())})"

    def axes(self, world_size: int) -> dict[str, int]:
        """Return the length of each axis of the mesh."""
        ranks = self.replicas * self.tensor_parallel
        if world_size % ranks:
            raise BackendError(
                f"FSDP(replicas={self.replicas}, tensor_parallel={self.tensor_parallel}) needs a multiple of {ranks} processes, "
                f"and there are {world_size}."
            )
        return {
            "replicate": self.replicas,
            "shard": world_size // ranks,
            "tensor": self.tensor_parallel,
        }


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

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the full values of a shard. Collective."""
        value: torch.Tensor = self.gather("first values", [("", "", parameter)])["", ""]
        return value

    def rebind(self, optimizer: Optimizer, parts: Conversion) -> None:
        """Put shards into an optimizer's groups, which schedulers hold, and shard its state."""
        for group in optimizer.param_groups:
            group["params"][:] = [parts.canonical(p) for p in group["params"]]
        names, groups = self.parameter_names, self.groups(optimizer)
        for parameter in [p for p in optimizer.state if isinstance(p, torch.Tensor)]:
            shard, state = parts.known.get(id(parameter), parameter), optimizer.state.pop(parameter)
            entry = StateEntry(names[id(shard)], tuple(shard.shape), shard, {})
            settings = groups.get(entry.name, {})
            optimizer.state[shard] = {
                key: self.own_part(entry, key, v, settings) for key, v in state.items()
            }

    def restore(self, parts: Conversion, optimizers: Sequence[Optimizer]) -> None:
        """Put full values into the old parameters: NaN if a rank can't be reached. Collective."""
        engine, what = self.engine, "the end of a sharded model"
        whole: dict[tuple[str, Any], torch.Tensor] | None = None
        old = {name: p for name, (p, _) in parts.replaced.items()}
        try:
            if not old:  # setup has failed
                whole = {}
            elif not engine.ended:
                held = [(name, "", p) for name, p in engine.named.items() if name in old]
                grads = [(name, key, grad) for name, key, grad in self.gradients() if name in old]
                whole = self.gather(what, [*held, *grads])
        except (RuntimeError, AccelError) as error:
            engine.ended, whole = (
                str(error) if isinstance(error, AccelError) else reason_of(error),
                None,
            )
        parts.restore(whole, optimizers)

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Return parameters that every rank holds, and shards that other ranks hold too, with the shard in their names."""
        mesh, shards = self.engine.parts.sharded.mesh, self._shards()
        found: list[tuple[str, torch.Tensor]] = []
        for name, p in self.engine.named.items():
            copies = mesh.copies(p)
            place = [str(mesh.place[axis]) for axis in ("shard", "tensor") if axis not in copies]
            if id(p) not in shards:
                found.append((name, p))
            elif any(mesh.sizes[axis] > 1 for axis in copies):
                found.append(
                    (f"{name} (part {' of part '.join(place)})" if place else name, here(p))
                )
        return found

    def _shards(self) -> set[int]:
        return {id(p.sharded_param) for p in self.engine.parts.sharded.params}


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

    def settle(self, optimizer: Optimizer | None = None) -> None:
        parts = self.engine.parts
        if optimizer is not None:  # it would free what the backward still needs
            refuse_inside_backward()
        parts.notice_exception()
        parts.interruption.refuse()
        parts.average_scalars()
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
        if not elementwise(optimizer):
            self.engine.parts.age(p for p in parameters_of(optimizer) if p.grad is not None)


#: Optimizers that don't compute with shards, or not as they would with whole tensors.
_REFUSED = ("Adafactor", "LBFGS", "SparseAdam")
#: Packages whose optimizers pass addresses of whole tensors to their kernels.
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
                    "sequence_parallel and tensor_parallel exclude each other: both divide the heads"
                )
            check_cut(module, options.plan, sizes["tensor"])

    @classmethod
    def replica(cls, options: Any, process: Process) -> tuple[int, int]:
        """Let ranks that split a layer read the same batches."""
        place, size = process.place, axes_of(options, process.place.world_size)["tensor"]
        return (
            super().replica(options, process)
            if size == 1
            else (place.rank // size, place.world_size // size)
        )

    @classmethod
    def predict(
        cls, module: nn.Module, tensors: Sequence[TensorSize], options: Any, world_size: int
    ) -> MemoryUse | None:
        """Shard every parameter, gradient and state evenly along the first dimension, with padding.

        Layers of a tensor-parallel plan are cut before that.
        """
        try:
            sizes = axes_of(options, world_size)
            cuts = cut_dims(module, options.plan) if sizes["tensor"] > 1 else {}
        except BackendError:
            return None
        if sizes["tensor"] > 1 and not cuts:
            return None
        uses = []
        for tensor in tensors:
            rows = next(iter(tensor.shape), 1)
            fraction = 1.0
            if (dim := cuts.get(tensor.name)) is not None:
                if tensor.shape[dim] % sizes["tensor"]:
                    return None
                fraction /= sizes["tensor"]
                rows //= sizes["tensor"] if dim == 0 else 1
            if rows > 0:
                fraction *= math.ceil(rows / sizes["shard"]) / rows
            uses.append(tensor.use(fraction, fraction, fraction))
        return add_uses(uses)

    def attach(self, optimizer: Optimizer) -> None:
        if not self.distributed:
            super().attach(optimizer)
            return
        kind = type(optimizer)
        packages = {c.__module__.partition(".")[0] for c in kind.__mro__}
        if kind.__name__ in _REFUSED or packages & _OWN_KERNELS:
            raise OptimizerError(
                f'{kind.__name__} cannot train sharded parameters. Use an optimizer like AdamW or SGD, or backend="ddp".'
            )
        if isinstance(optimizer, torch.optim.Muon):
            muon_patch().need(optimizer)
        super().attach(optimizer)
        if elementwise(optimizer):
            self._local_steps[id(optimizer)] = LocalSteps(optimizer, _stepping(weakref.ref(self)))

    def detach(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, torch.optim.Muon) and self.distributed:
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
                "FSDP(wrap=...) chooses no module of this %s, so it is gathered as a whole. Is a class missing?",
                self.kind,
            )
        self.parts, self.divided = Conversion(self), True
        self.parts.shard(names, self.holdings.whole)
        self._read_parameters()
        self.parts.begin()
        self.known = self.parts.known
        self._draw_alike(self.parts.sharded.mesh)
        self.started = True

    def _draw_alike(self, mesh: Mesh) -> None:
        """Give ranks that split a layer equal random numbers, and compare inputs. Collective."""
        if mesh.parallel:
            place = mesh.place["replicate"], mesh.place["shard"]
            self._same_inputs = SameInputs(self.label, place)
            states = torch_states() if mesh.place["tensor"] == 0 else None
            from_ranks = agree(f"the random numbers of {self.label}", (place, states))
            put_torch_states(
                next(
                    states for other, states in from_ranks if other == place and states is not None
                )
            )

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.divided:
            return function(*args, **kwargs)
        sharded, grad = self.parts.sharded, torch.is_grad_enabled()
        is_forward = function is self.entry
        name = "" if is_forward else getattr(function, "__name__", type(function).__name__)

        def compute() -> Any:
            return (
                function(*args, **kwargs) if is_forward else sharded.compute(function, args, kwargs)
            )

        self.parts.notice_exception()
        try:
            out = (
                compute()
                if self._same_inputs is None
                else self._same_inputs.call(compute, args, kwargs, name)
            )
        except BaseException as error:
            sharded.reset()
            if text := _explained(str(error), self.label):
                raise BackendError(text) from error
            raise
        if not grad and torch._C._current_graph_task_id() == -1:  # with reshard_after_forward=False
            sharded.reshard()
        if grad:
            self.gradients.buffers.touch()
        return out

    def rebuild(self) -> None:
        """Renew the dtypes of FSDP2's groups. It follows ``requires_grad``, but not in these."""
        if self.divided:
            for group in self.parts.sharded.groups:
                group._init_mp_dtypes()

    def abandon(self, reason: str) -> None:
        super().abandon(reason)
        if self.divided:
            self.parts.sharded.let_go()

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        if self.divided:
            self.holdings.restore(self.parts, optimizers)
            lost = self.ended and self.parts.replaced
            self.divided = False
            del self.parts
            self._read_parameters()
            if lost:
                raise lost_weights(self)


def _stepping(reference: weakref.ref[FSDPEngine]) -> Callable[[Sequence[torch.Tensor]], None]:
    """Tell an engine of shards that a step is about to change. The engine is not kept alive."""

    def stepping(shards: Sequence[torch.Tensor]) -> None:
        if (engine := reference()) is not None and engine.divided:
            engine.parts.stepping(shards)

    return stepping


def _explained(text: str, label: str) -> str:
    """Return what torch's error in a forward means for sharded weights, or ""."""
    if "mixed torch.Tensor and DTensor" in text:
        return (
            f"{label} uses weights of a block outside of the block's forward, or after a backward in a method, where they are "
            "sharded. Let FSDP(wrap=...) name the class whose forward uses them, or call p.full_tensor() on every rank."
        )
    if "RegisterPostBackwardFunction" in text:
        return (
            f"A block of {label} writes in place to its own input (nn.ReLU(inplace=True) as its first layer, x += ...), which "
            "is a view that FSDP2 made. Leave inplace out, or begin the block with x = x.clone()."
        )
    return ""
