"""From whole parameters to shards along the first dimension and back, and what happens around each backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from ...deferred import borrowing, refuse_without_values, reset_own, resetting, swap, weights_of, without_values
from ...errors import BackendError
from ...gradients.log import GradientLog
from ...gradients.totals import average_gradients_
from ...precision import here
from ...process.control import agree, announce, raise_together
from ...process.packing import broadcast_
from ...shard import Shard
from ..base.absent import Absent, bring_back, name_of, refuse_second_derivatives, take_away
from ..base.gradients import Interruption
from ..base.local import parts_of
from .module import ShardedModule, drop, kept_whole, place_of, wrap

if TYPE_CHECKING:
    from . import FSDPEngine


@final
class Conversion:
    """The module's shards, the parameter objects that they replaced, and which is which."""

    def __init__(self, engine: FSDPEngine) -> None:
        self.module, self.process, self.label = engine.module, engine.process, engine.label
        self._offload = engine.options.cpu_offload
        assert self.process.group is not None
        self._group: dist.ProcessGroup = self.process.group
        self._scalars: dict[str, nn.Parameter] = {}
        #: Of scalars, which every rank has whole: gradients of this rank's own.
        self.scalar_log = GradientLog(())
        #: Before the first one gradients are what the user assigned.
        self.had_backward = False
        #: By identity: the shard of every parameter object, old, gathered or the shard itself.
        self.known: dict[int, nn.Parameter] = {}
        #: By name the parameter objects that shards replaced, and these.
        self.replaced: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._places = [(m, n, p) for m in self.module.modules() for n, p in m._parameters.items() if p is not None]
        self.sharded = ShardedModule(self.module, self.process, engine.options)

    def shard(self, blocks: Sequence[str], whole_of: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Put shards in the parameters' places. Collective where there are gradients, or first values to be made."""
        old = dict(self.module.named_parameters())
        for parameter in old.values():
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        what = f"gradients before accel.setup ({self.label})"
        average_gradients_(what, list(old.values()), list(old), self.process)
        grads = {name: p.grad for name, p in old.items() if p.grad is not None}
        children = [self.module.get_submodule(name) for name in blocks]
        borrowed, weights = borrowing(self.module), weights_of(self.module)
        self._on_all_ranks(lambda: self.sharded.apply(children))
        waiting = self._allocate()
        if waiting and weights is None:  # else they are read into the shards
            self._initialize(waiting, borrowed, whole_of)
        self._on_all_ranks(self.sharded.initialize)
        new = dict(self.module.named_parameters())
        whole = {id(p) for p in kept_whole(self.module)}
        self._scalars = {name: p for name, p in new.items() if id(p) in whole}
        for name, parameter in old.items():
            shard = new[name]
            self.known[id(shard)] = shard
            if shard is not parameter:
                self.known[id(parameter)] = shard
                self.replaced[name] = parameter, shard
                parameter.grad = None
                parameter.requires_grad_(False)
                take_away(parameter, StandIn, shard=shard)
                if name in grads:
                    shard.grad = self.new(shard, tuple(shard.shape), shard.dtype)
                    self._fill(shard.grad, grads[name])
        self.scalar_log = GradientLog(self._scalars.values())

    def _on_all_ranks(self, act: Callable[[], None]) -> None:
        """What torch's ``fully_shard`` does, or every rank raises what it says. Collective."""
        error = None
        try:
            act()
        except Exception as caught:
            error = BackendError(f"torch's fully_shard refuses {self.label}: {type(caught).__name__}: {caught}")
            error.__cause__ = caught
        problems = agree(f"accel.setup (fully_shard of {self.label})", "" if error is None else str(error))
        raise_together("accel.setup", error, problems, BackendError)

    def _allocate(self) -> set[int]:
        """Give shards on the meta device memory; returns the identities of those that now wait for values. Local."""
        names = [name for name, p in self.module.named_parameters() if p.is_meta]
        if names:
            device = torch.device("cpu") if self._offload else self.process.device
            self.module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        parameters = dict(self.module.named_parameters())
        return {id(parameters[name]) for name in names}

    @torch.no_grad()
    def _initialize(
        self, waiting: set[int], borrowed: dict[int, set[str]], whole_of: Callable[[nn.Parameter], torch.Tensor]
    ) -> None:
        """Rank 0's values by ``reset_parameters``, for one module that has it at a time. Collective.

        ``borrowed`` is ``deferred.borrowing`` of the module; ``whole_of`` gathers what has its values already. Every rank draws
        the same random numbers as in one process, and no more than that module is whole at a time.
        """
        empty, device = set(waiting), self.process.device
        for child, reset in resetting(self.module):
            own = {id(p): p for p in child.parameters()}
            if waiting.isdisjoint(own):
                continue
            values = {key: without_values(p, device) if key in empty else whole_of(p) for key, p in own.items()}
            whole = {key: nn.Parameter(values[key], requires_grad=p.requires_grad) for key, p in own.items()}
            places = [(m, n, p) for m in child.modules() for n, p in m._parameters.items() if p is not None]
            for owner, name, p in places:
                owner._parameters[name] = whole[id(p)]
            try:
                reset_own(child, reset, borrowed[id(child)])
            finally:
                for owner, name, p in places:
                    owner._parameters[name] = p
            broadcast_([w.data for w in whole.values()], self._group)
            for key, p in own.items():
                self._fill(p, whole[key])
            empty -= own.keys()
        refuse_without_values((n, here(p)) for n, p in self.module.named_parameters() if id(p) in waiting)

    @torch.no_grad()
    def _fill(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        if (mine := self.part("", shard)) is not None:
            mine.fill(whole)

    def canonical(self, parameter: nn.Parameter) -> nn.Parameter:
        return self.known.get(id(parameter), parameter)

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        """What autograd knows of a parameter object."""
        return self._gathered.get(id(self.known.get(id(parameter), parameter)), parameter)

    def begin(self, log: GradientLog | None) -> None:
        """Take over, once every parameter has its values. As in ``Backwards``."""
        self.backwards = Backwards(self, log)
        self.sharded.begin(self.label, self.backwards.begin, self.backwards.end)
        self._gathered = {id(shard): whole for whole, shard in self.sharded.gathered()}
        self.known.update((id(whole), shard) for whole, shard in self.sharded.gathered())
        mesh = self.sharded.mesh
        shards = [*self.known_shards()]
        self._first = {id(p) for p in shards if not any(mesh.place[axis] for axis in mesh.copies(p))}
        self._first_of_all = len(self._first) == len(shards)

    def average_scalars(self) -> None:
        what = f"the reduction of scalars ({self.label})"
        average_gradients_(what, [*self._scalars.values()], [*self._scalars], self.process, self.sharded.mesh.add)
        self.scalar_log.fold()

    def drop_unreduced(self) -> None:
        """Drop what a backward that an exception ended left in gathered parameters. Local."""
        for param in self.sharded.params:
            drop(param)
        self.scalar_log.fold()

    def age(self, shards: Iterable[torch.Tensor]) -> None:
        """Mark gathered parameters as changed whose shards will be changed."""
        found = map(self._gathered.get, map(id, shards))
        torch.autograd.graph.increment_version([whole for whole in found if whole is not None])

    def gradients(self, parameters: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What lies here of the final gradients of these: what this rank is the first to have, and the rest."""
        having = [p for p in parameters if p.grad is not None]
        grads = parts_of([p.grad for p in having])
        if self._first_of_all:
            return grads, []
        found: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for p, grad in zip(having, grads, strict=True):
            found[id(self.known.get(id(p), p)) not in self._first].append(grad)
        return found

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        """A DTensor that every rank has all of; a plain tensor where parameters lie on several meshes."""
        mesh = self.sharded.mesh
        if mesh.parallel:
            return value
        return DTensor.from_local(value, mesh.whole, [Replicate()] * mesh.whole.ndim, run_check=False)

    def known_shards(self) -> Iterable[nn.Parameter]:
        """Every parameter of the module as it is between steps."""
        return {id(p): p for p in self.known.values()}.values()

    def stepping(self, shards: Sequence[torch.Tensor]) -> None:
        """As operations on these shards would, count a write to each."""
        torch.autograd.graph.increment_version(shards)
        self.age(shards)

    @staticmethod
    def new(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor in the state of a parameter, cut as that is where it has its shape."""
        if isinstance(parameter, DTensor) and shape == tuple(parameter.shape):
            return wrap(torch.empty_like(parameter.to_local(), dtype=dtype), shape, parameter)
        return torch.empty(shape, dtype=dtype, device=parameter.device)

    @torch.no_grad()  # then a DTensor gives its local tensor as it is, without a node of autograd
    def part(self, name: str, tensor: torch.Tensor) -> Shard | None:
        """The range of a tensor's elements that lies on this rank; None where nothing does."""
        shape, sharded = tuple(tensor.shape), self.sharded
        if not isinstance(tensor, DTensor):
            return Shard(name, shape, 0, tensor.detach())
        local = tensor.to_local().detach()
        if not len(local):
            return None
        each = -(-shape[0] // sharded.mesh.sizes["shard"])  # rows of every shard but the last ones
        first, box = place_of(tensor._spec) if sharded.mesh.parallel else (sharded.mesh.place["shard"] * each, ())
        return Shard(name, shape, first * (local.numel() // len(local)), local, box)

    def restore(self, whole: Mapping[tuple[str, Any], torch.Tensor] | None, optimizers: Sequence[Optimizer]) -> None:
        """The parameter objects of before in the shards' places, with values and gradients by name; nan without these. Local."""
        self.scalar_log.close()
        self.sharded.undo()
        for key, (old, shard) in self.replaced.items():
            value = without_values(shard, self.process.device) if whole is None else whole[key, ""]
            _take(old, value, None if whole is None else whole.get((key, "grad")))
        for module, name, own in self._places:
            module._parameters[name] = own
        back = {id(shard): old for old, shard in self.replaced.values()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [back.get(id(p), p) for p in group["params"]]
            for held in [key for key in optimizer.state if id(key) in back]:
                del optimizer.state[held]


# -- what a parameter object is while its shard has its place: a name for it that never computes with wrong values ------


def _of_shard(name: str) -> Any:
    return property(lambda held: getattr(held.shard, name), lambda held, value: setattr(held.shard, name, value))


class StandIn(Absent, nn.Parameter):
    """A replaced parameter: ``grad`` and ``requires_grad`` are its shard's; any use of its values raises."""

    shard: nn.Parameter
    plain = frozenset([torch.autograd.grad, torch.autograd.backward])  # which are given what stands in the graph
    extra = ("shard",)
    grad = _of_shard("grad")
    requires_grad = _of_shard("requires_grad")

    def requires_grad_(self, requires_grad: bool = True) -> StandIn:
        self.shard.requires_grad_(requires_grad)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"a parameter of shape {tuple(self.shape)} whose shard is in use"

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"{name_of(function)} uses a parameter that was taken from the module before accel.setup sharded "
            "it, and whose values are not here: take it from model.parameters(), give its optimizer to accel.setup, "
            "or call accel.teardown(model) first"
        )


def _take(old: nn.Parameter, full: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Make a stand-in the parameter again that it was, with these values."""
    trainable = old.requires_grad  # its shard's
    bring_back(old)
    if old.is_meta:
        swap(old, nn.Parameter(full, requires_grad=False))
    else:
        old.data = full
    old.grad = grad
    old.requires_grad_(trainable)


# -- around each backward ------------------------------------------------------------------------------------------------


@final
class Backwards:
    """What happens around each backward pass of a sharded module, and after one that an exception ended.

    ``log`` is told of every backward if the loss must be scaled.
    """

    def __init__(self, parts: Conversion, log: GradientLog | None) -> None:
        self._parts = parts
        self._log = log
        self.interruption = Interruption()

    def begin(self) -> None:
        """Hear that a backward reached FSDP2."""
        self.interruption.running.add(torch._C._current_graph_task_id())
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        if self.interruption.incomplete:
            grads = [here(p.grad) for p in self._parts.known_shards() if p.grad is not None]
            if any(bool(grad.any()) for grad in grads):  # zeros are dropped gradients too
                self.interruption.refuse()
        if self._log is not None:
            self._log.entries.append(None)
        self.interruption.incomplete = False

    def end(self) -> None:
        self.interruption.running.clear()
        if self._parts.scalar_log.entries:
            announce(self._parts.process, "the reduction of scalars")
            self._parts.average_scalars()
        self._parts.had_backward = True

    def notice_exception(self) -> None:
        """Clear away what a backward left that did not come to its end. Local."""
        if self.interruption.notice():
            self._parts.drop_unreduced()
            self._parts.sharded.reset()
            self.interruption.stale = False
