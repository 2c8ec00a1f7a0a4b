"""The pictures: horizontal bars, each with its name and its size. Each contender has one color in all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .section import Panel

#: By the start of a contender's name. The first that fits counts.
CONTENDERS = {"accel": "#c2410c", "raw": "#334155", "memcpy": "#334155", "torch": "#0f766e", "Accelerate": "#0369a1"}
CONTENDERS |= {"Fabric": "#7c3aed", "DCP": "#65a30d", "fairscale": "#be185d"}
#: Of other names, in the order of a panel.
COLORS = ["#334155", "#c2410c", "#eab308", "#0f766e", "#7c3aed", "#94a3b8", "#be185d", "#65a30d", "#0369a1", "#a16207"]


def _color(name: str, number: int) -> str:
    return next((color for start, color in CONTENDERS.items() if name.startswith(start)), COLORS[number % len(COLORS)])


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels below each other."""
    from matplotlib.figure import Figure

    heights = [0.9 + 0.25 * len(panel.groups) * (len(panel.bars) + 1) for panel in panels]
    figure = Figure(figsize=(7.5, sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights}).flat
    for axes, panel in zip(grid, panels, strict=True):
        _draw_bars(axes, panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _draw_bars(axes: Any, panel: Panel) -> None:
    """Draw the bars of each group below its heading."""
    labels: list[str] = []
    for place, group in enumerate(panel.groups):
        labels.append(f"{group}:")
        for number, (name, sizes) in enumerate(panel.bars.items()):
            size = sizes[place]
            if size is not None:
                bar = axes.barh(len(labels), size, 0.78, color=_color(name, number))
                axes.bar_label(bar, fmt="%.3g", padding=4, fontsize=8)
                labels.append(name)
    unit = panel.unit
    if panel.limit is not None:
        axes.axvline(panel.limit, color="black", linewidth=0.8, linestyle="--", zorder=0.5)
        unit = f"{unit} (dashed: {panel.limit:.3g})"
    axes.margins(x=0.14)
    axes.set_yticks(range(len(labels)), [textwrap.fill(label.replace("`", ""), 40) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_title(textwrap.fill(panel.title, 50), fontsize=11, loc="left")
    axes.set_xlabel(unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
