"""``fsdp``: torch's ``fully_shard`` (FSDP2): parameters, gradients and optimizer state lie in shards on the ranks."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
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
from ..base.engine import Context, Engine, Options, SequenceOptions, lost_weights
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
from ..base.local import LocalSteps, elementwise
from ..base.memory import MemoryUse, TensorSize, add_uses
from ..base.sequence import sequence_size
from ..base.step import refuse_steps
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

    from .conversion import Conversion

logger = logging.getLogger("accel")


@final
class FSDPHoldings(Holdings):
    """Rows of each tensor."""

    engine: FSDPEngine
    offloads = True
    materializes = True
    packages = ("accel.", "torch.distributed.fsdp.", "torch.distributed.tensor.")

    @property
    def mesh(self) -> DeviceMesh | None:
        return self.engine.parts.sharded.mesh.whole

    def partial(self, optimizer: Optimizer | None) -> bool:
        return self.engine.divided

    def added(self, owner: nn.Module | nn.Parameter) -> set[str]:
        """FSDP2's own too; all of a shard's."""
        snapshot = self.engine.parts.sharded.snapshot
        return super().added(owner) | (snapshot.added(owner) if isinstance(owner, nn.Module) else set(vars(owner)))

    def prepare(self, *, writing: bool) -> None:
        self.engine.parts.sharded.reshard()

    def _whole_tensors(
        self, what: str, *, copied: bool = False, keep: bool = True
    ) -> tuple[dict[int, torch.Tensor], dict[str, Any]]:
        """A copy has them in the places of what the shards replaced too, which a module may list."""
        others, extra = super()._whole_tensors(what, copied=copied, keep=keep)
        replaced = self.engine.parts.replaced.values() if copied else ()
        return others | {id(old): others[id(shard)] for old, shard in replaced}, extra

    def part(self, name: str, tensor: torch.Tensor, key: Any = "") -> Shard | None:
        return self.engine.parts.part(f"{name}/{key}" if key else name, tensor)

    def new_state(self, entry: StateEntry, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.engine.parts.new(entry.parameter, shape, dtype)

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        value: torch.Tensor = self.gather("first values", [("", "", parameter)])["", ""]
        return value

    def rebind(self, optimizer: Optimizer, parts: Conversion) -> None:
        """Put shards into the optimizer's groups, and cut its state. In place."""
        for group in optimizer.param_groups:
            group["params"][:] = [parts.canonical(p) for p in group["params"]]
        names, groups = self.parameter_names, self.groups(optimizer)
        for parameter in [p for p in optimizer.state if isinstance(p, torch.Tensor)]:
            shard, state = parts.known.get(id(parameter), parameter), optimizer.state.pop(parameter)
            entry = StateEntry(names[id(shard)], tuple(shard.shape), shard, {})
            its = groups.get(entry.name, {})
            optimizer.state[shard] = {key: self.own_part(entry, key, value, its) for key, value in state.items()}

    def restore(self, parts: Conversion, optimizers: Sequence[Optimizer]) -> None:
        """Whole values in the objects that held them before; nan where a rank cannot be reached. Collective, but for that."""
        engine, what = self.engine, "the end of a divided model"
        whole: dict[tuple[str, Any], torch.Tensor] | None = None
        old = {name: p for name, (p, _) in parts.replaced.items()}
        try:
            if not old:  # setup has failed
                whole = {}
            elif not engine.ended:
                held = [(name, "", p) for name, p in engine.named.items() if name in old]
                grads = [(name, key, grad) for name, key, grad in self.gradients() if name in old]
                whole = self.gather(what, [*held, *grads])
                for optimizer in optimizers:
                    self.give_back(what, optimizer, engine.named | old)
        except (RuntimeError, AccelError) as error:
            engine.ended, whole = str(error) if isinstance(error, AccelError) else reason_of(error), None
        parts.restore(whole, optimizers)
        if whole is None:
            for optimizer in optimizers:
                refuse_steps(optimizer, engine.ended)

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        shards = self._shards()
        return [(name, p) for name, p in super().replicas() if id(p) not in shards]

    def replicated_parts(self) -> Mapping[str, Sequence[tuple[str, torch.Tensor]]]:
        """The shards that other ranks have too, by their place along the axes that they are divided along."""
        mesh, shards = self.engine.parts.sharded.mesh, self._shards()
        found: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, p in super().replicas():
            copies = mesh.copies(p)
            place = [mesh.place[axis] for axis in ("shard", "tensor") if axis not in copies]
            those = found.setdefault(f"part {' of part '.join(map(str, place))}" if place else "whole", [])
            if id(p) in shards and any(mesh.sizes[axis] > 1 for axis in copies):
                those.append((name, here(p)))
        return {place: those for place, those in found.items() if those}

    def _shards(self) -> set[int]:
        return {id(p.sharded_param) for p in self.engine.parts.sharded.params}


