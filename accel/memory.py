"""Predict the memory use of each backend, and summarize a model."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from .engines import ENGINES, Engine
from .engines.base.memory import MemoryUse, TensorSize
from .errors import AccelError
from .registry import registry, resolve_module
from .shard import parameters_of
from .trees import all_tensors

#: The columns of a report: the fields of MemoryUse, then their sum.
TITLES: Final = ("parameters", "gradients", "optimizer", "buffers", "buckets", "total")


def human(nbytes: float) -> str:
    """Return a size with a binary unit, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The result of ``accel.memory_report``. Print it for a table.

    Attributes:
        title: the model and its optimizers.
        uses: bytes on the fullest rank, by number of ranks and backend.
    """

    title: str
    uses: dict[tuple[int, str], MemoryUse]

    def predicted(self, backend: str, ranks: int) -> MemoryUse:
        """Return the prediction for a backend, by its name in the table."""
        return self.uses[ranks, backend]

    def __str__(self) -> str:
        width = max(len(backend) for _, backend in self.uses)
        row = f"{{:>5}}  {{:{width}}}" + "  {:>11}" * len(TITLES)
        lines = [self.title, row.format("ranks", "backend", *TITLES)]
        for (ranks, backend), use in self.uses.items():
            sizes = map(human, (*astuple(use), use.total))
            lines.append(row.format(ranks, backend, *sizes))
        return "\n".join(lines)

    def save_plot(self, path: str | os.PathLike[str]) -> Path:
        """Save a bar chart. The suffix of ``path`` selects the format."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            text = "save_plot() needs matplotlib. Run pip install matplotlib."
            raise AccelError(text) from error
        height = 1.5 + 0.22 * len(self.uses)
        figure = Figure(figsize=(7.5, height), layout="constrained")
        axes = figure.subplots()
        labels = [f"{backend} on {ranks}" for ranks, backend in self.uses]
        rows = list(map(astuple, self.uses.values()))
        gib = torch.tensor(rows, dtype=torch.float64).T / 2**30
        begins = gib.cumsum(0) - gib
        for title, sizes, begin in zip(TITLES[:-1], gib, begins, strict=True):
            axes.barh(labels, sizes.tolist(), left=begin.tolist(), label=title)
        axes.invert_yaxis()
        axes.set_xlabel("GiB per rank")
        figure.suptitle(self.title, fontsize=10)
        figure.legend(loc="outside lower center", ncols=3)
        figure.savefig(path)
        return Path(path)


def memory_report(
    model_or_handle: nn.Module, optimizer: Any = None, *, ranks: Sequence[int] = (1, 2, 4, 8, 64)
) -> MemoryReport:
    """Predict the bytes per rank to train a model with each backend. Local.

    Everything except activations is counted. Nothing is allocated, so the model
    may be on the meta device.

    Args:
        model_or_handle: a module on any device, or a wrapped model.
        optimizer: an optimizer, list or tuple. None: the wrapped model's.
        ranks: the numbers of ranks to predict.
    """
    module, _ = resolve_module(model_or_handle)
    engine = registry.engine(module)
    if optimizer is None and engine is not None:
        optimizer = engine.optimizers
    is_single = isinstance(optimizer, Optimizer)
    optimizers = [optimizer] if is_single else list(optimizer or ())
    tensors = tensor_sizes(module, optimizers)
    uses = {}
    for world_size in dict.fromkeys(ranks):
        for backend in ENGINES.values():
            # A backend that doesn't synchronize can't train on several ranks.
            if world_size > 1 and not backend.synchronizes:
                continue
            kind = backend.options_type
            shown = kind.shown if world_size > 1 else ()
            for options in (kind(), *kind.variants, *shown):
                use = backend.predict(module, tensors, options, world_size)
                if use is not None:
                    changed = str(options).removeprefix(kind.__name__).removesuffix("()")
                    uses[world_size, backend.name + changed] = use
    numel = sum(tensor.numel for tensor in tensors if not tensor.is_buffer)
    title = f"{type(module).__name__}, {numel:,} parameters, {_names(optimizers)}"
    return MemoryReport(f"{title}: bytes per rank", uses)


