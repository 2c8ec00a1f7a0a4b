"""What all benchmarks share: a section is measured, told as tables, held against its targets and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Of whatever a section measures: what JSON can hold.
Data = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A target beside its figure."""

    what: str
    limit: str
    figure: str
    answer: str


@dataclass(frozen=True)
class Panel:
    """Bars in groups, or on top of each other; None leaves a bar out. ``limit`` is a line across."""

    title: str
    unit: str
    groups: Sequence[str]
    bars: dict[str, Sequence[float | None]]
    limit: float | None = None
    stacked: bool = False


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Args:
        measure: runs it, short if told so; what it gives survives a trip through JSON.
        tell: its Markdown, from what was measured.
        judge: its targets.
        draw: its picture's panels.
    """

    name: str
    title: str
    measure: Callable[[bool], Data]
    tell: Callable[[Data], list[str]]
    judge: Callable[[Data], Iterable[Verdict]]
    draw: Callable[[Data], list[Panel]] = field(default=lambda data: [])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def answer(value: float, limit: float, noise: float = 0.0, cause: str = "") -> str:
    """Whether a value is at most its limit, as far as the run's noise lets one say so."""
    if value <= limit:
        return "met" if limit - value >= noise else f"met, within this run's noise of {noise:.3g}"
    if value - limit <= noise:
        return f"not decided: the excess of {value - limit:.3g} is within this run's noise of {noise:.3g}"
    return f"**missed**: {cause}" if cause else "**missed**"


def brief(error: BaseException | str) -> str:
    """An error in one line of a table: what was raised last, with its class."""
    if isinstance(error, BaseException):
        error = f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["no message"]
    # Of a traceback the line that begins at the margin; what follows it belongs to the message.
    raised = [line for line in error.splitlines() if line[:1].strip() and not line.startswith("Traceback")]
    chosen = (raised[-1] if len(lines) > 1 and raised else lines[0]).replace("|", "/")
    return chosen if len(chosen) <= 160 else f"{chosen[:157]}..."


def failures(failed: dict[str, str]) -> list[str]:
    """Those that could not take part, and why; nobody is left out silently."""
    return [f"Failed, so without figures: {name} (`{error}`)." for name, error in failed.items()]
