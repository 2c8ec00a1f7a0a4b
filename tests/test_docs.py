"""The documentation is true: its snippets run, and it knows every public name and every error."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import accel
from tests.distributed import run
from tests.programs import ROOT

PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
ERRORS = sorted(name for name in accel.__all__ if name.endswith("Error"))


def snippets(page: str) -> list[tuple[int, str]]:
    """Return the Python blocks of a page with their line numbers.

    A block is fenced by ```python alone, or stands in a comment that begins with ``<!-- run`` and readers don't see.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.finditer(r"^(?:```python|<!-- run)\n(.*?)^(?:```|-->)$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in blocks]


def execute(page: str, directory: Path) -> None:
    """Run a page's snippets in order, in one namespace and in ``directory``."""
    namespace: dict[str, Any] = {"__name__": page}
    before = Path.cwd()
    os.chdir(directory)
    try:
        for line, source in snippets(page):
            exec(compile("\n" * line + source, page, "exec"), namespace)
    finally:
        os.chdir(before)


RUNNABLE = [page for page in PAGES if snippets(page)]


@pytest.mark.parametrize("page", RUNNABLE)
def test_snippets(page: str, tmp_path: Path) -> None:
    run(1, execute, page, tmp_path)


@pytest.mark.parametrize("page", RUNNABLE)
def test_snippets_on_two_ranks(page: str, tmp_path: Path) -> None:
    run(2, execute, page, tmp_path)


def test_the_loop_and_the_first_page_are_run() -> None:
    assert {"docs/index.md", "docs/loop.md"} <= set(RUNNABLE)


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    documented = {name.rpartition(".")[2] for name in re.findall(r"^::: (accel\.\S+)$", text, re.MULTILINE)}
    assert set(accel.__all__) <= documented


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_its_section(error: str) -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert f"\n### {error}\n" in text


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 5
    assert not [target for target in targets if not (ROOT / target.partition("#")[0]).exists()]


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")
    assert not [page for page in PAGES if page.startswith("docs/") and f": {Path(page).name}\n" not in config]
