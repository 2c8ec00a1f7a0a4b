"""What the mutants of the package are, and what tests them."""

from __future__ import annotations

import dis
from pathlib import Path

import pytest

from accel.process import environments
from tests import house, lines, mutants
from tests.programs import ROOT

SOURCE = '''"""A text: a == b and not c."""
if TYPE_CHECKING:
    from a import b as c
def f(x, y: "int" = 1) -> "a < b":
    """Another: a < b."""
    logger.info("x", x == y)
    if not x or y not in x:
        raise ValueError("x" if x is y else "y")
    é = g(x > (y)) and x; g(
        x,
    )
'''


PROGRAM = """
from accel.process import environments
from tests.programs import scripts

def test_two():
    environments._tasks_on_node("2", 0)
    scripts("from accel.process import environments; environments.expand_hosts('a[1-2]')", {})

def test_one():
    assert environments._tasks_on_node("2", 0) == 3
"""


def test_what_is_changed() -> None:
    source = SOURCE.encode()
    made = mutants.mutants_of("f.py", source)
    assert [(m.line, m.before, m.after) for m in made] == [
        (7, "or", "and"),
        (7, "not", ""),
        (7, "not in", "in"),
        (9, "and", "or"),
        (9, ">", "<="),
        (9, "g(\n        x,\n    )", "pass"),
    ]
    assert [m.apply(source).count(b"\n") for m in made] == [11] * 5 + [9]
    with pytest.raises(AssertionError, match=r"f\.py has changed"):
        made[0].apply(source[1:])


def test_no_place_of_the_package_is_misread() -> None:
    for file, path in house.FILES.items():
        mutants.mutants_of(file, path.read_bytes())


def test_tests_are_chosen_by_the_lines_they_run() -> None:
    record = lines.Record()
    record.seconds = {"t::a[1]": 2.0, "t::a[2]": 1.0, "t::b": 3.0, "t::c": 0.5, "t::slow": 90.0}
    record.tests["f.py", 7] = {"t::a[1]", "t::a[2]", "t::b", "t::slow", "t::failed"}
    record.tests["f.py", 8] = {"t::c"}
    assert record.select("f.py", 7, 60) == ["t::a[2]", "t::b"]
    assert record.select("f.py", 7, 100) == ["t::a[2]", "t::b", "t::slow", "t::a[1]"]
    assert record.select("f.py", 7, 0) == ["t::a[2]"]
    assert record.select("f.py", 9, 1.5) == ["t::c", "t::a[2]"]
    assert record.select("g.py", 1, 60) == []


def test_lines_are_recorded_in_the_processes_that_a_test_starts(tmp_path: Path) -> None:
    mutants.copy_tree(tmp_path)
    for path in (tmp_path / "tests").rglob("test_*.py"):
        path.unlink()
    (tmp_path / "tests/test_two.py").write_text(PROGRAM)
    record = lines.record(tmp_path, 0)
    assert list(record.seconds) == ["tests/test_two.py::test_two"]  # the other has failed
    for name, tests in {"expand_hosts": ["two"], "_expand": ["two"], "_tasks_on_node": ["two", "one"]}.items():
        code = getattr(environments, name).__code__
        last = max(line or 0 for _, line in dis.findlinestarts(code))  # from 3.13 on some have none
        found = record.tests["accel/process/environments.py", last]
        assert found == {f"tests/test_two.py::test_{test}" for test in tests}


def test_results_lie_outside_of_the_repository(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mutants.main(["--results", str(ROOT / "build" / "mutants.jsonl")])
    assert "outside of the repository" in capsys.readouterr().err
