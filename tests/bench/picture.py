"""The pictures, in the style of those that accel draws itself; each contender has one colour in all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel import memory
from accel.memory import COLOURS

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


def _colour(name: str, others: Mapping[str, str]) -> str:
    found = next((colour for start, colour in CONTENDERS.items() if name.startswith(start)), None)
    return found or others[name]


def _panel(panel: Panel) -> memory.Panel:
    unit = panel.unit if panel.limit is None else f"{panel.unit} (dashed: {panel.limit:.3g})"
    others = dict(zip(panel.bars, COLOURS * 2, strict=False))
    if panel.stacked:
        parts = [{name: values[i] or 0.0 for name, values in panel.bars.items()} for i in range(len(panel.groups))]
        rows = [(group, part, f"{sum(part.values()):.3g}") for group, part in zip(panel.groups, parts, strict=True)]
        return memory.Panel(panel.title, unit, {"": rows}, others, panel.limit)
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
    return memory.Panel(panel.title, unit, groups, colours, panel.limit)


def draw(panels: Sequence[Panel], path: Path) -> None:
    """One below the other."""
    memory.save_panels([_panel(panel) for panel in panels], path)
