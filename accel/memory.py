"""Estimate the memory that each backend needs on a rank, and summarize a model's engine."""

from __future__ import annotations

import dataclasses
import itertools
import os
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from .engines import ENGINES, Options, engine_of
from .engines.base.memory import MemoryUse, TensorSize
from .errors import AccelError, OptimizerError, refuse_url
from .registry import registry, resolve_module
from .shard import Shard, parameters_of
from .trees import map_leaves

#: The fields of MemoryUse, each with its name in the table and the chart.
PARTS: Final = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
    "buffers": "buffers",
    "buckets": "buckets",
}
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@final
@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One line of a report: the prediction for the rank that needs the most memory.

    Args:
        backend: its name, with the options that differ from the defaults.
        ranks: number of ranks.
        use: bytes.
    """

    backend: str
    ranks: int
    use: MemoryUse


@final
@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The result of ``accel.memory_report``. ``print(report)`` shows it as a table.

    Attributes:
        title: the model and its optimizers.
        rows: one row per number of ranks and backend.
    """

    title: str
    rows: tuple[MemoryRow, ...]

    def predicted(self, backend: str, ranks: int) -> MemoryUse:
        """Return the prediction for a backend, by its name in the table.

        Raises:
            AccelError: there is no such row.
        """
        for row in self.rows:
            if (row.backend, row.ranks) == (backend, ranks):
                return row.use
        known = ", ".join(f"{row.backend} at {row.ranks}" for row in self.rows)
        raise AccelError(f"the report has no line {backend!r} at {ranks} ranks; it has {known}")

    def __str__(self) -> str:
        parts = [field for field in PARTS if any(getattr(row.use, field) for row in self.rows)]
        lines = [["ranks", "backend", *(PARTS[field] for field in parts), "total"]]
        for row in self.rows:
            sizes = [human(getattr(row.use, field)) for field in (*parts, "total")]
            lines.append([str(row.ranks), row.backend, *sizes])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [self.title]
        for ranks, backend, *sizes in lines:
            cells = [ranks.rjust(widths[0]), backend.ljust(widths[1])]
            cells += [size.rjust(width) for size, width in zip(sizes, widths[2:], strict=True)]
            text.append("  ".join(cells))
        return "\n".join(text)

    def save_plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the table as a bar chart. Backends with equal predictions share a bar.

        Args:
            path: the file. Its suffix selects the format (``.png`` if there is none).

        Raises:
            AccelError: matplotlib is missing, or it can't write the file.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise AccelError("save_plot needs matplotlib. Run pip install matplotlib.") from error
        backends: dict[tuple[int, MemoryUse], list[str]] = {}
        for row in self.rows:
            backends.setdefault((row.ranks, row.use), []).append(row.backend)
        names = [
            f"{ranks} rank{'s' * (ranks > 1)}: {', '.join(names)}"
            for (ranks, _), names in backends.items()
        ]
        labels = [textwrap.fill(name, 40) for name in names]
        unit = human(max(use.total for _, use in backends)).partition(" ")[2]
        height = 1.3 + 0.2 * (max(label.count("\n") for label in labels) + 1) * len(labels)
        figure = Figure(figsize=(7.5, height), layout="constrained")
        axes = figure.subplots()
        ends = [0.0] * len(labels)
        for field, name in PARTS.items():
            sizes = [getattr(use, field) / 1024 ** UNITS.index(unit) for _, use in backends]
            if any(sizes):
                axes.barh(labels, sizes, left=ends, label=name)
                ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
        axes.set_xlabel(f"{unit} per rank")
        figure.suptitle(self.title, fontsize=10)
        if any(ends):
            figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False)
        path = Path(refuse_url(os.fspath(path), AccelError))
        path = path if path.suffix else path.with_suffix(".png")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=100)
        except (OSError, ValueError) as error:
            raise AccelError(f"the picture {path} cannot be written: {error}") from error
        return path