def _names(optimizers: Iterable[Optimizer]) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "no optimizer"


def tensor_sizes(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[TensorSize]:
    """Return the sizes of all parameters and buffers, without allocating."""
    states: dict[int, tuple[int, int]] = {}
    for number, optimizer in enumerate(optimizers):
        for key, nbytes in _state_bytes(optimizer).items():
            states[key] = number, nbytes
    sizes = []
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        owner, nbytes = states.get(id(tensor), (None, 0))
        size = TensorSize(
            name=name,
            shape=tuple(tensor.shape),
            itemsize=tensor.dtype.itemsize,
            is_buffer=not isinstance(tensor, nn.Parameter),
            trainable=tensor.requires_grad,
            optimizer=owner,
            state_bytes=nbytes,
        )
        sizes.append(size)
    return sizes


def _state_bytes(optimizer: Optimizer) -> dict[int, int]:
    """Return bytes of state by parameter id, measured by a step on meta."""
    parameters = parameters_of(optimizer)
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.param_groups = list(map(_on_meta, groups))
    optimizer.state = defaultdict(dict)
    nbytes = dict.fromkeys(map(id, parameters), 0)
    try:
        # Call the step without its hooks, because profilers and schedulers must not see it.
        step = type(optimizer).step
        with torch.no_grad():
            getattr(step, "__wrapped__", step)(optimizer)
        for parameter, stand_in in zip(parameters, parameters_of(optimizer), strict=True):
            for _, tensor in all_tensors(optimizer.state[stand_in]):
                nbytes[id(parameter)] += tensor.nbytes
    finally:
        optimizer.param_groups, optimizer.state = groups, state
    return nbytes


def _on_meta(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group with full parameters and gradients on meta."""
    stand_ins = []
    for p in group["params"]:
        data = torch.empty(tuple(p.shape), dtype=p.dtype, device="meta")
        stand_ins.append(nn.Parameter(data, p.requires_grad))
        stand_ins[-1].grad = torch.empty_like(data) if p.requires_grad else None
    # Fused and capturable steps reject meta tensors. The plain step creates the same state.
    plain = dict.fromkeys({"foreach", "fused", "capturable"} & group.keys(), False)
    return group | plain | {"params": stand_ins}


def summary(model: nn.Module) -> str:
    """Describe a model's backend, parameters and bytes on this rank. Local.

    Print it on rank 0 with ``accel.print(accel.summary(model))``.
    """
    engine = registry.find_engine(model)
    process = engine.process
    place, device = process.place, process.device.type
    total = trainable = 0
    shapes = engine.holdings.shapes.values()
    for shape, parameter in zip(shapes, engine.parameters, strict=True):
        total += shape.numel()
        trainable += shape.numel() if parameter.requires_grad else 0
    weights = _shard_bytes(engine, [None])
    state = _shard_bytes(engine, engine.optimizers)
    backend = f"{engine.name}, world size {place.world_size} ({device})"
    lines = [
        engine.kind,
        f"backend: {backend}, {engine.precision.name}",
        f"options: {engine.options}",
        f"parameters: {total:,} ({trainable:,} trainable)",
        f"optimizers: {_names(engine.optimizers)}",
        f"on rank {place.rank}: weights and buffers {weights}, optimizer state {state}",
    ]
    return "\n  ".join(lines)


def _shard_bytes(engine: Engine, optimizers: Iterable[Optimizer | None]) -> str:
    """Return the size of this rank's shards. None means the module."""
    nbytes = {}
    for optimizer in optimizers:
        for shard in engine.holdings.shards(optimizer):
            # Shards may share memory, which counts once.
            tensor = shard.tensor
            nbytes[tensor.data_ptr(), tensor.numel()] = tensor.nbytes
    return human(sum(nbytes.values()))
