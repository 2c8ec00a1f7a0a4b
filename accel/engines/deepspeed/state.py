"""State verbs of an engine whose weights, or whose optimizer's state, lie in fragments on the ranks."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ... import shard
from ...errors import AccelError, BackendError
from ...gradients.step import refuse_steps
from ...precision import convert_optimizer
from ...process import Process
from ...process.control import agree
from ...shard import Manifest, Shard
from ..absent import plainly
from ..engine import Context, Engine
from .guards import Guards
from .library import without_groups
from .partitions import Fragment, Partitions
from .stage3 import Sharded

# -- Whole tensors from the ranks' fragments, and back -----------------------------------------------------------------

_PIECE_BYTES: Final = 16 << 20
_ALIGNMENT: Final = 16


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor to put together: its shape, and what this rank has of it, which starts at ``start``."""

    shape: torch.Size
    dtype: torch.dtype
    start: int
    part: torch.Tensor | None


@torch.no_grad()
def assemble(pieces: Iterable[Piece], group: dist.ProcessGroup | None, device: torch.device) -> list[torch.Tensor]:
    """The whole tensors, on every rank; each element is on exactly one of them. Collective."""
    whole: list[torch.Tensor] = []
    waiting: list[Piece] = []
    size = 0
    for piece in pieces:
        if waiting and size > _PIECE_BYTES:
            whole += _assemble(waiting, size, group, device)
            waiting, size = [], 0
        waiting.append(piece)
        size += _padded(piece)
    return whole + _assemble(waiting, size, group, device)