def memory_report(
    model_or_handle: nn.Module, optimizer: Any = None, *, ranks: Sequence[int] = (1, 2, 4, 8, 64)
) -> MemoryReport:
    """Predict the bytes that each backend needs on a rank to train this model. Local.

    Parameters, gradients, optimizer state, buffers and kept communication buffers are counted.
    Activations are not. Nothing is allocated, so the model may be on the meta device.

    Args:
        model_or_handle: a module on any device, or a model that is set up.
        optimizer: an optimizer of its parameters, or a list, tuple or dict of them.
            By default the optimizers of a model that is set up, and none otherwise.
        ranks: numbers of ranks.

    Raises:
        OptimizerError: an optimizer isn't this model's, or its state depends on more than sizes.
        AccelError: ``ranks`` isn't a sequence of positive numbers.
    """
    worlds = list(dict.fromkeys(ranks)) if isinstance(ranks, Iterable) else []
    if not worlds or not all(type(n) is int and n > 0 for n in worlds):
        raise AccelError(
            f"ranks={ranks!r}: expected numbers of processes above 0, such as (1, 2, 8)"
        )
    module, _ = resolve_module(model_or_handle)
    engine = registry.engine(module)
    optimizers = _optimizers(optimizer)
    if engine is None:
        tensors = tensor_sizes(module, optimizers)
    else:
        optimizers = engine.optimizers if optimizer is None else optimizers
        tensors = tensor_sizes(module, optimizers, engine.named, engine.holdings.shapes)
    rows = []
    for world in worlds:
        # A backend that doesn't synchronize can't train on several ranks.
        for backend in [b for b in ENGINES.values() if world == 1 or b.synchronizes]:
            kind = backend.options_type
            for options in (kind(), *kind.variants, *(kind.shown if world > 1 else ())):
                use = backend.predict(module, tensors, options, world)
                if use is not None:
                    rows.append(MemoryRow(_label(options), world, use))
    parameters = [tensor for tensor in tensors if not tensor.is_buffer]
    total = sum(p.numel for p in parameters)
    trainable = sum(p.numel for p in parameters if p.trainable)
    sizes = f"{_scaled(total, 1000, ('', 'k', 'M', 'B', 'T'))} parameters"
    if trainable < total:
        sizes += f" of which {_scaled(trainable, 1000, ('', 'k', 'M', 'B', 'T'))} trainable"
    names = " and ".join(dict.fromkeys(type(o).__name__ for o in optimizers)) or "no optimizer"
    return MemoryReport(f"{type(module).__name__}, {sizes}, {names}: bytes per rank", tuple(rows))


def _optimizers(tree: Any) -> list[Optimizer]:
    optimizers: dict[int, Optimizer] = {}

    def add(optimizer: Any, path: str) -> None:
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise OptimizerError(f"{path} is a {kind}; expected a torch.optim.Optimizer")
        optimizers[id(optimizer)] = optimizer

    map_leaves(add, tree, "optimizer")
    return list(optimizers.values())


def _label(options: Options) -> str:
    """Return a backend's name, with the options that differ from the defaults."""
    name, usual = engine_of(options).name, type(options)()
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    changed = {key: v for key, v in values.items() if v != getattr(usual, key)}
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in changed.items())})" if changed else name


def human(nbytes: float) -> str:
    """Return bytes in binary units with three digits, such as ``1.50 GiB``."""
    return _scaled(nbytes, 1024, UNITS)


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while number >= base - 0.5 and power < len(units) - 1:
        number, power = number / base, power + 1
    digits = 0 if power == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {units[power]}".rstrip()


# -- The sizes of a model's tensors and of their optimizer state -----------------------------------


