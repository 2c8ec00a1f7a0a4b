"""From parameters to shards and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from ...deferred import (
    borrowing,
    refuse_without_values,
    reset_own,
    resetting,
    swap,
    weights_of,
    without_values,
)
from ...errors import BackendError
from ...gradients.totals import average_gradients_
from ...precision import here
from ...process.packing import broadcast_
from ...shard import Box, Shard
from ..base.absent import Absent, bring_back, name_of, take_away
from ..base.interruption import Interruption
from ..base.parts import parts_of
from .shard import ShardedModule, unsharded

if TYPE_CHECKING:
    from . import FSDPEngine

#: A module's table of parameters, a name in it, and the parameter.
Place: TypeAlias = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]


def _places(module: nn.Module) -> list[Place]:
    """Return the places of all parameters. A tied parameter has several."""
    tables = [child._parameters for child in module.modules()]
    return [(table, name, p) for table in tables for name, p in table.items() if p is not None]


@final
class Conversion:
    """The shards of a module, and the parameter objects that they replaced."""

    def __init__(self, engine: FSDPEngine) -> None:
        self.module, self.process, self.label = engine.module, engine.process, engine.label
        self.sharded = ShardedModule(self.module, self.process, engine.options)
        self.interruption = Interruption()
        #: The shard of each replaced parameter, gathered parameter and shard, by identity.
        self.known: dict[int, nn.Parameter] = {}
        #: The parameter objects that shards replaced, each with its shard, by name.
        self.replaced: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._places = _places(self.module)
        self._offload = engine.options.cpu_offload
        #: The parameter that autograd knows, by the identity of its shard.
        self._gathered: dict[int, nn.Parameter] = {}
        #: Parameters that every rank holds, by name.
        self._replicated: dict[str, nn.Parameter] = {}

    # -- to shards ---------------------------------------------------------------------------------

    def shard(self, blocks: Sequence[str], gather: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Put shards in the parameters' places. Collective.

        Args:
            blocks: names of the modules that are gathered one by one, inner ones first.
            gather: returns the full values of a shard.
        """
        old = dict(self.module.named_parameters())
        for parameter in old.values():
            # Image models use torch.channels_last, but FSDP2 takes only contiguous weights.
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        what = f"gradients before accel.setup ({self.label})"
        average_gradients_(what, list(old.values()), list(old), self.process)
        borrowed, weights = borrowing(self.module), weights_of(self.module)
        self.sharded.apply([self.module.get_submodule(name) for name in blocks])
        deferred = self._allocate()
        if deferred and weights is None:  # otherwise the values are read into the shards
            self._initialize(deferred, borrowed, gather)
        self.sharded.initialize(self.label)
        new = dict(self.module.named_parameters())
        full = set(map(id, unsharded(self.module)))
        self._replicated = {name: p for name, p in new.items() if id(p) in full}
        for name, parameter in old.items():
            shard = new[name]
            self.known[id(shard)] = shard
            if shard is not parameter:
                self._replace(name, parameter, shard)
        for gathered, shard in self.sharded.gathered():
            self._gathered[id(shard)] = gathered
            self.known[id(gathered)] = shard
        mesh, shards = self.sharded.mesh, {id(p): p for p in self.known.values()}
        #: This rank counts these in a norm: no rank before it holds the same values.
        self._counted = {
            key for key, p in shards.items() if not any(mesh.place[axis] for axis in mesh.copies(p))
        }
        self._counts_all = len(self._counted) == len(shards)

    def _replace(self, name: str, parameter: nn.Parameter, shard: nn.Parameter) -> None:
        self.known[id(parameter)] = shard
        self.replaced[name] = parameter, shard
        # Gradients survive a teardown and a setup with a different backend.
        gradient, parameter.grad = parameter.grad, None
        parameter.requires_grad_(False)
        take_away(parameter, StandIn, shard=shard)
        if gradient is not None:
            shard.grad = self.new(shard, tuple(shard.shape), shard.dtype)
            self._fill(shard.grad, gradient)

    # -- first values of parameters on the meta device (accel.deferred_init) -----------------------

    def _allocate(self) -> set[int]:
        """Give shards on the meta device memory. Return their identities."""
        names = [name for name, p in self.module.named_parameters() if p.is_meta]
        device = torch.device("cpu") if self._offload else self.process.device
        if names:
            self.module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        parameters = dict(self.module.named_parameters())
        return {id(parameters[name]) for name in names}

    @torch.no_grad()
    def _initialize(
        self,
        deferred: set[int],
        borrowed: dict[int, set[str]],
        gather: Callable[[nn.Parameter], torch.Tensor],
    ) -> None:
        """Make rank 0's values by ``reset_parameters`` of one module at a time. Collective.

        Every rank draws the random numbers that a single process would draw.

        Args:
            deferred: identities of the shards without values.
            borrowed: ``deferred.borrowing`` of the module.
            gather: returns the full values of a shard that has some.
        """
        empty = set(deferred)
        for child, reset in resetting(self.module):
            places = _places(child)
            shards = {id(shard): shard for _, _, shard in places}
            if deferred.isdisjoint(shards):
                continue
            full: dict[int, nn.Parameter] = {}
            for key, shard in shards.items():
                is_empty = key in empty
                value = without_values(shard, self.process.device) if is_empty else gather(shard)
                full[key] = nn.Parameter(value, requires_grad=shard.requires_grad)
            for table, name, shard in places:
                table[name] = full[id(shard)]
            try:
                reset_own(child, reset, borrowed[id(child)])
            finally:
                for table, name, shard in places:
                    table[name] = shard
            broadcast_([p.data for p in full.values()], self.process.group)
            for key, shard in shards.items():
                self._fill(shard, full[key])
            empty -= shards.keys()
        named = [(name, p) for name, p in self.module.named_parameters() if id(p) in deferred]
        refuse_without_values((name, here(p)) for name, p in named)

    # -- which tensor is which ---------------------------------------------------------------------

    def canonical(self, parameter: torch.Tensor) -> nn.Parameter:
        """Return the shard of a parameter object of before ``setup``, of a forward, or of now."""
        return self.known.get(id(parameter), parameter)  # type: ignore[arg-type]

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor in graphs for a parameter. VQGAN asks for its last layer's gradient."""
        return self._gathered.get(id(self.canonical(parameter)), parameter)

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

    @torch.no_grad()  # so that to_local() returns the local tensor itself
    def part(self, name: str, tensor: torch.Tensor) -> Shard | None:
        """Return the elements of a tensor on this rank. None if there are none."""
        shape, mesh = tuple(tensor.shape), self.sharded.mesh
        if not isinstance(tensor, DTensor):
            return Shard(name, shape, 0, tensor.detach())
        local = tensor.to_local().detach()
        if not len(local):
            return None
        box: Box = ()
        if mesh.parallel:
            row, box = _place_of(tensor)
        else:
            row = mesh.place["shard"] * -(-shape[0] // mesh.sizes["shard"])
        return Shard(name, shape, row * (local.numel() // len(local)), local, box)

    @torch.no_grad()
    def _fill(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        if (part := self.part("", shard)) is not None:
            part.fill(full)

    # -- gradients ---------------------------------------------------------------------------------

    def notice_exception(self) -> None:
        """Clear what a backward left that an exception ended."""
        if self.sharded.drop_interrupted():
            self.interruption.incomplete = True

    def forget_dropped(self) -> None:
        """Trust gradients again if the program has dropped all that an exception left."""
        gradients = [p.grad for p in self.known.values() if p.grad is not None]
        if not any(bool(here(gradient).any()) for gradient in gradients):
            self.interruption.incomplete = False

    def average_replicated(self) -> None:
        """Average the gradients of parameters that every rank holds. Collective if there are any."""
        parameters = list(self._replicated.values())
        if any(p.requires_grad for p in parameters):
            what = f"the reduction of parameters without dimensions ({self.label})"
            average_gradients_(what, parameters, list(self._replicated), self.process)

    def gradients(
        self, parameters: Iterable[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's gradients: those that it counts in a norm, and the rest."""
        having = [p for p in parameters if p.grad is not None]
        parts = parts_of([p.grad for p in having])
        if self._counts_all:
            return parts, []
        counted: list[torch.Tensor] = []
        rest: list[torch.Tensor] = []
        for parameter, part in zip(having, parts, strict=True):
            is_counted = id(self.canonical(parameter)) in self._counted
            (counted if is_counted else rest).append(part)
        return counted, rest

    # -- back to full parameters -------------------------------------------------------------------

    def restore(
        self, full: Mapping[tuple[str, Any], torch.Tensor] | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Put the parameter objects of before in the shards' places.

        Args:
            full: full values by ``(name, "")`` and gradients by ``(name, "grad")``. None: they are
                lost, and become NaN.
            optimizers: their groups get the parameter objects too.
        """
        self.sharded.undo()
        for table, name, parameter in self._places:
            table[name] = parameter
        back: dict[int, nn.Parameter] = {}
        for name, (parameter, shard) in self.replaced.items():
            back[id(shard)] = parameter
            bring_back(parameter)
            lost = full is None
            value = without_values(shard, self.process.device) if lost else full[name, ""]
            if parameter.is_meta:
                swap(parameter, nn.Parameter(value, requires_grad=False))
            else:
                parameter.data = value
            parameter.grad = None if lost else full.get((name, "grad"))
            parameter.requires_grad_(shard.requires_grad)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [back.get(id(p), p) for p in group["params"]]
            for key in [key for key in optimizer.state if id(key) in back]:
                del optimizer.state[key]


def _place_of(tensor: DTensor) -> tuple[int, Box]:
    """Return the first row of this rank's shard, and its box in the full tensor."""
    shape = tensor.shape
    sizes, starts = compute_local_shape_and_global_offset(
        shape, tensor.device_mesh, tensor.placements
    )
    if sizes[1:] == tuple(shape[1:]):
        return starts[0], ()
    ends = (start + size for start, size in zip(starts[1:], sizes[1:], strict=True))
    return starts[0], ((0, shape[0]), *zip(starts[1:], ends, strict=True))


# -- parameter objects of before setup: lists of them clip, freeze and build optimizers ------------


def _of_shard(name: str) -> Any:
    return property(
        lambda old: getattr(old.shard, name), lambda old, value: setattr(old.shard, name, value)
    )


class StandIn(Absent, nn.Parameter):
    """A replaced parameter. Its ``grad`` is the shard's, and any use of its values raises."""

    shard: nn.Parameter
    plain = frozenset([torch.autograd.grad, torch.autograd.backward])  # by `leaf`
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
            f"{name_of(function)} uses a parameter from before accel.setup, which has no values. "
            "Take it from model.parameters()."
        )