def _padded(piece: Piece) -> int:
    return -(-piece.shape.numel() * piece.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _assemble(
    pieces: Sequence[Piece], size: int, group: dist.ProcessGroup | None, device: torch.device
) -> list[torch.Tensor]:
    # As bytes, since zeros added to them are exact for every dtype.
    flat = torch.zeros(size, dtype=torch.uint8, device=device)
    offset, places = 0, []
    for piece in pieces:
        places.append(flat.narrow(0, offset, piece.shape.numel() * piece.dtype.itemsize).view(piece.dtype))
        offset += _padded(piece)
        if piece.part is not None:
            places[-1].narrow(0, piece.start, piece.part.numel()).copy_(piece.part.reshape(-1))
    if size:
        dist.all_reduce(flat, group=group)
    return [place.clone().view(piece.shape) for place, piece in zip(places, pieces, strict=True)]


def of_fragments(
    partitions: Partitions, what: Mapping[int, torch.Tensor], dtypes: Mapping[int, torch.dtype]
) -> list[Piece]:
    """The pieces of one tensor for each parameter that ``dtypes`` names; ``what`` is this rank's part, by parameter."""
    pieces = []
    for index, dtype in dtypes.items():
        fragment = partitions.fragments.get(index)
        start = 0 if fragment is None else fragment.start
        pieces.append(Piece(partitions.shapes[index], dtype, start, what.get(index)))
    return pieces


# -- optimizers -------------------------------------------------------------------------------------------------------


def is_divided(key: str, value: Any, like: torch.Tensor | torch.Size) -> bool:
    """Whether an entry of an optimizer's state has an element for each of its parameter's."""
    shape = like if isinstance(like, torch.Size) else like.shape
    return isinstance(value, torch.Tensor) and value.shape == shape and not (key == "step" and value.numel() == 1)


def divide(optimizer: Optimizer, fragment: Fragment, shape: torch.Size, state: Mapping[str, Any]) -> None:
    """Give the fragment its part of a parameter's whole state."""
    mine: dict[str, Any] = {}
    for key, value in state.items():
        if is_divided(key, value, shape):
            part = value.detach().reshape(-1).narrow(0, fragment.start, fragment.home.numel())
            floating = part.is_floating_point()
            value = part.to(fragment.weights.device, fragment.weights.dtype if floating else part.dtype, copy=True)
        elif isinstance(value, torch.Tensor):
            value = value.clone()
        mine[key] = value
    optimizer.state[fragment.weights] = mine


def gather(
    optimizer: Optimizer,
    indices: Sequence[int],
    partitions: Partitions,
    process: Process,
    label: str,
) -> dict[int, dict[str, Any]]:
    """The whole state of each parameter of the model ``label`` that has one, on every rank. Collective."""
    mine: dict[int, dict[str, Any]] = {}
    for index in indices:
        fragment = partitions.fragments.get(index)
        state = optimizer.state.get(fragment.weights, {}) if fragment is not None else {}
        if fragment is not None and state:
            mine[index] = {k: v.dtype if is_divided(k, v, fragment.weights) else v for k, v in state.items()}
    kinds: dict[int, dict[str, Any]] = {}
    for theirs in agree(f"gathering an optimizer's state ({label})", mine):
        for index, entries in theirs.items():
            kinds.setdefault(index, entries)
    places, pieces = [], []
    for index in sorted(kinds):
        fragment = partitions.fragments.get(index)
        for key, kind in kinds[index].items():
            if isinstance(kind, torch.dtype):
                part = optimizer.state[fragment.weights][key] if fragment is not None else None
                start = fragment.start if fragment is not None else 0
                pieces.append(Piece(partitions.shapes[index], kind, start, part))
                places.append((index, key))
    for (index, key), tensor in zip(places, assemble(pieces, process.group, process.device), strict=True):
        kinds[index][key] = tensor
    return kinds


@contextmanager
def without_state(optimizer: Optimizer) -> Iterator[None]:
    """Hide the fragments' state, whose keys ``state_dict`` does not know."""
    held, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        yield
    finally:
        optimizer.state = held


logger = logging.getLogger("accel")


class Divided(Engine, ABC):
    """While ``zero`` is None, everything is whole and the base class serves."""

    def __init__(self, module: nn.Module, entry: nn.Module, context: Context) -> None:
        super().__init__(module, entry, context)
        self.zero: Partitions | None = None
        self.guards = Guards(self)
        self.held: list[tuple[dict[str, Any], list[nn.Parameter]]] = []

    @property
    def divided(self) -> bool:
        """Whether gradients and optimizer state are in fragments."""
        return self.zero is not None

    @property
    def weights_divided(self) -> bool:
        """Whether the module does not hold what the optimizer steps."""
        return self.zero is not None and (isinstance(self.zero, Sharded) or self.zero.masters)

    @abstractmethod
    def drop_gradients(self, parameters: Iterable[nn.Parameter], set_to_none: bool) -> bool:
        """``zero_grad`` of a module with these parameters; False where that is not for fragments."""

    def replicas(self) -> Sequence[tuple[str, torch.Tensor]]:
        """None where weights are divided."""
        return [] if isinstance(self.zero, Sharded) else super().replicas()

    def find_unoptimized(self) -> None:
        """Their gradients stay whole, where the weights do."""
        super().find_unoptimized()
        if self.zero is not None and not isinstance(self.zero, Sharded):
            self.zero.whole_gradients = set(self.unoptimized)

    def take_edits(self) -> None:
        """Take over weights that the loop has written or replaced; refuse it where the next step would undo that.

        Raises:
            BackendError: names them.
        """
        if self.zero is not None and (edited := self.zero.take_edits()):
            raise BackendError(
                f"{', '.join(self.names[i] for i in edited[:5])} changed in place, which is lost: the optimizer steps other "
                "copies, divided over the ranks, of the shape and dtype that they had; set weights by load_state_dict(full) of "
                "the model's handle, on every rank"
            )

    def indices(self, optimizer: Optimizer) -> list[int]:
        """The numbers of the optimizer's parameters."""
        numbers = {id(p): i for i, p in enumerate(self.parameters)}
        held = {id(group): parameters for group, parameters in self.held}
        return [numbers[id(p)] for g in optimizer.param_groups for p in held.get(id(g), g["params"])]

    def whole_weights(self, zero: Partitions, indices: Sequence[int]) -> list[torch.Tensor]:
        """The weights that the optimizer steps, on every rank. Collective."""
        weights = {i: f.weights for i, f in zero.fragments.items()}
        dtypes = {i: zero.dtype_of(i) for i in indices}
        pieces = of_fragments(zero, weights, dtypes)
        return assemble(pieces, self.process.group, self.process.device)

    def take_over(self, optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Divide an optimizer's whole state, by parameter number."""
        assert self.zero is not None
        for index, entries in state.items():
            fragment = self.zero.fragments.get(index)
            if fragment is not None and entries:
                divide(optimizer, fragment, self.zero.shapes[index], entries)

    def release(self, optimizer: Optimizer, zero: Partitions) -> dict[int, dict[str, Any]]:
        """An optimizer's whole state, of which no fragment is left in it. Collective."""
        full = gather(optimizer, self.indices(optimizer), zero, self.process, self.label)
        for fragment in zero.fragments.values():
            optimizer.state.pop(fragment.weights, None)
        return full

    def give_back(self, zero: Partitions, optimizers: Sequence[Optimizer]) -> None:
        """Whole weights, gradients and optimizer state in the user's own objects. Collective."""
        if lost := zero.take_edits():
            logger.warning("%s changed in place, which is lost", ", ".join(self.names[i] for i in lost[:5]))
        held = {i: f.grad for i, f in zero.fragments.items() if f.grad is not None}
        theirs = agree(f"gathering gradients ({self.label})", {i: g.dtype for i, g in held.items()})
        dtypes = dict(sorted((i, d) for kinds in theirs for i, d in kinds.items()))
        pieces = of_fragments(zero, held, dtypes)
        grads = dict(zip(dtypes, assemble(pieces, self.process.group, self.process.device), strict=True))
        full = [(optimizer, self.release(optimizer, zero)) for optimizer in optimizers]
        weights = self.whole_weights(zero, range(len(self.parameters)))
        # What accel made half becomes whole again from its fp32 copy.
        ours = {id(tensor) for tensor, _ in self.dtypes}
        zero.end([w if id(p) in ours else w.to(p.dtype) for w, p in zip(weights, self.parameters, strict=True)])
        for optimizer, state in full:
            optimizer.state.update((self.parameters[index], entries) for index, entries in state.items())
        for index, grad in grads.items():
            self.parameters[index].grad = grad.to(self.parameters[index].dtype)
        with contextlib.ExitStack() as for_good:
            for optimizer in optimizers:
                convert_optimizer(optimizer, for_good)
            for_good.pop_all()

    def leave(self, zero: Partitions, optimizers: Sequence[Optimizer]) -> None:
        """The same without the other ranks: weights that this rank has a part of are nan, and its optimizers do not step."""
        for optimizer in optimizers:
            for fragment in zero.fragments.values():
                optimizer.state.pop(fragment.weights, None)
            refuse_steps(optimizer, self._ended)
        with without_groups():
            zero.end([zero.here(i) for i in range(len(self.parameters))])

    # -- memory ---------------------------------------------------------------------------------------------------

    def full_shape(self, parameter: torch.Tensor) -> Sequence[int]:
        """What a divided parameter had."""
        shapes = {} if self.zero is None else dict(zip(map(id, self.parameters), self.zero.shapes, strict=True))
        return shapes.get(id(parameter), parameter.shape)

    def storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's, and the fragments'; weights that only the optimizer has count as its state."""
        fragments = [] if self.zero is None else list(self.zero.fragments.values())
        yield from (("parameters", fragment.home) for fragment in fragments)
        yield from super().storages()
        yield from (("gradients", fragment.grad) for fragment in fragments if fragment.grad is not None)
        yield from (("optimizer_state", fragment.weights) for fragment in fragments)
        yield from (("buckets", bucket) for bucket in ([] if self.zero is None else self.zero.buckets()))

    # -- state dicts ----------------------------------------------------------------------------------------------

    def state_dict(self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Refused where this rank has a part only."""
        if self.zero is None or (optimizer is None and not self.weights_divided):
            return super().state_dict(optimizer, args, kwargs)
        raise AccelError(
            f"state_dict() of {'a model' if optimizer is None else 'an optimizer'} that is divided over the ranks: use "
            "accel.full_state_dict, or accel.save, on every rank"
        )

    def full_state_dict(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """The whole state on every rank. Collective."""
        zero = self.zero
        if zero is None or (optimizer is None and not self.weights_divided):
            return super().full_state_dict(optimizer)
        self.meet(f"accel.full_state_dict of {'the model' if optimizer is None else type(optimizer).__name__}")
        if optimizer is None:
            self.take_edits()
            with self.guards.inside():
                state: dict[str, Any] = self.module.state_dict(keep_vars=True)
            numbers = zero.numbers
            indices = sorted({numbers[id(v)] for v in state.values() if id(v) in numbers})
            whole = dict(zip(indices, self.whole_weights(zero, indices), strict=True))
            for name, value in state.items():
                if id(value) in numbers:
                    index = numbers[id(value)]
                    state[name] = whole[index].to(self.parameters[index].dtype)
                elif isinstance(value, torch.Tensor):
                    state[name] = value.detach()
            return state
        full = gather(optimizer, self.indices(optimizer), zero, self.process, self.label)
        with self.guards.inside(), without_state(optimizer):
            packed = optimizer.state_dict()
        order = {index: number for number, index in enumerate(dict.fromkeys(self.indices(optimizer)))}
        packed["state"] = {order[index]: entries for index, entries in sorted(full.items(), key=lambda e: order[e[0]])}
        return packed

    def load_state_dict(self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take this rank's part of a full state, which is the same on every rank. Collective for a model."""
        zero = self.zero
        if zero is None or (optimizer is None and not self.weights_divided):
            return super().load_state_dict(optimizer, args, kwargs)
        if optimizer is None:
            self.meet("load_state_dict")
            whole = self.whole_weights(zero, range(len(self.parameters)))
            with zero.whole(whole), self.guards.inside():
                return self.module.load_state_dict(*args, **kwargs)
        state = args[0] if args else kwargs["state_dict"]
        with self.guards.inside(), without_state(optimizer):
            optimizer.load_state_dict({**state, "state": {}})
        for fragment in zero.fragments.values():
            optimizer.state.pop(fragment.weights, None)
        numbers = [i for g in state["param_groups"] for i in g["params"]]
        found = dict(zip(numbers, self.indices(optimizer), strict=True))
        self.take_over(optimizer, {found[n]: entries for n, entries in state["state"].items() if n in found})
        return None

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def shards(self, optimizer: Optimizer | None) -> list[Shard]:
        """This rank's fragments, and whatever is whole."""
        zero = self.zero
        if zero is None:
            return super().shards(optimizer)
        if optimizer is None:
            self.take_edits()
            with self.guards.inside():
                rest = plainly(shard.module_shards)(self.module)
            fragments = []
            names = {self.names[i] for i in zero.numbers.values() if zero.is_divided(i)}
            for index, fragment in zero.fragments.items():
                shape = tuple(zero.shapes[index])
                fragments.append(Shard(self.names[index], shape, fragment.start, fragment.weights))
            return [s for s in rest if s.name not in names] + fragments
        found = []
        for index in self.indices(optimizer):
            if (part := zero.fragments.get(index)) is not None:
                for key, value in optimizer.state.get(part.weights, {}).items():
                    if is_divided(key, value, part.weights):
                        name = f"{self.names[index]}/{key}"
                        found.append(Shard(name, tuple(zero.shapes[index]), part.start, value))
        return found

    def values(self, optimizer: Optimizer) -> dict[str, Any]:
        """Groups by their parameters' names, and the state that is not divided."""
        if self.zero is None:
            return super().values(optimizer)
        with without_state(optimizer):
            found = super().values(optimizer)
        for index in self.indices(optimizer):
            part = self.zero.fragments.get(index)
            state = optimizer.state.get(part.weights, {}) if part is not None else {}
            if part is not None and state:
                plain = {k: v for k, v in state.items() if not is_divided(k, v, part.weights)}
                found["state"][self.names[index]] = plain
        return found

    def slots(self, optimizer: Optimizer | None, manifest: Manifest) -> list[Shard]:
        """This rank's fragments; those of the optimizer's state are made."""
        if self.zero is None:
            return super().slots(optimizer, manifest)
        if optimizer is None:
            return self.shards(None)
        numbers = {self.names[i]: i for i in self.indices(optimizer)}
        found = []
        for full_name, (shape, dtype) in manifest.items():
            name, _, key = full_name.rpartition("/")
            part = self.zero.fragments.get(numbers[name]) if name in numbers else None
            if part is not None:
                state = optimizer.state[part.weights]
                if not is_divided(key, state.get(key), part.weights):
                    state[key] = torch.empty(part.weights.shape, dtype=dtype, device=part.weights.device)
                found.append(Shard(full_name, tuple(shape), part.start, state[key]))
        return found

    def fill_values(self, optimizer: Optimizer, values: Mapping[str, Any]) -> None:
        """Group values, and the state that is not divided."""
        if self.zero is None:
            super().fill_values(optimizer, values)
            return
        for group, saved in zip(optimizer.param_groups, values["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for index in self.indices(optimizer):
            part, saved = self.zero.fragments.get(index), values["state"].get(self.names[index])
            if part is not None and saved is None:
                optimizer.state.pop(part.weights, None)
            elif part is not None:
                copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in saved.items()}
                optimizer.state[part.weights].update(copies)

    def filled(self) -> None:
        """Every rank sees the weights that were filled."""
        if self.zero is not None:
            self.zero.spread()
