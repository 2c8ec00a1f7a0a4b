"""``fsdp``: torch's ``fully_shard`` (FSDP2): parameters, gradients and optimizer state lie in shards on the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ... import shard
from ...errors import AccelError, BackendError, OptimizerError
from ...gradients.flat import broadcast_
from ...gradients.patches import muon_patch
from ...process import Process
from ...process.control import Waiting
from ...shard import Manifest, Shard
from .._copies import allow_copies, refuse_copies
from ..engine import Context, Engine, Options, refuse_sparse
from ..memory import Footprint, MemoryUse, even_shards
from ..state import StateVerbs
from . import wrap
from .shards import LocalShards
from .wrap import Checkpointed, Wrap

if TYPE_CHECKING:
    from .conversion import Conversion
if TYPE_CHECKING:
    from .conversion import Conversion


# -- The state verbs of an engine whose parameters and optimizer state are shards --------------------------------------


@final
class Guard:
    """Refuses ``state_dict()``, copies and pickles of raw modules and optimizers, which would look whole."""

    def __init__(self) -> None:
        self._open = False
        self._hooks: dict[int, RemovableHandle] = {}

    def watch(self, raw: nn.Module | Optimizer) -> None:
        """Refuse from now on."""
        self._hooks[id(raw)] = raw.register_state_dict_pre_hook(self.refuse)
        if isinstance(raw, Optimizer) or any(True for _ in raw.parameters()):
            refuse_copies(raw)

    def release(self, raw: nn.Module | Optimizer) -> None:
        """Refuse no more."""
        if (hook := self._hooks.pop(id(raw), None)) is not None:
            hook.remove()
            allow_copies(raw)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let through inside."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def refuse(self, raw: object, *_: Any) -> None:
        """Raise, unless opened."""
        if not self._open:
            raise AccelError(
                f"{type(raw).__name__}.state_dict() is sharded, so that this rank holds a part of it only: every rank calls "
                "accel.full_state_dict(model or optimizer) for the whole, or accel.save(...) for a checkpoint"
            )


class ShardedState(StateVerbs):
    """Whole state goes in and out; what lies on this rank is listed; what would be a part only is refused."""

    _parts: Conversion | None
    guard: Guard

    def state_dict(self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Refused where shards are."""
        if self._parts is not None:
            self.guard.refuse(self.module if optimizer is None else optimizer)
        return super().state_dict(optimizer, args, kwargs)

    def full_state_dict(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """Every shard gathered, on every rank; buffers are rank 0's. Collective."""
        parts = self._parts
        if parts is None:
            return super().full_state_dict(optimizer)
        parts.sharded.reshard()
        with self.guard.opened():
            if optimizer is not None:
                state: dict[str, Any] = parts.whole_state(optimizer.state_dict())
                return state
            broadcast_([b.data for b in self.module.buffers()], self.process.group)
            own = self.module.state_dict(keep_vars=True)
        made: dict[int, Any] = {}  # what is tied is one tensor
        for value in own.values():
            if id(value) not in made:
                made[id(value)] = parts.whole_state(value.detach() if isinstance(value, torch.Tensor) else value)
        return _like(own, {name: made[id(value)] for name, value in own.items()})

    def load_state_dict(self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take this rank's part of a full state."""
        parts = self._parts
        if parts is None:
            return super().load_state_dict(optimizer, args, kwargs)
        named = dict(zip(("state_dict", "strict", "assign"), args, strict=False)) | kwargs
        full = named.pop("state_dict")
        if optimizer is not None:
            return optimizer.load_state_dict(parts.cut_optimizer_state(optimizer, full))
        if named.get("assign"):
            raise BackendError(
                "load_state_dict(assign=True) would replace sharded parameters by whole ones: leave assign out"
            )
        parts.sharded.reshard()
        mine = dict(self.module.named_parameters(remove_duplicate=False))
        return self.module.load_state_dict(
            _like(full, {n: parts.cut(v, mine.get(n)) for n, v in full.items()}), **named
        )

    def synchronize(self, source: int = 0) -> None:
        """Rank ``source``'s weights and buffers; only its buffers where the weights are shards. Collective."""
        tensors = [b.data for b in self.module.buffers()]
        if self._parts is None:
            tensors += [p.data for p in self.parameters if not p.is_meta]
        if self.distributed:
            broadcast_(tensors, self.process.group, source)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        """This rank's rows of each tensor."""
        parts = self._parts
        if parts is None:
            return super().shards(optimizer)
        if optimizer is not None:
            return shard.optimizer_shards(optimizer, self.parameter_names, LocalShards())
        parts.sharded.reshard()
        with self.guard.opened():
            return shard.module_shards(self.module, LocalShards())

    def slots(self, optimizer: Optimizer | None, manifest: Manifest) -> list[Shard]:
        """What ``shards`` lists; an optimizer's state is created."""
        if self._parts is None or optimizer is None:
            return self.shards(None) if optimizer is None else super().slots(optimizer, manifest)
        return self._parts.slots(optimizer, self.parameter_names, manifest)


def _like(original: Any, values: dict[str, Any]) -> OrderedDict[str, Any]:
    """A state dict of these values, with the versions of modules that ``original`` carries."""
    made = OrderedDict(values)
    if hasattr(original, "_metadata"):
        made._metadata = original._metadata  # type: ignore[attr-defined]
    return made


#: Optimizers of torch that do not compute with shards, or not what they would with whole tensors.
_REFUSED = ("Adafactor", "LBFGS", "Rprop", "SparseAdam")
#: Optimizers of torch that compute with whole matrices, which they are given one at a time.
_WHOLE_MATRICES: tuple[type, ...] = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()
#: Packages whose optimizers hand addresses of whole tensors to kernels of their own.
_OWN_KERNELS = {"apex", "bitsandbytes", "deepspeed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP(Options):
    """Options of ``fsdp``; names and meanings are those of ``fully_shard`` where it has them.

    Args:
        wrap: what is gathered as one: classes of modules, or a function of a module that says so. None: blocks that
            repeat in a ModuleList or Sequential and have submodules of their own.
        reshard_after_forward: free a block's gathered parameters after its forward; False keeps them until backward.
        cpu_offload: shards, their gradients and optimizer state lie in the host's memory.
        activation_checkpointing: recompute each block's activations in backward.
        param_dtype: FSDP2's own mixed precision: gather and compute in this dtype (torch.bfloat16).
        reduce_dtype: reduce gradients in this dtype.
        auto_refresh: look for a change of ``requires_grad`` before each forward.
    """

    wrap: Wrap = None
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    auto_refresh: bool = True

    def check_values(self) -> None:
        """Refuse what is no choice of modules, and other dtypes."""
        classes = isinstance(self.wrap, tuple) and all(isinstance(c, type) for c in self.wrap)
        if not (self.wrap is None or classes or callable(self.wrap)) or isinstance(self.wrap, type):
            raise BackendError(
                f"FSDP(wrap={self.wrap!r}): expected a tuple of module classes, or a function of a module"
            )
        for name, allowed in (("param_dtype", (torch.bfloat16,)), ("reduce_dtype", (torch.float32, torch.bfloat16))):
            if getattr(self, name) not in (None, *allowed):
                raise BackendError(
                    f"FSDP({name}={getattr(self, name)}): expected None or {' or '.join(map(str, allowed))}"
                )

    def __repr__(self) -> str:
        # The same on every rank, which a function's own text is not.
        wrap = self.wrap if isinstance(self.wrap, tuple) else (self.wrap,)
        names = [getattr(w, "__qualname__", type(w).__name__) for w in wrap]
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "wrap"}
        return f"FSDP(wrap={names}, {', '.join(f'{n}={v}' for n, v in rest.items())})"


@final
class FSDPEngine(ShardedState, Engine):
    """FSDP2 reduces in its hooks while backward runs; ``settle`` reduces what it left unreduced."""

    name = "fsdp"
    options_type = FSDP
    reduces = partial_gradients = True
    logs = False
    hears_strangers = True
    materializes = undoes_writes = divides_weights = True
    options: FSDP

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        self._parts: Conversion | None = None
        self.guard = Guard()
        self._checkpointed = Checkpointed()
        self._sync = True
        self._stale_buffers = False

    @classmethod
    def check(cls, module: nn.Module, options: Any, process: Process) -> None:
        """Refuse modules that FSDP2 cannot shard, or would change silently."""
        if process.place.world_size > 1:
            wrap.check_module(module, options)
            refuse_sparse(module, cls.name)

    @classmethod
    def predict(cls, footprint: Footprint, options: Any, world_size: int) -> tuple[MemoryUse, ...]:
        """Everything cut along the first dimension."""
        return even_shards(footprint, world_size)

    def wrap(self) -> None:
        """Checkpoint activations; shards come with ``start``, since they need rank 0's weights."""
        if self.options.activation_checkpointing:
            self._checkpointed.wrap([m for _, m in wrap.blocks(self.module, self.options.wrap)])

    def attach(self, optimizer: Optimizer) -> None:
        """Refuse what cannot step shards."""
        if self.distributed and type(optimizer).__name__ in _REFUSED:
            raise OptimizerError(
                f"{type(optimizer).__name__} cannot train sharded parameters (backend {self.name!r}): it needs whole "
                "tensors; use an elementwise optimizer such as AdamW or SGD, or backend='ddp'"
            )
        packages = {c.__module__.partition(".")[0] for c in type(optimizer).__mro__}
        if self.distributed and (theirs := packages & _OWN_KERNELS):
            raise OptimizerError(
                f"{type(optimizer).__name__} cannot train sharded parameters (backend {self.name!r}): the kernels of "
                f"{theirs.pop()} take whole tensors; use an optimizer of torch or torchao, or backend='ddp'"
            )
        fused = any(group.get("fused") for group in optimizer.param_groups)
        if self.distributed and fused and type(optimizer).__name__ not in ("Adam", "AdamW"):
            raise OptimizerError(
                f"{type(optimizer).__name__}(fused=True) cannot train sharded parameters: leave fused out"
            )
        if self.distributed and isinstance(optimizer, _WHOLE_MATRICES):
            muon_patch().need(optimizer)
        super().attach(optimizer)
        if self.distributed:
            self.guard.watch(optimizer)

    def detach(self, optimizer: Optimizer) -> None:
        """Give the optimizer back to its user."""
        self.guard.release(optimizer)
        if self.distributed and isinstance(optimizer, _WHOLE_MATRICES):
            muon_patch().drop(optimizer)
        super().detach(optimizer)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Rank 0's weights, then shards in their place; the optimizers are rebound in place."""
        if not self.distributed:
            return
        if self._parts is None:
            from .conversion import Conversion  # heavy, as torch's own code for it is
            from .pending import Backwards

            self.synchronize()
            names = [name for name, _ in wrap.blocks(self.module, self.options.wrap)]
            self.compare("the choice of FSDP(wrap=...)", names)
            self._parts = Conversion(self.module, self.process, self.options, self.label)
            for child in self.module.modules():
                self.guard.watch(child)
            self._parts.shard(names)
            self.read_parameters()
            self._backwards = Backwards(self._parts, self.parameter_names, self.log if self.precision.scaled else None)
            self._parts.sharded.begin(self.process, self.title, self._backwards.begin, self._backwards.end)
            self._parts.mark_gathered()
            self.known = self._parts.known
            self._started = True
        for optimizer in optimizers:
            self._parts.rebind(optimizer)

    def canonical(self, parameter: nn.Parameter) -> nn.Parameter:
        """The shard that a gathered or replaced parameter stands for."""
        return parameter if self._parts is None else self._parts.canonical(parameter)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse strangers; replaced parameters become their shards."""
        super().check_optimizer(optimizer)
        if self._parts is not None:
            self._parts.rebind(optimizer)

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        """What cannot be cut."""
        shards = {} if self._parts is None else {id(p.sharded_param) for p in self._parts.sharded.params}
        return [(name, p) for name, p in super().replicas() if id(p) not in shards]

    def set_data(self, parameter: torch.Tensor, value: torch.Tensor) -> bool:
        """Shards take values of their own form."""
        return self._parts is not None and self._parts.sharded.set_data(parameter, value)

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        """The gathered parameter, which is what forward computes with."""
        return parameter if self._parts is None else self._parts.leaf(parameter)

    # -- forward --------------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Forward; FSDP2 gathers and frees in its hooks."""
        return self.entry(*args, **kwargs) if self._parts is None else self._run(self.entry, args, kwargs)

    def compute(self, bound: MethodType, *args: Any, **kwargs: Any) -> Any:
        """A method of the user's, with the root's parameters gathered."""
        if self._parts is None:
            return bound(*args, **kwargs)
        sharded = self._parts.sharded
        return self._run(lambda *a, **k: sharded.compute(bound, a, k), args, kwargs)

    def _run(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._parts is not None
        sharded, grad = self._parts.sharded, torch.is_grad_enabled()
        self._backwards.notice_exception()
        try:
            out = fn(*args, **kwargs)
        except BaseException:
            sharded.reset()
            raise
        # Whoever asks for parameters must find shards: they have the gradients, and an edit of a gathered one is lost.
        if torch._C._current_graph_task_id() == -1 and (not grad or sharded.exposed_gradients()):
            sharded.reshard()
        self._stale_buffers = self._stale_buffers or grad
        return out

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes accumulate without reduction."""
        before = self._sync
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(before)

    def _set_sync(self, value: bool) -> None:
        self._sync = value
        if self._parts is not None:
            self._parts.sharded.synchronise(value)

    # -- gradients ------------------------------------------------------------------------------------------------

    def accumulators(self) -> Sequence[torch.Tensor]:
        """Shards, and the gathered parameters that hold what was not reduced."""
        if self._parts is None:
            return self.parameters
        self._backwards.take_markers()
        return [*self.parameters, *(whole for whole, _ in self._parts.sharded.gathered())]

    def unsettled(self) -> bool:
        """Whether gradients were not reduced."""
        if self._parts is None:
            return False
        return bool(self._parts.sharded.pending()) or self._parts.scalars_pending()

    def settle(self) -> None:
        """Reduce what is pending; take rank 0's buffers."""
        if self._parts is None:
            super().settle()
            return
        self._backwards.notice_exception()
        self._backwards.refuse_broken()
        self._backwards.take_markers()
        sharded = self._parts.sharded
        if pending := sharded.pending():
            self.compare(
                "a reduction of accumulated gradients", [self.parameter_names[id(p.sharded_param)] for p in pending]
            )
            sharded.reduce(self._sync)
        if self._parts.scalars_pending():
            self._parts.average_scalars()
        sharded.reshard()
        if self._stale_buffers:
            self.announce("the broadcast of buffers")
            broadcast_([b.data for b in self.module.buffers()], self.process.group)
            self._stale_buffers = False

    def before_step(self, optimizer: Optimizer) -> None:
        """Make a backward from an earlier forward an error, as a step in place does in one process."""
        if self._parts is not None:
            self.announce_step(optimizer)
            self._parts.age(optimizer)

    def outside_step(self, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
        """What was gathered before is old then."""
        if self._parts is not None:
            self._parts.sharded.reshard()
        return super().outside_step(optimizer)

    def full_state_dict(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """Every shard gathered, on every rank; buffers are rank 0's. Collective."""
        if self._parts is None:
            return super().full_state_dict(optimizer)
        self.meet(f"accel.full_state_dict of {'the model' if optimizer is None else type(optimizer).__name__}")
        with Waiting(self.process, "accel.full_state_dict"):
            return super().full_state_dict(optimizer)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the global norm; one all-reduce of local norms."""
        if self._parts is None:
            return super().clip_grad_norm_(max_norm, norm_type)
        self.announce("accel.clip_grad_norm_")
        self.settle()
        with Waiting(self.process, "accel.clip_grad_norm_"):
            return self._parts.clip(max_norm, norm_type)

    def rebuild(self) -> None:
        """FSDP2 follows ``requires_grad`` by itself; only its dtypes are of those that were trainable first."""
        if self._parts is not None:
            for group in self._parts.sharded.groups:
                group._init_mp_dtypes()

    # -- the end --------------------------------------------------------------------------------------------------

    def abandon(self, reason: str) -> None:
        """Let go of the groups that FSDP2 holds."""
        super().abandon(reason)
        if self._parts is not None:
            self._parts.sharded.let_go()

    def unwrap(self, optimizers: Sequence[Optimizer]) -> None:
        """Whole parameters, in the objects that held them before. Collective."""
        self._checkpointed.unwrap()
        parts, self._parts = self._parts, None
        for child in self.module.modules():
            self.guard.release(child)
        if parts is not None:
            lost = parts.unshard(optimizers, self._ended)
            self.read_parameters()
            if lost:
                self._ended = lost
                raise self.lost()
