"""The pictures: horizontal bars, each with its name and its size. Each contender has one colour in all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from .section import Panel

#: By what the name of a contender or part begins with; the first that fits counts.
CONTENDERS = {
    "accel": "#c2410c",
    "raw": "#334155",
    "memcpy": "#334155",
    "one checksum": "#64748b",
    "torch": "#0f766e",
    "Accelerate": "#0369a1",
    "Fabric": "#7c3aed",
    "DCP": "#65a30d",
    "safetensors": "#a16207",
    "fairscale": "#be185d",
    "DeepSpeed": "#eab308",
    "prototype": "#94a3b8",
    "2 ranks, theory": "#cbd5e1",
    "4 ranks, theory": "#cbd5e1",
    "2 ranks": "#c2410c",
    "4 ranks": "#ea8a4d",
}


#: Of parts that have no colour of their own.
COLOURS = (
    *("#334155", "#c2410c", "#eab308", "#0f766e", "#7c3aed", "#94a3b8", "#be185d", "#65a30d", "#0369a1", "#a16207"),
)


@final
@dataclass(frozen=True, slots=True)
class _Bars:
    """Bars in groups below each other, over one axis."""

    title: str
    unit: str  # of the axis
    #: By the heading of a group ("" for none) its bars: a name, sizes by part from left to right, and the text behind.
    groups: Mapping[str, Sequence[tuple[str, Mapping[str, float], str]]]
    colours: Mapping[str, str]  # of parts; a part without one in this table is an outline
    limit: float | None = None  # a dashed line across


def _colour(name: str, others: Mapping[str, str]) -> str:
    found = next((colour for start, colour in CONTENDERS.items() if name.startswith(start)), None)
    return found or others[name]


def _bars(panel: Panel) -> _Bars:
    unit = panel.unit if panel.limit is None else f"{panel.unit} (dashed: {panel.limit:.3g})"
    others = dict(zip(panel.bars, COLOURS * 2, strict=False))
    if panel.stacked:
        parts = [{name: values[i] or 0.0 for name, values in panel.bars.items()} for i in range(len(panel.groups))]
        rows = [(group, part, f"{sum(part.values()):.3g}") for group, part in zip(panel.groups, parts, strict=True)]
        return _Bars(panel.title, unit, {"": rows}, others, panel.limit)
    colours = {name: _colour(name, others) for name in panel.bars}
    names = {name: textwrap.fill(name.replace("`", ""), 36) for name in panel.bars}
    groups = {
        group.replace("`", ""): [
            (names[name], {name: value}, f"{value:.3g}")
            for name, values in panel.bars.items()
            if (value := values[i]) is not None
        ]
        for i, group in enumerate(panel.groups)
    }
    return _Bars(panel.title, unit, groups, colours, panel.limit)


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels below each other."""
    from matplotlib.figure import Figure

    converted = [_bars(panel) for panel in panels]
    bars = [bar for panel in converted for group in panel.groups.values() for bar in group]
    names = {part for _, sizes, _ in bars for part in sizes} if any(len(sizes) > 1 for _, sizes, _ in bars) else ()
    row = 0.3 if any("\n" in name for name, _, _ in bars) else 0.21
    heights = [0.9 + row * sum(len(group) + bool(heading) for heading, group in p.groups.items()) for p in converted]
    figure = Figure(figsize=(7.5, sum(heights) + 0.24 * -(-len(names) // 4)), layout="constrained")
    grid = figure.subplots(len(converted), squeeze=False, gridspec_kw={"height_ratios": heights}).flat
    parts: dict[str, Any] = {}
    for axes, panel in zip(grid, converted, strict=True):
        _draw(axes, panel, parts)
    if names:
        figure.legend(parts.values(), parts, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _draw(axes: Any, panel: _Bars, parts: dict[str, Any]) -> None:
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
