"""Pictures, all in one style: bars that lie, each with its name before it and its size behind it. matplotlib may be missing."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from ..errors import AccelError, refuse_url

#: Of parts that have no colour of their own.
COLOURS: Final = (
    *("#334155", "#c2410c", "#eab308", "#0f766e", "#7c3aed", "#94a3b8", "#be185d", "#65a30d", "#0369a1", "#a16207"),
)


@final
@dataclass(frozen=True, slots=True)
class Panel:
    """Bars in groups below each other, over one axis.

    Args:
        title: above all.
        unit: of the axis.
        groups: by the heading of a group ("" for none) its bars: a name, sizes by part from left to right, and the text behind.
        colours: of parts; a part without one in this table is an outline.
        limit: a dashed line across.
    """

    title: str
    unit: str
    groups: Mapping[str, Sequence[tuple[str, Mapping[str, float], str]]]
    colours: Mapping[str, str]
    limit: float | None = None


def save_panels(panels: Sequence[Panel], path: str | os.PathLike[str]) -> Path:
    """Draw panels below each other; the form of the file is by its suffix, and its directory is made.

    Raises:
        AccelError: matplotlib is missing; or the file cannot be written there, or in such a form.
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
                parts[part] = axes.barh(row, size, 0.78, end, **style)
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
