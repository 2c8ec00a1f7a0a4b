"""The page of the benchmarks: verdicts, sections that are taken again one by one, failures that stay visible."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import report, steps
from tests.bench.section import Data, Panel, Section, Verdict, answer, brief
from tests.bench.timing import Times


def section(name: str) -> Section:
    """One figure, with a limit of 1."""

    def judge(data: Data) -> list[Verdict]:
        return [Verdict("ratio", "1", f"{data['x']}", answer(data["x"], 1.0))]

    def draw(data: Data) -> list[Panel]:
        return [Panel("Ratios", "multiple", ["a"], {"accel": [data["x"]], "failed": [None]}, 1.0)]

    return Section(name, name.title(), lambda quick: {}, lambda data: [f"x = {data['x']}"], judge, draw)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "PAGE", tmp_path / "benchmarks.md")
    monkeypatch.setattr(report, "PICTURES", tmp_path / "benchmarks")
    monkeypatch.setattr(report, "KEPT", tmp_path / "build")
    return tmp_path / "benchmarks.md"


def test_a_section_is_taken_again_and_the_others_stay(page: Path) -> None:
    sections = [section("first"), section("second")]
    for one, value in zip(sections, (0.5, 2.0), strict=True):
        report.keep(one, report.taken({"x": value}, 3.0))
    report.write(sections, ["first"])
    text = page.read_text()
    assert "x = 0.5" in text
    assert "## Second\n\nNot measured yet." in text
    assert "| [Second](#second) | 0 | 0 | 0 | 0 |" in text

    report.write(sections, ["second"])
    report.keep(sections[0], report.taken({"x": 0.7}, 3.0))
    report.write(sections, ["second"])
    text = page.read_text()
    assert "x = 0.5" in text
    assert "x = 2.0" in text
    assert "| [First](#first) | 1 | 0 | 0 | 0 |\n| [Second](#second) | 0 | 0 | 1 | 0 |" in text
    assert {p.name for p in (page.parent / "benchmarks").iterdir()} == {"first.png", "second.png"}


def test_answers() -> None:
    assert answer(0.9, 1.0, 0.05) == "met"
    assert answer(0.98, 1.0, 0.05).startswith("met, within")
    assert answer(1.02, 1.0, 0.05).startswith("not decided")
    assert answer(1.2, 1.0, 0.05, "the log") == "**missed**: the log"
    trace = "rank 0 failed:\nTraceback (most recent call last):\n  File x\nValueError: a|b\n  more"
    assert brief(trace) == "ValueError: a/b"


def _broken() -> steps.Step:
    raise ImportError("No module named 'rival'")


def makers() -> steps.Makers:
    return {"raw": lambda: lambda: None, "rival": lambda: _broken()}


def test_a_contender_that_fails_is_named() -> None:
    data = steps.compare({"t": steps.Comparison("a table", 1, makers, ())}, 0.01)
    assert list(steps.rows(data, "t")) == ["raw"]
    assert "Failed, so without figures: rival (`ImportError: No module named 'rival'`)." in steps.tell(data)
    verdicts = steps.ratio_verdicts(data, "t", "step", "rival", "raw", "again", 1.0)
    assert [v.answer for v in verdicts] == ["**not measured**: ImportError: No module named 'rival'"]


def test_ratios_are_taken_within_a_round() -> None:
    base, own = Times([1.0, 5.0, 1.0], [1.0] * 3, [1.0] * 3), Times([2.0, 10.0, 2.0], [3.0] * 3, [1.0] * 3)
    row = steps.summarise({"base": base, "own": own})[1]
    assert (row.wall_ratio, row.cpu_ratio, row.wall, row.thread_over) == (2.0, 3.0, 2e6, 0.0)
