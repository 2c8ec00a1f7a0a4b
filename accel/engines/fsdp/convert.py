"""From parameters to shards and back, and the begin and end of each backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from ...deferred import borrowing, reset_own, resetting, swap, weights_of, without_values
from ...errors import BackendError
from ...gradients.totals import average_gradients_
from ...gradients.watch import GRAD
from ...precision import here
from ...process.control import agree, announce, raise_together
from ...process.packing import broadcast_
from ...shard import Box, Shard
from ..base.absent import Absent, bring_back, name_of, refuse_second_derivatives, take_away
from ..base.interruption import Interruption
from ..base.parts import parts_of
from .shard import ShardedModule, unsharded

if TYPE_CHECKING:
    from . import FSDPEngine


@final
class Conversion:
    """The shards of a module, and the parameter objects that they replaced."""

    def __init__(self, engine: FSDPEngine) -> None:
        self.module, self.process, self.label = engine.module, engine.process, engine.label
        self._offload = engine.options.cpu_offload
        #: The shard of each replaced parameter, gathered parameter and shard, by identity.
        self.known: dict[int, nn.Parameter] = {}
        #: The parameter objects that shards replaced, each with its shard, by name.
        self.replaced: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._places = [
            (m, n, p)
            for m in self.module.modules()
            for n, p in m._parameters.items()
            if p is not None
        ]
        #: Every rank has these whole. ``_averaged``: their last averaged gradients and versions.
        self._scalars: dict[str, nn.Parameter] = {}
        self._averaged: list[tuple[torch.Tensor | None, int]] = []
        self.interruption = Interruption()
        self.sharded = ShardedModule(self.module, self.process, engine.options)

    # -- to shards ---------------------------------------------------------------------------------

    def shard(self, blocks: Sequence[str], gather: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Put shards in the parameters' places. Collective.

        Args:
            blocks: names of the modules that are gathered alone, inner ones first.
            gather: returns the full values of a shard.
        """
        old = dict(self.module.named_parameters())
        for parameter in old.values():
            if not parameter.is_contiguous():  # FSDP2 takes no others
                parameter.data = parameter.data.contiguous()
        average_gradients_(
            f"gradients before accel.setup ({self.label})", [*old.values()], [*old], self.process
        )
        gradients = {name: p.grad for name, p in old.items() if p.grad is not None}
        children = [self.module.get_submodule(name) for name in blocks]
        borrowed, weights = borrowing(self.module), weights_of(self.module)
        self._on_all_ranks(lambda: self.sharded.apply(children))
        waiting = self._allocate()
        if waiting and weights is None:  # else the values are read into the shards
            self._initialize(waiting, borrowed, gather)
        self._on_all_ranks(self.sharded.initialize)
        new = dict(self.module.named_parameters())
        whole = set(map(id, unsharded(self.module)))
        self._scalars = {name: p for name, p in new.items() if id(p) in whole}
        self._averaged = [(None, 0)] * len(self._scalars)
        for name, parameter in old.items():
            shard = new[name]
            self.known[id(shard)] = shard
            if shard is not parameter:
                self._replace(name, parameter, shard, gradients.get(name))

    def _replace(
        self, name: str, parameter: nn.Parameter, shard: nn.Parameter, gradient: torch.Tensor | None
    ) -> None:
        self.known[id(parameter)] = shard
        self.replaced[name] = parameter, shard
        parameter.grad = None
        parameter.requires_grad_(False)
        take_away(parameter, StandIn, shard=shard)
        if gradient is not None:
            shard.grad = self.new(shard, tuple(shard.shape), shard.dtype)
            self._fill(shard.grad, gradient)

    def _on_all_ranks(self, act: Callable[[], None]) -> None:
        """Call a part of ``fully_shard``. If it raises on one rank, raise on all. Collective."""
        error = None
        try:
            act()
        except Exception as caught:
            error = BackendError(
                f"torch's fully_shard refuses {self.label}: {type(caught).__name__}: {caught}"
            )
            error.__cause__ = caught
        problems = agree(
            f"accel.setup (fully_shard of {self.label})", "" if error is None else str(error)
        )
        raise_together("accel.setup", error, problems, BackendError)

    def begin(self) -> None:
        """Watch backwards."""
        self.sharded.watch(self.label, self._begin_backward, self._end_backward)
        self._gathered = {id(shard): gathered for gathered, shard in self.sharded.gathered()}
        self.known.update((id(gathered), shard) for gathered, shard in self.sharded.gathered())
        mesh, shards = self.sharded.mesh, [*self._shards()]
        #: This rank counts these in a norm: no rank before it has the same part.
        self._counted = {
            id(p) for p in shards if not any(mesh.place[axis] for axis in mesh.copies(p))
        }
        self._counts_all = len(self._counted) == len(shards)

    # -- first values of parameters on the meta device (accel.deferred_init) -----------------------

    def _allocate(self) -> set[int]:
        """Give shards on the meta device memory; return their identities."""
        names = [name for name, p in self.module.named_parameters() if p.is_meta]
        if names:
            device = torch.device("cpu") if self._offload else self.process.device
            self.module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        parameters = dict(self.module.named_parameters())
        return {id(parameters[name]) for name in names}

    @torch.no_grad()
    def _initialize(
        self,
        waiting: set[int],
        borrowed: dict[int, set[str]],
        gather: Callable[[nn.Parameter], torch.Tensor],
    ) -> None:
        """Make rank 0's values by ``reset_parameters`` of one module at a time. Collective.

        No more than that module is whole at a time. Every rank draws the random numbers that one
        process would draw.

        Args:
            waiting: identities of the shards without values.
            borrowed: ``deferred.borrowing`` of the module.
            gather: returns the full values of a shard that has some.
        """
        empty, device = set(waiting), self.process.device
        for child, reset in resetting(self.module):
            shards = {id(p): p for p in child.parameters()}
            if waiting.isdisjoint(shards):
                continue
            whole: dict[int, nn.Parameter] = {}
            for key, shard in shards.items():
                value = without_values(shard, device) if key in empty else gather(shard)
                whole[key] = nn.Parameter(value, requires_grad=shard.requires_grad)
            places = [
                (m, n, p)
                for m in child.modules()
                for n, p in m._parameters.items()
                if p is not None
            ]
            for owner, name, shard in places:
                owner._parameters[name] = whole[id(shard)]
            try:
                reset_own(child, reset, borrowed[id(child)])
            finally:
                for owner, name, shard in places:
                    owner._parameters[name] = shard
            broadcast_([w.data for w in whole.values()], self.process.group)
            for key, shard in shards.items():
                self._fill(shard, whole[key])
            empty -= shards.keys()

    # -- which tensor is which ---------------------------------------------------------------------

    def canonical(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the shard of a parameter object of before ``setup``, of a forward, or of now."""
        return self.known.get(id(parameter), parameter)

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor in graphs for a parameter. VQGAN asks for its last layer's gradient."""
        return self._gathered.get(id(self.known.get(id(parameter), parameter)), parameter)

    def _shards(self) -> Iterable[nn.Parameter]:
        return {id(p): p for p in self.known.values()}.values()

    @staticmethod
    def new(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a parameter's state: a shard, if it has the parameter's shape."""
        if not isinstance(parameter, DTensor) or shape != tuple(parameter.shape):
            return torch.empty(shape, dtype=dtype, device=parameter.device)
        local = torch.empty_like(parameter.to_local(), dtype=dtype)
        mesh, placements, stride = parameter.device_mesh, parameter.placements, parameter.stride()
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    @torch.no_grad()  # then to_local() gives the very tensor
    def part(self, name: str, tensor: torch.Tensor) -> Shard | None:
        """Return the elements of a tensor that lie on this rank; None if there are none."""
        shape, mesh = tuple(tensor.shape), self.sharded.mesh
        if not isinstance(tensor, DTensor):
            return Shard(name, shape, 0, tensor.detach())
        local = tensor.to_local().detach()
        if not len(local):
            return None
        row, box = (
            _place_of(tensor)
            if mesh.parallel
            else (mesh.place["shard"] * -(-shape[0] // mesh.sizes["shard"]), ())
        )
        return Shard(name, shape, row * (local.numel() // len(local)), local, box)

    @torch.no_grad()
    def _fill(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        if (part := self.part("", shard)) is not None:
            part.fill(whole)

    # -- gradients and steps -----------------------------------------------------------------------

    def _begin_backward(self) -> None:
        self.interruption.running.add(torch._C._current_graph_task_id())
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        if self.interruption.incomplete:
            gradients = [here(p.grad) for p in self._shards() if p.grad is not None]
            if any(bool(gradient.any()) for gradient in gradients):  # zeros count as dropped
                self.interruption.refuse()
        self.interruption.incomplete = False

    def _end_backward(self) -> None:
        self.interruption.running.clear()
        self.average_scalars(edited=True)

    def notice_exception(self) -> None:
        """Clear what a backward left that an exception ended."""
        if self.interruption.notice():
            self.sharded.drop_unreduced()
            self.sharded.reset()
            self.interruption.stale = False

    def average_scalars(self, *, edited: bool = False) -> None:
        """Average gradients of scalars if any is new, or ``edited`` in place. Collective then."""
        if not self._scalars:
            return
        gradients = [p.grad for p in self._scalars.values()]
        for gradient, (known, version) in zip(gradients, self._averaged, strict=True):
            if gradient is not None and (
                gradient is not known or (edited and gradient._version != version)
            ):
                break
        else:
            return
        what = f"the reduction of scalars ({self.label})"
        announce(self.process, what)
        average_gradients_(
            what, [*self._scalars.values()], [*self._scalars], self.process, self.sharded.mesh.add
        )
        gradients = [p.grad for p in self._scalars.values()]
        self._averaged = [
            (gradient, 0 if gradient is None else gradient._version) for gradient in gradients
        ]

    def gradients(
        self, parameters: Iterable[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's parts of gradients: those that it counts in a norm, and the rest."""
        if self._counts_all:
            return parts_of([grad for grad in map(GRAD, parameters) if grad is not None]), []
        having = [p for p in parameters if p.grad is not None]
        parts = parts_of([p.grad for p in having])
        split: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for parameter, part in zip(having, parts, strict=True):
            split[id(self.known.get(id(parameter), parameter)) not in self._counted].append(part)
        return split

    def age(self, shards: Iterable[torch.Tensor]) -> None:
        """Let a backward from an earlier forward raise, as it does after a step in one process."""
        gathered = [self._gathered[id(shard)] for shard in shards if id(shard) in self._gathered]
        torch.autograd.graph.increment_version(gathered)

    def stepping(self, shards: Sequence[torch.Tensor]) -> None:
        """Count a write to each of these, whose local tensors a step is about to change."""
        torch.autograd.graph.increment_version(shards)
        self.age(shards)

    # -- back to whole parameters ------------------------------------------------------------------

    def restore(
        self, whole: Mapping[tuple[str, Any], torch.Tensor] | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Put the parameter objects of before in the shards' places.

        Args:
            whole: full values by ``(name, "")`` and gradients by ``(name, "grad")``. None: they are
                lost, and become NaN.
            optimizers: their groups get the parameter objects too.
        """
        self.sharded.undo()
        for name, (parameter, shard) in self.replaced.items():
            value = without_values(shard, self.process.device) if whole is None else whole[name, ""]
            _bring_back(parameter, value, None if whole is None else whole.get((name, "grad")))
        for module, name, parameter in self._places:
            module._parameters[name] = parameter
        back = {id(shard): parameter for parameter, shard in self.replaced.values()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [back.get(id(p), p) for p in group["params"]]
            for key in [key for key in optimizer.state if id(key) in back]:
                del optimizer.state[key]


def _place_of(tensor: DTensor) -> tuple[int, Box]:
    """Return the first row of this rank's part, and its box in the full tensor."""
    spec = tensor._spec
    sizes, starts = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    if sizes[1:] == tuple(spec.shape[1:]):
        return starts[0], ()
    ends = (start + size for start, size in zip(starts[1:], sizes[1:], strict=True))
    return starts[0], ((0, spec.shape[0]), *zip(starts[1:], ends, strict=True))


# -- parameter objects of before setup: lists of them clip, freeze and build optimizers ------------


def _of_shard(name: str) -> Any:
    return property(
        lambda old: getattr(old.shard, name), lambda old, value: setattr(old.shard, name, value)
    )


class StandIn(Absent, nn.Parameter):
    """A replaced parameter. Its ``grad`` is the shard's, and any use of its values raises."""

    shard: nn.Parameter
    plain = frozenset([torch.autograd.grad, torch.autograd.backward])  # by `leaf`
    grad = _of_shard("grad")
    requires_grad = _of_shard("requires_grad")

    def requires_grad_(self, requires_grad: bool = True) -> StandIn:
        self.shard.requires_grad_(requires_grad)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"a parameter of shape {tuple(self.shape)} whose shard is in use"

    def fetch(self, function: Any) -> None:
        raise BackendError(
            f"{name_of(function)} uses a parameter that was taken from the module before accel.setup sharded it, so its values "
            "are not here. Take it from model.parameters()."
        )


def _bring_back(
    parameter: nn.Parameter, value: torch.Tensor, gradient: torch.Tensor | None
) -> None:
    """Make a stand-in the parameter that it was, with these values."""
    trainable = parameter.requires_grad  # its shard's
    bring_back(parameter)
    if parameter.is_meta:
        swap(parameter, nn.Parameter(value, requires_grad=False))
    else:
        parameter.data = value
    parameter.grad = gradient
    parameter.requires_grad_(trainable)
