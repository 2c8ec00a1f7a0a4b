"""What each backend needs of a rank's memory: predicted without that memory, measured on a live engine, and as a picture."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

from torch import nn
from torch.optim import Optimizer

from .engines import BASELINE, ENGINES, Options, engine_of
from .engines.base.memory import UNITS, Footprint, MemoryUse, count, human, take
from .errors import AccelError, OptimizerError, refuse_url
from .handles import OptimizerHandle, raw
from .registry import registry, resolve_module
from .shard import Shard
from .trees import map_leaves

#: The parts of a total, as the table and the picture name them, and their colours.
PARTS: Final = {
    "parameters": ("parameters", "#334155"),
    "gradients": ("gradients", "#c2410c"),
    "optimizer_state": ("optimizer", "#eab308"),
    "buffers": ("buffers", "#94a3b8"),
    "buckets": ("buckets", "#7c3aed"),
}


@final
@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One line of a report.

    Args:
        backend: its name, with the options that are not the defaults.
        ranks: number of processes.
        kind: "predicted", for the rank that needs most; or for this rank "predicted here" and "measured here".
        use: bytes.
    """

    backend: str
    ranks: int
    kind: Literal["predicted", "predicted here", "measured here"]
    use: MemoryUse


@final
@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What ``accel.memory_report`` gives; ``print(report)`` shows it as a table.

    Attributes:
        title: the model and its optimizers.
        rows: for each number of ranks each backend; last, what was measured.
    """

    title: str
    rows: tuple[MemoryRow, ...]

    def predicted(self, backend: str, ranks: int) -> MemoryUse:
        """The prediction of one backend, by its name in the table.

        Raises:
            AccelError: there is no such line.
        """
        for row in self.rows:
            if (row.backend, row.ranks, row.kind) == (backend, ranks, "predicted"):
                return row.use
        known = sorted({(r.ranks, r.backend) for r in self.rows if r.kind == "predicted"})
        raise AccelError(
            f"the report has no line {backend!r} at {ranks} ranks; it has {', '.join(f'{b} at {n}' for n, b in known)}"
        )

    def __str__(self) -> str:
        parts = [field for field in PARTS if any(getattr(row.use, field) for row in self.rows)]
        header = ["ranks", "backend", "", *(PARTS[field][0] for field in parts), "total", "less", "+ in a step"]
        lines = [header]
        for row in self.rows:
            sizes = [human(getattr(row.use, field)) for field in parts]
            kind = "" if row.kind == "predicted" else row.kind
            passing = f"~{human(row.use.transient)}" if row.use.transient else ""
            lines.append([str(row.ranks), row.backend, kind, *sizes, human(row.use.total), self._less(row), passing])
        columns = []
        for column in zip(*lines, strict=True):
            if any(column[1:]):
                width, left = max(map(len, column)), column[0] in ("backend", "")
                columns.append([cell.ljust(width) if left else cell.rjust(width) for cell in column])
        text = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
        legend = [f"less: than {BASELINE} on as many ranks"] if any(map(self._less, self.rows)) else []
        return "\n".join([self.title, *text, *legend])

    def _less(self, row: MemoryRow) -> str:
        """By how much a total is smaller than the baseline's."""
        if row.backend == BASELINE or row.kind != "predicted":
            return ""
        base = self.predicted(BASELINE, row.ranks).total
        percent = 100 * (1 - row.use.total / base) if base else 0.0
        return f"{percent:.0f} %" if round(percent) else ""

    def save_plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the predictions: a bar for each number of ranks, under the names of the backends that need the same.

        The form of the file is by its suffix.

        Raises:
            AccelError: matplotlib is missing, or cannot write such a file.
        """
        highest = max(row.use.total + row.use.transient for row in self.rows)
        unit, size = scale(highest)
        groups = {title: [_bar(row, size) for row in rows] for title, rows in self._panels().items()}
        return save_panels([Panel(self.title, f"{unit} per rank", groups, dict(PARTS.values()))], path)

    def _panels(self) -> dict[str, list[MemoryRow]]:
        """The predictions by backend, or backends where they are the same for several."""
        by_backend: dict[str, list[MemoryRow]] = {}
        for row in self.rows:
            if row.kind == "predicted":
                by_backend.setdefault(row.backend, []).append(row)
        # Where there are several numbers of ranks, a backend for one process alone says nothing that the others do not.
        longest = max(map(len, by_backend.values()))
        same: dict[tuple[tuple[int, MemoryUse], ...], list[str]] = {}
        for backend, rows in by_backend.items():
            if len(rows) > 1 or longest == 1:
                same.setdefault(tuple((row.ranks, row.use) for row in rows), []).append(backend)
        return {", ".join(names): by_backend[names[0]] for names in same.values()}


def scale(highest: float) -> tuple[str, int]:
    """The unit for a picture of so many bytes, and its bytes."""
    unit = human(highest).partition(" ")[2]
    return unit, 1024 ** UNITS.index(unit)


def _bar(row: MemoryRow, size: int) -> tuple[str, dict[str, float], str]:
    """A row of the picture, in units of ``size`` bytes."""
    sizes = {label: getattr(row.use, field) / size for field, (label, _) in PARTS.items() if getattr(row.use, field)}
    text = human(row.use.total)
    if row.use.transient:
        sizes["for a while in a step"] = row.use.transient / size
        text += f", in a step {human(row.use.total + row.use.transient)}"
    return f"{row.ranks} rank{'s' * (row.ranks > 1)}", sizes, text


# -- making one -------------------------------------------------------------------------------------------------------


def memory_report(
    model_or_handle: nn.Module,
    optimizer: Any = None,
    *,
    ranks: Sequence[int] = (1, 2, 4, 8, 64),
    measured: bool = False,
) -> MemoryReport:
    """What every backend would need of each rank's memory for this model, and what the live engine has taken. Local.

    Bytes of parameters, gradients, optimizer state, buffers and buckets, as they are when the optimizer has stepped and
    the gradients are still there. Activations are not counted. Nothing is allocated: the model may be on the meta device.

    Args:
        model_or_handle: a module on any device, or the handle of one.
        optimizer: over its parameters, or a list, tuple or dict of them; None is the handle's own, else none.
        ranks: numbers of processes to predict for.
        measured: add what this rank's live engine holds now, and its prediction with the engine's own options.

    Raises:
        OptimizerError: not an optimizer of this model, or one whose state depends on more than sizes.
        AccelError: ``ranks`` are not positive numbers, or ``measured`` without a live engine.
    """
    worlds = list(dict.fromkeys(ranks)) if isinstance(ranks, Iterable) else []
    if not worlds or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in worlds):
        raise AccelError(f"ranks={ranks!r}: expected numbers of processes above 0, such as (1, 2, 8)")
    module, _ = resolve_module(model_or_handle)
    engine = registry.of_handle(model_or_handle) if measured else registry.engine(module)
    optimizers = _optimizers(optimizer)
    if optimizer is None and engine is not None:
        optimizers = engine.optimizers
    footprint = take(module, optimizers, *((engine.named, engine.holdings.shapes) if engine else ()))
    rows = [
        MemoryRow(label(options), world, "predicted", max(uses, key=lambda use: use.total))
        for world in worlds
        for backend in ENGINES.values()
        # Without synchronisation there is no training on several ranks.
        if world == 1 or backend.synchronizes
        for kind in [backend.options_type]
        for options in (kind(), *kind.variants, *(kind.shown if world > 1 else ()))
        for uses in [backend.predict(footprint, options, world)]
        if uses
    ]
    if measured and engine is not None:
        place = engine.process.place
        expected = engine.predict(footprint, engine.options, place.world_size)[place.rank]
        rows.append(MemoryRow(label(engine.options), place.world_size, "predicted here", expected))
        rows.append(MemoryRow(label(engine.options), place.world_size, "measured here", engine.holdings.measure()))
    return MemoryReport(_title(module, footprint, optimizers), tuple(rows))


def label(options: Options) -> str:
    """A backend's name, and its options that are not the defaults."""
    name = engine_of(options).name
    usual = type(options)()
    fields = [f.name for f in dataclasses.fields(options) if getattr(options, f.name) != getattr(usual, f.name)]
    fields = [name for name in fields if not isinstance(getattr(options, name), Mapping)]  # too long for a table
    return f"{name}({', '.join(f'{f}={getattr(options, f)!r}' for f in fields)})" if fields else name


