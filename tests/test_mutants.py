"""What the mutants of the package are, and what tests them."""

from __future__ import annotations

import pytest

from tests import house, mutants
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


def test_every_file_has_tests() -> None:
    for path in house.FILES.values():
        file = str(path.relative_to(ROOT))
        assert all((ROOT / test).exists() for test in mutants.area_of(file)), mutants.area_of(file)
        mutants.mutants_of(file, path.read_bytes())  # no place of it is misread


def test_results_lie_outside_of_the_repository(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mutants.main(["--results", str(ROOT / "build" / "mutants.jsonl")])
    assert "outside of the repository" in capsys.readouterr().err