def tensor_sizes(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    named: Mapping[str, torch.Tensor] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> list[TensorSize]:
    """Return the sizes of all parameters and buffers. Nothing is allocated or changed.

    A model that is set up gives the parameters that its optimizers hold as ``named``, and
    their full shapes, because this rank may hold shards.
    """
    named = dict(module.named_parameters()) if named is None else named
    shapes = {name: p.shape for name, p in named.items()} if shapes is None else shapes
    names = {id(p): name for name, p in named.items()}
    state_bytes: Counter[str] = Counter()
    first_optimizer: dict[str, int] = {}
    for index, optimizer in enumerate(optimizers):
        held = parameters_of(optimizer)
        strangers = [tuple(p.shape) for p in held if id(p) not in names]
        if strangers:
            raise OptimizerError(
                f"this {type(optimizer).__name__} holds {len(strangers)} tensors that are not "
                f"parameters of the model (the first of shape {strangers[0]}). "
                "Build it from model.parameters()."
            )
        sizes = _state_bytes(optimizer, [shapes[names[id(p)]] for p in held])
        for parameter, size in zip(held, sizes, strict=True):
            state_bytes[names[id(parameter)]] += size
            first_optimizer.setdefault(names[id(parameter)], index)
    tensors = [
        TensorSize(
            name=name,
            shape=tuple(shapes[name]),
            itemsize=parameter.dtype.itemsize,
            trainable=parameter.requires_grad,
            optimizer=first_optimizer.get(name),
            state_bytes=state_bytes[name],
        )
        for name, parameter in named.items()
    ]
    for name, buffer in module.named_buffers():
        shape, itemsize = tuple(buffer.shape), buffer.dtype.itemsize
        tensors.append(TensorSize(name=name, shape=shape, itemsize=itemsize, is_buffer=True))
    return tensors


@final
class _ScalarsOfNothing(TorchDispatchMode):
    """Gives 1 when an optimizer reads a meta tensor's value, because sizes don't depend on it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype.is_floating_point and 1.0 or args[0].dtype is torch.bool or 1
        return func(*args, **(kwargs or {}))


def _state_bytes(optimizer: Optimizer, shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the bytes of state per parameter, found by a step of a copy on the meta device."""
    kind = type(optimizer)
    try:
        stand_in, parameters = _meta_copy(optimizer, shapes)
        # Not what a scheduler put before it, and without the hooks that all optimizers have.
        step = getattr(kind.step, "__wrapped__", kind.step)
        with torch.no_grad(), _ScalarsOfNothing():
            step(stand_in)
    except Exception as error:
        raise OptimizerError(
            f"the memory of {kind.__name__} cannot be told without real tensors. "
            f"A step of a copy on the meta device raised {type(error).__name__}: {error}"
        ) from error
    return [sum(map(_nbytes, stand_in.state.get(p, {}).values())) for p in parameters]


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


def _meta_copy(
    optimizer: Optimizer, shapes: Sequence[Sequence[int]]
) -> tuple[Optimizer, list[nn.Parameter]]:
    """Return a copy without state over meta parameters with gradients, and these parameters."""
    parameters = []
    for parameter, shape in zip(parameters_of(optimizer), shapes, strict=True):
        data = torch.empty(tuple(shape), dtype=parameter.dtype, device="meta")
        other = nn.Parameter(data, requires_grad=parameter.requires_grad)
        other.grad = torch.empty_like(data) if parameter.requires_grad else None
        parameters.append(other)
    # Some devices compute a step differently, with the same state.
    plain = dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), False)
    groups, remaining = [], iter(parameters)
    for group in optimizer.param_groups:
        options = {**group, **{key: value for key, value in plain.items() if key in group}}
        groups.append(
            {**options, "params": list(itertools.islice(remaining, len(group["params"])))}
        )
    # Hooks, and methods that a scheduler or accel has replaced, know the original.
    replaced = ("step", "zero_grad", "state_dict")
    stand_in = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in replaced and not name.startswith(("_optimizer_", "__")):
            vars(stand_in)[name] = value
    stand_in.state, stand_in.param_groups = defaultdict(dict), groups
    return stand_in, parameters


# -- A summary of a model's engine -----------------------------------------------------------------


def summary(model: nn.Module) -> str:
    """Return a text with the backend, precision, parameters and bytes on this rank. Local.

    Print it on rank 0 by ``accel.print(accel.summary(model))``.

    Args:
        model: a model that is set up.

    Raises:
        AccelError: the model is not set up.
    """
    engine = registry.find_engine(model)
    place = engine.process.place
    sizes = [shape.numel() for shape in engine.holdings.shapes.values()]
    total = sum(sizes)
    trainable = sum(n for n, p in zip(sizes, engine.parameters, strict=True) if p.requires_grad)
    weights = _bytes(engine.holdings.shards(None)) / 1e6
    state = sum(_bytes(engine.holdings.shards(optimizer)) for optimizer in engine.optimizers) / 1e6
    ranks = f"{place.world_size} rank{'s' if place.world_size > 1 else ''}"
    rows = {
        "backend": f"{engine.name} on {ranks} ({engine.process.device.type}), {engine.precision.name}",
        "options": f"{engine.options}",
        "parameters": f"{total:,}: {trainable:,} trainable, {total - trainable:,} frozen",
        "optimizers": ", ".join(type(optimizer).__name__ for optimizer in engine.optimizers)
        or "none",
        f"on rank {place.rank}": f"weights and buffers {weights:,.2f} MB, optimizer state {state:,.2f} MB",
    }
    width = max(map(len, rows))
    return "\n".join(
        [engine.kind, *(f"  {key.ljust(width)}  {text}" for key, text in rows.items())]
    )


def _bytes(shards: Iterable[Shard]) -> int:
    """Return the bytes of shards. Memory that several shards share counts once."""
    sizes = {(s.tensor.data_ptr(), s.tensor.numel()): s.tensor.nbytes for s in shards}
    return sum(sizes.values())
