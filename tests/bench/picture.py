"""The pictures: horizontal bars, each with its name and its size. Each contender has one color in all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .section import Panel

#: By the start of a contender's name. The first that fits counts.
CONTENDERS = {
    "accel": "#c2410c",
    "raw": "#334155",
    "memcpy": "#334155",
    "torch": "#0f766e",
    "Accelerate": "#0369a1",
    "Fabric": "#7c3aed",
    "DCP": "#65a30d",
    "fairscale": "#be185d",
    "2 ranks, theory": "#cbd5e1",
    "4 ranks, theory": "#cbd5e1",
    "2 ranks": "#c2410c",
    "4 ranks": "#ea8a4d",
}
#: Of other names, in the order of a panel.
COLORS = ["#334155", "#c2410c", "#eab308", "#0f766e", "#7c3aed", "#94a3b8", "#be185d", "#65a30d", "#0369a1", "#a16207"]


def _color(name: str, number: int) -> str:
    return next((color for start, color in CONTENDERS.items() if name.startswith(start)), COLORS[number % len(COLORS)])


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels below each other."""
    from matplotlib.figure import Figure

    heights = []
    for panel in panels:
        rows = len(panel.groups) * (len(panel.bars) + 1)
        heights.append(0.9 + rows * (0.3 if any(len(name) > 36 for name in panel.bars) else 0.21))
    figure = Figure(figsize=(7.5, sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights}).flat
    for axes, panel in zip(grid, panels, strict=True):
        _finish(axes, panel, _draw_bars(axes, panel))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _write(axes: Any, text: str, row: int, end: float, points: str = "data", **font: Any) -> None:
    annotation = axes.annotate(text, (end, row), (4, 0), (points, "data"), "offset points", va="center", **font)
    annotation.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})


def _draw_bars(axes: Any, panel: Panel) -> list[str]:
    """Draw the bars of each group below its heading. Return the names of the rows, "" for a heading."""
    names: list[str] = []
    for place, group in enumerate(panel.groups):
        _write(axes, group.replace("`", ""), len(names), 0, "axes fraction", fontsize=9, weight="bold")
        names.append("")
        for number, (name, values) in enumerate(panel.bars.items()):
            size = values[place]
            if size is None:
                continue
            axes.barh(len(names), size, 0.78, color=_color(name, number))
            _write(axes, f"{size:.3g}", len(names), size, fontsize=8)
            names.append(textwrap.fill(name.replace("`", ""), 36))
    return names


def _finish(axes: Any, panel: Panel, names: list[str]) -> None:
    unit = panel.unit
    if panel.limit is not None:
        axes.axvline(panel.limit, color="black", linewidth=0.8, linestyle="--", zorder=0.5)
        unit = f"{unit} (dashed: {panel.limit:.3g})"
    rows = [row for row, name in enumerate(names) if name]
    axes.margins(x=0.14)
    axes.set_yticks(rows, [names[row] for row in rows])
    axes.set_ylim(max(len(names), 1) - 0.4, -0.6)
    axes.set_title(textwrap.fill(panel.title, 50), fontsize=11, loc="left")
    axes.set_xlabel(unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