#: Optimizers of torch that do not compute with shards, or not what they would with whole tensors.
_REFUSED = ("Adafactor", "LBFGS", "Rprop", "SparseAdam")
#: Optimizers of torch that compute with whole matrices, which they are given one at a time.
_WHOLE_MATRICES: tuple[type, ...] = (torch.optim.Muon,)
#: Packages whose optimizers hand addresses of whole tensors to kernels of their own.
_OWN_KERNELS = {"apex", "bitsandbytes", "deepspeed"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FSDP(SequenceOptions):
    """Options of ``fsdp``; names and meanings are those of ``fully_shard`` where it has them.

    Args:
        wrap: what is gathered as one: classes of modules, or a function of a module that says so. None: blocks that
            repeat in a ModuleList or Sequential and have submodules of their own.
        reshard_after_forward: free gathered parameters after the forward of their block; False keeps them until backward.
        cpu_offload: shards, their gradients and optimizer state lie in the host's memory.
        replicas: HSDP: so many copies of the model, each divided over the ranks of its own, which are neighbours (those of
            one host, say). Blocks are gathered among these; the copies average what they have of the gradients.
        tensor_parallel: so many neighbours have a part of each layer that the plan names, compute on the same batches, and
            divide their parts over the others.
        plan: styles of ``torch.distributed.tensor.parallel`` by the names of modules, in which ``*`` stands for one part of a
            name. None: the model's own (``tp_plan`` of transformers).
        mesh: instead of replicas and tensor_parallel, a mesh of all ranks with axes "replicate", "shard" and "tensor", of
            which it has at least "shard".
        param_dtype: FSDP2's own mixed precision: gather and compute in this dtype (torch.bfloat16).
        reduce_dtype: reduce gradients in this dtype. None: float32 with ``param_dtype``, else the dtype of the parameters.
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
                "FSDP(plan=...) cuts nothing with tensor_parallel=1: say over how many ranks, or leave it out"
            )
        for name, allowed in (("param_dtype", (torch.bfloat16,)), ("reduce_dtype", (torch.float32, torch.bfloat16))):
            if getattr(self, name) not in (None, *allowed):
                raise BackendError(
                    f"FSDP({name}={getattr(self, name)!r}): expected None or {' or '.join(map(str, allowed))}"
                )

    # Styles are objects that a notebook cell makes anew when it runs again, so options are equal if their texts are.
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self) and other.wrap == self.wrap

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        """Return a text that is the same on every rank, which the text of a function or style is not."""
        kinds = self.wrap if isinstance(self.wrap, tuple) else (self.wrap,)
        names = self.wrap and [getattr(kind, "__qualname__", type(kind).__name__) for kind in kinds]
        first = {"wrap": names, "plan": text_of(self.plan)}
        values = first | {f.name: getattr(self, f.name) for f in fields(self)} | first
        return f"FSDP({', '.join(f'{name}={value}' for name, value in values.items())})"

    def axes(self, world_size: int) -> dict[str, int]:
        ranks = self.replicas * self.tensor_parallel
        if world_size % ranks:
            parts = f", each of {self.tensor_parallel} ranks or a multiple" if self.tensor_parallel > 1 else ""
            options = f"replicas={self.replicas}" + (f", tensor_parallel={self.tensor_parallel}" if parts else "")
            raise BackendError(
                f"FSDP({options}): {world_size} processes do not divide into {self.replicas} copies of the model{parts}"
            )
        return {"replicate": self.replicas, "shard": world_size // ranks, "tensor": self.tensor_parallel}


FSDP.shown = FSDP(replicas=2), FSDP(tensor_parallel=8)


@final
class FSDPGradients(Gradients):
    """FSDP2 reduces in its hooks while every backward runs, inside ``no_sync`` too."""

    reduced = partial = before_any_step = in_parts = True
    engine: FSDPEngine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.local_steps: weakref.WeakKeyDictionary[Optimizer, LocalSteps] = weakref.WeakKeyDictionary()

    def canonical(self, parameter: nn.Parameter) -> nn.Parameter:
        return self.engine.parts.canonical(parameter) if self.engine.divided else parameter

    def check(self, optimizer: Optimizer) -> None:
        """Refuse strangers; replaced parameters become their shards."""
        super().check(optimizer)
        if self.engine.divided:
            self.engine.holdings.rebind(optimizer, self.engine.parts)

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        return self.engine.parts.leaf(parameter)

    def pending(self) -> bool:
        engine = self.engine
        return engine.divided and bool(engine.parts.scalar_log.entries)

    def settle(self, optimizer: Optimizer | None = None) -> None:
        parts = self.engine.parts
        if optimizer is not None:  # it would free what the backward still needs
            refuse_inside_backward()
        parts.backwards.notice_exception()
        parts.backwards.interruption.refuse()
        # Every rank has scalars whole: also a gradient that was assigned by hand is to be their mean.
        assigned = optimizer is not None and (not parts.had_backward or parts.scalar_log.repeats(optimizer))
        if parts.scalar_log.entries or assigned:
            parts.average_scalars()
        parts.scalar_log.fold(stepping=optimizer)
        parts.sharded.reshard()
        if self.buffers.stale:
            self.announce("the broadcast of buffers")
            self.buffers.synchronize()

    def parts(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self.engine.parts.gradients(parameters)

    def norm_for_user(self, norm: torch.Tensor) -> torch.Tensor:
        """A DTensor, as torch returns it."""
        return self.engine.parts.whole(norm)

    def before_step(self, optimizer: Optimizer) -> None:
        """Make a backward from an earlier forward an error, as a step in place does in one process."""
        self.announce_step(optimizer)
        if elementwise(optimizer) is None:
            self.engine.parts.age(p for p in parameters_of(optimizer) if p.grad is not None)

    def stepped_as(self, optimizer: Optimizer) -> Optimizer:
        """Elementwise ones compute with this rank's rows."""
        if (kind := elementwise(optimizer)) is None:
            return optimizer
        return self.local_steps.setdefault(optimizer, LocalSteps(self.engine.parts.stepping)).view(optimizer, kind)

    def after_step(self, optimizer: Optimizer) -> None:
        if optimizer in self.local_steps:
            self.local_steps[optimizer].end()


def _explained(text: str, label: str) -> str:
    """Return what an error of torch's in a forward means for sharded weights, or "" if there is nothing to add."""
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


class FSDPEngine(Engine):
    """Puts shards in the parameters' places when it starts; FSDP2 gathers and frees them in its hooks."""

    name = "fsdp"
    options_type: ClassVar[type[Options]] = FSDP
    gradients_type: Any = FSDPGradients
    gradients: FSDPGradients
    holdings_type: Any = FSDPHoldings
    holdings: FSDPHoldings
    options: Any
    #: From ``start`` to ``unwrap``, over several ranks: then there are ``parts``.
    divided = False
    parts: Conversion

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        if context.process.place.world_size == 1:  # everything is whole
            self.gradients_type, self.holdings_type = Gradients, Holdings
        super().__init__(module, entry, context)
        #: Of tensor parallelism.
        self._alike: SameInputs | None = None

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        sizes = axes_of(options, process.place.world_size)
        if process.place.world_size > 1:
            refuse_scripts(module, cls.name)
            check_module(module, options)
            refuse_overlaps(module, cls.name)
            refuse_sparse(module, cls.name)
            refuse_quantized(module, cls.name)
        if sizes["tensor"] > 1:
            if sequence_size(options, process) > 1:
                raise BackendError("sequence_parallel and tensor_parallel exclude each other: both divide the heads")
            check_cut(module, options.plan, sizes["tensor"])

    @classmethod
    def replica(cls, options: Any, process: Process) -> tuple[int, int]:
        """Ranks that have parts of one layer read one batch."""
        place, alike = process.place, axes_of(options, process.place.world_size)["tensor"]
        return super().replica(options, process) if alike == 1 else (place.rank // alike, place.world_size // alike)

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
        kind, why = type(optimizer).__name__, ""
        packages = {c.__module__.partition(".")[0] for c in type(optimizer).__mro__}
        fused = kind not in ("Adam", "AdamW") and any(group.get("fused") for group in optimizer.param_groups)
        if kind in _REFUSED and not elementwise(optimizer):
            why = "it needs whole tensors; use an elementwise optimizer such as AdamW or SGD, or backend='ddp'"
        elif theirs := packages & _OWN_KERNELS:
            why = f"the kernels of {theirs.pop()} take whole tensors; use an optimizer of torch or torchao, or backend='ddp'"
        elif fused and not elementwise(optimizer):
            kind, why = f"{kind}(fused=True)", "leave fused out"
        if why:
            raise OptimizerError(f"{kind} cannot train sharded parameters (backend {self.name!r}): {why}")
        if isinstance(optimizer, _WHOLE_MATRICES):
            muon_patch().need(optimizer)
        super().attach(optimizer)
        self.holdings.guard.watch(optimizer)

    def detach(self, optimizer: Optimizer) -> None:
        if self.distributed:
            if isinstance(optimizer, _WHOLE_MATRICES):
                muon_patch().drop(optimizer)
            self.gradients.local_steps.pop(optimizer, None)
        super().detach(optimizer)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Rank 0's weights, then shards in their place; the optimizers are rebound in place."""
        if not self.distributed:
            return
        if not self.divided:
            from .conversion import Conversion  # heavy, as torch's own code for it is

            self.holdings.synchronize()
            names = [name for name, _ in blocks(self.module, self.options.wrap)]
            self.compare("the choice of FSDP(wrap=...)", names)
            if self.options.wrap is not None and not names and self.process.place.rank == 0:
                what = "FSDP(wrap=...) chooses no module of this %s, which is gathered as a whole: is a class in it missing?"
                logger.warning(what, self.kind)
            self.parts, self.divided = Conversion(self), True
            self.parts.shard(names, self.holdings.whole)
            self.holdings.guard.watch_modules(self.module, lambda m: any(True for _ in m.parameters()))
            self._read_parameters()
            self.parts.begin()
            self.known = self.parts.known
            self._draw_alike(self.parts.sharded.mesh)
            self.started = True
        for optimizer in optimizers:
            self.holdings.rebind(optimizer, self.parts)

    def _draw_alike(self, mesh: Mesh) -> None:
        """Ranks that have parts of one layer draw the random numbers of the first of them, and see that they do. Collective."""
        if mesh.parallel:
            place = mesh.place["replicate"], mesh.place["shard"]
            self._alike = SameInputs(self.label, place, mesh.tensor.get_group(), self.process)
            states = torch_states() if mesh.place["tensor"] == 0 else None
            told = agree(f"the random numbers of {self.label}", (place, states))
            put_torch_states(next(theirs for where, theirs in told if where == place and theirs is not None))

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it; FSDP2 gathers and frees in its hooks, and what methods use of the root is gathered for them."""
        if not self.divided:
            return function(*args, **kwargs)
        sharded, grad = self.parts.sharded, torch.is_grad_enabled()
        self.parts.backwards.notice_exception()
        try:
            forward = function is self.entry

            name = "" if forward else getattr(function, "__name__", type(function).__name__)

            def compute() -> Any:
                return function(*args, **kwargs) if forward else sharded.compute(function, args, kwargs)

            out = compute() if self._alike is None else self._alike.call(compute, args, kwargs, name)
        except BaseException as error:
            sharded.reset()
            if text := _explained(str(error), self.label):
                raise BackendError(text) from error
            raise
        if not grad and torch._C._current_graph_task_id() == -1:  # only with reshard_after_forward=False
            sharded.reshard()
        if grad:
            self.gradients.buffers.touch()
        return out

    def rebuild(self) -> None:
        """FSDP2 follows ``requires_grad`` by itself; only its dtypes are of those that were trainable first."""
        if self.divided:
            for group in self.parts.sharded.groups:
                group._init_mp_dtypes()

    def abandon(self, reason: str) -> None:
        super().abandon(reason)
        if self.divided:
            self.parts.sharded.let_go()

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        self.holdings.guard.release_modules()
        if self.divided:
            self.gradients.local_steps.clear()
            self.holdings.restore(self.parts, optimizers)
            lost = self.ended and self.parts.replaced
            self.divided = False
            del self.parts
            self._read_parameters()
            self.gradients.close()
            if lost:
                raise lost_weights(self)
