"""Text in pictures does not overlap, and a contender has one color."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from tests.bench import picture
from tests.bench.section import Panel

pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each figure instead of its file."""
    from matplotlib.figure import Figure

    seen: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: seen.append(self))
    return seen


def texts(figure: Any) -> dict[str, Any]:
    """The boxes of all that is written."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    beyond = {t for axes in figure.axes for t in axes.get_xticklabels() if t.get_position()[0] > axes.get_xlim()[1]}
    found = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text() and t not in beyond]
    return {f"{i}: {t.get_text()}": t.get_window_extent() for i, t in enumerate(found)}


def read(figure: Any) -> list[str]:
    """What is written, if nothing of it lies over another or beyond the edge."""
    boxes = texts(figure)
    assert not [(a, b) for (a, x), (b, y) in itertools.combinations(boxes.items(), 2) if x.overlaps(y)]
    inside = figure.bbox.padded(2)
    assert not [name for name, box in boxes.items() if not (inside.x0 <= box.x0 and box.x1 <= inside.x1)]
    return [name.partition(": ")[2] for name in boxes]


def test_the_memory_of_many_backends(tmp_path: Path, figures: list[Any]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    accel.memory_report(model, optimizer, ranks=(1, 2, 8)).save_plot(tmp_path / "memory.png")
    assert {"GiB per rank", "parameters", "optimizer_state", "buckets", "fsdp on 8"} <= set(read(figures[0]))


def test_a_contender_has_one_colour_in_all_panels(tmp_path: Path, figures: list[Any]) -> None:
    groups = [f"{n}: chunks=8, checkpoint='except_last', balance=[2, 2, 2, 10]" for n in range(6)]
    one = {"raw DDP": [1.0] * 6, "accel, `check`": [0.98] * 6, "DCP": [3.0] * 6}
    two = {"DCP": [1.0] * 6, "one with a name that is longer than a line of the picture": [2.0] * 6, "accel": [1.1] * 6}
    picture.draw([Panel("A", "seconds", groups, one, 1.0), Panel("B", "seconds", groups, two)], tmp_path / "x.png")
    assert "accel, check" in read(figures[0])
    colours: dict[str, set[Any]] = {}
    for axes in figures[0].axes:
        for bar, label in zip(axes.patches, axes.get_yticklabels(), strict=True):
            colours.setdefault(label.get_text().partition(",")[0], set()).add(bar.get_facecolor())
    assert {name: len(found) for name, found in colours.items() if name in ("accel", "DCP")} == {"accel": 1, "DCP": 1}
