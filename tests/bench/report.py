"""Sections of docs/benchmarks.md: measured, told as tables, held against targets, drawn, and put on the page.

The text around the figures is in docs/benchmarks.md itself. Figures are kept, so that one section can be measured again
without the others.
"""

from __future__ import annotations

import json
import os
import platform
import re
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

#: Figures of a section, as JSON can hold them. "failed" names each missing figure with its error.
Data = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A target beside its figure."""

    target: str
    limit: str
    figure: str
    answer: str


@dataclass(frozen=True)
class Panel:
    """Bars in groups. None leaves a bar out. ``limit`` is a line across."""

    title: str
    unit: str
    groups: Sequence[str]
    bars: dict[str, Sequence[float | None]]
    limit: float | None = None


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Args:
        measure: measures them, in a short time if its argument is true.
        tell: makes the tables.
        judge: holds the figures against the targets.
        draw: makes the panels of the picture.
    """

    name: str
    title: str
    measure: Callable[[bool], Data]
    tell: Callable[[Data], list[str]]
    judge: Callable[[Data], Iterable[Verdict]] = lambda data: ()
    draw: Callable[[Data], list[Panel]] = lambda data: []


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def judged(
    target: str, value: float, limit: float, form: str = "{:.2f}", noise: float = 0.0, cause: str = ""
) -> Verdict:
    """Say whether a value is at most its limit, as far as the noise of the run allows it."""
    excess = value - limit
    within = f"within this run's noise of {form.format(noise)}"
    if excess <= 0:
        answer = "met" if -excess >= noise else f"met, {within}"
    elif excess <= noise:
        answer = f"not decided: the excess is {within}"
    else:
        answer = f"**missed**: {cause}" if cause else "**missed**"
    return Verdict(target, form.format(limit), form.format(value), answer)


def brief(error: BaseException | str) -> str:
    """Give an error, or the last one of a traceback, in one line."""
    if isinstance(error, BaseException):
        error = f"{type(error).__name__}: {error}"
    # Of a traceback, only the raised error begins at the margin.
    raised = [line for line in error.splitlines() if line[:1].strip() and not line.startswith("Traceback")]
    line = (raised or ["no message"])[-1 if "Traceback" in error else 0]
    return line.strip().replace("|", "/")[:160]


# -- pictures: horizontal bars, each with its name and its size -----------------------------------------------------------

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


# -- the page ---------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
PAGE, PICTURES, KEPT = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks", ROOT / "build" / "bench"
HEAD = ("target", "limit", "figure", "verdict")
#: The answers to targets begin like this.
KINDS = ("met", "not decided", "missed", "not measured")


def taken(data: Data, seconds: float) -> Data:
    """Add place, time and duration to the figures of a section."""
    named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model = named[1] if named else platform.machine()
    machine = f"{os.cpu_count()} cores, {model}, torch {torch.__version__}"
    return {"machine": machine, "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds), "data": data}


def keep(section: Section, record: Data) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{section.name}.json").write_text(json.dumps(record, indent=1))


def text(section: Section, record: Data) -> str:
    """Write the figures of a section."""
    data = record["data"]
    verdicts = list(section.judge(data))
    verdicts += [Verdict(name, "", "none", f"**not measured**: `{e}`") for name, e in data["failed"].items()]
    parts = [f"Taken {record['date']} in {record['seconds']} s on {record['machine']}."]
    parts += [table(HEAD, [[v.target, v.limit, v.figure, v.answer] for v in verdicts])] if verdicts else []
    if section.draw(data):
        parts.append(f"![{section.title}](benchmarks/{section.name}.png)")
    return "\n\n".join([*parts, *section.tell(data)])


def _counted(section: Section, page: str) -> list[str]:
    """Count the verdicts of a section on the page, for the summary."""
    content = _place(section.name).search(page)
    _, _, below = (content[2] if content else "").partition(f"| {' | '.join(HEAD)} |\n")
    lines = below.partition("\n\n")[0].splitlines()[1:]
    answers = [line.rstrip(" |").rpartition(" | ")[2].strip("*") for line in lines]
    count = Counter(re.split(r"[,:*]", answer)[0] for answer in answers)
    anchor = re.sub(r"[^\w\- ]", "", section.title.lower()).replace(" ", "-")
    return [f"[{section.title}](#{anchor})", *(str(count[kind]) for kind in KINDS)]


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- section: {name} -->\n\n)(.*?)(\n\n<!-- end: {name} -->)", re.DOTALL)


def _put(page: str, name: str, content: str) -> str:
    page, number = _place(name).subn(lambda match: match[1] + content + match[3], page)
    assert number == 1, f"{PAGE} has no place for section {name}"
    return page


def write(sections: Sequence[Section], again: Sequence[str]) -> None:
    """Put kept figures of the sections named in ``again`` on the page, draw their pictures, and count all verdicts."""
    page = PAGE.read_text(encoding="utf-8")
    for section in sections:
        kept = KEPT / f"{section.name}.json"
        if section.name in again and kept.exists():
            record = json.loads(kept.read_text())
            page = _put(page, section.name, text(section, record))
            if panels := section.draw(record["data"]):
                draw(panels, PICTURES / f"{section.name}.png")
    page = _put(page, "targets", table(["section", *KINDS], [_counted(section, page) for section in sections]))
    PAGE.write_text(page, encoding="utf-8")
