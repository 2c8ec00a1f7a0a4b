"""Memory of an engine: predicted from a model's sizes, and measured on what lives."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from ..footprint import Footprint, MemoryUse, ParameterSize
from ..stepping import Stepper

# -- predictions: pure functions of sizes, by rank --------------------------------------------------------------------


def whole(footprint: Footprint, world_size: int, buckets: int = 0) -> tuple[MemoryUse, ...]:
    """Everything on every rank, and ``buckets`` beside it."""
    return (_use(footprint, footprint.parameters, buckets=buckets),) * world_size


def owners(footprint: Footprint, world_size: int) -> tuple[MemoryUse, ...]:
    """All parameters on every rank; gradients and state of a parameter on the one rank that owns it.

    One optimizer after the other deals its parameters out whole, trainable ones first, from large to small, each to the
    rank that has least so far. A gradient that no optimizer steps stays everywhere. Until a step's reduction all
    gradients are there, and those of one owner once more.
    """
    owned: list[list[ParameterSize]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    dealt: set[int] = set()
    for indices in footprint.optimizers:
        new = [i for i in dict.fromkeys(indices) if i not in dealt]
        dealt.update(new)
        parameters = sorted((footprint.parameters[i] for i in new), key=lambda p: (not p.trainable, -p.numel))
        for parameter in parameters:
            rank = loads.index(min(loads))
            owned[rank].append(parameter)
            loads[rank] += parameter.numel
    rest = [p for i, p in enumerate(footprint.parameters) if i not in dealt]
    uses = [_use(footprint, [*mine, *rest]) for mine in owned]
    gradients = _gradients(footprint.parameters)
    piece = max(use.gradients for use in uses) if world_size > 1 else 0
    return tuple(replace(use, transient=gradients - use.gradients + piece) for use in uses)


def even_shards(footprint: Footprint, world_size: int) -> tuple[MemoryUse, ...]:
    """Every parameter, gradient and state cut along the first dimension into equal pieces, the last of them padded.

    In backward a block and the next one are there whole, with a block's gradients until they are reduced; and so is
    from first to last what lies in no block.
    """
    parameters = sum(_rows(p, world_size) * _row_bytes(p) for p in footprint.parameters)
    gradients = sum(_rows(p, world_size) * _row_bytes(p) for p in footprint.trainable)
    blocks = dict(footprint.blocks)
    rest = blocks.pop("", [])
    gathered = sum(p.nbytes for p in rest) + _gradients(rest)
    gathered += max((2 * sum(p.nbytes for p in block) + _gradients(block) for block in blocks.values()), default=0)
    use = MemoryUse(
        parameters=parameters,
        gradients=gradients,
        buffers=footprint.buffers,
        transient=gathered if world_size > 1 else 0,
    )
    stateful = [p for p in footprint.parameters if p.state_bytes]
    return tuple(
        replace(use, optimizer_state=sum(_state_share(p, rank, world_size) for p in stateful))
        for rank in range(world_size)
    )


def zero(
    footprint: Footprint,
    world_size: int,
    stage: int,
    *,
    masters: bool = False,
    whole_below: int = 0,
    bucket: int = 0,
) -> tuple[MemoryUse, ...]:
    """The stages of ZeRO (Rajbhandari et al., arXiv 1910.02054): 1 cuts optimizer state, 2 gradients too, 3 parameters too.

    Once they are reduced, stage 1 as well keeps only the gradients of what a rank steps. Stage 0 is ``whole``.

    Args:
        footprint: the model.
        world_size: number of ranks.
        stage: 1 to 3.
        masters: the optimizer steps fp32 copies, which count as its state; its other state is fp32 too. The model's own
            parameters have two bytes, and so has a gradient of one backward.
        whole_below: at stage 3, parameters of so many elements or fewer are whole on every rank, beside the parts.
        bucket: elements of the memory to reduce in that stage 3 keeps; no more than the model has.
    """
    if world_size == 1:
        return whole(footprint, 1)
    sizes = {p.name: p.numel * (2 if masters else p.itemsize) for p in footprint.parameters}
    stepped = {index for indices in footprint.optimizers for index in indices}
    state = gradients = 0
    for index, parameter in enumerate(footprint.parameters):
        if parameter.trainable:
            gradients += sizes[parameter.name]
        if not masters:
            state += parameter.state_bytes
        elif index in stepped and parameter.trainable:
            state += 4 * parameter.numel + parameter.state_bytes * 4 // parameter.itemsize
    block = max((sum(sizes[p.name] for p in block) for block in footprint.blocks.values()), default=0)
    mine = _share(gradients, world_size)
    kept = sum(sizes[p.name] for p in footprint.parameters if p.numel <= whole_below) if stage == 3 else 0
    numel = sum(p.numel for p in footprint.parameters)
    itemsize = max((2 if masters else p.itemsize for p in footprint.parameters), default=0)
    # Stage 1 keeps all gradients until they are reduced, 2 a block's; 3 has a block's parameters too.
    transient = {1: sum(sizes[p.name] for p in footprint.trainable), 2: block, 3: 2 * block}[stage]
    use = MemoryUse(
        parameters=_share(sum(sizes.values()), world_size if stage == 3 else 1) + kept,
        gradients=mine,
        optimizer_state=_share(state, world_size),
        buffers=footprint.buffers,
        buckets=min(bucket, numel + numel % 2) * itemsize if stage == 3 else 0,
        transient=transient,
    )
    return (use,) * world_size


def layers(footprint: Footprint) -> list[list[ParameterSize]]:
    """The parameters of each layer of a Sequential."""
    children: dict[str, list[ParameterSize]] = {name: [] for name, _ in footprint.layers}
    for parameter in footprint.parameters:
        children[parameter.name.partition(".")[0]].append(parameter)
    return list(children.values())


def stages(footprint: Footprint, counts: Sequence[int]) -> tuple[MemoryUse, ...]:
    """On each rank the next ``counts[rank]`` of the layers, and nothing of the others."""
    rest = iter(zip(layers(footprint), footprint.layers, strict=True))
    uses = []
    for count in counts:
        taken = list(itertools.islice(rest, count))
        mine = [p for parameters, _ in taken for p in parameters]
        buffers = sum(nbytes for _, (_, nbytes) in taken)
        uses.append(replace(_use(footprint, mine), parameters=sum(p.nbytes for p in mine), buffers=buffers))
    return tuple(uses)


def _use(footprint: Footprint, mine: Iterable[ParameterSize], buckets: int = 0) -> MemoryUse:
    """All parameters, and gradients and state of some."""
    mine = list(mine)
    return MemoryUse(
        parameters=sum(p.nbytes for p in footprint.parameters),
        gradients=_gradients(mine),
        optimizer_state=sum(p.state_bytes for p in mine),
        buffers=footprint.buffers,
        buckets=buckets,
    )


def _gradients(parameters: Iterable[ParameterSize]) -> int:
    return sum(p.nbytes for p in parameters if p.trainable)


def _share(total: int, parts: int) -> int:
    return -(-total // parts)


def _first(parameter: ParameterSize) -> int:
    return parameter.shape[0] if parameter.shape else 1


def _rows(parameter: ParameterSize, world_size: int) -> int:
    """Rows of a piece; on the last ranks some of them are padding."""
    return _share(_first(parameter), world_size)


def _row_bytes(parameter: ParameterSize) -> int:
    return parameter.nbytes // max(_first(parameter), 1)


def _state_share(parameter: ParameterSize, rank: int, world_size: int) -> int:
    """State of the rows that ``rank`` has, which are no padding."""
    rows = _rows(parameter, world_size)
    mine = min(max(_first(parameter) - rank * rows, 0), rows)
    return parameter.state_bytes * mine // max(_first(parameter), 1)


# -- the verbs --------------------------------------------------------------------------------------------------------


class MemoryVerbs(ABC):
    """What the memory report reaches. As written here ``measure`` serves engines whose state hangs on the user's objects."""

    module: nn.Module
    parameters: list[nn.Parameter]
    steppers: dict[int, Stepper]

    @classmethod
    @abstractmethod
    def predict(cls, footprint: Footprint, options: Any, world_size: int) -> tuple[MemoryUse, ...]:
        """What each rank will hold, by rank; nothing where the backend does not take such a module. Pure.

        It needs neither the backend's package nor a process group.
        """

    def full_shape(self, parameter: torch.Tensor) -> Sequence[int]:
        """The shape that a parameter has in one process."""
        return parameter.shape

    def storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What lives on this rank: tensors, each with the field of ``MemoryUse`` that it counts for. Local."""
        for parameter in self.parameters:
            yield "parameters", parameter
        for buffer in self.module.buffers():
            yield "buffers", buffer
        for parameter in self.parameters:
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for stepper in self.steppers.values():
            for state in stepper.optimizer.state.values():
                yield from (("optimizer_state", value) for value in state.values() if isinstance(value, torch.Tensor))

    def hidden_buckets(self) -> int:
        """Bytes of buckets that no tensor of ``storages`` lies in. Local."""
        return 0

    @final
    def measure(self) -> MemoryUse:
        """Bytes of the distinct storages of ``storages``, each counted once, for the first field that names it. Local."""
        seen: set[int] = set()
        sizes = {"buckets": self.hidden_buckets()}
        for field, tensor in self.storages():
            with torch._C.DisableTorchFunctionSubclass():  # also of a parameter whose class refuses its use
                storages = [part.untyped_storage() for part in _parts(tensor.detach())]
            for storage in storages:
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    sizes[field] = sizes.get(field, 0) + storage.nbytes()
        return MemoryUse(**sizes)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with memory of their own that lie on this rank."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    local = getattr(tensor, "to_local", None)
    return (tensor if local is None else local(),)
