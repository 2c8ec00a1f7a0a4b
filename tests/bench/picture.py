"""The pictures: bars in groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from .section import Panel

#: accel's bars stand out; those of raw torch and the rivals are grey.
OURS = ("#c2410c", "#ea8a4d", "#f3b48a", "#7c2d12")
OTHERS = ("#334155", "#64748b", "#94a3b8", "#b6c2d1", "#d3dae4", "#475569", "#0f766e")


def _colours(names: Sequence[str]) -> dict[str, str]:
    ours, others, found = iter(OURS), iter(OTHERS * 2), {}
    for name in names:
        found[name] = next(ours, OURS[-1]) if name.startswith("accel") else next(others)
    return found


def _stack(axes: Axes, panel: Panel) -> None:
    """One bar for each group, from the first part at the bottom to the last; its sum above."""
    shades, tops = (*OURS, *OTHERS), [0.0] * len(panel.groups)
    for colour, (name, values) in zip(shades * 2, panel.bars.items(), strict=False):
        sizes = [value or 0.0 for value in values]
        axes.bar(range(len(sizes)), sizes, 0.6, bottom=tops, color=colour, label=name)
        tops = [top + size for top, size in zip(tops, sizes, strict=True)]
    for place, top in enumerate(tops):
        axes.annotate(
            f"{top:.3g}", (place, top), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=8
        )


def _panel(axes: Axes, panel: Panel) -> None:
    if panel.stacked:
        _stack(axes, panel)
    else:
        _bars(axes, panel)
    if panel.limit is not None:
        axes.axhline(panel.limit, color="black", linewidth=0.8, linestyle="--")
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(range(len(panel.groups)), panel.groups, fontsize=8)
    axes.set_title(panel.title, fontsize=11)
    axes.set_ylabel(panel.unit)
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=panel.stacked)


def _bars(axes: Axes, panel: Panel) -> None:
    width = 0.84 / len(panel.bars)
    colours = _colours(list(panel.bars))
    for i, (name, values) in enumerate(panel.bars.items()):
        places = [k + (i - (len(panel.bars) - 1) / 2) * width for k in range(len(panel.groups))]
        drawn = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
        axes.bar([p for p, _ in drawn], [v for _, v in drawn], width * 0.92, color=colours[name], label=name)
        for place, value in drawn:
            axes.annotate(
                f"{value:.3g}", (place, value), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=7
            )


def draw(panels: Sequence[Panel], path: Path) -> None:
    """One below the other."""
    figure = Figure(figsize=(11, 3.9 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
        _panel(axes, panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