def _optimizers(tree: Any) -> list[Optimizer]:
    found: dict[int, Optimizer] = {}

    def add(optimizer: Any, path: str) -> None:
        if not isinstance(optimizer, Optimizer):
            raise OptimizerError(f"{path} is a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        own = raw(optimizer) if type(optimizer) is OptimizerHandle else optimizer
        found[id(own)] = own

    map_leaves(add, tree, "optimizer")
    return list(found.values())


def _title(module: nn.Module, footprint: Footprint, optimizers: Sequence[Optimizer]) -> str:
    total = sum(p.numel for p in footprint.parameters)
    trainable = sum(p.numel for p in footprint.trainable)
    text = f"{type(module).__name__}, {count(total)} parameters"
    if trainable < total:
        text += f" of which {count(trainable)} trainable"
    names = " and ".join(dict.fromkeys(type(o).__name__ for o in optimizers))
    return f"{text}, {names or 'no optimizer'}: bytes per rank"


# -- A model's engine in a few lines of text ---------------------------------------------------------------------------


def summary(model: nn.Module) -> str:
    """The model's engine: backend, ranks, precision, parameters, and the bytes that lie on this rank. Local.

    Print it where it is wanted: ``accel.print(accel.summary(model))`` on rank 0, with ``every_rank=True`` on all.

    Args:
        model: a model that is set up.

    Raises:
        AccelError: it is not.
    """
    engine = registry.of_handle(model)
    place, options = engine.process.place, engine.options
    sizes = [shape.numel() for shape in engine.holdings.shapes.values()]
    total = sum(sizes)
    trainable = sum(n for n, p in zip(sizes, engine.parameters, strict=True) if p.requires_grad)
    optimizers = engine.optimizers
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    weights = _bytes(engine.holdings.shards(None)) / 1e6
    state = sum(_bytes(engine.holdings.shards(optimizer)) for optimizer in optimizers) / 1e6
    ranks = f"{place.world_size} rank{'s' if place.world_size > 1 else ''}"
    rows = {
        "backend": f"{engine.name} on {ranks} ({engine.process.device.type}), {engine.precision.name}",
        "options": f"{options}",
        "parameters": f"{total:,}: {trainable:,} trainable, {total - trainable:,} frozen",
        "optimizers": kinds,
        f"on rank {place.rank}": f"weights and buffers {weights:,.2f} MB, optimizer state {state:,.2f} MB",
    }
    width = max(map(len, rows))
    return "\n".join([engine.kind, *(f"  {key.ljust(width)}  {text}" for key, text in rows.items())])


def _bytes(shards: Iterable[Shard]) -> int:
    """What shards occupy; memory that several of them name counts once."""
    seen = {(s.tensor.data_ptr(), s.tensor.numel()): s.tensor.numel() * s.tensor.element_size() for s in shards}
    return sum(seen.values())


# -- Pictures, all in one style: bars that lie, each with its name before it and its size behind it ---------------------

#: Of parts that have no colour of their own.
COLOURS: Final = (
    *("#334155", "#c2410c", "#eab308", "#0f766e", "#7c3aed", "#94a3b8", "#be185d", "#65a30d", "#0369a1", "#a16207"),
)


@final
@dataclass(frozen=True, slots=True)
class Panel:
    """Bars in groups below each other, over one axis."""

    title: str
    unit: str  # of the axis
    #: By the heading of a group ("" for none) its bars: a name, sizes by part from left to right, and the text behind.
    groups: Mapping[str, Sequence[tuple[str, Mapping[str, float], str]]]
    colours: Mapping[str, str]  # of parts; a part without one in this table is an outline
    limit: float | None = None  # a dashed line across


def save_panels(panels: Sequence[Panel], path: str | os.PathLike[str]) -> Path:
    """Draw panels below each other; the form of the file is by its suffix, and its directory is made.

    AccelError where matplotlib is missing, or the file cannot be written there, or in such a form.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AccelError(
            f"the picture {os.fspath(path)} needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    bars = [bar for panel in panels for group in panel.groups.values() for bar in group]
    names = {part for _, sizes, _ in bars for part in sizes} if any(len(sizes) > 1 for _, sizes, _ in bars) else ()
    row = 0.3 if any("\n" in name for name, _, _ in bars) else 0.21
    heights = [0.9 + row * sum(len(group) + bool(heading) for heading, group in p.groups.items()) for p in panels]
    figure = Figure(figsize=(7.5, sum(heights) + 0.24 * -(-len(names) // 4)), layout="constrained")
    grid = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights}).flat
    parts: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=True):
        _draw(axes, panel, parts)
    if names:
        figure.legend(parts.values(), parts, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path = Path(refuse_url(os.fspath(path), AccelError))
    path = path if path.suffix else path.with_suffix(".png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        raise AccelError(f"the picture {path} cannot be written: {error}") from error
    return path


def _draw(axes: Any, panel: Panel, parts: dict[str, Any]) -> None:
    """One panel; ``parts`` takes what a legend shows."""
    outline = {"fill": False, "edgecolor": "#64748b", "linestyle": ":"}
    names, row = {}, 0
    visible = max((sum(s.values()) for bars in panel.groups.values() for _, s, _ in bars), default=0.0) / 500

    def write(text: str, end: float, points: str = "data", **font: Any) -> None:
        place = (text, (end, row), (4, 0), (points, "data"), "offset points")
        axes.annotate(*place, va="center", **font).set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})

    for heading, bars in panel.groups.items():
        if heading:
            write(heading, 0, "axes fraction", fontsize=9, weight="bold")
            row += 1
        for name, sizes, text in bars:
            end, names[row] = 0.0, name
            for part, size in sizes.items():
                style = {"color": panel.colours[part]} if part in panel.colours else outline
                bar = axes.barh(row, size, 0.78, end, **style)
                parts |= {part: bar} if size > visible else {}
                end += size
            write(text, end, fontsize=8)
            row += 1
    if panel.limit is not None:
        axes.axvline(panel.limit, color="black", linewidth=0.8, linestyle="--", zorder=0.5)
    axes.margins(x=0.14)
    axes.set_yticks(list(names), list(names.values()))
    axes.set_ylim(max(row, 1) - 0.4, -0.6)
    axes.set_title(textwrap.fill(panel.title, 50), fontsize=11, loc="left")
    axes.set_xlabel(panel.unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
