"""The snippets of the documentation run. It has a section for each error and a link to each page."""

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


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("page", RUNNABLE)
def test_snippets(page: str, world: int, tmp_path: Path) -> None:
    run(world, execute, page, tmp_path)


def test_every_error_has_its_section() -> None:
    assert {"docs/index.md", "docs/loop.md"} <= set(RUNNABLE)
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert not [name for name in accel.__all__ if name.endswith("Error") and f"\n### {name}\n" not in text]


def test_links_lead_to_pages() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(targets) > 5
    assert not [target for target in targets if not (ROOT / target.partition("#")[0]).exists()]
    config = (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")
    assert not [page for page in PAGES if page.startswith("docs/") and f": {Path(page).name}\n" not in config]
