"""A section of the page: it is measured, told as tables, held against its targets and drawn.

The text around the figures is in docs/benchmarks.md itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
